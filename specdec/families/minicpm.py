"""MiniCPM 1 and 2 (Hu et al. 2024, arXiv:2404.06395): Llama with scales of embeddings, residuals and logits.

Keys and defaults are those of configuration_minicpm.py in openbmb/MiniCPM-2B-sft-bf16. MiniCPM 5 is saved as Llama.
"""

from typing import Any

import numpy as np

from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
from specdec.model_config import ModelConfig

DEFAULTS = hf.DEFAULTS | {"tie_word_embeddings": True, "scale_emb": 1, "scale_depth": 1, "dim_model_base": 1}
SCALE_KEYS, GGUF_SCALE_KEYS = ("scale_emb", "scale_depth", "dim_model_base"), ("embedding_scale", "residual_scale", "logit_scale")


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a MiniCPM model from the keys of config.json."""
    hf.reject_biases(values)
    fields = hf.parse_base_fields(values)
    embedding, depth, base = (values.get_scale(key) for key in SCALE_KEYS)
    residual, divisor = depth / float(np.sqrt(np.float64(fields["n_layers"]))), fields["dim"] / base
    return _make_config(fields | {"attention": hf.parse_attention(values)}, embedding, residual, divisor)


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a MiniCPM model from a GGUF file's metadata, which must have the scales."""
    scales = (metadata.get_scale(key) for key in GGUF_SCALE_KEYS)
    return _make_config(gguf.parse_base_fields(metadata), *scales)


def _make_config(fields: dict[str, Any], embedding: float, residual: float, divisor: float) -> ModelConfig:
    """Build a `ModelConfig` with scales in the precision of GGUF files."""
    embedding_scale, residual_scale, logit_divisor = (float(np.float32(scale)) for scale in (embedding, residual, divisor))
    return ModelConfig(**fields, embedding_scale=embedding_scale, residual_scale=residual_scale, logit_divisor=logit_divisor)


FAMILY = (
    HFFamily("minicpm", DEFAULTS, parse_config, hf.TENSORS),
    GGUFFamily("minicpm", parse_gguf_config, gguf.INTERLEAVED_ROPE_TENSORS, supported_keys=GGUF_SCALE_KEYS),
)
