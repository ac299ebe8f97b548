"""Ling 2.0 and Ring 2.0 (Ling Team 2025, arXiv:2510.22115): grouped query heads with norms, and DeepSeek-V3's experts.

transformers has no file of this family. Keys, tensors and arithmetic are those of the published models' own code
(BailingMoeV2ForCausalLM) and of llama.cpp's bailingmoe2.
"""

from specdec.families import deepseek
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import tensor_specs as specs
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
from specdec.model_config import ModelConfig

DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 157184, "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 20, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 32768, "rope_theta": 600000.0,
    "partial_rotary_factor": 0.5, "bos_token_id": None, "eos_token_id": None, "use_bias": False, "use_qkv_bias": False,
    "use_qk_norm": True, "num_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "moe_intermediate_size": 512, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "moe_router_enable_expert_bias": True, "score_function": "sigmoid",
}  # fmt: skip
HF_TENSORS = (
    hf.TENSORS
    | hf.EXPERT_TENSORS
    | hf.SHARED_EXPERTS_TENSORS
    | specs.make("%s.weight", tok_emb="word_embeddings")
    | specs.make("layers.{}.%s", router_bias="mlp.gate.expert_bias", wo="attention.dense.weight")
    | specs.set_rope_pairs(
        specs.fuse(specs.QKV, hf.LAYER_WEIGHT % "attention.query_key_value")
        | specs.make(hf.LAYER_WEIGHT, q_norm="attention.query_layernorm", k_norm="attention.key_layernorm")
    )
)
GGUF_TENSORS = gguf.TENSORS | gguf.EXPERT_TENSORS | specs.set_rope_pairs(specs.fuse(specs.QKV, gguf.LAYER_WEIGHT % "attn_qkv"))


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a Ling 2.0 model from the keys of config.json."""
    values.require("score_function", "sigmoid")
    for key in ("use_bias", "use_qkv_bias"):
        values.require(key, False)
    for key in ("use_qk_norm", "moe_router_enable_expert_bias", "norm_topk_prob"):
        values.require(key, True)
    experts = deepseek.parse_experts(
        values, values.get_count("first_k_dense_replace"), "num_experts", is_sigmoid=True, has_selection_bias=True,
        sum_eps=deepseek.SIGMOID_SUM_EPS, **deepseek.parse_groups(values),
    )  # fmt: skip
    attention = hf.parse_attention(values, hf.parse_plain_partial_rope(values), qk_norm=True)
    return ModelConfig(**hf.parse_base_fields(values), attention=attention, experts=experts)


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a Ling 2.0 model from a GGUF file's metadata."""
    metadata.require(gguf.GATING_FUNC_KEY, gguf.SIGMOID)
    metadata.require("expert_weights_norm", True)
    fields = gguf.parse_base_fields(metadata, has_partial_rope=True, qk_norm=True)
    return ModelConfig(**{**fields, "experts": deepseek.parse_gguf_experts(metadata)})


FAMILY = (
    HFFamily(
        "bailing_moe_v2", DEFAULTS, parse_config, HF_TENSORS, (hf.FUSED_EXPERT_TENSORS,),
        supported_keys=("partial_rotary_factor", "use_qk_norm"),
        key_aliases={"num_shared_experts": "n_shared_experts"},
    ),
    GGUFFamily(
        "bailingmoe2", parse_gguf_config, GGUF_TENSORS, (gguf.FUSED_EXPERT_TENSORS,),
        supported_keys=(gguf.GATING_FUNC_KEY, "expert_group_count"),
    ),
)  # fmt: skip
