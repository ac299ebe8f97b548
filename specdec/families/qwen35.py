"""Qwen3.5 (Qwen Team 2026): gated delta nets in most layers, gated attention in the others, and an MTP head in the same files.

Qwen3.5 and 3.6 with experts are otherwise the same; a shared expert processes every token.
"""

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import ConfigValues
from specdec.families.family import (
    CONV_TAPS,
    ONE_PLUS,
    TRANSPOSED_CONV_TAPS,
    GGUFFamily,
    GGUFMetadata,
    HFFamily,
    TensorSpec,
    make_tensor_specs,
    replace_in_specs,
)
from specdec.families.hf_common import LINEAR_ATTENTION
from specdec.families.recurrent_common import DECAY_RATES
from specdec.mixer_config import DeltaNetConfig
from specdec.model_config import LayerConfig, ModelConfig, make_layer_configs

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
ONE_PLUS_NORMS = ("q_norm", "k_norm", "rms_att", "rms_ffn", "rms_final")


HF_TENSORS = replace_in_specs(hf.TENSORS, ONE_PLUS_NORMS, transform=ONE_PLUS) | {
    "wq": TensorSpec("layers.{}.self_attn.q_proj.weight", is_neox_style=True, head_interleave=(0, 2)),
    "wg": TensorSpec("layers.{}.self_attn.q_proj.weight", head_interleave=(1, 2)),
    **make_tensor_specs(
        "layers.{}.linear_attn.%s.weight", delta_qkv="in_proj_qkv", delta_z="in_proj_z", delta_b="in_proj_b",
        delta_a="in_proj_a", delta_out="out_proj", delta_norm="norm",
    ),
    "conv": TensorSpec("layers.{}.linear_attn.conv1d.weight", transform=CONV_TAPS),
    "rate": TensorSpec("layers.{}.linear_attn.A_log", transform=DECAY_RATES),
    "dt": TensorSpec("layers.{}.linear_attn.dt_bias"),
}  # fmt: skip
GGUF_TENSORS = gguf.TENSORS | {
    "wq": TensorSpec("blk.{}.attn_q.weight", is_neox_style=True, head_interleave=(0, 2)),
    "wg": TensorSpec("blk.{}.attn_q.weight", head_interleave=(1, 2)),
    **make_tensor_specs(
        gguf.LAYER_WEIGHT, rms_ffn="post_attention_norm", delta_qkv="attn_qkv", delta_z="attn_gate", delta_b="ssm_beta",
        delta_a="ssm_alpha", delta_out="ssm_out", delta_norm="ssm_norm",
    ),
    "conv": TensorSpec("blk.{}.ssm_conv1d.weight", transform=TRANSPOSED_CONV_TAPS),
    "rate": TensorSpec("blk.{}.ssm_a"),
    "dt": TensorSpec("blk.{}.ssm_dt.bias"),
}  # fmt: skip
IGNORED_NAMES = re.compile(r"(visual|mtp)\..*")
MTP_LAYER_TENSORS = ("rms_att", "wq", "wk", "wv", "wg", "wo", "q_norm", "k_norm", "rms_ffn", "w1", "w2", "w3")


def make_mtp_specs(specs: dict[str, TensorSpec], layer_tensors: Collection[str]) -> dict[str, TensorSpec]:
    """Return the specs of the tensors of an MTP draft head in a folder: those of its layer, then its own.

    Args:
        specs: Specs of the model's tensors, which the layer's tensors are named after.
        layer_tensors: Our names of the layer's tensors.
    """
    mtp_specs = make_tensor_specs(
        "%s.weight", fc="fc", rms_emb="pre_fc_norm_embedding", rms_hidden="pre_fc_norm_hidden", rms_final="norm"
    )
    mtp_specs = {name: specs[name] for name in layer_tensors} | replace_in_specs(
        mtp_specs, ("rms_emb", "rms_hidden", "rms_final"), transform=ONE_PLUS
    )
    return {name: spec._replace(name=f"mtp.{spec.name}") for name, spec in mtp_specs.items()}


def make_nextn_specs(specs: dict[str, TensorSpec], layer_tensors: Collection[str]) -> dict[str, TensorSpec]:
    """Return the specs of the tensors of an MTP draft head in a GGUF file: those of its layer, then its own.

    Args:
        specs: Specs of the model's tensors, which the layer's tensors are named after.
        layer_tensors: Our names of the layer's tensors.
    """
    head_specs = make_tensor_specs(
        "blk.{}.nextn.%s.weight", fc="eh_proj", rms_emb="enorm", rms_hidden="hnorm", rms_final="shared_head_norm"
    )
    return {name: specs[name] for name in layer_tensors} | head_specs


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a dense Qwen3.5 model from the keys of config.json.

    RoPE sections, which have different positions in images, have the same position in text.
    """
    values.require("attn_output_gate", True)
    rope = hf.get_rope_values(values)
    rope.require("rope_type", "default")
    partial_rope = hf.parse_partial_rope(rope, values, values, rope)
    hf.reject_window(values)
    hf.reject_biases(values)
    n_layers = values.get_int("num_hidden_layers", max_value=hf.MAX_LAYERS)
    full = hf.get_full_attention_layers(values, n_layers, "full_attention_interval", LINEAR_ATTENTION)
    layers = [i for i in range(n_layers) if i not in full]
    delta = DeltaNetConfig(
        n_key_heads=values.get_int("linear_num_key_heads"),
        n_value_heads=values.get_int("linear_num_value_heads"),
        key_head_dim=values.get_int("linear_key_head_dim"),
        value_head_dim=values.get_int("linear_value_head_dim"),
        kernel_size=values.get_int("linear_conv_kernel_dim"),
    )
    attention = hf.parse_attention(values, partial_rope, qk_norm=True, gate=True)
    return ModelConfig(
        **hf.parse_base_fields(values), attention=attention, layers=make_layer_configs(LayerConfig(mixer=delta), layers, n_layers)
    )


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


HF_MOE_TENSORS, GGUF_MOE_TENSORS = HF_TENSORS | hf.EXPERT_TENSORS | hf.SHARED_EXPERT_TENSORS, GGUF_TENSORS | gguf.EXPERT_TENSORS
MTP_FUSED_EXPERT_TENSORS = {name: spec._replace(name="mtp." + spec.name) for name, spec in hf.FUSED_EXPERT_TENSORS.items()}
MTP_MOE_LAYER_TENSORS = (
    *[name for name in MTP_LAYER_TENSORS if name not in ("w1", "w2", "w3")],
    *hf.EXPERT_TENSORS,
    *hf.SHARED_EXPERT_TENSORS,
)
FAMILY = (
    HFFamily(
        "qwen3_5_text", DEFAULTS, parse_config, HF_TENSORS, mtp_specs=(make_mtp_specs(HF_TENSORS, MTP_LAYER_TENSORS),),
        ignored_names=IGNORED_NAMES,
        supported_keys=("partial_rotary_factor",), multimodal_types={"qwen3_5": False},
    ),
    HFFamily(
        "qwen3_5_moe_text", MOE_DEFAULTS, parse_moe_config, HF_MOE_TENSORS, (hf.FUSED_EXPERT_TENSORS,),
        ignored_names=IGNORED_NAMES,
        mtp_specs=(make_mtp_specs(HF_MOE_TENSORS, MTP_MOE_LAYER_TENSORS), MTP_FUSED_EXPERT_TENSORS),
        supported_keys=("partial_rotary_factor", "num_experts"), multimodal_types={"qwen3_5_moe": False},
    ),
    GGUFFamily("qwen35", parse_gguf_config, GGUF_TENSORS, mtp_specs=(make_nextn_specs(GGUF_TENSORS, MTP_LAYER_TENSORS),),
    supported_keys=(gguf.NEXTN_LAYERS_KEY,)),
    GGUFFamily(
        "qwen35moe", parse_moe_gguf_config, GGUF_MOE_TENSORS, (gguf.FUSED_EXPERT_TENSORS,),
        mtp_specs=(make_nextn_specs(GGUF_MOE_TENSORS, MTP_MOE_LAYER_TENSORS), gguf.FUSED_EXPERT_TENSORS),
        supported_keys=(gguf.NEXTN_LAYERS_KEY, gguf.EXPERT_COUNT_KEY),
    ),
)  # fmt: skip
