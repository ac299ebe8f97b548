"""Gemma 4 (Gemma Team 2026): layers of two types; the last ones use the keys and values of earlier ones.

Most layers have a sliding window. The others have longer heads, maybe fewer KV heads, maybe keys that are also the values, and
rotate a quarter of their pairs. Smaller models feed additional per-layer inputs of each token into the residual stream.
"""

import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specdec.argument_checks import MIN_SCALE, JSONDict
from specdec.families import family
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import tensor_specs as specs
from specdec.families.config_values import MAX_DIM, ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
from specdec.families.gemma import BLOCK_FIELDS, COMMON_DEFAULTS, compute_embedding_scale
from specdec.families.hf_common import FULL_ATTENTION, MAX_THETA, SLIDING_ATTENTION
from specdec.model_config import AttentionConfig, LayerConfig, ModelConfig, PerLayerInputsConfig, RopeConfig

LOGIT_SOFTCAP_KEY, PER_LAYER_CONFIG_KEY = "final_logit_softcapping", "per_layer_config"
HEAD_KEYS = ("head_dim", "num_key_value_heads")
DEFAULTS = COMMON_DEFAULTS | {
    "vocab_size": 262144, "num_hidden_layers": 30, "rope_parameters": None, "sliding_window": 512, LOGIT_SOFTCAP_KEY: None,
    "use_bidirectional_attention": None, "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256,
    "attention_k_eq_v": False, "num_kv_shared_layers": 0, "enable_moe_block": False, "use_double_wide_mlp": False,
    "num_experts": None, "num_experts_per_tok": None, "moe_intermediate_size": None, "global_head_dim": 512,
    "num_global_key_value_heads": None, PER_LAYER_CONFIG_KEY: None,
}  # fmt: skip
UNIFIED = "gemma4_unified"  # Gemma 4 12B: the same language model without per-layer inputs; images and sound need no towers
UNIFIED_DEFAULTS = DEFAULTS | {"max_position_embeddings": 262144, "sliding_window": 1024, "hidden_size_per_layer_input": 0}
SUPPORTED_KEYS = (LOGIT_SOFTCAP_KEY, PER_LAYER_CONFIG_KEY)
GGUF_PER_LAYER_KEYS = (gguf.KV_HEADS_KEY, gguf.MLP_DIM_KEY)
SHARED_KV_LAYERS_KEY, PER_LAYER_INPUT_DIM_KEY = "attention.shared_kv_layers", "embedding_length_per_layer_input"
IGNORED_NAMES = re.compile(
    family.IGNORED_NAMES.pattern + r"|(model\.)?(audio_tower|embed_vision|vision_embedder|embed_audio)\..*"
)
DEFAULT_ROPE: dict[str, dict[str, Any]] = {
    SLIDING_ATTENTION: {"rope_type": "default", "rope_theta": 10000.0},
    FULL_ATTENTION: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
ROPE_DEFAULTS: JSONDict = {"rope_type": "default", "partial_rotary_factor": 1.0, "factor": 1.0}  # for missing keys
FULL_ATTENTION_INTERVAL = 6  # default, if there is no list of layer types
UNROTATED_DIVISOR = float(np.float32(1e30))  # frequency factor of pairs that are not rotated, also in GGUF files
FUSED_EXPERT_TENSORS = specs.fuse_experts("layers.{}.experts.%s")
HF_TENSORS = hf.TENSORS | hf.PRE_POST_NORM_TENSORS | FUSED_EXPERT_TENSORS | {
    **specs.make(
        hf.LAYER_WEIGHT, wk_as_v="self_attn.k_proj", inputs_gate="per_layer_input_gate", inputs_back="per_layer_projection",
        inputs_norm="post_per_layer_input_norm", router="router.proj", rms_experts="pre_feedforward_layernorm_2",
        rms_mlp_out="post_feedforward_layernorm_1", rms_experts_out="post_feedforward_layernorm_2",
    ),
    **specs.make("layers.{}.%s", layer_scale="layer_scalar", router_scale="router.scale",
    expert_scale="router.per_expert_scale"),
    **specs.make(
        "%s.weight", input_rows="embed_tokens_per_layer", inputs="per_layer_model_projection",
        inputs_norm_in="per_layer_projection_norm",
    ),
}  # fmt: skip
GGUF_TENSORS = gguf.TENSORS | gguf.EXPERT_TENSORS | gguf.POST_NORM_TENSORS | {
    **specs.make(
        gguf.LAYER_WEIGHT, wk_as_v="attn_k", layer_scale="layer_output_scale", inputs_gate="inp_gate", inputs_back="proj",
        inputs_norm="post_norm", rms_experts="pre_ffw_norm_2", rms_mlp_out="post_ffw_norm_1", rms_experts_out="post_ffw_norm_2",
    ),
    **specs.make("blk.{}.%s.scale", router_scale="ffn_gate_inp", expert_scale="ffn_down_exps"),
    **specs.make(
        "%s.weight", input_rows="per_layer_token_embd", inputs="per_layer_model_proj", inputs_norm_in="per_layer_proj_norm"
    ),
}  # fmt: skip
TOO_MANY_SHARED = "a number that leaves a layer of each type with its own keys and values"
ATTENTION_FIELDS: dict[str, Any] = {"qk_norm": True, "value_norm": True, "scale": 1.0}
SHARED_KV_TENSORS = ("self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.k_norm.weight", "self_attn.v_norm.weight")
GGUF_SHARED_KV_TENSORS = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a Gemma 4 model from the keys of config.json."""
    values.require("attention_bias", False)
    values.require("use_bidirectional_attention", None, "vision")
    sizes = hf.parse_base_fields(values, "hidden_activation", hf.GELU_TANH)
    n_layers, dim = sizes["n_layers"], sizes["dim"]
    full = hf.get_full_attention_layers(values, n_layers, FULL_ATTENTION_INTERVAL) | {n_layers - 1}  # always the last
    full_layer, is_k_eq_v = _parse_full_attention_layer(values, full, n_layers), values.get_bool("attention_k_eq_v")
    local, full_rope = _parse_ropes(values, full_layer.head_dim or sizes["head_dim"])
    window = values.get_int("sliding_window") if len(full) < n_layers else 0
    attention = AttentionConfig(local, window=window, **ATTENTION_FIELDS)
    full_attention_layer = replace(full_layer, attention=replace(attention, window=0, rope=full_rope, values_are_keys=is_k_eq_v))
    n_shared = values.get_int("num_kv_shared_layers", max_value=n_layers - 1) if values["num_kv_shared_layers"] != 0 else 0
    wide_dim = 2 * sizes["hidden_dim"] if values.get_bool("use_double_wide_mlp") else None
    layers = _share_kv_layers(
        [full_attention_layer if i in full else LayerConfig() for i in range(n_layers)], attention, full, n_shared, wide_dim
    )
    if not layers:
        raise values.make_error("num_kv_shared_layers", TOO_MANY_SHARED)
    return ModelConfig(
        **sizes, **BLOCK_FIELDS, attention=attention, layers=layers, per_layer_inputs=_parse_per_layer_inputs(values),
        embedding_scale=compute_embedding_scale(dim),
        layer_scale=True,
        experts=hf.parse_experts(values, "moe_intermediate_size",
        has_parallel_mlp=True) if values.get_bool("enable_moe_block") else None,
        logit_softcap=values.get_scale(LOGIT_SOFTCAP_KEY, 0.0),
    )  # fmt: skip


def _parse_per_layer_inputs(values: ConfigValues) -> PerLayerInputsConfig | None:
    if values["hidden_size_per_layer_input"] in (0, None):
        return None
    return PerLayerInputsConfig(values.get_int("hidden_size_per_layer_input"), values.get_int("vocab_size_per_layer_input"))


def _parse_full_attention_layer(values: ConfigValues, full: Collection[int], n_layers: int) -> LayerConfig:
    """Return a `LayerConfig` with the head sizes of full-attention layers, from separate keys or from per_layer_config.

    Raises:
        CheckpointError: The full-attention layers differ from each other, or other layers are listed.
    """
    if values[PER_LAYER_CONFIG_KEY] is None:
        has_own = values.get_bool("attention_k_eq_v") and values["num_global_key_value_heads"]
        n_kv_heads = values.get_int("num_global_key_value_heads") if has_own else None
        return LayerConfig(head_dim=values.get_int("global_head_dim", max_value=MAX_DIM), n_kv_heads=n_kv_heads)
    given, names = values[PER_LAYER_CONFIG_KEY], {f"{i}" for i in full}
    is_uniform = (
        isinstance(given, dict) and {*given} == names and all(each == given[f"{n_layers - 1}"] for each in given.values())
    )
    if not is_uniform or not isinstance(given[f"{n_layers - 1}"], dict) or not {*given[f"{n_layers - 1}"]} <= {*HEAD_KEYS}:
        raise values.make_error(
            PER_LAYER_CONFIG_KEY, f"the same {' and '.join(HEAD_KEYS)} of each layer of {FULL_ATTENTION}, and of no other"
        )
    heads = ConfigValues(values.path, given[f"{n_layers - 1}"], {})
    head_dim, n_kv_heads = (heads.get_int(key, max_value=MAX_DIM) if key in heads else None for key in HEAD_KEYS)
    return LayerConfig(head_dim=head_dim, n_kv_heads=n_kv_heads)


def _share_kv_layers(
    unshared: Sequence[LayerConfig], attention: AttentionConfig, full: Collection[int], n_shared: int, wide_dim: int | None = None
) -> tuple[LayerConfig, ...]:
    """Make each of the last n_shared layers use the keys and values of an earlier layer, and return the configs of all layers.

    The earlier layer is the last one of the same type that has its own keys and values.

    Args:
        unshared: Configs of the layers without sharing.
        attention: Attention of layers without a config for it.
        full: Indices of the full-attention layers.
        n_shared: Number of layers that share.
        wide_dim: Hidden dim of the sharing layers' MLP; None keeps it.

    Returns:
        The layers; empty if there is no earlier layer of a type.
    """
    layers, first = [*unshared], len(unshared) - n_shared
    for i in range(first, len(unshared)):
        source = next((j for j in reversed(range(first)) if (j in full) == (i in full)), None)
        if source is None:
            return ()
        shared_attention = replace(unshared[i].attention or attention, kv_layer=source)
        layers[i] = replace(unshared[i], attention=shared_attention, hidden_dim=wide_dim or unshared[i].hidden_dim)
    return tuple(layers)


def _parse_ropes(values: ConfigValues, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Return two RoPE configs: of sliding-window layers, and of full-attention layers, which rotate only a share of pairs."""
    key = "rope_parameters"
    given = DEFAULT_ROPE if values[key] is None else values[key]
    if not isinstance(given, dict) or not all(
        isinstance(given.get(layer_type), dict) for layer_type in (SLIDING_ATTENTION, FULL_ATTENTION)
    ):
        raise values.make_error(key, f"an object of {SLIDING_ATTENTION} and {FULL_ATTENTION}")
    local, full_rope = (
        ConfigValues(values.path, given[layer_type], ROPE_DEFAULTS) for layer_type in (SLIDING_ATTENTION, FULL_ATTENTION)
    )
    local.require("rope_type", "default")
    local.require("partial_rotary_factor", None, 1)
    full_rope.require("rope_type", "proportional")
    n_rotated_pairs = int(full_rope.get_float("partial_rotary_factor", 0, 1) * head_dim // 2)
    freq_factors = make_proportional_divisors(n_rotated_pairs, head_dim // 2, full_rope.get_scale("factor"))
    thetas = (each.get_float("rope_theta", 1, MAX_THETA) for each in (local, full_rope))
    return RopeConfig(next(thetas)), RopeConfig(next(thetas), freq_factors=freq_factors)


def make_proportional_divisors(n_rotated_pairs: int, n_pairs: int, factor: float = 1.0) -> tuple[float, ...]:
    """Return the RoPE frequency divisors of a head's pairs: `factor` for the rotated pairs, which are first, else 1e30."""
    return (factor,) * n_rotated_pairs + (UNROTATED_DIVISOR,) * (n_pairs - n_rotated_pairs)


def parse_gguf_config(metadata: GGUFMetadata, n_shared: int | None = None) -> ModelConfig:
    """Build the `ModelConfig` of a Gemma 4 model from a GGUF file's metadata, which has the head sizes of full-attention layers.

    Args:
        metadata: The file's metadata.
        n_shared: Number of layers, the last ones, that use others' keys and values; by default that of the file.
    """
    n_layers, dim = metadata.common_fields["n_layers"], metadata.common_fields["dim"]
    full = gguf.get_full_attention_layers(metadata)
    n_kv_heads, mlp_dims = (metadata.get_layer_ints(key, n_layers) for key in GGUF_PER_LAYER_KEYS)
    sizes = gguf.parse_base_fields(
        metadata,
        n_kv_heads=max(n_kv_heads),
        has_biases=False,
        window=metadata.get_int(gguf.SLIDING_WINDOW_KEY),
        **ATTENTION_FIELDS,
    )
    local_head_dim = metadata.get_int(gguf.WINDOW_HEAD_KEYS[0], sizes["head_dim"])
    for key in gguf.WINDOW_HEAD_KEYS[1:]:
        if metadata.get_int(key, local_head_dim) != local_head_dim:
            raise metadata.make_error(key, f"{local_head_dim}, a head's length")
    if n_shared is None:
        n_shared = metadata.get_count(SHARED_KV_LAYERS_KEY)
    full_attention: AttentionConfig = replace(sizes["attention"], window=0)
    theta = metadata.get_float("rope.freq_base_swa", 1, MAX_THETA, DEFAULT_ROPE[SLIDING_ATTENTION]["rope_theta"])
    attention = replace(sizes["attention"], rope=replace(full_attention.rope, theta=theta, freq_factors=()))
    unshared = []
    for i in range(n_layers):
        is_k_eq_v = i < n_layers - n_shared and f"blk.{i}.attn_v.weight" not in metadata.tensors
        layer_attention = replace(full_attention if i in full else attention, values_are_keys=is_k_eq_v)
        head_dim = sizes["head_dim"] if i in full else local_head_dim
        unshared.append(LayerConfig(None, n_kv_heads[i], head_dim, mlp_dims[i], layer_attention))
    if not (layers := _share_kv_layers(unshared, attention, full, n_shared)):
        raise metadata.make_error(SHARED_KV_LAYERS_KEY, TOO_MANY_SHARED)
    if sizes["experts"]:
        sizes["experts"] = replace(sizes["experts"], has_parallel_mlp=True)
    n_inputs = metadata.get_count(PER_LAYER_INPUT_DIM_KEY)
    sizes |= {"head_dim": local_head_dim, "hidden_dim": mlp_dims[0], "n_kv_heads": n_kv_heads[0], "attention": attention}
    return ModelConfig(
        **sizes, **BLOCK_FIELDS, layers=layers, layer_scale="blk.0.layer_output_scale.weight" in metadata.tensors,
        embedding_scale=compute_embedding_scale(dim),
        per_layer_inputs=PerLayerInputsConfig(n_inputs,
        metadata.tensors.get_shape("per_layer_token_embd.weight")[0]) if n_inputs else None,
        logit_softcap=metadata.get_float(LOGIT_SOFTCAP_KEY, 0, 1 / MIN_SCALE, 0.0),
    )  # fmt: skip


def _list_kv_sharing_layers(config: ModelConfig) -> list[int]:
    """Return the indices of layers that use the keys and values of other layers."""
    return [i for i in range(config.n_layers) if not config.layer_config(i).has_own_kv]


def list_unused(config: ModelConfig) -> Iterator[str]:
    """Return the names of unneeded tensors that a folder may have for layers that use the keys and values of other layers."""
    return (f"layers.{i}.{name}" for i in _list_kv_sharing_layers(config) for name in SHARED_KV_TENSORS)


def list_unused_gguf(config: ModelConfig) -> Iterator[str]:
    """Return the names of tensors that a GGUF file of Gemma 4 may have but the model does not need.

    They are RoPE's frequencies, and keys and values of layers that use those of other layers.
    """
    layer_names = (f"blk.{i}.{name}" for i in _list_kv_sharing_layers(config) for name in GGUF_SHARED_KV_TENSORS)
    return itertools.chain([gguf.ROPE_FREQS], layer_names)


HF_FAMILY = HFFamily(
    "gemma4_text", DEFAULTS, parse_config, HF_TENSORS, ignored_names=IGNORED_NAMES,
    supported_keys=SUPPORTED_KEYS,
    key_aliases={"top_k_experts": "num_experts_per_tok"}, multimodal_types={"gemma4": True}, list_unused=list_unused,
)  # fmt: skip
FAMILY = (
    HF_FAMILY,
    replace(HF_FAMILY, name=f"{UNIFIED}_text", defaults=UNIFIED_DEFAULTS, multimodal_types={UNIFIED: True}),
    GGUFFamily(
        "gemma4", parse_gguf_config, GGUF_TENSORS, (gguf.FUSED_EXPERT_TENSORS,),
        supported_keys=(gguf.SLIDING_WINDOW_KEY, LOGIT_SOFTCAP_KEY, *gguf.WINDOW_HEAD_KEYS),
        per_layer_keys=GGUF_PER_LAYER_KEYS, list_unused=list_unused_gguf,
    ),
)  # fmt: skip
