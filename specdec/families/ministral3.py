"""Ministral 3, which has YaRN (Peng et al. 2023, arXiv:2309.00071) and scales queries by their positions."""

from dataclasses import replace

import numpy as np

from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, HFFamily
from specdec.families.llama import parse_gguf_config
from specdec.model_config import ModelConfig

DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 131072, "intermediate_size": 14336, "num_hidden_layers": 34, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
}  # fmt: skip
DEFAULT_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a Ministral 3 model from the keys of config.json."""
    rope_values = hf.get_rope_values(values, DEFAULT_ROPE)
    query_scale = float(np.float32(rope_values.get_float("llama_4_scaling_beta", 0, 1e6)))
    rope = replace(
        hf.parse_rope(values, rope_values), query_scale=query_scale, query_span=hf.get_original_positions(values, rope_values)
    )
    hf.reject_biases(values)
    return ModelConfig(**hf.parse_base_fields(values), attention=hf.parse_attention(values, rope, window=hf.parse_window(values)))


FAMILY = (
    HFFamily("ministral3", DEFAULTS, parse_config, hf.TENSORS, multimodal_types={"mistral3": True}),
    GGUFFamily("mistral3", parse_gguf_config, gguf.INTERLEAVED_ROPE_TENSORS, supported_keys=(gguf.QUERY_SCALE_KEY,)),
)
