"""OLMo 2 (Team OLMo 2025, arXiv:2501.00656): norms stand behind blocks alone, and one goes over all heads of a token's queries,
one over all of its keys. OLMo 3 (Team OLMo 2025, arXiv:2512.13961) has windows in most layers; in the others angles are scaled.
"""

from dataclasses import replace

from ..architectures import Config, RopeConfig
from . import folders, ggufs
from .family import InFolder, InGguf, Keys
from .values import Values

DEFAULTS = folders.DEFAULTS | {"vocab_size": 50304, "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": 50279}
DEFAULTS_OF_3 = DEFAULTS | {"sliding_window": 4096, "layer_types": None, "rope_theta": 500000.0}
PATTERN = 4  # where a file is silent


def config(values: Values) -> Config:
    """The numbers that a config.json says."""
    folders.no_window(values)
    values.must_be("mlp_bias", False)
    return Config(**folders.numbers(values), attention=folders.attention(values, qk_norm="whole"), norms="behind")


def config_of_3(values: Values) -> Config:
    """The same of an OLMo 3."""
    sizes, n_layers = folders.numbers(values), values.whole("num_hidden_layers", most=folders.MOST_LAYERS)
    full = folders.full_layers(values, n_layers, PATTERN)
    values.must_be("mlp_bias", False)
    values.must_be("rope_theta", 500000.0)  # of older files, of which transformers 5 turns layers with windows by this one
    values.must_be("original_max_position_embeddings", None)  # which transformers looks for in each kind's RoPE alone
    ropes = folders.ropes_of_layers(values)
    for said in ropes:
        said.must_be("truncate", None, True)  # which it looks for outside of them
    local, whole = (folders.rope(values, said) for said in ropes)
    window = values.whole("sliding_window") if len(full) < n_layers else 0
    attention = folders.attention(values, local, qk_norm="whole", window=window)
    return Config(**sizes, attention=attention, layers=folders.unwindowed(attention, full, n_layers, rope=whole), norms="behind")


def gguf_config(k: Keys) -> Config:
    """The numbers that a GGUF file's keys say, of an OLMo 3 too."""
    sizes = ggufs.numbers(k, qk_norm="whole")
    if not (window := k.count(ggufs.WINDOW)):
        return Config(**sizes, norms="behind")
    rope = sizes["attention"].rope
    local = RopeConfig(k.real("rope.freq_base_swa", 1, folders.MAX_THETA, rope.theta))
    attention = replace(sizes["attention"], window=window, rope=local)
    layers = folders.unwindowed(attention, ggufs.full_layers(k, PATTERN), k.common["n_layers"], rope=rope)
    return Config(**{**sizes, "attention": attention}, layers=layers, norms="behind")


PLACES = folders.PLACES | folders.NORMS_BEHIND
FAMILY = (
    InFolder("olmo2", DEFAULTS, config, PLACES),
    InFolder("olmo3", DEFAULTS_OF_3, config_of_3, PLACES),
    InGguf("olmo2", gguf_config, ggufs.PLACES | ggufs.NORMS_BEHIND, does=(ggufs.WINDOW,)),
)
