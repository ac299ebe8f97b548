"""Nemotron-4 and Minitron (Parmar et al. 2024, arXiv:2402.16819): LayerNorms that multiply by 1 + w, and MLPs without a gate.

RoPE rotates a part of each head.
"""

from dataclasses import replace

from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import tensor_specs as specs
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
from specdec.model_config import ModelConfig

DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 256000, "hidden_size": 6144, "intermediate_size": 24576, "num_attention_heads": 48, "hidden_act": "relu2",
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": 2, "eos_token_id": 3, "partial_rotary_factor": 0.5,
}  # fmt: skip
HF_TENSORS = (
    specs.replace(hf.TENSORS, ("rms_att", "rms_ffn", "rms_final"), transform=specs.ONE_PLUS)
    | specs.make(hf.LAYER_WEIGHT, w1="mlp.up_proj")
    | specs.make(hf.LAYER_BIAS, b1="mlp.up_proj")
)
GGUF_TENSORS = gguf.TENSORS | specs.make(gguf.LAYER_WEIGHT, w1="ffn_up") | specs.make(gguf.LAYER_BIAS, b1="ffn_up")


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a Nemotron model from the keys of config.json."""
    attention = hf.parse_attention(values, hf.parse_plain_partial_rope(values))
    fields = hf.parse_base_fields(values, choices=("relu2",))
    return ModelConfig(**fields, attention=attention, mlp_bias=values.get_bool("mlp_bias"), activation="relu2", layer_norm=True)


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a Nemotron model from a GGUF file's metadata."""
    config = gguf.parse_config(metadata, has_partial_rope=True, eps_key=gguf.LAYER_NORM_EPS_KEY)
    return replace(config, mlp_bias="blk.0.ffn_up.bias" in metadata.tensors, activation="relu2", layer_norm=True)


FAMILY = (
    HFFamily(
        "nemotron", DEFAULTS, parse_config, HF_TENSORS, supported_keys=("partial_rotary_factor", "mlp_bias"),
        key_aliases={"norm_eps": "rms_norm_eps"},
    ),
    GGUFFamily("nemotron", parse_gguf_config, GGUF_TENSORS),
)  # fmt: skip
