"""Qwen2 (Yang et al. 2024, arXiv:2407.10671) and Qwen3 (Yang et al. 2025, arXiv:2505.09388).

Qwen2 has biases of q, k and v. Qwen3 has norms of their heads, and maybe experts.
"""

from dataclasses import replace

from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
from specdec.families.llama import parse_gguf_config
from specdec.model_config import AttentionConfig, ModelConfig, RopeConfig

DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768,
    "bos_token_id": None, "eos_token_id": None, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
    "layer_types": None,
}  # fmt: skip
MOE_DEFAULTS = DEFAULTS | {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4, "sliding_window": None,
    "max_window_layers": 0, "num_experts": None, "num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": False, "mlp_only_layers": None, "decoder_sparse_step": 1,
}  # fmt: skip


def make_dense_config(values: ConfigValues, attention: AttentionConfig) -> ModelConfig:
    """Build the `ModelConfig` of a Qwen2 or Qwen3 model without experts from the keys of config.json.

    Layers after the first max_window_layers, or those in layer_types, have a sliding window if use_sliding_window is true.

    Args:
        values: The keys of config.json.
        attention: Attention of all layers without a window.

    Raises:
        CheckpointError: A value is not valid.
    """
    n_layers, n_full_layers = values.get_int("num_hidden_layers", max_value=hf.MAX_LAYERS), values["max_window_layers"]
    window, is_listed = values.get_int("sliding_window", 0), values["layer_types"] is not None
    if not is_listed and type(n_full_layers) is not int:
        raise values.make_error("max_window_layers", "an integer")
    full = hf.get_full_attention_layers(values, n_layers, 1) if is_listed else {*range(min(max(n_full_layers, 0), n_layers))}
    if window and values.get_bool("use_sliding_window") and len(full) < n_layers:
        attention = replace(attention, window=window)
        return ModelConfig(
            **hf.parse_base_fields(values), attention=attention, layers=hf.make_full_attention_layers(attention, full, n_layers)
        )
    if is_listed and len(full) < n_layers:
        raise values.make_error("layer_types", f"{hf.FULL_ATTENTION} in all {n_layers} layers, without a window")
    return ModelConfig(**hf.parse_base_fields(values), attention=attention)


def parse_qwen2_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a Qwen2 model from the keys of config.json."""
    values.require("mlp_bias", False)
    return make_dense_config(values, AttentionConfig(hf.parse_rope(values), qkv_bias=True))


def parse_qwen3_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a dense Qwen3 model from the keys of config.json."""
    values.require("mlp_bias", False)
    return make_dense_config(values, hf.parse_attention(values, qk_norm=True))


def parse_moe_config(values: ConfigValues, rope: RopeConfig | None = None) -> ModelConfig:
    """Build the `ModelConfig` of a Qwen3 model with experts in some layers; a sliding window applies to all layers.

    Args:
        values: The keys of config.json.
        rope: The RoPE config; None to parse it from the keys.
    """
    experts = hf.parse_experts(
        values, "moe_intermediate_size", "num_local_experts" if values["num_experts"] is None else "num_experts",
        norm_topk_prob=values.get_bool("norm_topk_prob"), dense_layers=hf.get_dense_layers(values),
    )  # fmt: skip
    window = values.get_int("sliding_window", 0) if values.get_bool("use_sliding_window") else 0
    values.require("mlp_bias", False)
    attention = hf.parse_attention(values, rope, window=window, qk_norm=True)
    return ModelConfig(**hf.parse_base_fields(values), attention=attention, experts=experts)


def parse_qwen3_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a Qwen3 model, dense or with experts, from a GGUF file's metadata."""
    return ModelConfig(**gguf.parse_base_fields(metadata, qk_norm=True))


HF_MOE_TENSORS, MOE_SUPPORTED_KEYS = hf.TENSORS | hf.EXPERT_TENSORS, ("num_experts", "num_local_experts")
FAMILY = (
    HFFamily("qwen2", DEFAULTS, parse_qwen2_config, hf.TENSORS),
    HFFamily("qwen3", DEFAULTS | {"head_dim": 128}, parse_qwen3_config, hf.TENSORS),
    HFFamily(
        "qwen3_moe", MOE_DEFAULTS, parse_moe_config, HF_MOE_TENSORS, (hf.FUSED_EXPERT_TENSORS,), supported_keys=MOE_SUPPORTED_KEYS
    ),
    GGUFFamily("qwen2", parse_gguf_config, gguf.TENSORS),
    GGUFFamily("qwen3", parse_qwen3_gguf_config, gguf.TENSORS),
    GGUFFamily("qwen3moe", parse_qwen3_gguf_config, gguf.TENSORS | gguf.EXPERT_TENSORS, supported_keys=(gguf.EXPERT_COUNT_KEY,)),
)
