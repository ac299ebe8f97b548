"""Attention block (Vaswani et al. 2017, arXiv:1706.03762) with grouped query heads and RoPE, and the variants of families.

Variants: biases of q, k and v (Qwen2) or of all matmuls, norms of each head (Qwen3) or of all heads of a token (OLMo 2), a gate
(Qwen3.5), windows in all layers (Mistral) or in most (Gemma 3), layers without RoPE (SmolLM3), sinks (gpt-oss).
"""

import math
from collections.abc import Sequence

import numpy as np

from specdec.kernels import head_norm, move_kv_slots, rope
from specdec.layers.activations import gate_heads
from specdec.layers.architecture import Buffers, FusedTensors, Shapes, Weights
from specdec.layers.block import Block, add_residual, get_scratches, make_bias_ops, make_scale_ops, norm_shapes, prepare_input
from specdec.model_config import ModelConfig
from specdec.quant.packed_matrix import count_panels
from specdec.runtime.matmul_tile import PANEL_ROWS
from specdec.runtime.op_program import Op, Program
from specdec.runtime.simd import Float32, Int64, round_up

NORM = "rms_att"


def shapes(config: ModelConfig) -> Shapes:
    """Return the shapes of an attention block's tensors, by llama2.c's names; norms, biases and a gate if the config has them."""
    dim, q_dim, kv_dim = config.dim, config.q_dim, config.kv_dim
    kv_shapes = dict.fromkeys(_get_kv_tensors(config), (kv_dim, dim))
    tensors = norm_shapes(config, NORM) | {"wq": (q_dim, dim)} | kv_shapes | {"wo": (dim, q_dim)}
    if config.attention.qkv_bias:
        tensors |= {"bq": (q_dim,), "bk": (kv_dim,), "bv": (kv_dim,)}
    if config.attention.wo_bias:
        tensors["bo"] = (dim,)
    if config.attention.gate:
        tensors["wg"] = (q_dim, dim)
    if config.attention.qk_norm:
        tensors |= {name: (n,) for name, (n, _, _) in _find_head_norms(config).items()}
    if config.attention.sinks:
        tensors["sinks"] = (config.n_heads,)
    return tensors


def _get_kv_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the tensors that make keys and values; none if the layer reads those of another layer."""
    return () if not config.has_own_kv else ("wk", "wk_as_v" if config.attention.values_are_keys else "wv")


def _find_head_norms(config: ModelConfig) -> dict[str, tuple[int, int, int]]:
    """Return (size, first row in the qkv matmul's output, number of norms) for each norm of queries and keys, by name."""
    base = count_panels(config.q_dim) * PANEL_ROWS
    sides = {"q_norm": (0, config.n_heads), "k_norm": (base, config.n_kv_heads)}
    own = {name: side for name, side in sides.items() if name == "q_norm" or config.has_own_kv}
    if config.attention.qk_norm == "whole":
        return {name: (n * config.head_dim, row, 1) for name, (row, n) in own.items()}
    return {name: (config.head_dim, row, n) for name, (row, n) in own.items()}


def program(config: ModelConfig, weights: Weights, b: Buffers, i: int) -> Program:
    """Return the attention block's program in layer i: x += wo attention(rope(qkv rmsnorm(x)))."""
    return make_attention_program(config, weights, b, i, *prepare_input(config, weights, b, f"{i}.{NORM}"))


def make_attention_program(
    config: ModelConfig, weights: Weights, b: Buffers, i: int, source: Float32, before: Sequence[Op]
) -> Program:
    """Return the program of x += wo attention(rope(qkv source)) in layer i, with an input given by the caller.

    The program writes keys and values to the KV cache. before: Ops that compute source (threads, T, ...).
    """
    w, v = weights.matrices, weights.vectors
    k_row, has_kv = count_panels(config.q_dim) * PANEL_ROWS, config.has_own_kv
    v_row = k_row + count_panels(config.kv_dim) * PANEL_ROWS
    gate_row = (v_row + count_panels(config.kv_dim) * PANEL_ROWS) if has_kv else k_row
    gate_ops = [[gate_heads(b.heads, b.qkv, gate_row, config.q_dim)]] if config.attention.gate else []
    is_whole_norm = config.attention.qk_norm == "whole"
    is_per_head = not is_whole_norm and (config.attention.qk_norm or b.kv.is_scaled)
    unit, n_panels = get_panels_per_unit(config) if is_per_head else 1, sum(map(count_panels, get_qkv_rows(config)))

    def make_head_ops(unit: int) -> list[Op]:
        norms = _find_head_norms(config).items() if config.attention.qk_norm else ()
        sections = []
        if config.attention.has_rope:
            queries = (b.query_cos, b.query_sin) if config.rope.query_scale else (b.rope_cos, b.rope_sin)
            sections = [(0, k_row, *queries), (k_row, v_row, b.rope_cos, b.rope_sin)][: 1 + has_kv]
        ones = np.ones(round_up(config.head_dim, PANEL_ROWS), np.float32)
        norm_ops = [
            head_norm(b.qkv, unit, base, n, n_rows, v[f"{i}.{name}"], config.norm_eps) for name, (n_rows, base, n) in norms
        ]
        rope_ops = [
            rope(b.qkv, unit, base, end_row - base, *each, b.depths, config.head_dim) for base, end_row, *each in sections
        ]
        value_norm_args = (b.qkv, unit, v_row, config.n_kv_heads, config.head_dim, ones, config.norm_eps)
        return [
            *([head_norm(*value_norm_args)] if config.attention.value_norm and has_kv else []),
            *(rope_ops + norm_ops if config.attention.qk_norm == "rotated" else norm_ops + rope_ops),
            *([b.kv.store_keys(b.keys, b.key_scales, b.qkv, unit, k_row)] if has_kv else []),
            *([b.kv.store_values(b.values, b.value_scales, b.qkv, unit, v_row, config.head_dim)] if has_kv else []),
        ]

    # qkv matmul, head norms, RoPE, writes to the KV cache
    matmul = [*before, *weights.matmul(f"{i}.qkv", b.qkv, source, get_scratches(b), unit=unit)]
    matmul += make_bias_ops(weights, b.qkv, f"{i}.bqkv", unit)
    matmul += make_scale_ops(b.qkv, config.attention.projection_scales, get_qkv_rows(config), unit)
    # No thread has all heads of a token, so a norm of all heads needs a phase of its own.
    phases = [matmul, make_head_ops(n_panels)] if is_whole_norm else [[*matmul, *make_head_ops(unit)]]
    return [
        *phases,
        [attention(config, b, v.get(f"{i}.sinks"))],
        *gate_ops,
        *add_residual(config, weights, b, w[f"{i}.wo"], b.heads, f"{i}.bo", f"{i}.{NORM}"),
    ]


def attention(config: ModelConfig, b: Buffers, sinks: Float32 | None = None) -> Op:
    """Return the op of heads = softmax attention of each query head over the cached positions that a token sees.

    sinks: Extra scores of the heads; see `AttentionArgs`.
    """
    scale = np.float32(config.softmax_scale)
    sink_scores = np.full(config.n_heads, -np.inf, np.float32) if sinks is None else sinks / scale  # they are scaled later
    scratch = b.scores, b.mixed, b.depths, b.paths, sink_scores
    cache = b.keys, b.values, b.key_scales, b.value_scales
    numbers = config.n_heads, config.attention_window, config.softmax_scale, config.attention.softcap
    op: Op = b.kv.attention(b.heads, b.qkv, *cache, *scratch, *numbers)
    return op._replace(bytes_per_slot=(b.keys.nbytes + b.values.nbytes) // b.values.shape[2])


def get_panels_per_unit(config: ModelConfig) -> int:
    """Return how many panels of the qkv matmul a thread takes at a time, so that no head is split; all if sizes do not fit."""
    unit = config.head_dim // math.gcd(config.head_dim, PANEL_ROWS)
    panels = [count_panels(rows) for rows in get_qkv_rows(config)]
    return unit if all(n % unit == 0 for n in panels) else sum(panels)


def get_qkv_rows(config: ModelConfig) -> tuple[int, ...]:
    """Return the number of rows of each part of the qkv matmul: q, k and v, and the gate if there is one."""
    return (config.q_dim, *[config.kv_dim] * len(_get_kv_tensors(config)), *[config.q_dim][: config.attention.gate])


def move_path(buffers: Buffers, path: Int64, n_tokens: int) -> None:
    """Move the cached keys and values of a tree's path to the slots behind the first n_tokens, in all layers.

    path: Indexes of the tree's nodes on the path, from the top down.
    """
    for name in [name for name in vars(buffers) if name.startswith("values")]:
        values, value_scales = (getattr(buffers, name.replace("values", part)) for part in ("values", "value_scales"))
        # Latent attention has no keys.
        keys = getattr(buffers, name.replace("values", "keys"), values[:, :, :, :0])
        key_scales = getattr(buffers, name.replace("values", "key_scales"), value_scales[:, :, :0])
        move_kv_slots(keys, values, key_scales, value_scales, path, n_tokens)


FUSED = {"qkv": FusedTensors(("wq", "wk", "wk_as_v", "wv", "wg")), "bqkv": FusedTensors(("bq", "bk", "bv"))}
ATTENTION = Block(shapes, FUSED, program)
