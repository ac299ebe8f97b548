"""SmolLM3, some of whose layers do not turn heads (Yang et al. 2025, arXiv:2501.18795)."""

from collections.abc import Collection
from dataclasses import replace

from specdec.config import AttentionConfig, Config, LayerConfig, of_some
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import Values
from specdec.families.family import InFolder, InGguf, Keys

DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
    "max_position_embeddings": 32768, "tie_word_embeddings": True, "bos_token_id": 128000, "eos_token_id": 128001,
    "use_sliding_window": False, "no_rope_layers": None, "no_rope_layer_interval": 4, "layer_types": None, "rope_theta": 2e6,
}  # fmt: skip
GGUF_INTERVAL = 4  # of which a file does not tell


def _layers(attention: AttentionConfig, unturned: Collection[int], n_layers: int) -> tuple[LayerConfig, ...]:
    return of_some(LayerConfig(attention=replace(attention, is_turned=False)), unturned, n_layers)


def config(values: Values) -> Config:
    """The numbers that a config.json says."""
    n_layers = values.whole("num_hidden_layers", most=hf.MOST_LAYERS)
    if values.flag("use_sliding_window") and values["sliding_window"] is not None:
        raise values.refusal("sliding_window", "null; windows in some layers are not supported")
    if values["no_rope_layers"] is None:
        interval = values.whole("no_rope_layer_interval")
        unturned = (*range(interval - 1, n_layers, interval),)
    else:
        flags = values.of_layers("no_rope_layers", n_layers, (0, 1), "0 or 1")
        unturned = tuple(layer for layer, flag in enumerate(flags) if flag == 0)
    hf.all_are(hf.FULL, values)
    attention = hf.attention(values)
    layers = _layers(attention, unturned, n_layers)
    return Config(**hf.numbers(values), attention=attention, mlp_bias=values.flag("mlp_bias"), layers=layers)


def gguf_config(k: Keys) -> Config:
    """The numbers that a GGUF file's keys say."""
    numbers, n_layers = gguf.numbers(k), k.common["n_layers"]
    layers = _layers(numbers["attention"], range(GGUF_INTERVAL - 1, n_layers, GGUF_INTERVAL), n_layers)
    return Config(**numbers, layers=layers)


FAMILY = (
    InFolder("smollm3", DEFAULTS, config, hf.PLACES, does=("no_rope_layers",)),
    InGguf("smollm3", gguf_config, gguf.PAIRS_PLACES),
)
