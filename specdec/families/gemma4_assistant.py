"""Gemma 4's own draft, which Google publishes beside each model as its "assistant" (Gemma Team 2026): numbers and names.

Those of a folder are what transformers 5.23 saves (`models/gemma4_assistant`).
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdec.config import ASSISTANT, OF_TARGET, AttentionConfig, Config
from specdec.families import gemma3, gemma4
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import Values, check_neutral
from specdec.families.family import HeadInFolder, InGguf, Keys, Tensors
from specdec.families.tensor_specs import Place
from specdec.heads.gemma4_assistant import CENTROIDS, POST, PRE, AssistantConfig, assistant_of

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


def is_one(given: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an assistant."""
    return given.get("model_type") == ASSISTANT


def ids(config: Config, tensors: Tensors) -> str:
    """The tensor of the ids in the order of their centroids; "" where there are none."""
    return ORDER if assistant_of(config).n_centroids else ""


def config(path: Path, given: Mapping[str, Any], tensors: Tensors) -> Config:
    """The numbers that its config.json says, at its top and of its layers; these take keys and values of the target's."""
    own, of_text = Values(path, given, DEFAULTS), given.get(hf.TEXT)
    if not isinstance(of_text, dict):
        raise own.refusal(hf.TEXT, "an object, the config of its layers")
    text = Values(path, of_text, gemma4.DEFAULTS | INPUTS)
    for values in (own, text):
        check_neutral(values, {key: neutral for key, neutral in hf.NEUTRAL.items() if key not in gemma4.DOES})
    own.must_be("tie_word_embeddings", True)
    n_layers = text.whole("num_hidden_layers")
    text.must_be("num_kv_shared_layers", n_layers, 0, None)
    for key, none in (*INPUTS.items(), ("use_double_wide_mlp", False), ("enable_moe_block", False)):
        text.must_be(key, none)
    text.must_be(gemma4.CAP, None)
    alone = Values(text.path, {"num_kv_shared_layers": 0}, {key: text[key] for key in gemma4.DEFAULTS})
    is_ordered = own.flag("use_ordered_embeddings")
    n_centroids = own.whole("num_centroids") if is_ordered else 0
    n_chosen = own.whole("centroid_intermediate_top_k", most=n_centroids) if is_ordered else 0
    return _on_target(gemma4.config(alone), own.whole("backbone_hidden_size"), n_centroids, n_chosen)


def gguf_config(k: Keys) -> Config:
    """The same of a GGUF file, for which llama.cpp leaves centroids out."""
    k.must_be(gemma4.SHARED_LAYERS, k.common["n_layers"])
    k.must_be(gguf.NEXTN, k.common["n_layers"])
    k.must_be(gemma4.INPUTS, 0, None)
    k.must_be(gemma4.CAP, None)
    tied = replace(gemma4.gguf_config(k, n_shared=0), shared_classifier=True)
    return _on_target(tied, k.whole("embedding_length_out"), 0, 0)


def _of_target(attention: AttentionConfig) -> AttentionConfig:
    """The same by the target's keys and values; in transformers it sees as many tokens and one more behind its own position."""
    return replace(attention, kv_layer=OF_TARGET, values_are_keys=False, window=attention.window + (attention.window > 0))


def _on_target(model: Config, target_dim: int, n_centroids: int, n_chosen: int) -> Config:
    """An assistant of a Gemma 4 whose layers make keys and values."""
    return replace(
        model,
        architecture=ASSISTANT,
        attention=_of_target(model.attention),
        layers=tuple(replace(layer, attention=_of_target(layer.attention or model.attention)) for layer in model.layers),
        embedding_scale=gemma3.embedding_scale(target_dim),
        head=AssistantConfig(
            target_dim=target_dim,
            layers=(),
            n_rows=model.vocab_size,
            own_embedding=False,
            own_classifier=True,
            n_centroids=n_centroids,
            n_chosen=n_chosen,
        ),
    )


GGUF_PLACES = gemma4.GGUF_PLACES | {PRE: Place("nextn.pre_projection.weight"), POST: Place("nextn.post_projection.weight")}
FAMILY = (
    InGguf(
        "gemma4-assistant", gguf_config, GGUF_PLACES, does=(gguf.WINDOW, gguf.NEXTN), by_layer=gemma4.GGUF_BY_LAYER,
        is_head=True, unused=gemma4.gguf_unused,
    ),
    HeadInFolder(
        is_one, config, lambda config, tensors: PLACES, ids, in_order=("tok_emb",), unused=gemma4.unused,
        beside=("assistant", "{}-assistant"),
    ),
)  # fmt: skip
