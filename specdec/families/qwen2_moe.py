"""Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024, arXiv:2407.10671): Qwen2 with experts and a shared expert."""

from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import qwen
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
from specdec.model_config import AttentionConfig, ModelConfig

DEFAULTS = qwen.DEFAULTS | {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_key_value_heads": 16, "decoder_sparse_step": 1, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4, "num_experts": 60, "norm_topk_prob": False, "mlp_only_layers": None, "qkv_bias": True,
}  # fmt: skip
HF_TENSORS = hf.TENSORS | hf.EXPERT_TENSORS | hf.SHARED_EXPERT_TENSORS


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a Qwen2-MoE model from the keys of config.json; windows are not supported."""
    values.require("use_sliding_window", False)
    values.require("mlp_bias", False)
    hf.check_layer_types(hf.FULL_ATTENTION, values)
    experts = hf.parse_experts(
        values, "moe_intermediate_size", norm_topk_prob=values.get_bool("norm_topk_prob"),
        dense_layers=hf.get_dense_layers(values), shared_hidden_dim=values.get_int("shared_expert_intermediate_size"),
        shared_gate=True,
    )  # fmt: skip
    attention = AttentionConfig(hf.parse_rope(values), qkv_bias=values.get_bool("qkv_bias"))
    return ModelConfig(**hf.parse_base_fields(values), attention=attention, experts=experts)


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a Qwen2-MoE model from a GGUF file's metadata.

    The weights of the chosen experts are not normalized, as in llama.cpp.
    """
    experts = gguf.parse_experts(metadata, norm_topk_prob=False, shared_gate=True)
    return ModelConfig(**gguf.parse_base_fields(metadata) | {"experts": experts})


FAMILY = (
    HFFamily("qwen2_moe", DEFAULTS, parse_config, HF_TENSORS, (hf.FUSED_EXPERT_TENSORS,), supported_keys=("num_experts",)),
    GGUFFamily("qwen2moe", parse_gguf_config, gguf.TENSORS | gguf.EXPERT_TENSORS, supported_keys=(gguf.EXPERT_COUNT_KEY,)),
)
