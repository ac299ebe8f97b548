"""What families share whose layers are attention and an MLP: their buffers, attention, a tree's path in their KV cache."""

from ..kernels import MAX_TOKENS, move_slots
from ..machine.programs import Row
from ..machine.tiles import STRIP_ROWS, TILE_TOKENS
from ..machine.vectors import Int64, ceil_div, round_up
from .config import Config
from .plan import Buffer, Buffers, Room, Weights


def block_buffers(config: Config, weights: Weights, room: Room) -> dict[str, Buffer]:
    """Of layers of attention, whose first products are called "qkv", and of MLPs: KV cache, activations, scratch for each thread.

    keys (L, G, S / R, K, R): strips of positions, as many as there is room for. values (L, G, ceil(K / R), S, R); L: the layers
    that have attention.
    normed (threads, T, D padded). scratch (threads, T, words): activations in a form of a kind of weights' own.
    qkv (T, rows of q, of k and of v). scores (threads, TILE_TOKENS, S), mixed (threads, TILE_TOKENS, K padded): one head's scores
    and weighted values. heads (1, T, H K padded): what attention hands on. up (T, rows of the MLP's first matrix).
    hidden (1, T, F padded).
    """
    matrices, n_threads, positions = weights.matrices, room.n_threads, room.n_positions
    qkv = [matrix for name, matrix in matrices.items() if name.endswith(".qkv")]
    n_up = max((matrix.n_rows for name, matrix in matrices.items() if name.endswith(".up")), default=STRIP_ROWS)
    layers, kv_heads, head_strips = len(qkv), config.n_kv_heads, ceil_div(config.head_dim, STRIP_ROWS)
    keys, values = (positions // STRIP_ROWS, config.head_dim, STRIP_ROWS), (head_strips, positions, STRIP_ROWS)
    return {
        "keys": Buffer((layers, kv_heads, *keys), room.kv.dtype, "cache"),
        "values": Buffer((layers, kv_heads, *values), room.kv.dtype, "cache"),
        "normed": Buffer((n_threads, MAX_TOKENS, round_up(config.dim, STRIP_ROWS)), whose="token"),
        "scratch": Buffer((n_threads, MAX_TOKENS, max(matrix.scratch_words for matrix in matrices.values())), whose="token"),
        "qkv": Buffer((MAX_TOKENS, qkv[0].n_rows), whose="token"),
        "scores": Buffer((n_threads, TILE_TOKENS, positions)),
        "mixed": Buffer((n_threads, TILE_TOKENS, head_strips * STRIP_ROWS)),
        "heads": Buffer((1, MAX_TOKENS, round_up(config.q_dim, STRIP_ROWS)), whose="token"),
        "up": Buffer((MAX_TOKENS, n_up), whose="token"),
        "hidden": Buffer((1, MAX_TOKENS, round_up(config.hidden_dim, STRIP_ROWS)), whose="token"),
    }


def attention(config: Config, b: Buffers, i: int) -> Row:
    """heads = what each query head of layer i sees of the text up to its token, or of a window of it."""
    numbers = config.n_heads, config.n_seen, config.score_scale
    row: Row = b.kv.attention(b.heads, b.qkv, b.keys[i], b.values[i], b.scores, b.mixed, b.depths, b.paths, *numbers)
    return row


def move_path(buffers: Buffers, path: Int64, n_text: int) -> None:
    """`Architecture.move`."""
    move_slots(buffers.keys, buffers.values, path, n_text)
