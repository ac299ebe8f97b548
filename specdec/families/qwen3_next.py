"""Qwen3-Next and Qwen3-Coder-Next (Qwen Team 2025): Qwen3.5 with experts, with another layout of the delta net's projections.

Two fused projections hold the inputs of the delta nets, grouped by key head.
"""

from collections.abc import Callable

from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import qwen35
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily, RowGroups, TensorSpec
from specdec.mixer_config import DeltaNetConfig
from specdec.model_config import ModelConfig, require_type

DEFAULTS = qwen35.MOE_DEFAULTS | {
    "vocab_size": 151936, "intermediate_size": 5632, "num_hidden_layers": 48, "num_experts_per_tok": 10, "num_experts": 512,
    "norm_topk_prob": True, "mlp_only_layers": None, "decoder_sparse_step": 1,
}  # fmt: skip


def _make_qkvz_groups(first: int, last: int) -> Callable[[ModelConfig], RowGroups]:
    """Return a function from a layer's config to row groups of the projection of queries, keys, values and z.

    The parts from index `first` to before `last` are selected, in that order.
    """

    def make_groups(config: ModelConfig) -> RowGroups:
        delta = require_type(config.mixer, DeltaNetConfig)
        value_rows = delta.total_value_dim // delta.n_key_heads
        return RowGroups(delta.n_key_heads, (delta.key_head_dim, delta.key_head_dim, value_rows, value_rows), first, last)

    return make_groups


def _make_ba_groups(first: int, last: int) -> Callable[[ModelConfig], RowGroups]:
    """Return a function from a layer's config to row groups of the projection of the delta net's b and a.

    The parts from index `first` to before `last` are selected, in that order.
    """

    def make_groups(config: ModelConfig) -> RowGroups:
        delta = require_type(config.mixer, DeltaNetConfig)
        return RowGroups(delta.n_key_heads, (delta.n_value_heads // delta.n_key_heads,) * 2, first, last)

    return make_groups


def make_qkvz_specs(name: str) -> dict[str, TensorSpec]:
    """Return the specs of the tensors that are fused in the projection with this name: queries, keys and values; and z."""
    return {
        "delta_qkv": TensorSpec(name, make_row_groups=_make_qkvz_groups(0, 3)),
        "delta_z": TensorSpec(name, make_row_groups=_make_qkvz_groups(3, 4)),
    }


def make_ba_specs(name: str) -> dict[str, TensorSpec]:
    """Return the specs of the tensors that are fused in the projection with this name: the delta net's b and a."""
    return {
        "delta_b": TensorSpec(name, make_row_groups=_make_ba_groups(0, 1)),
        "delta_a": TensorSpec(name, make_row_groups=_make_ba_groups(1, 2)),
    }


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a Qwen3-Next model from the keys of config.json."""
    return qwen35.parse_moe_config(
        values, norm_topk_prob=values.get_bool("norm_topk_prob"), dense_layers=hf.get_dense_layers(values)
    )


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a Qwen3-Next model from a GGUF file's metadata."""
    return qwen35.parse_moe_gguf_config(metadata, tiled_heads=False)


HF_TENSORS = (
    qwen35.HF_MOE_TENSORS
    | make_qkvz_specs(hf.LAYER_WEIGHT % "linear_attn.in_proj_qkvz")
    | make_ba_specs(hf.LAYER_WEIGHT % "linear_attn.in_proj_ba")
)
GGUF_TENSORS = qwen35.GGUF_MOE_TENSORS | make_ba_specs(gguf.LAYER_WEIGHT % "ssm_ba")
FAMILY = (
    HFFamily(
        "qwen3_next", DEFAULTS, parse_config, HF_TENSORS, (hf.FUSED_EXPERT_TENSORS,), ignored_names=qwen35.IGNORED_NAMES,
        mtp_specs=(qwen35.make_mtp_specs(HF_TENSORS, qwen35.MTP_MOE_LAYER_TENSORS), qwen35.MTP_FUSED_EXPERT_TENSORS),
        supported_keys=("partial_rotary_factor", "num_experts"),
    ),
    GGUFFamily(
        "qwen3next", parse_gguf_config, GGUF_TENSORS,
        (gguf.FUSED_EXPERT_TENSORS, make_qkvz_specs(gguf.LAYER_WEIGHT % "ssm_in")),  # older files
        mtp_specs=(qwen35.make_nextn_specs(GGUF_TENSORS, qwen35.MTP_MOE_LAYER_TENSORS), gguf.FUSED_EXPERT_TENSORS),
        supported_keys=(gguf.NEXTN_LAYERS_KEY, gguf.EXPERT_COUNT_KEY),
    ),
)  # fmt: skip
