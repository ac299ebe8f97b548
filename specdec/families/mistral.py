"""Mistral with a sliding window (Jiang et al. 2023, arXiv:2310.06825), and Mixtral with experts (2024, arXiv:2401.04088).

GGUF files call both "llama".
"""

from dataclasses import replace

from specdec.families import hf_common as hf
from specdec.families.config_values import ConfigValues
from specdec.families.family import HFFamily, TensorSpec
from specdec.model_config import ModelConfig

DEFAULTS = hf.DEFAULTS | {
    "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096,
}  # fmt: skip
MIXTRAL_DEFAULTS = DEFAULTS | {
    "rms_norm_eps": 1e-5, "sliding_window": None, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
MIXTRAL_EXPERT_TENSORS = {
    "router": TensorSpec("layers.{}.block_sparse_moe.gate.weight"),
    **{
        f"experts_w{n}": TensorSpec(f"layers.{{}}.block_sparse_moe.experts.{{}}.w{n}.weight", is_per_expert=True)
        for n in (1, 2, 3)
    },
}


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a Mistral model from the keys of config.json."""
    hf.reject_biases(values)
    return ModelConfig(**hf.parse_base_fields(values), attention=hf.parse_attention(values, window=hf.parse_window(values)))


def parse_mixtral_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a Mixtral model, which has experts, from the keys of config.json."""
    experts = hf.parse_experts(values, "intermediate_size", "num_local_experts")
    return replace(parse_config(values), experts=experts)


MIXTRAL_TENSORS = hf.TENSORS | hf.EXPERT_TENSORS
MIXTRAL_ALTERNATIVES = (hf.FUSED_EXPERT_TENSORS, MIXTRAL_EXPERT_TENSORS)
FAMILY = (
    HFFamily("mistral", DEFAULTS, parse_config, hf.TENSORS),
    HFFamily(
        "mixtral",
        MIXTRAL_DEFAULTS,
        parse_mixtral_config,
        MIXTRAL_TENSORS,
        MIXTRAL_ALTERNATIVES,
        supported_keys=("num_local_experts",),
    ),
)
