"""The EAGLE-3 head (Li et al. 2025, arXiv:2503.01840), one layer on the target's hidden states: tensors, buffers, and programs.

A pair consists of the feature of position i, computed from the target's hidden states, and the token of position i + 1. It
predicts the token of i + 2. After the last position with states of the target, the head's own output takes their place.

Shapes: H width of the target's hidden states, N hidden states per feature, h width of the head, T tokens of a pass, S positions.
"""

from abc import abstractmethod
from dataclasses import dataclass

from specdec.head_config import HeadConfig
from specdec.kernels import copy_rows, rms_norm
from specdec.layers.attention import Attention
from specdec.layers.buffers import Allocator, Buffers, BufferSizes, pad
from specdec.layers.mlp import MLP
from specdec.layers.weights import Plans, Shapes, VectorPlan, Weights, fuse_tensors
from specdec.model.llama import FUSED_GLOBALS, Llama, layer_shapes
from specdec.model_config import ModelConfig, require_type
from specdec.runtime.op_program import Op, Program
from specdec.runtime.simd import Float32

LAYER_TENSORS = (
    "rms_ffn", "wq", "wk", "wv", "wo", "w1", "w2", "w3", "bq", "bk", "bv", "bo", "b1", "b2", "b3", "q_norm", "k_norm",
)  # fmt: skip


def get_head_config(config: ModelConfig) -> HeadConfig:
    """Return the `HeadConfig` in the configuration of a draft head, which `ModelConfig.find_error` has checked."""
    return require_type(config.head, HeadConfig)


def get_feature_shape(config: ModelConfig) -> tuple[int, int]:
    """Return the shape (rows, width) in which the target's hidden states of one feature are stored, with a norm per row."""
    head = get_head_config(config)
    n_rows = head.n_target_states if head.fc_norm == "each" else 1
    return n_rows, head.n_target_states * head.target_dim // n_rows


@dataclass(kw_only=True)
class HeadBuffers(Buffers):
    """The buffers of a head with a KV cache of its own.

    Attributes:
        taps: Hidden states of the target of the pass's pairs: (1, T, N H padded), or (N, T, H padded) if each row is normed.
        embedded: Embeddings of the tokens (1, T, h padded).
        pairs: Embedding and feature, normed (threads, T, 2 h and more).
        outputs: Outputs that may be fed back (S, h).
    """

    taps: Float32
    embedded: Float32
    pairs: Float32
    outputs: Float32


class HeadArchitecture(Llama):
    """The forward pass of a head that has a KV cache of its own, which runs over pairs of a feature and a token."""

    can_run_trees = False
    releases_windows = False
    keeps_final_norm = False

    def make_buffers(self, config: ModelConfig, weights: Weights, sizes: BufferSizes, new: Allocator) -> HeadBuffers:
        """Return the buffers of a sequence; see `HeadBuffers`."""
        n_taps, width = get_feature_shape(config)
        return HeadBuffers(
            **vars(super().make_buffers(config, weights, sizes, new)),
            taps=new.rows(pad(width), n_taps),
            embedded=new.rows(pad(config.dim), 1),
            pairs=new.rows(pad(config.dim + pad(config.dim)), sizes.n_threads),
            outputs=new.sequence(sizes.n_positions, config.dim, positions_axis=0),
        )

    def embed(self, config: ModelConfig, weights: Weights, b: Buffers) -> Program:
        """Return the program that looks up the tokens' embeddings; the input x holds features, or outputs that are fed back."""
        return [[weights.matrices["embedding"].embed(require_type(b, HeadBuffers).embedded[0], b.tokens)]]

    @abstractmethod
    def make_features(self, config: ModelConfig, weights: Weights, b: HeadBuffers) -> Program:
        """Return the program that computes features from b.taps: it runs before a pass for which the target has hidden states."""

    def make_pair_norms(self, config: ModelConfig, weights: Weights, b: HeadBuffers) -> list[Op]:
        """Return the operations that compute the input of the layer: pairs = concat(norm(embedding), norm(x))."""
        sides = (b.embedded, "rms_emb", 0), (b.x, "rms_hidden", config.dim)
        return [rms_norm(b.pairs, x, weights.vectors[name], config.dim, config.norm_eps, False, at) for x, name, at in sides]


class Eagle3(HeadArchitecture):
    """The forward pass of an EAGLE-3 head: embedding, one layer over pairs of embedding and x, and the classifier.

    x = (x or norm(x)) + wo attention(rope(qkv concat(norm(embedding), norm(x)))), then MLP and classifier as in Llama.
    """

    def shapes(self, config: ModelConfig) -> Shapes:
        """Return the shapes of the head's tensors, by name.

        They are those of one Llama layer, with wq, wk and wv over two concatenated vectors, fc, norms, and the embedding and
        classifier if the head has its own.
        """
        head, dim, llama_shapes = get_head_config(config), config.dim, layer_shapes(config, 0)
        tensors = {name: llama_shapes[name] for name in LAYER_TENSORS if name in llama_shapes}
        tensors |= {name: (tensors[name][0], 2 * dim) for name in ("wq", "wk", "wv")}
        tensors |= {"fc": (dim, head.n_target_states * head.target_dim)}
        tensors |= dict.fromkeys(("rms_emb", "rms_hidden", "rms_final"), (dim,))
        if head.fc_norm:
            tensors["fc_norm"] = get_feature_shape(config)
        if head.own_classifier:
            tensors["wcls"] = (head.draft_vocab_size, dim)
        if head.own_embedding:
            tensors["tok_emb"] = (config.vocab_size, dim)
        return tensors

    def plans(self, config: ModelConfig) -> Plans:
        """Return all matrices and vectors to pack, by name, with one norm per row of `taps`."""
        stored = self.shapes(config)
        layer = {name: shape for name, shape in stored.items() if name in LAYER_TENSORS}
        others = {name: shape for name, shape in stored.items() if name not in LAYER_TENSORS and name != "fc_norm"}
        n_norms, *width = stored.get("fc_norm", (0,))
        norms = {f"fc_norm.{i}": VectorPlan((("fc_norm", i),), tuple(width)) for i in range(n_norms)}
        return (
            fuse_tensors(others, FUSED_GLOBALS, stored) | fuse_tensors(layer, {**Attention.fused, **MLP.fused}, stored, 0) | norms
        )

    def make_features(self, config: ModelConfig, weights: Weights, b: HeadBuffers) -> Program:
        """Return the program of x = fc taps, or fc norm(taps)."""
        n_taps, width = get_feature_shape(config)
        tapped, norms = b.taps, list[Op]()
        if get_head_config(config).fc_norm:
            tapped = b.new.share(Eagle3).rows(pad((n_taps - 1) * width + pad(width)), b.sizes.n_threads)
            for i in range(n_taps):
                weight = weights.vectors[f"fc_norm.{i}"]
                norms.append(rms_norm(tapped, b.taps[i : i + 1], weight, width, config.norm_eps, False, i * width))
        return [[*norms, weights.matrices["fc"].matmul(b.x[0], tapped, b.scratch)]]

    def layers(self, config: ModelConfig, weights: Weights, b: Buffers) -> list[Program]:
        """Return the program of the layer."""
        b, dim = require_type(b, HeadBuffers), config.dim
        attention = Attention(config, weights, b, 0).attend_to(b.pairs, self.make_pair_norms(config, weights, b))
        layer = [list(phase) for half in (attention, MLP(config, weights, b, 0).ops()) for phase in half]
        if get_head_config(config).norm_before_residual:
            residual = b.new.share(Eagle3).rows(pad(dim), 1)
            layer[0].append(copy_rows(residual[0], b.pairs, 0, dim, dim, False))
            layer[1].append(copy_rows(b.x[0], residual, 0, 0, dim, False))  # next to attention, when all threads have read x
        return [layer]

    def classify(self, config: ModelConfig, weights: Weights, b: Buffers) -> Program:
        """Return the program that keeps the output x, or norm(x), and computes its logits."""
        outputs, dim = require_type(b, HeadBuffers).outputs, config.dim
        output = [[copy_rows(outputs, b.x, 0, 0, dim, True)]]
        if get_head_config(config).norm_output:
            normed = rms_norm(b.normed, b.x, weights.vectors["rms_final"], dim, config.norm_eps, False, 0)
            output = [[normed, copy_rows(outputs, b.normed, 0, 0, dim, True)]]
        return [*output, *super().classify(config, weights, b)]


EAGLE3 = Eagle3()
