"""OLMoE (Muennighoff et al. 2024, arXiv:2409.02060): experts in all layers, and norms over all heads of a token."""

from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
from specdec.model_config import ModelConfig

DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": 50279,
    "num_experts_per_tok": 8, "num_experts": 64, "norm_topk_prob": False,
}  # fmt: skip


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of an OLMoE model from the keys of config.json."""
    hf.reject_window(values)
    values.require("mlp_bias", False)
    experts = hf.parse_experts(values, "intermediate_size", norm_topk_prob=values.get_bool("norm_topk_prob"))
    return ModelConfig(**hf.parse_base_fields(values), attention=hf.parse_attention(values, qk_norm="whole"), experts=experts)


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of an OLMoE model from a GGUF file's metadata.

    The weights of the chosen experts are not normalized, as in llama.cpp.
    """
    return ModelConfig(
        **gguf.parse_base_fields(metadata, qk_norm="whole") | {"experts": gguf.parse_experts(metadata, norm_topk_prob=False)}
    )


HF_TENSORS = hf.TENSORS | hf.EXPERT_TENSORS
FAMILY = (
    HFFamily("olmoe", DEFAULTS, parse_config, HF_TENSORS, (hf.FUSED_EXPERT_TENSORS,), supported_keys=("num_experts",)),
    GGUFFamily("olmoe", parse_gguf_config, gguf.TENSORS | gguf.EXPERT_TENSORS, supported_keys=(gguf.EXPERT_COUNT_KEY,)),
)
