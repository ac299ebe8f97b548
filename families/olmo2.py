"""OLMo 2 (Team OLMo 2025, arXiv:2501.00656): norms stand behind blocks alone, and one goes over all heads of a token's queries,
one over all of its keys.
"""

from ..architectures import Config
from . import folders, ggufs
from .family import InFolder, InGguf, Keys
from .values import Values

DEFAULTS = folders.DEFAULTS | {"vocab_size": 50304, "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": 50279}


def config(values: Values) -> Config:
    """The numbers that a config.json says."""
    folders.no_window(values)
    values.must_be("mlp_bias", False)
    return Config(**folders.numbers(values), attention=folders.attention(values, qk_norm="whole"), norms="behind")


def gguf_config(k: Keys) -> Config:
    """The numbers that a GGUF file's keys say."""
    return Config(**ggufs.numbers(k, qk_norm="whole"), norms="behind")


FAMILY = (
    InFolder("olmo2", DEFAULTS, config, folders.PLACES | folders.NORMS_BEHIND),
    InGguf("olmo2", gguf_config, ggufs.PLACES | ggufs.NORMS_BEHIND),
)
