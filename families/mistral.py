"""Mistral, whose tokens see a window (Jiang et al. 2023, arXiv:2310.06825), and Mixtral, which has experts (2024,
arXiv:2401.04088). GGUF files call both a llama.
"""

from dataclasses import replace

from ..architectures import Config
from . import folders
from .family import InFolder
from .places import Place
from .values import Values

DEFAULTS = folders.DEFAULTS | {
    "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096,
}  # fmt: skip
MIXTRAL_DEFAULTS = DEFAULTS | {
    "rms_norm_eps": 1e-5, "sliding_window": None, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
MIXTRAL = {
    "router": Place("layers.{}.block_sparse_moe.gate.weight"),
    **{f"experts_w{n}": Place(f"layers.{{}}.block_sparse_moe.experts.{{}}.w{n}.weight", each=True) for n in (1, 2, 3)},
}


def config(values: Values) -> Config:
    """The numbers that a config.json says."""
    folders.no_biases(values)
    return Config(**folders.numbers(values), attention=folders.attention(values, window=folders.window(values)))


def mixtral_config(values: Values) -> Config:
    """The same of a Mixtral."""
    experts = folders.experts(values, "intermediate_size", "num_local_experts")
    return replace(config(values), experts=experts)


PLACES = folders.PLACES | folders.EXPERTS
INSTEAD = (folders.EXPERTS_IN_ONE, MIXTRAL)
FAMILY = (
    InFolder("mistral", DEFAULTS, config, folders.PLACES),
    InFolder("mixtral", MIXTRAL_DEFAULTS, mixtral_config, PLACES, INSTEAD, does=("num_local_experts",)),
)
