"""Llama (Touvron et al. 2023, arXiv:2307.09288) and what is like it but for flags of the config: its tensors, matrices, and pass.

Llama 3 scales RoPE (Dubey et al. 2024, arXiv:2407.21783), Mistral sees a window (Jiang et al. 2023, arXiv:2310.06825), Qwen2 adds
biases to q, k and v (Yang et al. 2024, arXiv:2407.10671), Qwen3 norms their heads (Yang et al. 2025, arXiv:2505.09388), SmolLM3
has layers without RoPE (Yang et al. 2025, arXiv:2501.18795), Granite scales embeddings, residuals, scores and logits, Phi-3
turns a part of each head, by factors of its own (Ding et al. 2024, arXiv:2402.13753), and Ministral 3 turns slow pairs more
slowly (Peng et al. 2023, arXiv:2309.00071) and scales queries by their position.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..kernels import add_bias, gate_rows, head_norm, rms_norm, rope, scale_rows, swiglu
from ..machine.programs import Program, Row
from ..machine.tiles import STRIP_ROWS
from ..machine.vectors import LANES, Float32
from ..weights.matrix import n_strips
from .blocks import attention, block_buffers, move_path
from .config import Config
from .plan import Architecture, Buffer, Buffers, Layers, Part, Room, Vector, Weights
from .rope import fill_query_tables, fill_tables


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """By llama2.c's names; `wcls` only where it is not the embedding, biases and norms of heads where the config says so."""
    layers, dim, hidden, q_dim, kv_dim = config.n_layers, config.dim, config.hidden_dim, config.q_dim, config.kv_dim
    tensors: dict[str, tuple[int, ...]] = {
        "tok_emb": (config.vocab_size, dim),
        "rms_att": (layers, dim),
        "wq": (layers, q_dim, dim),
        "wk": (layers, kv_dim, dim),
        "wv": (layers, kv_dim, dim),
        "wo": (layers, dim, q_dim),
        "rms_ffn": (layers, dim),
        "w1": (layers, hidden, dim),
        "w2": (layers, dim, hidden),
        "w3": (layers, hidden, dim),
        "rms_final": (dim,),
    }
    if not config.shared_classifier:
        tensors["wcls"] = (config.vocab_size, dim)
    if config.qkv_bias:
        tensors |= {"bq": (layers, q_dim), "bk": (layers, kv_dim), "bv": (layers, kv_dim)}
    if config.wo_bias:
        tensors["bo"] = (layers, dim)
    if config.mlp_bias:
        tensors |= {"b1": (layers, hidden), "b3": (layers, hidden), "b2": (layers, dim)}
    if config.attention_gate:
        tensors["wg"] = (layers, q_dim, dim)
    if config.qk_norm:
        tensors |= {"q_norm": (layers, config.head_dim), "k_norm": (layers, config.head_dim)}
    return tensors


def parts(config: Config) -> dict[str, Part]:
    """q, k, v and what gates are one product, and so are w1 and w3, strip by strip."""
    dim, hidden, q_dim = config.dim, config.hidden_dim, config.q_dim
    mixed = dict(zip(("wq", "wk", "wv", "wg"), qkv_rows(config), strict=False))
    table = (config.vocab_size,)
    matrices = {
        "embedding": Part((("tok_emb", None),), table, dim),
        "classifier": Part((("tok_emb" if config.shared_classifier else "wcls", None),), table, dim),
    }
    for i in range(config.n_layers):
        matrices[f"{i}.qkv"] = Part(tuple((name, i) for name in mixed), (*mixed.values(),), dim)
        matrices[f"{i}.wo"] = Part((("wo", i),), (dim,), q_dim)
        matrices[f"{i}.up"] = Part((("w1", i), ("w3", i)), (hidden, hidden), dim, turns=2)
        matrices[f"{i}.down"] = Part((("w2", i),), (dim,), hidden)
    return matrices


def vectors(config: Config) -> dict[str, Vector]:
    """The norms, and the biases as their products lie."""
    dim, hidden, q_dim, kv_dim = config.dim, config.hidden_dim, config.q_dim, config.kv_dim
    own = {"rms_final": Vector((("rms_final", None),), (dim,))}
    for i in range(config.n_layers):
        own |= {f"{i}.{name}": Vector(((name, i),), (dim,)) for name in ("rms_att", "rms_ffn")}
        if config.qkv_bias:
            own[f"{i}.bqkv"] = Vector((("bq", i), ("bk", i), ("bv", i)), (q_dim, kv_dim, kv_dim))
        if config.wo_bias:
            own[f"{i}.bo"] = Vector((("bo", i),), (dim,))
        if config.mlp_bias:
            own[f"{i}.b13"] = Vector((("b1", i), ("b3", i)), (hidden, hidden), in_turns=True)
            own[f"{i}.b2"] = Vector((("b2", i),), (dim,))
        if config.qk_norm:
            own |= {f"{i}.{name}": Vector(((name, i),), (config.head_dim,)) for name in ("q_norm", "k_norm")}
    return own


def buffers(config: Config, weights: Weights, room: Room) -> dict[str, Buffer]:
    """rope_cos, rope_sin (S, K + LANES): entry j belongs to row j % K of a head; sines are negative for a pair's first row.

    query_cos, query_sin: those of queries, where these have a scale of their position's; long_rope_cos, long_rope_sin: those of
    long texts, where these have divisors of their own.
    """
    names = ["rope_cos", "rope_sin", *["query_cos", "query_sin"] * bool(config.query_scale)]
    names += ["long_rope_cos", "long_rope_sin"] * bool(config.n_short)
    return block_buffers(config, weights, room) | dict.fromkeys(names, Buffer((room.n_positions, config.head_dim + LANES)))


def fill(config: Config, b: Buffers, start: int) -> None:
    """`Architecture.fill`."""
    fill_tables(config, b.rope_cos, b.rope_sin, start)
    if config.n_short:
        fill_tables(replace(config, rope_divisors=config.long_divisors), b.long_rope_cos, b.long_rope_sin, start)
    if config.query_scale:
        fill_query_tables(config, b.query_cos, b.query_sin, b.rope_cos, b.rope_sin, start)


def layer(config: Config, weights: Weights, b: Buffers, i: int, normed: Float32, norms: Sequence[Row]) -> Program:
    """x += wo attention(rope(qkv normed)), x += w2 swiglu(w13 rmsnorm(x)); norms: what fills normed (threads, T, ...)."""
    return [*mixing(config, weights, b, i, normed, norms), *mlp(config, weights, b, i)]


def mixing(config: Config, weights: Weights, b: Buffers, i: int, normed: Float32, norms: Sequence[Row]) -> Program:
    """The first half of a layer: attention, and the products around it."""
    w, v = weights.matrices, weights.vectors
    k_row = n_strips(config.q_dim) * STRIP_ROWS
    v_row = k_row + n_strips(config.kv_dim) * STRIP_ROWS
    gate_row = v_row + n_strips(config.kv_dim) * STRIP_ROWS
    gated = [[gate_rows(b.heads, b.qkv, gate_row, config.q_dim)]] if config.attention_gate else []
    unit = whole_heads(config) if config.qk_norm else 1

    def normed_heads() -> list[Row]:
        sides = [("q_norm", 0, config.n_heads), ("k_norm", k_row, config.n_kv_heads)] if config.qk_norm else []
        return [
            head_norm(b.qkv, unit, base, n_heads, config.head_dim, v[f"{i}.{name}"], config.norm_eps)
            for name, base, n_heads in sides
        ]

    def turned() -> list[Row]:
        keys = b.rope_cos, b.rope_sin
        queries = (b.query_cos, b.query_sin) if config.query_scale else keys
        sides = [(0, k_row, *queries), (k_row, v_row, *keys)] if i not in config.no_rope_layers else []
        return [rope(b.qkv, unit, base, end - base, *tables, b.depths, config.head_dim) for base, end, *tables in sides]

    return [
        [
            *norms,
            w[f"{i}.qkv"].product(b.qkv, normed, b.scratch, unit=unit),
            *biased(weights, b.qkv, f"{i}.bqkv", unit),
            *normed_heads(),
            *turned(),
            b.kv.store_keys(b.keys[i], b.qkv, unit, k_row),
            b.kv.store_values(b.values[i], b.qkv, unit, v_row, config.head_dim),
        ],
        [attention(replace(config, window=0) if i in config.full_layers else config, b, i)],
        *gated,
        [w[f"{i}.wo"].product(b.x[0], b.heads, b.scratch, adding=True), *biased(weights, b.x[0], f"{i}.bo")],
    ]


def mlp(config: Config, weights: Weights, b: Buffers, i: int) -> Program:
    """The second half of a layer."""
    w = weights.matrices
    return [
        [
            norm(config, weights, b, f"{i}.rms_ffn"),
            w[f"{i}.up"].product(b.up, b.normed, b.scratch, unit=2),
            *biased(weights, b.up, f"{i}.b13", 2),
            swiglu(b.hidden, b.up, 1),
        ],
        [w[f"{i}.down"].product(b.x[0], b.hidden, b.scratch, adding=True), *biased(weights, b.x[0], f"{i}.b2")],
    ]


def biased(weights: Weights, out: Float32, name: str, unit: int = 1) -> list[Row]:
    """What adds the bias of that name to a product of that unit, if there is one."""
    return [add_bias(out, weights.vectors[name], unit)] if name in weights.vectors else []


def norm(config: Config, weights: Weights, b: Buffers, name: str, of_logits: bool = False) -> Row:
    """normed = rmsnorm(x), by the weights of that name, which logits take their scale from.

    x is a family's residual stream divided by residual_scale, so that layers add what they compute; eps is by its square.
    """
    weight = weights.vectors[name]
    if of_logits and config.logit_divisor != 1:
        weight = weight / np.float32(config.logit_divisor)
    eps = config.norm_eps / (config.residual_scale * config.residual_scale)
    return rms_norm(b.normed, b.x, weight, config.dim, eps, of_logits, 0)


def embed(config: Config, weights: Weights, b: Buffers) -> Program:
    """x = embedding."""
    scale = config.embedding_scale / config.residual_scale
    scaled = [scale_rows(b.x[0], scale, config.dim)] if scale != 1 else []
    return [[weights.matrices["embedding"].embedding(b.x[0], b.tokens), *scaled]]


def classify(config: Config, weights: Weights, b: Buffers) -> Program:
    """logits = wcls rmsnorm(x), of the last tokens."""
    product = weights.matrices["classifier"].product(b.logits, b.normed, b.scratch, of_logits=True)
    return [[norm(config, weights, b, "rms_final", of_logits=True), product]]


def program(config: Config, weights: Weights, b: Buffers) -> Layers:
    """x = embedding; for each layer x += wo attention(rope(qkv rmsnorm(x))), x += w2 swiglu(w13 rmsnorm(x)); wcls rmsnorm(x)."""
    return Layers(
        embed(config, weights, b),
        [layer(config, weights, b, i, b.normed, [norm(config, weights, b, f"{i}.rms_att")]) for i in range(config.n_layers)],
        classify(config, weights, b),
    )


def whole_heads(config: Config) -> int:
    """How many strips of q, k, v and gates a thread takes at a time, so that no head is two threads'; of odd sizes, all."""
    unit = config.head_dim // math.gcd(config.head_dim, STRIP_ROWS)
    strips = [n_strips(rows) for rows in qkv_rows(config)]
    return unit if all(n % unit == 0 for n in strips) else sum(strips)


def qkv_rows(config: Config) -> tuple[int, ...]:
    """Of q, k and v, and of what gates where there is a gate."""
    return (config.q_dim, config.kv_dim, config.kv_dim, *[config.q_dim][: config.attention_gate])


LLAMA = Architecture(shapes, parts, vectors, buffers, program, fill, move=move_path)
