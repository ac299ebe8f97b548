"""config.json and generation_config.json of a Hugging Face folder to a `Config` and the ids that begin and end a text.

The keys and what they are where a file is silent are those of transformers 5.23, `models/*/configuration_*.py`. Whatever changes
the arithmetic is either done or refused by name; other keys are not looked at.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..architectures import Config, ConvConfig, DeltaConfig, ExpertsConfig
from ..architectures.config import LEAST_SCALE, RopeScaling, YarnScaling
from ..architectures.rope import longrope_scale, yarn_scale
from .config_defaults import DEFAULTS, MINISTRAL3_ROPE
from .json_text import read_object, shown
from .model_file import CheckpointError
from .values import MAX_SIZE, Values

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
TEXT = "text_config"
END = "eos"
MOST_LAYERS = 1 << 16  # where some of them are listed
MAX_THETA = 1e18
# of those whose text's model lies in text_config beside others: whether its classifier is the embedding where a file is silent
WITH_OTHERS = {"mistral3": True, "gemma3": True, "qwen3_5": False}
OF_ALL = ("tie_word_embeddings", "quantization_config", "bos_token_id", "eos_token_id")  # are said beside it, and go before
GRANITE = ("granite", "granitemoehybrid")
WITH_ATTENTION_BIAS = ("llama", "qwen3", "qwen3_moe", "granite", "granitemoehybrid", "smollm3")
WITH_MLP_BIAS = ("llama", "granite", "smollm3")
GPT2_ALIASES = {
    "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}  # fmt: skip
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
LFM2_ALIASES = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}  # which go before
QWEN35 = "qwen3_5_text"
ATTENTION = ("full_attention", "attention")  # as transformers 5 and 4 name it
SILU = ("silu", "swish")
GELU_TANH = ("gelu_new", "gelu_pytorch_tanh")

# what other arithmetic than ours is asked for by, in any family, and the values that ask for nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1),
    "rotary_pct": (None, 1),
    "rope_interleaved": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
    "clip_qkv": (None,),
    "num_experts": (None, 0, 1),
    "num_local_experts": (None, 0, 1),
    "n_routed_experts": (None, 0),
    "use_mrope": (None, False),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "alibi": (None, False),
    "is_causal": (None, True),
    "attention_chunk_size": (None,),
    "no_rope_layers": (None, []),
    "add_cross_attention": (None, False),
    "is_encoder_decoder": (None, False),
    "pruned_heads": (None, {}),
    "per_layer_config": (None, {}),
}
# of these, what a family does
SCALES = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
DONE = {
    "granite": SCALES, "granitemoehybrid": (*SCALES, "num_local_experts"), "smollm3": ("no_rope_layers",),
    "qwen3_moe": ("num_experts", "num_local_experts"), "mixtral": ("num_local_experts",),
    "phi3": ("partial_rotary_factor",), "gemma3_text": ("query_pre_attn_scalar",), QWEN35: ("partial_rotary_factor",),
}  # fmt: skip


def read_config(folder: Path) -> tuple[Config, dict[int, str], int | None, str]:
    """The model's numbers, the names of the ids that end a text, the id that begins one, if any, and its family.

    Raises CheckpointError for a file that is none or damaged, for a family that is not there and for arithmetic that is not done.
    """
    path = folder / CONFIG
    given = _of_text(path, read_object(path))
    family, known = given.get("model_type"), ", ".join((*DEFAULTS, *WITH_OTHERS))
    if family is None:
        raise CheckpointError(f"{path} names no model_type; expected one of {known}")
    if not isinstance(family, str) or family not in DEFAULTS:
        raise CheckpointError(f"{path}: the model_type {shown(family)} is not read; those are {known}")
    if family == "gpt2":
        given = {GPT2_ALIASES.get(key, key): value for key, value in given.items()} | given
    if family == "lfm2":
        given = given | {ours: given[key] for key, ours in LFM2_ALIASES.items() if key in given}
    values = Values(path, given, DEFAULTS[family])
    check_neutral(values, {key: neutral for key, neutral in NEUTRAL.items() if key not in DONE.get(family, ())})
    config = OTHERS[family](values) if family in OTHERS else llama_config(values, family)
    if flaw := config.flaw():
        raise CheckpointError(f"{path} describes no model: {flaw}")
    return config, *_read_marks(folder, given, values, config.vocab_size), family.removesuffix("_text")


def _of_text(path: Path, given: dict[str, Any]) -> dict[str, Any]:
    """What is said of the model that writes: all, or what lies in text_config, and beside it of it."""
    family = given.get("model_type")
    if not isinstance(family, str) or family not in WITH_OTHERS:
        return given
    of_text = given.get(TEXT)
    if not isinstance(of_text, dict):
        raise CheckpointError(f"{path}: {TEXT} is {shown(of_text)}; expected an object, the config of the text's model")
    of_all = {key: given[key] for key in OF_ALL if given.get(key) is not None}
    return of_text | {"tie_word_embeddings": WITH_OTHERS[family]} | of_all


def check_neutral(values: Values, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises CheckpointError for a key that asks for other arithmetic; neutral: those that might, and what asks for nothing."""
    for key in filter(values.__contains__, neutral):
        if key == "quantization_config" and isinstance(values[key], dict):
            method = shown(values[key].get("quant_method"))
            raise CheckpointError(f"{values.path}: the weights are quantized by {method}; expected F32, F16 or BF16 ones")
        values.must_be(key, *neutral[key])


# Families


def llama_config(values: Values, family: str) -> Config:
    """The numbers of a family that is like Llama. Raises CheckpointError for what is not done here."""
    values.must_be("hidden_act", *SILU)
    attention_bias = values.flag("attention_bias") if family in WITH_ATTENTION_BIAS else False
    mlp_bias = values.flag("mlp_bias") if family in WITH_MLP_BIAS else False
    if family in ("mistral", "mixtral", "phi3", "ministral3", QWEN35):
        values.must_be("attention_bias", False)
    if family not in WITH_MLP_BIAS:
        values.must_be("mlp_bias", False)
    is_hybrid = family == "granitemoehybrid"
    if is_hybrid:
        _check_hybrid(values)
    n_heads, (window, full_layers) = values.whole("num_attention_heads"), _window(values, family)
    return Config(
        dim=values.whole("hidden_size"),
        hidden_dim=values.whole("shared_intermediate_size" if is_hybrid else "intermediate_size"),
        n_layers=values.whole("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=n_heads if values["num_key_value_heads"] is None else values.whole("num_key_value_heads"),
        vocab_size=values.whole("vocab_size"),
        seq_len=values.whole("max_position_embeddings"),
        shared_classifier=values.flag("tie_word_embeddings"),
        norm_eps=values.real("rms_norm_eps", 0, 1),
        head_dim=0 if values["head_dim"] is None else values.whole("head_dim"),
        **(OWN_ROPE[family](values) if family in OWN_ROPE else _rope(values, family)),
        window=window,
        full_layers=full_layers,
        qkv_bias=attention_bias or family == "qwen2",
        wo_bias=attention_bias,
        mlp_bias=mlp_bias,
        qk_norm=family in ("qwen3", "qwen3_moe", QWEN35),
        no_rope_layers=_no_rope_layers(values, family),
        **_scales(values, family),
        **(_delta_net(values) if family == QWEN35 else {}),
    )


def _delta_net(values: Values) -> dict[str, Any]:
    """Of Qwen3.5: which layers are no attention, and what they are."""
    values.must_be("attn_output_gate", True)
    n_layers, types = values.whole("num_hidden_layers", MOST_LAYERS), values["layer_types"]
    if types is None:
        interval = values.whole("full_attention_interval")
        layers = [i for i in range(n_layers) if (i + 1) % interval]
    else:
        if not isinstance(types, list) or len(types) != n_layers or any(kind not in (LINEAR, FULL) for kind in types):
            raise values.refusal("layer_types", f"{LINEAR} or {FULL} for each of {n_layers} layers")
        layers = [i for i, kind in enumerate(types) if kind == LINEAR]
    delta = DeltaConfig(
        layers=tuple(layers),
        n_key_heads=values.whole("linear_num_key_heads"),
        n_value_heads=values.whole("linear_num_value_heads"),
        key_dim=values.whole("linear_key_head_dim"),
        value_dim=values.whole("linear_value_head_dim"),
        n_taps=values.whole("linear_conv_kernel_dim"),
    )
    return {"architecture": "qwen35", "attention_gate": True, "delta": delta}


def _scales(values: Values, family: str) -> dict[str, Any]:
    if family not in GRANITE:
        return {}
    names = ("embedding_scale", "attention_scale", "residual_scale", "logit_divisor")
    return {name: values.real(key, LEAST_SCALE, 1 / LEAST_SCALE) for name, key in zip(names, SCALES, strict=True)}


def _check_hybrid(values: Values) -> None:
    """Raises CheckpointError for what is not dense: layers of Mamba, or experts."""
    n_layers, types = values.whole("num_hidden_layers"), values["layer_types"]
    values.must_be("num_local_experts", 0)
    if not isinstance(types, list) or len(types) != n_layers or not all(kind in ATTENTION for kind in types):
        raise values.refusal("layer_types", f"attention in all {n_layers} layers: others are not done here")


def _no_rope_layers(values: Values, family: str) -> tuple[int, ...]:
    """Those whose queries and keys are not turned."""
    n_layers = values.whole("num_hidden_layers", MOST_LAYERS)
    if family == "granitemoehybrid":
        values.must_be("position_embedding_type", "rope", "nope", None)
        return () if values["position_embedding_type"] == "rope" else (*range(n_layers),)
    if family != "smollm3":
        return ()
    flags = values["no_rope_layers"]
    if flags is None:
        interval = values.whole("no_rope_layer_interval")
        return (*range(interval - 1, n_layers, interval),)
    if not isinstance(flags, list) or len(flags) != n_layers or not all(type(flag) is int and flag in (0, 1) for flag in flags):
        raise values.refusal("no_rope_layers", f"0 or 1 for each of {n_layers} layers")
    return tuple(layer for layer, flag in enumerate(flags) if flag == 0)


def _head_dim(values: Values) -> int:
    """How many rows a head has, or would have if they were whole."""
    if values["head_dim"] is not None:
        return values.whole("head_dim")
    return values.whole("hidden_size") // values.whole("num_attention_heads")


def _rope_values(values: Values, otherwise: Mapping[str, Any]) -> Values:
    """What is said of RoPE: of transformers 5 in rope_parameters, of older ones in rope_scaling; otherwise: where nothing is."""
    key = "rope_scaling" if values["rope_scaling"] else "rope_parameters"
    given = otherwise if values[key] is None else values[key]
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise values.refusal(key, "an object of numbers, one for all layers")
    silent = {"rope_theta": values["rope_theta"], "rope_type": given.get("type", "default")}
    return Values(values.path, given, silent)


def _partial_rope(rope: Values, values: Values, *sources: Values) -> dict[str, Any]:
    """The base of the angles, and how many rows of a head are turned, by the share that the last one of sources tells."""
    partial, head_dim = "partial_rotary_factor", _head_dim(values)
    share = 1.0
    for source in sources:
        share = source.real(partial, 0, 1) if source[partial] is not None else share
    n_turned = int(head_dim * share)
    if n_turned < 2 or n_turned % 2:
        raise values.refusal(partial, f"what leaves an even number of a head's {head_dim} rows, 2 or more")
    return {"rope_theta": rope.real("rope_theta", 1, MAX_THETA), "rope_dim": 0 if n_turned == head_dim else n_turned}


def _qwen35_rope(values: Values) -> dict[str, Any]:
    """As `_rope`. Sections of pairs that turn by other positions in images turn by one in a text."""
    rope = _rope_values(values, {})
    rope.must_be("rope_type", "default")
    return _partial_rope(rope, values, values, rope)


def _phi3_rope(values: Values) -> dict[str, Any]:
    """As `_rope`."""
    rope = _rope_values(values, {})
    rope.must_be("mrope_section", None)
    found = _partial_rope(rope, values, rope, values)
    n_turned = found["rope_dim"] or _head_dim(values)
    if rope["rope_type"] == "default":
        return found
    if rope["rope_type"] not in ("longrope", "su", "yarn"):  # older names of it
        raise rope.refusal("rope_type", "default or longrope: other kinds of RoPE are not done here")
    n_positions, original = values.whole("max_position_embeddings"), values.whole("original_max_position_embeddings")
    short, long = (_factors(rope, key, n_turned // 2) for key in ("short_factor", "long_factor"))
    factor = n_positions / original if rope["factor"] is None else rope.real("factor", 0, 1e6)
    if rope["attention_factor"] is not None:
        scale = rope.real("attention_factor", LEAST_SCALE, 1 / LEAST_SCALE)
    elif original == 1 and factor > 1:
        raise values.refusal("original_max_position_embeddings", "2 or more")
    else:
        scale = longrope_scale(factor, original)
    found |= {"rope_divisors": short, "rope_scale": float(np.float32(scale))}
    return found if short == long or n_positions <= original else found | {"long_divisors": long, "n_short": original}


def _factors(rope: Values, key: str, n: int) -> tuple[float, ...]:
    """A list of so many positive numbers."""
    given = rope[key]
    if (
        not isinstance(given, list)
        or len(given) != n
        or not all(type(each) in (int, float) and 1e-6 <= each <= 1e9 for each in given)
    ):
        raise rope.refusal(key, f"{n} positive numbers, one a pair")
    return tuple(float(np.float32(factor)) for factor in given)  # as transformers and GGUF keep them


def _rope(values: Values, family: str) -> dict[str, Any]:
    """The numbers of RoPE: the base of the angles, and how they are scaled."""
    rope = _rope_values(values, MINISTRAL3_ROPE if family == "ministral3" else {})
    rope.must_be("mrope_section", None)
    rope.must_be("partial_rotary_factor", None, 1)
    found: dict[str, Any] = {"rope_theta": rope.real("rope_theta", 1, MAX_THETA)}
    if family == "ministral3":
        scale = float(np.float32(rope.real("llama_4_scaling_beta", 0, 1e6)))
        found |= {"query_scale": scale, "query_span": _original(values, rope)}
    if rope["rope_type"] == "default":
        return found
    if rope["rope_type"] == "yarn":
        return found | _yarn(values, rope)
    if rope["rope_type"] == "linear":  # Chen et al. 2023, arXiv:2306.15595
        return found | {"rope_divisors": (rope.real("factor", 1, 1e6),) * (_head_dim(values) // 2)}
    if rope["rope_type"] == "dynamic" and _original(values, rope) >= values.whole("max_position_embeddings"):
        return found  # other angles are for texts beyond those positions alone
    if rope["rope_type"] != "llama3":
        raise rope.refusal("rope_type", "default, linear, dynamic, llama3 or yarn: other kinds of RoPE are not done here")
    scaling = RopeScaling(
        factor=rope.real("factor", 1, 1e6),
        low_freq_factor=rope.real("low_freq_factor", 1e-6, 1e6),
        high_freq_factor=rope.real("high_freq_factor", 1e-6, 1e6),
        original_seq_len=_original(values, rope),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise rope.refusal("high_freq_factor", f"more than low_freq_factor, {scaling.low_freq_factor:g}")
    return found | {"rope_scaling": scaling}


def _original(values: Values, rope: Values) -> int:
    """How many positions the model was made for before it was taught more."""
    key = "original_max_position_embeddings"
    source = values if key in values else rope
    return source.whole(key) if key in source else values.whole("max_position_embeddings")


def _yarn(values: Values, rope: Values) -> dict[str, Any]:
    original, scale = _original(values, rope), 1.0
    factor = values.whole("max_position_embeddings") / original if rope["factor"] is None else rope.real("factor", 1, 1e6)
    if factor < 1:
        raise rope.refusal("factor", "a number from 1 on")
    betas = {key: rope.real(key, 1e-6, 1e6) for key in ("beta_fast", "beta_slow") if rope[key] not in (None, 0)}
    scaling = YarnScaling(factor, original, **betas, in_whole_pairs="truncate" not in rope or rope.flag("truncate"))
    if scaling.beta_fast < scaling.beta_slow:
        raise rope.refusal("beta_fast", f"beta_slow, {scaling.beta_slow:g}, or more")
    if rope["attention_factor"] is not None:
        scale = rope.real("attention_factor", LEAST_SCALE, 1 / LEAST_SCALE)
    else:
        shares = [0.0 if rope[key] is None else rope.real(key, 0, 1e6) for key in ("mscale", "mscale_all_dim")]
        scale = yarn_scale(factor, shares[0]) / yarn_scale(factor, shares[1]) if all(shares) else yarn_scale(factor)
    return {"rope_scaling": scaling, "rope_scale": float(np.float32(scale))}


OWN_ROPE = {"phi3": _phi3_rope, QWEN35: _qwen35_rope}


def _window(values: Values, family: str) -> tuple[int, tuple[int, ...]]:
    """How many positions a token sees, 0: all; and the layers in which it sees all of them nevertheless."""
    n_layers, types = values.whole("num_hidden_layers", MOST_LAYERS), values["layer_types"]
    window = 0 if values["sliding_window"] is None else values.whole("sliding_window")
    if family in ("llama", "lfm2", QWEN35, *GRANITE):  # transformers does not look at it
        if 0 < window < values.whole("max_position_embeddings"):
            raise values.refusal("sliding_window", f"null in a {family} model")
        window = 0
    if family == "phi3" and window >= values.whole("max_position_embeddings"):
        window = 0
    if family in ("granitemoehybrid", "lfm2", QWEN35):  # of whose layers others tell
        return 0, ()
    if family == "smollm3" and (window := window if values.flag("use_sliding_window") else 0):
        raise values.refusal("sliding_window", "null: windows in some layers are not done here")
    if family == "qwen3_moe":  # in all layers, or in none
        return (window if values.flag("use_sliding_window") else 0), ()
    if family in ("qwen2", "qwen3"):
        window = window if values.flag("use_sliding_window") else 0
        full = _full_layers(values, n_layers) if types is not None else (*range(min(max(_layers_before(values), 0), n_layers)),)
        return (window, full) if window and len(full) < n_layers else _no_window(values, full, n_layers)
    expected = "sliding_attention" if window else "full_attention"
    if types is not None and (not isinstance(types, list) or len(types) != n_layers or any(kind != expected for kind in types)):
        raise values.refusal("layer_types", f"{expected} in all {n_layers} layers")
    return window, ()


def _no_window(values: Values, full: tuple[int, ...], n_layers: int) -> tuple[int, tuple[int, ...]]:
    """Raises CheckpointError where layers are said to have one."""
    if values["layer_types"] is not None and len(full) < n_layers:
        raise values.refusal("layer_types", f"full_attention in all {n_layers} layers, without a window")
    return 0, ()


def _layers_before(values: Values) -> int:
    """How many layers have no window."""
    value = values["max_window_layers"]
    if type(value) is not int:
        raise values.refusal("max_window_layers", "a whole number")
    return value


def _lfm2(values: Values) -> Config:
    """As Llama's, but for layers of convolutions, and what the MLP's width is made of."""
    hidden_dim, multiplier = values.whole("intermediate_size"), values["block_ffn_dim_multiplier"]
    if values.flag("block_auto_adjust_ff_dim"):
        hidden_dim = int(2 * hidden_dim / 3)
        if multiplier is not None:
            unit = values.whole("block_multiple_of")
            hidden_dim = int(values.real("block_ffn_dim_multiplier", 0, MAX_SIZE) * hidden_dim)
            hidden_dim = -(-hidden_dim // unit) * unit
    if hidden_dim > MAX_SIZE:
        raise values.refusal("intermediate_size", f"what makes an MLP of at most {MAX_SIZE} rows")
    n_layers, types, attention = values.whole("num_hidden_layers"), values["layer_types"], values["full_attn_idxs"]
    if types is not None:
        if not isinstance(types, list) or len(types) != n_layers or any(kind not in ("conv", ATTENTION[0]) for kind in types):
            raise values.refusal("layer_types", f"conv or {ATTENTION[0]} for each of {n_layers} layers")
        layers = [i for i, kind in enumerate(types) if kind == "conv"]
    elif attention is None or (isinstance(attention, list) and all(type(i) is int and 0 <= i < n_layers for i in attention)):
        layers = [] if attention is None else [i for i in range(n_layers) if i not in attention]
    else:
        raise values.refusal("full_attn_idxs", f"a list of layers from 0 to {n_layers - 1}")
    if not 0 < len(layers) < n_layers:
        raise values.refusal("full_attn_idxs" if types is None else "layer_types", "layers of both kinds, conv and attention")
    return replace(
        llama_config(values, "lfm2"),
        architecture="lfm2",
        hidden_dim=hidden_dim,
        norm_eps=values.real("norm_eps", 0, 1),
        qk_norm=True,
        conv=ConvConfig(tuple(layers), values.whole("conv_L_cache"), values.flag("conv_bias")),
    )


def _qwen3_moe(values: Values) -> Config:
    """As Qwen3's, but for layers of experts: each so many, where a list does not say otherwise."""
    n_layers, step, dense = values.whole("num_hidden_layers", MOST_LAYERS), values.whole("decoder_sparse_step"), []
    if (given := values["mlp_only_layers"]) is not None:
        if not isinstance(given, list) or not all(type(i) is int and 0 <= i < n_layers for i in given):
            raise values.refusal("mlp_only_layers", f"a list of layers from 0 to {n_layers - 1}")
        dense = given
    experts = ExpertsConfig(
        n=values.whole("num_local_experts" if values["num_experts"] is None else "num_experts"),
        n_chosen=values.whole("num_experts_per_tok"),
        hidden_dim=values.whole("moe_intermediate_size"),
        is_normed=values.flag("norm_topk_prob"),
        dense_layers=tuple(i for i in range(n_layers) if i in dense or (i + 1) % step),
    )
    return replace(llama_config(values, "qwen3_moe"), architecture="mixture", experts=experts)


def _mixtral(values: Values) -> Config:
    experts = ExpertsConfig(
        values.whole("num_local_experts"), values.whole("num_experts_per_tok"), values.whole("intermediate_size")
    )
    return replace(llama_config(values, "mixtral"), architecture="mixture", experts=experts)


def _gpt2(values: Values) -> Config:
    values.must_be("activation_function", *GELU_TANH)
    values.must_be("scale_attn_weights", True)
    values.must_be("scale_attn_by_inverse_layer_idx", False)
    dim, n_heads = values.whole("n_embd"), values.whole("n_head")
    return Config(
        dim=dim,
        hidden_dim=4 * dim if values["n_inner"] is None else values.whole("n_inner"),
        n_layers=values.whole("n_layer"),
        n_heads=n_heads,
        n_kv_heads=n_heads,
        vocab_size=values.whole("vocab_size"),
        seq_len=values.whole("n_positions"),
        shared_classifier=values.flag("tie_word_embeddings"),
        architecture="gpt2",
        norm_eps=values.real("layer_norm_epsilon", 0, 1),
    )


def _gemma3(values: Values) -> Config:
    values.must_be("attention_bias", False)
    values.must_be("use_bidirectional_attention", False, None)
    values.must_be("hidden_activation", *GELU_TANH)
    dim, head_dim, n_layers = (
        values.whole("hidden_size"),
        values.whole("head_dim"),
        values.whole("num_hidden_layers", MOST_LAYERS),
    )
    full_layers = _full_layers(values, n_layers)
    return Config(
        dim=dim,
        hidden_dim=values.whole("intermediate_size"),
        n_layers=n_layers,
        n_heads=values.whole("num_attention_heads"),
        n_kv_heads=values.whole("num_key_value_heads"),
        vocab_size=values.whole("vocab_size"),
        seq_len=values.whole("max_position_embeddings"),
        shared_classifier=values.flag("tie_word_embeddings"),
        architecture="gemma",
        norm_eps=values.real("rms_norm_eps", 0, 1),
        head_dim=head_dim,
        **_gemma3_rope(values, head_dim),
        window=values.whole("sliding_window") if len(full_layers) < n_layers else 0,
        qk_norm=True,
        full_layers=full_layers,
        **gemma3_scales(dim, head_dim, values.real("query_pre_attn_scalar", LEAST_SCALE, 1 / LEAST_SCALE)),
    )


def gemma3_scales(dim: int, head_dim: int, query_scalar: float) -> dict[str, Any]:
    """Of embeddings sqrt(dim), of scores 1 / sqrt(query_scalar), which mostly is a head's length."""
    attention_scale = 0.0 if query_scalar == head_dim else float(np.float32(1 / np.sqrt(np.float64(query_scalar))))
    return {"embedding_scale": float(np.sqrt(np.float32(dim))), "attention_scale": attention_scale}


def _full_layers(values: Values, n_layers: int) -> tuple[int, ...]:
    """Those without a window: by the list of all, or the last of each so many."""
    types = values["layer_types"]
    if types is None:
        pattern = values.whole("sliding_window_pattern")
        return (*range(pattern - 1, n_layers, pattern),)
    if not isinstance(types, list) or len(types) != n_layers or not all(kind in (FULL, SLIDING) for kind in types):
        raise values.refusal("layer_types", f"{FULL} or {SLIDING} for each of {n_layers} layers")
    return tuple(layer for layer, kind in enumerate(types) if kind == FULL)


def _gemma3_rope(values: Values, head_dim: int) -> dict[str, Any]:
    """The base of full layers' angles, all of which may be divided by one number, and that of the others'."""
    key = "rope_parameters"
    given = {} if values[key] is None else values[key]
    if not isinstance(given, dict) or not all(
        kind in (FULL, SLIDING) and isinstance(part, dict | None) for kind, part in given.items()
    ):
        raise values.refusal(key, f"an object of {FULL} and {SLIDING}")
    scaling = {} if values["rope_scaling"] is None else values["rope_scaling"]
    if not isinstance(scaling, dict):
        raise values.refusal("rope_scaling", "an object or null")
    thetas = []
    for kind, theta, more in ((SLIDING, "rope_local_base_freq", {}), (FULL, "rope_theta", scaling)):
        part = (given.get(kind) or {}) | more
        rope = Values(values.path, part, {"rope_theta": values[theta], "rope_type": part.get("type", "default")})
        rope.must_be("partial_rotary_factor", None, 1)
        thetas.append(rope.real("rope_theta", 1, MAX_THETA))
        rope.must_be("rope_type", "default", *["linear"][: kind == FULL])
    factor = rope.real("factor", 1, 1e6) if rope["rope_type"] == "linear" else 1.0
    divisors = (factor,) * (head_dim // 2) if factor != 1 else ()
    return {"rope_theta": thetas[1], "local_theta": thetas[0], "rope_divisors": divisors}


OTHERS = {
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt2": _gpt2,
    "gemma3_text": _gemma3,
    "lfm2": _lfm2,
}  # families that are not like Llama


# Marks


def _read_marks(folder: Path, given: Mapping[str, Any], values: Values, vocab_size: int) -> tuple[dict[int, str], int | None]:
    """The ids that end a text, of both files, and the one that begins one; the family's where neither tells.

    Ids beyond the vocabulary never come: transformers writes 50256 into the config of a GPT-2 of 100 tokens.
    """
    path = folder / GENERATION_CONFIG
    sources = [Values(folder / CONFIG, given, {}), Values(path, read_object(path) if path.exists() else {}, {})]

    def ids(key: str) -> list[int]:
        telling = [source for source in sources if key in source] or [values]
        return [i for source in telling for i in _ids(source, key) if i < vocab_size]

    return dict.fromkeys(ids("eos_token_id"), END), next(iter(ids("bos_token_id")), None)


def _ids(values: Values, key: str) -> list[int]:
    value = values[key]
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(i) is not int or i < 0 for i in ids):
        raise values.refusal(key, "an id, several in a list, or null")
    return ids
