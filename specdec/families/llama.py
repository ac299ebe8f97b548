"""Llama 2 and 3 (Touvron et al. 2023, arXiv:2307.09288; Dubey et al. 2024, arXiv:2407.21783), and models saved as Llama."""

from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, HFFamily
from specdec.model_config import ModelConfig


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a Llama model from the keys of config.json."""
    return ModelConfig(**hf.parse_base_fields(values), attention=hf.parse_attention(values), mlp_bias=values.get_bool("mlp_bias"))


FAMILY = (
    HFFamily(
        "llama", hf.DEFAULTS, parse_config, hf.TENSORS, supported_keys=("mlp_bias",),
        multimodal_types={"smolvlm": False, "idefics3": False},  # also the text part of SmolVLM
    ),
    GGUFFamily("llama", gguf.parse_config, gguf.INTERLEAVED_ROPE_TENSORS | gguf.EXPERT_TENSORS),  # also Mixtral
)  # fmt: skip
