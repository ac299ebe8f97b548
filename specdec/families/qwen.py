"""Qwen2 (Yang et al. 2024, arXiv:2407.10671) and Qwen3 (2025, arXiv:2505.09388), also as the language models of Qwen-VL.

Qwen2 has biases of q, k and v. Qwen3 has norms of their heads. Both may have experts, Qwen2 also a shared expert.

In Qwen2-VL, Qwen2.5-VL (Bai et al. 2025, arXiv:2502.13923) and Qwen3-VL (arXiv:2511.21631), RoPE turns sections of pairs by the
positions of time, height and width, which are equal in text, so that it is plain RoPE. The vision parts of the files are ignored.
"""

import re
from dataclasses import replace

from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import tensor_specs as specs
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
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
QWEN2_MOE_DEFAULTS = DEFAULTS | {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_key_value_heads": 16, "decoder_sparse_step": 1, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4, "num_experts": 60, "norm_topk_prob": False, "mlp_only_layers": None, "qkv_bias": True,
}  # fmt: skip
QWEN2_VL_DEFAULTS = DEFAULTS | {
    "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_window_layers": 80, "bos_token_id": 151643, "eos_token_id": 151645,
    "rope_theta": 1e6,
}  # fmt: skip
QWEN3_VL_DEFAULTS = DEFAULTS | {"head_dim": 128, "max_position_embeddings": 128000, "rope_theta": 500000.0}
QWEN3_VL_MOE_DEFAULTS = MOE_DEFAULTS | {
    "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 128000,
    "rope_theta": 500000.0, "num_local_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
}  # fmt: skip
HF_MOE_TENSORS, GGUF_MOE_TENSORS = hf.TENSORS | hf.EXPERT_TENSORS, gguf.TENSORS | gguf.EXPERT_TENSORS
# As published
TRANSPOSED_EXPERT_TENSORS = specs.replace(hf.FUSED_EXPERT_TENSORS, specs.EXPERT_WEIGHTS, is_transposed=True)
VL_IGNORED_NAMES = re.compile(r"visual\..*")


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
        layers = hf.make_full_attention_layers(attention, full, n_layers)
        return ModelConfig(**hf.parse_base_fields(values), attention=attention, layers=layers)
    if is_listed and len(full) < n_layers:
        raise values.make_error("layer_types", f"{hf.FULL_ATTENTION} in all {n_layers} layers, without a window")
    return ModelConfig(**hf.parse_base_fields(values), attention=attention)


def parse_qwen2_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a Qwen2 model from the keys of config.json."""
    return make_dense_config(values, AttentionConfig(hf.parse_rope(values), qkv_bias=True))


def parse_qwen3_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a dense Qwen3 model from the keys of config.json."""
    return make_dense_config(values, hf.parse_attention(values, qk_norm=True))


def parse_qwen2_moe_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a Qwen2-MoE model from the keys of config.json; windows are not supported."""
    values.require("use_sliding_window", False)
    hf.check_layer_types(hf.FULL_ATTENTION, values)
    experts = hf.parse_experts(
        values, "moe_intermediate_size", norm_topk_prob=values.get_bool("norm_topk_prob"),
        dense_layers=hf.get_dense_layers(values), shared_hidden_dim=values.get_int("shared_expert_intermediate_size"),
        shared_gate=True,
    )  # fmt: skip
    attention = AttentionConfig(hf.parse_rope(values), qkv_bias=values.get_bool("qkv_bias"))
    return ModelConfig(**hf.parse_base_fields(values), attention=attention, experts=experts)


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
    attention = hf.parse_attention(values, rope, window=window, qk_norm=True)
    return ModelConfig(**hf.parse_base_fields(values), attention=attention, experts=experts)


def parse_qwen3_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a Qwen3 model, dense or with experts, from a GGUF file's metadata."""
    return gguf.parse_config(metadata, qk_norm=True)


def parse_qwen2_moe_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a Qwen2-MoE model from a GGUF file's metadata.

    The weights of the chosen experts are not normalized, as in llama.cpp.
    """
    return replace(gguf.parse_config(metadata), experts=gguf.parse_experts(metadata, norm_topk_prob=False, shared_gate=True))


def parse_qwen2_vl_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of the language model of a Qwen2-VL or Qwen2.5-VL model from the keys of config.json."""
    return make_dense_config(values, AttentionConfig(hf.parse_rope(values, has_sections=True), qkv_bias=True))


def parse_qwen3_vl_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of the language model of a dense Qwen3-VL model from the keys of config.json."""
    attention = hf.parse_attention(values, hf.parse_rope(values, has_sections=True), qk_norm=True)
    return ModelConfig(**hf.parse_base_fields(values), attention=attention)


def parse_qwen3_vl_moe_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of the language model of a Qwen3-VL model with experts from the keys of config.json."""
    values.require("norm_topk_prob", True)
    return parse_moe_config(values, hf.parse_rope(values, has_sections=True))


FAMILY = (
    HFFamily("qwen2", DEFAULTS, parse_qwen2_config, hf.TENSORS),
    HFFamily("qwen3", DEFAULTS | {"head_dim": 128}, parse_qwen3_config, hf.TENSORS),
    HFFamily("qwen3_moe", MOE_DEFAULTS, parse_moe_config, HF_MOE_TENSORS, (hf.FUSED_EXPERT_TENSORS,)),
    HFFamily(
        "qwen2_moe", QWEN2_MOE_DEFAULTS, parse_qwen2_moe_config, HF_MOE_TENSORS | hf.SHARED_EXPERT_TENSORS,
        (hf.FUSED_EXPERT_TENSORS,),
    ),
    *(
        HFFamily(
            name, QWEN2_VL_DEFAULTS, parse_qwen2_vl_config, hf.TENSORS, ignored_names=VL_IGNORED_NAMES, multimodal_types=types
        )
        for model in ("qwen2_vl", "qwen2_5_vl")
        for name, types in ((model, {}), (f"{model}_text", {model: False}))  # published files have no text_config
    ),
    HFFamily(
        "qwen3_vl_text", QWEN3_VL_DEFAULTS, parse_qwen3_vl_config, hf.TENSORS, ignored_names=VL_IGNORED_NAMES,
        multimodal_types={"qwen3_vl": False},
    ),
    HFFamily(
        "qwen3_vl_moe_text", QWEN3_VL_MOE_DEFAULTS, parse_qwen3_vl_moe_config, HF_MOE_TENSORS | TRANSPOSED_EXPERT_TENSORS,
        ignored_names=VL_IGNORED_NAMES, multimodal_types={"qwen3_vl_moe": False},
    ),
    *(GGUFFamily(name, gguf.parse_config, gguf.TENSORS) for name in ("qwen2", "qwen2vl")),
    *(GGUFFamily(name, parse_qwen3_gguf_config, gguf.TENSORS) for name in ("qwen3", "qwen3vl")),
    *(GGUFFamily(name, parse_qwen3_gguf_config, GGUF_MOE_TENSORS) for name in ("qwen3moe", "qwen3vlmoe")),
    GGUFFamily("qwen2moe", parse_qwen2_moe_gguf_config, GGUF_MOE_TENSORS),
)  # fmt: skip
