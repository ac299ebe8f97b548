"""What layers are made of: blocks, two a layer, one that mixes positions and one that does not. Knows none of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specdec.config import OF_TARGET, Config
from specdec.kernels import MAX_TOKENS, KVCache, add_bias, add_norm, rms_norm
from specdec.layers.base import PIECE, Buffer, Buffers, Joined, Room, Shapes, Weights
from specdec.quant.matrix import Matrix
from specdec.runtime.program import Program, Row
from specdec.runtime.simd import Float32, ceil_div, round_up
from specdec.runtime.tile import STRIP_ROWS, TILE_TOKENS


class Block(NamedTuple):
    """Half a layer, whose program adds what it makes of x to x.

    shapes: of one layer's tensors, norms among them. joined: those that are packed as one, or by another name. program: of layer
    i. buffers: what it works in, beside `block_buffers`.
    """

    shapes: Callable[[Config], Shapes]
    joined: Mapping[str, Joined]
    program: Callable[[Config, Weights, Buffers, int], Program]
    buffers: Callable[[Config, Weights, Room], dict[str, Buffer]] = lambda config, weights, room: {}


def block_buffers(config: Config, weights: Weights, room: Room) -> dict[str, Buffer]:
    """Of layers of attention, whose first products are called "qkv", and of MLPs: KV cache, activations, scratch for each thread.

    normed (threads, T, D padded). scratch (threads, T, words): activations in a form of a kind of weights' own.
    scores (threads, TILE_TOKENS, S): of one head. more_scratch (N, threads, T, words): for pieces of matrices. branch (1, T, D
    padded): what is to be normed and added, where a norm stands behind blocks. The others: see `sized_buffers`.
    """
    matrices, n_threads = weights.matrices, room.n_threads
    padded, words = round_up(config.dim, STRIP_ROWS), max(matrix.scratch_words for matrix in matrices.values())
    n_pieces = max(int(name.partition(PIECE)[2] or 0) for name in matrices)  # beside the first of a matrix
    own = {"more_scratch": Buffer((n_pieces, n_threads, MAX_TOKENS, words), whose="token")} if n_pieces else {}
    if config.norms != "before":
        own["branch"] = Buffer((1, MAX_TOKENS, padded), whose="token")
    own["normed"] = Buffer((n_threads, MAX_TOKENS, padded), whose="token")
    own["scratch"] = Buffer((n_threads, MAX_TOKENS, words), whose="token")
    own["scores"] = Buffer((n_threads, TILE_TOKENS, room.n_positions))
    for end, layers in alike(config, *SIZES).items():
        own_cache = [i for i in layers if has_own_cache(config, weights, i)]
        sized = sized_buffers(config.of_layer(layers[0]), weights, room, layers, len(own_cache))
        own |= {name + end: buffer for name, buffer in sized.items()}
    return own


def alike(config: Config, *names: str) -> dict[str, list[int]]:
    """Layers that are alike in those numbers, by what the names of their buffers end in: nothing for the first of them."""
    if not config.layers:
        return {"": [*range(config.n_layers)]}
    found = dict[tuple[object, ...], list[int]]()
    for i in range(config.n_layers):
        own = config.of_layer(i)
        found.setdefault(tuple(getattr(own, name) for name in names), []).append(i)
    return {f"_{number}" * (number > 0): layers for number, layers in enumerate(found.values())}


def has_own_cache(config: Config, weights: Weights, i: int) -> bool:
    """Whether layer i is one of attention with keys and values of its own."""
    return config.of_layer(i).has_cache and f"{i}.qkv" in weights.matrices


def position_bytes(config: Config, kv: KVCache) -> int:
    """What keys and values of a position take in one such layer, and their scales."""
    n = config.head_dim + round_up(config.head_dim, STRIP_ROWS)
    return int(config.n_kv_heads * (n * np.dtype(kv.dtype).itemsize + 8 * kv.is_scaled))


def sized_buffers(config: Config, weights: Weights, room: Room, layers: Sequence[int], n_cached: int) -> dict[str, Buffer]:
    """Of those layers, which have the same sizes, and of which so many have keys and values of their own.

    keys (L, G, S / R, K, R): strips of positions, as many as there is room for. values (L, G, ceil(K / R), S, R). key_scales,
    value_scales (L, G, S), or (L, G, 0): see `Attention`.
    qkv (T, rows of q, of k and of v). mixed (threads, TILE_TOKENS, K padded): one head's weighted values. heads (1, T, H K
    padded): what attention hands on. up (T, rows of the MLP's first matrix). hidden (1, T, F padded).
    """
    matrices, positions = weights.matrices, room.n_positions
    kv_heads, head_strips = config.n_kv_heads, ceil_div(config.head_dim, STRIP_ROWS)
    keys, values = (positions // STRIP_ROWS, config.head_dim, STRIP_ROWS), (head_strips, positions, STRIP_ROWS)
    scales = Buffer((n_cached, kv_heads, positions * room.kv.is_scaled), whose="cache" if room.kv.is_scaled else "text")
    up, qkv = (
        max((matrix.whole_rows for i in layers if (matrix := matrices.get(f"{i}.{name}"))), default=STRIP_ROWS)
        for name in ("up", "qkv")
    )
    cache = {
        "keys": Buffer((n_cached, kv_heads, *keys), room.kv.dtype, "cache"),
        "values": Buffer((n_cached, kv_heads, *values), room.kv.dtype, "cache"),
        **dict.fromkeys(("key_scales", "value_scales"), scales),
    }
    return (cache if n_cached else {}) | {
        "qkv": Buffer((MAX_TOKENS, qkv), whose="token"),
        "mixed": Buffer((room.n_threads, TILE_TOKENS, head_strips * STRIP_ROWS)),
        "heads": Buffer((1, MAX_TOKENS, round_up(config.q_dim, STRIP_ROWS)), whose="token"),
        "up": Buffer((MAX_TOKENS, up), whose="token"),
        "hidden": Buffer((1, MAX_TOKENS, round_up(config.hidden_dim, STRIP_ROWS)), whose="token"),
    }


SIZES = ("n_heads", "n_kv_heads", "head_dim", "hidden_dim", "has_cache")  # which tell how large a layer's buffers are
CACHED = ("keys", "values", "key_scales", "value_scales")  # of layers of attention alone
REMEMBERED = ("inputs", "states", "lengths", "delta_keys", "deltas", "decays")  # of layers of mixers
SIZED = ("qkv", "mixed", "heads", "up", "hidden")
ANGLES = ("rope", "head_dim")  # which tell by which tables a layer turns heads
TURNING = ("rope_cos", "rope_sin")


def by_layer(config: Config, weights: Weights, b: Buffers) -> list[Buffers]:
    """Buffers as each layer's blocks name them: those of its sizes and angles, what its mixer remembers, and its cache, or that
    which it takes.
    """
    own: list[dict[str, Float32]] = [{} for _ in range(config.n_layers)]
    sizes, angles = alike(config, *SIZES), alike(config, *ANGLES)
    cached = {end: [i for i in layers if has_own_cache(config, weights, i)] for end, layers in sizes.items()}
    mixing = {"": [i for i in range(config.n_layers) if config.of_layer(i).mixer]}
    for names, groups in ((SIZED, sizes), (TURNING, angles), (CACHED, cached), (REMEMBERED, mixing)):
        for end, layers in groups.items():
            arrays = {name: getattr(b, name + end) for name in names if hasattr(b, name + end)}
            for place, i in enumerate(layers):  # of what a layer keeps each has its own
                own[i] |= arrays if names in (SIZED, TURNING) else {name: array[place] for name, array in arrays.items()}
    for i in range(config.n_layers):
        if (source := config.of_layer(i).attention.kv_layer) is not None and source != OF_TARGET:
            own[i] |= {name: own[source][name] for name in CACHED}
    return [Buffers(**vars(b) | each) for each in own]


def scratches(b: Buffers) -> list[Float32]:
    """For each piece of a matrix one."""
    return [b.scratch, *getattr(b, "more_scratch", ())]


def norm_shapes(config: Config, name: str) -> Shapes:
    """Of the norms around a block: that before it, and that behind it, which is called so too."""
    names = {"before": [name], "behind": [f"{name}_out"], "around": [name, f"{name}_out"]}[config.norms]
    return dict.fromkeys(names, (config.dim,))


def norm(config: Config, weights: Weights, b: Buffers, name: str, of_logits: bool = False) -> Row:
    """normed = rmsnorm(x), by the weights of that name, which logits take their scale from.

    x is a family's residual stream divided by residual_scale, so that layers add what they compute; eps is by its square.
    """
    weight = weights.vectors[name]
    if of_logits and config.logit_divisor != 1:
        weight = weight / np.float32(config.logit_divisor)
    eps = config.norm_eps / (config.residual_scale * config.residual_scale)
    return rms_norm(b.normed, b.x, weight, config.dim, eps, of_logits, 0)


def taken(config: Config, weights: Weights, b: Buffers, name: str) -> tuple[Float32, list[Row]]:
    """What a block takes: x, normed by the norm of that name where one stands before it, and what makes it."""
    return (b.x, []) if config.norms == "behind" else (b.normed, [norm(config, weights, b, name)])


def added(
    config: Config, weights: Weights, b: Buffers, matrix: Matrix, source: Float32, bias: str, name: str, factor: float = 1.0
) -> Program:
    """x += matrix source, and the bias of that name where there is one; where norms stand behind blocks, normed by that name, and
    x is multiplied by a factor then.
    """
    if config.norms == "before":
        return [[matrix.product(b.x[0], source, b.scratch, adding=True), *biased(weights, b.x[0], bias)]]
    return [
        [matrix.product(b.branch[0], source, b.scratch), *biased(weights, b.branch[0], bias)],
        [add_norm(b.x[0], b.branch, weights.vectors[f"{name}_out"], config.dim, config.norm_eps, factor)],
    ]


LAYER_SCALE = "layer_scale"


def factor_of(config: Config, weights: Weights, i: int, is_last: bool = True) -> float:
    """What a block of layer i multiplies the residual stream by, if it is the layer's last."""
    return float(weights.vectors[f"{i}.{LAYER_SCALE}"][0]) if config.layer_scale and is_last else 1.0


def biased(weights: Weights, out: Float32, name: str, unit: int = 1) -> list[Row]:
    """What adds the bias of that name to a product of that unit, if there is one."""
    return [add_bias(out, weights.vectors[name], unit)] if name in weights.vectors else []
