"""OLMoE (Muennighoff et al. 2024, arXiv:2409.02060): experts in all layers, and norms over all heads of a token."""

from specdec.config import Config
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import Values
from specdec.families.family import InFolder, InGguf, Keys

DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": 50279,
    "num_experts_per_tok": 8, "num_experts": 64, "norm_topk_prob": False,
}  # fmt: skip


def config(values: Values) -> Config:
    """The numbers that a config.json says."""
    hf.no_window(values)
    values.must_be("mlp_bias", False)
    experts = hf.experts(values, "intermediate_size", is_normed=values.flag("norm_topk_prob"))
    return Config(**hf.numbers(values), attention=hf.attention(values, qk_norm="whole"), experts=experts)


def gguf_config(k: Keys) -> Config:
    """The numbers that a GGUF file's keys say; what the chosen ones count is as it is, in llama.cpp too."""
    return Config(**gguf.numbers(k, qk_norm="whole") | {"experts": gguf.experts(k, is_normed=False)})


PLACES = hf.PLACES | hf.EXPERTS
FAMILY = (
    InFolder("olmoe", DEFAULTS, config, PLACES, (hf.EXPERTS_IN_ONE,), does=("num_experts",)),
    InGguf("olmoe", gguf_config, gguf.PLACES | gguf.EXPERTS_PLACES, does=(gguf.EXPERTS,)),
)
