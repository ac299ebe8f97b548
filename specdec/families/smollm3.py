"""SmolLM3, in which some layers have no RoPE (Yang et al. 2025, arXiv:2501.18795)."""

from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
from specdec.model_config import ModelConfig

DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
    "max_position_embeddings": 32768, "tie_word_embeddings": True, "bos_token_id": 128000, "eos_token_id": 128001,
    "use_sliding_window": False, "no_rope_layers": None, "no_rope_layer_interval": 4, "layer_types": None, "rope_theta": 2e6,
}  # fmt: skip
GGUF_NOPE_INTERVAL = 4  # GGUF files do not give it


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a SmolLM3 model from the keys of config.json."""
    n_layers = values.get_int("num_hidden_layers", max_value=hf.MAX_LAYERS)
    if values.get_bool("use_sliding_window") and values["sliding_window"] is not None:
        raise values.make_error("sliding_window", "null; windows in some layers are not supported")
    if values["no_rope_layers"] is None:
        interval = values.get_int("no_rope_layer_interval")
        nope_layers = [*range(interval - 1, n_layers, interval)]
    else:
        flags = values.get_per_layer("no_rope_layers", n_layers, (0, 1), "0 or 1")
        nope_layers = [layer for layer, flag in enumerate(flags) if flag == 0]
    hf.check_layer_types(hf.FULL_ATTENTION, values)
    attention = hf.parse_attention(values)
    layers = hf.make_full_attention_layers(attention, nope_layers, n_layers, has_rope=False)
    return ModelConfig(**hf.parse_base_fields(values), attention=attention, mlp_bias=values.get_bool("mlp_bias"), layers=layers)


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a SmolLM3 model from a GGUF file's metadata."""
    fields, n_layers = gguf.parse_base_fields(metadata), metadata.common_fields["n_layers"]
    nope_layers = range(GGUF_NOPE_INTERVAL - 1, n_layers, GGUF_NOPE_INTERVAL)
    layers = hf.make_full_attention_layers(fields["attention"], nope_layers, n_layers, has_rope=False)
    return ModelConfig(**fields, layers=layers)


FAMILY = (
    HFFamily("smollm3", DEFAULTS, parse_config, hf.TENSORS, supported_keys=("no_rope_layers", "mlp_bias")),
    GGUFFamily("smollm3", parse_gguf_config, gguf.INTERLEAVED_ROPE_TENSORS),
)
