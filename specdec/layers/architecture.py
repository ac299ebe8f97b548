"""Architectures: the tensors, packed weights, buffers and forward program of a model family.

Shapes: T tokens of this pass, D dim, L layers, V vocab.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from specdec.kernels import MAX_BATCH_TOKENS, copy_rows
from specdec.layers.buffers import Allocator, Buffers, BufferSizes, LayerBuffers, RopeTables, pad
from specdec.layers.weights import TOKEN_TABLE, Plans, Shapes, Tensors, WeightPlan, Weights
from specdec.model_config import ModelConfig
from specdec.quant import WeightFormat
from specdec.runtime.op_program import Executor, Op, Program
from specdec.runtime.simd import MAX_TILE_TOKENS, Float32

NO_PROGRAMS: Mapping[int, Program] = MappingProxyType({})


class Architecture(ABC):
    """A kind of forward pass. It holds no config, weights or buffers; its methods get those of a model.

    Attributes:
        can_run_trees: Whether token trees are supported.
        releases_windows: Whether keys and values that no token can see any more may be released before a sequence ends.
        keeps_final_norm: Whether the output of the last norm can be requested as a hidden state.
        n_rewindable_states: Number of last sequence lengths for which buffers hold the recurrent state. A sequence can be
            truncated by one token less; beyond that it runs again. The pass at position 0 takes no state. 0: no such state.
    """

    can_run_trees: ClassVar[bool] = False
    releases_windows: ClassVar[bool] = False
    keeps_final_norm: ClassVar[bool] = False
    n_rewindable_states: ClassVar[int] = 0

    @abstractmethod
    def shapes(self, config: ModelConfig) -> Shapes:
        """Return the shape of each tensor in a file of the family, by name."""

    @abstractmethod
    def plans(self, config: ModelConfig) -> Plans:
        """Return the matrices and vectors to pack out of the tensors, by name; includes "embedding" and "classifier"."""

    @abstractmethod
    def allocate_layers(self, config: ModelConfig, b: Buffers) -> None:
        """Fill b.layers with what the layers keep between passes, and with their RoPE tables."""

    @abstractmethod
    def embed(self, config: ModelConfig, weights: Weights, b: Buffers) -> Program:
        """Return the program that sets x to the tokens' embeddings."""

    @abstractmethod
    def layers(self, config: ModelConfig, weights: Weights, b: Buffers) -> list[Program]:
        """Return a program for each layer, which updates x."""

    @abstractmethod
    def classify(self, config: ModelConfig, weights: Weights, b: Buffers) -> Program:
        """Return the program that computes the logits of x."""

    @abstractmethod
    def final_norm(self, config: ModelConfig, weights: Weights, b: Buffers) -> Op:
        """Return the op that writes the last norm of x, of all tokens, to b.normed."""

    def program(self, config: ModelConfig, weights: Weights, b: Buffers, before: Mapping[int, Program] = NO_PROGRAMS) -> Program:
        """Return the forward pass over weights and buffers: embed, then each layer, then classify.

        Args:
            config: The model's config.
            weights: The model's weights.
            b: The model's buffers.
            before: Program to run in front of the layer of each index; the index n_layers or n_layers + 1 stands for the place
                between the last layer and classify.
        """
        program = [*self.embed(config, weights, b)]
        for i, layer in enumerate([*self.layers(config, weights, b), [], []]):
            program += [*before.get(i, []), *layer]
        return [*program, *self.classify(config, weights, b)]

    # Weights

    def plan_weights(self, config: ModelConfig, tensors: Tensors, weight_format: WeightFormat | None = None) -> WeightPlan:
        """Return the plan of a model's weights, made of tensors in the shapes of `shapes`; see `WeightPlan`."""
        return WeightPlan(self.plans(config), tensors, weight_format, TOKEN_TABLE if config.per_layer_inputs else "")

    def pack(
        self,
        config: ModelConfig,
        tensors: Tensors,
        weight_format: WeightFormat | None = None,
        progress: Callable[[float], object] = lambda share: None,
        keep: Callable[[Float32, str], object] = lambda array, format_name: None,
    ) -> Weights:
        """Return a model's packed weights; see `WeightPlan.pack`."""
        return self.plan_weights(config, tensors, weight_format).pack(progress, keep)

    # Buffers

    def make_buffers(self, config: ModelConfig, weights: Weights, sizes: BufferSizes, new: Allocator) -> Buffers:
        """Return the buffers of a sequence, which `new` makes.

        Raises:
            MemoryError: If there is not enough memory.
        """
        n_hidden = sizes.n_hidden_layers * config.dim
        b = Buffers(
            sizes,
            new,
            tokens=new.numbers(),
            logits=new.rows(weights.matrices["classifier"].n_rows),
            x=new.rows(pad(config.dim), 1),
            normed=new.rows(pad(config.dim), sizes.n_threads),
            scratches=[new.rows(weights.scratch_words, sizes.n_threads) for _ in range(weights.max_shards)],
            scores=new.scores(sizes.n_threads, MAX_TILE_TOKENS, sizes.n_positions),
            experts_read=new.scratch(config.n_layers, dtype=np.int64),
            depths=new.sequence(MAX_BATCH_TOKENS, dtype=np.int64),
            paths=new.sequence(MAX_BATCH_TOKENS, MAX_BATCH_TOKENS, dtype=np.int64),
            layers=[LayerBuffers() for _ in range(config.n_layers)],
            hidden_states=new.sequence(sizes.n_positions, n_hidden, positions_axis=0) if n_hidden else None,
        )
        self.allocate_layers(config, b)
        return b

    def make_executors(self, config: ModelConfig, weights: Weights, b: Buffers, hidden_layers: tuple[int, ...]) -> list[Executor]:
        """Return the executor of normal sequences, and that of sequences with long RoPE factors if they differ.

        The executors keep hidden states before the given layers. They are stored in the shared buffers, so each is made once.
        """
        known, key = b.new.shared.executors, (b.sizes.n_positions, hidden_layers)
        own_arrays = [each.array for each in b.new.own]
        if key in known:
            return [executor.with_sequence_arrays(own_arrays) for executor in known[key]]
        copies = dict[int, Program]()
        for i, layer in enumerate(hidden_layers):
            is_normed = layer > config.n_layers
            assert b.hidden_states is not None
            copy = copy_rows(b.hidden_states, b.normed if is_normed else b.x, i * config.dim, 0, config.dim, True)
            copies[layer] = [[*([self.final_norm(config, weights, b)] if is_normed else []), copy]]
        ropes: list[RopeTables | None] = [None] if b.long_rope is None else [None, b.long_rope]
        executors = []
        for rope in ropes:
            own = replace(b, layers=[replace(layer, rope=rope or layer.rope) for layer in b.layers])
            executors.append(Executor(self.program(config, weights, own, copies), own_arrays, b.new.token_arrays))
        known[key] = [executor.without_sequence_arrays() for executor in executors]
        return executors
