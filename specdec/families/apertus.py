"""Apertus (Swiss AI 2025, arXiv:2509.14233): norms of query and key heads, and MLPs without a gate, with the activation xIELU.

The numbers of xIELU are small tensors of each layer in folders, and lists in the metadata of GGUF files.
"""

from dataclasses import replace

from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily, make_tensor_specs
from specdec.model_config import ModelConfig

DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 131072, "intermediate_size": 14336, "hidden_act": "xielu", "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5, "rope_theta": 12e6,
}  # fmt: skip
ROPE = {
    "rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip
HF_TENSORS = hf.TENSORS | {
    **make_tensor_specs(
        hf.LAYER_WEIGHT, rms_att="attention_layernorm", rms_ffn="feedforward_layernorm", w1="mlp.up_proj"
    ),
    **make_tensor_specs("layers.{}.mlp.act_fn.%s", alpha_p="alpha_p", alpha_n="alpha_n", beta="beta", eps="eps"),
}  # fmt: skip
NUMBER_KEYS = ("xielu.alpha_p", "xielu.alpha_n", "xielu.beta", "xielu.eps")
GGUF_TENSORS = gguf.TENSORS | {
    **make_tensor_specs(gguf.LAYER_WEIGHT, w1="ffn_up"),
    **make_tensor_specs("xielu.%s.{}", alpha_p="alpha_p", alpha_n="alpha_n", beta="beta", eps="eps"),
}


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of an Apertus model from the keys of config.json."""
    hf.reject_window(values)
    hf.check_layer_types(hf.FULL_ATTENTION, values)
    values.require("mlp_bias", False)
    attention = hf.parse_attention(values, hf.parse_rope(values, hf.get_rope_values(values, ROPE)), qk_norm=True)
    return ModelConfig(**hf.parse_base_fields(values, choices=("xielu",)), attention=attention, activation="xielu")


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of an Apertus model from a GGUF file's metadata."""
    return replace(ModelConfig(**gguf.parse_base_fields(metadata, qk_norm=True)), activation="xielu")


FAMILY = (
    HFFamily("apertus", DEFAULTS, parse_config, HF_TENSORS),
    GGUFFamily("apertus", parse_gguf_config, GGUF_TENSORS, layer_number_keys=NUMBER_KEYS),
)
