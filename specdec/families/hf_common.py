"""What families say alike in a config.json, and the names of Llama's tensors in a folder. Knows no family.

The keys are those of transformers 5.23, `models/*/configuration_*.py`.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specdec.config import LEAST_SCALE, AttentionConfig, ExpertsConfig, LayerConfig, RopeConfig, RopeScaling, YarnScaling, of_some
from specdec.families.config_values import WIDEST, Values
from specdec.families.tensor_specs import GATED, OF_EXPERTS, QKV, TURNED, changed, experts_in_one, named, together
from specdec.layers.rope import yarn_scale

HEAD = "lm_head.weight"
TEXT = "text_config"  # of a model of texts beside others
MOST_LAYERS = 1 << 16  # where some of them are listed
MAX_THETA = 1e18
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
SILU, GELU_TANH = ("silu", "swish"), ("gelu_new", "gelu_pytorch_tanh")

DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2,
    "sliding_window": None, "rope_theta": 10000.0,
}  # fmt: skip
# what other arithmetic than ours is asked for by, in any family, and the values that ask for nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    key: neutral
    for neutral, keys in (
        ((None,), "quantization_config attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar clip_qkv"),
        ((None,), "quantization attention_multiplier attention_chunk_size"),
        ((None, 1), "partial_rotary_factor rotary_pct embedding_multiplier residual_multiplier logits_scaling logit_scale"),
        ((None, False), "rope_interleaved use_mrope use_qk_norm qk_layernorm alibi add_cross_attention is_encoder_decoder"),
        ((None, True), "is_causal"),
        ((None, 0), "n_routed_experts"),
        ((None, 0, 1), "num_experts num_local_experts"),
        ((None, []), "no_rope_layers"),
        ((None, {}), "pruned_heads per_layer_config"),
    )
    for key in keys.split()
}
PREFIX = re.compile(r"(model\.language_model|language_model\.model|language_model|model)\.")  # the first three beside images
HARMLESS = re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|(vision_tower|multi_modal_projector)\..*")
OF_LAYERS, BIASES = "layers.{}.%s.weight", "layers.{}.%s.bias"
PLACES = changed(
    named("%s.weight", tok_emb="embed_tokens", rms_final="norm", wcls="lm_head")
    | named(
        OF_LAYERS, rms_att="input_layernorm", wq="self_attn.q_proj", wk="self_attn.k_proj", wv="self_attn.v_proj",
        wo="self_attn.o_proj", q_norm="self_attn.q_norm", k_norm="self_attn.k_norm", rms_ffn="post_attention_layernorm",
        w1="mlp.gate_proj", w2="mlp.down_proj", w3="mlp.up_proj",
    )
    | named(
        BIASES, bq="self_attn.q_proj", bk="self_attn.k_proj", bv="self_attn.v_proj", bo="self_attn.o_proj",
        b1="mlp.gate_proj", b2="mlp.down_proj", b3="mlp.up_proj",
    ),
    TURNED, halves=True,
)  # fmt: skip
NORMS_BEHIND = named(OF_LAYERS, rms_att_out="post_attention_layernorm", rms_ffn_out="post_feedforward_layernorm")
NORMS_AROUND = NORMS_BEHIND | named(OF_LAYERS, rms_ffn="pre_feedforward_layernorm")
FUSED = changed(  # some of them in one tensor
    together(QKV, OF_LAYERS % "self_attn.qkv_proj") | together(GATED, OF_LAYERS % "mlp.gate_up_proj"), TURNED, halves=True
)
EXPERTS = named(OF_LAYERS, router="mlp.gate") | changed(
    named("layers.{}.mlp.experts.{}.%s.weight", experts_w1="gate_proj", experts_w2="down_proj", experts_w3="up_proj"),
    OF_EXPERTS, each=True,
)  # fmt: skip
SHARED = named(  # the expert that all tokens go through
    OF_LAYERS, shared_w1="mlp.shared_expert.gate_proj", shared_w2="mlp.shared_expert.down_proj",
    shared_w3="mlp.shared_expert.up_proj", shared_gate="mlp.shared_expert_gate",
)  # fmt: skip
EXPERTS_IN_ONE = experts_in_one("layers.{}.mlp.experts.%s")


def numbers(values: Values, activation: str = "hidden_act", choices: Sequence[str] = SILU) -> dict[str, Any]:
    """The sizes of a family that is like Llama; activation: the key of what gates an MLP. Raises CheckpointError."""
    values.must_be(activation, *choices)
    n_heads = values.whole("num_attention_heads")
    return {
        "dim": values.whole("hidden_size", most=WIDEST),
        "hidden_dim": values.whole("intermediate_size"),
        "n_layers": values.whole("num_hidden_layers", most=MOST_LAYERS),
        "n_heads": n_heads,
        "n_kv_heads": values.whole("num_key_value_heads", n_heads),
        "vocab_size": values.whole("vocab_size"),
        "seq_len": values.whole("max_position_embeddings"),
        "shared_classifier": values.flag("tie_word_embeddings"),
        "norm_eps": values.real("rms_norm_eps", 0, 1),
        "head_dim": values.whole("head_dim", 0, WIDEST),
    }


def attention(values: Values, turning: RopeConfig | None = None, **own: Any) -> AttentionConfig:
    """All of its products add biases, or none; turning: its RoPE, where that is not said as by Llama; own: what else it does."""
    has = values.flag("attention_bias")
    return AttentionConfig(turning or rope(values), qkv_bias=has, wo_bias=has, **own)


def no_biases(values: Values) -> None:
    """Raises CheckpointError for any."""
    values.must_be("attention_bias", False)
    values.must_be("mlp_bias", False)


# Windows


def window(values: Values) -> int:
    """Of all layers, or of none; a list of layers says the same."""
    seen = values.whole("sliding_window", 0)
    all_are(SLIDING if seen else FULL, values)
    return seen


def no_window(values: Values) -> None:
    """Raises CheckpointError for a window that is said where transformers does not look at it."""
    if values["sliding_window"] is not None and values.whole("sliding_window") < values.whole("max_position_embeddings"):
        raise values.refusal("sliding_window", f"null in a {values['model_type']} model")


def all_are(kind: str, values: Values) -> None:
    """Raises CheckpointError for a list of layers of which some are not of that kind."""
    n_layers = values.whole("num_hidden_layers", most=MOST_LAYERS)
    if values["layer_types"] is not None and values["layer_types"] != [kind] * n_layers:
        raise values.refusal("layer_types", f"{kind} in all {n_layers} layers")


def full_layers(values: Values, n_layers: int, every: int | str, others: str = SLIDING) -> set[int]:
    """Those that the list of all calls full; without a list each so many-th, or as many as that key says."""
    if values["layer_types"] is None:
        step = values.whole(every) if isinstance(every, str) else every
        return {*range(step - 1, n_layers, step)}
    types = values.of_layers("layer_types", n_layers, (FULL, others), f"{FULL} or {others}")
    return {layer for layer, kind in enumerate(types) if kind == FULL}


def unwindowed(windowed: AttentionConfig, full: Collection[int], n_layers: int, **own: Any) -> tuple[LayerConfig, ...]:
    """`Config.layers` of which those have no window; own: what else their attention has of its own."""
    return of_some(LayerConfig(attention=replace(windowed, window=0, **own)), full, n_layers)


# RoPE


def head_length(values: Values) -> int:
    """How many rows a head has, or would have if they were whole."""
    own, dim = values.whole("head_dim", 0, WIDEST), values.whole("hidden_size", most=WIDEST)
    return own or dim // values.whole("num_attention_heads")


def rope_values(values: Values, otherwise: Mapping[str, Any] | None = None) -> Values:
    """What is said of RoPE: of transformers 5 in rope_parameters, of older ones in rope_scaling; otherwise: where nothing is."""
    key = "rope_scaling" if values["rope_scaling"] else "rope_parameters"
    given = otherwise or {} if values[key] is None else values[key]
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise values.refusal(key, "an object of numbers, one for all layers")
    silent = {"rope_theta": values["rope_theta"], "rope_type": given.get("type", "default")}
    return Values(values.path, given, silent)


def partial_rope(rope: Values, values: Values, *sources: Values) -> RopeConfig:
    """The base of the angles, and how many rows of a head are turned, by the share that the last one of sources tells."""
    partial, head_dim = "partial_rotary_factor", head_length(values)
    told, share = values, 1.0
    for source in sources:
        if source[partial] is not None:
            told, share = source, source.real(partial, 0, 1)
    n_turned = int(head_dim * share)
    if n_turned < 2 or n_turned % 2:
        raise told.refusal(partial, f"what leaves an even number of a head's {head_dim} rows, 2 or more")
    return RopeConfig(rope.real("rope_theta", 1, MAX_THETA), 0 if n_turned == head_dim else n_turned)


def ropes_of_layers(values: Values, local_theta: str = "rope_theta") -> list[Values]:
    """What is said of RoPE in layers with a window, whose base older files have by that key, and in the others, of which older
    ones say what scales them.
    """
    key, expected = "rope_parameters", f"an object of {FULL} and {SLIDING}"
    given = values.object(key, expected)
    if not all(kind in (FULL, SLIDING) and isinstance(part, dict | None) for kind, part in given.items()):
        raise values.refusal(key, expected)
    scaling, found = values.object("rope_scaling", "an object or null"), []
    for kind, theta, more in ((SLIDING, local_theta, {}), (FULL, "rope_theta", scaling)):
        part = (given.get(kind) or {}) | more
        found.append(Values(values.path, part, {"rope_theta": values[theta], "rope_type": part.get("type", "default")}))
    return found


def rope(values: Values, said: Values | None = None) -> RopeConfig:
    """The base of the angles, and how they are scaled; said: where `rope_values` finds it, by default. Raises CheckpointError."""
    said = said or rope_values(values)
    said.must_be("mrope_section", None)
    said.must_be("partial_rotary_factor", None, 1)
    found = RopeConfig(said.real("rope_theta", 1, MAX_THETA))
    if said["rope_type"] == "default":
        return found
    if said["rope_type"] == "yarn":
        return _yarn(found, values, said)
    if said["rope_type"] == "linear":  # Chen et al. 2023, arXiv:2306.15595
        return replace(found, divisors=(said.real("factor", 1, 1e6),) * (head_length(values) // 2))
    if said["rope_type"] == "dynamic" and original_positions(values, said) >= values.whole("max_position_embeddings"):
        return found  # other angles are for texts beyond those positions alone
    if said["rope_type"] != "llama3":
        raise said.refusal("rope_type", "default, linear, dynamic, llama3 or yarn; other kinds of RoPE are not supported")
    scaling = RopeScaling(
        factor=said.real("factor", 1, 1e6),
        low_freq_factor=said.real("low_freq_factor", 1e-6, 1e6),
        high_freq_factor=said.real("high_freq_factor", 1e-6, 1e6),
        original_seq_len=original_positions(values, said),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise said.refusal("high_freq_factor", f"more than low_freq_factor, {scaling.low_freq_factor:g}")
    return replace(found, scaling=scaling)


def original_positions(values: Values, said: Values) -> int:
    """How many positions the model was made for before it was taught more."""
    key = "original_max_position_embeddings"
    source = values if key in values else said
    return source.whole(key) if key in source else values.whole("max_position_embeddings")


def _yarn(rope: RopeConfig, values: Values, said: Values) -> RopeConfig:
    original, scale = original_positions(values, said), 1.0
    factor = said.real("factor", 1, 1e6, values.whole("max_position_embeddings") / original)
    if factor < 1:
        raise said.refusal("factor", "a number from 1 on")
    betas = {key: said.real(key, 1e-6, 1e6) for key in ("beta_fast", "beta_slow") if said[key] not in (None, 0)}
    scaling = YarnScaling(factor, original, **betas, in_whole_pairs="truncate" not in said or said.flag("truncate"))
    if scaling.beta_fast < scaling.beta_slow:
        raise said.refusal("beta_fast", f"beta_slow, {scaling.beta_slow:g}, or more")
    if said["attention_factor"] is not None:
        scale = said.real("attention_factor", LEAST_SCALE, 1 / LEAST_SCALE)
    else:
        shares = [said.real(key, 0, 1e6, 0.0) for key in ("mscale", "mscale_all_dim")]
        scale = yarn_scale(factor, shares[0]) / yarn_scale(factor, shares[1]) if all(shares) else yarn_scale(factor)
    return replace(rope, scaling=scaling, scale=float(np.float32(scale)))


# Experts


def dense_layers(values: Values) -> tuple[int, ...]:
    """Those without experts, where each so many-th layer has some, and those do not that a list names."""
    n_layers, step = values.whole("num_hidden_layers", most=MOST_LAYERS), values.whole("decoder_sparse_step")
    named = [] if values["mlp_only_layers"] is None else values.layers("mlp_only_layers", n_layers)
    return tuple(i for i in range(n_layers) if i in named or (i + 1) % step)


def experts(values: Values, hidden: str, n: str = "num_experts", **more: Any) -> ExpertsConfig:
    """How many there are, by the key n, and that a token goes through; hidden: the key of their width."""
    return ExpertsConfig(values.whole(n), values.whole("num_experts_per_tok"), values.whole(hidden), **more)
