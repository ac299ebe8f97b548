"""Mistral (Jiang et al. 2023, arXiv:2310.06825), Mixtral with experts (2024, arXiv:2401.04088), and Ministral 3.

Mistral has a sliding window. Ministral 3 has YaRN (Peng et al. 2023, arXiv:2309.00071) and scales queries by their positions.
GGUF files call Mistral and Mixtral "llama".
"""

from dataclasses import replace

import numpy as np

from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import tensor_specs as specs
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, HFFamily
from specdec.model_config import ModelConfig, RopeConfig

DEFAULTS = hf.DEFAULTS | {
    "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096,
    "layer_types": None,
}  # fmt: skip
MIXTRAL_DEFAULTS = DEFAULTS | {
    "rms_norm_eps": 1e-5, "sliding_window": None, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
MINISTRAL_DEFAULTS = DEFAULTS | {
    "vocab_size": 131072, "num_hidden_layers": 34, "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
    "sliding_window": None,
}  # fmt: skip
MINISTRAL_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
MIXTRAL_EXPERT_TENSORS = specs.make("layers.{}.block_sparse_moe.%s.weight", router="gate") | specs.make_per_expert(
    "layers.{}.block_sparse_moe.experts.{}.%s.weight", experts_w1="w1", experts_w2="w2", experts_w3="w3"
)


def parse_config(values: ConfigValues, rope: RopeConfig | None = None) -> ModelConfig:
    """Build the `ModelConfig` of a Mistral model from the keys of config.json; rope: by default that of the keys."""
    hf.reject_biases(values)
    attention = hf.parse_attention(values, rope, window=hf.parse_window(values))
    return ModelConfig(**hf.parse_base_fields(values), attention=attention)


def parse_mixtral_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a Mixtral model, which has experts, from the keys of config.json."""
    return replace(parse_config(values), experts=hf.parse_experts(values, "intermediate_size", "num_local_experts"))


def parse_ministral_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a Ministral 3 model from the keys of config.json."""
    rope_values = hf.get_rope_values(values, MINISTRAL_ROPE)
    scale, span = rope_values.get_float("llama_4_scaling_beta", 0, 1e6), hf.get_original_positions(values, rope_values)
    rope = replace(hf.parse_rope(values, rope_values), query_scale=float(np.float32(scale)), query_span=span)
    return parse_config(values, rope)


FAMILY = (
    HFFamily("mistral", DEFAULTS, parse_config, hf.TENSORS),
    HFFamily(
        "mixtral", MIXTRAL_DEFAULTS, parse_mixtral_config, hf.TENSORS | hf.EXPERT_TENSORS,
        (hf.FUSED_EXPERT_TENSORS, MIXTRAL_EXPERT_TENSORS),
    ),
    HFFamily("ministral3", MINISTRAL_DEFAULTS, parse_ministral_config, hf.TENSORS, multimodal_types={"mistral3": True}),
    GGUFFamily("mistral3", gguf.parse_config, gguf.INTERLEAVED_ROPE_TENSORS, supported_keys=(gguf.QUERY_SCALE_KEY,)),
)  # fmt: skip
