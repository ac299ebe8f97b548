"""OLMo 2 (Team OLMo 2025, arXiv:2501.00656), OLMo 3 (2025, arXiv:2512.13961) and OLMoE (Muennighoff 2024, arXiv:2409.02060).

All have norms over all heads of a token's queries and keys. OLMo 2 and 3 have only post-norms. OLMo 3 has a sliding window in
most layers, and scaled RoPE in the others. OLMoE has experts in all layers.
"""

from dataclasses import replace

from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
from specdec.model_config import ModelConfig, RopeConfig

DEFAULTS = hf.DEFAULTS | {"vocab_size": 50304, "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": 50279}
OLMO3_DEFAULTS = DEFAULTS | {"sliding_window": 4096, "layer_types": None, "rope_theta": 500000.0}
OLMOE_DEFAULTS = DEFAULTS | {
    "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16,
    "max_position_embeddings": 4096, "num_experts_per_tok": 8, "num_experts": 64, "norm_topk_prob": False,
}  # fmt: skip
FULL_ATTENTION_INTERVAL = 4  # default
HF_TENSORS = hf.TENSORS | hf.POST_NORM_TENSORS


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of an OLMo 2 model from the keys of config.json."""
    attention = hf.parse_attention(values, qk_norm="whole")
    return ModelConfig(**hf.parse_base_fields(values), attention=attention, norm_placement="behind")


def parse_olmo3_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of an OLMo 3 model from the keys of config.json."""
    sizes, n_layers = hf.parse_base_fields(values), values.get_int("num_hidden_layers", max_value=hf.MAX_LAYERS)
    full = hf.get_full_attention_layers(values, n_layers, FULL_ATTENTION_INTERVAL)
    values.require("rope_theta", 500000.0)  # transformers 5 uses this base in sliding-window layers of older files
    values.require("original_max_position_embeddings", None)  # transformers reads it only from each layer type's RoPE
    ropes = hf.get_rope_values_by_layer_type(values)
    for rope in ropes:
        rope.require("truncate", None, True)  # transformers reads it only from the top level
    local, full_rope = (hf.parse_rope(values, rope) for rope in ropes)
    window = values.get_int("sliding_window") if len(full) < n_layers else 0
    attention = hf.parse_attention(values, local, qk_norm="whole", window=window)
    layers = hf.make_full_attention_layers(attention, full, n_layers, rope=full_rope)
    return ModelConfig(**sizes, attention=attention, layers=layers, norm_placement="behind")


def parse_olmoe_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of an OLMoE model from the keys of config.json."""
    experts = hf.parse_experts(values, "intermediate_size", norm_topk_prob=values.get_bool("norm_topk_prob"))
    return ModelConfig(**hf.parse_base_fields(values), attention=hf.parse_attention(values, qk_norm="whole"), experts=experts)


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of an OLMo 2 or 3 model from a GGUF file's metadata."""
    sizes = gguf.parse_base_fields(metadata, qk_norm="whole")
    if not (window := metadata.get_count(gguf.SLIDING_WINDOW_KEY)):
        return ModelConfig(**sizes, norm_placement="behind")
    rope = sizes["attention"].rope
    local = RopeConfig(metadata.get_float("rope.freq_base_swa", 1, hf.MAX_THETA, rope.theta))
    attention = replace(sizes["attention"], window=window, rope=local)
    full = gguf.get_full_attention_layers(metadata, FULL_ATTENTION_INTERVAL)
    layers = hf.make_full_attention_layers(attention, full, metadata.common_fields["n_layers"], rope=rope)
    return ModelConfig(**{**sizes, "attention": attention}, layers=layers, norm_placement="behind")


def parse_olmoe_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of an OLMoE model from a GGUF file's metadata.

    The weights of the chosen experts are not normalized, as in llama.cpp.
    """
    return replace(gguf.parse_config(metadata, qk_norm="whole"), experts=gguf.parse_experts(metadata, norm_topk_prob=False))


FAMILY = (
    HFFamily("olmo2", DEFAULTS, parse_config, HF_TENSORS),
    HFFamily("olmo3", OLMO3_DEFAULTS, parse_olmo3_config, HF_TENSORS),
    HFFamily("olmoe", OLMOE_DEFAULTS, parse_olmoe_config, hf.TENSORS | hf.EXPERT_TENSORS, (hf.FUSED_EXPERT_TENSORS,)),
    GGUFFamily("olmo2", parse_gguf_config, gguf.TENSORS | gguf.POST_NORM_TENSORS, supported_keys=(gguf.SLIDING_WINDOW_KEY,)),
    GGUFFamily("olmoe", parse_olmoe_gguf_config, gguf.TENSORS | gguf.EXPERT_TENSORS),
)
