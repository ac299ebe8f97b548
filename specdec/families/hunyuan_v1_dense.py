"""Hunyuan's dense models (Tencent 2025): norms of query and key heads after RoPE, whose base may be stretched."""

from decimal import Decimal, localcontext

import numpy as np

from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import tensor_specs as specs
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
from specdec.layers.rope import DECIMAL_CONTEXT
from specdec.model_config import ModelConfig, RopeConfig

DEFAULTS = hf.DEFAULTS | {"vocab_size": 290943, "rms_norm_eps": 1e-5}
QK_NORM, MAX_ALPHA = "rotated", 1e6
HF_TENSORS = hf.TENSORS | specs.set_rope_pairs(
    specs.make(hf.LAYER_WEIGHT, q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")
)


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a dense Hunyuan model from the keys of config.json."""
    values.require("use_qk_norm", None, True)
    attention = hf.parse_attention(values, _parse_rope(values), qk_norm=QK_NORM)
    return ModelConfig(**hf.parse_base_fields(values), attention=attention)


def _parse_rope(values: ConfigValues) -> RopeConfig:
    """Return the RoPE config, in which a fixed alpha stretches the base: theta alpha^(n / (n - 2)) for heads of n rows.

    Files call this "dynamic". The result is rounded to float32, as in GGUF files.
    """
    rope_values, head_dim = hf.get_rope_values(values), hf.get_head_dim(values)
    if rope_values["rope_type"] != "dynamic" or not rope_values["alpha"] or head_dim <= 2:
        return hf.parse_rope(values, rope_values)
    rope_values.require("mrope_section", None)
    theta, alpha = rope_values.get_float("rope_theta", 1, hf.MAX_THETA), rope_values.get_float("alpha", 1, MAX_ALPHA)
    with localcontext(DECIMAL_CONTEXT):
        stretched = Decimal(theta) * Decimal(alpha) ** (Decimal(head_dim) / (head_dim - 2))
    return RopeConfig(float(np.float32(stretched)))


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a dense Hunyuan model from a GGUF file's metadata."""
    return gguf.parse_config(metadata, qk_norm=QK_NORM)


FAMILY = (
    HFFamily("hunyuan_v1_dense", DEFAULTS, parse_config, HF_TENSORS, supported_keys=("use_qk_norm",)),
    GGUFFamily("hunyuan-dense", parse_gguf_config, gguf.TENSORS),
)
