"""Muse Glimmer (Meta 2026): norms around blocks, a gate of the attention output, and normed embeddings.

Most layers have a sliding window and RoPE; each fourth has neither. Norms of embeddings, queries and keys have no weights.
"""

import re
from dataclasses import replace
from typing import Any

import numpy as np

from specdec.argument_checks import MIN_SCALE
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import tensor_specs as specs
from specdec.families.config_values import ConfigValues
from specdec.families.family import IGNORED_NAMES, GGUFFamily, GGUFMetadata, HFFamily
from specdec.families.hf_common import MAX_THETA
from specdec.model_config import LayerConfig, ModelConfig

DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 202048, "hidden_size": 6656, "intermediate_size": 19968, "num_hidden_layers": 52, "num_attention_heads": 32,
    "num_key_value_heads": 2, "head_dim": 128, "hidden_activation": "silu", "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "bos_token_id": 200000, "eos_token_id": 200001, "sliding_window": 2048, "layer_types": None,
    "final_logit_softcapping": 20.0, "qk_scale_factor": 3.87, "output_multiplier": 0.19611613513818404, "post_norm_eps": 1e-8,
    "layer_rope_theta": None,
}  # fmt: skip
LOGIT_SOFTCAP_KEY, LOGIT_SCALE_KEY, LAYER_THETA_KEY = "final_logit_softcapping", "logit_scale", "layer_rope_theta"
FULL_ATTENTION_INTERVAL, GGUF_POST_NORM_EPS = 4, 1e-8  # GGUF files do not give the eps
BLOCK_FIELDS: dict[str, Any] = {"norm_placement": "around", "embedding_norm": True}
HF_TENSORS = specs.replace(
    hf.TENSORS | hf.PRE_POST_NORM_TENSORS, ("rms_att", "rms_att_out", "rms_ffn", "rms_ffn_out"), transform=specs.ONE_PLUS
) | {"wg": specs.TensorSpec(hf.LAYER_WEIGHT % "self_attn.gate_proj")}
GGUF_TENSORS = gguf.INTERLEAVED_ROPE_TENSORS | gguf.POST_NORM_TENSORS | {"wg": specs.TensorSpec(gguf.LAYER_WEIGHT % "attn_gate")}


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a Muse Glimmer model from the keys of config.json."""
    sizes = hf.parse_base_fields(values, "hidden_activation")
    rope = hf.parse_rope(values, hf.get_rope_values(values))
    n_layers = sizes["n_layers"]
    full = default = {*range((n_layers - 1) % FULL_ATTENTION_INTERVAL, n_layers, FULL_ATTENTION_INTERVAL)}
    if values["layer_types"] is not None:
        full = hf.get_full_attention_layers(values, n_layers, 1)
    unrotated = default
    if values[LAYER_THETA_KEY] is not None:
        thetas = values.get_per_layer(LAYER_THETA_KEY, n_layers, (0, rope.theta), f"0 or {rope.theta}")
        unrotated = {i for i, theta in enumerate(thetas) if theta == 0}
    attention = hf.parse_attention(
        values, rope, qk_norm="plain", gate=True,
        plain_query_scale=values.get_scale("qk_scale_factor"),
    )  # fmt: skip
    window = values.get_int("sliding_window") if len(full) < n_layers else 0
    layers = [
        LayerConfig(attention=replace(attention, window=0 if i in full else window, has_rope=i not in unrotated))
        for i in range(n_layers)
    ]
    return ModelConfig(
        **sizes, **BLOCK_FIELDS, attention=attention, layers=tuple(layers),
        post_norm_eps=values.get_float("post_norm_eps", 0, 1),
        logit_divisor=_compute_logit_divisor(values, "output_multiplier"),
        logit_softcap=values.get_scale(LOGIT_SOFTCAP_KEY),
    )  # fmt: skip


def _compute_logit_divisor(values: ConfigValues, key: str) -> float:
    """Return the divisor of logits from their factor, the value of a key. Raises CheckpointError."""
    return 1 / float(np.float32(values.get_scale(key)))


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a Muse Glimmer model from a GGUF file's metadata; norms of queries and keys are stored there."""
    n_layers = metadata.common_fields["n_layers"]
    sizes = gguf.parse_base_fields(metadata, qk_norm=True, gate=True)
    attention, window = sizes["attention"], metadata.get_int(gguf.SLIDING_WINDOW_KEY)
    theta = metadata.get_float("rope.freq_base_swa", 1, MAX_THETA, attention.rope.theta)
    attention = replace(attention, window=window, rope=replace(attention.rope, theta=theta))
    full = gguf.get_full_attention_layers(metadata, FULL_ATTENTION_INTERVAL)
    return ModelConfig(
        **sizes | {"attention": attention}, **BLOCK_FIELDS, post_norm_eps=GGUF_POST_NORM_EPS,
        layers=hf.make_full_attention_layers(attention, full, n_layers, has_rope=False),
        logit_divisor=_compute_logit_divisor(metadata, LOGIT_SCALE_KEY),
        logit_softcap=metadata.get_float(LOGIT_SOFTCAP_KEY, 0, 1 / MIN_SCALE, 0.0),
    )  # fmt: skip


FAMILY = (
    HFFamily(
        "muse_glimmer_text", DEFAULTS, parse_config, HF_TENSORS, supported_keys=(LOGIT_SOFTCAP_KEY,),
        ignored_names=re.compile(IGNORED_NAMES.pattern + r"|(model\.)?vision_(adapter|projection)\..*"),
        multimodal_types={"muse_glimmer": False},
    ),
    GGUFFamily(
        "muse-glimmer", parse_gguf_config, GGUF_TENSORS,
        supported_keys=(gguf.SLIDING_WINDOW_KEY, LOGIT_SOFTCAP_KEY, LOGIT_SCALE_KEY),
    ),
)  # fmt: skip
