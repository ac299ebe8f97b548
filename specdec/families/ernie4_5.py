"""ERNIE 4.5 (Baidu 2025): Llama with adjacent RoPE pairs in every file, and with biases in all matmuls or in none."""

from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import ConfigValues
from specdec.families.family import ROTARY_TENSORS, GGUFFamily, HFFamily, replace_in_specs
from specdec.families.llama import parse_gguf_config
from specdec.model_config import ModelConfig

DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18, "num_attention_heads": 16,
    "num_key_value_heads": 2, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "head_dim": 128, "rope_theta": 500000.0,
}  # fmt: skip
HF_TENSORS = replace_in_specs(hf.TENSORS, ROTARY_TENSORS, is_neox_style=False)


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a dense ERNIE 4.5 model from the keys of config.json."""
    hf.reject_window(values)
    attention = hf.parse_attention(values)
    return ModelConfig(**hf.parse_base_fields(values), attention=attention, mlp_bias=values.get_bool("attention_bias"))


FAMILY = (
    HFFamily("ernie4_5", DEFAULTS, parse_config, HF_TENSORS, key_aliases={"use_bias": "attention_bias"}),
    GGUFFamily("ernie4_5", parse_gguf_config, gguf.INTERLEAVED_ROPE_TENSORS),
)
