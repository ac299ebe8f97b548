"""gpt-oss (OpenAI 2025, arXiv:2508.10925): experts with biases and a clamped gate, attention sinks, YaRN.

Each second layer has a sliding window.
"""

from dataclasses import replace

from specdec.argument_checks import MIN_SCALE
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import tensor_specs as specs
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
from specdec.model_config import AttentionConfig, ModelConfig, YarnRopeScaling

DEFAULT_ROPE = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
    "beta_slow": 1.0, "truncate": False,
}  # fmt: skip
DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "bos_token_id": None, "eos_token_id": None, "attention_bias": True, "num_local_experts": 128, "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "layer_types": None, "rope_theta": 150000.0,
}  # fmt: skip
GGUF_SWIGLU_LIMIT, GGUF_SWIGLU_ALPHA = 7.0, 1.702  # GGUF files do not give them
EXPERTS_PREFIX = "layers.{}.mlp.experts."
HF_TENSORS = hf.TENSORS | {
    **specs.make("layers.{}.%s", sinks="self_attn.sinks", router="mlp.router.weight", router_b="mlp.router.bias"),
    "experts_w1": specs.TensorSpec(EXPERTS_PREFIX + "gate_up_proj", is_transposed=True, is_per_expert=True, row_stride=(0, 2)),
    "experts_w2": specs.TensorSpec(EXPERTS_PREFIX + "down_proj", is_transposed=True, is_per_expert=True),
    "experts_w3": specs.TensorSpec(EXPERTS_PREFIX + "gate_up_proj", is_transposed=True, is_per_expert=True, row_stride=(1, 2)),
    "experts_b1": specs.TensorSpec(EXPERTS_PREFIX + "gate_up_proj_bias", transform=specs.EVEN_COLUMNS),
    "experts_b2": specs.TensorSpec(EXPERTS_PREFIX + "down_proj_bias"),
    "experts_b3": specs.TensorSpec(EXPERTS_PREFIX + "gate_up_proj_bias", transform=specs.ODD_COLUMNS),
}
MXFP4_TENSORS = {  # as published; transformers saves another layout
    name: spec._replace(name=f"{spec.name}_blocks", is_transposed=False, scales_name=f"{spec.name}_scales")
    for name, spec in HF_TENSORS.items()
    if name in specs.EXPERT_WEIGHTS
}
GGUF_TENSORS = gguf.TENSORS | gguf.EXPERT_TENSORS | {
    **specs.make(gguf.LAYER_WEIGHT, rms_ffn="post_attention_norm", sinks="attn_sinks"),
    **specs.make(
        gguf.LAYER_BIAS, router_b="ffn_gate_inp", experts_b1="ffn_gate_exps", experts_b2="ffn_down_exps", experts_b3="ffn_up_exps"
    ),
}  # fmt: skip


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a gpt-oss model from the keys of config.json."""
    quantization = values["quantization_config"]
    if quantization is not None and (not isinstance(quantization, dict) or quantization.get("quant_method") != "mxfp4"):
        raise values.make_error("quantization_config", "null, or an object with the quant_method mxfp4")
    n_layers = values.get_int("num_hidden_layers", max_value=hf.MAX_LAYERS)
    full = hf.get_full_attention_layers(values, n_layers, 2)
    experts = hf.parse_experts(
        values, "intermediate_size", "num_local_experts",
        swiglu_limit=values.get_scale("swiglu_limit"),
        swiglu_alpha=values.get_float("swiglu_alpha", 0, 1 / MIN_SCALE),
    )  # fmt: skip
    window = values.get_int("sliding_window") if len(full) < n_layers else 0
    rope = hf.parse_rope(values, hf.get_rope_values(values, DEFAULT_ROPE))
    attention = hf.parse_attention(values, rope, sinks=True, window=window)
    layers = hf.make_full_attention_layers(attention, full, n_layers)
    return ModelConfig(**hf.parse_base_fields(values), attention=attention, layers=layers, experts=experts)


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a gpt-oss model from a GGUF file's metadata.

    YaRN's ramp is not truncated, as in folders; llama.cpp rounds it to whole pairs.
    """
    n_layers = metadata.common_fields["n_layers"]
    sizes = gguf.parse_base_fields(metadata, sinks=True, window=metadata.get_int(gguf.SLIDING_WINDOW_KEY))
    attention: AttentionConfig = sizes["attention"]
    if isinstance(yarn := attention.rope.scaling, YarnRopeScaling):
        attention = replace(attention, rope=replace(attention.rope, scaling=replace(yarn, truncate=False)))
    experts = gguf.parse_experts(metadata, swiglu_limit=GGUF_SWIGLU_LIMIT, swiglu_alpha=GGUF_SWIGLU_ALPHA)
    layers = hf.make_full_attention_layers(attention, range(1, n_layers, 2), n_layers)
    return ModelConfig(**sizes | {"experts": experts, "attention": attention}, layers=layers)


FAMILY = (
    HFFamily("gpt_oss", DEFAULTS, parse_config, HF_TENSORS, (MXFP4_TENSORS,), supported_keys=("quantization_config",)),
    GGUFFamily(
        "gpt-oss", parse_gguf_config, GGUF_TENSORS, supported_keys=(gguf.SLIDING_WINDOW_KEY, gguf.GATING_FUNC_KEY)
    ),
)  # fmt: skip
