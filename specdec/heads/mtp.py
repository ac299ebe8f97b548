"""Qwen3.5's multi-token-prediction head (after Gloeckle et al. 2024, arXiv:2404.19737): tensors, buffers, and programs.

A pair consists of the target's hidden state of position i after its final norm, and the token of position i + 1. It predicts the
token of i + 2. After the last position with a state of the target, the head's own output, normed, takes its place. Embedding and
classifier are the target's. As in vLLM and llama.cpp, states are taken after the final norm: 2.7 tokens per pass were accepted,
compared with 1.8 for states before it.

Shapes: T tokens of a pass, D dim.
"""

from specdec.heads import eagle3
from specdec.heads.eagle3 import get_head_config
from specdec.kernels import MAX_BATCH_TOKENS, copy_rows, rms_norm
from specdec.layers.architecture import (
    Architecture,
    Buffers,
    BufferSizes,
    BufferSpec,
    ForwardProgram,
    PackedTensors,
    Shapes,
    Weights,
    fuse_tensors,
)
from specdec.layers.block import norm, split_by_layer
from specdec.model import llama
from specdec.model_config import ModelConfig
from specdec.runtime.matmul_tile import PANEL_ROWS
from specdec.runtime.op_program import Program
from specdec.runtime.simd import round_up

OWN_NORMS = ("rms_emb", "rms_hidden", "rms_final")
TARGET_NORM = "target_norm"  # the target's final norm, which a head borrows


def shapes(config: ModelConfig) -> Shapes:
    """Return the shapes of a multi-token-prediction head's tensors, by name.

    They are those of one Llama layer, fc, which joins embedding and state, and norms. A head on a target also has the tensors
    that it borrows.
    """
    head, dim, llama_shapes = get_head_config(config), config.dim, llama.shapes(config)
    tensors = {
        name: shape if "." in name else shape[1:] for name, shape in llama_shapes.items() if name not in llama.GLOBAL_TENSORS
    }
    tensors |= {"fc": (dim, 2 * dim)} | dict.fromkeys(OWN_NORMS, (dim,))
    if head.own_embedding:
        tensors |= {"tok_emb": (config.vocab_size, dim), TARGET_NORM: (dim,)}
    return tensors | ({"wcls": (config.vocab_size, dim)} if head.own_classifier else {})


def packed_tensors(config: ModelConfig) -> PackedTensors:
    """Return the packed tensors of a multi-token-prediction head by name, made from those of `shapes`."""
    stored, packed = shapes(config), PackedTensors()
    for block in llama.get_blocks(config, 0):
        packed |= fuse_tensors(block.shapes(config), block.fused, stored, 0)
    others = ("tok_emb", "wcls", "fc", *OWN_NORMS, TARGET_NORM)
    return packed | fuse_tensors({name: stored[name] for name in others if name in stored}, llama.FUSED_VOCAB, stored)


def buffers(config: ModelConfig, weights: Weights, sizes: BufferSizes) -> dict[str, BufferSpec]:
    """Return the specs of the head's buffers, by name: those of EAGLE-3, and joined (1, T, D padded), the output of fc."""
    joined = BufferSpec((1, MAX_BATCH_TOKENS, round_up(config.dim, PANEL_ROWS)), scope="token")
    return eagle3.buffers(config, weights, sizes) | {"joined": joined}


def features(config: ModelConfig, weights: Weights, b: Buffers) -> Program:
    """Return the program that computes features from the target's hidden states: x = norm(taps), with the target's final norm."""
    normed = rms_norm(b.normed, b.taps, weights.vectors[TARGET_NORM], config.dim, config.norm_eps, False, 0)
    return [[normed, copy_rows(b.x[0], b.normed, 0, 0, config.dim, False)]]


def program(config: ModelConfig, weights: Weights, b: Buffers) -> ForwardProgram:
    """Return the program of a pass: joined = fc concat(norm(embedding), norm(x)), then a layer and the classifier as in Llama.

    The input x holds features, or outputs that are fed back; the normed output is kept for that.
    """
    (inner,) = split_by_layer(config, weights, Buffers(**vars(b) | {"x": b.joined}))
    joining = [[*eagle3.make_pair_norms(config, weights, b), weights.matrices["fc"].matmul(b.joined[0], b.pairs, b.scratch)]]
    layer = [phase for block in llama.get_blocks(config, 0) for phase in block.program(config, weights, inner, 0)]
    output = [[norm(config, weights, inner, "rms_final"), copy_rows(b.outputs, b.normed, 0, 0, config.dim, True)]]
    return ForwardProgram(
        [[weights.matrices["embedding"].embed(b.embedded[0], b.tokens)]],
        [[*joining, *layer]],
        [*output, *llama.classify(config, weights, inner)],
    )


MTP = Architecture(shapes, packed_tensors, buffers, program, llama.fill_position_tables, make_features=features)
