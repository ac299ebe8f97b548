"""Gemma 2 (Gemma Team 2024, arXiv:2408.00118) and Gemma 3 (2025, arXiv:2503.19786): pre- and post-norms, and GELU.

Most layers have a sliding window; in published models each second or each sixth layer has full attention. Gemma 2 has bounds of
attention scores and of logits. Gemma 3 has norms of query and key heads, and a RoPE base of its own in layers with a window.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from specdec.argument_checks import JSONDict
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import tensor_specs as specs
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
from specdec.families.hf_common import MAX_THETA
from specdec.model_config import AttentionConfig, ModelConfig, RopeConfig

SCORE_SOFTCAP_KEY, LOGIT_SOFTCAP_KEY = "attn_logit_softcapping", "final_logit_softcapping"
COMMON_DEFAULTS: JSONDict = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "attention_bias": False, "bos_token_id": 2, "eos_token_id": 1, "layer_types": None,
}  # fmt: skip
GEMMA2_DEFAULTS = COMMON_DEFAULTS | {
    "vocab_size": 256000, "num_hidden_layers": 26, "max_position_embeddings": 8192, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, LOGIT_SOFTCAP_KEY: 30.0, SCORE_SOFTCAP_KEY: 50.0, "rope_theta": 10000.0,
}  # fmt: skip
DEFAULTS = COMMON_DEFAULTS | {
    "vocab_size": 262208, "num_hidden_layers": 26, "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
}  # fmt: skip
ONE_PLUS_NORMS = ("rms_att", "rms_att_out", "rms_ffn", "rms_ffn_out", "q_norm", "k_norm", "rms_final")
HF_TENSORS = specs.replace(hf.TENSORS | hf.PRE_POST_NORM_TENSORS, ONE_PLUS_NORMS, transform=specs.ONE_PLUS)
GGUF_TENSORS = gguf.TENSORS | gguf.POST_NORM_TENSORS
# Defaults of GGUF files
FULL_ATTENTION_INTERVAL, LOCAL_THETA = 6, 10000.0
GEMMA2_FULL_ATTENTION_INTERVAL, GEMMA2_WINDOW = 2, 4096
N_LAYERS_27B = (46, 62)  # of the models with a score scale that does not follow from the head dimension
BLOCK_FIELDS: dict[str, Any] = {"norm_placement": "around", "activation": "gelu"}


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a Gemma 3 model from the keys of config.json."""
    values.require("attention_bias", False)
    values.require("use_bidirectional_attention", False, None)
    sizes, head_dim = hf.parse_base_fields(values, "hidden_activation", hf.GELU_TANH), values.get_int("head_dim")
    n_layers = sizes["n_layers"]
    full = hf.get_full_attention_layers(values, n_layers, "sliding_window_pattern")
    window = values.get_int("sliding_window") if len(full) < n_layers else 0
    local, full_rope = _parse_ropes(values, head_dim)
    scale = compute_score_scale(head_dim, values.get_scale("query_pre_attn_scalar"))
    return _make_config(sizes, AttentionConfig(local, window=window, qk_norm=True, scale=scale), full_rope, full)


def compute_embedding_scale(dim: int) -> float:
    """Return sqrt(dim), rounded to float32, the factor by which Gemma multiplies embeddings."""
    return float(np.sqrt(np.float32(dim)))


def compute_score_scale(head_dim: int, query_scalar: float) -> float:
    """Return the scale of attention scores, 1 / sqrt(query_scalar), or 0 for the default, in which query_scalar is head_dim."""
    return 0.0 if query_scalar == head_dim else float(np.float32(1 / np.sqrt(np.float64(query_scalar))))


def compute_gguf_score_scale(metadata: GGUFMetadata, head_dim: int) -> float:
    """Return the scale of attention scores of a model in a GGUF file, which lacks it; see `compute_score_scale`."""
    fields = metadata.common_fields
    query_scalar = fields["dim"] // fields["n_heads"] if fields["n_layers"] in N_LAYERS_27B else head_dim
    return compute_score_scale(head_dim, query_scalar)


def _make_config(sizes: Mapping[str, Any], sliding: AttentionConfig, full_rope: RopeConfig, full: Collection[int]) -> ModelConfig:
    """Build the `ModelConfig` of a Gemma 2 or Gemma 3 model.

    Args:
        sizes: Other fields of `ModelConfig`; the embedding scale follows from dim.
        sliding: Attention of the sliding-window layers.
        full_rope: RoPE config of the full-attention layers.
        full: Indices of the full-attention layers.
    """
    layers = hf.make_full_attention_layers(sliding, full, sizes["n_layers"], rope=full_rope)
    return ModelConfig(
        **{**sizes, "attention": sliding}, **BLOCK_FIELDS, layers=layers, embedding_scale=compute_embedding_scale(sizes["dim"])
    )


def _parse_ropes(values: ConfigValues, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Return two RoPE configs: of sliding-window layers, and of full-attention layers, which may have linear scaling."""
    thetas = []
    for is_full, rope in enumerate(hf.get_rope_values_by_layer_type(values, "rope_local_base_freq")):
        rope.require("partial_rotary_factor", None, 1)
        thetas.append(rope.get_float("rope_theta", 1, MAX_THETA))
        rope.require("rope_type", "default", *["linear"][:is_full])
    factor = rope.get_float("factor", 1, 1e6) if rope["rope_type"] == "linear" else 1.0
    freq_factors = (factor,) * (head_dim // 2) if factor != 1 else ()
    return RopeConfig(thetas[0]), RopeConfig(thetas[1], freq_factors=freq_factors)


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a Gemma 3 model from a GGUF file's metadata, which lacks the scales of embeddings and scores."""
    metadata.require("rope.scaling.type", None, "linear", "none")
    sizes = gguf.parse_base_fields(metadata, has_biases=False, qk_norm=True)
    n_layers, attention = metadata.common_fields["n_layers"], sizes["attention"]
    head_dim, window = sizes["head_dim"], metadata.get_count(gguf.SLIDING_WINDOW_KEY)
    full = gguf.get_full_attention_layers(metadata, FULL_ATTENTION_INTERVAL) if window else {*range(n_layers)}
    scale = compute_gguf_score_scale(metadata, head_dim)
    local = replace(attention.rope, theta=metadata.get_float("rope.freq_base_swa", 1, MAX_THETA, LOCAL_THETA), freq_factors=())
    return _make_config(sizes, replace(attention, rope=local, window=window, scale=scale), attention.rope, full)


def parse_gemma2_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a Gemma 2 model from the keys of config.json."""
    values.require("use_bidirectional_attention", None, False)
    sizes = hf.parse_base_fields(values, "hidden_activation", hf.GELU_TANH)
    full = hf.get_full_attention_layers(values, sizes["n_layers"], GEMMA2_FULL_ATTENTION_INTERVAL)
    scale = compute_score_scale(sizes["head_dim"], values.get_scale("query_pre_attn_scalar"))
    softcap, logit_softcap = (values.get_scale(key, 0.0) for key in (SCORE_SOFTCAP_KEY, LOGIT_SOFTCAP_KEY))
    window = values.get_int("sliding_window") if len(full) < sizes["n_layers"] else 0
    attention = hf.parse_attention(values, window=window, scale=scale, softcap=softcap)
    return _make_config(sizes | {"logit_softcap": logit_softcap}, attention, attention.rope, full)


def parse_gemma2_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a Gemma 2 model from a GGUF file's metadata, which lacks the scales of embeddings and scores."""
    window = metadata.get_int(gguf.SLIDING_WINDOW_KEY, GEMMA2_WINDOW)
    softcap, logit_softcap = (metadata.get_scale(key, GEMMA2_DEFAULTS[key]) for key in (SCORE_SOFTCAP_KEY, LOGIT_SOFTCAP_KEY))
    sizes = gguf.parse_base_fields(metadata, has_biases=False, window=window, softcap=softcap)
    attention, full = sizes["attention"], gguf.get_full_attention_layers(metadata, GEMMA2_FULL_ATTENTION_INTERVAL)
    local = replace(attention.rope, theta=metadata.get_float("rope.freq_base_swa", 1, MAX_THETA, attention.rope.theta))
    sliding = replace(attention, scale=compute_gguf_score_scale(metadata, sizes["head_dim"]), rope=local)
    return _make_config(sizes | {"logit_softcap": logit_softcap}, sliding, attention.rope, full)


GEMMA2_SUPPORTED_KEYS = (SCORE_SOFTCAP_KEY, LOGIT_SOFTCAP_KEY)
FAMILY = (
    HFFamily(
        "gemma2", GEMMA2_DEFAULTS, parse_gemma2_config, HF_TENSORS,
        supported_keys=("query_pre_attn_scalar", *GEMMA2_SUPPORTED_KEYS),
    ),
    HFFamily(
        "gemma3_text", DEFAULTS, parse_config, HF_TENSORS, supported_keys=("query_pre_attn_scalar",),
        multimodal_types={"gemma3": True},
    ),
    GGUFFamily(
        "gemma2", parse_gemma2_gguf_config, GGUF_TENSORS, supported_keys=(gguf.SLIDING_WINDOW_KEY, *GEMMA2_SUPPORTED_KEYS)
    ),
    GGUFFamily("gemma3", parse_gguf_config, GGUF_TENSORS, supported_keys=(gguf.SLIDING_WINDOW_KEY,)),
)  # fmt: skip
