"""A block of attention (Vaswani et al. 2017, arXiv:1706.03762), of grouped heads that RoPE turns, and what families add to it.

Biases of q, k and v (Qwen2) or of all products, norms of each head (Qwen3) or of all heads of a token (OLMo 2), a gate (Qwen3.5),
windows in all layers (Mistral) or in most (Gemma 3), layers whose heads are not turned (SmolLM3), sinks (gpt-oss).
"""

import math
from collections.abc import Sequence

import numpy as np

from specdec.config import Config
from specdec.kernels import head_norm, move_slots, rope
from specdec.layers.activations import gate_rows
from specdec.layers.base import Buffers, Joined, Shapes, Weights
from specdec.layers.block import CACHED, Block, added, biased, norm_shapes, scratches, taken
from specdec.quant.matrix import n_strips
from specdec.runtime.program import Program, Row
from specdec.runtime.simd import Float32, Int64, round_up
from specdec.runtime.tile import STRIP_ROWS

NORM = "rms_att"


def shapes(config: Config) -> Shapes:
    """By llama2.c's names; biases, norms of heads and a gate's product where the config says so."""
    dim, q_dim, kv_dim = config.dim, config.q_dim, config.kv_dim
    of_kv = dict.fromkeys(_of_kv(config), (kv_dim, dim))
    tensors = norm_shapes(config, NORM) | {"wq": (q_dim, dim)} | of_kv | {"wo": (dim, q_dim)}
    if config.attention.qkv_bias:
        tensors |= {"bq": (q_dim,), "bk": (kv_dim,), "bv": (kv_dim,)}
    if config.attention.wo_bias:
        tensors["bo"] = (dim,)
    if config.attention.gate:
        tensors["wg"] = (q_dim, dim)
    if config.attention.qk_norm:
        tensors |= {name: (n,) for name, (n, _, _) in _normed_heads(config).items()}
    if config.attention.sinks:
        tensors["sinks"] = (config.n_heads,)
    return tensors


def _of_kv(config: Config) -> tuple[str, ...]:
    """The products that make keys and values: none where an earlier layer's are taken; see `AttentionConfig`."""
    return () if not config.has_cache else ("wk", "wk_as_v" if config.attention.values_are_keys else "wv")


def _normed_heads(config: Config) -> dict[str, tuple[int, int, int]]:
    """Of norms of queries and of keys: how many rows one goes over, where these begin in the product, and how many norms."""
    base = n_strips(config.q_dim) * STRIP_ROWS
    sides = {"q_norm": (0, config.n_heads), "k_norm": (base, config.n_kv_heads)}
    own = {name: side for name, side in sides.items() if name == "q_norm" or config.has_cache}
    if config.attention.qk_norm == "whole":
        return {name: (n * config.head_dim, at, 1) for name, (at, n) in own.items()}
    return {name: (config.head_dim, at, n) for name, (at, n) in own.items()}


def program(config: Config, weights: Weights, b: Buffers, i: int) -> Program:
    """x += wo attention(rope(qkv rmsnorm(x)))."""
    return mixing(config, weights, b, i, *taken(config, weights, b, f"{i}.{NORM}"))


def mixing(config: Config, weights: Weights, b: Buffers, i: int, source: Float32, before: Sequence[Row]) -> Program:
    """x += wo attention(rope(qkv source)); before: what makes source (threads, T, ...)."""
    w, v = weights.matrices, weights.vectors
    k_row, has_kv = n_strips(config.q_dim) * STRIP_ROWS, config.has_cache
    v_row = k_row + n_strips(config.kv_dim) * STRIP_ROWS
    gate_row = (v_row + n_strips(config.kv_dim) * STRIP_ROWS) if has_kv else k_row
    gated = [[gate_rows(b.heads, b.qkv, gate_row, config.q_dim)]] if config.attention.gate else []
    is_whole = config.attention.qk_norm == "whole"
    by_heads = not is_whole and (config.attention.qk_norm or b.kv.is_scaled)
    unit, whole = whole_heads(config) if by_heads else 1, sum(map(n_strips, qkv_rows(config)))

    def turned(unit: int) -> list[Row]:
        normed = _normed_heads(config).items() if config.attention.qk_norm else ()
        sides = []
        if config.attention.is_turned:
            queries = (b.query_cos, b.query_sin) if config.rope.query_scale else (b.rope_cos, b.rope_sin)
            sides = [(0, k_row, *queries), (k_row, v_row, b.rope_cos, b.rope_sin)][: 1 + has_kv]
        no_weights = np.ones(round_up(config.head_dim, STRIP_ROWS), np.float32)
        values = (b.qkv, unit, v_row, config.n_kv_heads, config.head_dim, no_weights, config.norm_eps)
        return [
            *(head_norm(b.qkv, unit, base, n, n_rows, v[f"{i}.{name}"], config.norm_eps) for name, (n_rows, base, n) in normed),
            *([head_norm(*values)] if config.attention.value_norm and has_kv else []),
            *(rope(b.qkv, unit, base, end - base, *each, b.depths, config.head_dim) for base, end, *each in sides),
            *([b.kv.store_keys(b.keys, b.key_scales, b.qkv, unit, k_row)] if has_kv else []),
            *([b.kv.store_values(b.values, b.value_scales, b.qkv, unit, v_row, config.head_dim)] if has_kv else []),
        ]

    product = [*before, *weights.product(f"{i}.qkv", b.qkv, source, scratches(b), unit=unit)]
    product += biased(weights, b.qkv, f"{i}.bqkv", unit)
    first = [product, turned(whole)] if is_whole else [[*product, *turned(unit)]]  # all of a token's heads are no thread's own
    return [
        *first,
        [attention(config, b, v.get(f"{i}.sinks"))],
        *gated,
        *added(config, weights, b, w[f"{i}.wo"], b.heads, f"{i}.bo", f"{i}.{NORM}"),
    ]


def attention(config: Config, b: Buffers, sinks: Float32 | None = None) -> Row:
    """heads = what each query head of a layer sees of the text up to its token, or of a window of it; sinks: see `Attention`."""
    scale = np.float32(config.score_scale)
    scores = np.full(config.n_heads, -np.inf, np.float32) if sinks is None else sinks / scale  # before they are scaled
    given = b.scores, b.mixed, b.depths, b.paths, scores
    cache = b.keys, b.values, b.key_scales, b.value_scales
    row: Row = b.kv.attention(b.heads, b.qkv, *cache, *given, config.n_heads, config.n_seen, config.score_scale)
    return row._replace(slot_work=(b.keys.nbytes + b.values.nbytes) // b.values.shape[2])


def whole_heads(config: Config) -> int:
    """How many strips of q, k, v and gates a thread takes at a time, so that no head is two threads'; of odd sizes, all."""
    unit = config.head_dim // math.gcd(config.head_dim, STRIP_ROWS)
    strips = [n_strips(rows) for rows in qkv_rows(config)]
    return unit if all(n % unit == 0 for n in strips) else sum(strips)


def qkv_rows(config: Config) -> tuple[int, ...]:
    """Of q, k and v, and of what gates where there is a gate."""
    return (config.q_dim, *[config.kv_dim] * len(_of_kv(config)), *[config.q_dim][: config.attention.gate])


def move_path(buffers: Buffers, path: Int64, n_text: int) -> None:
    """`Architecture.move`."""
    for name in [name for name in vars(buffers) if name.startswith("keys")]:
        cache = (getattr(buffers, name.replace("keys", each)) for each in CACHED)
        move_slots(*cache, path, n_text)


JOINED = {"qkv": Joined(("wq", "wk", "wk_as_v", "wv", "wg")), "bqkv": Joined(("bq", "bk", "bv"))}
ATTENTION = Block(shapes, JOINED, program)
