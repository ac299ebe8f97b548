"""Gemma 4 (Gemma Team 2026): layers of two sizes, whose last ones take the keys and values of earlier ones.

Most layers see a window; in the others heads are longer, of fewer keys maybe, which may be their values, and a quarter of their
pairs turn. Smaller models give each layer more of a token than the residual stream has.
"""

import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specdec.config import LEAST_SCALE, AttentionConfig, Config, InputsConfig, LayerConfig, RopeConfig
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import MAX_SIZE, WIDEST, Values
from specdec.families.family import InFolder, InGguf, Keys
from specdec.families.gemma3 import BLOCKS, embedding_scale
from specdec.families.hf_common import FULL, MAX_THETA, SLIDING
from specdec.families.tensor_specs import experts_in_one, named

DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "attention_bias": False, "bos_token_id": 2, "eos_token_id": 1,
    "rope_parameters": None, "sliding_window": 512, "layer_types": None, "final_logit_softcapping": None,
    "use_bidirectional_attention": None, "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256,
    "attention_k_eq_v": False, "num_kv_shared_layers": 0, "enable_moe_block": False, "use_double_wide_mlp": False,
    "num_experts": None, "num_experts_per_tok": None, "moe_intermediate_size": None, "global_head_dim": 512,
    "num_global_key_value_heads": None, "per_layer_config": None,
}  # fmt: skip
CAP, BY_LAYER, OF_HEADS = "final_logit_softcapping", "per_layer_config", ("head_dim", "num_key_value_heads")
DOES = (CAP, BY_LAYER)
GGUF_BY_LAYER = ("attention.head_count_kv", gguf.MLP_DIM)
SHARED_LAYERS, INPUTS = "attention.shared_kv_layers", "embedding_length_per_layer_input"
HARMLESS = re.compile(hf.HARMLESS.pattern + r"|(model\.)?(audio_tower|embed_vision|embed_audio)\..*")
ROPE: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
SILENT: dict[str, Any] = {"rope_type": "default", "partial_rotary_factor": 1.0, "factor": 1.0}  # what is not said of one kind
PATTERN = 6  # where no list tells, each so many-th layer is full
UNTURNED = float(np.float32(1e30))  # what divides the angles of pairs that do not turn, in GGUF files too
EXPERTS_IN_ONE = experts_in_one("layers.{}.experts.%s")
PLACES = hf.PLACES | hf.NORMS_AROUND | EXPERTS_IN_ONE | {
    **named(
        hf.OF_LAYERS, wk_as_v="self_attn.k_proj", inputs_gate="per_layer_input_gate", inputs_back="per_layer_projection",
        inputs_norm="post_per_layer_input_norm", router="router.proj", rms_experts="pre_feedforward_layernorm_2",
        rms_mlp_out="post_feedforward_layernorm_1", rms_experts_out="post_feedforward_layernorm_2",
    ),
    **named("layers.{}.%s", layer_scale="layer_scalar", router_scale="router.scale", expert_scale="router.per_expert_scale"),
    **named(
        "%s.weight", input_rows="embed_tokens_per_layer", inputs="per_layer_model_projection",
        inputs_norm_in="per_layer_projection_norm",
    ),
}  # fmt: skip
GGUF_PLACES = gguf.PLACES | gguf.EXPERTS_PLACES | gguf.NORMS_BEHIND | {
    **named(
        gguf.OF_LAYERS, wk_as_v="attn_k", layer_scale="layer_output_scale", inputs_gate="inp_gate", inputs_back="proj",
        inputs_norm="post_norm", rms_experts="pre_ffw_norm_2", rms_mlp_out="post_ffw_norm_1", rms_experts_out="post_ffw_norm_2",
    ),
    **named("blk.{}.%s.scale", router_scale="ffn_gate_inp", expert_scale="ffn_down_exps"),
    **named(
        "%s.weight", input_rows="per_layer_token_embd", inputs="per_layer_model_proj", inputs_norm_in="per_layer_proj_norm"
    ),
}  # fmt: skip
SO_FEW = "so few that a layer of each type has keys and values of its own"
ATTENTION: dict[str, Any] = {"qk_norm": True, "value_norm": True, "scale": 1.0}
SHARED = ("self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.k_norm.weight", "self_attn.v_norm.weight")
GGUF_SHARED = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")


def config(values: Values) -> Config:
    """The numbers that a config.json says."""
    values.must_be("attention_bias", False)
    values.must_be("use_bidirectional_attention", None, "vision")
    sizes = hf.numbers(values, "hidden_activation", hf.GELU_TANH)
    n_layers, dim = sizes["n_layers"], sizes["dim"]
    full = hf.full_layers(values, n_layers, PATTERN) | {n_layers - 1}  # the last in any case
    own, same = _of_full(values, full, n_layers), values.flag("attention_k_eq_v")
    local, turned = _rope(values, own.head_dim or sizes["head_dim"])
    window = values.whole("sliding_window") if len(full) < n_layers else 0
    attention = AttentionConfig(local, window=window, **ATTENTION)
    whole = replace(own, attention=replace(attention, window=0, rope=turned, values_are_keys=same))
    n_shared = values.whole("num_kv_shared_layers", most=n_layers - 1) if values["num_kv_shared_layers"] != 0 else 0
    wide = 2 * sizes["hidden_dim"] if values.flag("use_double_wide_mlp") else None
    layers = _layers([whole if i in full else LayerConfig() for i in range(n_layers)], attention, full, n_shared, wide)
    if not layers:
        raise values.refusal("num_kv_shared_layers", SO_FEW)
    return Config(
        **sizes, **BLOCKS, attention=attention, layers=layers, inputs=_inputs(values), embedding_scale=embedding_scale(dim),
        layer_scale=True,
        experts=hf.experts(values, "moe_intermediate_size", is_beside=True) if values.flag("enable_moe_block") else None,
        logit_cap=values.real(CAP, LEAST_SCALE, 1 / LEAST_SCALE, 0.0),
    )  # fmt: skip


def _inputs(values: Values) -> InputsConfig | None:
    if values["hidden_size_per_layer_input"] in (0, None):
        return None
    return InputsConfig(values.whole("hidden_size_per_layer_input"), values.whole("vocab_size_per_layer_input"))


def _of_full(values: Values, full: Collection[int], n_layers: int) -> LayerConfig:
    """How heads differ in layers that see the whole text: by keys of their own, or layer by layer, as transformers saves it."""
    if values[BY_LAYER] is None:
        has_own = values.flag("attention_k_eq_v") and values["num_global_key_value_heads"]
        n_kv_heads = values.whole("num_global_key_value_heads") if has_own else None
        return LayerConfig(head_dim=values.whole("global_head_dim", most=WIDEST), n_kv_heads=n_kv_heads)
    given, names = values[BY_LAYER], {f"{i}" for i in full}
    alike = isinstance(given, dict) and {*given} == names and all(each == given[f"{n_layers - 1}"] for each in given.values())
    if not alike or not isinstance(given[f"{n_layers - 1}"], dict) or not {*given[f"{n_layers - 1}"]} <= {*OF_HEADS}:
        raise values.refusal(BY_LAYER, f"the same {' and '.join(OF_HEADS)} of each layer of {FULL}, and of no other")
    heads = Values(values.path, given[f"{n_layers - 1}"], {})
    head_dim, n_kv_heads = (heads.whole(key, most=WIDEST) if key in heads else None for key in OF_HEADS)
    return LayerConfig(head_dim=head_dim, n_kv_heads=n_kv_heads)


def _layers(
    own: Sequence[LayerConfig], attention: AttentionConfig, full: Collection[int], n_shared: int, wide: int | None = None
) -> tuple[LayerConfig, ...]:
    """Those, of which the last n_shared take keys and values of the last one before them that is alike, and have an MLP of that
    width; attention: of those that have none of their own. Nothing where there is none to take from.
    """
    layers, first = [*own], len(own) - n_shared
    for i in range(first, len(own)):
        source = next((j for j in reversed(range(first)) if (j in full) == (i in full)), None)
        if source is None:
            return ()
        taking = replace(own[i].attention or attention, kv_layer=source)
        layers[i] = replace(own[i], attention=taking, hidden_dim=wide or own[i].hidden_dim)
    return tuple(layers)


def _rope(values: Values, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """In layers with a window, and in the others."""
    key = "rope_parameters"
    given = ROPE if values[key] is None else values[key]
    if not isinstance(given, dict) or not all(isinstance(given.get(kind), dict) for kind in (SLIDING, FULL)):
        raise values.refusal(key, f"an object of {SLIDING} and {FULL}")
    local, whole = (Values(values.path, given[kind], SILENT) for kind in (SLIDING, FULL))
    local.must_be("rope_type", "default")
    local.must_be("partial_rotary_factor", None, 1)
    whole.must_be("rope_type", "proportional")
    n_turned = int(whole.real("partial_rotary_factor", 0, 1) * head_dim // 2)
    divisors = proportional(n_turned, head_dim // 2, whole.real("factor", LEAST_SCALE, 1 / LEAST_SCALE))
    thetas = (each.real("rope_theta", 1, MAX_THETA) for each in (local, whole))
    return RopeConfig(next(thetas)), RopeConfig(next(thetas), divisors=divisors)


def proportional(n_turned: int, n_pairs: int, factor: float = 1.0) -> tuple[float, ...]:
    """What divides the angles of a head's pairs, of which the first n_turned turn."""
    return (factor,) * n_turned + (UNTURNED,) * (n_pairs - n_turned)


def gguf_config(k: Keys, n_shared: int | None = None) -> Config:
    """The numbers that a GGUF file's keys say: those of heads are of layers that see the whole text.

    n_shared: how many layers, the last, take others' keys and values, by default as many as the file says.
    """
    n_layers, dim = k.common["n_layers"], k.common["dim"]
    full = gguf.full_layers(k)
    n_kv_heads, widths = (_by_layer(k, key, n_layers) for key in GGUF_BY_LAYER)
    sizes = gguf.numbers(k, n_kv_heads=max(n_kv_heads), has_biases=False, window=k.whole(gguf.WINDOW), **ATTENTION)
    local = k.whole("attention.key_length_swa", sizes["head_dim"])
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if k.whole(key, local) != local:
            raise k.refusal(key, f"{local}, a head's length")
    if n_shared is None:
        n_shared = k.count(SHARED_LAYERS)
    whole: AttentionConfig = replace(sizes["attention"], window=0)
    theta = k.real("rope.freq_base_swa", 1, MAX_THETA, ROPE[SLIDING]["rope_theta"])
    attention = replace(sizes["attention"], rope=replace(whole.rope, theta=theta, divisors=()))
    own = []
    for i in range(n_layers):
        same = i < n_layers - n_shared and f"blk.{i}.attn_v.weight" not in k.tensors
        sees = replace(whole if i in full else attention, values_are_keys=same)
        own.append(LayerConfig(n_kv_heads[i], sizes["head_dim"] if i in full else local, widths[i], sees))
    if not (layers := _layers(own, attention, full, n_shared)):
        raise k.refusal(SHARED_LAYERS, SO_FEW)
    if sizes["experts"]:
        sizes["experts"] = replace(sizes["experts"], is_beside=True)
    n_inputs = k.count(INPUTS)
    sizes |= {"head_dim": local, "hidden_dim": widths[0], "n_kv_heads": n_kv_heads[0], "attention": attention}
    return Config(
        **sizes, **BLOCKS, layers=layers, layer_scale="blk.0.layer_output_scale.weight" in k.tensors,
        embedding_scale=embedding_scale(dim),
        inputs=InputsConfig(n_inputs, k.tensors.shape("per_layer_token_embd.weight")[0]) if n_inputs else None,
        logit_cap=k.real(CAP, 0, 1 / LEAST_SCALE, 0.0),
    )  # fmt: skip


def _by_layer(k: Keys, key: str, n_layers: int) -> list[int]:
    """A whole number for each layer, of a list or of one for all."""
    given = k[key] if isinstance(k[key], list) else [k[key]] * n_layers
    if len(given) != n_layers or not all(type(n) is int and 1 <= n <= MAX_SIZE for n in given):
        raise k.refusal(key, f"a whole number from 1 on, or one for each of {n_layers} layers")
    return given


def _sharing_layers(config: Config) -> list[int]:
    """Those that take the keys and values of others."""
    return [i for i in range(config.n_layers) if not config.of_layer(i).has_cache]


def unused(config: Config) -> Iterator[str]:
    """What a folder may hold of layers that take the keys and values of others."""
    return (f"layers.{i}.{name}" for i in _sharing_layers(config) for name in SHARED)


def gguf_unused(config: Config) -> Iterator[str]:
    """The same of a GGUF file."""
    of_layers = (f"blk.{i}.{name}" for i in _sharing_layers(config) for name in GGUF_SHARED)
    return itertools.chain([gguf.ROPE_DIVISORS], of_layers)


FAMILY = (
    InFolder(
        "gemma4_text", DEFAULTS, config, PLACES, harmless=HARMLESS, does=(*DOES, "num_experts"),
        aliases={"top_k_experts": "num_experts_per_tok"}, beside={"gemma4": True}, unused=unused,
    ),
    InGguf(
        "gemma4", gguf_config, GGUF_PLACES, (gguf.EXPERTS_IN_ONE,), does=(gguf.WINDOW, CAP, gguf.EXPERTS),
        by_layer=GGUF_BY_LAYER, unused=gguf_unused,
    ),
)  # fmt: skip
