"""Llama 2 (Touvron et al. 2023, arXiv:2307.09288) as llama2.c has it: its tensors, its matrices, its pass."""

from ..kernels import Buffers, attention, rms_norm, rope, store_keys, store_values, swiglu
from ..machine.programs import Program, Row
from ..machine.tiles import STRIP_ROWS
from ..weights.matrix import n_strips
from .config import Config
from .plan import Architecture, Part, Vector, Weights


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """By llama2.c's names; `wcls` only where it is not the embedding."""
    layers, dim, hidden = config.n_layers, config.dim, config.hidden_dim
    tensors: dict[str, tuple[int, ...]] = {
        "tok_emb": (config.vocab_size, dim),
        "rms_att": (layers, dim),
        "wq": (layers, dim, dim),
        "wk": (layers, config.kv_dim, dim),
        "wv": (layers, config.kv_dim, dim),
        "wo": (layers, dim, dim),
        "rms_ffn": (layers, dim),
        "w1": (layers, hidden, dim),
        "w2": (layers, dim, hidden),
        "w3": (layers, hidden, dim),
        "rms_final": (dim,),
    }
    return tensors if config.shared_classifier else tensors | {"wcls": (config.vocab_size, dim)}


def parts(config: Config) -> dict[str, Part]:
    """q, k and v are one product, and so are w1 and w3, strip by strip."""
    dim, hidden, kv_dim = config.dim, config.hidden_dim, config.kv_dim
    table = (config.vocab_size,)
    matrices = {
        "embedding": Part((("tok_emb", None),), table, dim),
        "classifier": Part((("tok_emb" if config.shared_classifier else "wcls", None),), table, dim),
    }
    for i in range(config.n_layers):
        matrices[f"{i}.qkv"] = Part((("wq", i), ("wk", i), ("wv", i)), (dim, kv_dim, kv_dim), dim)
        matrices[f"{i}.wo"] = Part((("wo", i),), (dim,), dim)
        matrices[f"{i}.up"] = Part((("w1", i), ("w3", i)), (hidden, hidden), dim, in_turns=True)
        matrices[f"{i}.down"] = Part((("w2", i),), (dim,), hidden)
    return matrices


def vectors(config: Config) -> dict[str, Vector]:
    """The norms."""
    norms = {
        f"{i}.{name}": Vector(((name, i),), (config.dim,)) for i in range(config.n_layers) for name in ("rms_att", "rms_ffn")
    }
    return norms | {"rms_final": Vector((("rms_final", None),), (config.dim,))}


def program(config: Config, weights: Weights, b: Buffers) -> Program:
    """x = embedding; for each layer x += wo attention(rope(qkv rmsnorm(x))), x += w2 swiglu(w13 rmsnorm(x)); wcls rmsnorm(x)."""
    w, v = weights.matrices, weights.vectors
    k_row = n_strips(config.dim) * STRIP_ROWS
    v_row = k_row + n_strips(config.kv_dim) * STRIP_ROWS

    def norm(name: str, of_logits: bool = False) -> Row:
        return rms_norm(b.normed, b.x, v[name], config.dim, config.norm_eps, of_logits)

    def turned(base: int, end: int) -> Row:
        return rope(b.qkv, b.qkv.shape[1] // STRIP_ROWS, base, end - base, b.rope_cos, b.rope_sin, config.head_dim)

    def layer(i: int) -> Program:
        strips = b.qkv.shape[1] // STRIP_ROWS
        return [
            [
                norm(f"{i}.rms_att"),
                w[f"{i}.qkv"].product(b.qkv, b.normed, b.scratch),
                turned(0, k_row),
                turned(k_row, v_row),
                store_keys(b.keys[i], b.qkv, strips, k_row),
                store_values(b.values[i], b.qkv, strips, v_row, config.head_dim),
            ],
            [attention(b.heads, b.qkv, b.keys[i], b.values[i], b.scores, b.mixed, config.n_heads, config.seq_len)],
            [w[f"{i}.wo"].product(b.x[0], b.heads, b.scratch, adding=True)],
            [norm(f"{i}.rms_ffn"), w[f"{i}.up"].product(b.up, b.normed, b.scratch, unit=2), swiglu(b.hidden, b.up)],
            [w[f"{i}.down"].product(b.x[0], b.hidden, b.scratch, adding=True)],
        ]

    return [
        [w["embedding"].embedding(b.x[0], b.tokens)],
        *(phase for i in range(config.n_layers) for phase in layer(i)),
        [norm("rms_final", of_logits=True), w["classifier"].product(b.logits, b.normed, b.scratch, of_logits=True)],
    ]


LLAMA = Architecture(shapes, parts, vectors, program)
