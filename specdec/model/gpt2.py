"""GPT-2 (Radford et al. 2019): its tensors, packed weights and forward program."""

from dataclasses import replace
from typing import ClassVar

from specdec.kernels import add_positions, layer_norm
from specdec.layers.activations import gelu
from specdec.layers.architecture import Architecture
from specdec.layers.attention import Attention
from specdec.layers.block import Block
from specdec.layers.buffers import Buffers, pad
from specdec.layers.weights import FusedNames, FusedTensors, Plans, Shapes, Weights, fuse_tensors
from specdec.model.llama import FUSED_VOCAB
from specdec.model_config import ModelConfig
from specdec.runtime.op_program import Op, Program

GLOBAL_TENSORS = ("tok_emb", "wcls", "pos_emb", "ln_final", "ln_final_bias")  # tensors that belong to no layer
FUSED_GLOBALS = {**FUSED_VOCAB, "pos_emb": FusedTensors(("pos_emb",), is_table=True)}


def make_layer_norm(config: ModelConfig, weights: Weights, b: Buffers, name: str = "ln_final", logits_only: bool = False) -> Op:
    """Return the op of normed = layernorm(x), with the weights `name` and the biases `name`_bias."""
    weight, bias = weights.vectors[name], weights.vectors[f"{name}_bias"]
    return layer_norm(b.normed, b.x, weight, bias, config.dim, config.norm_eps, logits_only)


class GPT2Attention(Attention):
    """Attention without RoPE: x += wo attention(qkv layernorm(x))."""

    def ops(self) -> Program:
        """Return the block's program."""
        return self.attend_to(self.b.normed, [make_layer_norm(self.config, self.w, self.b, f"{self.i}.ln_att")])


class GPT2MLP(Block):
    """MLP: x += w2 gelu(w1 layernorm(x))."""

    fused: ClassVar[FusedNames] = {"up": FusedTensors(("w1",)), "down": FusedTensors(("w2",))}

    @classmethod
    def shapes(cls, config: ModelConfig) -> Shapes:
        """Return the shapes by name."""
        dim, hidden = config.dim, config.hidden_dim
        return {"w1": (hidden, dim), "w2": (dim, hidden), "b1": (hidden,), "b2": (dim,)}

    def ops(self) -> Program:
        """Return the block's program."""
        up, hidden = self.make_rows("up"), self.new.rows(pad(self.config.hidden_dim), 1)
        norm = make_layer_norm(self.config, self.w, self.b, f"{self.i}.ln_ffn")
        matmul = self.matrix("up").matmul(up, self.b.normed, self.b.scratch)
        return [[norm, matmul, *self.make_bias_ops(up, "b1"), gelu(hidden, up)], *self.add_residual("down", hidden, "b2")]


class GPT2Architecture(Architecture):
    """The forward pass: x = embedding + position, then attention and MLP of each layer, then logits = wcls layernorm(x)."""

    has_learned_positions = True
    can_run_trees = True
    keeps_final_norm = True

    def shapes(self, config: ModelConfig) -> Shapes:
        """Return the shapes of all tensors by name; the classifier `wcls` exists only if it is not the embedding."""
        layers, dim, hidden = config.n_layers, config.dim, config.hidden_dim
        tensors: Shapes = {"tok_emb": (config.vocab_size, dim), "pos_emb": (config.seq_len, dim)}
        tensors |= dict.fromkeys(("wq", "wk", "wv", "wo"), (layers, dim, dim))
        tensors |= {"w1": (layers, hidden, dim), "w2": (layers, dim, hidden), "b1": (layers, hidden)}
        tensors |= dict.fromkeys(("bq", "bk", "bv", "bo", "b2"), (layers, dim))
        tensors |= dict.fromkeys(("ln_att", "ln_att_bias", "ln_ffn", "ln_ffn_bias"), (layers, dim))
        tensors |= dict.fromkeys(("ln_final", "ln_final_bias"), (dim,))
        return tensors if config.shared_classifier else tensors | {"wcls": (config.vocab_size, dim)}

    def plans(self, config: ModelConfig) -> Plans:
        """Return all matrices and vectors to pack, by name, with q, k and v fused."""
        stored = self.shapes(config)
        plans = fuse_tensors({name: stored[name] for name in GLOBAL_TENSORS if name in stored}, FUSED_GLOBALS, stored)
        plans.setdefault("classifier", plans["embedding"])
        layer_tensors = {name: shape[1:] for name, shape in stored.items() if name not in GLOBAL_TENSORS}
        for i in range(config.n_layers):
            plans |= fuse_tensors(layer_tensors, {**GPT2MLP.fused, **GPT2Attention.fused}, stored, i)
        return plans

    def allocate_layers(self, config: ModelConfig, b: Buffers) -> None:
        """Make the KV caches."""
        for layer in b.layers:
            GPT2Attention.allocate(config, b.sizes, b.new, layer)

    def embed(self, config: ModelConfig, weights: Weights, b: Buffers) -> Program:
        """Return the program of x = embedding + position."""
        positions = add_positions(b.x[0], weights.vectors["pos_emb"], b.depths, config.dim)
        return [[weights.matrices["embedding"].embed(b.x[0], b.tokens), positions]]

    def layers(self, config: ModelConfig, weights: Weights, b: Buffers) -> list[Program]:
        """Return a program for each layer, which runs attention and MLP."""
        config = replace(config, attention=replace(config.attention, has_rope=False))
        blocks = (GPT2Attention, GPT2MLP)
        return [[phase for block in blocks for phase in block(config, weights, b, i).ops()] for i in range(config.n_layers)]

    def classify(self, config: ModelConfig, weights: Weights, b: Buffers) -> Program:
        """Return the program of logits = wcls layernorm(x), for the tokens with logits."""
        matmul = weights.matrices["classifier"].matmul(b.logits, b.normed, b.scratch, logits_only=True)
        return [[make_layer_norm(config, weights, b, logits_only=True), matmul]]

    def final_norm(self, config: ModelConfig, weights: Weights, b: Buffers) -> Op:
        """Return the op of normed = layernorm(x) for all tokens."""
        return make_layer_norm(config, weights, b)


GPT2 = GPT2Architecture()
