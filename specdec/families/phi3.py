"""Phi-3, Phi-4-mini and Phi-3.5-MoE (Abdin et al. 2024, arXiv:2404.14219), with LongRoPE (Ding et al. 2024, arXiv:2402.13753).

Phi-4-mini rotates a part of each head. Phi-3.5-MoE has LayerNorms, and two experts per token weighed by SparseMixer.
"""

from dataclasses import replace

import numpy as np

from specdec.argument_checks import MIN_SCALE
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import tensor_specs as specs
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
from specdec.families.mistral import MIXTRAL_EXPERT_TENSORS
from specdec.layers.rope import get_longrope_attention_factor
from specdec.model_config import ModelConfig, RopeConfig

DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 32000, "layer_types": None,
}  # fmt: skip
MOE_DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 32064, "intermediate_size": 6400, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "num_experts_per_tok": 2, "num_local_experts": 16, "router_jitter_noise": 0.01, "lm_head_bias": False,
    "rope_theta": 1e6, "layer_types": None,
}  # fmt: skip
JITTER_KEY, JITTER = "router_jitter_noise", 0.01  # the second is that of GGUF files
MSCALE_KEYS = ("short_mscale", "long_mscale")
LONGROPE_TYPES = ("longrope", "su", "yarn")  # the last two are older names
GGUF_SUPPORTED_KEYS = (gguf.ATTENTION_FACTOR_KEY, gguf.SLIDING_WINDOW_KEY)
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
GGUF_TENSORS = gguf.INTERLEAVED_ROPE_TENSORS | specs.set_rope_pairs(
    specs.fuse(specs.QKV, gguf.LAYER_WEIGHT % "attn_qkv") | specs.fuse(specs.GATE_UP, gguf.LAYER_WEIGHT % "ffn_up")
)


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a Phi-3 model from config.json."""
    hf.reject_biases(values)
    attention = hf.parse_attention(values, _parse_rope(values), window=_parse_window(values))
    return ModelConfig(**hf.parse_base_fields(values), attention=attention)


def _parse_window(values: ConfigValues) -> int:
    """Return the sliding window of all layers in tokens; 0 for none, or one as long as the context."""
    window = hf.parse_window(values)
    return window if window < values.get_int("max_position_embeddings") else 0


def _parse_rope(values: ConfigValues) -> RopeConfig:
    rope_values = hf.get_rope_values(values)
    rope_values.require("mrope_section", None)
    partial_rope = hf.parse_partial_rope(rope_values, values, rope_values, values)
    rotary_dim = partial_rope.dim or hf.get_head_dim(values)
    if rope_values["rope_type"] == "default":
        return partial_rope
    if rope_values["rope_type"] not in LONGROPE_TYPES:
        raise rope_values.make_error("rope_type", "default or longrope; other kinds of RoPE are not supported")
    n_positions, original = values.get_int("max_position_embeddings"), values.get_int("original_max_position_embeddings")
    short, long = (get_longrope_factors(rope_values, key, rotary_dim // 2) for key in ("short_factor", "long_factor"))
    factor = rope_values.get_float("factor", 0, 1e6, n_positions / original)
    if rope_values["attention_factor"] is not None:
        attention_factor = rope_values.get_scale("attention_factor")
    elif original == 1 and factor > 1:
        raise values.make_error("original_max_position_embeddings", "2 or more")
    else:
        attention_factor = get_longrope_attention_factor(factor, original)
    rope = replace(partial_rope, attention_factor=float(np.float32(attention_factor)))
    return set_longrope_factors(rope, short, long, n_positions, original)


def get_longrope_factors(rope_values: ConfigValues, key: str, n: int) -> tuple[float, ...]:
    """Return the list of n positive numbers that is the value of a RoPE key, rounded to float32.

    Raises:
        CheckpointError: The value is not a list of n positive numbers.
    """
    given = rope_values[key]
    is_valid = isinstance(given, list) and all(type(each) in (int, float) and 1e-6 <= each <= 1e9 for each in given)
    if not is_valid or len(given) != n:
        raise rope_values.make_error(key, f"{n} positive numbers, one per pair")
    return tuple(float(np.float32(factor)) for factor in given)  # the precision of transformers and GGUF files


def set_longrope_factors(
    rope: RopeConfig, short: tuple[float, ...], long: tuple[float, ...], n_positions: int, original: int
) -> RopeConfig:
    """Return a copy of a RoPE config with LongRoPE's frequency factors.

    Args:
        rope: The RoPE config without factors.
        short: The factors of sequences within the original context.
        long: The factors of longer sequences; left out if the context cannot be longer.
        n_positions: The context length.
        original: The original context length.
    """
    rope = replace(rope, freq_factors=short)
    if short == long:
        return rope
    if n_positions <= original:
        return replace(rope, max_positions=original)
    return replace(rope, long_freq_factors=long, longrope_threshold=original)


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a Phi-3 model from a GGUF file's metadata and its tensors of RoPE factors."""
    n_positions = metadata.common_fields["seq_len"]
    window = metadata.get_count(gguf.SLIDING_WINDOW_KEY)
    config = gguf.parse_config(metadata, has_partial_rope=True, window=window if window < n_positions else 0)
    rope = config.rope
    if metadata[gguf.ATTENTION_FACTOR_KEY] not in (None, 0):
        factor = metadata.get_scale(gguf.ATTENTION_FACTOR_KEY)
        rope = replace(rope, attention_factor=float(np.float32(factor)))
    if SHORT_FACTORS in metadata.tensors or LONG_FACTORS in metadata.tensors:
        n_pairs = config.rotary_dim // 2
        short, long = (
            tuple(float(x) for x in metadata.tensors.get_tensor(name, (n_pairs,))[:]) for name in (SHORT_FACTORS, LONG_FACTORS)
        )
        rope = set_longrope_factors(rope, short, long, n_positions, metadata.get_int("rope.scaling.original_context_length"))
    return replace(config, attention=replace(config.attention, rope=rope))


def parse_moe_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a Phi-3.5-MoE model from config.json."""
    values.require("num_experts_per_tok", 2)
    jitter = values.get_float(JITTER_KEY, MIN_SCALE, 0.5)
    experts = hf.parse_experts(values, "intermediate_size", "num_local_experts", sparsemixer_threshold=2 * jitter)
    attention = hf.parse_attention(values, _parse_moe_rope(values), window=_parse_window(values))
    fields = hf.parse_base_fields(values) | {"classifier_bias": values.get_bool("lm_head_bias"), "layer_norm": True}
    return ModelConfig(**fields, attention=attention, experts=experts)


def _parse_moe_rope(values: ConfigValues) -> RopeConfig:
    """Return the RoPE config: plain, or LongRoPE with one factor of the rotated rows, whatever the length of the sequence is."""
    rope_values = hf.get_rope_values(values)
    if rope_values["rope_type"] == "default":
        return hf.parse_rope(values, rope_values)
    rope_values.require("rope_type", *LONGROPE_TYPES[:2])
    short_mscale, long_mscale = (rope_values.get_scale(key) for key in MSCALE_KEYS)
    if short_mscale != long_mscale:
        raise rope_values.make_error(MSCALE_KEYS[1], f"{short_mscale}, the {MSCALE_KEYS[0]}")
    n_pairs = hf.get_head_dim(values) // 2
    short, long = (get_longrope_factors(rope_values, key, n_pairs) for key in ("short_factor", "long_factor"))
    rope = RopeConfig(rope_values.get_float("rope_theta", 1, hf.MAX_THETA), attention_factor=float(np.float32(short_mscale)))
    original = hf.get_original_positions(values, rope_values)
    return set_longrope_factors(rope, short, long, values.get_int("max_position_embeddings"), original)


def parse_moe_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a Phi-3.5-MoE model from a GGUF file's metadata."""
    experts = gguf.parse_experts(metadata, sparsemixer_threshold=2 * JITTER)
    return replace(
        parse_gguf_config(metadata), experts=experts, layer_norm=True, classifier_bias="output.bias" in metadata.tensors
    )


FAMILY = (
    HFFamily("phi3", DEFAULTS, parse_config, hf.TENSORS, (hf.FUSED_TENSORS,), supported_keys=("partial_rotary_factor",)),
    HFFamily("phimoe", MOE_DEFAULTS, parse_moe_config, hf.TENSORS | MIXTRAL_EXPERT_TENSORS),
    GGUFFamily("phi3", parse_gguf_config, GGUF_TENSORS, supported_keys=GGUF_SUPPORTED_KEYS),
    GGUFFamily("phimoe", parse_moe_gguf_config, gguf.TENSORS | gguf.EXPERT_TENSORS, supported_keys=GGUF_SUPPORTED_KEYS),
)
