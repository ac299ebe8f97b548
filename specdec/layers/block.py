"""Blocks that layers are made of: two per layer, one that mixes positions and one that does not.

Shapes: T tokens of this pass, S cached positions, L layers, D dim, F hidden dim, H query heads, G KV heads, K head dim, R rows of
a panel.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specdec.kernels import MAX_BATCH_TOKENS, KVFormat, add_bias, add_norm, layer_norm, rms_norm, scale_columns
from specdec.layers.architecture import SHARD_SEPARATOR, Buffers, BufferSizes, BufferSpec, FusedTensors, Shapes, Weights
from specdec.model_config import TARGET_KV_LAYER, ModelConfig
from specdec.quant.packed_matrix import Matrix
from specdec.runtime.matmul_tile import MAX_TILE_TOKENS, PANEL_ROWS
from specdec.runtime.op_program import Op, Program
from specdec.runtime.simd import Float32, ceil_div, round_up

# Lengths of a sequence that the ring buffers of a mixer can continue from: see `Architecture.n_rewindable_states`
N_REWINDABLE_STATES = MAX_BATCH_TOKENS + 1
BASE, TIP = 0, 1  # indexes of a delta net's states: see `recurrent_ops`
NO_BIAS: Float32 = np.zeros(0, np.float32)


class Block(NamedTuple):
    """Half a layer, such as attention or an MLP; its program adds a function of the residual stream x to x.

    Attributes:
        shapes: Returns the shapes of the block's tensors in one layer, including its norms.
        fused: Tensors that are packed as one, or under another name.
        program: Returns the block's program in layer i.
        buffers: Returns the specs of buffers that the block needs next to `block_buffers`.
    """

    shapes: Callable[[ModelConfig], Shapes]
    fused: Mapping[str, FusedTensors]
    program: Callable[[ModelConfig, Weights, Buffers, int], Program]
    buffers: Callable[[ModelConfig, Weights, BufferSizes], dict[str, BufferSpec]] = lambda config, weights, sizes: {}


def block_buffers(config: ModelConfig, weights: Weights, sizes: BufferSizes) -> dict[str, BufferSpec]:
    """Return the specs of the buffers that attention layers and MLPs work in, by name.

    normed (threads, T, D padded).
    scratch (threads, T, words): activations in the form that a weight format needs.
    scores (threads, MAX_TILE_TOKENS, S): attention scores of one head.
    more_scratch (n, threads, T, words): scratch for further shards of a matrix.
    branch (1, T, D padded): output of a block before its norm, if there is one.

    The others are those of `layer_group_buffers`.
    """
    matrices, n_threads = weights.matrices, sizes.n_threads
    padded, words = round_up(config.dim, PANEL_ROWS), max(matrix.scratch_words for matrix in matrices.values())
    n_shards = max(int(name.partition(SHARD_SEPARATOR)[2] or 0) for name in matrices)  # without the first shard of a matrix
    specs = {"more_scratch": BufferSpec((n_shards, n_threads, MAX_BATCH_TOKENS, words), scope="token")} if n_shards else {}
    if config.norm_placement != "before":
        specs["branch"] = BufferSpec((1, MAX_BATCH_TOKENS, padded), scope="token")
    specs["normed"] = BufferSpec((n_threads, MAX_BATCH_TOKENS, padded), scope="token")
    specs["scratch"] = BufferSpec((n_threads, MAX_BATCH_TOKENS, words), scope="token")
    specs["scores"] = BufferSpec((n_threads, MAX_TILE_TOKENS, sizes.n_positions))
    for suffix, layers in group_layers(config, *SIZE_FIELDS).items():
        cached = [i for i in layers if has_kv_cache(config, weights, i)]
        group = layer_group_buffers(config.layer_config(layers[0]), weights, sizes, layers, len(cached))
        specs |= {name + suffix: buffer for name, buffer in group.items()}
    return specs


def group_layers(config: ModelConfig, *names: str) -> dict[str, list[int]]:
    """Return the layers' indexes in groups with equal values of the named config fields, by the suffix of their buffers' names.

    The suffix of the first group is empty.
    """
    if not config.layers:
        return {"": [*range(config.n_layers)]}
    groups = dict[tuple[object, ...], list[int]]()
    for i in range(config.n_layers):
        layer = config.layer_config(i)
        groups.setdefault(tuple(getattr(layer, name) for name in names), []).append(i)
    return {f"_{index}" * (index > 0): layers for index, layers in enumerate(groups.values())}


def has_kv_cache(config: ModelConfig, weights: Weights, i: int) -> bool:
    """Return whether layer i is an attention layer that caches keys and values of its own."""
    return config.layer_config(i).has_own_kv and f"{i}.qkv" in weights.matrices


def kv_bytes_per_position(config: ModelConfig, kv: KVFormat) -> int:
    """Return the bytes that the keys, values and scales of one position take in one attention layer's KV cache."""
    if latent := config.attention.latent:
        return int(latent.cache_width * np.dtype(kv.dtype).itemsize + 4 * kv.is_scaled)
    n = config.head_dim + round_up(config.head_dim, PANEL_ROWS)
    return int(config.n_kv_heads * (n * np.dtype(kv.dtype).itemsize + 8 * kv.is_scaled))


def layer_group_buffers(
    config: ModelConfig, weights: Weights, sizes: BufferSizes, layers: Sequence[int], n_cached: int
) -> dict[str, BufferSpec]:
    """Return the specs of the buffers of layers with equal sizes; n_cached of the layers have their own keys and values.

    keys (L, G, S / R, K, R): panels of positions; none in latent attention, where a row of values is the key, too.
    values (L, G, ceil(K / R), S, R).
    key_scales, value_scales (L, G, S), or (L, G, 0): see `AttentionArgs`.
    qkv (T, rows of q, of k and of v).
    mixed (threads, MAX_TILE_TOKENS, K padded): one head's weighted values.
    heads (1, T, H K padded): output of attention, whose heads have another length in latent attention.
    up (T, rows of the MLP's first matrix).
    hidden (1, T, F padded).
    """
    matrices, positions = weights.matrices, sizes.n_positions
    kv_heads, head_panels = config.n_kv_heads, ceil_div(config.head_dim, PANEL_ROWS)
    keys, values = (positions // PANEL_ROWS, config.head_dim, PANEL_ROWS), (head_panels, positions, PANEL_ROWS)
    scales = BufferSpec((n_cached, kv_heads, positions * sizes.kv.is_scaled), scope="cache" if sizes.kv.is_scaled else "sequence")
    up, qkv = (
        max((matrix.n_total_rows for i in layers if (matrix := matrices.get(f"{i}.{name}"))), default=PANEL_ROWS)
        for name in ("up", "qkv")
    )
    hidden = config.hidden_dim if any(f"{i}.down" in matrices for i in layers) else 1  # layers of experts alone do not use it
    mixed = head_panels * PANEL_ROWS
    cache = {
        "keys": BufferSpec((n_cached, kv_heads, *keys), sizes.kv.dtype, "cache"),
        "values": BufferSpec((n_cached, kv_heads, *values), sizes.kv.dtype, "cache"),
        **dict.fromkeys(("key_scales", "value_scales"), scales),
    }
    if latent := config.attention.latent:
        mixed, values = latent.latent_width, (latent.cache_width // PANEL_ROWS, positions, PANEL_ROWS)
        cache = {"values": BufferSpec((n_cached, kv_heads, *values), sizes.kv.dtype, "cache"), "value_scales": scales}
    return (cache if n_cached else {}) | {
        "qkv": BufferSpec((MAX_BATCH_TOKENS, qkv), scope="token"),
        "mixed": BufferSpec((sizes.n_threads, MAX_TILE_TOKENS, mixed)),
        "heads": BufferSpec((1, MAX_BATCH_TOKENS, round_up(config.output_dim, PANEL_ROWS)), scope="token"),
        "up": BufferSpec((MAX_BATCH_TOKENS, up), scope="token"),
        "hidden": BufferSpec((1, MAX_BATCH_TOKENS, round_up(hidden, PANEL_ROWS)), scope="token"),
    }


SIZE_FIELDS = ("n_heads", "n_kv_heads", "head_dim", "hidden_dim", "has_own_kv")  # that determine the sizes of a layer's buffers
KV_BUFFERS = ("keys", "values", "key_scales", "value_scales")  # of attention layers
STATE_BUFFERS = ("inputs", "states", "lengths", "delta_keys", "deltas", "decays")  # of layers with mixers
ACTIVATION_BUFFERS = ("qkv", "mixed", "heads", "up", "hidden")
ROPE_FIELDS = ("rope", "head_dim")  # that determine a layer's RoPE tables
ROPE_TABLES = ("rope_cos", "rope_sin")


def split_by_layer(config: ModelConfig, weights: Weights, b: Buffers) -> list[Buffers]:
    """Return one `Buffers` for each layer, with the layer's arrays under the names that its blocks use.

    A layer's arrays are those of its size group, its RoPE tables, its mixer's state, and its KV cache or the one that it reads.
    """
    by_layer: list[dict[str, Float32]] = [{} for _ in range(config.n_layers)]
    size_groups, rope_groups = group_layers(config, *SIZE_FIELDS), group_layers(config, *ROPE_FIELDS)
    cached = {suffix: [i for i in layers if has_kv_cache(config, weights, i)] for suffix, layers in size_groups.items()}
    mixers = {"": [i for i in range(config.n_layers) if config.layer_config(i).mixer]}
    for names, groups in (
        (ACTIVATION_BUFFERS, size_groups),
        (ROPE_TABLES, rope_groups),
        (KV_BUFFERS, cached),
        (STATE_BUFFERS, mixers),
    ):
        for suffix, layers in groups.items():
            arrays = {name: getattr(b, name + suffix) for name in names if hasattr(b, name + suffix)}
            for index, i in enumerate(layers):  # caches and states have an entry for each layer
                by_layer[i] |= (
                    arrays
                    if names in (ACTIVATION_BUFFERS, ROPE_TABLES)
                    else {name: array[index] for name, array in arrays.items()}
                )
    for i in range(config.n_layers):
        if (source := config.layer_config(i).attention.kv_layer) is not None and source != TARGET_KV_LAYER:
            by_layer[i] |= {name: by_layer[source][name] for name in KV_BUFFERS}
    return [Buffers(**vars(b) | each) for each in by_layer]


def get_scratches(b: Buffers) -> list[Float32]:
    """Return the scratch arrays in the buffers, enough for one per shard of any matrix."""
    return [b.scratch, *getattr(b, "more_scratch", ())]


def norm_shapes(config: ModelConfig, name: str) -> Shapes:
    """Return the shapes of the norms before and behind a block, by name; the norm behind the block has the suffix "_out"."""
    names = {"before": [name], "behind": [f"{name}_out"], "around": [name, f"{name}_out"]}[config.norm_placement]
    if config.layer_norm:
        names.append(f"{name}_bias")
    return dict.fromkeys(names, (config.dim,))


def norm(config: ModelConfig, weights: Weights, b: Buffers, name: str, logits_only: bool = False) -> Op:
    """Return the op of normed = rmsnorm(x), or layernorm(x) if the config has LayerNorms, with the norm weights of this name.

    x is a family's residual stream divided by residual_scale, so that layers add their output without a factor. So eps is
    divided by the square of residual_scale. With logits_only, the op runs for the tokens with requested logits only, and the
    weights are divided by logit_divisor.
    """
    weight = weights.vectors[name]
    if logits_only and config.logit_divisor != 1:
        weight = weight / np.float32(config.logit_divisor)
    eps = config.norm_eps / (config.residual_scale * config.residual_scale)
    if config.layer_norm:
        return layer_norm(b.normed, b.x, weight, weights.vectors[f"{name}_bias"], config.dim, eps, logits_only)
    return rms_norm(b.normed, b.x, weight, config.dim, eps, logits_only, 0)


def prepare_input(config: ModelConfig, weights: Weights, b: Buffers, name: str) -> tuple[Float32, list[Op]]:
    """Return the buffer with a block's input, x or x normed by the norm of this name, and the ops that compute this input."""
    return (b.x, []) if config.norm_placement == "behind" else (b.normed, [norm(config, weights, b, name)])


def add_residual(
    config: ModelConfig, weights: Weights, b: Buffers, matrix: Matrix, source: Float32, bias: str, name: str, factor: float = 1.0
) -> Program:
    """Return the program of x += matrix source + bias, a block's last step.

    With a norm behind the block (`name`_out), the sum is normed before it is added, and x is multiplied by factor afterwards;
    without one, factor is ignored. No bias is added if there is none of the name `bias`.
    """
    if config.norm_placement == "before":
        return [[matrix.matmul(b.x[0], source, b.scratch, accumulate=True), *make_bias_ops(weights, b.x[0], bias)]]
    return [
        [matrix.matmul(b.branch[0], source, b.scratch), *make_bias_ops(weights, b.branch[0], bias)],
        [add_norm(b.x[0], b.branch, weights.vectors[f"{name}_out"], config.dim, config.norm_eps, factor)],
    ]


LAYER_SCALE = "layer_scale"


def get_layer_scale(config: ModelConfig, weights: Weights, i: int, is_last: bool = True) -> float:
    """Return the factor that multiplies the residual stream after a block of layer i: 1 unless this block is the layer's last."""
    return float(weights.vectors[f"{i}.{LAYER_SCALE}"][0]) if config.layer_scale and is_last else 1.0


def make_bias_ops(weights: Weights, out: Float32, name: str, unit: int = 1) -> list[Op]:
    """Return a list with the op that adds the bias `name` to a matmul's output; empty if there is no such bias.

    unit: The matmul's number of panels per step; see `Matrix.matmul`.
    """
    return [add_bias(out, weights.vectors[name], unit)] if name in weights.vectors else []


def make_scale_ops(out: Float32, scales: Sequence[float], sizes: Sequence[int], unit: int = 1) -> list[Op]:
    """Return a list with the op that multiplies the parts of a matmul's output by a factor each; empty if there are no factors.

    Args:
        out: Output of the matmul (T, rows).
        scales: Factor of each part, or none.
        sizes: Number of rows of each part, which is padded to whole panels.
        unit: The matmul's number of panels per step; see `Matrix.matmul`.
    """
    rows = [round_up(size, PANEL_ROWS) for size in sizes]
    return [scale_columns(out, np.repeat(scales, rows).astype(np.float32), unit)] if scales else []
