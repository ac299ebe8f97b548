"""Nemotron-H and Nemotron 3 Nano (NVIDIA 2025, arXiv:2504.03624, arXiv:2512.20848): each layer is one block with a norm.

The block is Mamba-2, attention without RoPE, an MLP or a mixture of experts; MLPs and experts are squared ReLUs without a gate.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import tensor_specs as specs
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
from specdec.families.recurrent_common import GGUF_MAMBA_TENSORS, make_mamba_specs, parse_gguf_mamba, require_no_time_step_limit
from specdec.mixer_config import Mamba2Config
from specdec.model_config import AttentionConfig, ExpertsConfig, LayerConfig, ModelConfig, RopeConfig

MAMBA, ATTENTION, MLP, EXPERTS = hf.LINEAR_ATTENTION, hf.FULL_ATTENTION, "mlp", "moe"
LAYER_TYPES = {MAMBA: MAMBA, ATTENTION: ATTENTION, MLP: MLP, EXPERTS: EXPERTS, "mamba": MAMBA, "attention": ATTENTION}
PATTERN_TYPES = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": EXPERTS}
TYPES_KEY, PATTERN_KEY = "layers_block_type", "hybrid_override_pattern"
SUM_EPS = 1e-20  # of the weights of the chosen experts
DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 131072, "intermediate_size": 21504, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
    "mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5, TYPES_KEY: None, PATTERN_KEY: None, "layer_types": None,
    "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "n_groups": 8,
    "conv_kernel": 4, "use_conv_bias": True, "use_bias": False, "mamba_proj_bias": False, "n_routed_experts": 8,
    "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688, "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "moe_latent_size": None,
}  # fmt: skip
KEY_ALIASES = {
    "layer_types": TYPES_KEY, "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit", "num_local_experts": "n_routed_experts",
}  # fmt: skip
PREFIX, IGNORED_NAMES = re.compile(r"(model|backbone)\."), re.compile(r"mtp\..*")
HF_TENSORS = {
    **specs.make("%s.weight", tok_emb="embeddings", rms_final="norm_f", wcls="lm_head"),
    **specs.make(
        hf.LAYER_WEIGHT, rms_att="norm", rms_ffn="norm", wq="mixer.q_proj", wk="mixer.k_proj", wv="mixer.v_proj",
        wo="mixer.o_proj", w1="mixer.up_proj", w2="mixer.down_proj", router="mixer.gate", experts_w1="mixer.experts.{}.up_proj",
        experts_w2="mixer.experts.{}.down_proj", shared_w1="mixer.shared_experts.up_proj",
        shared_w2="mixer.shared_experts.down_proj",
    ),
    **specs.make("layers.{}.mixer.gate.%s", router_bias="e_score_correction_bias"),
    **make_mamba_specs("layers.{}.mixer.%s"),
}  # fmt: skip
HF_TENSORS = specs.replace(HF_TENSORS, specs.EXPERT_WEIGHTS, is_per_expert=True)
# The converter permutes the rows of q and k for RoPE, which the model does not have.
HF_TENSORS = specs.replace(HF_TENSORS, ("wq", "wk"), is_neox_style=True)
# All experts in one tensor, as transformers 5 has them in memory
FUSED_EXPERT_TENSORS = specs.make_per_expert("layers.{}.mixer.experts.%s", experts_w1="up_proj", experts_w2="down_proj")
GGUF_TENSORS = (
    gguf.INTERLEAVED_ROPE_TENSORS
    | gguf.EXPERT_TENSORS
    | GGUF_MAMBA_TENSORS
    | specs.make(gguf.LAYER_WEIGHT, rms_ffn="attn_norm", w1="ffn_up", shared_w1="ffn_up_shexp")
    | {"experts_w1": gguf.EXPERT_TENSORS["experts_w3"]}
)
EPS_KEY = "attention.layer_norm_epsilon"  # of newer files
GGUF_PER_LAYER_KEYS = (gguf.KV_HEADS_KEY, gguf.MLP_DIM_KEY)


def get_layer_types(values: ConfigValues) -> list[str]:
    """Return the type of each layer, from the list or the pattern in config.json.

    Raises:
        CheckpointError: The list or the pattern is not valid.
    """
    given, expected = values[TYPES_KEY], f"a list of {MAMBA}, {ATTENTION}, {EXPERTS} and {MLP}"
    if given is not None:
        if not isinstance(given, list) or not 0 < len(given) <= hf.MAX_LAYERS or not all(
            isinstance(each, str) and each in LAYER_TYPES for each in given
        ):  # fmt: skip
            raise values.make_error(TYPES_KEY, expected)
        return [LAYER_TYPES[each] for each in given]
    pattern = values[PATTERN_KEY]
    if not isinstance(pattern, str) or not 0 < len(pattern) <= hf.MAX_LAYERS or not {*pattern} <= {*PATTERN_TYPES}:
        raise values.make_error(PATTERN_KEY, f"a layer for each of the letters {' '.join(PATTERN_TYPES)}, or {expected}")
    return [PATTERN_TYPES[letter] for letter in pattern]


def make_layers(types: Sequence[str], mamba: Mamba2Config | None) -> tuple[LayerConfig, ...]:
    """Return the layers' settings, given their types and the settings of Mamba-2 layers, if there are any."""
    kinds = {MAMBA: LayerConfig(mixer=mamba, blocks="first"), ATTENTION: LayerConfig(blocks="first")}
    return tuple(kinds.get(each, LayerConfig(blocks="second")) for each in types)


def find_other_layers(types: Sequence[str]) -> tuple[int, ...]:
    """Return the indices of the layers without experts."""
    return tuple(i for i, each in enumerate(types) if each != EXPERTS)


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a Nemotron-H model, dense or with experts, from the keys of config.json."""
    types = get_layer_types(values)
    values.require("mamba_hidden_act", *hf.SILU)
    for key in ("use_bias", "mamba_proj_bias"):
        values.require(key, False)
    for key in ("n_group", "topk_group"):
        values.require(key, 1)
    values.require("moe_latent_size", None)
    hf.reject_window(values)
    hf.reject_biases(values)
    fields = hf.parse_base_fields(values, "mlp_hidden_act", ("relu2",), len(types))
    fields |= {"norm_eps": values.get_float("layer_norm_epsilon", 0, 1), "activation": "relu2"}
    mamba = parse_mamba(values) if MAMBA in types else None
    if EXPERTS in types:
        fields["experts"] = parse_experts(values, types)
    return ModelConfig(**fields, attention=AttentionConfig(RopeConfig(), has_rope=False), layers=make_layers(types, mamba))


def parse_mamba(values: ConfigValues) -> Mamba2Config:
    """Return the `Mamba2Config` of a Nemotron-H model from the keys of config.json. Raises CheckpointError."""
    require_no_time_step_limit(values)
    return Mamba2Config(
        n_heads=values.get_int("mamba_num_heads"),
        head_dim=values.get_int("mamba_head_dim"),
        n_groups=values.get_int("n_groups"),
        state_dim=values.get_int("ssm_state_size"),
        kernel_size=values.get_int("conv_kernel"),
        conv_bias=values.get_bool("use_conv_bias"),
    )


def parse_experts(values: ConfigValues, types: Sequence[str]) -> ExpertsConfig:
    """Return the `ExpertsConfig` of a Nemotron-H model, given the types of its layers. Raises CheckpointError."""
    return hf.parse_experts(
        values,
        "moe_intermediate_size",
        "n_routed_experts",
        norm_topk_prob=values.get_bool("norm_topk_prob"),
        dense_layers=find_other_layers(types),
        is_sigmoid=True,
        has_selection_bias=True,
        routed_scaling_factor=values.get_scale("routed_scaling_factor"),
        shared_hidden_dim=values.get_int("moe_shared_expert_intermediate_size"),
        sum_eps=SUM_EPS,
    )


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a Nemotron-H model, dense or with experts, from a GGUF file's metadata.

    A layer with KV heads is attention, one with an MLP's width is an MLP or has experts, and one with neither is Mamba-2.

    Raises:
        CheckpointError: A value is not valid, or the layers differ in their sizes.
    """
    n_layers, sizes = metadata.common_fields["n_layers"], dict[str, list[int]]()
    for key in GGUF_PER_LAYER_KEYS:
        values = metadata[key]
        if not isinstance(values, list) or len(values) != n_layers or any(type(n) is not int or n < 0 for n in values):
            raise metadata.make_error(key, f"a number for each of {n_layers} layers")
        if len({*values} - {0}) > 1 or (key == gguf.KV_HEADS_KEY and not any(values)):
            raise metadata.make_error(key, "one number for all layers that are not 0")
        sizes[key] = values
    heads, widths = sizes.values()
    if any(n and width for n, width in zip(heads, widths, strict=True)):
        raise metadata.make_error(gguf.MLP_DIM_KEY, f"0 in the layers with {gguf.KV_HEADS_KEY}")
    metadata.require("moe_latent_size", None, 0)
    second = EXPERTS if metadata[gguf.EXPERT_COUNT_KEY] not in (0, None) else MLP
    types = [ATTENTION if n else second if width else MAMBA for n, width in zip(heads, widths, strict=True)]
    mamba = parse_gguf_mamba(metadata, types.index(MAMBA)) if MAMBA in types else None
    eps_key = gguf.RMS_EPS_KEY if gguf.RMS_EPS_KEY in metadata else EPS_KEY
    fields = gguf.parse_base_fields(
        metadata, n_kv_heads=max(heads), has_partial_rope=True, has_biases=False, eps_key=eps_key, has_rope=False
    )
    fields |= {"hidden_dim": max(*widths, 1) if MLP in types else 1, "activation": "relu2", "experts": None}
    if second == EXPERTS:
        fields["experts"] = parse_gguf_experts(metadata, types)
    attention = replace(fields["attention"], rope=RopeConfig())
    return ModelConfig(**fields | {"attention": attention}, layers=make_layers(types, mamba))


def parse_gguf_experts(metadata: GGUFMetadata, types: Sequence[str]) -> ExpertsConfig:
    """Return the `ExpertsConfig` of a Nemotron-H model in a GGUF file, given the types of its layers. Raises CheckpointError."""
    more: dict[str, Any] = {"is_sigmoid": True, "has_selection_bias": True, "sum_eps": SUM_EPS}
    experts = gguf.parse_experts(metadata, norm_topk_prob=metadata.get_bool("expert_weights_norm", False), **more)
    return replace(experts, dense_layers=find_other_layers(types))


FAMILY = (
    HFFamily(
        "nemotron_h", DEFAULTS, parse_config, HF_TENSORS, (FUSED_EXPERT_TENSORS,), prefix=PREFIX, ignored_names=IGNORED_NAMES,
        key_aliases=KEY_ALIASES,
    ),
    GGUFFamily("nemotron_h", parse_gguf_config, GGUF_TENSORS, per_layer_keys=GGUF_PER_LAYER_KEYS),
    GGUFFamily(
        "nemotron_h_moe", parse_gguf_config, GGUF_TENSORS, supported_keys=(gguf.GATING_FUNC_KEY,),
        per_layer_keys=GGUF_PER_LAYER_KEYS,
    ),
)  # fmt: skip
