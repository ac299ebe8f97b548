"""Phi-3 and Phi-4-mini, which turn a part of each head, by factors of their own (Ding et al. 2024, arXiv:2402.13753)."""

from dataclasses import replace

import numpy as np

from specdec.config import LEAST_SCALE, Config, RopeConfig
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import Values
from specdec.families.family import InFolder, InGguf, Keys
from specdec.families.tensor_specs import GATED, QKV, TURNED, changed, together
from specdec.layers.rope import longrope_scale

DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 32000,
}  # fmt: skip
LONGROPE = ("longrope", "su", "yarn")  # the last two are older names of it
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
GGUF_PLACES = gguf.PAIRS_PLACES | changed(
    together(QKV, gguf.OF_LAYERS % "attn_qkv") | together(GATED, gguf.OF_LAYERS % "ffn_up"), TURNED, halves=True
)


def config(values: Values) -> Config:
    """The numbers that a config.json says. A window that is as long as a text can be is none."""
    window = hf.window(values)
    hf.no_biases(values)
    if window >= values.whole("max_position_embeddings"):
        window = 0
    return Config(**hf.numbers(values), attention=hf.attention(values, _rope(values), window=window))


def _rope(values: Values) -> RopeConfig:
    rope = hf.rope_values(values)
    rope.must_be("mrope_section", None)
    found = hf.partial_rope(rope, values, rope, values)
    n_turned = found.dim or hf.head_length(values)
    if rope["rope_type"] == "default":
        return found
    if rope["rope_type"] not in LONGROPE:
        raise rope.refusal("rope_type", "default or longrope; other kinds of RoPE are not supported")
    n_positions, original = values.whole("max_position_embeddings"), values.whole("original_max_position_embeddings")
    short, long = (_factors(rope, key, n_turned // 2) for key in ("short_factor", "long_factor"))
    factor = rope.real("factor", 0, 1e6, n_positions / original)
    if rope["attention_factor"] is not None:
        scale = rope.real("attention_factor", LEAST_SCALE, 1 / LEAST_SCALE)
    elif original == 1 and factor > 1:
        raise values.refusal("original_max_position_embeddings", "2 or more")
    else:
        scale = longrope_scale(factor, original)
    return _switching(replace(found, scale=float(np.float32(scale))), short, long, n_positions, original)


def _factors(rope: Values, key: str, n: int) -> tuple[float, ...]:
    """A list of so many positive numbers."""
    given = rope[key]
    are_numbers = isinstance(given, list) and all(type(each) in (int, float) and 1e-6 <= each <= 1e9 for each in given)
    if not are_numbers or len(given) != n:
        raise rope.refusal(key, f"{n} positive numbers, one a pair")
    return tuple(float(np.float32(factor)) for factor in given)  # as transformers and GGUF keep them


def _switching(
    rope: RopeConfig, short: tuple[float, ...], long: tuple[float, ...], n_positions: int, original: int
) -> RopeConfig:
    """Divisors of short texts, and of those of more than the original positions where there may be any."""
    switches = short != long and n_positions > original
    return replace(rope, divisors=short, long_divisors=long if switches else (), n_short=original if switches else 0)


def gguf_config(k: Keys) -> Config:
    """The numbers that a GGUF file's keys and factors say."""
    n_positions = k.common["seq_len"]
    window = k.count(gguf.WINDOW)
    config = Config(**gguf.numbers(k, is_partial=True, window=window if window < n_positions else 0))
    rope = config.rope
    if k[gguf.ATTENTION_FACTOR] not in (None, 0):
        rope = replace(rope, scale=float(np.float32(k.real(gguf.ATTENTION_FACTOR, LEAST_SCALE, 1 / LEAST_SCALE))))
    if SHORT in k.tensors or LONG in k.tensors:
        n_pairs = config.n_turned // 2
        short, long = (tuple(float(x) for x in k.tensors.tensor(name, (n_pairs,))[:]) for name in (SHORT, LONG))
        rope = _switching(rope, short, long, n_positions, k.whole("rope.scaling.original_context_length"))
    return replace(config, attention=replace(config.attention, rope=rope))


FAMILY = (
    InFolder("phi3", DEFAULTS, config, hf.PLACES, (hf.FUSED,), does=("partial_rotary_factor",)),
    InGguf("phi3", gguf_config, GGUF_PLACES, does=(gguf.ATTENTION_FACTOR, gguf.WINDOW)),
)
