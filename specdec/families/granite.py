"""Granite 3 and 4, with scaled embeddings, residuals, scores and logits; dense, with experts, or hybrids with Mamba-2 layers."""

from dataclasses import replace
from typing import Any

from specdec.argument_checks import JSONDict
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import tensor_specs as specs
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
from specdec.families.recurrent_common import GGUF_MAMBA_TENSORS, make_mamba_specs, parse_gguf_mamba, parse_hf_mamba
from specdec.mixer_config import Mamba2Config
from specdec.model_config import LayerConfig, ModelConfig, make_layer_configs

SCALE_KEYS = {
    "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier", "logit_divisor": "logits_scaling",
}  # fmt: skip
SCORE_SCALE_KEY, GGUF_SCORE_SCALE_KEY = "attention_multiplier", "attention.scale"
GGUF_SCALE_KEYS = {"embedding_scale": "embedding_scale", "residual_scale": "residual_scale", "logit_divisor": "logit_scale"}
SUPPORTED_KEYS = (*SCALE_KEYS.values(), SCORE_SCALE_KEY)
GGUF_SUPPORTED_KEYS = (*GGUF_SCALE_KEYS.values(), GGUF_SCORE_SCALE_KEY)
DEFAULTS = hf.DEFAULTS | dict.fromkeys(SUPPORTED_KEYS, 1.0)
HYBRID_DEFAULTS = DEFAULTS | {
    "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024, "position_embedding_type": None,
    "layer_types": None, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto",
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
}  # fmt: skip
MOE_DEFAULTS = DEFAULTS | {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 0}
ATTENTION_TYPES, MAMBA_TYPES = (hf.FULL_ATTENTION, "attention"), (hf.LINEAR_ATTENTION, "mamba")  # in transformers 5 and 4
SHARED_IN, SHARED_OUT = (hf.LAYER_WEIGHT % f"shared_mlp.{name}_linear" for name in ("input", "output"))
# The MLP of a dense hybrid is the shared expert.
SHARED_MLP_TENSORS = specs.fuse(specs.GATE_UP, SHARED_IN) | {"w2": specs.TensorSpec(SHARED_OUT)}
EXPERT_TENSORS = {
    "router": specs.TensorSpec("layers.{}.block_sparse_moe.router.layer.weight"),
    **specs.fuse(specs.EXPERTS_GATE_UP, "layers.{}.block_sparse_moe.input_linear.weight", is_per_expert=True),
    "experts_w2": specs.TensorSpec("layers.{}.block_sparse_moe.output_linear.weight", is_per_expert=True),
    **specs.fuse(specs.SHARED_GATE_UP, SHARED_IN),
    "shared_w2": specs.TensorSpec(SHARED_OUT),
}


def parse_scaled_fields(values: ConfigValues, **more: Any) -> JSONDict:
    """Parse the keys of Granite's config.json and return a dict of `ModelConfig` fields.

    The fields are those of Llama and the scales of embeddings, residuals, logits and scores.

    Args:
        values: The keys of config.json.
        more: Other fields of `AttentionConfig`.
    """
    scales = {name: values.get_scale(key) for name, key in SCALE_KEYS.items()}
    attention = hf.parse_attention(values, scale=values.get_scale(SCORE_SCALE_KEY), **more)
    return hf.parse_base_fields(values) | scales | {"attention": attention}


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a dense Granite model from the keys of config.json."""
    return ModelConfig(**parse_scaled_fields(values), mlp_bias=values.get_bool("mlp_bias"))


def parse_moe_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a Granite model with experts, and with a shared expert unless the shared width is 0."""
    shared = values.get_int("shared_intermediate_size") if values["shared_intermediate_size"] != 0 else 0
    experts = hf.parse_experts(values, "intermediate_size", "num_local_experts", shared_hidden_dim=shared)
    return ModelConfig(**parse_scaled_fields(values), experts=experts)


def parse_mamba(values: ConfigValues) -> Mamba2Config:
    """Return the `Mamba2Config` of a hybrid Granite model from the keys of config.json. Raises CheckpointError."""
    inner_dim = values.get_int("mamba_expand") * values.get_int("hidden_size")
    return parse_hf_mamba(values, inner_dim, "mamba_expand x hidden_size")


def parse_hybrid_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a hybrid Granite model, dense or with experts, from the keys of config.json."""
    n_layers = values.get_int("num_hidden_layers", max_value=hf.MAX_LAYERS)
    choices = (*ATTENTION_TYPES, *MAMBA_TYPES)
    types = values.get_per_layer("layer_types", n_layers, choices, "attention or mamba")
    mamba_layers = [i for i, layer_type in enumerate(types) if layer_type in MAMBA_TYPES]
    values.require("position_embedding_type", "rope", "nope", None)
    hf.reject_window(values)
    fields = parse_scaled_fields(values, has_rope=values["position_embedding_type"] == "rope")
    shared = values.get_int("shared_intermediate_size")
    if values["num_local_experts"] == 0:
        fields["hidden_dim"] = shared
    else:
        fields["experts"] = hf.parse_experts(values, "intermediate_size", "num_local_experts", shared_hidden_dim=shared)
    if mamba_layers:
        fields["layers"] = make_layer_configs(LayerConfig(mixer=parse_mamba(values)), mamba_layers, n_layers)
    return ModelConfig(**fields)


def parse_gguf_config(metadata: GGUFMetadata, n_kv_heads: int | None = None) -> ModelConfig:
    """Build the `ModelConfig` of a Granite model, dense or with experts, from a GGUF file's metadata.

    A scale of 0 in the metadata means none.

    Args:
        metadata: The file's metadata.
        n_kv_heads: Number of KV heads; by default that of the metadata.
    """

    def get_scale(key: str, default: float) -> float:
        return metadata.get_scale(key) if metadata[key] not in (None, 0) else default

    score_scale, has_rope = get_scale(GGUF_SCORE_SCALE_KEY, 0.0), metadata.get_bool("rope.scaling.finetuned", True)
    fields = gguf.parse_base_fields(metadata, n_kv_heads=n_kv_heads, scale=score_scale, has_rope=has_rope)
    scales = {name: get_scale(key, 1.0) for name, key in GGUF_SCALE_KEYS.items()}
    return ModelConfig(**fields | scales)


def parse_hybrid_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a hybrid Granite model from a GGUF file's metadata; Mamba-2 layers have no KV heads."""
    heads, mamba_layers = gguf.parse_attention_heads(metadata, "Mamba-2 layers")
    mamba = LayerConfig(mixer=parse_gguf_mamba(metadata, mamba_layers[0]))
    layers = make_layer_configs(mamba, mamba_layers, metadata.common_fields["n_layers"])
    return replace(parse_gguf_config(metadata, heads), layers=layers)


HF_MOE_TENSORS, GGUF_MOE_TENSORS = hf.TENSORS | EXPERT_TENSORS, gguf.INTERLEAVED_ROPE_TENSORS | gguf.EXPERT_TENSORS
FAMILY = (
    HFFamily("granite", DEFAULTS, parse_config, hf.TENSORS, supported_keys=(*SUPPORTED_KEYS, "mlp_bias")),
    *(
        HFFamily(name, MOE_DEFAULTS, parse_moe_config, HF_MOE_TENSORS, supported_keys=SUPPORTED_KEYS)
        for name in ("granitemoe", "granitemoeshared")
    ),
    HFFamily(
        "granitemoehybrid", HYBRID_DEFAULTS, parse_hybrid_config, HF_MOE_TENSORS | make_mamba_specs("layers.{}.mamba.%s"),
        (SHARED_MLP_TENSORS,), supported_keys=SUPPORTED_KEYS,
    ),
    GGUFFamily("granite", parse_gguf_config, gguf.INTERLEAVED_ROPE_TENSORS, supported_keys=GGUF_SUPPORTED_KEYS),
    GGUFFamily("granitemoe", parse_gguf_config, GGUF_MOE_TENSORS, supported_keys=GGUF_SUPPORTED_KEYS),
    GGUFFamily(
        "granitehybrid", parse_hybrid_gguf_config, GGUF_MOE_TENSORS | GGUF_MAMBA_TENSORS, supported_keys=GGUF_SUPPORTED_KEYS,
        per_layer_keys=(gguf.KV_HEADS_KEY,),
    ),
)  # fmt: skip
