"""Multi-head latent attention block, or MLA (DeepSeek-V2: DeepSeek-AI 2024, arXiv:2405.04434).

The cache holds one row per token for all heads: the normed latent vector and the rotated rows of the keys. The matrices that make
keys and values of the latent vector are absorbed (section 2.1.2): a query is multiplied by its head's key matrix, attention mixes
latent vectors, and each head's value matrix multiplies the result. So attention is that of many heads with one key, whose value
is a part of the key.

Shapes: T tokens of this pass, D dim, H heads, N and E rows of a head that RoPE leaves and rotates, C rows of the latent vector,
V rows of a value head, W columns of a cached position; slots: see `latent_ops`.
"""

import numpy as np

from specdec.kernels import MAX_BATCH_TOKENS
from specdec.layers.architecture import Buffers, BufferSizes, BufferSpec, FusedTensors, Shapes, Weights
from specdec.layers.attention import NORM
from specdec.layers.block import Block, add_residual, get_scratches, norm_shapes, prepare_input
from specdec.layers.latent_ops import (
    LATENT_ATTENTION,
    STORE_LATENT,
    gather_heads,
    norm_columns,
    rotate_queries,
    scatter_heads,
)
from specdec.model_config import LatentAttentionConfig, ModelConfig, require_type
from specdec.quant.packed_matrix import ExpertRouting
from specdec.runtime.matmul_tile import PANEL_ROWS
from specdec.runtime.op_program import Op, Program
from specdec.runtime.simd import round_up

LATENT_NORM_EPS = 1e-6  # of the norms of latent vectors in transformers, whatever rms_norm_eps is


def get_latent_config(config: ModelConfig) -> LatentAttentionConfig:
    """Return config.attention.latent, which must be set."""
    return require_type(config.attention.latent, LatentAttentionConfig)


def shapes(config: ModelConfig) -> Shapes:
    """Return the shapes of a latent attention block's tensors in one layer, by name.

    wq (H (N + E), D): makes queries; or wq_a (Q, D) and wq_b (H (N + E), Q) with q_a_norm (Q,) between them.
    wkv_a (C + E, D): makes the latent vector, which kv_a_norm (C,) norms, and the rows of keys that RoPE rotates.
    wk_b (H, C, N): key matrix of each head, transposed. wv_b (H, V, C): value matrix of each head.
    wo (D, H V).
    """
    a, heads, dim = get_latent_config(config), config.n_heads, config.dim
    queries: Shapes = {"wq": (config.q_dim, dim)}
    if a.q_rank:
        queries = {"wq_a": (a.q_rank, dim), "q_a_norm": (a.q_rank,), "wq_b": (config.q_dim, a.q_rank)}
    return norm_shapes(config, NORM) | queries | {
        "wkv_a": (a.kv_rank + a.rope_dim, dim),
        "kv_a_norm": (a.kv_rank,),
        "wk_b": (heads, a.kv_rank, a.nope_dim),
        "wv_b": (heads, a.value_dim, a.kv_rank),
        "wo": (dim, config.output_dim),
    }  # fmt: skip


def buffers(config: ModelConfig, weights: Weights, sizes: BufferSizes) -> dict[str, BufferSpec]:
    """Return the specs of a latent attention block's buffers, by name.

    latent (T, W): the rows that are written to the KV cache.
    q_normed (threads, T, Q padded), q_b (T, H (N + E) padded): input and output of the matmul with wq_b, if there is one.
    head_input (threads, T H, N or C padded), head_output (T H, C or V padded): input and output of the wk_b and wv_b matmuls.
    head_scratch (threads, T H, words): head_input in the form that the matmuls of the weight format read.
    head_starts (threads, H + 1), head_tokens (threads, 1): routing of these matmuls, where each head is an expert.
    queries (T, H W), mixed_latents (T, H C padded): input and output of attention.
    """
    a, heads, n_threads = get_latent_config(config), config.n_heads, sizes.n_threads
    n_slots = MAX_BATCH_TOKENS * heads
    own = [matrix for name, matrix in weights.matrices.items() if name.endswith((".k_b", ".v_b"))]
    width = max(a.latent_width, round_up(max(a.nope_dim, a.value_dim), PANEL_ROWS))
    specs = {
        "latent": BufferSpec((MAX_BATCH_TOKENS, a.cache_width), scope="token"),
        "head_input": BufferSpec((n_threads, n_slots, width)),
        "head_output": BufferSpec((n_slots, width)),
        "head_scratch": BufferSpec((n_threads, n_slots, max(matrix.scratch_words for matrix in own))),
        "head_starts": BufferSpec((n_threads, heads + 1), np.int64),
        "head_tokens": BufferSpec((n_threads, 1), np.int64),
        "queries": BufferSpec((MAX_BATCH_TOKENS, heads * a.cache_width), scope="token"),
        "mixed_latents": BufferSpec((MAX_BATCH_TOKENS, heads * a.latent_width), scope="token"),
    }
    if a.q_rank:
        specs["q_normed"] = BufferSpec((n_threads, MAX_BATCH_TOKENS, round_up(a.q_rank, PANEL_ROWS)), scope="token")
        specs["q_b"] = BufferSpec((MAX_BATCH_TOKENS, round_up(config.q_dim, PANEL_ROWS)), scope="token")
    return specs


def program(config: ModelConfig, weights: Weights, b: Buffers, i: int) -> Program:
    """Return the block's program in layer i: x += wo (wv_b softmax(absorbed queries . cached rows) latents) of rmsnorm(x)."""
    a, heads, v, w = get_latent_config(config), config.n_heads, weights.vectors, weights.matrices
    source, before = prepare_input(config, weights, b, f"{i}.{NORM}")
    routing = ExpertRouting(b.head_tokens, b.head_starts)
    tables = b.rope_cos, b.rope_sin, b.depths
    kv_base = round_up(a.q_rank or config.q_dim, PANEL_ROWS)
    # down-projections of queries, keys and values, and up-projection of queries
    phases = [[*before, *weights.matmul(f"{i}.qkv", b.qkv, source, get_scratches(b))]]
    queries = b.qkv
    if a.q_rank:
        queries, q_norm = b.q_b, norm_columns(b.q_normed, b.qkv, v[f"{i}.q_a_norm"], a.q_rank, LATENT_NORM_EPS)
        phases.append([q_norm, *weights.matmul(f"{i}.q_b", b.q_b, b.q_normed, get_scratches(b))])
    store = STORE_LATENT[b.kv.dtype](
        b.values, b.value_scales, b.latent, b.qkv, kv_base, v[f"{i}.kv_a_norm"], LATENT_NORM_EPS, a.kv_rank, a.rope_dim, *tables
    )
    # writes to the KV cache, absorption of the key matrices, RoPE of queries
    absorb = [
        store,
        gather_heads(b.head_input, b.head_starts, queries, 0, a.head_dim, a.nope_dim),
        w[f"{i}.k_b"].expert_matmul(b.head_output, b.head_input, b.head_scratch, b.head_scratch, routing, per_token=heads),
        scatter_heads(b.queries, b.head_output, heads, a.cache_width, a.kv_rank),
        rotate_queries(b.queries, queries, 0, heads, a.head_dim, a.rope_dim, a.cache_width, a.latent_width, *tables),
    ]
    # value matrices
    mix = [
        gather_heads(b.head_input, b.head_starts, b.mixed_latents, 0, a.latent_width, a.kv_rank),
        w[f"{i}.v_b"].expert_matmul(b.head_output, b.head_input, b.head_scratch, b.head_scratch, routing, per_token=heads),
        scatter_heads(b.heads[0], b.head_output, heads, a.value_dim, a.value_dim),
    ]
    output = add_residual(config, weights, b, w[f"{i}.wo"], b.heads, f"{i}.bo", f"{i}.{NORM}")
    return [*phases, absorb, [attention(config, b)], mix, *output]


def attention(config: ModelConfig, b: Buffers) -> Op:
    """Return the op of mixed_latents = softmax attention of each query head over the cached rows that a token sees."""
    sinks = np.full(config.n_heads, -np.inf, np.float32)
    op: Op = LATENT_ATTENTION[b.kv.dtype](
        b.mixed_latents, b.queries, b.values, b.value_scales, b.scores, b.mixed, b.depths, b.paths, sinks, config.n_heads,
        config.attention_window, config.softmax_scale, config.attention.softcap,
    )  # fmt: skip
    return op._replace(bytes_per_slot=b.values.nbytes // b.values.shape[2])


FUSED = {
    "qkv": FusedTensors(("wq_a", "wq", "wkv_a")),
    "q_b": FusedTensors(("wq_b",)),
    "k_b": FusedTensors(("wk_b",)),
    "v_b": FusedTensors(("wv_b",)),
}
LATENT_ATTENTION_BLOCK = Block(shapes, FUSED, program, buffers)
