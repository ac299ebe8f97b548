"""Qwen3-Next and Qwen3-Coder-Next (Qwen Team 2025): Qwen3.5 with experts, whose delta nets take what they do of one product, and
of a second one, head of keys by head of keys.
"""

from collections.abc import Callable

from specdec.config import Config, DeltaConfig, known_as
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import qwen35
from specdec.families.config_values import Values
from specdec.families.family import InFolder, InGguf, Keys
from specdec.families.tensor_specs import Groups, Place

DEFAULTS = qwen35.MOE_DEFAULTS | {
    "vocab_size": 151936, "intermediate_size": 5632, "num_hidden_layers": 48, "num_experts_per_tok": 10, "num_experts": 512,
    "norm_topk_prob": True, "mlp_only_layers": None, "decoder_sparse_step": 1,
}  # fmt: skip


def _qkvz(first: int, last: int) -> Callable[[Config], Groups]:
    """Of queries, keys, values and z those parts."""

    def groups(config: Config) -> Groups:
        delta = known_as(config.mixer, DeltaConfig)
        n_values = delta.n_values // delta.n_key_heads
        return Groups(delta.n_key_heads, (delta.key_dim, delta.key_dim, n_values, n_values), first, last)

    return groups


def _ba(first: int, last: int) -> Callable[[Config], Groups]:
    """The same of b and a."""

    def groups(config: Config) -> Groups:
        delta = known_as(config.mixer, DeltaConfig)
        return Groups(delta.n_key_heads, (delta.n_value_heads // delta.n_key_heads,) * 2, first, last)

    return groups


def qkvz(name: str) -> dict[str, Place]:
    """Places of what the first product of that name makes."""
    return {"delta_qkv": Place(name, groups=_qkvz(0, 3)), "delta_z": Place(name, groups=_qkvz(3, 4))}


def ba(name: str) -> dict[str, Place]:
    """The same of the second."""
    return {"delta_b": Place(name, groups=_ba(0, 1)), "delta_a": Place(name, groups=_ba(1, 2))}


def config(values: Values) -> Config:
    """The numbers that a config.json says."""
    return qwen35.moe_config(values, is_normed=values.flag("norm_topk_prob"), dense_layers=hf.dense_layers(values))


def gguf_config(k: Keys) -> Config:
    """The numbers that a GGUF file's keys say."""
    return qwen35.moe_gguf_config(k, in_turns=False)


PLACES = qwen35.MOE_PLACES | qkvz(hf.OF_LAYERS % "linear_attn.in_proj_qkvz") | ba(hf.OF_LAYERS % "linear_attn.in_proj_ba")
GGUF_PLACES = qwen35.MOE_GGUF_PLACES | ba(gguf.OF_LAYERS % "ssm_ba")
FAMILY = (
    InFolder(
        "qwen3_next", DEFAULTS, config, PLACES, (hf.EXPERTS_IN_ONE,), harmless=qwen35.HARMLESS,
        mtp=(qwen35.mtp_places(PLACES, qwen35.MOE_LAYER), qwen35.MTP_EXPERTS_IN_ONE),
        does=("partial_rotary_factor", "num_experts"),
    ),
    InGguf(
        "qwen3next", gguf_config, GGUF_PLACES, (gguf.EXPERTS_IN_ONE, qkvz(gguf.OF_LAYERS % "ssm_in")),  # as older files have it
        mtp=(qwen35.nextn_places(GGUF_PLACES, qwen35.MOE_LAYER), gguf.EXPERTS_IN_ONE), does=(gguf.NEXTN, gguf.EXPERTS),
    ),
)  # fmt: skip
