"""LFM2 (Liquid AI 2025, arXiv:2511.23404): short convolutions in most layers, attention in the others; with experts, too."""

from dataclasses import replace

from specdec.config import LEAST_SCALE, Config, ConvConfig, LayerConfig, of_some
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import MAX_SIZE, Values
from specdec.families.family import InFolder, InGguf, Keys
from specdec.families.tensor_specs import (
    CONV_IN,
    CONV_IN_BIASES,
    TAPS,
    TURNED,
    TURNED_TAPS,
    Place,
    changed,
    experts_in_one,
    named,
    together,
)

DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 65536, "hidden_size": 2560, "intermediate_size": 12288, "num_key_value_heads": 8,
    "max_position_embeddings": 128000, "norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 1e6, "conv_bias": False,
    "conv_L_cache": 3, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True,
    "full_attn_idxs": None, "layer_types": None,
}  # fmt: skip
MOE_DEFAULTS = DEFAULTS | {
    "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_dense_layers": 2,
    "num_experts_per_tok": 4, "num_experts": 32, "use_expert_bias": True, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
    "block_auto_adjust_ff_dim": False,
}  # fmt: skip
ALIASES = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}
KINDS = ("conv", hf.FULL)
PLACES = changed(
    named("%s.weight", tok_emb="embed_tokens", rms_final="embedding_norm", wcls="lm_head")
    | named(
        hf.OF_LAYERS, rms_att="operator_norm", wq="self_attn.q_proj", wk="self_attn.k_proj", wv="self_attn.v_proj",
        wo="self_attn.out_proj", q_norm="self_attn.q_layernorm", k_norm="self_attn.k_layernorm",
        conv_out="conv.out_proj", rms_ffn="ffn_norm", w1="feed_forward.w1", w2="feed_forward.w2", w3="feed_forward.w3",
    )
    | named(hf.BIASES, conv_bias="conv.conv", conv_out_bias="conv.out_proj")
    | together(CONV_IN, hf.OF_LAYERS % "conv.in_proj")
    | together(CONV_IN_BIASES, hf.BIASES % "conv.in_proj")
    | {"conv": Place("layers.{}.conv.conv.weight", made=TAPS)},
    TURNED, halves=True,
)  # fmt: skip
EXPERTS = {
    "router": Place("layers.{}.feed_forward.gate.weight"),
    "router_bias": Place("layers.{}.feed_forward.expert_bias"),
    **{f"experts_w{n}": Place(f"layers.{{}}.feed_forward.experts.{{}}.w{n}.weight", each=True) for n in (1, 2, 3)},
}
EXPERTS_IN_ONE = experts_in_one("layers.{}.feed_forward.experts.%s")
GGUF_PLACES = gguf.PLACES | {
    **together(CONV_IN, gguf.OF_LAYERS % "shortconv.in_proj"),
    "conv": Place("blk.{}.shortconv.conv.weight", made=TURNED_TAPS),
    "conv_out": Place("blk.{}.shortconv.out_proj.weight"),
    "rms_final": Place("token_embd_norm.weight"),
}


def config(values: Values) -> Config:
    """The numbers that a config.json says."""
    hf.no_window(values)
    hf.no_biases(values)
    sizes = hf.numbers(values) | {"hidden_dim": hidden_dim(values), "norm_eps": values.real("norm_eps", 0, 1)}
    conv = LayerConfig(mixer=ConvConfig(values.whole("conv_L_cache"), values.flag("conv_bias")))
    layers = of_some(conv, convolutions(values, sizes["n_layers"]), sizes["n_layers"])
    return Config(**sizes, attention=hf.attention(values, qk_norm=True), layers=layers)


def moe_config(values: Values) -> Config:
    """The same of a model with experts behind its first layers."""
    dense = values["num_dense_layers"]
    if type(dense) is not int or not 0 <= dense <= values.whole("num_hidden_layers", most=hf.MOST_LAYERS):
        raise values.refusal("num_dense_layers", "a number of layers")
    experts = hf.experts(
        values, "moe_intermediate_size", is_normed=values.flag("norm_topk_prob"), dense_layers=(*range(dense),), is_sigmoid=True,
        is_biased=values.flag("use_expert_bias"), scale=values.real("routed_scaling_factor", LEAST_SCALE, 1 / LEAST_SCALE),
    )  # fmt: skip
    return replace(config(values), experts=experts)


def hidden_dim(values: Values) -> int:
    """How wide an MLP is, by what that is made of."""
    hidden, multiplier = values.whole("intermediate_size"), values["block_ffn_dim_multiplier"]
    if values.flag("block_auto_adjust_ff_dim"):
        hidden = int(2 * hidden / 3)
        if multiplier is not None:
            unit = values.whole("block_multiple_of")
            hidden = int(values.real("block_ffn_dim_multiplier", 0, MAX_SIZE) * hidden)
            hidden = -(-hidden // unit) * unit
    if hidden > MAX_SIZE:
        raise values.refusal("intermediate_size", f"what makes an MLP of at most {MAX_SIZE} rows")
    return hidden


def convolutions(values: Values, n_layers: int) -> tuple[int, ...]:
    """Layers that are none of attention, by the list of all or by that of the others."""
    key = "full_attn_idxs" if values["layer_types"] is None else "layer_types"
    if values["layer_types"] is not None:
        types = values.of_layers(key, n_layers, KINDS, " or ".join(KINDS))
        layers = [i for i, kind in enumerate(types) if kind == KINDS[0]]
    else:
        attention = values.layers(key, n_layers) if values[key] is not None else [*range(n_layers)]
        layers = [i for i in range(n_layers) if i not in attention]
    if not 0 < len(layers) < n_layers:
        raise values.refusal(key, "layers of both kinds, conv and attention")
    return (*layers,)


def gguf_config(k: Keys) -> Config:
    """The numbers that a GGUF file's keys say."""
    key = "attention.head_count_kv"
    heads = k[key]
    n_layers = k.common["n_layers"]
    if not isinstance(heads, list) or len(heads) != n_layers or any(type(n) is not int or n < 0 for n in heads):
        raise k.refusal(key, f"numbers of {n_layers} layers, 0 of convolutions")
    if 0 not in heads or len({*heads} - {0}) != 1:
        raise k.refusal(key, "layers of both kinds, all attention with as many heads")
    conv = LayerConfig(mixer=ConvConfig(k.whole("shortconv.l_cache")))
    layers = of_some(conv, [i for i, n in enumerate(heads) if n == 0], n_layers)
    return Config(**gguf.numbers(k, n_kv_heads=max(heads), qk_norm=True), layers=layers)


def moe_gguf_config(k: Keys) -> Config:
    """The same of a model with experts."""
    k.must_be(gguf.GATING, gguf.SIGMOID)
    bias = gguf.EXPERTS_PLACES["router_bias"].name
    is_biased = any(bias.format(i) in k.tensors for i in range(k.common["n_layers"]))
    return replace(gguf_config(k), experts=gguf.experts(k, is_sigmoid=True, is_biased=is_biased))


MOE_PLACES, MOE_GGUF_PLACES, BY_LAYER = PLACES | EXPERTS, GGUF_PLACES | gguf.EXPERTS_PLACES, ("attention.head_count_kv",)
FAMILY = (
    InFolder("lfm2", DEFAULTS, config, PLACES, aliases=ALIASES),
    InFolder("lfm2_moe", MOE_DEFAULTS, moe_config, MOE_PLACES, (EXPERTS_IN_ONE,), does=("num_experts",), aliases=ALIASES),
    InGguf("lfm2", gguf_config, GGUF_PLACES, by_layer=BY_LAYER),
    InGguf("lfm2moe", moe_gguf_config, MOE_GGUF_PLACES, does=(gguf.EXPERTS, gguf.GATING), by_layer=BY_LAYER),
)
