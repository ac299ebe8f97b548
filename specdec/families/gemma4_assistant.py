"""Gemma 4's own draft head, which Google publishes with each model as the model's "assistant" (Gemma Team 2026).

Keys and tensor names of a folder are those of transformers 5.23 (`models/gemma4_assistant`).
"""

from dataclasses import replace
from pathlib import Path

from specdec.argument_checks import JSONDict, JSONObject
from specdec.families import gemma, gemma4
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import tensor_specs as specs
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFHead
from specdec.head_config import AssistantConfig
from specdec.model_config import (
    ASSISTANT,
    TARGET_KV_LAYER,
    UNIFIED_ASSISTANT,
    AttentionConfig,
    ModelConfig,
    get_assistant_config,
)

DEFAULTS: JSONDict = {
    "backbone_hidden_size": 1536, "use_ordered_embeddings": False, "num_centroids": 2048, "centroid_intermediate_top_k": 32,
    "tie_word_embeddings": True,
}  # fmt: skip
UNIFIED_DEFAULTS = DEFAULTS | {"backbone_hidden_size": 3840}
NO_PER_LAYER_INPUTS = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
HF_TENSORS = gemma4.HF_TENSORS | {
    "pre": specs.TensorSpec("pre_projection.weight"),
    "post": specs.TensorSpec("post_projection.weight"),
    "centroids": specs.TensorSpec("masked_embedding.centroids.weight"),
}
TOKEN_ORDERING = "masked_embedding.token_ordering"


def get_id_map_name(config: ModelConfig, tensors: specs.TensorSource) -> str:
    """Return the name of the tensor with token ids in the order of their centroids; "" if the assistant has no centroids."""
    return TOKEN_ORDERING if get_assistant_config(config).n_centroids else ""


def parse_config(path: Path, given: JSONObject, tensors: specs.TensorSource) -> ModelConfig:
    """Build the `ModelConfig` of a Gemma 4 assistant, a draft head, from its parsed config.json.

    The config of its layers, which use the target's keys and values, is in text_config.

    Args:
        path: The file, for errors.
        given: The keys of config.json.
        tensors: The tensors of the folder, which are not needed.

    Raises:
        CheckpointError: A value is not valid or not supported.
    """
    is_unified = given.get("model_type") == UNIFIED_ASSISTANT
    defaults, text_defaults = (UNIFIED_DEFAULTS, gemma4.UNIFIED_DEFAULTS) if is_unified else (DEFAULTS, gemma4.DEFAULTS)
    top_level, text_config = ConfigValues(path, given, defaults), given.get(hf.TEXT_CONFIG_KEY)
    if not isinstance(text_config, dict):
        raise top_level.make_error(hf.TEXT_CONFIG_KEY, "an object, the config of its layers")
    text_values = ConfigValues(path, text_config, text_defaults | NO_PER_LAYER_INPUTS)
    for values in (top_level, text_values):
        hf.check_unsupported_keys(values, gemma4.HF_FAMILY)
    top_level.require("tie_word_embeddings", True)
    n_layers = text_values.get_int("num_hidden_layers")
    text_values.require("num_kv_shared_layers", n_layers, 0, None)
    for key, neutral_value in (*NO_PER_LAYER_INPUTS.items(), ("use_double_wide_mlp", False), ("enable_moe_block", False)):
        text_values.require(key, neutral_value)
    text_values.require(gemma4.LOGIT_SOFTCAP_KEY, None)
    unshared = ConfigValues(text_values.path, {"num_kv_shared_layers": 0}, {key: text_values[key] for key in gemma4.DEFAULTS})
    is_ordered = top_level.get_bool("use_ordered_embeddings")
    n_centroids = top_level.get_int("num_centroids") if is_ordered else 0
    top_k = top_level.get_int("centroid_intermediate_top_k", max_value=n_centroids) if is_ordered else 0
    return _make_assistant_config(gemma4.parse_config(unshared), top_level.get_int("backbone_hidden_size"), n_centroids, top_k)


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a Gemma 4 assistant, a draft head, from a GGUF file's metadata; these files lack centroids."""
    metadata.require(gemma4.SHARED_KV_LAYERS_KEY, metadata.common_fields["n_layers"])
    metadata.require(gguf.NEXTN_LAYERS_KEY, metadata.common_fields["n_layers"])
    metadata.require(gemma4.PER_LAYER_INPUT_DIM_KEY, 0, None)
    metadata.require(gemma4.LOGIT_SOFTCAP_KEY, None)
    tied = replace(gemma4.parse_gguf_config(metadata, n_shared=0), shared_classifier=True)
    return _make_assistant_config(tied, metadata.get_int("embedding_length_out"), 0, 0)


def _use_target_kv(attention: AttentionConfig) -> AttentionConfig:
    """Return a copy of an attention config that reads the target's keys and values.

    A sliding window is one token longer, as in transformers.
    """
    return replace(attention, kv_layer=TARGET_KV_LAYER, values_are_keys=False, window=attention.window + (attention.window > 0))


def _make_assistant_config(model: ModelConfig, target_dim: int, n_centroids: int, top_k: int) -> ModelConfig:
    """Convert the `ModelConfig` of a Gemma 4 model to that of an assistant, a draft head for a target with this dim.

    Args:
        model: The config of the assistant's own layers.
        target_dim: Dimension of the target's hidden states.
        n_centroids: Number of centroids of the vocabulary; 0 for none.
        top_k: Number of centroids with tokens that get logits.
    """
    return replace(
        model,
        architecture=ASSISTANT,
        attention=_use_target_kv(model.attention),
        layers=tuple(replace(layer, attention=_use_target_kv(layer.attention or model.attention)) for layer in model.layers),
        embedding_scale=gemma.compute_embedding_scale(target_dim),
        head=AssistantConfig(
            target_dim=target_dim,
            target_layers=(),
            draft_vocab_size=model.vocab_size,
            own_embedding=False,
            own_classifier=True,
            n_centroids=n_centroids,
            centroid_top_k=top_k,
        ),
    )


GGUF_TENSORS = gemma4.GGUF_TENSORS | {
    "pre": specs.TensorSpec("nextn.pre_projection.weight"),
    "post": specs.TensorSpec("nextn.post_projection.weight"),
}
FAMILY = (
    GGUFFamily(
        "gemma4-assistant", parse_gguf_config, GGUF_TENSORS,
        supported_keys=(gguf.SLIDING_WINDOW_KEY, gguf.NEXTN_LAYERS_KEY, *gguf.WINDOW_HEAD_KEYS),
        per_layer_keys=gemma4.GGUF_PER_LAYER_KEYS,
        is_head=True, list_unused=gemma4.list_unused_gguf,
    ),
    HFHead(
        "gemma4_assistant", parse_config, lambda config, tensors: HF_TENSORS, get_id_map_name, id_ordered_tensors=("tok_emb",),
        list_unused=gemma4.list_unused,
    ),
)  # fmt: skip
