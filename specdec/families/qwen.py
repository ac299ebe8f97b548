"""Qwen2, which adds biases to q, k and v (Yang et al. 2024, arXiv:2407.10671), Qwen3, which norms their heads (Yang et al. 2025,
arXiv:2505.09388), and Qwen3 with experts.
"""

from dataclasses import replace

from specdec.config import AttentionConfig, Config
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import Values
from specdec.families.family import InFolder, InGguf, Keys
from specdec.families.llama import gguf_config

DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768,
    "bos_token_id": None, "eos_token_id": None, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
    "layer_types": None,
}  # fmt: skip
MOE_DEFAULTS = DEFAULTS | {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4, "sliding_window": None,
    "max_window_layers": 0, "num_experts": None, "num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": False, "mlp_only_layers": None, "decoder_sparse_step": 1,
}  # fmt: skip


def dense_config(values: Values, attention: AttentionConfig) -> Config:
    """That of attention with a window in the layers behind the first max_window_layers, or in those that a list says."""
    n_layers, before = values.whole("num_hidden_layers", most=hf.MOST_LAYERS), values["max_window_layers"]
    window, is_listed = values.whole("sliding_window", 0), values["layer_types"] is not None
    if not is_listed and type(before) is not int:
        raise values.refusal("max_window_layers", "a whole number")
    full = hf.full_layers(values, n_layers, 1) if is_listed else {*range(min(max(before, 0), n_layers))}
    if window and values.flag("use_sliding_window") and len(full) < n_layers:
        attention = replace(attention, window=window)
        return Config(**hf.numbers(values), attention=attention, layers=hf.unwindowed(attention, full, n_layers))
    if is_listed and len(full) < n_layers:
        raise values.refusal("layer_types", f"{hf.FULL} in all {n_layers} layers, without a window")
    return Config(**hf.numbers(values), attention=attention)


def qwen2_config(values: Values) -> Config:
    """The numbers that a config.json says."""
    values.must_be("mlp_bias", False)
    return dense_config(values, AttentionConfig(hf.rope(values), qkv_bias=True))


def qwen3_config(values: Values) -> Config:
    """The same of a Qwen3."""
    values.must_be("mlp_bias", False)
    return dense_config(values, hf.attention(values, qk_norm=True))


def moe_config(values: Values) -> Config:
    """The same of a Qwen3 with experts in some layers; windows are all layers'."""
    experts = hf.experts(
        values, "moe_intermediate_size", "num_local_experts" if values["num_experts"] is None else "num_experts",
        is_normed=values.flag("norm_topk_prob"), dense_layers=hf.dense_layers(values),
    )  # fmt: skip
    window = values.whole("sliding_window", 0) if values.flag("use_sliding_window") else 0
    values.must_be("mlp_bias", False)
    attention = hf.attention(values, window=window, qk_norm=True)
    return Config(**hf.numbers(values), attention=attention, experts=experts)


def normed_gguf_config(k: Keys) -> Config:
    """The numbers that a GGUF file's keys say of a Qwen3."""
    return Config(**gguf.numbers(k, qk_norm=True))


MOE_PLACES, MOE_DOES = hf.PLACES | hf.EXPERTS, ("num_experts", "num_local_experts")
FAMILY = (
    InFolder("qwen2", DEFAULTS, qwen2_config, hf.PLACES),
    InFolder("qwen3", DEFAULTS | {"head_dim": 128}, qwen3_config, hf.PLACES),
    InFolder("qwen3_moe", MOE_DEFAULTS, moe_config, MOE_PLACES, (hf.EXPERTS_IN_ONE,), does=MOE_DOES),
    InGguf("qwen2", gguf_config, gguf.PLACES),
    InGguf("qwen3", normed_gguf_config, gguf.PLACES),
    InGguf("qwen3moe", normed_gguf_config, gguf.PLACES | gguf.EXPERTS_PLACES, does=(gguf.EXPERTS,)),
)
