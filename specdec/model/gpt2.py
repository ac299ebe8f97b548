"""GPT-2 (Radford et al. 2019): its tensors, packed tensors and forward program."""

from dataclasses import replace

from specdec.kernels import add_positions, layer_norm
from specdec.layers.activations import gelu
from specdec.layers.architecture import (
    Architecture,
    Buffers,
    ForwardProgram,
    FusedTensors,
    PackedTensors,
    Shapes,
    Weights,
    fuse_tensors,
)
from specdec.layers.attention import ATTENTION, make_attention_program, move_path
from specdec.layers.block import add_residual, block_buffers, make_bias_ops, split_by_layer
from specdec.model.llama import FUSED_VOCAB
from specdec.model_config import ModelConfig
from specdec.runtime.op_program import Op, Program

GLOBAL_TENSORS = ("tok_emb", "wcls", "pos_emb", "ln_final", "ln_final_bias")  # tensors that belong to no layer
FUSED_GLOBALS = {**FUSED_VOCAB, "pos_emb": FusedTensors(("pos_emb",), is_table=True)}
FUSED = {"up": FusedTensors(("w1",)), "down": FusedTensors(("w2",)), **ATTENTION.fused}


def shapes(config: ModelConfig) -> Shapes:
    """Return the shapes of all tensors by name; the classifier `wcls` exists only if it is not the embedding."""
    layers, dim, hidden = config.n_layers, config.dim, config.hidden_dim
    tensors: Shapes = {"tok_emb": (config.vocab_size, dim), "pos_emb": (config.seq_len, dim)}
    tensors |= dict.fromkeys(("wq", "wk", "wv", "wo"), (layers, dim, dim))
    tensors |= {"w1": (layers, hidden, dim), "w2": (layers, dim, hidden), "b1": (layers, hidden)}
    tensors |= dict.fromkeys(("bq", "bk", "bv", "bo", "b2"), (layers, dim))
    tensors |= dict.fromkeys(("ln_att", "ln_att_bias", "ln_ffn", "ln_ffn_bias"), (layers, dim))
    tensors |= dict.fromkeys(("ln_final", "ln_final_bias"), (dim,))
    return tensors if config.shared_classifier else tensors | {"wcls": (config.vocab_size, dim)}


def packed_tensors(config: ModelConfig) -> PackedTensors:
    """Return descriptions (source tensors, sizes) of all matrices and vectors to pack, by name, with q, k and v fused."""
    stored, layers = shapes(config), range(config.n_layers)
    packed = fuse_tensors({name: stored[name] for name in GLOBAL_TENSORS if name in stored}, FUSED_GLOBALS, stored)
    packed.setdefault("classifier", packed["embedding"])
    layer_tensors = {name: shape[1:] for name, shape in stored.items() if name not in GLOBAL_TENSORS}
    return packed | {name: each for i in layers for name, each in fuse_tensors(layer_tensors, FUSED, stored, i).items()}


def program(config: ModelConfig, weights: Weights, b: Buffers) -> ForwardProgram:
    """Return GPT-2's forward pass as a program for the embedding, one for each layer and one for the logits.

    x = embedding + position; for each layer x += wo attention(qkv norm(x)), x += w2 gelu(w1 norm(x)); logits = wcls norm(x).
    """
    w, v = weights.matrices, weights.vectors
    without_rope = replace(config, attention=replace(config.attention, has_rope=False))

    def layer(i: int, own: Buffers) -> Program:
        up = w[f"{i}.up"].matmul(b.up, b.normed, b.scratch)
        return [
            *make_attention_program(
                without_rope, weights, own, i, b.normed, [make_layer_norm(config, weights, b, f"{i}.ln_att")]
            ),
            [
                make_layer_norm(config, weights, b, f"{i}.ln_ffn"),
                up,
                *make_bias_ops(weights, b.up, f"{i}.b1"),
                gelu(b.hidden, b.up),
            ],
            *add_residual(config, weights, b, w[f"{i}.down"], b.hidden, f"{i}.b2", ""),
        ]

    matmul = w["classifier"].matmul(b.logits, b.normed, b.scratch, logits_only=True)
    return ForwardProgram(
        [[w["embedding"].embed(b.x[0], b.tokens), add_positions(b.x[0], v["pos_emb"], b.depths, config.dim)]],
        [layer(i, own) for i, own in enumerate(split_by_layer(config, weights, b))],
        [[make_layer_norm(config, weights, b, logits_only=True), matmul]],
    )


def make_layer_norm(config: ModelConfig, weights: Weights, b: Buffers, name: str = "ln_final", logits_only: bool = False) -> Op:
    """Return the op of normed = layernorm(x), with the weights `name` and the biases `name`_bias."""
    weight, bias = (weights.vectors[each] for each in (name, f"{name}_bias"))
    return layer_norm(b.normed, b.x, weight, bias, config.dim, config.norm_eps, logits_only)


GPT2 = Architecture(
    shapes, packed_tensors, block_buffers, program, learned_positions=True, move_path=move_path, final_norm=make_layer_norm
)
