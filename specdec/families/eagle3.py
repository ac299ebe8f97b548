"""EAGLE-3 draft heads (Li et al. 2025, arXiv:2503.01840), in a folder of their own or in a GGUF file.

Folders have EAGLE's dialect, which SpecForge and AngelSlim write too, or that of `speculators`, either of them maybe with the
prefix `model.`. Keys, names and defaults are those of EAGLE and of speculators 0.9.
"""

import re
from dataclasses import replace
from pathlib import Path

from specdec.argument_checks import CheckpointError, JSONObject, format_json_value
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import llama, qwen
from specdec.families import tensor_specs as specs
from specdec.families.config_values import ConfigValues, check_neutral_values
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily, HFHead, is_layer_list
from specdec.families.hf_common import LM_HEAD
from specdec.head_config import HeadConfig
from specdec.model_config import ModelConfig

D2T, EMBEDDING = "d2t", "embed_tokens.weight"  # d2t maps rows to ids: offsets in folders, absolute in GGUF files
TARGET_LAYERS_KEYS = ("target_layers", "extract_layers")  # keys of the current and of the first converter
GGUF_TENSORS = gguf.OUTER_TENSORS | {
    "fc": specs.TensorSpec("fc.weight"),
    "fc_norm": specs.TensorSpec("enc.output_norm.weight", is_unnumbered=True),
    "rms_emb": specs.TensorSpec("blk.0.attn_norm.weight"),
    "rms_hidden": specs.TensorSpec("blk.0.attn_norm_2.weight"),
    **{
        name: specs.TensorSpec(gguf.INTERLEAVED_ROPE_TENSORS[name].name.format(0))
        for name in ("wq", "wk", "wv", "wo", "rms_ffn", "w1", "w2", "w3")
    },
    "rms_final": specs.TensorSpec("output_norm.weight"),
}


SPECULATORS_KEY, LAYER_CONFIG_KEY, EAGLE_CONFIG_KEY = "speculators_model_type", "transformer_layer_config", "eagle_config"
DRAFT_VOCAB_SIZE_KEY, LAYER_IDS_KEY, TARGET_DIM_KEY = "draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "target_hidden_size"
# Families of a head's layer: the default of EAGLE, and that of speculators.
LAYER_FAMILIES = {
    each.name: each for each in (*llama.FAMILY, *qwen.FAMILY) if isinstance(each, HFFamily) and each.name in ("llama", "qwen3")
}
LAYER_PREFIXES = ("midlayer", "layers.0")  # the head's layer in the dialects of EAGLE and of speculators
PREFIX = re.compile(r"model\.")
IGNORED_NAMES = re.compile(r"t2d|((midlayer|layers\.0)\.self_attn\.)?rotary_emb\.inv_freq|verifier_(norm|lm_head)\.weight")
FC_NORM_TENSORS = {
    "": {},
    "each": {"fc_norm": specs.TensorSpec("fc_norm.{}.weight")},
    "whole": {"fc_norm": specs.TensorSpec("input_norm.weight", is_unnumbered=True)},
}
OUTER_TENSORS = specs.make("%s.weight", fc="fc", rms_final="norm", wcls="lm_head", tok_emb="embed_tokens")
LAYER_TENSORS = {
    "rms_emb": specs.TensorSpec("layers.{}.input_layernorm.weight"),
    "rms_hidden": specs.TensorSpec("layers.{}.hidden_norm.weight"),
    **{name: spec for name, spec in hf.TENSORS.items() if "{}" in spec.name and name != "rms_att"},
}
# Supported flags, false by default.
FLAG_KEYS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qkv_bias")
# Keys that change the arithmetic, and their values that change nothing.
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "use_aux_hidden_state": (True, None),
    "use_input_layernorm_in_first_layer": (True, None),
    "use_last_layernorm": (True, None),
    "use_mtp_layernorm": (False, None),
    "parallel_draft_step": (1, None),
    "quantization_config": (None,),
    "quantization": (None,),
}


def get_tensor_specs(config: ModelConfig, tensors: specs.TensorSource) -> dict[str, specs.TensorSpec]:
    """Return the specs of an EAGLE-3 head's tensors by our names, in the dialect (EAGLE or speculators) that the folder uses."""
    assert config.head
    layer = LAYER_PREFIXES[not any(name.startswith(LAYER_PREFIXES[0]) for name in tensors)]
    layer_specs = {name: spec._replace(name=spec.name.replace("layers.{}", layer)) for name, spec in LAYER_TENSORS.items()}
    return OUTER_TENSORS | FC_NORM_TENSORS[config.head.fc_norm] | layer_specs


def get_id_map_name(config: ModelConfig, tensors: specs.TensorSource) -> str:
    """Return the name of the tensor with each row's offset from row index to token id; "" if each row's index is its id."""
    return D2T if D2T in tensors else ""


def parse_config(path: Path, given: JSONObject, tensors: specs.TensorSource) -> ModelConfig:
    """Build the `ModelConfig` of an EAGLE-3 draft head from its parsed config.json.

    An embedding or a classifier that the folder lacks is the target's.

    Args:
        path: The file, for errors.
        given: The keys of config.json.
        tensors: The tensors of the folder.

    Raises:
        CheckpointError: A value is not valid or not supported.
    """
    values = ConfigValues(path, given)
    eagle, own_layer_keys = (
        values.get_object(EAGLE_CONFIG_KEY),
        values.get_object(LAYER_CONFIG_KEY) if SPECULATORS_KEY in given else given,
    )
    merged = ConfigValues(path, {**given, **eagle}, {DRAFT_VOCAB_SIZE_KEY: 32000} if SPECULATORS_KEY in given else {})
    if SPECULATORS_KEY in given:
        merged.require(SPECULATORS_KEY, "eagle3")
    layer = _parse_layer_values(path, own_layer_keys, [*LAYER_FAMILIES][SPECULATORS_KEY in given])
    check_neutral_values(merged, NEUTRAL_VALUES)
    flags = {key: merged.get_bool(key, False) for key in FLAG_KEYS}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise merged.make_error("fc_norm", "false with norm_before_fc, which normalizes the same values")
    own_layer = LAYER_FAMILIES[layer["model_type"]].parse_config(layer)
    head = HeadConfig(
        target_dim=merged.get_int(TARGET_DIM_KEY, own_layer.dim),
        target_layers=_parse_target_layers(path, given, eagle),
        draft_vocab_size=merged.get_int(DRAFT_VOCAB_SIZE_KEY, own_layer.vocab_size),
        own_embedding=EMBEDDING in tensors,
        own_classifier=LM_HEAD in tensors,
        norm_before_residual=flags["norm_before_residual"],
        fc_norm="whole" if flags["norm_before_fc"] else "each" if flags["fc_norm"] else "",
        norm_output=flags["norm_output"],
    )
    if own_layer.shared_classifier and head.own_embedding and not head.own_classifier:
        raise layer.make_error("tie_word_embeddings", "false, because a head without a classifier uses the target's")
    attention = replace(own_layer.attention, qkv_bias=own_layer.attention.qkv_bias or flags["qkv_bias"])
    return replace(own_layer, architecture="eagle3", shared_classifier=False, attention=attention, head=head)


def _parse_layer_values(path: Path, given: JSONObject, default_family: str) -> ConfigValues:
    """Return the keys of an EAGLE-3 head's own layer, with the defaults of the layer's family for missing keys.

    Args:
        path: The file, for errors.
        given: The keys of the layer.
        default_family: The family if model_type is missing.

    Raises:
        CheckpointError: The family is not one of `LAYER_FAMILIES`, or a value is not supported.
    """
    family = given.get("model_type", default_family)
    if not isinstance(family, str) or family not in LAYER_FAMILIES:
        raise CheckpointError(
            f"{path}: the head's layer has the model_type {format_json_value(family)}; supported: {', '.join(LAYER_FAMILIES)}"
        )
    layer = ConfigValues(path, given, dict(LAYER_FAMILIES[family].defaults) | {"model_type": family, "num_hidden_layers": 1})
    hf.check_unsupported_keys(layer, LAYER_FAMILIES[family])
    layer.require("num_hidden_layers", 1)
    return layer


def _parse_target_layers(path: Path, given: JSONObject, eagle: JSONObject) -> tuple[int, ...]:
    """Return the indices of the target's layers from which an EAGLE-3 head reads the input hidden states.

    The ids in eagle_config count the layers before these: they mean those layers' outputs.

    Raises:
        CheckpointError: A list is not valid, or the two lists differ.
    """
    top_level, nested = (_parse_layer_ids(ConfigValues(path, each, {}), offset) for each, offset in ((given, 0), (eagle, 1)))
    if top_level and nested and top_level != nested:
        found = f"{list(top_level)} at the top and {[i - 1 for i in nested]} in {EAGLE_CONFIG_KEY}"
        raise CheckpointError(f"{path}: {LAYER_IDS_KEY} is {found}, which mean different layers; expected one of them")
    return top_level or nested


def _parse_layer_ids(values: ConfigValues, offset: int) -> tuple[int, ...]:
    ids = values[LAYER_IDS_KEY]
    if ids is None or ids == []:
        return ()
    if not isinstance(ids, list) or not is_layer_list(ids):
        raise values.make_error(LAYER_IDS_KEY, "a list of target layers without duplicates")
    return tuple(i + offset for i in ids)


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of an EAGLE-3 draft head from a GGUF file's metadata.

    A missing classifier or embedding is the target's, and there are no biases.
    """
    metadata.require("block_count", 1)
    layers_key = next((key for key in TARGET_LAYERS_KEYS if key in metadata), TARGET_LAYERS_KEYS[0])
    if not is_layer_list(metadata[layers_key]):
        raise metadata.make_error(layers_key, "a list of target layers without duplicates")
    sized_tensor = next((name for name in (D2T, gguf.LM_HEAD) if name in metadata.tensors), "")
    head = HeadConfig(
        target_dim=metadata.get_int("target_hidden_size"),
        target_layers=tuple(metadata[layers_key]),
        draft_vocab_size=metadata.tensors.get_shape(sized_tensor)[0] if sized_tensor else metadata.common_fields["vocab_size"],
        own_embedding=gguf.EMBEDDING in metadata.tensors,
        own_classifier=gguf.LM_HEAD in metadata.tensors,
        norm_before_residual=metadata.get_bool("norm_before_residual", False),
        fc_norm="whole" if metadata.get_bool("norm_before_fc", False) else "",
    )
    return ModelConfig(**gguf.parse_base_fields(metadata, has_biases=False), architecture="eagle3", head=head)


FAMILY = (
    GGUFFamily("eagle3", parse_gguf_config, GGUF_TENSORS, is_head=True, id_map_name=D2T),
    HFHead(
        "eagle3",
        parse_config,
        get_tensor_specs,
        get_id_map_name,
        has_id_offsets=True,
        prefix=PREFIX,
        ignored_names=IGNORED_NAMES,
    ),
)
