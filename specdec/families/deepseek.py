"""DeepSeek-V2 (DeepSeek-AI 2024, arXiv:2405.04434), DeepSeek-V3 (2024, arXiv:2412.19437) and GLM-4.7-Flash (Z.ai 2026).

They have latent attention and experts. DeepSeek-V2-Lite is of the first kind; Moonlight (Moonshot AI 2025, arXiv:2502.16982) and
GLM-4.7-Flash are of the second. V2 scores experts by softmax, V3 by sigmoid with a bias for the choice. Shared experts process
all tokens, and the first layers have no experts. llama.cpp has one architecture for all.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from specdec.argument_checks import JSONDict
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import tensor_specs as specs
from specdec.families.config_values import MAX_DIM, ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
from specdec.layers.rope import get_yarn_attention_factor
from specdec.model_config import (
    AttentionConfig,
    ExpertsConfig,
    LatentAttentionConfig,
    ModelConfig,
    RopeConfig,
    YarnRopeScaling,
    require_type,
)

V2_DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 102400, "moe_intermediate_size": 1407, "first_k_dense_replace": 0, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "n_group": None, "topk_group": None, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "routed_scaling_factor": 1.0, "topk_method": "greedy",
    "norm_topk_prob": False, "scoring_func": "softmax",
}  # fmt: skip
V3_DEFAULTS = V2_DEFAULTS | {
    "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "max_position_embeddings": 4096,
    "bos_token_id": 0, "eos_token_id": 1, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "rope_interleave": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}  # fmt: skip
GLM4_DEFAULTS = V3_DEFAULTS | {
    "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240, "moe_intermediate_size": 1536,
    "num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20, "n_routed_experts": 64,
    "routed_scaling_factor": 1.8, "q_lora_rank": 768, "v_head_dim": 256, "qk_nope_head_dim": 192, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 4, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "mlp_layer_types": None,
    "first_k_dense_replace": None,
}  # fmt: skip
DENSE, SPARSE = "dense", "sparse"  # of mlp_layer_types
SIGMOID_SUM_EPS = 1e-20
GGUF_LOG_MULTIPLIER_KEY, GGUF_LOG_MULTIPLIER_UNIT = "rope.scaling.yarn_log_multiplier", 0.1  # times mscale_all_dim
LATENT_TENSORS = ("wq", "wq_a", "q_a_norm", "wq_b", "wkv_a", "kv_a_norm", "wk_b", "wv_b")


def get_key_rows(config: ModelConfig) -> specs.RowGroups:
    """Return the rows that make keys in the matrix that makes keys and values of latent vectors."""
    latent = require_type(config.attention.latent, LatentAttentionConfig)
    return specs.RowGroups(config.n_heads, (latent.nope_dim, latent.value_dim), 0, 1)


def get_value_rows(config: ModelConfig) -> specs.RowGroups:
    """Return the rows that make values in the matrix that makes keys and values of latent vectors."""
    return get_key_rows(config)._replace(first_part=1, last_part=2)


def make_key_value_specs(name: str) -> dict[str, specs.TensorSpec]:
    """Return the specs of the key and value matrices of each head, which are stored in one matrix of this name."""
    spec = specs.TensorSpec(name, is_per_expert=True)
    return {
        "wk_b": spec._replace(make_row_groups=get_key_rows, is_transposed=True),
        "wv_b": spec._replace(make_row_groups=get_value_rows),
    }


HF_TENSORS = (
    specs.replace(hf.TENSORS, ("wq",), is_neox_style=False)
    | hf.EXPERT_TENSORS
    | hf.SHARED_EXPERTS_TENSORS
    | make_key_value_specs(hf.LAYER_WEIGHT % "self_attn.kv_b_proj")
    | specs.make("layers.{}.mlp.gate.%s", router_bias="e_score_correction_bias")
    | specs.make(
        hf.LAYER_WEIGHT, wq_a="self_attn.q_a_proj", q_a_norm="self_attn.q_a_layernorm", wq_b="self_attn.q_b_proj",
        wkv_a="self_attn.kv_a_proj_with_mqa", kv_a_norm="self_attn.kv_a_layernorm",
    )
)  # fmt: skip
GGUF_TENSORS = (
    gguf.INTERLEAVED_ROPE_TENSORS
    | gguf.EXPERT_TENSORS
    | make_key_value_specs(gguf.LAYER_WEIGHT % "attn_kv_b")  # in older files
    | specs.make(
        gguf.LAYER_WEIGHT, wq_a="attn_q_a", q_a_norm="attn_q_a_norm", wq_b="attn_q_b", wkv_a="attn_kv_a_mqa",
        kv_a_norm="attn_kv_a_norm",
    )
)  # fmt: skip
GGUF_KEY_VALUE_TENSORS = specs.make_per_expert(gguf.LAYER_WEIGHT, wk_b="attn_k_b", wv_b="attn_v_b")
MTP_LAYER_TENSORS = (
    "rms_att", *LATENT_TENSORS, "wo", "rms_ffn", *hf.EXPERT_TENSORS, "router_bias", *hf.SHARED_EXPERTS_TENSORS,
)  # fmt: skip
HF_MTP_TENSORS = {name: HF_TENSORS[name] for name in MTP_LAYER_TENSORS} | specs.make(
    hf.LAYER_WEIGHT, fc="eh_proj", rms_emb="enorm", rms_hidden="hnorm", rms_final="shared_head.norm"
)
GGUF_MTP_TENSORS = gguf.make_mtp_specs(GGUF_TENSORS, MTP_LAYER_TENSORS)


def parse_latent_attention(values: ConfigValues) -> JSONDict:
    """Parse the keys of latent attention, and return a dict of fields of `ModelConfig`.

    Raises:
        CheckpointError: A value is not supported.
    """
    hf.reject_biases(values)
    values.require("num_key_value_heads", values["num_attention_heads"], None)
    latent = LatentAttentionConfig(
        kv_rank=values.get_int("kv_lora_rank", max_value=MAX_DIM),
        nope_dim=values.get_int("qk_nope_head_dim", max_value=MAX_DIM),
        rope_dim=values.get_int("qk_rope_head_dim", max_value=MAX_DIM),
        value_dim=values.get_int("v_head_dim", max_value=MAX_DIM),
        q_rank=0 if values["q_lora_rank"] is None else values.get_int("q_lora_rank", max_value=MAX_DIM),
    )
    rope_values = hf.get_rope_values(values)
    rope_values.require("rope_type", "default", "yarn")
    rope, share = hf.parse_rope(values, rope_values), 0.0
    if rope.scaling:
        share = rope_values.get_float("mscale_all_dim", 0, 1e6, 0.0)
    return make_latent_fields(latent, rope, share)


def make_latent_fields(latent: LatentAttentionConfig, rope: RopeConfig, scale_share: float) -> JSONDict:
    """Return the fields of `ModelConfig` for latent attention.

    Args:
        latent: Sizes of latent attention.
        rope: RoPE's config.
        scale_share: Share of YaRN's factor by which the square root of the scores' scale is multiplied (mscale_all_dim); 0: none.
    """
    scale = 0.0
    if scale_share and isinstance(rope.scaling, YarnRopeScaling):
        factor = get_yarn_attention_factor(rope.scaling.factor, scale_share)
        scale = float(np.float32(factor * factor / np.sqrt(latent.head_dim)))
    attention = AttentionConfig(replace(rope, dim=latent.rope_dim), scale=scale, latent=latent)
    return {"n_kv_heads": 1, "head_dim": latent.head_dim, "attention": attention}


def parse_experts(
    values: ConfigValues, n_dense_layers: int, count_key: str = "n_routed_experts", **more: Any
) -> ExpertsConfig | None:
    """Return the `ExpertsConfig` of a model whose first n_dense_layers layers have none; None if no layer has experts.

    Args:
        values: The keys of config.json.
        n_dense_layers: Number of layers without experts.
        count_key: The key of the number of experts.
        more: Other fields of `ExpertsConfig`.

    Raises:
        CheckpointError: A value is not valid.
    """
    if n_dense_layers >= values.get_int("num_hidden_layers", max_value=hf.MAX_LAYERS):
        return None
    values.require("moe_layer_freq", None, 1)
    experts = hf.parse_experts(
        values, "moe_intermediate_size", count_key, dense_layers=tuple(range(n_dense_layers)),
        routed_scaling_factor=values.get_float("routed_scaling_factor", 0, 1e6), **more,
    )  # fmt: skip
    return replace(experts, shared_hidden_dim=experts.hidden_dim * values.get_int("n_shared_experts", max_value=MAX_DIM))


def parse_groups(values: ConfigValues) -> JSONDict:
    """Return the fields of `ExpertsConfig` about groups of experts.

    Raises:
        CheckpointError: A value is not valid.
    """
    return {"n_groups": values.get_int("n_group"), "n_groups_used": values.get_int("topk_group")}


def parse_v2_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a DeepSeek-V2 model from the keys of config.json."""
    values.require("topk_method", "greedy", "group_limited_greedy")
    values.require("scoring_func", "softmax", None)
    values.require("norm_topk_prob", False, None)  # transformers ignores it
    groups = parse_groups(values) if values["topk_method"] == "group_limited_greedy" else {}
    experts = parse_experts(values, values.get_count("first_k_dense_replace"), norm_topk_prob=False, **groups)
    return ModelConfig(**hf.parse_base_fields(values) | parse_latent_attention(values), experts=experts)


def parse_v3_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a model like DeepSeek-V3 from the keys of config.json."""
    values.require("rope_interleave", True, None)
    values.require("topk_method", "noaux_tc", None)
    values.require("scoring_func", "sigmoid", None)
    experts = parse_experts(
        values, count_dense_layers(values), norm_topk_prob=values.get_bool("norm_topk_prob"), is_sigmoid=True,
        has_selection_bias=True, sum_eps=SIGMOID_SUM_EPS, **parse_groups(values),
    )  # fmt: skip
    return ModelConfig(**hf.parse_base_fields(values) | parse_latent_attention(values), experts=experts)


def count_dense_layers(values: ConfigValues) -> int:
    """Return the number of layers without experts, which are the first ones.

    In GLM-4.7-Flash, whose files have a list of types, transformers takes one by default.

    Raises:
        CheckpointError: A value is not valid, or two keys differ.
    """
    if "mlp_layer_types" not in values:
        return values.get_count("first_k_dense_replace")
    n = 1
    if values["mlp_layer_types"] is not None:
        n_layers = values.get_int("num_hidden_layers", max_value=hf.MAX_LAYERS)
        types = values.get_per_layer("mlp_layer_types", n_layers, (DENSE, SPARSE), f"{DENSE} or {SPARSE}")
        n = types.count(DENSE)
        if DENSE in types[n:]:
            raise values.make_error("mlp_layer_types", f"{DENSE} in the first layers only")
    values.require("first_k_dense_replace", n, None)
    return n


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a model with llama.cpp's architecture deepseek2 from a GGUF file's metadata.

    In older files, the length of a key is that of a head. In newer ones, it is that of a cached row; a head's has another name.
    """
    head_dim, value_dim = (
        metadata.get_int(f"{key}_mla" if f"{key}_mla" in metadata else key, max_value=MAX_DIM)
        for key in ("attention.key_length", "attention.value_length")
    )
    rope_dim = metadata.get_int("rope.dimension_count", max_value=MAX_DIM)
    if rope_dim >= head_dim:
        raise metadata.make_error("rope.dimension_count", f"less than {head_dim}, a head's length")
    latent = LatentAttentionConfig(
        kv_rank=metadata.get_int("attention.kv_lora_rank", max_value=MAX_DIM),
        nope_dim=head_dim - rope_dim,
        rope_dim=rope_dim,
        value_dim=value_dim,
        q_rank=metadata.get_count("attention.q_lora_rank"),
    )
    rope = gguf.parse_rope(metadata, rope_dim, head_dim)
    share = metadata.get_float(GGUF_LOG_MULTIPLIER_KEY, 0, 1e6, 0.0) / GGUF_LOG_MULTIPLIER_UNIT
    if share and rope.scaling:
        # llama.cpp, too, takes mscale for equal to mscale_all_dim, so that rotated rows have no factor of their own. The share is
        # rounded, since a float32 of a tenth of it is stored.
        rope, share = replace(rope, attention_factor=1.0), round(share, 6)
    return ModelConfig(
        **{**metadata.common_fields, **make_latent_fields(latent, rope, share)},
        norm_eps=metadata.get_float("attention.layer_norm_rms_epsilon", 0, 1),
        experts=parse_gguf_experts(metadata),
    )


def parse_gguf_experts(metadata: GGUFMetadata) -> ExpertsConfig | None:
    """Return the `ExpertsConfig` of a GGUF file's metadata; None if no layer has experts.

    Older files do not say how experts are scored: by sigmoid if there is a bias for the choice, else by softmax. The size of the
    shared experts is that of their tensors, since the keys of a Ling 2.0 with two of them count them twice.

    Raises:
        CheckpointError: A value is not valid.
    """
    if metadata[gguf.EXPERT_COUNT_KEY] in (0, None):
        return None
    n_layers, has_bias = metadata.common_fields["n_layers"], gguf.has_selection_bias(metadata)
    metadata.require(gguf.GATING_FUNC_KEY, gguf.SIGMOID, gguf.SOFTMAX, 0, None)
    is_sigmoid = metadata[gguf.GATING_FUNC_KEY] == gguf.SIGMOID or (metadata[gguf.GATING_FUNC_KEY] in (0, None) and has_bias)
    experts = gguf.parse_experts(
        metadata, norm_topk_prob=metadata.get_bool("expert_weights_norm", False), is_sigmoid=is_sigmoid,
        has_selection_bias=has_bias, n_groups=metadata.get_count("expert_group_count") or 1,
        n_groups_used=metadata.get_count("expert_group_used_count") or 1, sum_eps=SIGMOID_SUM_EPS,
    )  # fmt: skip
    if len(experts.dense_layers) == n_layers:
        return None
    shared = (gguf.EXPERT_TENSORS["shared_w1"].name.format(i) for i in range(n_layers))
    found = next((name for name in shared if name in metadata.tensors), None)
    return replace(experts, shared_hidden_dim=metadata.tensors.get_shape(found)[0] if found else 0)


def list_unused_gguf(config: ModelConfig) -> Iterator[str]:
    """Return the names of tensors that a GGUF file may have but the model does not need: keys and values in one matrix, too."""
    return (gguf.LAYER_WEIGHT.format(i) % "attn_kv_b" for i in range(config.n_layers))


HF_FAMILY = HFFamily(
    "deepseek_v2", V2_DEFAULTS, parse_v2_config, HF_TENSORS, (hf.FUSED_EXPERT_TENSORS,), supported_keys=hf.EXPERT_COUNT_KEYS
)
HF_V3_FAMILY = replace(
    HF_FAMILY, name="deepseek_v3", defaults=V3_DEFAULTS, parse_config=parse_v3_config,
    mtp_specs=(HF_MTP_TENSORS, hf.FUSED_EXPERT_TENSORS),
)  # fmt: skip
FAMILY = (
    HF_FAMILY,
    HF_V3_FAMILY,
    replace(HF_V3_FAMILY, name="glm4_moe_lite", defaults=GLM4_DEFAULTS),
    GGUFFamily(
        "deepseek2", parse_gguf_config, GGUF_TENSORS, (gguf.FUSED_EXPERT_TENSORS, GGUF_KEY_VALUE_TENSORS),
        mtp_specs=(GGUF_MTP_TENSORS, gguf.FUSED_EXPERT_TENSORS, GGUF_KEY_VALUE_TENSORS),
        supported_keys=(gguf.GATING_FUNC_KEY, gguf.NEXTN_LAYERS_KEY, "expert_group_count"),
        list_unused=list_unused_gguf,
    ),
)  # fmt: skip
