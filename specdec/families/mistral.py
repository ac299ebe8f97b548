"""Mistral, whose tokens see a window (Jiang et al. 2023, arXiv:2310.06825), and Mixtral, which has experts (2024,
arXiv:2401.04088). GGUF files call both a llama.
"""

from dataclasses import replace

from specdec.config import Config
from specdec.families import hf_common as hf
from specdec.families.config_values import Values
from specdec.families.family import InFolder
from specdec.families.tensor_specs import Place

DEFAULTS = hf.DEFAULTS | {
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
    hf.no_biases(values)
    return Config(**hf.numbers(values), attention=hf.attention(values, window=hf.window(values)))


def mixtral_config(values: Values) -> Config:
    """The same of a Mixtral."""
    experts = hf.experts(values, "intermediate_size", "num_local_experts")
    return replace(config(values), experts=experts)


PLACES = hf.PLACES | hf.EXPERTS
INSTEAD = (hf.EXPERTS_IN_ONE, MIXTRAL)
FAMILY = (
    InFolder("mistral", DEFAULTS, config, hf.PLACES),
    InFolder("mixtral", MIXTRAL_DEFAULTS, mixtral_config, PLACES, INSTEAD, does=("num_local_experts",)),
)
