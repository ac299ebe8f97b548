"""OLMo 2 (Team OLMo 2025, arXiv:2501.00656): norms stand behind blocks alone, and one goes over all heads of a token's queries,
one over all of its keys. OLMo 3 (Team OLMo 2025, arXiv:2512.13961) has windows in most layers; in the others angles are scaled.
"""

from dataclasses import replace

from specdec.config import Config, RopeConfig
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import Values
from specdec.families.family import InFolder, InGguf, Keys

DEFAULTS = hf.DEFAULTS | {"vocab_size": 50304, "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": 50279}
DEFAULTS_OF_3 = DEFAULTS | {"sliding_window": 4096, "layer_types": None, "rope_theta": 500000.0}
PATTERN = 4  # where a file is silent


def config(values: Values) -> Config:
    """The numbers that a config.json says."""
    hf.no_window(values)
    values.must_be("mlp_bias", False)
    return Config(**hf.numbers(values), attention=hf.attention(values, qk_norm="whole"), norms="behind")


def config_of_3(values: Values) -> Config:
    """The same of an OLMo 3."""
    sizes, n_layers = hf.numbers(values), values.whole("num_hidden_layers", most=hf.MOST_LAYERS)
    full = hf.full_layers(values, n_layers, PATTERN)
    values.must_be("mlp_bias", False)
    values.must_be("rope_theta", 500000.0)  # of older files, of which transformers 5 turns layers with windows by this one
    values.must_be("original_max_position_embeddings", None)  # which transformers looks for in each kind's RoPE alone
    ropes = hf.ropes_of_layers(values)
    for said in ropes:
        said.must_be("truncate", None, True)  # which it looks for outside of them
    local, whole = (hf.rope(values, said) for said in ropes)
    window = values.whole("sliding_window") if len(full) < n_layers else 0
    attention = hf.attention(values, local, qk_norm="whole", window=window)
    return Config(**sizes, attention=attention, layers=hf.unwindowed(attention, full, n_layers, rope=whole), norms="behind")


def gguf_config(k: Keys) -> Config:
    """The numbers that a GGUF file's keys say, of an OLMo 3 too."""
    sizes = gguf.numbers(k, qk_norm="whole")
    if not (window := k.count(gguf.WINDOW)):
        return Config(**sizes, norms="behind")
    rope = sizes["attention"].rope
    local = RopeConfig(k.real("rope.freq_base_swa", 1, hf.MAX_THETA, rope.theta))
    attention = replace(sizes["attention"], window=window, rope=local)
    layers = hf.unwindowed(attention, gguf.full_layers(k, PATTERN), k.common["n_layers"], rope=rope)
    return Config(**{**sizes, "attention": attention}, layers=layers, norms="behind")


PLACES = hf.PLACES | hf.NORMS_BEHIND
FAMILY = (
    InFolder("olmo2", DEFAULTS, config, PLACES),
    InFolder("olmo3", DEFAULTS_OF_3, config_of_3, PLACES),
    InGguf("olmo2", gguf_config, gguf.PLACES | gguf.NORMS_BEHIND, does=(gguf.WINDOW,)),
)
