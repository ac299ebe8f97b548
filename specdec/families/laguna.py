"""Laguna (Poolside 2026): experts chosen by sigmoids, and attention output that is gated by a softplus.

The smaller model has a sliding window in most layers. These have more query heads and a RoPE of their own. The other layers
rotate only a part of each head.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from specdec.families import deepseek
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import tensor_specs as specs
from specdec.families.config_values import MAX_DIM, ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
from specdec.families.hf_common import FULL_ATTENTION, MAX_THETA, SLIDING_ATTENTION
from specdec.model_config import AttentionConfig, LayerConfig, ModelConfig, RopeConfig

DEFAULT_ROPE: dict[str, dict[str, Any]] = {
    FULL_ATTENTION: {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    SLIDING_ATTENTION: {"rope_type": "default", "rope_theta": 10000.0},
}
DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 100352, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 48,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "bos_token_id": None, "eos_token_id": None,
    "rope_theta": None, "rope_parameters": DEFAULT_ROPE, "sliding_window": 512, "layer_types": None, "gating": True,
    "num_attention_heads_per_layer": None, "mlp_layer_types": None, "num_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "moe_routed_scaling_factor": 1.0,
    "moe_apply_router_weight_on_input": False, "moe_router_logit_softcapping": 0.0,
}  # fmt: skip
EXPERTS_FIELDS: dict[str, Any] = {"is_sigmoid": True, "has_selection_bias": True, "sum_eps": 0.0}
HEADS_KEY, SPARSE = "num_attention_heads_per_layer", "sparse"
FULL_ATTENTION_INTERVAL = 4  # default of GGUF files, from the first layer on
ROTARY_DIM_KEY = gguf.WINDOW_HEAD_KEYS[2]
GATE_NAMES = ("wg", "head_gates")
HF_TENSORS = (
    hf.TENSORS
    | hf.EXPERT_TENSORS
    | hf.SHARED_EXPERT_TENSORS
    | {"router_bias": specs.TensorSpec("layers.{}.mlp.experts.e_score_correction_bias")}
    | dict.fromkeys(GATE_NAMES, specs.TensorSpec(hf.LAYER_WEIGHT % "self_attn.g_proj"))
)
HF_ALTERNATIVES = (  # as transformers names them in memory
    hf.FUSED_EXPERT_TENSORS,
    {"router_bias": deepseek.HF_TENSORS["router_bias"]},
    hf.SHARED_EXPERTS_TENSORS,
)
GGUF_TENSORS = gguf.TENSORS | gguf.EXPERT_TENSORS | dict.fromkeys(GATE_NAMES, specs.TensorSpec(gguf.LAYER_WEIGHT % "attn_gate"))


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a Laguna model from the keys of config.json."""
    values.require("moe_apply_router_weight_on_input", False)
    values.require("moe_router_logit_softcapping", 0)
    values.require("original_max_position_embeddings", None)  # transformers reads it only from each layer type's RoPE
    values.require("gating", True, "per-head", "per-element")
    sizes = hf.parse_base_fields(values)
    n_layers = sizes["n_layers"]
    full = hf.get_full_attention_layers(values, n_layers, 1)
    local_rope, full_rope = hf.get_rope_values_by_layer_type(values)
    gate = "softplus" if values["gating"] == "per-element" else "head_softplus"
    attention = hf.parse_attention(values, hf.parse_rope(values, full_rope, is_partial=True), qk_norm=True, gate=gate)
    sliding = attention
    if len(full) < n_layers:
        rope = hf.parse_rope(values, local_rope, is_partial=True)
        sliding = replace(attention, rope=rope, window=values.get_int("sliding_window"))
    heads = values.get_layer_ints(HEADS_KEY if values[HEADS_KEY] is not None else "num_attention_heads", n_layers)
    dense_layers = [0]
    if values["mlp_layer_types"] is not None:
        kinds = values.get_per_layer("mlp_layer_types", n_layers, ("dense", SPARSE), f"dense or {SPARSE}")
        dense_layers = [i for i, kind in enumerate(kinds) if kind != SPARSE]
    experts = hf.parse_experts(
        values, "moe_intermediate_size", dense_layers=tuple(dense_layers), **EXPERTS_FIELDS,
        shared_hidden_dim=values.get_int("shared_expert_intermediate_size"),
        routed_scaling_factor=values.get_scale("moe_routed_scaling_factor"),
    )  # fmt: skip
    return _make_config(sizes | {"experts": experts}, attention, sliding, full, heads)


def _make_config(
    sizes: Mapping[str, Any], attention: AttentionConfig, sliding: AttentionConfig, full: Collection[int], heads: Sequence[int]
) -> ModelConfig:
    """Build the `ModelConfig` of a Laguna model.

    Args:
        sizes: Other fields of `ModelConfig`.
        attention: Attention of the full-attention layers.
        sliding: Attention of the sliding-window layers.
        full: Indices of the full-attention layers.
        heads: Number of query heads of each layer.
    """
    layers = tuple(LayerConfig(n_heads=n, attention=attention if i in full else sliding) for i, n in enumerate(heads))
    return ModelConfig(**{**sizes, "n_heads": heads[0], "attention": attention}, layers=layers)


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a Laguna model from a GGUF file's metadata.

    YaRN's factor of the rotated rows is that of the file, as in folders; llama.cpp computes another.
    """
    metadata.require(gguf.GATING_FUNC_KEY, gguf.SIGMOID, 0, None)
    metadata.require("expert_weights_norm", True)
    n_layers = metadata.common_fields["n_layers"]
    heads = metadata.get_layer_ints(gguf.HEADS_KEY, n_layers)
    has_head_gates = metadata.tensors.get_shape(GGUF_TENSORS["wg"].name.format(0))[0] == heads[0]
    sizes = gguf.parse_base_fields(
        metadata, has_partial_rope=True, qk_norm=True, gate="head_softplus" if has_head_gates else "softplus"
    )
    attention: AttentionConfig = sizes["attention"]
    if attention.rope.scaling and gguf.YARN_SCALE_KEY in metadata:
        factor = metadata.get_scale(gguf.YARN_SCALE_KEY)
        attention = replace(attention, rope=replace(attention.rope, attention_factor=factor))
    sliding, full = attention, {*range(n_layers)}
    if window := metadata.get_count(gguf.SLIDING_WINDOW_KEY):
        head_dim, rope = sizes["head_dim"], attention.rope
        rotary_dim = metadata.get_int(ROTARY_DIM_KEY, rope.dim or head_dim, MAX_DIM)
        theta = metadata.get_float("rope.freq_base_swa", 1, MAX_THETA, rope.theta)
        sliding = replace(attention, rope=RopeConfig(theta, 0 if rotary_dim == head_dim else rotary_dim), window=window)
        full = gguf.get_full_attention_layers(metadata, FULL_ATTENTION_INTERVAL, is_first=True)
    experts = gguf.parse_experts(metadata, **EXPERTS_FIELDS)
    return _make_config(sizes | {"experts": experts}, attention, sliding, full, heads)


FAMILY = (
    HFFamily("laguna", DEFAULTS, parse_config, HF_TENSORS, HF_ALTERNATIVES),
    GGUFFamily(
        "laguna", parse_gguf_config, GGUF_TENSORS, (gguf.FUSED_EXPERT_TENSORS,),
        supported_keys=(gguf.GATING_FUNC_KEY, gguf.SLIDING_WINDOW_KEY, ROTARY_DIM_KEY),
        per_layer_keys=(gguf.HEADS_KEY,),
    ),
)  # fmt: skip
