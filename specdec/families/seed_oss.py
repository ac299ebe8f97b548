"""Seed-OSS (ByteDance Seed 2025): Llama with separate settings for biases; published models have those of q, k and v."""

from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import tensor_specs as specs
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, HFFamily
from specdec.model_config import AttentionConfig, ModelConfig

DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 155136, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 80,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288, "attention_bias": True,
    "attention_out_bias": False, "bos_token_id": 0,
}  # fmt: skip


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a Seed-OSS model from the keys of config.json."""
    attention = AttentionConfig(
        hf.parse_rope(values), qkv_bias=values.get_bool("attention_bias"), wo_bias=values.get_bool("attention_out_bias")
    )
    return ModelConfig(**hf.parse_base_fields(values), attention=attention, mlp_bias=values.get_bool("mlp_bias"))


FAMILY = (
    HFFamily("seed_oss", DEFAULTS, parse_config, hf.TENSORS, supported_keys=("mlp_bias",)),
    GGUFFamily("seed_oss", gguf.parse_config, gguf.TENSORS | specs.make(gguf.LAYER_WEIGHT, rms_ffn="post_attention_norm")),
)
