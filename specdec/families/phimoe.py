"""Phi-3.5-MoE (Abdin et al. 2024, arXiv:2404.14219): LayerNorms, LongRoPE, and two experts per token weighed by SparseMixer."""

from dataclasses import replace

import numpy as np

from specdec.argument_checks import MIN_SCALE
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import phi3
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
from specdec.families.mistral import MIXTRAL_EXPERT_TENSORS
from specdec.model_config import ModelConfig, RopeConfig

DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 32064, "intermediate_size": 6400, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "num_experts_per_tok": 2, "num_local_experts": 16, "router_jitter_noise": 0.01, "lm_head_bias": False,
    "rope_theta": 1e6,
}  # fmt: skip
JITTER_KEY, JITTER = "router_jitter_noise", 0.01  # the second is that of GGUF files
MSCALE_KEYS = ("short_mscale", "long_mscale")
HF_TENSORS = hf.TENSORS | MIXTRAL_EXPERT_TENSORS


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a Phi-3.5-MoE model from config.json; a sliding window as long as the context is dropped."""
    values.require("num_experts_per_tok", 2)
    values.require("mlp_bias", False)
    jitter = values.get_float(JITTER_KEY, MIN_SCALE, 0.5)
    experts = hf.parse_experts(values, "intermediate_size", "num_local_experts", sparsemixer_threshold=2 * jitter)
    window = hf.parse_window(values)
    if window >= values.get_int("max_position_embeddings"):
        window = 0
    attention = hf.parse_attention(values, _parse_rope(values), window=window)
    return ModelConfig(
        **hf.parse_base_fields(values),
        attention=attention,
        experts=experts,
        layer_norm=True,
        classifier_bias=values.get_bool("lm_head_bias"),
    )


def _parse_rope(values: ConfigValues) -> RopeConfig:
    """Return the RoPE config: plain, or LongRoPE with one factor of the rotated rows, whatever the length of the sequence is."""
    rope_values = hf.get_rope_values(values)
    if rope_values["rope_type"] == "default":
        return hf.parse_rope(values, rope_values)
    rope_values.require("rope_type", *phi3.LONGROPE_TYPES[:2])
    short_mscale, long_mscale = (rope_values.get_float(key, MIN_SCALE, 1 / MIN_SCALE) for key in MSCALE_KEYS)
    if short_mscale != long_mscale:
        raise rope_values.make_error(MSCALE_KEYS[1], f"{short_mscale}, the {MSCALE_KEYS[0]}")
    n_pairs = hf.get_head_dim(values) // 2
    short, long = (phi3.get_longrope_factors(rope_values, key, n_pairs) for key in ("short_factor", "long_factor"))
    rope = RopeConfig(rope_values.get_float("rope_theta", 1, hf.MAX_THETA), attention_factor=float(np.float32(short_mscale)))
    original = hf.get_original_positions(values, rope_values)
    return phi3.set_longrope_factors(rope, short, long, values.get_int("max_position_embeddings"), original)


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a Phi-3.5-MoE model from a GGUF file's metadata."""
    config = phi3.parse_gguf_config(metadata)
    experts = gguf.parse_experts(metadata, sparsemixer_threshold=2 * JITTER)
    return replace(config, experts=experts, layer_norm=True, classifier_bias="output.bias" in metadata.tensors)


FAMILY = (
    HFFamily("phimoe", DEFAULTS, parse_config, HF_TENSORS, supported_keys=("num_local_experts",)),
    GGUFFamily(
        "phimoe", parse_gguf_config, gguf.TENSORS | gguf.EXPERT_TENSORS,
        supported_keys=(gguf.ATTENTION_FACTOR_KEY, gguf.SLIDING_WINDOW_KEY, gguf.EXPERT_COUNT_KEY),
    ),
)  # fmt: skip
