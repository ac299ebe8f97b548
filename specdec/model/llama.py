"""Llama (Touvron et al. 2023, arXiv:2307.09288) and families like it: an embedding, layers of two blocks each, and a classifier.

The config determines which blocks a layer has, and how they differ from Llama's. A tensor that all layers have holds one matrix
for each layer. A tensor that only some layers have, or that holds a matrix for each expert or head, has the layer's number in its
name: "2.wq".
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from specdec.kernels import MAX_BATCH_TOKENS, add_bias, add_positions, copy_rows, head_norm, scale_rows
from specdec.layers.activations import softcap
from specdec.layers.attention import Attention
from specdec.layers.block import Block, norm
from specdec.layers.buffers import Allocator, Buffers, BufferSizes, LayerBuffers, RopeTables, pad
from specdec.layers.mlp import MLP
from specdec.layers.rope import make_rope_tables
from specdec.layers.weights import TOKEN_TABLE, FusedTensors, Plans, Shapes, Tensors, WeightPlan, Weights, fuse_tensors
from specdec.mixer_config import DeltaNetConfig, Mamba2Config, ShortConvConfig
from specdec.model_config import TARGET_KV_LAYER, ModelConfig
from specdec.runtime.op_program import Executor, Program
from specdec.runtime.simd import MAX_TILE_TOKENS, PANEL_ROWS, Float32

if TYPE_CHECKING:
    from specdec.quant import WeightFormat

# Packed tensors that belong to no layer
GLOBAL_TENSORS = ("tok_emb", "wcls", "wcls_bias", "pos_emb", "rms_final", "rms_final_bias", "inputs", "inputs_norm_in")
FUSED_GLOBALS = {
    "embedding": FusedTensors(("tok_emb",)),
    "classifier": FusedTensors(("wcls",)),
    "pos_emb": FusedTensors(("pos_emb",), is_table=True),
}


def get_blocks(config: ModelConfig, i: int) -> list[type[Block]]:
    """Return layer i's blocks in order: attention or a mixer, an MLP or experts, and per-layer inputs, as far as it has them.

    A block that only some models have is imported when such a model needs it.
    """
    layer = config.layer_config(i)
    blocks = list[type[Block]]()
    if layer.blocks != "second":
        blocks.append(_get_mixer(layer))
    if layer.blocks != "first":
        blocks.append(_get_mlp(config, i))
    if config.per_layer_inputs:
        from specdec.layers.per_layer_inputs import PerLayerInputs

        blocks.append(PerLayerInputs)
    return blocks


def _get_mixer(layer: ModelConfig) -> type[Block]:
    """Return the block that mixes positions, given the config of a layer."""
    if isinstance(layer.mixer, Mamba2Config):
        from specdec.layers.mamba2 import Mamba2, ParallelMamba2

        return ParallelMamba2 if layer.mixer.is_parallel else Mamba2
    if isinstance(layer.mixer, DeltaNetConfig):
        from specdec.layers.delta_net import DeltaNet

        return DeltaNet
    if isinstance(layer.mixer, ShortConvConfig):
        from specdec.layers.short_conv import ShortConv

        return ShortConv
    if layer.attention.latent:
        from specdec.layers.latent_attention import LatentAttention

        return LatentAttention
    return Attention


def _get_mlp(config: ModelConfig, i: int) -> type[Block]:
    """Return layer i's block that does not mix positions."""
    if config.experts and i not in config.experts.dense_layers:
        from specdec.layers.moe import MoE, ParallelMoE

        return ParallelMoE if config.experts.has_parallel_mlp else MoE
    return MLP


def layer_shapes(config: ModelConfig, i: int) -> Shapes:
    """Return the shapes of all tensors of layer i, by name without the layer's number."""
    return {name: shape for block in get_blocks(config, i) for name, shape in block.shapes(config.layer_config(i)).items()}


def make_layer(config: ModelConfig, weights: Weights, b: Buffers, i: int) -> Program:
    """Return the program of layer i: those of its blocks."""
    layer = config.layer_config(i)
    return [phase for block in get_blocks(config, i) for phase in block(layer, weights, b, i).ops()]


class Llama:
    """The forward pass: x = embedding, then the blocks of each layer, then logits = wcls rmsnorm(x).

    It holds no config, weights or buffers; its methods get those of a model.

    Attributes:
        can_run_trees: Whether token trees are supported by models without a recurrent state.
        releases_windows: Whether keys and values that no token can see any more may be released before a sequence ends, in models
            without a recurrent state.
        keeps_final_norm: Whether the output of the last norm can be requested as a hidden state.
    """

    can_run_trees: ClassVar[bool] = True
    releases_windows: ClassVar[bool] = True
    keeps_final_norm: ClassVar[bool] = True

    def shapes(self, config: ModelConfig) -> Shapes:
        """Return the shapes of all tensors, by llama2.c's names; the classifier `wcls` is left out if it is the embedding."""
        has_own_matrices = config.experts or config.layers or config.attention.latent
        n = config.n_layers if has_own_matrices else 1  # one is enough if all are alike
        layers = [layer_shapes(config, i) for i in range(n)]
        common = {
            name: shape for name, shape in layers[0].items() if len(shape) < 3 and all(each.get(name) == shape for each in layers)
        }
        layer_tensors = {
            f"{i}.{name}": shape for i, layer in enumerate(layers) for name, shape in layer.items() if name not in common
        }
        table = (config.vocab_size, config.dim)
        stacked = {name: (config.n_layers, *shape) for name, shape in common.items()}
        tensors: Shapes = {"tok_emb": table, **stacked, "rms_final": (config.dim,)}
        if config.learned_positions:
            tensors["pos_emb"] = (config.seq_len, config.dim)
        if config.per_layer_inputs:
            from specdec.layers.per_layer_inputs import global_shapes

            tensors |= global_shapes(config)
        tensors |= layer_tensors
        if config.layer_norm:
            tensors["rms_final_bias"] = (config.dim,)
        if config.classifier_bias:
            tensors["wcls_bias"] = (config.vocab_size,)
        return tensors if config.shared_classifier else tensors | {"wcls": table}

    def plans(self, config: ModelConfig) -> Plans:
        """Return all matrices and vectors to pack, by name; the classifier may be the embedding itself."""
        stored = self.shapes(config)
        plans = fuse_tensors({name: stored[name] for name in GLOBAL_TENSORS if name in stored}, FUSED_GLOBALS, stored)
        plans.setdefault("classifier", plans["embedding"])
        for i in range(config.n_layers):
            for block in get_blocks(config, i):
                plans |= fuse_tensors(block.shapes(config.layer_config(i)), block.fused, stored, i)
        return plans

    def allocate_layers(self, config: ModelConfig, b: Buffers) -> None:
        """Make KV caches and recurrent states, RoPE tables, and the rows of the per-layer inputs' table."""
        ropes = dict[int, RopeTables]()  # by the id of a layer's config, since hashing it takes longer
        for i, layer in enumerate(b.layers):
            own, source = config.layer_config(i), config.layer_config(i).attention.kv_layer
            for block in get_blocks(config, i):
                block.allocate(own, b.sizes, b.new, layer)
            if own.has_attention and source is not None and source != TARGET_KV_LAYER:
                layer.kv = b.layers[source].kv
            if own.has_attention and own.attention.has_rope:
                if id(own) not in ropes:
                    ropes[id(own)] = make_rope_tables(own, b.sizes.n_positions, b.new)
                layer.rope = ropes[id(own)]
                if config.rope.query_scale:
                    layer.query_rope = make_rope_tables(own, b.sizes.n_positions, b.new, are_scaled=True)
        if config.rope.longrope_threshold:
            rope = replace(config.rope, freq_factors=config.rope.long_freq_factors)
            long_config = replace(config, attention=replace(config.attention, rope=rope))
            b.long_rope = make_rope_tables(long_config, b.sizes.n_positions, b.new)
        if config.per_layer_inputs:
            from specdec.layers.per_layer_inputs import make_layer_inputs

            b.token_rows, b.layer_inputs = make_layer_inputs(config, b.new)

    def embed(self, config: ModelConfig, weights: Weights, b: Buffers) -> Program:
        """Return the program of x = embedding, scaled or normed, plus any learned positions, and of any per-layer inputs."""
        scale = config.embedding_scale / config.residual_scale
        scale_ops = [scale_rows(b.x[0], scale, config.dim)] if scale != 1 else []
        lookup = [weights.matrices["embedding"].embed(b.x[0], b.tokens), *scale_ops]
        if config.learned_positions:
            lookup.append(add_positions(b.x[0], weights.vectors["pos_emb"], b.depths, config.dim))
        if config.per_layer_inputs:
            from specdec.layers.per_layer_inputs import make_embedding_program

            return [lookup, *make_embedding_program(config, weights, b)]
        if config.embedding_norm:
            ones, n_panels = np.ones(b.x.shape[2], np.float32), b.x.shape[2] // PANEL_ROWS
            return [lookup, [head_norm(b.x[0], n_panels, 0, 1, config.dim, ones, config.norm_eps)]]
        return [lookup]

    def layers(self, config: ModelConfig, weights: Weights, b: Buffers) -> list[Program]:
        """Return a program for each layer, which runs the layer's blocks."""
        return [make_layer(config, weights, b, i) for i in range(config.n_layers)]

    def classify(self, config: ModelConfig, weights: Weights, b: Buffers) -> Program:
        """Return the program of logits = wcls rmsnorm(x), with a bias and a softcap if any, for the tokens with logits."""
        matmul = weights.matrices["classifier"].matmul(b.logits, b.normed, b.scratch, logits_only=True)
        bias_ops = [add_bias(b.logits, weights.vectors["wcls_bias"], 1, True)] if config.classifier_bias else []
        softcap_ops = [softcap(b.logits, config.logit_softcap)] if config.logit_softcap else []
        return [[norm(config, weights, b, "rms_final", logits_only=True), matmul, *bias_ops, *softcap_ops]]

    def classify_candidates(self, config: ModelConfig, weights: Weights, b: Buffers, panels: Float32) -> Program:
        """Return the program that computes logits of candidates from the x that a pass leaves.

        Args:
            config: The model's config.
            weights: The model's weights.
            b: The buffers of the pass; the logits are in the order of the candidates.
            panels: Panels with the candidates' rows of the classifier.
        """
        classifier = replace(weights.matrices["classifier"], panels=panels)
        candidates = replace(weights, shards=weights.shards | {"classifier": (classifier,)})
        return Llama.classify(self, config, candidates, b)  # heads also keep their output in `classify`

    def program(self, config: ModelConfig, weights: Weights, b: Buffers, before: Mapping[int, Program] | None = None) -> Program:
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
            program += [*(before or {}).get(i, []), *layer]
        return [*program, *self.classify(config, weights, b)]

    # Weights

    def plan_weights(self, config: ModelConfig, tensors: Tensors, weight_format: "WeightFormat | None" = None) -> WeightPlan:
        """Return the plan of a model's weights, made of tensors in the shapes of `shapes`; see `WeightPlan`."""
        return WeightPlan(self.plans(config), tensors, weight_format, TOKEN_TABLE if config.per_layer_inputs else "")

    # Buffers

    def make_buffers(self, config: ModelConfig, weights: Weights, sizes: BufferSizes, new: Allocator) -> Buffers:
        """Return the buffers of a sequence, which `new` makes.

        Raises:
            MemoryError: If there is not enough memory.
        """
        n_hidden, n_scratches = sizes.n_hidden_layers * config.dim, max(map(len, weights.shards.values()))
        b = Buffers(
            sizes,
            new,
            tokens=new.scratch(MAX_BATCH_TOKENS, dtype=np.int64),
            logits=new.rows(weights.matrices["classifier"].n_rows),
            x=new.rows(pad(config.dim), 1),
            normed=new.rows(pad(config.dim), sizes.n_threads),
            scratches=[new.rows(weights.scratch_words, sizes.n_threads) for _ in range(n_scratches)],
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
            copy = copy_rows(b.hidden_states, b.normed if is_normed else b.x, i * config.dim, 0, config.dim, True)
            copies[layer] = [[norm(config, weights, b, "rms_final"), copy] if is_normed else [copy]]
        executors = []
        for rope in [None, b.long_rope] if b.long_rope else [None]:
            own = replace(b, layers=[replace(layer, rope=rope or layer.rope) for layer in b.layers])
            executors.append(Executor(self.program(config, weights, own, copies), own_arrays, [*b.new.token_arrays.values()]))
        known[key] = [executor.without_sequence_arrays() for executor in executors]
        return executors


LLAMA = Llama()
