"""OLMoE (Muennighoff et al. 2024, arXiv:2409.02060): experts in all layers, and norms over all heads of a token."""

from ..architectures import Config
from . import folders, ggufs
from .family import InFolder, InGguf, Keys
from .values import Values

DEFAULTS = folders.DEFAULTS | {
    "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": 50279,
    "num_experts_per_tok": 8, "num_experts": 64, "norm_topk_prob": False,
}  # fmt: skip


def config(values: Values) -> Config:
    """The numbers that a config.json says."""
    folders.no_window(values)
    values.must_be("mlp_bias", False)
    experts = folders.experts(values, "intermediate_size", is_normed=values.flag("norm_topk_prob"))
    return Config(**folders.numbers(values), attention=folders.attention(values, qk_norm="whole"), experts=experts)


def gguf_config(k: Keys) -> Config:
    """The numbers that a GGUF file's keys say; what the chosen ones count is as it is, in llama.cpp too."""
    return Config(**ggufs.numbers(k, qk_norm="whole") | {"experts": ggufs.experts(k, is_normed=False)})


PLACES = folders.PLACES | folders.EXPERTS
FAMILY = (
    InFolder("olmoe", DEFAULTS, config, PLACES, (folders.EXPERTS_IN_ONE,), does=("num_experts",)),
    InGguf("olmoe", gguf_config, ggufs.PLACES | ggufs.EXPERTS_PLACES, does=(ggufs.EXPERTS,)),
)
