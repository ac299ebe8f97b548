"""LFM2 (Liquid AI 2025, arXiv:2511.23404): short convolutions in most layers, attention in the others; also with experts."""

from dataclasses import replace

from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import tensor_specs as specs
from specdec.families.config_values import MAX_SIZE, ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
from specdec.mixer_config import ShortConvConfig
from specdec.model_config import LayerConfig, ModelConfig, make_layer_configs

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
KEY_ALIASES = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}
LAYER_TYPES = ("conv", hf.FULL_ATTENTION)
HF_TENSORS = specs.set_rope_pairs(
    specs.make("%s.weight", tok_emb="embed_tokens", rms_final="embedding_norm", wcls="lm_head")
    | specs.make(
        hf.LAYER_WEIGHT, rms_att="operator_norm", wq="self_attn.q_proj", wk="self_attn.k_proj", wv="self_attn.v_proj",
        wo="self_attn.out_proj", q_norm="self_attn.q_layernorm", k_norm="self_attn.k_layernorm",
        conv_out="conv.out_proj", rms_ffn="ffn_norm", w1="feed_forward.w1", w2="feed_forward.w2", w3="feed_forward.w3",
    )
    | specs.make(hf.LAYER_BIAS, conv_bias="conv.conv", conv_out_bias="conv.out_proj")
    | specs.fuse(specs.CONV_IN, hf.LAYER_WEIGHT % "conv.in_proj")
    | specs.fuse(specs.CONV_IN_BIASES, hf.LAYER_BIAS % "conv.in_proj")
    | {"conv": specs.TensorSpec("layers.{}.conv.conv.weight", transform=specs.CONV_TAPS)}
)  # fmt: skip
EXPERT_TENSORS = specs.make("layers.{}.feed_forward.%s", router="gate.weight", router_bias="expert_bias") | specs.make_per_expert(
    "layers.{}.feed_forward.experts.{}.%s.weight", experts_w1="w1", experts_w2="w2", experts_w3="w3"
)
FUSED_EXPERT_TENSORS = specs.fuse_experts("layers.{}.feed_forward.experts.%s")
GGUF_TENSORS = gguf.TENSORS | {
    **specs.fuse(specs.CONV_IN, gguf.LAYER_WEIGHT % "shortconv.in_proj"),
    **specs.make(gguf.LAYER_WEIGHT, conv_out="shortconv.out_proj"),
    **specs.make("%s.weight", rms_final="token_embd_norm"),
    "conv": specs.TensorSpec("blk.{}.shortconv.conv.weight", transform=specs.TRANSPOSED_CONV_TAPS),
}


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a dense LFM2 model from the keys of config.json."""
    hf.reject_window(values)
    hf.reject_biases(values)
    sizes = hf.parse_base_fields(values)
    sizes |= {"hidden_dim": compute_hidden_dim(values), "norm_eps": values.get_float("norm_eps", 0, 1)}
    conv = LayerConfig(mixer=ShortConvConfig(values.get_int("conv_L_cache"), values.get_bool("conv_bias")))
    layers = make_layer_configs(conv, get_conv_layers(values, sizes["n_layers"]), sizes["n_layers"])
    return ModelConfig(**sizes, attention=hf.parse_attention(values, qk_norm=True), layers=layers)


def parse_moe_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of an LFM2 model with experts in all but its first layers, from the keys of config.json."""
    dense = values["num_dense_layers"]
    if type(dense) is not int or not 0 <= dense <= values.get_int("num_hidden_layers", max_value=hf.MAX_LAYERS):
        raise values.make_error("num_dense_layers", "a number of layers")
    experts = hf.parse_experts(
        values, "moe_intermediate_size", norm_topk_prob=values.get_bool("norm_topk_prob"), dense_layers=(*range(dense),),
        is_sigmoid=True, has_selection_bias=values.get_bool("use_expert_bias"),
        routed_scaling_factor=values.get_scale("routed_scaling_factor"),
    )  # fmt: skip
    return replace(parse_config(values), experts=experts)


def compute_hidden_dim(values: ConfigValues) -> int:
    """Return the hidden dim of LFM2's MLP, which follows from several keys of config.json."""
    hidden, multiplier = values.get_int("intermediate_size"), values["block_ffn_dim_multiplier"]
    if values.get_bool("block_auto_adjust_ff_dim"):
        hidden = int(2 * hidden / 3)
        if multiplier is not None:
            unit = values.get_int("block_multiple_of")
            hidden = int(values.get_float("block_ffn_dim_multiplier", 0, MAX_SIZE) * hidden)
            hidden = -(-hidden // unit) * unit
    if hidden > MAX_SIZE:
        raise values.make_error("intermediate_size", f"a size that gives an MLP of at most {MAX_SIZE} rows")
    return hidden


def get_conv_layers(values: ConfigValues, n_layers: int) -> tuple[int, ...]:
    """Return the indices of the convolution layers, from the list of layer types or from the list of attention layers.

    Raises:
        CheckpointError: The list is not valid, or all layers have the same type.
    """
    key = "full_attn_idxs" if values["layer_types"] is None else "layer_types"
    if values["layer_types"] is not None:
        types = values.get_per_layer(key, n_layers, LAYER_TYPES, " or ".join(LAYER_TYPES))
        layers = [i for i, layer_type in enumerate(types) if layer_type == LAYER_TYPES[0]]
    else:
        attention = values.get_layer_indices(key, n_layers) if values[key] is not None else [*range(n_layers)]
        layers = [i for i in range(n_layers) if i not in attention]
    if not 0 < len(layers) < n_layers:
        raise values.make_error(key, "layers of both types, conv and attention")
    return (*layers,)


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a dense LFM2 model from a GGUF file's metadata."""
    n_kv_heads, conv_layers = gguf.parse_attention_heads(metadata, "convolutions")
    conv = LayerConfig(mixer=ShortConvConfig(metadata.get_int("shortconv.l_cache")))
    layers = make_layer_configs(conv, conv_layers, metadata.common_fields["n_layers"])
    return ModelConfig(**gguf.parse_base_fields(metadata, n_kv_heads=n_kv_heads, qk_norm=True), layers=layers)


def parse_moe_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of an LFM2 model with experts from a GGUF file's metadata."""
    metadata.require(gguf.GATING_FUNC_KEY, gguf.SIGMOID)
    experts = gguf.parse_experts(metadata, is_sigmoid=True, has_selection_bias=gguf.has_selection_bias(metadata))
    return replace(parse_gguf_config(metadata), experts=experts)


FAMILY = (
    HFFamily("lfm2", DEFAULTS, parse_config, HF_TENSORS, key_aliases=KEY_ALIASES),
    HFFamily(
        "lfm2_moe", MOE_DEFAULTS, parse_moe_config, HF_TENSORS | EXPERT_TENSORS, (FUSED_EXPERT_TENSORS,), key_aliases=KEY_ALIASES
    ),
    GGUFFamily("lfm2", parse_gguf_config, GGUF_TENSORS, per_layer_keys=(gguf.KV_HEADS_KEY,)),
    GGUFFamily(
        "lfm2moe", parse_moe_gguf_config, GGUF_TENSORS | gguf.EXPERT_TENSORS, supported_keys=(gguf.GATING_FUNC_KEY,),
        per_layer_keys=(gguf.KV_HEADS_KEY,),
    ),
)  # fmt: skip
