"""Qwen3.5's multi-token-prediction head (after Gloeckle et al. 2024, arXiv:2404.19737): tensors, buffers, and programs.

A pair consists of the target's hidden state of position i after its final norm, and the token of position i + 1. It predicts the
token of i + 2. After the last position with a state of the target, the head's own output, normed, takes its place. Embedding and
classifier are the target's. As in vLLM and llama.cpp, states are taken after the final norm: 2.7 tokens per pass were accepted,
compared with 1.8 for states before it.

Shapes: T tokens of a pass, D dim.
"""

from dataclasses import replace

from specdec.heads.eagle3 import HeadArchitecture, HeadBuffers, get_head_config
from specdec.kernels import copy_rows, rms_norm
from specdec.layers.block import norm
from specdec.layers.buffers import Buffers
from specdec.layers.weights import Plans, Shapes, Weights, fuse_tensors
from specdec.model.llama import FUSED_GLOBALS, GLOBAL_TENSORS, get_blocks, make_layer
from specdec.model_config import ModelConfig, require_type
from specdec.runtime.op_program import Program
from specdec.runtime.simd import Float32

OWN_NORMS = ("rms_emb", "rms_hidden", "rms_final")
TARGET_NORM = "target_norm"  # the target's final norm, which a head borrows


class MTPHead(HeadArchitecture):
    """The forward pass of a head: joined = fc concat(norm(embedding), norm(x)), then a layer and the classifier as in Llama."""

    def shapes(self, config: ModelConfig) -> Shapes:
        """Return the shapes of the head's tensors, by name.

        They are those of one Llama layer, fc, which joins embedding and state, and norms. A head on a target also has the tensors
        that it borrows.
        """
        head, dim, llama_shapes = get_head_config(config), config.dim, super().shapes(config)
        tensors = {
            name: shape if "." in name else shape[1:] for name, shape in llama_shapes.items() if name not in GLOBAL_TENSORS
        }
        tensors |= {"fc": (dim, 2 * dim)} | dict.fromkeys(OWN_NORMS, (dim,))
        if head.own_embedding:
            tensors |= {"tok_emb": (config.vocab_size, dim), TARGET_NORM: (dim,)}
        return tensors | ({"wcls": (config.vocab_size, dim)} if head.own_classifier else {})

    def plans(self, config: ModelConfig) -> Plans:
        """Return all matrices and vectors to pack, by name."""
        stored, plans = self.shapes(config), Plans()
        for block in get_blocks(config, 0):
            plans |= fuse_tensors(block.shapes(config), block.fused, stored, 0)
        others = ("tok_emb", "wcls", "fc", *OWN_NORMS, TARGET_NORM)
        return plans | fuse_tensors({name: stored[name] for name in others if name in stored}, FUSED_GLOBALS, stored)

    def make_features(self, config: ModelConfig, weights: Weights, b: HeadBuffers) -> Program:
        """Return the program of x = norm(taps), with the target's final norm."""
        normed = rms_norm(b.normed, b.taps, weights.vectors[TARGET_NORM], config.dim, config.norm_eps, False, 0)
        return [[normed, copy_rows(b.x[0], b.normed, 0, 0, config.dim, False)]]

    def layers(self, config: ModelConfig, weights: Weights, b: Buffers) -> list[Program]:
        """Return the program of the layer."""
        b, joined = require_type(b, HeadBuffers), _with_joined(b)
        matmul = weights.matrices["fc"].matmul(joined.x[0], b.pairs, b.scratch)
        return [[[*self.make_pair_norms(config, weights, b), matmul], *make_layer(config, weights, joined, 0)]]

    def classify(self, config: ModelConfig, weights: Weights, b: Buffers) -> Program:
        """Return the program that keeps the normed output, to be fed back, and computes its logits."""
        joined, outputs = _with_joined(b), require_type(b, HeadBuffers).outputs
        output = [norm(config, weights, joined, "rms_final"), copy_rows(outputs, b.normed, 0, 0, config.dim, True)]
        return [output, *super().classify(config, weights, joined)]

    def classify_candidates(self, config: ModelConfig, weights: Weights, b: Buffers, panels: Float32) -> Program:
        """Return the program that computes logits of candidates from the x that the layer has updated; see `Llama`."""
        return super().classify_candidates(config, weights, _with_joined(b), panels)


def _with_joined(b: Buffers) -> Buffers:
    """Return the buffers with an x of their own: what the layer updates, since b.x holds features or outputs."""
    return replace(b, x=b.new.share(MTPHead).rows(b.x.shape[2], 1))


MTP = MTPHead()
