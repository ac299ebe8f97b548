"""EXAONE 4.0 (LG AI Research 2025, arXiv:2507.11407): only post-norms, and norms of query and key heads.

The larger model has a sliding window in most layers, and no RoPE in the others.
"""

from dataclasses import replace

from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
from specdec.model_config import AttentionConfig, ModelConfig

DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 102400, "intermediate_size": 16384, "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "bos_token_id": 0,
    "sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None,
}  # fmt: skip
FULL_ATTENTION_INTERVAL = 4  # default of GGUF files


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of an EXAONE 4 model from the keys of config.json."""
    hf.reject_biases(values)
    sizes, attention = hf.parse_base_fields(values), AttentionConfig(hf.parse_rope(values), qk_norm=True)
    n_layers = sizes["n_layers"]
    if values["sliding_window"] is None:
        hf.check_layer_types(hf.FULL_ATTENTION, values)
        return ModelConfig(**sizes, attention=attention, norm_placement="behind")
    full = hf.get_full_attention_layers(values, n_layers, "sliding_window_pattern")
    sliding = replace(attention, window=values.get_int("sliding_window"))
    layers = hf.make_full_attention_layers(sliding, full, n_layers, has_rope=False)
    return ModelConfig(**sizes, attention=sliding, layers=layers, norm_placement="behind")


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of an EXAONE 4 model from a GGUF file's metadata."""
    sizes, n_layers = gguf.parse_base_fields(metadata, qk_norm=True), metadata.common_fields["n_layers"]
    if not (window := metadata.get_count(gguf.SLIDING_WINDOW_KEY)):
        return ModelConfig(**sizes, norm_placement="behind")
    sliding = sizes["attention"] = replace(sizes["attention"], window=window)
    full = gguf.get_full_attention_layers(metadata, FULL_ATTENTION_INTERVAL)
    layers = hf.make_full_attention_layers(sliding, full, n_layers, has_rope=False)
    return ModelConfig(**sizes, layers=layers, norm_placement="behind")


FAMILY = (
    HFFamily("exaone4", DEFAULTS, parse_config, hf.TENSORS | hf.POST_NORM_TENSORS),
    GGUFFamily("exaone4", parse_gguf_config, gguf.TENSORS | gguf.POST_NORM_TENSORS, supported_keys=(gguf.SLIDING_WINDOW_KEY,)),
)
