"""GLM-4.7-Flash (Z.ai 2026): DeepSeek-V3's latent attention and experts, with an MTP head in the same files."""

from specdec.families import deepseek
from specdec.families import hf_common as hf
from specdec.families.config_values import ConfigValues
from specdec.families.family import HFFamily
from specdec.model_config import ModelConfig

DEFAULTS = deepseek.V3_DEFAULTS | {
    "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240, "moe_intermediate_size": 1536,
    "num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20, "n_routed_experts": 64,
    "routed_scaling_factor": 1.8, "q_lora_rank": 768, "v_head_dim": 256, "qk_nope_head_dim": 192, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 4, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "mlp_layer_types": None,
    "first_k_dense_replace": None,
}  # fmt: skip
DENSE, SPARSE = "dense", "sparse"


def count_dense_layers(values: ConfigValues) -> int:
    """Return the number of layers without experts, which must be the first ones; transformers takes one by default.

    Raises:
        CheckpointError: A value is not valid, or two keys differ.
    """
    types, n_layers = values["mlp_layer_types"], values.get_int("num_hidden_layers", max_value=hf.MAX_LAYERS)
    n = 1
    if types is not None:
        types = values.get_per_layer("mlp_layer_types", n_layers, (DENSE, SPARSE), f"{DENSE} or {SPARSE}")
        n = types.count(DENSE)
        if DENSE in types[n:]:
            raise values.make_error("mlp_layer_types", f"{DENSE} in the first layers only")
    values.require("first_k_dense_replace", n, None)
    return n


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a GLM-4.7-Flash model from the keys of config.json."""
    values.require("rope_interleave", True, None)
    experts = deepseek.parse_sigmoid_experts(values, count_dense_layers(values))
    return ModelConfig(**hf.parse_base_fields(values) | deepseek.parse_latent_attention(values), experts=experts)


FAMILY = (
    HFFamily(
        "glm4_moe_lite", DEFAULTS, parse_config, deepseek.HF_TENSORS, (hf.FUSED_EXPERT_TENSORS,),
        mtp_specs=(deepseek.HF_MTP_TENSORS, hf.FUSED_EXPERT_TENSORS), supported_keys=deepseek.HF_SUPPORTED_KEYS,
    ),
)  # fmt: skip
