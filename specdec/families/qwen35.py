"""Qwen3.5 (Qwen Team 2026): gated delta nets in most layers, gated attention in the others, and an MTP head in the same files.

Qwen3.5 and 3.6 with experts are otherwise the same; a shared expert processes every token. In Qwen3-Next and Qwen3-Coder-Next
(2025), two fused projections hold the inputs of the delta nets, grouped by key head.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import tensor_specs as specs
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
from specdec.families.recurrent_common import DECAY_RATES
from specdec.mixer_config import DeltaNetConfig
from specdec.model_config import LayerConfig, ModelConfig, make_layer_configs, require_type

DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 248320, "intermediate_size": 12288, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 32768, "bos_token_id": None, "eos_token_id": None, "partial_rotary_factor": 0.25,
    "layer_types": None, "full_attention_interval": 4, "attn_output_gate": True, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
MOE_DEFAULTS = DEFAULTS | {
    "hidden_size": 2048, "intermediate_size": 512, "num_hidden_layers": 40, "num_key_value_heads": 2,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 8, "num_experts": 256,
}  # fmt: skip
NEXT_DEFAULTS = MOE_DEFAULTS | {
    "vocab_size": 151936, "intermediate_size": 5632, "num_hidden_layers": 48, "num_experts_per_tok": 10, "num_experts": 512,
    "norm_topk_prob": True, "mlp_only_layers": None, "decoder_sparse_step": 1,
}  # fmt: skip
ONE_PLUS_NORMS = ("q_norm", "k_norm", "rms_att", "rms_ffn", "rms_final")
HF_TENSORS = specs.replace(hf.TENSORS, ONE_PLUS_NORMS, transform=specs.ONE_PLUS) | {
    "wq": specs.TensorSpec("layers.{}.self_attn.q_proj.weight", is_neox_style=True, head_interleave=(0, 2)),
    "wg": specs.TensorSpec("layers.{}.self_attn.q_proj.weight", head_interleave=(1, 2)),
    **specs.make(
        "layers.{}.linear_attn.%s.weight", delta_qkv="in_proj_qkv", delta_z="in_proj_z", delta_b="in_proj_b",
        delta_a="in_proj_a", delta_out="out_proj", delta_norm="norm",
    ),
    "conv": specs.TensorSpec("layers.{}.linear_attn.conv1d.weight", transform=specs.CONV_TAPS),
    "rate": specs.TensorSpec("layers.{}.linear_attn.A_log", transform=DECAY_RATES),
    "dt": specs.TensorSpec("layers.{}.linear_attn.dt_bias"),
}  # fmt: skip
GGUF_TENSORS = gguf.TENSORS | {
    "wq": specs.TensorSpec("blk.{}.attn_q.weight", is_neox_style=True, head_interleave=(0, 2)),
    "wg": specs.TensorSpec("blk.{}.attn_q.weight", head_interleave=(1, 2)),
    **specs.make(
        gguf.LAYER_WEIGHT, rms_ffn="post_attention_norm", delta_qkv="attn_qkv", delta_z="attn_gate", delta_b="ssm_beta",
        delta_a="ssm_alpha", delta_out="ssm_out", delta_norm="ssm_norm",
    ),
    "conv": specs.TensorSpec("blk.{}.ssm_conv1d.weight", transform=specs.TRANSPOSED_CONV_TAPS),
    "rate": specs.TensorSpec("blk.{}.ssm_a"),
    "dt": specs.TensorSpec("blk.{}.ssm_dt.bias"),
}  # fmt: skip
IGNORED_NAMES = re.compile(r"(visual|mtp)\..*")
MTP_LAYER_TENSORS = ("rms_att", "wq", "wk", "wv", "wg", "wo", "q_norm", "k_norm", "rms_ffn", "w1", "w2", "w3")


def make_mtp_specs(own: Mapping[str, specs.TensorSpec], layer_tensors: Iterable[str]) -> dict[str, specs.TensorSpec]:
    """Return the specs of the tensors of an MTP draft head in a folder: those of its layer, then its own.

    Args:
        own: Specs of the model's tensors, which the layer's tensors are named after.
        layer_tensors: Our names of the layer's tensors.
    """
    norms = specs.make("%s.weight", rms_emb="pre_fc_norm_embedding", rms_hidden="pre_fc_norm_hidden", rms_final="norm")
    mtp_specs = {name: own[name] for name in layer_tensors} | specs.make("%s.weight", fc="fc")
    mtp_specs |= specs.replace(norms, norms, transform=specs.ONE_PLUS)
    return {name: spec._replace(name=f"mtp.{spec.name}") for name, spec in mtp_specs.items()}


def get_qkvz_rows(config: ModelConfig, first: int, last: int) -> specs.RowGroups:
    """Return the rows of parts `first` to last - 1 in the projection of queries, keys, values and z, grouped by key head."""
    delta = require_type(config.mixer, DeltaNetConfig)
    value_rows = delta.total_value_dim // delta.n_key_heads
    return specs.RowGroups(delta.n_key_heads, (delta.key_head_dim, delta.key_head_dim, value_rows, value_rows), first, last)


def get_ba_rows(config: ModelConfig, first: int, last: int) -> specs.RowGroups:
    """Return the rows of parts `first` to last - 1 in the projection of the delta net's b and a, grouped by key head."""
    delta = require_type(config.mixer, DeltaNetConfig)
    return specs.RowGroups(delta.n_key_heads, (delta.n_value_heads // delta.n_key_heads,) * 2, first, last)


def make_qkvz_specs(name: str) -> dict[str, specs.TensorSpec]:
    """Return the specs of the tensors that are fused in the projection with this name: queries, keys and values; and z."""
    return {
        "delta_qkv": specs.TensorSpec(name, make_row_groups=partial(get_qkvz_rows, first=0, last=3)),
        "delta_z": specs.TensorSpec(name, make_row_groups=partial(get_qkvz_rows, first=3, last=4)),
    }


def make_ba_specs(name: str) -> dict[str, specs.TensorSpec]:
    """Return the specs of the tensors that are fused in the projection with this name: the delta net's b and a."""
    return {
        "delta_b": specs.TensorSpec(name, make_row_groups=partial(get_ba_rows, first=0, last=1)),
        "delta_a": specs.TensorSpec(name, make_row_groups=partial(get_ba_rows, first=1, last=2)),
    }


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a dense Qwen3.5 model from the keys of config.json.

    RoPE sections, which have different positions in images, have the same position in text.
    """
    values.require("attn_output_gate", True)
    hf.reject_window(values)
    hf.reject_biases(values)
    n_layers = values.get_int("num_hidden_layers", max_value=hf.MAX_LAYERS)
    full = hf.get_full_attention_layers(values, n_layers, "full_attention_interval", hf.LINEAR_ATTENTION)
    delta_layers = [i for i in range(n_layers) if i not in full]
    delta = DeltaNetConfig(
        n_key_heads=values.get_int("linear_num_key_heads"),
        n_value_heads=values.get_int("linear_num_value_heads"),
        key_head_dim=values.get_int("linear_key_head_dim"),
        value_head_dim=values.get_int("linear_value_head_dim"),
        kernel_size=values.get_int("linear_conv_kernel_dim"),
    )
    rope = hf.parse_plain_partial_rope(values, has_sections=True)
    attention = hf.parse_attention(values, rope, qk_norm=True, gate=True)
    layers = make_layer_configs(LayerConfig(mixer=delta), delta_layers, n_layers)
    return ModelConfig(**hf.parse_base_fields(values), attention=attention, layers=layers)


def parse_moe_config(values: ConfigValues, **more: Any) -> ModelConfig:
    """Build the `ModelConfig` of a Qwen3.5 model with experts from config.json.

    Args:
        values: The keys of config.json.
        more: Other fields of `ExpertsConfig`.
    """
    shared = values.get_int("shared_expert_intermediate_size")
    more |= {"shared_hidden_dim": shared, "shared_gate": True}
    return replace(parse_config(values), experts=hf.parse_experts(values, "moe_intermediate_size", **more))


def parse_gguf_config(metadata: GGUFMetadata, tiled_heads: bool = True) -> ModelConfig:
    """Build the `ModelConfig` of a dense Qwen3.5 model from a GGUF file's metadata.

    Args:
        metadata: The file's metadata.
        tiled_heads: Whether value heads that share a key head are interleaved.

    Raises:
        CheckpointError: A value is not valid.
    """
    n_layers, recurrent_key = metadata.common_fields["n_layers"], "attention.recurrent_layers"
    interval = metadata.get_int("full_attention_interval", 4)
    is_recurrent, n = metadata[recurrent_key], n_layers + metadata.get_count(gguf.NEXTN_LAYERS_KEY)
    if is_recurrent is None:
        is_recurrent = [(i + 1) % interval != 0 for i in range(n_layers)]
    elif (
        not isinstance(is_recurrent, list)
        or len(is_recurrent) not in (n_layers, n)
        or not all(type(each) is bool for each in is_recurrent)
    ):
        raise metadata.make_error(recurrent_key, f"true or false for each of {n} layers")
    value_dim, n_value_heads, n_key_heads = (
        metadata.get_int(f"ssm.{key}") for key in ("inner_size", "time_step_rank", "group_count")
    )
    if value_dim % n_value_heads:
        raise metadata.make_error("ssm.inner_size", f"a multiple of {n_value_heads}, the heads")
    delta = DeltaNetConfig(
        n_key_heads=n_key_heads,
        n_value_heads=n_value_heads,
        key_head_dim=metadata.get_int("ssm.state_size"),
        value_head_dim=value_dim // n_value_heads,
        kernel_size=metadata.get_int("ssm.conv_kernel"),
        tiled_heads=tiled_heads and n_key_heads != n_value_heads,
    )
    layers = make_layer_configs(LayerConfig(mixer=delta), [i for i in range(n_layers) if is_recurrent[i]], n_layers)
    return ModelConfig(**gguf.parse_base_fields(metadata, has_partial_rope=True, qk_norm=True, gate=True), layers=layers)


def parse_moe_gguf_config(metadata: GGUFMetadata, tiled_heads: bool = True) -> ModelConfig:
    """Build the `ModelConfig` of a Qwen3.5 model with experts from a GGUF file's metadata; see `parse_gguf_config`."""
    return replace(parse_gguf_config(metadata, tiled_heads), experts=gguf.parse_experts(metadata, shared_gate=True))


def parse_next_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a Qwen3-Next model from the keys of config.json."""
    return parse_moe_config(values, norm_topk_prob=values.get_bool("norm_topk_prob"), dense_layers=hf.get_dense_layers(values))


def parse_next_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a Qwen3-Next model from a GGUF file's metadata."""
    return parse_moe_gguf_config(metadata, tiled_heads=False)


HF_MOE_TENSORS, GGUF_MOE_TENSORS = HF_TENSORS | hf.EXPERT_TENSORS | hf.SHARED_EXPERT_TENSORS, GGUF_TENSORS | gguf.EXPERT_TENSORS
MTP_FUSED_EXPERT_TENSORS = {name: spec._replace(name="mtp." + spec.name) for name, spec in hf.FUSED_EXPERT_TENSORS.items()}
MTP_MOE_LAYER_TENSORS = (
    *[name for name in MTP_LAYER_TENSORS if name not in ("w1", "w2", "w3")], *hf.EXPERT_TENSORS, *hf.SHARED_EXPERT_TENSORS,
)  # fmt: skip
HF_NEXT_TENSORS = (
    HF_MOE_TENSORS
    | make_qkvz_specs(hf.LAYER_WEIGHT % "linear_attn.in_proj_qkvz")
    | make_ba_specs(hf.LAYER_WEIGHT % "linear_attn.in_proj_ba")
)
GGUF_NEXT_TENSORS = GGUF_MOE_TENSORS | make_ba_specs(gguf.LAYER_WEIGHT % "ssm_ba")
GGUF_FUSED_QKVZ = make_qkvz_specs(gguf.LAYER_WEIGHT % "ssm_in")  # of older files
HF_FAMILY = HFFamily(
    "qwen3_5_text", DEFAULTS, parse_config, HF_TENSORS, mtp_specs=(make_mtp_specs(HF_TENSORS, MTP_LAYER_TENSORS),),
    ignored_names=IGNORED_NAMES, supported_keys=("partial_rotary_factor",), multimodal_types={"qwen3_5": False},
)  # fmt: skip
GGUF_FAMILY = GGUFFamily(
    "qwen35", parse_gguf_config, GGUF_TENSORS, mtp_specs=(gguf.make_mtp_specs(GGUF_TENSORS, MTP_LAYER_TENSORS),),
    supported_keys=(gguf.NEXTN_LAYERS_KEY,),
)  # fmt: skip
FAMILY = (
    HF_FAMILY,
    replace(
        HF_FAMILY, name="qwen3_5_moe_text", defaults=MOE_DEFAULTS, parse_config=parse_moe_config, tensor_specs=HF_MOE_TENSORS,
        alternatives=(hf.FUSED_EXPERT_TENSORS,), multimodal_types={"qwen3_5_moe": False},
        mtp_specs=(make_mtp_specs(HF_MOE_TENSORS, MTP_MOE_LAYER_TENSORS), MTP_FUSED_EXPERT_TENSORS),
    ),
    replace(
        HF_FAMILY, name="qwen3_next", defaults=NEXT_DEFAULTS, parse_config=parse_next_config, tensor_specs=HF_NEXT_TENSORS,
        alternatives=(hf.FUSED_EXPERT_TENSORS,), multimodal_types={},
        mtp_specs=(make_mtp_specs(HF_NEXT_TENSORS, MTP_MOE_LAYER_TENSORS), MTP_FUSED_EXPERT_TENSORS),
    ),
    GGUF_FAMILY,
    replace(
        GGUF_FAMILY, name="qwen35moe", parse_config=parse_moe_gguf_config, tensor_specs=GGUF_MOE_TENSORS,
        alternatives=(gguf.FUSED_EXPERT_TENSORS,),
        mtp_specs=(gguf.make_mtp_specs(GGUF_MOE_TENSORS, MTP_MOE_LAYER_TENSORS), gguf.FUSED_EXPERT_TENSORS),
    ),
    replace(
        GGUF_FAMILY, name="qwen3next", parse_config=parse_next_gguf_config, tensor_specs=GGUF_NEXT_TENSORS,
        alternatives=(gguf.FUSED_EXPERT_TENSORS, GGUF_FUSED_QKVZ),
        mtp_specs=(gguf.make_mtp_specs(GGUF_NEXT_TENSORS, MTP_MOE_LAYER_TENSORS), gguf.FUSED_EXPERT_TENSORS),
    ),
)  # fmt: skip
