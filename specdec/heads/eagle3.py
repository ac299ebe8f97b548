"""EAGLE-3 (Li et al. 2025, arXiv:2503.01840): a layer that drafts from a target's hidden states; its tensors, matrices, and pass.

A pair, what the target's hidden states at position i make of it and the token of position i + 1, tells the token of i + 2. Behind
the last one whose states the target has computed, the head's own output takes their place.

Shapes: H width of the target's hidden states, N of which make a feature; h the head's own.
"""

from specdec.config import Config, HeadConfig, known_as
from specdec.kernels import MAX_TOKENS, copy_rows, rms_norm
from specdec.layers.attention import ATTENTION, mixing
from specdec.layers.base import Architecture, Buffer, Buffers, Layers, Packed, Room, Shapes, Vector, Weights, packed
from specdec.layers.block import by_layer
from specdec.layers.mlp import MLP
from specdec.model import llama
from specdec.runtime.program import Program, Row
from specdec.runtime.simd import round_up
from specdec.runtime.tile import STRIP_ROWS

OF_LAYER = ("rms_ffn", "wq", "wk", "wv", "wo", "w1", "w2", "w3", "bq", "bk", "bv", "bo", "b1", "b2", "b3", "q_norm", "k_norm")


def head_of(config: Config) -> HeadConfig:
    """What a head needs beside a model's numbers, which `Config.flaw` has asked for."""
    return known_as(config.head, HeadConfig)


def taps(config: Config) -> tuple[int, int]:
    """In how many rows, normed each by itself, a feature's hidden states lie, and their width."""
    head = head_of(config)
    n_rows = head.n_states if head.fc_norm == "each" else 1
    return n_rows, head.n_states * head.target_dim // n_rows


def shapes(config: Config) -> Shapes:
    """Llama's, of one layer, but for the products of two vectors one behind the other, and what makes these."""
    head, dim, ours = head_of(config), config.dim, llama.layer_shapes(config, 0)
    tensors = {name: ours[name] for name in OF_LAYER if name in ours}
    tensors |= {name: (tensors[name][0], 2 * dim) for name in ("wq", "wk", "wv")}
    tensors |= {"fc": (dim, head.n_states * head.target_dim), "rms_emb": (dim,), "rms_hidden": (dim,), "rms_final": (dim,)}
    if head.fc_norm:
        tensors["fc_norm"] = taps(config)
    if head.own_classifier:
        tensors["wcls"] = (head.n_rows, dim)
    if head.own_embedding:
        tensors["tok_emb"] = (config.vocab_size, dim)
    return tensors


def pack_of(config: Config) -> Packed:
    """Llama's of one layer, and the others, a norm for each row of taps."""
    stored = shapes(config)
    layer = {name: shape for name, shape in stored.items() if name in OF_LAYER}
    outer = {name: shape for name, shape in stored.items() if name not in OF_LAYER and name != "fc_norm"}
    n_norms, *width = stored.get("fc_norm", (0,))
    norms = {f"fc_norm.{i}": Vector((("fc_norm", i),), tuple(width)) for i in range(n_norms)}
    return packed(outer, llama.TABLES, stored) | packed(layer, {**ATTENTION.joined, **MLP.joined}, stored, 0) | norms


def buffers(config: Config, weights: Weights, room: Room) -> dict[str, Buffer]:
    """Llama's; taps: the target's hidden states of a pass's pairs, (1, T, N H padded), or (N, T, H padded) where each is normed;
    tapped (threads, T, N H and more): the same, normed; embedded, residual (1, T, h padded): the tokens, and what a layer adds to
    where that is normed; pairs (threads, T, 2 h and more): embedding and feature, normed; outputs (S, h): what may be fed back.
    """
    head, (n_taps, width), padded = head_of(config), taps(config), round_up(config.dim, STRIP_ROWS)
    own = {
        "taps": Buffer((n_taps, MAX_TOKENS, round_up(width, STRIP_ROWS)), whose="token"),
        "embedded": Buffer((1, MAX_TOKENS, padded), whose="token"),
        "pairs": Buffer((room.n_threads, MAX_TOKENS, round_up(config.dim + padded, STRIP_ROWS)), whose="token"),
        "outputs": Buffer((room.n_positions, config.dim), whose="cache"),
    }
    if head.norm_before_residual:
        own["residual"] = own["embedded"]
    if head.fc_norm:
        end = (n_taps - 1) * width + round_up(width, STRIP_ROWS)
        own["tapped"] = Buffer((room.n_threads, MAX_TOKENS, round_up(end, STRIP_ROWS)), whose="token")
    return llama.buffers(config, weights, room) | own


def features(config: Config, weights: Weights, b: Buffers) -> Program:
    """x = fc taps, which may be normed: what runs before the pass over pairs whose hidden states the target has computed."""
    n_taps, width = taps(config)
    tapped, norms = b.taps, list[Row]()
    if head_of(config).fc_norm:
        tapped = b.tapped
        norms = [
            rms_norm(tapped, b.taps[i : i + 1], weights.vectors[f"fc_norm.{i}"], width, config.norm_eps, False, i * width)
            for i in range(n_taps)
        ]
    return [[*norms, weights.matrices["fc"].product(b.x[0], tapped, b.scratch)]]


def pair_norms(config: Config, weights: Weights, b: Buffers) -> list[Row]:
    """What makes pairs: embedding and x, each normed."""
    sides = (b.embedded, "rms_emb", 0), (b.x, "rms_hidden", config.dim)
    return [rms_norm(b.pairs, x, weights.vectors[name], config.dim, config.norm_eps, False, at) for x, name, at in sides]


def program(config: Config, weights: Weights, b: Buffers) -> Layers:
    """Of x, features or outputs fed back: x = (x or norm(x)) + wo attention(rope(qkv concat(norm(embedding), norm(x)))), then
    as llama.
    """
    head, v, dim = head_of(config), weights.vectors, config.dim
    (own,) = by_layer(config, weights, b)
    halves = mixing(config, weights, own, 0, b.pairs, pair_norms(config, weights, b)), MLP.program(config, weights, own, 0)
    layer = [list(phase) for half in halves for phase in half]
    if head.norm_before_residual:
        layer[0].append(copy_rows(b.residual[0], b.pairs, 0, dim, dim, False))
        layer[1].append(copy_rows(b.x[0], b.residual, 0, 0, dim, False))  # beside attention: all threads have read x
    output = [[copy_rows(b.outputs, b.x, 0, 0, dim, True)]]
    if head.norm_output:
        normed = rms_norm(b.normed, b.x, v["rms_final"], dim, config.norm_eps, False, 0)
        output = [[normed, copy_rows(b.outputs, b.normed, 0, 0, dim, True)]]
    return Layers(
        [[weights.matrices["embedding"].embedding(b.embedded[0], b.tokens)]],
        [layer],
        [*output, *llama.classify(config, weights, b)],
    )


EAGLE3 = Architecture(shapes, pack_of, buffers, program, llama.fill, features=features)
