"""Apertus (Swiss AI 2025, arXiv:2509.14233): norms of query and key heads, and MLPs without a gate, with the activation xIELU.

The numbers of xIELU are small tensors of each layer in folders, and lists in the metadata of GGUF files.
"""

from dataclasses import replace

from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import tensor_specs as specs
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
from specdec.model_config import ModelConfig

DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 131072, "intermediate_size": 14336, "hidden_act": "xielu", "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5, "rope_theta": 12e6,
}  # fmt: skip
ROPE = {
    "rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip
NUMBERS = {"alpha_p": "alpha_p", "alpha_n": "alpha_n", "beta": "beta", "eps": "eps"}
NUMBER_KEYS = tuple(f"xielu.{name}" for name in NUMBERS)
HF_TENSORS = (
    hf.TENSORS
    | specs.make(hf.LAYER_WEIGHT, rms_att="attention_layernorm", rms_ffn="feedforward_layernorm", w1="mlp.up_proj")
    | specs.make("layers.{}.mlp.act_fn.%s", **NUMBERS)
)
GGUF_TENSORS = gguf.TENSORS | specs.make(gguf.LAYER_WEIGHT, w1="ffn_up") | specs.make("xielu.%s.{}", **NUMBERS)


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of an Apertus model from the keys of config.json."""
    attention = hf.parse_attention(values, hf.parse_rope(values, hf.get_rope_values(values, ROPE)), qk_norm=True)
    return ModelConfig(**hf.parse_base_fields(values, choices=("xielu",)), attention=attention, activation="xielu")


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of an Apertus model from a GGUF file's metadata."""
    return replace(gguf.parse_config(metadata, qk_norm=True), activation="xielu")


FAMILY = (
    HFFamily("apertus", DEFAULTS, parse_config, HF_TENSORS),
    GGUFFamily("apertus", parse_gguf_config, GGUF_TENSORS, layer_number_keys=NUMBER_KEYS),
)
