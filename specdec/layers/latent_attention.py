"""Multi-head latent attention block, or MLA (DeepSeek-V2: DeepSeek-AI 2024, arXiv:2405.04434).

The cache holds one row per token for all heads: the normed latent vector and the rotated rows of the keys. The matrices that make
keys and values of the latent vector are absorbed (section 2.1.2): a query is multiplied by its head's key matrix, attention mixes
latent vectors, and each head's value matrix multiplies the result. So attention is that of many heads with one key, whose value
is a part of the key.

Shapes: T tokens of this pass, D dim, H heads, N and E rows of a head that RoPE leaves and rotates, C rows of the latent vector,
V rows of a value head, W columns of a cached position; slots: see `latent_ops`.
"""

from typing import ClassVar

import numpy as np

from specdec.kernels import MAX_BATCH_TOKENS
from specdec.layers.activations import group_norm
from specdec.layers.attention import Attention, make_attention_op, make_scales
from specdec.layers.block import Block, norm_shapes
from specdec.layers.buffers import Allocator, BufferSizes, KVState, LayerBuffers, pad
from specdec.layers.latent_ops import LATENT_ATTENTION, compute_latents, gather_heads, rotate_queries, scatter_heads
from specdec.layers.weights import FusedNames, FusedTensors, Shapes
from specdec.model_config import LatentAttentionConfig, ModelConfig, require_type
from specdec.quant.packed_matrix import ExpertRouting
from specdec.runtime.op_program import Op, Program
from specdec.runtime.simd import PANEL_ROWS, Float32

LATENT_NORM_EPS = 1e-6  # of the norms of latent vectors in transformers, whatever rms_norm_eps is


class LatentAttention(Block):
    """Latent attention: x += wo (wv_b softmax(absorbed queries . cached rows) latents) of rmsnorm(x)."""

    norm_name = Attention.norm_name
    fused: ClassVar[FusedNames] = {
        "qkv": FusedTensors(("wq_a", "wq", "wkv_a")),
        "q_b": FusedTensors(("wq_b",)),
        "k_b": FusedTensors(("wk_b",)),
        "v_b": FusedTensors(("wv_b",)),
    }

    @classmethod
    def shapes(cls, config: ModelConfig) -> Shapes:
        """Return the shapes by name.

        wq (H (N + E), D): makes queries; or wq_a (Q, D) and wq_b (H (N + E), Q) with q_a_norm (Q,) between them.
        wkv_a (C + E, D): makes the latent vector, which kv_a_norm (C,) norms, and the rows of keys that RoPE rotates.
        wk_b (H, C, N): key matrix of each head, transposed. wv_b (H, V, C): value matrix of each head.
        wo (D, H V).
        """
        a, heads, dim = get_latent_config(config), config.n_heads, config.dim
        queries: Shapes = {"wq": (config.q_dim, dim)}
        if a.q_rank:
            queries = {"wq_a": (a.q_rank, dim), "q_a_norm": (a.q_rank,), "wq_b": (config.q_dim, a.q_rank)}
        return norm_shapes(config, cls.norm_name) | queries | {
            "wkv_a": (a.kv_rank + a.rope_dim, dim),
            "kv_a_norm": (a.kv_rank,),
            "wk_b": (heads, a.kv_rank, a.nope_dim),
            "wv_b": (heads, a.value_dim, a.kv_rank),
            "wo": (dim, config.output_dim),
        }  # fmt: skip

    @classmethod
    def allocate(cls, config: ModelConfig, sizes: BufferSizes, new: Allocator, layer: LayerBuffers) -> None:
        """Make the KV cache: values (1, W / R, S, R), and no keys."""
        n_panels = get_latent_config(config).cache_width // PANEL_ROWS
        values = new.sequence(1, n_panels, sizes.n_positions, PANEL_ROWS, dtype=sizes.kv.dtype, positions_axis=2)
        scales = make_scales(sizes, new, 1)
        layer.kv = KVState(values[:, :, :0], values, scales[:, :0], scales)

    def ops(self) -> Program:
        """Return the block's program."""
        config, b, new, kv = self.config, self.b, self.new, self.kv
        a, heads = get_latent_config(config), config.n_heads
        assert self.layer.rope
        tables = *self.layer.rope, b.depths
        source, before = self.prepare_input()
        # down-projections of queries, keys and values
        qkv = queries = self.make_rows("qkv")
        down = [*before, *self.matmul("qkv", qkv, source)]
        # latent vectors, up-projection of queries
        latents, kv_base = new.rows(a.cache_width), pad(a.q_rank or config.q_dim)
        kv_norm = self.vector("kv_a_norm")[None], LATENT_NORM_EPS
        up = [compute_latents(latents, qkv, kv_base, *kv_norm, a.kv_rank, a.rope_dim, *tables)]
        if a.q_rank:
            normed, queries = new.rows(pad(a.q_rank), b.sizes.n_threads), new.rows(pad(config.q_dim))
            q_norm = group_norm(normed, qkv[None], self.vector("q_a_norm")[None], a.q_rank, LATENT_NORM_EPS)
            up += [q_norm, *self.matmul("q_b", queries, normed)]
        # writes to the KV cache, absorption of the key matrices, RoPE of queries
        absorbed, mixed = new.rows(heads * a.cache_width), new.rows(heads * a.latent_width, 1)
        unit = a.cache_width // PANEL_ROWS if b.sizes.kv.is_scaled else 1  # a scale belongs to a whole position
        absorb = [
            b.sizes.kv.store_values(kv.values, kv.value_scales, latents, unit, 0, a.cache_width),
            *self._multiply_heads("k_b", absorbed, a.cache_width, a.kv_rank, queries, a.head_dim, a.nope_dim),
            rotate_queries(absorbed, queries, heads, a.head_dim, a.rope_dim, a.cache_width, a.latent_width, *tables),
        ]
        # attention, value matrices
        out = new.rows(pad(config.output_dim), 1)
        mix = self._multiply_heads("v_b", out[0], a.value_dim, a.value_dim, mixed[0], a.latent_width, a.kv_rank)
        attention = make_attention_op(self, LATENT_ATTENTION[b.sizes.kv.dtype], mixed, absorbed, a.latent_width)
        return [down, up, absorb, [attention], mix, *self.add_residual("wo", out, "bo")]

    def _multiply_heads(
        self, matrix: str, out: Float32, out_stride: int, n_out: int, x: Float32, x_stride: int, n: int
    ) -> list[Op]:
        """Return the ops of out = the matrix of each head times n columns of x, where heads begin at multiples of the strides.

        A slot is a head of a token. input (threads, T H, N or C padded) and output (T H, C or V padded) hold the slots' rows,
        scratch the rows of input in the form that the matmul reads. Each head is an expert.
        """
        a, heads, n_threads = get_latent_config(self.config), self.config.n_heads, self.b.sizes.n_threads
        n_slots, width = MAX_BATCH_TOKENS * heads, max(a.latent_width, pad(max(a.nope_dim, a.value_dim)))
        words = max(self.matrix(name).scratch_words for name in ("k_b", "v_b"))
        new = self.b.new.share(gather_heads)  # both calls use the same arrays
        rows = new.scratch(n_threads, n_slots, width)
        output = new.scratch(n_slots, width)
        scratch = new.scratch(n_threads, n_slots, words)
        starts = new.scratch(n_threads, heads + 1, dtype=np.int64)
        routing = ExpertRouting(new.scratch(n_threads, 1, dtype=np.int64), starts)
        return [
            gather_heads(rows, starts, x, x_stride, n),
            self.matrix(matrix).expert_matmul(output, rows, scratch, scratch, routing, per_token=heads),
            scatter_heads(out, output, heads, out_stride, n_out),
        ]


def get_latent_config(config: ModelConfig) -> LatentAttentionConfig:
    """Return config.attention.latent, which must be set."""
    return require_type(config.attention.latent, LatentAttentionConfig)
