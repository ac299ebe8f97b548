"""Parse the parts of a GGUF file's metadata that families have in common, and name Llama's tensors in GGUF files.

Keys, names and defaults are llama.cpp's (gguf-py's constants.py, src/llama-model.cpp).
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from specdec.argument_checks import MIN_SCALE, JSONDict
from specdec.families import tensor_specs as specs
from specdec.families.config_values import MAX_DIM, ConfigValues, check_neutral_values
from specdec.families.family import GGUFFamily, GGUFMetadata
from specdec.families.hf_common import MAX_THETA
from specdec.layers.rope import get_yarn_attention_factor
from specdec.model_config import AttentionConfig, ExpertsConfig, ModelConfig, RopeConfig, YarnRopeScaling

RMS_EPS_KEY, LAYER_NORM_EPS_KEY = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
EMBEDDING, LM_HEAD, ROPE_FREQS = "token_embd.weight", "output.weight", "rope_freqs.weight"
MLP_DIM_KEY, EXPERT_DIM_KEY, KV_HEADS_KEY = "feed_forward_length", "expert_feed_forward_length", "attention.head_count_kv"
HEADS_KEY = "attention.head_count"
PER_LAYER_KEYS = (HEADS_KEY, KV_HEADS_KEY, MLP_DIM_KEY, EXPERT_DIM_KEY)  # a number, or a list with one per layer
SLIDING_WINDOW_KEY, EXPERT_COUNT_KEY, QUERY_SCALE_KEY = "attention.sliding_window", "expert_count", "attention.temperature_scale"
GATING_FUNC_KEY, SOFTMAX, SIGMOID = "expert_gating_func", 1, 2
ATTENTION_FACTOR_KEY, NEXTN_LAYERS_KEY = "rope.scaling.attn_factor", "nextn_predict_layers"
# Sizes of the heads of layers with a sliding window
WINDOW_HEAD_KEYS = ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa")
# Keys after the architecture's name that change the arithmetic, and their values that change nothing.
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    key: neutral
    for neutral, keys in (
        ((0, None), f"{EXPERT_COUNT_KEY} {SLIDING_WINDOW_KEY} {QUERY_SCALE_KEY} {NEXTN_LAYERS_KEY} attn_logit_softcapping"),
        ((0, None), "final_logit_softcapping attention.scale attention.clamp_kqv attention.max_alibi_bias rope.scaling.alpha"),
        ((1, 0, None), f"{ATTENTION_FACTOR_KEY} logit_scale residual_scale embedding_scale"),
        ((1, None), "rope.scaling.yarn_ext_factor"),
        ((None,), " ".join(WINDOW_HEAD_KEYS)),
        ((0, 1, None), "expert_group_count"),
        ((False, None), "use_parallel_residual norm_output"),
        ((True, None), "attention.causal"),
        (("silu", None), "hidden_activation"),
        ((SOFTMAX, 0, None), GATING_FUNC_KEY),
    )
    for key in keys.split()
}
LAYER_WEIGHT, LAYER_BIAS = "blk.{}.%s.weight", "blk.{}.%s.bias"
OUTER_TENSORS = {"tok_emb": specs.TensorSpec(EMBEDDING), "wcls": specs.TensorSpec(LM_HEAD)}
INTERLEAVED_ROPE_TENSORS = (  # for families in which llama.cpp's converter stores q and k in adjacent pairs
    OUTER_TENSORS
    | {"rms_final": specs.TensorSpec("output_norm.weight")}
    | specs.make(
        LAYER_WEIGHT, rms_att="attn_norm", wq="attn_q", wk="attn_k", wv="attn_v", wo="attn_output", q_norm="attn_q_norm",
        k_norm="attn_k_norm", rms_ffn="ffn_norm", w1="ffn_gate", w2="ffn_down", w3="ffn_up",
    )
    | specs.make(
        LAYER_BIAS, rms_att_bias="attn_norm", bq="attn_q", bk="attn_k", bv="attn_v", bo="attn_output", rms_ffn_bias="ffn_norm",
        b1="ffn_gate", b2="ffn_down", b3="ffn_up",
    )
    | specs.make("%s.bias", rms_final_bias="output_norm", wcls_bias="output")
)  # fmt: skip
TENSORS = specs.set_rope_pairs(INTERLEAVED_ROPE_TENSORS)
POST_NORM_TENSORS = specs.make(LAYER_WEIGHT, rms_att_out="post_attention_norm", rms_ffn_out="post_ffw_norm")
EXPERT_TENSORS = (
    specs.make(LAYER_BIAS, router_bias="exp_probs_b")
    | specs.make(
        LAYER_WEIGHT, router="ffn_gate_inp", shared_w1="ffn_gate_shexp", shared_w2="ffn_down_shexp", shared_w3="ffn_up_shexp",
        shared_gate="ffn_gate_inp_shexp",
    )
    | specs.make_per_expert(LAYER_WEIGHT, experts_w1="ffn_gate_exps", experts_w2="ffn_down_exps", experts_w3="ffn_up_exps")
)  # fmt: skip
FUSED_EXPERT_TENSORS = specs.fuse(specs.EXPERTS_GATE_UP, LAYER_WEIGHT % "ffn_gate_up_exps", is_per_expert=True)
YARN_SCALE_KEY, YARN_SCALE_TOLERANCE = "rope.scaling.yarn_attn_factor", 1e-3  # recomputed by llama.cpp; for rounding
YARN_BETAS = "beta_fast", "beta_slow"


def make_mtp_specs(own: specs.TensorSpecs, layer_tensors: Iterable[str]) -> specs.TensorSpecs:
    """Return the specs of the tensors of an MTP draft head in a GGUF file: those of its layer, then its own.

    Args:
        own: Specs of the model's tensors, which the layer's tensors are named after.
        layer_tensors: Our names of the layer's tensors.
    """
    head_specs = specs.make(
        "blk.{}.nextn.%s.weight", fc="eh_proj", rms_emb="enorm", rms_hidden="hnorm", rms_final="shared_head_norm"
    )
    return {name: own[name] for name in layer_tensors} | head_specs


def check_unsupported_keys(values: ConfigValues, family: GGUFFamily) -> None:
    """Raise CheckpointError if a GGUF file has a key that changes the arithmetic and that its family does not support."""
    supported = family.supported_keys + ((EXPERT_COUNT_KEY,) if "router" in family.tensor_specs else ())
    check_neutral_values(values, NEUTRAL_VALUES, supported)


def parse_config(metadata: GGUFMetadata, **options: Any) -> ModelConfig:
    """Build the `ModelConfig` of a model with metadata like Llama's; options: see `parse_base_fields`."""
    return ModelConfig(**parse_base_fields(metadata, **options))


def parse_base_fields(
    metadata: GGUFMetadata,
    has_partial_rope: bool = False,
    n_kv_heads: int | None = None,
    has_biases: bool = True,
    eps_key: str = RMS_EPS_KEY,
    **more: Any,
) -> JSONDict:
    """Parse the metadata of a GGUF file with keys like Llama's and return a dict of `ModelConfig` fields.

    Args:
        metadata: The file's metadata.
        has_partial_rope: Whether RoPE may rotate only a part of each attention head.
        n_kv_heads: Number of KV heads; by default that of the metadata.
        has_biases: Whether biases in the file are used.
        eps_key: The key of the norms' eps.
        more: Other fields of `AttentionConfig`.

    Raises:
        CheckpointError: A value is not supported.
    """
    n_heads = metadata.common_fields["n_heads"]
    head_dim = metadata.get_int("attention.key_length", metadata.common_fields["dim"] // n_heads, MAX_DIM)
    for name in ("attention.value_length", "rope.dimension_count")[: 1 if has_partial_rope else 2]:
        if metadata.get_int(name, head_dim) != head_dim:
            raise metadata.make_error(name, f"{head_dim}, a head's length")
    rotary_dim = metadata.get_int("rope.dimension_count", head_dim, MAX_DIM)
    return {
        **metadata.common_fields,
        "n_kv_heads": n_kv_heads or metadata.get_int(KV_HEADS_KEY, n_heads),
        "norm_eps": metadata.get_float(eps_key, 0, 1),
        "head_dim": head_dim,
        "attention": AttentionConfig(
            parse_rope(metadata, rotary_dim, head_dim),
            qkv_bias=has_biases and "blk.0.attn_q.bias" in metadata.tensors,
            wo_bias=has_biases and "blk.0.attn_output.bias" in metadata.tensors,
            **more,
        ),
        "mlp_bias": has_biases and "blk.0.ffn_gate.bias" in metadata.tensors,
        "experts": parse_experts(metadata) if metadata[EXPERT_COUNT_KEY] not in (0, None) else None,
    }


def parse_rope(metadata: GGUFMetadata, rotary_dim: int, head_dim: int) -> RopeConfig:
    """Return the RoPE config of a GGUF file, scaled by one factor, by a factor per pair, or by YaRN, and with a query scale."""
    type_key, old_factor_key, new_factor_key = "rope.scaling.type", "rope.scale_linear", "rope.scaling.factor"
    metadata.require(type_key, "linear", "yarn", "none", None)
    factor_key = new_factor_key if new_factor_key in metadata else old_factor_key
    factor = 1.0
    if metadata[type_key] != "none":
        factor = metadata.get_float(factor_key, 0, 1e6, 0.0) or 1.0  # 0 also means no scaling
    freq_factors: tuple[float, ...] = ()
    if ROPE_FREQS in metadata.tensors:  # Llama 3.1
        freq_factors = tuple(float(x) for x in metadata.tensors.get_tensor(ROPE_FREQS, (rotary_dim // 2,))[:])
    theta = metadata.get_float("rope.freq_base", 1, MAX_THETA, 10000.0)
    rope = RopeConfig(theta, 0 if rotary_dim == head_dim else rotary_dim, freq_factors=freq_factors)
    span = metadata.get_int("rope.scaling.original_context_length", metadata.common_fields["seq_len"])
    if QUERY_SCALE_KEY in metadata:
        rope = replace(rope, query_scale=float(np.float32(metadata.get_float(QUERY_SCALE_KEY, 0, 1e6))), query_span=span)
    if metadata[type_key] != "yarn":
        if YARN_SCALE_KEY in metadata:
            metadata.require(YARN_SCALE_KEY, 1)
        scaled_factors = tuple(factor * each for each in freq_factors or (1.0,) * (rotary_dim // 2))
        return rope if factor == 1 else replace(rope, freq_factors=scaled_factors)
    betas: dict[str, Any] = {
        name: metadata.get_float(each, 1e-6, 1e6) for name in YARN_BETAS if (each := f"rope.scaling.yarn_{name}") in metadata
    }
    log_multiplier = metadata.get_float("rope.scaling.yarn_log_multiplier", 0, 1e6, 0.0)
    if factor < 1:
        raise metadata.make_error(factor_key, "a number of 1 or more")
    attention_factor = get_yarn_attention_factor(factor)
    if log_multiplier:
        attention_factor /= get_yarn_attention_factor(factor, log_multiplier)
    given = metadata.get_float(YARN_SCALE_KEY, 0, 1e6, 1.0)
    if given != 1 and abs(given - attention_factor) > YARN_SCALE_TOLERANCE:
        raise metadata.make_error(YARN_SCALE_KEY, f"{attention_factor:.4g}, which follows from the factor, or 1")
    return replace(rope, scaling=YarnRopeScaling(factor, span, **betas), attention_factor=float(np.float32(attention_factor)))


def get_full_attention_layers(metadata: GGUFMetadata, interval: int = 0, is_first: bool = False) -> set[int]:
    """Return the indices of the layers without a sliding window, from a GGUF file's list of layers or from an interval.

    Args:
        metadata: The file's metadata, which may list the layers.
        interval: Without a list, each interval-th layer has no window, unless the metadata gives another interval; 0: the list is
            required.
        is_first: Whether they are the first of each interval, not the last.

    Raises:
        CheckpointError: The list is not valid.
    """
    key, n_layers = f"{SLIDING_WINDOW_KEY}_pattern", metadata.common_fields["n_layers"]
    if interval and not isinstance(metadata[key], list):
        interval = metadata.get_int(key, interval)
        return {*range(0 if is_first else interval - 1, n_layers, interval)}
    flags = metadata.get_per_layer(key, n_layers, (True, False), "true or false")
    return {i for i, flag in enumerate(flags) if not flag}


def parse_attention_heads(metadata: GGUFMetadata, others: str) -> tuple[int, list[int]]:
    """Return the number of KV heads of the attention layers of a hybrid, and the indices of the other layers, which have 0.

    Args:
        metadata: The file's metadata.
        others: What the other layers are, for errors.

    Raises:
        CheckpointError: The list of KV heads is not valid, or all layers are of one type.
    """
    key, n_layers = KV_HEADS_KEY, metadata.common_fields["n_layers"]
    heads = metadata[key]
    if not isinstance(heads, list) or len(heads) != n_layers or any(type(n) is not int or n < 0 for n in heads):
        raise metadata.make_error(key, f"a number for each of {n_layers} layers, 0 for {others}")
    if 0 not in heads or len({*heads} - {0}) != 1:
        raise metadata.make_error(key, "layers of both types, and the same number of heads in all attention layers")
    return max(heads), [i for i, n in enumerate(heads) if n == 0]


def has_selection_bias(metadata: GGUFMetadata) -> bool:
    """Return whether a layer of a GGUF file has a bias for the choice of experts."""
    name = EXPERT_TENSORS["router_bias"].name
    return any(name.format(i) in metadata.tensors for i in range(metadata.common_fields["n_layers"]))


def parse_experts(metadata: GGUFMetadata, **more: Any) -> ExpertsConfig:
    """Return the `ExpertsConfig` of a mixture-of-experts model from a GGUF file's metadata.

    A layer without a router has no experts. The weights of the chosen experts are divided by their sum, as in llama.cpp.

    Args:
        metadata: The file's metadata.
        more: Other fields of `ExpertsConfig`.

    Raises:
        CheckpointError: A value is not valid.
    """
    router, n_layers = EXPERT_TENSORS["router"].name, metadata.common_fields["n_layers"]
    return ExpertsConfig(
        n_experts=metadata.get_int(EXPERT_COUNT_KEY),
        n_experts_used=metadata.get_int("expert_used_count"),
        hidden_dim=metadata.get_int(EXPERT_DIM_KEY, metadata.common_fields["hidden_dim"]),
        dense_layers=tuple(i for i in range(n_layers) if router.format(i) not in metadata.tensors),
        routed_scaling_factor=metadata.get_float("expert_weights_scale", 0, 1 / MIN_SCALE, 1.0) or 1.0,  # 0 also means no scaling
        shared_hidden_dim=metadata.get_count("expert_shared_feed_forward_length"),
        **more,
    )
