"""Phi-3 and Phi-4-mini, which rotate a part of each head with LongRoPE's factors (Ding et al. 2024, arXiv:2402.13753)."""

from dataclasses import replace

import numpy as np

from specdec.argument_checks import MIN_SCALE
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import ConfigValues
from specdec.families.family import (
    GATE_UP,
    QKV,
    ROTARY_TENSORS,
    GGUFFamily,
    GGUFMetadata,
    HFFamily,
    make_fused_specs,
    replace_in_specs,
)
from specdec.layers.rope import get_longrope_attention_factor
from specdec.model_config import ModelConfig, RopeConfig

DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 32000,
}  # fmt: skip
LONGROPE_TYPES = ("longrope", "su", "yarn")  # the last two are older names
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
GGUF_TENSORS = gguf.INTERLEAVED_ROPE_TENSORS | replace_in_specs(
    make_fused_specs(QKV, gguf.LAYER_WEIGHT % "attn_qkv") | make_fused_specs(GATE_UP, gguf.LAYER_WEIGHT % "ffn_up"),
    ROTARY_TENSORS,
    is_neox_style=True,
)


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a Phi-3 model from config.json; a sliding window as long as the context is dropped."""
    window = hf.parse_window(values)
    hf.reject_biases(values)
    if window >= values.get_int("max_position_embeddings"):
        window = 0
    return ModelConfig(**hf.parse_base_fields(values), attention=hf.parse_attention(values, _parse_rope(values), window=window))


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
        attention_factor = rope_values.get_float("attention_factor", MIN_SCALE, 1 / MIN_SCALE)
    elif original == 1 and factor > 1:
        raise values.make_error("original_max_position_embeddings", "2 or more")
    else:
        attention_factor = get_longrope_attention_factor(factor, original)
    return set_longrope_factors(
        replace(partial_rope, attention_factor=float(np.float32(attention_factor))), short, long, n_positions, original
    )


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
    config = ModelConfig(**gguf.parse_base_fields(metadata, has_partial_rope=True, window=window if window < n_positions else 0))
    rope = config.rope
    if metadata[gguf.ATTENTION_FACTOR_KEY] not in (None, 0):
        rope = replace(
            rope, attention_factor=float(np.float32(metadata.get_float(gguf.ATTENTION_FACTOR_KEY, MIN_SCALE, 1 / MIN_SCALE)))
        )
    if SHORT_FACTORS in metadata.tensors or LONG_FACTORS in metadata.tensors:
        n_pairs = config.rotary_dim // 2
        short, long = (
            tuple(float(x) for x in metadata.tensors.get_tensor(name, (n_pairs,))[:]) for name in (SHORT_FACTORS, LONG_FACTORS)
        )
        rope = set_longrope_factors(rope, short, long, n_positions, metadata.get_int("rope.scaling.original_context_length"))
    return replace(config, attention=replace(config.attention, rope=rope))


FAMILY = (
    HFFamily("phi3", DEFAULTS, parse_config, hf.TENSORS, (hf.FUSED_TENSORS,), supported_keys=("partial_rotary_factor",)),
    GGUFFamily("phi3", parse_gguf_config, GGUF_TENSORS, supported_keys=(gguf.ATTENTION_FACTOR_KEY, gguf.SLIDING_WINDOW_KEY)),
)
