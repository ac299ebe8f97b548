"""GPT-2 (Radford et al. 2019): its tensors, its matrices, its pass."""

from dataclasses import replace

from specdec.config import Config
from specdec.kernels import add_positions, layer_norm
from specdec.layers.activations import gelu
from specdec.layers.attention import ATTENTION, mixing, move_path
from specdec.layers.base import Architecture, Buffers, Joined, Layers, Packed, Shapes, Weights, packed
from specdec.layers.block import added, biased, block_buffers, by_layer
from specdec.model.llama import TABLES
from specdec.runtime.program import Program, Row

OUTER = ("tok_emb", "wcls", "pos_emb", "ln_final", "ln_final_bias")  # tensors of no layer
OUTER_JOINED = {**TABLES, "pos_emb": Joined(("pos_emb",), is_table=True)}
JOINED = {"up": Joined(("w1",)), "down": Joined(("w2",)), **ATTENTION.joined}


def shapes(config: Config) -> Shapes:
    """By llama2.c's names and those of their biases; `wcls` only where it is not the embedding."""
    layers, dim, hidden = config.n_layers, config.dim, config.hidden_dim
    tensors: Shapes = {"tok_emb": (config.vocab_size, dim), "pos_emb": (config.seq_len, dim)}
    tensors |= dict.fromkeys(("wq", "wk", "wv", "wo"), (layers, dim, dim))
    tensors |= {"w1": (layers, hidden, dim), "w2": (layers, dim, hidden), "b1": (layers, hidden)}
    tensors |= dict.fromkeys(("bq", "bk", "bv", "bo", "b2"), (layers, dim))
    tensors |= dict.fromkeys(("ln_att", "ln_att_bias", "ln_ffn", "ln_ffn_bias"), (layers, dim))
    tensors |= dict.fromkeys(("ln_final", "ln_final_bias"), (dim,))
    return tensors if config.shared_classifier else tensors | {"wcls": (config.vocab_size, dim)}


def pack_of(config: Config) -> Packed:
    """q, k and v are one product; norms, biases, and the positions' table."""
    stored, layers = shapes(config), range(config.n_layers)
    own = packed({name: stored[name] for name in OUTER if name in stored}, OUTER_JOINED, stored)
    own.setdefault("classifier", own["embedding"])
    of_layer = {name: shape[1:] for name, shape in stored.items() if name not in OUTER}
    return own | {name: each for i in layers for name, each in packed(of_layer, JOINED, stored, i).items()}


def program(config: Config, weights: Weights, b: Buffers) -> Layers:
    """x = embedding + position; for each layer x += wo attention(qkv norm(x)), x += w2 gelu(w1 norm(x)); wcls norm(x)."""
    w, v = weights.matrices, weights.vectors
    unturned = replace(config, attention=replace(config.attention, is_turned=False))

    def layer(i: int, own: Buffers) -> Program:
        up = w[f"{i}.up"].product(b.up, b.normed, b.scratch)
        return [
            *mixing(unturned, weights, own, i, b.normed, [normed(config, weights, b, f"{i}.ln_att")]),
            [normed(config, weights, b, f"{i}.ln_ffn"), up, *biased(weights, b.up, f"{i}.b1"), gelu(b.hidden, b.up)],
            *added(config, weights, b, w[f"{i}.down"], b.hidden, f"{i}.b2", ""),
        ]

    product = w["classifier"].product(b.logits, b.normed, b.scratch, of_logits=True)
    return Layers(
        [[w["embedding"].embedding(b.x[0], b.tokens), add_positions(b.x[0], v["pos_emb"], b.depths, config.dim)]],
        [layer(i, own) for i, own in enumerate(by_layer(config, weights, b))],
        [[normed(config, weights, b, of_logits=True), product]],
    )


def normed(config: Config, weights: Weights, b: Buffers, name: str = "ln_final", of_logits: bool = False) -> Row:
    """normed = layernorm(x), by the weights of that name."""
    weight, bias = (weights.vectors[each] for each in (name, f"{name}_bias"))
    return layer_norm(b.normed, b.x, weight, bias, config.dim, config.norm_eps, of_logits)


GPT2 = Architecture(shapes, pack_of, block_buffers, program, learned_positions=True, move=move_path, outcome=normed)
