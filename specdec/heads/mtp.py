"""Qwen3.5's own head, which predicts more tokens (after Gloeckle et al. 2024, arXiv:2404.19737): its tensors, matrices, and pass.

A pair, what the target's last norm makes of position i and the token of position i + 1, tells the token of i + 2. Behind the last
one whose states the target has computed, the head's own output, normed, takes their place. Embedding and classifier are the
target's. That the states are behind the last norm is as vLLM and llama.cpp have it: 2.7 tokens a pass stood, and 1.8 of those in
front of it.
"""

from specdec.config import Config
from specdec.heads import eagle3
from specdec.heads.eagle3 import head_of
from specdec.kernels import MAX_TOKENS, copy_rows, rms_norm
from specdec.layers.attention import mixing
from specdec.layers.base import Architecture, Buffer, Buffers, Layers, Packed, Room, Shapes, Weights, packed
from specdec.layers.block import by_layer, norm
from specdec.model import llama
from specdec.runtime.program import Program
from specdec.runtime.simd import round_up
from specdec.runtime.tile import STRIP_ROWS

OWN_NORMS = ("rms_emb", "rms_hidden", "rms_final")
TARGET_NORM = "target_norm"  # the target's own, which a head borrows


def shapes(config: Config) -> Shapes:
    """Llama's, of one layer; fc, which joins embedding and state, and a norm of each of them; on a target, what it borrows."""
    head, dim, ours = head_of(config), config.dim, llama.shapes(config)
    tensors = {name: shape if "." in name else shape[1:] for name, shape in ours.items() if name not in llama.OUTER}
    tensors |= {"fc": (dim, 2 * dim)} | dict.fromkeys(OWN_NORMS, (dim,))
    if head.own_embedding:
        tensors |= {"tok_emb": (config.vocab_size, dim), TARGET_NORM: (dim,)}
    return tensors | ({"wcls": (config.vocab_size, dim)} if head.own_classifier else {})


def pack_of(config: Config) -> Packed:
    """Llama's of one layer, and the others."""
    stored, own = shapes(config), Packed()
    for block in llama.blocks_of(config, 0):
        own |= packed(block.shapes(config), block.joined, stored, 0)
    outer = ("tok_emb", "wcls", "fc", *OWN_NORMS, TARGET_NORM)
    return own | packed({name: stored[name] for name in outer if name in stored}, llama.TABLES, stored)


def buffers(config: Config, weights: Weights, room: Room) -> dict[str, Buffer]:
    """EAGLE-3's; joined (1, T, D padded): what fc makes of embedding and state."""
    joined = Buffer((1, MAX_TOKENS, round_up(config.dim, STRIP_ROWS)), whose="token")
    return eagle3.buffers(config, weights, room) | {"joined": joined}


def features(config: Config, weights: Weights, b: Buffers) -> Program:
    """x = norm(taps), by the target's last norm."""
    normed = rms_norm(b.normed, b.taps, weights.vectors[TARGET_NORM], config.dim, config.norm_eps, False, 0)
    return [[normed, copy_rows(b.x[0], b.normed, 0, 0, config.dim, False)]]


def program(config: Config, weights: Weights, b: Buffers) -> Layers:
    """Of x, features or outputs fed back: x = fc concat(norm(embedding), norm(x)), then as llama; its normed output is kept."""
    (inner,) = by_layer(config, weights, Buffers(**vars(b) | {"x": b.joined}))
    joining = [[*eagle3.pair_norms(config, weights, b), weights.matrices["fc"].product(b.joined[0], b.pairs, b.scratch)]]
    layer = mixing(config, weights, inner, 0, b.normed, [norm(config, weights, inner, "0.rms_att")])
    mlp = llama.blocks_of(config, 0)[1].program(config, weights, inner, 0)
    output = [[norm(config, weights, inner, "rms_final"), copy_rows(b.outputs, b.normed, 0, 0, config.dim, True)]]
    return Layers(
        [[weights.matrices["embedding"].embedding(b.embedded[0], b.tokens)]],
        [[*joining, *layer, *mlp]],
        [*output, *llama.classify(config, weights, inner)],
    )


MTP = Architecture(shapes, pack_of, buffers, program, llama.fill, features=features)
