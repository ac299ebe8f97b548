"""StableLM 2 (Bellagente et al. 2024, arXiv:2402.17834) and StableLM 3B: LayerNorms, and RoPE on a quarter of each head."""

from dataclasses import replace

from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
from specdec.model_config import AttentionConfig, ModelConfig

DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912, "num_key_value_heads": 32,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 0, "partial_rotary_factor": 0.25,
    "use_qkv_bias": False, "qk_layernorm": False, "use_parallel_residual": False,
}  # fmt: skip
PARALLEL_KEY = "use_parallel_residual"


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a StableLM model from config.json; parallel blocks, as in the 12B model, are not supported."""
    values.require(PARALLEL_KEY, False)
    hf.reject_biases(values)
    attention = AttentionConfig(hf.parse_plain_partial_rope(values), qkv_bias=values.get_bool("use_qkv_bias"))
    return ModelConfig(**hf.parse_base_fields(values), attention=attention, layer_norm=True)


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a StableLM model from a GGUF file's metadata.

    Tensors show whether blocks are parallel; the key does not.
    """
    return replace(gguf.parse_config(metadata, has_partial_rope=True, eps_key=gguf.LAYER_NORM_EPS_KEY), layer_norm=True)


FAMILY = (
    HFFamily(
        "stablelm", DEFAULTS, parse_config, hf.TENSORS, supported_keys=("partial_rotary_factor",),
        key_aliases={"layer_norm_eps": "rms_norm_eps"},
    ),
    GGUFFamily("stablelm", parse_gguf_config, gguf.TENSORS, supported_keys=(PARALLEL_KEY,)),
)  # fmt: skip
