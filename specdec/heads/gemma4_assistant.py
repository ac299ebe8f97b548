"""Gemma 4's assistant (Gemma Team 2026), a few layers that attend to the target's KV cache: tensors, buffers, and programs.

The assistant predicts a token from the target's embedding of the last token and from the target's hidden state, after its final
norm, of the token before. After a draft token the assistant's own output takes the place of that state. Layers compute queries
only, at the last token's position for all draft tokens after it. They see the target's KV cache, which ends before that token.
The assistant caches nothing.

Shapes: H width of the target's hidden states, T tokens of a pass, C centroids.
"""

from dataclasses import dataclass

from specdec.kernels import copy_rows, scale_rows
from specdec.layers.attention import make_kv_state
from specdec.layers.block import norm
from specdec.layers.buffers import Allocator, Buffers, BufferSizes, RopeTables, pad
from specdec.layers.weights import MatrixPlan, Plans, Shapes, Weights, fuse_tensors
from specdec.model.llama import Llama
from specdec.model_config import ModelConfig, find_kv_source_layers, get_assistant_config, require_type
from specdec.runtime.op_program import Program
from specdec.runtime.simd import PANEL_ROWS, Float32

PRE_PROJECTION, POST_PROJECTION, CENTROIDS = "pre", "post", "centroids"


@dataclass(kw_only=True)
class AssistantBuffers(Buffers):
    """The buffers of an assistant.

    Attributes:
        embedded: The last token's embedding (1, T, H padded).
        pairs: Embedding and state, concatenated (1, T, 2 H and more).
        outputs: The next state (T, H padded).
        nearness: The logits of centroids (T, C padded).
    """

    embedded: Float32
    pairs: Float32
    outputs: Float32
    nearness: Float32

    def share_kv(self, config: ModelConfig, target: ModelConfig, target_buffers: Buffers) -> None:
        """Let each layer read the keys and values of a layer of the target.

        Args:
            config: The assistant's configuration.
            target: The target's configuration.
            target_buffers: The target's buffers.
        """
        for layer, source in zip(self.layers, find_kv_source_layers(config, target), strict=True):
            layer.kv = target_buffers.layers[source].kv


class Gemma4Assistant(Llama):
    """The forward pass over one token, which computes the next state, and the logits of tokens or of centroids.

    x = pre concat(embedding, state), then layers, then post rmsnorm(x). It runs at the last slot that the target has filled, with
    RoPE for the next position. With centroids, `classify_candidates` computes the logits.
    """

    can_run_trees = False
    releases_windows = False
    keeps_final_norm = False

    def shapes(self, config: ModelConfig) -> Shapes:
        """Return the shapes of the assistant's tensors, by name.

        They are Llama's, the projections from embedding and state to x and from x to a state, and the centroids if there are any.
        """
        head, dim = get_assistant_config(config), config.dim
        tensors = {PRE_PROJECTION: (dim, 2 * head.target_dim), POST_PROJECTION: (head.target_dim, dim)}
        return super().shapes(config) | tensors | ({CENTROIDS: (head.n_centroids, dim)} if head.n_centroids else {})

    def plans(self, config: ModelConfig) -> Plans:
        """Return all matrices and vectors to pack, by name, with the embedding only if the assistant is loaded for a target."""
        stored, plans = self.shapes(config), super().plans(config)
        del plans["embedding"]
        own = {name: stored[name] for name in (PRE_PROJECTION, POST_PROJECTION, CENTROIDS) if name in stored}
        plans |= fuse_tensors(own, {}, stored)
        if get_assistant_config(config).own_embedding:  # on a target
            source = (("embedding", None),)
            plans["embedding"] = MatrixPlan(source, (config.vocab_size,), get_assistant_config(config).target_dim)
        return plans

    def make_buffers(self, config: ModelConfig, weights: Weights, sizes: BufferSizes, new: Allocator) -> AssistantBuffers:
        """Return the buffers, with one more position than sizes has; see `AssistantBuffers`."""
        head = get_assistant_config(config)
        width = pad(head.target_dim)
        longer = sizes._replace(n_positions=sizes.n_positions + PANEL_ROWS)
        return AssistantBuffers(
            **vars(super().make_buffers(config, weights, longer, new)),
            embedded=new.rows(width, 1),
            pairs=new.rows(pad(head.target_dim + width), 1),
            outputs=new.rows(width),
            nearness=new.rows(pad(max(head.n_centroids, 1))),
        )

    def allocate_layers(self, config: ModelConfig, b: Buffers) -> None:
        """Make RoPE tables that begin at the second position, and KV caches without memory in the place of the target's."""
        super().allocate_layers(config, b)
        for i, layer in enumerate(b.layers):
            assert layer.rope
            layer.rope = RopeTables(layer.rope.cos[1:], layer.rope.sin[1:])
            layer.kv = make_kv_state(config.layer_config(i), b.sizes._replace(n_positions=PANEL_ROWS), Allocator(is_plan=True))

    def embed(self, config: ModelConfig, weights: Weights, b: Buffers) -> Program:
        """Return the program of x = pre concat(embedding, state)."""
        width, b = get_assistant_config(config).target_dim, require_type(b, AssistantBuffers)
        embedding = weights.matrices["embedding"].embed(b.embedded[0], b.tokens)
        return [
            [embedding, scale_rows(b.embedded[0], config.embedding_scale, width)],
            [copy_rows(b.pairs[0], b.embedded, 0, 0, width, False)],
            [weights.matrices[PRE_PROJECTION].matmul(b.x[0], b.pairs, b.scratch)],
        ]

    def classify(self, config: ModelConfig, weights: Weights, b: Buffers) -> Program:
        """Return the program that computes the next state, and the logits of tokens or of centroids."""
        w, b = weights.matrices, require_type(b, AssistantBuffers)
        output = [norm(config, weights, b, "rms_final"), w[POST_PROJECTION].matmul(b.outputs, b.normed, b.scratch)]
        if get_assistant_config(config).n_centroids:
            return [[*output, w[CENTROIDS].matmul(b.nearness, b.normed, b.scratch)]]
        return [output, *super().classify(config, weights, b)]


GEMMA4_ASSISTANT = Gemma4Assistant()
