"""Parse the parts of config.json that families have in common, and name Llama's tensors in a Hugging Face folder.

The keys are those of transformers 5.23, `models/*/configuration_*.py`.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specdec.argument_checks import JSONDict, JSONObject
from specdec.families import tensor_specs as specs
from specdec.families.config_values import MAX_DIM, ConfigValues, check_neutral_values
from specdec.families.family import HFFamily
from specdec.layers.rope import get_yarn_attention_factor
from specdec.model_config import (
    AttentionConfig,
    ExpertsConfig,
    LayerConfig,
    Llama3RopeScaling,
    RopeConfig,
    YarnRopeScaling,
    make_layer_configs,
)

LM_HEAD = "lm_head.weight"
TEXT_CONFIG_KEY = "text_config"  # the language model of a multimodal one
MAX_LAYERS = 1 << 16  # limit, for configs that list layers
MAX_THETA = 1e18
FULL_ATTENTION, SLIDING_ATTENTION, LINEAR_ATTENTION = "full_attention", "sliding_attention", "linear_attention"
SILU, GELU_TANH = ("silu", "swish"), ("gelu_new", "gelu_pytorch_tanh")

DEFAULTS: JSONDict = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2,
    "sliding_window": None, "rope_theta": 10000.0,
}  # fmt: skip
EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
# Keys that change the arithmetic in some family, and their values that change nothing.
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    key: neutral
    for neutral, keys in (
        ((None,), "quantization_config attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar clip_qkv"),
        ((None,), "quantization attention_multiplier attention_chunk_size"),
        ((None, 1), "partial_rotary_factor rotary_pct embedding_multiplier residual_multiplier logits_scaling logit_scale"),
        ((None, False), "rope_interleaved use_mrope use_qk_norm qk_layernorm alibi add_cross_attention is_encoder_decoder"),
        ((None, False), "mlp_bias"),
        ((None, True), "is_causal"),
        ((None, 0, 1), " ".join(EXPERT_COUNT_KEYS)),
        ((None, []), "no_rope_layers"),
        ((None, {}), "pruned_heads per_layer_config"),
    )
    for key in keys.split()
}
LAYER_WEIGHT, LAYER_BIAS = "layers.{}.%s.weight", "layers.{}.%s.bias"
TENSORS = specs.set_rope_pairs(
    specs.make("%s.weight", tok_emb="embed_tokens", rms_final="norm", wcls="lm_head")
    | specs.make(
        LAYER_WEIGHT, rms_att="input_layernorm", wq="self_attn.q_proj", wk="self_attn.k_proj", wv="self_attn.v_proj",
        wo="self_attn.o_proj", q_norm="self_attn.q_norm", k_norm="self_attn.k_norm", rms_ffn="post_attention_layernorm",
        w1="mlp.gate_proj", w2="mlp.down_proj", w3="mlp.up_proj",
    )
    | specs.make(
        LAYER_BIAS, rms_att_bias="input_layernorm", bq="self_attn.q_proj", bk="self_attn.k_proj", bv="self_attn.v_proj",
        bo="self_attn.o_proj", rms_ffn_bias="post_attention_layernorm", b1="mlp.gate_proj", b2="mlp.down_proj",
        b3="mlp.up_proj",
    ) | specs.make("%s.bias", rms_final_bias="norm", wcls_bias="lm_head")
)  # fmt: skip
POST_NORM_TENSORS = specs.make(LAYER_WEIGHT, rms_att_out="post_attention_layernorm", rms_ffn_out="post_feedforward_layernorm")
PRE_POST_NORM_TENSORS = POST_NORM_TENSORS | specs.make(LAYER_WEIGHT, rms_ffn="pre_feedforward_layernorm")
FUSED_TENSORS = specs.set_rope_pairs(  # some tensors stored in one
    specs.fuse(specs.QKV, LAYER_WEIGHT % "self_attn.qkv_proj") | specs.fuse(specs.GATE_UP, LAYER_WEIGHT % "mlp.gate_up_proj")
)
EXPERT_TENSORS = specs.make(LAYER_WEIGHT, router="mlp.gate") | specs.make_per_expert(
    "layers.{}.mlp.experts.{}.%s.weight", experts_w1="gate_proj", experts_w2="down_proj", experts_w3="up_proj"
)
# The experts that process all tokens: one with a gate, or several that are stored as one
SHARED_NAMES = {"shared_w1": "gate_proj", "shared_w2": "down_proj", "shared_w3": "up_proj"}
SHARED_EXPERT_TENSORS = specs.make("layers.{}.mlp.shared_expert.%s.weight", **SHARED_NAMES) | specs.make(
    LAYER_WEIGHT, shared_gate="mlp.shared_expert_gate"
)
SHARED_EXPERTS_TENSORS = specs.make("layers.{}.mlp.shared_experts.%s.weight", **SHARED_NAMES)
FUSED_EXPERT_TENSORS = specs.fuse_experts("layers.{}.mlp.experts.%s")


def parse_base_fields(
    values: ConfigValues, activation: str = "hidden_act", choices: Sequence[str] = SILU, n_layers: int | None = None
) -> JSONDict:
    """Parse the sizes in a config.json with keys like Llama's and return them as a dict of `ModelConfig` fields.

    Args:
        values: The keys of config.json.
        activation: The key of the MLP's activation.
        choices: The supported values of that key.
        n_layers: Number of layers; by default that of num_hidden_layers.

    Raises:
        CheckpointError: A value is not supported.
    """
    values.require(activation, *choices)
    n_heads = values.get_int("num_attention_heads")
    return {
        "dim": values.get_int("hidden_size", max_value=MAX_DIM),
        "hidden_dim": values.get_int("intermediate_size"),
        "n_layers": n_layers or values.get_int("num_hidden_layers", max_value=MAX_LAYERS),
        "n_heads": n_heads,
        "n_kv_heads": values.get_int("num_key_value_heads", n_heads),
        "vocab_size": values.get_int("vocab_size"),
        "seq_len": values.get_int("max_position_embeddings"),
        "shared_classifier": values.get_bool("tie_word_embeddings"),
        "norm_eps": values.get_float("rms_norm_eps", 0, 1),
        "head_dim": values.get_int("head_dim", 0, MAX_DIM),
    }


def parse_attention(values: ConfigValues, rope_config: RopeConfig | None = None, **more: Any) -> AttentionConfig:
    """Return an `AttentionConfig` in which either all projections have biases or none has, from the keys of config.json.

    Args:
        values: The keys of config.json.
        rope_config: The RoPE config; None to parse it from the keys as for Llama.
        more: Other fields of `AttentionConfig`.

    Raises:
        CheckpointError: A value is not supported.
    """
    has_biases = values.get_bool("attention_bias")
    return AttentionConfig(rope_config or parse_rope(values), qkv_bias=has_biases, wo_bias=has_biases, **more)


def reject_biases(values: ConfigValues) -> None:
    """Raise CheckpointError if a config.json gives biases to the projections of attention or MLP."""
    values.require("attention_bias", False)
    values.require("mlp_bias", False)


def check_unsupported_keys(values: ConfigValues, family: HFFamily) -> None:
    """Raise CheckpointError if a config.json has a setting that changes the arithmetic and that its family does not support.

    A family supports the keys of expert counts that are in its defaults or aliases. In a family whose defaults have no
    layer_types, all layers have full attention.
    """
    count_keys = [key for key in EXPERT_COUNT_KEYS if key in family.defaults or key in family.key_aliases]
    supported = [*family.supported_keys, *count_keys]
    check_neutral_values(values, NEUTRAL_VALUES, supported)
    if "layer_types" not in family.defaults:
        reject_window(values)
        check_layer_types(FULL_ATTENTION, values)


# Sliding windows


def parse_window(values: ConfigValues) -> int:
    """Return the sliding window of all layers in tokens, 0 for none.

    Raises:
        CheckpointError: The value is not valid, or the list of layer types has layers of another type.
    """
    window = values.get_int("sliding_window", 0)
    check_layer_types(SLIDING_ATTENTION if window else FULL_ATTENTION, values)
    return window


def reject_window(values: ConfigValues) -> None:
    """Raise CheckpointError if a config.json has a sliding window shorter than the context, which transformers ignores."""
    if values["sliding_window"] is not None and values.get_int("sliding_window") < values.get_int("max_position_embeddings"):
        raise values.make_error("sliding_window", f"null in a {values['model_type']} model")


def check_layer_types(layer_type: str, values: ConfigValues) -> None:
    """Raise CheckpointError if the list of layer types in a config.json contains any type but the given one."""
    if values["layer_types"] is None:
        return
    n_layers = values.get_int("num_hidden_layers", max_value=MAX_LAYERS)
    if values["layer_types"] != [layer_type] * n_layers:
        raise values.make_error("layer_types", f"{layer_type} in all {n_layers} layers")


def get_full_attention_layers(
    values: ConfigValues, n_layers: int, interval: int | str, other_type: str = SLIDING_ATTENTION
) -> set[int]:
    """Return the indices of the layers with full attention, from the list of layer types in config.json or from an interval.

    Args:
        values: The keys of config.json.
        n_layers: Number of layers.
        interval: Without a list of layer types, each interval-th layer has full attention; a string is the key of the interval.
        other_type: The type of the other layers.

    Raises:
        CheckpointError: A value is not valid.
    """
    if values["layer_types"] is None:
        step = values.get_int(interval) if isinstance(interval, str) else interval
        return {*range(step - 1, n_layers, step)}
    types = values.get_per_layer("layer_types", n_layers, (FULL_ATTENTION, other_type), f"{FULL_ATTENTION} or {other_type}")
    return {layer for layer, layer_type in enumerate(types) if layer_type == FULL_ATTENTION}


def make_full_attention_layers(
    sliding: AttentionConfig, full: Collection[int], n_layers: int, **more: Any
) -> tuple[LayerConfig, ...]:
    """Return a value for `ModelConfig.layers` in which the given layers have full attention, without a sliding window.

    Args:
        sliding: Attention of the sliding-window layers.
        full: Indices of the full-attention layers.
        n_layers: Number of layers.
        more: Other fields of `AttentionConfig` that differ in the full-attention layers.
    """
    return make_layer_configs(LayerConfig(attention=replace(sliding, window=0, **more)), full, n_layers)


# RoPE


def get_head_dim(values: ConfigValues) -> int:
    """Return the dimension of an attention head, including the part that RoPE does not rotate."""
    head_dim, dim = values.get_int("head_dim", 0, MAX_DIM), values.get_int("hidden_size", max_value=MAX_DIM)
    return head_dim or dim // values.get_int("num_attention_heads")


def get_rope_values(values: ConfigValues, default: JSONObject | None = None) -> ConfigValues:
    """Return the RoPE keys of a config.json: rope_parameters of transformers 5, or rope_scaling of older versions.

    Args:
        values: The keys of config.json.
        default: The RoPE keys if config.json has neither.

    Raises:
        CheckpointError: The value is not an object, or has separate values for types of layers.
    """
    key = "rope_scaling" if values["rope_scaling"] else "rope_parameters"
    given = default or {} if values[key] is None else values[key]
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise values.make_error(key, "an object of numbers, one for all layers")
    defaults = {"rope_theta": values["rope_theta"], "rope_type": given.get("type", "default")}
    return ConfigValues(values.path, given, defaults)


def parse_partial_rope(rope: ConfigValues, values: ConfigValues, *sources: ConfigValues) -> RopeConfig:
    """Return the RoPE config of a model in which RoPE may rotate only a part of each attention head.

    Args:
        rope: The RoPE keys, which have the base.
        values: The keys of config.json.
        sources: Keys that may contain the rotated share; the last source that has it counts. By default all of a head is rotated.

    Raises:
        CheckpointError: The share does not give an even number of rows.
    """
    partial, head_dim = "partial_rotary_factor", get_head_dim(values)
    chosen, share = values, 1.0
    for source in sources:
        if source[partial] is not None:
            chosen, share = source, source.get_float(partial, 0, 1)
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2:
        raise chosen.make_error(partial, f"a share that gives an even number of a head's {head_dim} rows, 2 or more")
    return RopeConfig(rope.get_float("rope_theta", 1, MAX_THETA), 0 if rotary_dim == head_dim else rotary_dim)


def parse_plain_partial_rope(values: ConfigValues, has_sections: bool = False) -> RopeConfig:
    """Return the RoPE config, without scaling, of a model in which RoPE may rotate only a part of each attention head.

    Args:
        values: The keys of config.json.
        has_sections: See `parse_rope`.

    Raises:
        CheckpointError: A value is not supported.
    """
    rope = get_rope_values(values)
    rope.require("rope_type", "default")
    if not has_sections:
        rope.require("mrope_section", None)
    return parse_partial_rope(rope, values, values, rope)


def get_rope_values_by_layer_type(values: ConfigValues, local_theta: str = "rope_theta") -> list[ConfigValues]:
    """Return two sets of RoPE keys: those of sliding-window layers, then those of full-attention layers.

    Args:
        values: The keys of config.json.
        local_theta: The key of the sliding-window layers' base in older files, which scale the other layers by rope_scaling.

    Raises:
        CheckpointError: The value is not an object of these two types of layers.
    """
    key, expected = "rope_parameters", f"an object of {FULL_ATTENTION} and {SLIDING_ATTENTION}"
    given = values.get_object(key, expected)
    if not all(
        layer_type in (FULL_ATTENTION, SLIDING_ATTENTION) and isinstance(rope, dict | None) for layer_type, rope in given.items()
    ):
        raise values.make_error(key, expected)
    scaling, found = values.get_object("rope_scaling", "an object or null"), []
    for layer_type, theta, more in ((SLIDING_ATTENTION, local_theta, {}), (FULL_ATTENTION, "rope_theta", scaling)):
        rope = (given.get(layer_type) or {}) | more
        found.append(ConfigValues(values.path, rope, {"rope_theta": values[theta], "rope_type": rope.get("type", "default")}))
    return found


def parse_rope(
    values: ConfigValues, rope_values: ConfigValues | None = None, has_sections: bool = False, is_partial: bool = False
) -> RopeConfig:
    """Return the RoPE config of a model, with its scaling, from the keys of config.json.

    Args:
        values: The keys of config.json.
        rope_values: The RoPE keys; by default the result of `get_rope_values`.
        has_sections: Whether the model may rotate sections of pairs by different positions of an image. In text they are equal.
        is_partial: Whether RoPE may rotate only a part of each attention head.

    Raises:
        CheckpointError: A value is not valid, or the kind of RoPE is not supported.
    """
    rope_values = rope_values or get_rope_values(values)
    if not has_sections:
        rope_values.require("mrope_section", None)
    if is_partial:
        rope = parse_partial_rope(rope_values, values, rope_values)
    else:
        rope_values.require("partial_rotary_factor", None, 1)
        rope = RopeConfig(rope_values.get_float("rope_theta", 1, MAX_THETA))
    if rope_values["rope_type"] == "default" or (has_sections and rope_values["rope_type"] == "mrope"):
        return rope
    if rope_values["rope_type"] == "yarn":
        return _parse_yarn(rope, values, rope_values)
    if rope_values["rope_type"] == "linear":  # Chen et al. 2023, arXiv:2306.15595
        return replace(rope, freq_factors=(rope_values.get_float("factor", 1, 1e6),) * ((rope.dim or get_head_dim(values)) // 2))
    n_positions = values.get_int("max_position_embeddings")
    if rope_values["rope_type"] == "dynamic" and get_original_positions(values, rope_values) >= n_positions:
        return replace(rope, max_positions=n_positions)
    if rope_values["rope_type"] != "llama3":
        raise rope_values.make_error(
            "rope_type", "default, linear, dynamic, llama3 or yarn; other kinds of RoPE are not supported"
        )
    scaling = Llama3RopeScaling(
        factor=rope_values.get_float("factor", 1, 1e6),
        low_freq_factor=rope_values.get_float("low_freq_factor", 1e-6, 1e6),
        high_freq_factor=rope_values.get_float("high_freq_factor", 1e-6, 1e6),
        original_seq_len=get_original_positions(values, rope_values),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise rope_values.make_error("high_freq_factor", f"more than low_freq_factor, {scaling.low_freq_factor:g}")
    return replace(rope, scaling=scaling)


def get_original_positions(values: ConfigValues, rope_values: ConfigValues) -> int:
    """Return the context length in tokens that the model had before RoPE scaling extended it."""
    key = "original_max_position_embeddings"
    source = values if key in values else rope_values
    return source.get_int(key) if key in source else values.get_int("max_position_embeddings")


def _parse_yarn(rope: RopeConfig, values: ConfigValues, rope_values: ConfigValues) -> RopeConfig:
    original = get_original_positions(values, rope_values)
    factor = rope_values.get_float("factor", 1, 1e6, values.get_int("max_position_embeddings") / original)
    if factor < 1:
        raise rope_values.make_error("factor", "a number of 1 or more")
    betas = {
        key: rope_values.get_float(key, 1e-6, 1e6) for key in ("beta_fast", "beta_slow") if rope_values[key] not in (None, 0)
    }
    scaling = YarnRopeScaling(
        factor, original, **betas, truncate="truncate" not in rope_values or rope_values.get_bool("truncate")
    )
    if scaling.beta_fast < scaling.beta_slow:
        raise rope_values.make_error("beta_fast", f"beta_slow, {scaling.beta_slow:g}, or more")
    if rope_values["attention_factor"] is not None:
        scale = rope_values.get_scale("attention_factor")
    else:
        mscale, mscale_all_dim = (rope_values.get_float(key, 0, 1e6, 0.0) for key in ("mscale", "mscale_all_dim"))
        scale = get_yarn_attention_factor(factor, mscale if mscale and mscale_all_dim else 1.0)
        if mscale and mscale_all_dim:
            scale /= get_yarn_attention_factor(factor, mscale_all_dim)
    return replace(rope, scaling=scaling, attention_factor=float(np.float32(scale)))


# Experts


def get_dense_layers(values: ConfigValues) -> tuple[int, ...]:
    """Return the indices of layers that have an MLP and no experts, from the keys of config.json.

    They are the layers in mlp_only_layers, and all but each decoder_sparse_step-th layer.
    """
    n_layers, step = values.get_int("num_hidden_layers", max_value=MAX_LAYERS), values.get_int("decoder_sparse_step")
    named = [] if values["mlp_only_layers"] is None else values.get_layer_indices("mlp_only_layers", n_layers)
    return tuple(i for i in range(n_layers) if i in named or (i + 1) % step)


def parse_experts(values: ConfigValues, hidden_dim_key: str, count_key: str = "num_experts", **more: Any) -> ExpertsConfig:
    """Return the `ExpertsConfig` of a mixture-of-experts model from the keys of config.json.

    Args:
        values: The keys of config.json.
        hidden_dim_key: The key of an expert's width.
        count_key: The key of the number of experts.
        more: Other fields of `ExpertsConfig`.

    Raises:
        CheckpointError: A value is not valid.
    """
    return ExpertsConfig(values.get_int(count_key), values.get_int("num_experts_per_tok"), values.get_int(hidden_dim_key), **more)
