"""Gemma 4's assistant (Gemma Team 2026), a few layers that attend to the target's KV cache: tensors, buffers, and programs.

The assistant predicts a token from the target's embedding of the last token and from the target's hidden state, after its final
norm, of the token before. After a draft token the assistant's own output takes the place of that state. Layers compute queries
only, at the last token's position for all draft tokens after it. They see the target's KV cache, which ends before that token.
The assistant caches nothing.

Shapes: H width of the target's hidden states, T tokens of a pass, C centroids.
"""

from dataclasses import replace
from typing import Any

from specdec.kernels import MAX_BATCH_TOKENS, copy_rows, scale_rows
from specdec.layers.architecture import (
    Architecture,
    Buffers,
    BufferSizes,
    BufferSpec,
    ForwardProgram,
    PackedTensor,
    PackedTensors,
    Shapes,
    Weights,
    fuse_tensors,
)
from specdec.layers.block import KV_BUFFERS, ROPE_TABLES, norm, split_by_layer
from specdec.model import llama
from specdec.model_config import ModelConfig, find_kv_source_layers, get_assistant_config
from specdec.quant.packed_matrix import Matrix
from specdec.runtime.matmul_tile import PANEL_ROWS
from specdec.runtime.simd import round_up

PRE_PROJECTION, POST_PROJECTION, CENTROIDS = "pre", "post", "centroids"


def get_target_caches(config: ModelConfig, target: ModelConfig, weights: Weights, b: Buffers) -> list[dict[str, Any]]:
    """Return for each layer of the assistant the arrays of the target's KV cache that it reads, by buffer name.

    Args:
        config: The assistant's configuration.
        target: The target's configuration.
        weights: The target's weights.
        b: The target's buffers.
    """
    layers = split_by_layer(target, weights, b)
    return [{name: getattr(layers[source], name) for name in KV_BUFFERS} for source in find_kv_source_layers(config, target)]


def shapes(config: ModelConfig) -> Shapes:
    """Return the shapes of the assistant's tensors, by name.

    They are Llama's, the projections from embedding and state to x and from x to a state, and the centroids if there are any.
    """
    head, dim = get_assistant_config(config), config.dim
    centroids = {CENTROIDS: (head.n_centroids, dim)} if head.n_centroids else {}
    return (
        llama.shapes(config) | {PRE_PROJECTION: (dim, 2 * head.target_dim), POST_PROJECTION: (head.target_dim, dim)} | centroids
    )


def packed_tensors(config: ModelConfig) -> PackedTensors:
    """Return the assistant's packed tensors by name, with the embedding only if the assistant is loaded for a target."""
    stored, packed = shapes(config), llama.packed_tensors(config)
    del packed["embedding"]
    packed |= fuse_tensors(
        {name: stored[name] for name in (PRE_PROJECTION, POST_PROJECTION, CENTROIDS) if name in stored}, {}, stored
    )
    if get_assistant_config(config).own_embedding:  # on a target
        packed["embedding"] = PackedTensor((("embedding", None),), (config.vocab_size,), get_assistant_config(config).target_dim)
    return packed


def buffers(config: ModelConfig, weights: Weights, sizes: BufferSizes) -> dict[str, BufferSpec]:
    """Return the specs of the buffers that the assistant needs, by name: Llama's, with one more position, and those listed here.

    embedded (1, T, H padded): the last token's embedding. pairs (1, T, 2 H and more): embedding and state, concatenated.
    outputs (T, H padded): the next state. nearness (T, C padded): the logits of centroids.
    """
    head = get_assistant_config(config)
    width = round_up(head.target_dim, PANEL_ROWS)
    return llama.buffers(config, weights, sizes._replace(n_positions=sizes.n_positions + PANEL_ROWS)) | {
        "embedded": BufferSpec((1, MAX_BATCH_TOKENS, width), scope="token"),
        "pairs": BufferSpec((1, MAX_BATCH_TOKENS, round_up(head.target_dim + width, PANEL_ROWS)), scope="token"),
        "outputs": BufferSpec((MAX_BATCH_TOKENS, width), scope="sequence"),
        "nearness": BufferSpec((MAX_BATCH_TOKENS, round_up(max(head.n_centroids, 1), PANEL_ROWS)), scope="token"),
    }


def program(config: ModelConfig, weights: Weights, b: Buffers) -> ForwardProgram:
    """Return the program of a pass over one token, which computes the next state, and the logits of tokens or of centroids.

    x = pre concat(embedding, state), then layers, then post rmsnorm(x). The program runs at the last slot that the target has
    filled, with RoPE for the next position. b.taken holds the result of `get_target_caches`. With centroids,
    `make_classifier_program` computes the logits.
    """
    head, w = get_assistant_config(config), weights.matrices
    tables = {name: table[1:] for name, table in vars(b).items() if name.startswith(ROPE_TABLES)}
    layer_buffers = zip(split_by_layer(config, weights, Buffers(**vars(b) | tables)), b.taken, strict=True)
    layers = llama.layer_programs(config, weights, [Buffers(**vars(own) | target_caches) for own, target_caches in layer_buffers])
    embedding = w["embedding"].embed(b.embedded[0], b.tokens)
    output = [norm(config, weights, b, "rms_final"), w[POST_PROJECTION].matmul(b.outputs, b.normed, b.scratch)]
    if head.n_centroids:
        output.append(w[CENTROIDS].matmul(b.nearness, b.normed, b.scratch))
    return ForwardProgram(
        [
            [embedding, scale_rows(b.embedded[0], config.embedding_scale, head.target_dim)],
            [copy_rows(b.pairs[0], b.embedded, 0, 0, head.target_dim, False)],
            [w[PRE_PROJECTION].matmul(b.x[0], b.pairs, b.scratch)],
        ],
        layers,
        [output] if head.n_centroids else [output, *llama.classify(config, weights, b)],
    )


def make_classifier_program(config: ModelConfig, weights: Weights, b: Buffers, classifier: Matrix) -> ForwardProgram:
    """Return the program that computes logits from the x that `program` leaves, with candidate rows of the classifier only."""
    candidate_weights = replace(weights, matrices=weights.matrices | {"classifier": classifier})
    return ForwardProgram([], [], llama.classify(config, candidate_weights, b))


GEMMA4_ASSISTANT = Architecture(shapes, packed_tensors, buffers, program, llama.fill_position_tables)
