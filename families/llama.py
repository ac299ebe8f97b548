"""Llama 2 and 3 (Touvron et al. 2023, arXiv:2307.09288; Dubey et al. 2024, arXiv:2407.21783), and what is saved as one."""

from ..architectures import Config
from . import folders, ggufs
from .family import Family, InFolder, InGguf, Keys
from .values import Values


def config(values: Values) -> Config:
    """The numbers that a config.json says."""
    folders.no_window(values, "llama")
    folders.all_are(folders.FULL, values)
    return Config(**folders.numbers(values), attention=folders.attention(values), mlp_bias=values.flag("mlp_bias"))


def gguf_config(k: Keys) -> Config:
    """The numbers that a GGUF file's keys say."""
    return Config(**ggufs.numbers(k))


FAMILY = Family(
    (InFolder("llama", folders.DEFAULTS, config, folders.PLACES),),
    (InGguf("llama", gguf_config, ggufs.PAIRS_PLACES | ggufs.EXPERTS_PLACES, does=(ggufs.EXPERTS,)),),  # a Mixtral, too
)
