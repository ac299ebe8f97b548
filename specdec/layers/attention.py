"""Attention block (Vaswani et al. 2017, arXiv:1706.03762) with grouped query heads and RoPE, and the variants of families.

Variants: biases of q, k and v (Qwen2) or of all matmuls, norms of each head (Qwen3) or of all heads of a token (OLMo 2), a gate
(Qwen3.5) or one of each head (Laguna), windows in all layers (Mistral) or in most (Gemma 3), layers without RoPE (SmolLM3), sinks
(gpt-oss).

Shapes: T tokens of this pass, S cached positions, H query heads, G KV heads, K head dim, R rows of a panel.
"""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from specdec.kernels import head_norm, rope
from specdec.layers.activations import gate_heads, gate_heads_by_softplus
from specdec.layers.block import Block, get_panels_per_unit, make_scale_ops, norm_shapes
from specdec.layers.buffers import Allocator, BufferSizes, KVState, LayerBuffers, RopeTables, pad
from specdec.layers.weights import FusedNames, FusedTensors, Shapes
from specdec.model_config import ModelConfig, require_type
from specdec.runtime.op_program import Kernel, Op, Program
from specdec.runtime.simd import MAX_TILE_TOKENS, PANEL_ROWS, Float32, ceil_div

SUB_NORM = "att_sub_norm"


class Attention(Block):
    """Attention: x += wo attention(rope(qkv rmsnorm(x)))."""

    norm_name = "rms_att"
    fused: ClassVar[FusedNames] = {
        "qkv": FusedTensors(("wq", "wk", "wk_as_v", "wv", "wg")),
        "bqkv": FusedTensors(("bq", "bk", "bv")),
    }

    @classmethod
    def shapes(cls, config: ModelConfig) -> Shapes:
        """Return the shapes by llama2.c's names; norms, biases and a gate if the config has them."""
        dim, q_dim, kv_dim = config.dim, config.q_dim, config.kv_dim
        kv_shapes = dict.fromkeys(_get_kv_tensors(config), (kv_dim, dim))
        tensors = norm_shapes(config, cls.norm_name) | {"wq": (q_dim, dim)} | kv_shapes | {"wo": (dim, q_dim)}
        if config.attention.qkv_bias:
            tensors |= {"bq": (q_dim,), "bk": (kv_dim,), "bv": (kv_dim,)}
        if config.attention.wo_bias:
            tensors["bo"] = (dim,)
        if config.attention.gate == "head_softplus":
            tensors["head_gates"] = (config.n_heads, dim)
        elif config.attention.gate:
            tensors["wg"] = (q_dim, dim)
        if config.attention.qk_norm not in (False, "plain"):
            tensors |= {name: (n,) for name, (n, _, _) in _find_head_norms(config).items()}
        if config.attention.sinks:
            tensors["sinks"] = (config.n_heads,)
        if config.sub_norms:
            tensors[SUB_NORM] = (q_dim,)
        return tensors

    @classmethod
    def allocate(cls, config: ModelConfig, sizes: BufferSizes, new: Allocator, layer: LayerBuffers) -> None:
        """Make the KV cache, unless the layer reads that of another one."""
        if config.has_own_kv:
            layer.kv = make_kv_state(config, sizes, new)

    def ops(self) -> Program:
        """Return the block's program."""
        return self.attend_to(*self.prepare_input())

    def attend_to(self, source: Float32, before: Sequence[Op]) -> Program:
        """Return the program of x += wo attention(rope(qkv source)), with an input given by the caller.

        The program writes keys and values to the KV cache. before: Ops that compute source (threads, T, ...).
        """
        config = self.config
        qkv, heads = self.make_rows("qkv"), self.new.rows(pad(config.output_dim), 1)
        is_whole_norm = config.attention.qk_norm == "whole"
        is_per_head = not is_whole_norm and (config.attention.qk_norm or self.b.sizes.kv.is_scaled)
        rows = [*map(pad, _get_qkv_rows(config))]
        unit = get_panels_per_unit(config.head_dim, rows) if is_per_head else 1
        # qkv matmul, head norms, RoPE, writes to the KV cache
        matmul = [*before, *self.matmul("qkv", qkv, source, unit)]
        matmul += self.make_bias_ops(qkv, "bqkv", unit)
        matmul += make_scale_ops(qkv, config.attention.projection_scales, rows, unit)
        # No thread has all heads of a token, so a norm of all heads needs a phase of its own.
        head_ops = self._make_head_ops(qkv, sum(rows) // PANEL_ROWS if is_whole_norm else unit)
        phases = [matmul, head_ops] if is_whole_norm else [[*matmul, *head_ops]]
        width, gate_row = self.kv.values.shape[1] * PANEL_ROWS, sum(rows[:-1])
        phases.append([make_attention_op(self, self.b.sizes.kv.attention, heads, qkv, width)])
        if config.attention.gate == "head_softplus":
            gates, scratch = self.make_rows("head_gates"), self.make_scratch("head_gates")
            phases[0].append(self.matrix("head_gates").matmul(gates, source, scratch))
            phases.append([gate_heads_by_softplus(heads, gates, 0, config.n_heads, config.head_dim)])
        elif config.attention.gate == "softplus":
            phases.append([gate_heads_by_softplus(heads, qkv, gate_row, config.q_dim, 1)])
        elif config.attention.gate:
            phases.append([gate_heads(heads, qkv, gate_row, config.q_dim)])
        if config.sub_norms:
            return [*phases, *self.add_normed_residual("wo", heads, SUB_NORM, config.q_dim)]
        return [*phases, *self.add_residual("wo", heads, "bo")]

    def _make_head_ops(self, qkv: Float32, unit: int) -> list[Op]:
        """Return the ops of norms of heads, RoPE and writes to the KV cache, for the panels of a chunk of the qkv matmul."""
        config, has_kv = self.config, self.config.has_own_kv
        k_row = pad(config.q_dim)
        v_row = k_row + pad(config.kv_dim)
        norm_ops, rope_ops = list[Op](), list[Op]()
        for name, (n_rows, base, n) in _find_head_norms(config).items():
            norm_ops.append(head_norm(qkv, unit, base, n, n_rows, self._get_head_weight(name), config.norm_eps))
        if config.attention.has_rope:
            tables = require_type(self.layer.rope, RopeTables)
            rope_ops.append(rope(qkv, unit, 0, k_row, *(self.layer.query_rope or tables), self.b.depths, config.head_dim))
            if has_kv:
                rope_ops.append(rope(qkv, unit, k_row, v_row - k_row, *tables, self.b.depths, config.head_dim))
        ops = rope_ops + norm_ops if config.attention.qk_norm == "rotated" else norm_ops + rope_ops
        if not has_kv:
            return ops
        kv, kv_format = self.kv, self.b.sizes.kv
        if config.attention.value_norm:
            ones = np.ones(pad(config.head_dim), np.float32)
            ops.insert(0, head_norm(qkv, unit, v_row, config.n_kv_heads, config.head_dim, ones, config.norm_eps))
        store_keys = kv_format.store_keys(kv.keys, kv.key_scales, qkv, unit, k_row)
        return [*ops, store_keys, kv_format.store_values(kv.values, kv.value_scales, qkv, unit, v_row, config.head_dim)]

    def _get_head_weight(self, name: str) -> Float32:
        """Return the weights of a norm of queries or keys; those of a plain norm are equal."""
        attention = self.config.attention
        if attention.qk_norm != "plain":
            return self.vector(name)
        return np.full(pad(self.config.head_dim), attention.plain_query_scale if name == "q_norm" else 1, np.float32)


def make_attention_op(block: Block, kernel: Kernel, out: Float32, queries: Float32, width: int) -> Op:
    """Return the op of out = softmax attention of each query head over the cached positions that a token sees.

    Args:
        block: The block, which has the KV cache.
        kernel: An attention kernel for the cache's format.
        out: See `AttentionArgs`.
        queries: See `AttentionArgs`.
        width: Number of columns that the kernel mixes.
    """
    config, b, kv = block.config, block.b, block.kv
    scale = np.float32(config.softmax_scale)
    no_sinks = np.full(config.n_heads, -np.inf, np.float32)
    sinks = block.vector("sinks") / scale if config.attention.sinks else no_sinks  # the kernel multiplies them by scale
    mixed = block.new.scratch(b.sizes.n_threads, MAX_TILE_TOKENS, width)
    numbers = config.n_heads, config.attention_window, config.softmax_scale, config.attention.softcap
    op = kernel(out, queries, *kv, b.scores, mixed, b.depths, b.paths, sinks, *numbers)
    return op._replace(bytes_per_slot=int((kv.keys.nbytes + kv.values.nbytes) // kv.values.shape[2]))


def make_kv_state(config: ModelConfig, sizes: BufferSizes, new: Allocator) -> KVState:
    """Return an empty KV cache of one layer."""
    n, dtype, heads, rows = sizes.n_positions, sizes.kv.dtype, config.n_kv_heads, config.head_dim
    keys = new.sequence(heads, n // PANEL_ROWS, rows, PANEL_ROWS, dtype=dtype, positions_axis=1, per_index=PANEL_ROWS)
    values = new.sequence(heads, ceil_div(rows, PANEL_ROWS), n, PANEL_ROWS, dtype=dtype, positions_axis=2)
    return KVState(keys, values, make_scales(sizes, new, heads), make_scales(sizes, new, heads))


def make_scales(sizes: BufferSizes, new: Allocator, n_heads: int) -> Float32:
    """Return the scales of keys or of values (G, S); (G, 0) if the KV cache is not quantized."""
    if sizes.kv.is_scaled:
        return new.sequence(n_heads, sizes.n_positions, positions_axis=1)
    return np.zeros((n_heads, 0), np.float32)


def _get_kv_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the tensors that make keys and values; none if the layer reads those of another layer."""
    return () if not config.has_own_kv else ("wk", "wk_as_v" if config.attention.values_are_keys else "wv")


def _find_head_norms(config: ModelConfig) -> dict[str, tuple[int, int, int]]:
    """Return (size, first row in the qkv matmul's output, number of norms) for each norm of queries and keys, by name."""
    if not config.attention.qk_norm:
        return {}
    sides = {"q_norm": (0, config.n_heads), "k_norm": (pad(config.q_dim), config.n_kv_heads)}
    own = {name: side for name, side in sides.items() if name == "q_norm" or config.has_own_kv}
    if config.attention.qk_norm == "whole":
        return {name: (n * config.head_dim, row, 1) for name, (row, n) in own.items()}
    return {name: (config.head_dim, row, n) for name, (row, n) in own.items()}


def _get_qkv_rows(config: ModelConfig) -> tuple[int, ...]:
    """Return the number of rows of each part of the qkv matmul: q, k and v, and the gate if there is one."""
    gate = [config.q_dim] if config.attention.gate in (True, "softplus") else []
    return (config.q_dim, *[config.kv_dim] * len(_get_kv_tensors(config)), *gate)
