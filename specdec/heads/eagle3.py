"""The EAGLE-3 head (Li et al. 2025, arXiv:2503.01840), one layer on the target's hidden states: tensors, buffers, and programs.

A pair consists of the feature of position i, computed from the target's hidden states, and the token of position i + 1. It
predicts the token of i + 2. After the last position with states of the target, the head's own output takes their place.

Shapes: H width of the target's hidden states, N hidden states per feature, h width of the head, T tokens of a pass, S positions.
"""

from specdec.head_config import HeadConfig
from specdec.kernels import MAX_BATCH_TOKENS, copy_rows, rms_norm
from specdec.layers.architecture import (
    Architecture,
    Buffers,
    BufferSizes,
    BufferSpec,
    ForwardProgram,
    PackedTensors,
    PackedVector,
    Shapes,
    Weights,
    fuse_tensors,
)
from specdec.layers.attention import ATTENTION, make_attention_program
from specdec.layers.block import split_by_layer
from specdec.layers.mlp import MLP
from specdec.model import llama
from specdec.model_config import ModelConfig, require_type
from specdec.runtime.matmul_tile import PANEL_ROWS
from specdec.runtime.op_program import Op, Program
from specdec.runtime.simd import round_up

LAYER_TENSORS = (
    "rms_ffn",
    "wq",
    "wk",
    "wv",
    "wo",
    "w1",
    "w2",
    "w3",
    "bq",
    "bk",
    "bv",
    "bo",
    "b1",
    "b2",
    "b3",
    "q_norm",
    "k_norm",
)


def get_head_config(config: ModelConfig) -> HeadConfig:
    """Return the `HeadConfig` in the configuration of a draft head, which `ModelConfig.find_error` has checked."""
    return require_type(config.head, HeadConfig)


def get_feature_shape(config: ModelConfig) -> tuple[int, int]:
    """Return the shape (rows, width) in which the target's hidden states of one feature are stored, with a norm per row."""
    head = get_head_config(config)
    n_rows = head.n_target_states if head.fc_norm == "each" else 1
    return n_rows, head.n_target_states * head.target_dim // n_rows


def shapes(config: ModelConfig) -> Shapes:
    """Return the shapes of an EAGLE-3 head's tensors, by name.

    They are those of one Llama layer, with wq, wk and wv over two concatenated vectors, fc, norms, and the embedding and
    classifier if the head has its own.
    """
    head, dim, llama_shapes = get_head_config(config), config.dim, llama.layer_shapes(config, 0)
    tensors = {name: llama_shapes[name] for name in LAYER_TENSORS if name in llama_shapes}
    tensors |= {name: (tensors[name][0], 2 * dim) for name in ("wq", "wk", "wv")}
    tensors |= {"fc": (dim, head.n_target_states * head.target_dim), "rms_emb": (dim,), "rms_hidden": (dim,), "rms_final": (dim,)}
    if head.fc_norm:
        tensors["fc_norm"] = get_feature_shape(config)
    if head.own_classifier:
        tensors["wcls"] = (head.draft_vocab_size, dim)
    if head.own_embedding:
        tensors["tok_emb"] = (config.vocab_size, dim)
    return tensors


def packed_tensors(config: ModelConfig) -> PackedTensors:
    """Return the packed tensors of an EAGLE-3 head by name, made from those of `shapes`, with one norm per row of `taps`."""
    stored = shapes(config)
    layer = {name: shape for name, shape in stored.items() if name in LAYER_TENSORS}
    others = {name: shape for name, shape in stored.items() if name not in LAYER_TENSORS and name != "fc_norm"}
    n_norms, *width = stored.get("fc_norm", (0,))
    norms = {f"fc_norm.{i}": PackedVector((("fc_norm", i),), tuple(width)) for i in range(n_norms)}
    return (
        fuse_tensors(others, llama.FUSED_VOCAB, stored) | fuse_tensors(layer, {**ATTENTION.fused, **MLP.fused}, stored, 0) | norms
    )


def buffers(config: ModelConfig, weights: Weights, sizes: BufferSizes) -> dict[str, BufferSpec]:
    """Return the specs of the buffers that an EAGLE-3 head needs, by name: Llama's, and those listed here.

    taps (1, T, N H padded), or (N, T, H padded) if each row is normed: the target's hidden states of the pass's pairs.
    tapped (threads, T, N H and more): the same, normed. embedded (1, T, h padded): the tokens' embeddings.
    residual (1, T, h padded): the residual of the layer, if that is normed. pairs (threads, T, 2 h and more): embedding and
    feature, normed. outputs (S, h): outputs that may be fed back.
    """
    head, (n_taps, width), padded = get_head_config(config), get_feature_shape(config), round_up(config.dim, PANEL_ROWS)
    specs = {
        "taps": BufferSpec((n_taps, MAX_BATCH_TOKENS, round_up(width, PANEL_ROWS)), scope="token"),
        "embedded": BufferSpec((1, MAX_BATCH_TOKENS, padded), scope="token"),
        "pairs": BufferSpec((sizes.n_threads, MAX_BATCH_TOKENS, round_up(config.dim + padded, PANEL_ROWS)), scope="token"),
        "outputs": BufferSpec((sizes.n_positions, config.dim), scope="cache"),
    }
    if head.norm_before_residual:
        specs["residual"] = specs["embedded"]
    if head.fc_norm:
        end = (n_taps - 1) * width + round_up(width, PANEL_ROWS)
        specs["tapped"] = BufferSpec((sizes.n_threads, MAX_BATCH_TOKENS, round_up(end, PANEL_ROWS)), scope="token")
    return llama.buffers(config, weights, sizes) | specs


def features(config: ModelConfig, weights: Weights, b: Buffers) -> Program:
    """Return the program that computes features from the target's hidden states: x = fc taps, or fc norm(taps).

    It runs before a pass over pairs for which the target has hidden states.
    """
    n_taps, width = get_feature_shape(config)
    tapped, norms = b.taps, list[Op]()
    if get_head_config(config).fc_norm:
        tapped = b.tapped
        norms = [
            rms_norm(tapped, b.taps[i : i + 1], weights.vectors[f"fc_norm.{i}"], width, config.norm_eps, False, i * width)
            for i in range(n_taps)
        ]
    return [[*norms, weights.matrices["fc"].matmul(b.x[0], tapped, b.scratch)]]


def make_pair_norms(config: ModelConfig, weights: Weights, b: Buffers) -> list[Op]:
    """Return the operations that compute the input of the layer: pairs = concat(norm(embedding), norm(x))."""
    sides = (b.embedded, "rms_emb", 0), (b.x, "rms_hidden", config.dim)
    return [rms_norm(b.pairs, x, weights.vectors[name], config.dim, config.norm_eps, False, at) for x, name, at in sides]


def program(config: ModelConfig, weights: Weights, b: Buffers) -> ForwardProgram:
    """Return the program of a pass: embedding, one layer over pairs of embedding and x, and the classifier.

    x = (x or norm(x)) + wo attention(rope(qkv concat(norm(embedding), norm(x)))), then MLP and classifier as in Llama.
    The input x holds features, or outputs that are fed back.
    """
    head, v, dim = get_head_config(config), weights.vectors, config.dim
    (layer_buffers,) = split_by_layer(config, weights, b)
    halves = (
        make_attention_program(config, weights, layer_buffers, 0, b.pairs, make_pair_norms(config, weights, b)),
        MLP.program(config, weights, layer_buffers, 0),
    )
    layer = [list(phase) for half in halves for phase in half]
    if head.norm_before_residual:
        layer[0].append(copy_rows(b.residual[0], b.pairs, 0, dim, dim, False))
        layer[1].append(copy_rows(b.x[0], b.residual, 0, 0, dim, False))  # next to attention, when all threads have read x
    output = [[copy_rows(b.outputs, b.x, 0, 0, dim, True)]]
    if head.norm_output:
        normed = rms_norm(b.normed, b.x, v["rms_final"], dim, config.norm_eps, False, 0)
        output = [[normed, copy_rows(b.outputs, b.normed, 0, 0, dim, True)]]
    return ForwardProgram(
        [[weights.matrices["embedding"].embed(b.embedded[0], b.tokens)]],
        [layer],
        [*output, *llama.classify(config, weights, b)],
    )


EAGLE3 = Architecture(shapes, packed_tensors, buffers, program, llama.fill_position_tables, make_features=features)
