"""Gemma 3 (Gemma Team 2025, arXiv:2503.19786): norms behind blocks too, GELU, heads of queries and keys that are normed.

Most layers see a window and turn heads by angles of their own; only every sixth, of those as published, sees the whole text.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from specdec.config import LEAST_SCALE, AttentionConfig, Config, RopeConfig
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import Values
from specdec.families.family import InFolder, InGguf, Keys
from specdec.families.hf_common import MAX_THETA
from specdec.families.tensor_specs import ONE_MORE, changed

DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "attention_bias": False, "bos_token_id": 2, "eos_token_id": 1,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 6, "layer_types": None,
    "rope_theta": 1e6, "rope_local_base_freq": 1e4, "use_bidirectional_attention": False,
}  # fmt: skip
NORMS = ("rms_att", "rms_att_out", "rms_ffn", "rms_ffn_out", "q_norm", "k_norm", "rms_final")
PLACES = changed(hf.PLACES | hf.NORMS_AROUND, NORMS, made=ONE_MORE)
GGUF_PLACES = gguf.PLACES | gguf.NORMS_BEHIND
# where a GGUF file is silent; and the model whose scale of scores is not by a head's length
PATTERN, LOCAL_THETA, LAYERS_OF_27B = 6, 10000.0, 62
BLOCKS: dict[str, Any] = {"norms": "around", "activation": "gelu"}


def config(values: Values) -> Config:
    """The numbers that a config.json says."""
    values.must_be("attention_bias", False)
    values.must_be("use_bidirectional_attention", False, None)
    sizes, head_dim = hf.numbers(values, "hidden_activation", hf.GELU_TANH), values.whole("head_dim")
    n_layers = sizes["n_layers"]
    full = hf.full_layers(values, n_layers, "sliding_window_pattern")
    window = values.whole("sliding_window") if len(full) < n_layers else 0
    local, whole = _rope(values, head_dim)
    scale = _score_scale(head_dim, values.real("query_pre_attn_scalar", LEAST_SCALE, 1 / LEAST_SCALE))
    return _config(sizes, AttentionConfig(local, window=window, qk_norm=True, scale=scale), whole, full)


def embedding_scale(dim: int) -> float:
    return float(np.sqrt(np.float32(dim)))


def _score_scale(head_dim: int, query_scalar: float) -> float:
    """1 / sqrt(query_scalar), which mostly is a head's length."""
    return 0.0 if query_scalar == head_dim else float(np.float32(1 / np.sqrt(np.float64(query_scalar))))


def _config(sizes: Mapping[str, Any], windowed: AttentionConfig, whole: RopeConfig, full: Collection[int]) -> Config:
    """Of layers with a window, and of those that have none, whose angles are others. Embeddings are scaled by sqrt(dim)."""
    layers = hf.unwindowed(windowed, full, sizes["n_layers"], rope=whole)
    return Config(**{**sizes, "attention": windowed}, **BLOCKS, layers=layers, embedding_scale=embedding_scale(sizes["dim"]))


def _rope(values: Values, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """In layers with a window, and in the others, whose angles one number may divide."""
    thetas = []
    for others, rope in enumerate(hf.ropes_of_layers(values, "rope_local_base_freq")):
        rope.must_be("partial_rotary_factor", None, 1)
        thetas.append(rope.real("rope_theta", 1, MAX_THETA))
        rope.must_be("rope_type", "default", *["linear"][:others])
    factor = rope.real("factor", 1, 1e6) if rope["rope_type"] == "linear" else 1.0
    divisors = (factor,) * (head_dim // 2) if factor != 1 else ()
    return RopeConfig(thetas[0]), RopeConfig(thetas[1], divisors=divisors)


def gguf_config(k: Keys) -> Config:
    """The numbers that a GGUF file's keys say; of its scales it does not tell."""
    k.must_be("rope.scaling.type", None, "linear", "none")
    sizes = gguf.numbers(k, has_biases=False, qk_norm=True)
    dim, n_layers, attention = k.common["dim"], k.common["n_layers"], sizes["attention"]
    head_dim, window = sizes["head_dim"], k.count(gguf.WINDOW)
    full = gguf.full_layers(k, PATTERN) if window else {*range(n_layers)}
    scale = _score_scale(head_dim, dim // k.common["n_heads"] if n_layers == LAYERS_OF_27B else head_dim)
    local = replace(attention.rope, theta=k.real("rope.freq_base_swa", 1, MAX_THETA, LOCAL_THETA), divisors=())
    return _config(sizes, replace(attention, rope=local, window=window, scale=scale), attention.rope, full)


FAMILY = (
    InFolder("gemma3_text", DEFAULTS, config, PLACES, does=("query_pre_attn_scalar",), beside={"gemma3": True}),
    InGguf("gemma3", gguf_config, GGUF_PLACES, does=(gguf.WINDOW,)),
)
