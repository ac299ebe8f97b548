"""Gemma 4's own draft, which Google publishes beside each model as its "assistant" (Gemma Team 2026): numbers and names."""

from dataclasses import replace
from typing import Any

from ..architectures import ASSISTANT, Config
from ..architectures.assistant import CENTROIDS, POST, PRE, AssistantConfig
from ..architectures.config import OF_TARGET
from . import gemma4
from .places import Place
from .values import MAX_SIZE, Values

DEFAULTS: dict[str, Any] = {
    "backbone_hidden_size": 1536, "use_ordered_embeddings": False, "num_centroids": 2048, "centroid_intermediate_top_k": 32,
    "tie_word_embeddings": True,
}  # fmt: skip
INPUTS = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}  # of which it has none
PLACES = gemma4.PLACES | {
    PRE: Place("pre_projection.weight"),
    POST: Place("post_projection.weight"),
    CENTROIDS: Place("masked_embedding.centroids.weight"),
}
ORDER = "masked_embedding.token_ordering"


def config(own: Values, text: Values) -> Config:
    """The numbers that its config.json says, at its top and of its layers; these take keys and values of the target's."""
    own.must_be("tie_word_embeddings", True)
    n_layers = text.whole("num_hidden_layers")
    text.must_be("num_kv_shared_layers", n_layers, 0, None)
    for key, none in (*INPUTS.items(), ("use_double_wide_mlp", False), ("enable_moe_block", False)):
        text.must_be(key, none)
    text.must_be(gemma4.CAP, None)
    alone = Values(text.path, {"num_kv_shared_layers": 0}, {key: text[key] for key in gemma4.DEFAULTS})
    model = gemma4.config(alone)
    target_dim, is_ordered = own.whole("backbone_hidden_size"), own.flag("use_ordered_embeddings")
    n_centroids = own.whole("num_centroids", MAX_SIZE) if is_ordered else 0
    return replace(
        model,
        architecture=ASSISTANT,
        layers=tuple(replace(layer, kv_layer=OF_TARGET, values_are_keys=None) for layer in model.layers),
        window=model.window + (model.window > 0),  # in transformers it sees as many tokens and one more behind its own position
        embedding_scale=gemma4.embedding_scale(target_dim),
        head=AssistantConfig(
            target_dim=target_dim,
            layers=(),
            n_rows=model.vocab_size,
            own_embedding=False,
            own_classifier=True,
            n_centroids=n_centroids,
            n_chosen=own.whole("centroid_intermediate_top_k", n_centroids) if is_ordered else 0,
        ),
    )
