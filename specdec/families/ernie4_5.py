"""ERNIE 4.5 (Baidu 2025): Llama with adjacent RoPE pairs in every file, and with biases in all matmuls or in none.

Larger models have experts. A bias of softmax probabilities helps to choose them; some process every token.
"""

import re
from dataclasses import replace

from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import tensor_specs as specs
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
from specdec.model_config import ModelConfig

MAX_NORM_MIN = 1e-12  # the smallest divisor of the experts' weights in all published files, which no sum reaches
DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18, "num_attention_heads": 16,
    "num_key_value_heads": 2, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "head_dim": 128, "rope_theta": 500000.0,
}  # fmt: skip
MOE_DEFAULTS = DEFAULTS | {
    "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28, "num_attention_heads": 20,
    "num_key_value_heads": 4, "head_dim": None, "moe_intermediate_size": 1536, "num_experts_per_tok": 6, "num_experts": 64,
    "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1,
    "moe_norm_min": MAX_NORM_MIN,
}  # fmt: skip
KEY_ALIASES = {"use_bias": "attention_bias"}
MOE_KEY_ALIASES = KEY_ALIASES | {"moe_k": "num_experts_per_tok", "moe_num_experts": "num_experts"}
ROW = specs.TensorTransform(lambda stored: stored.reshape(-1), lambda shape: (1, *shape))
HF_TENSORS = specs.set_rope_pairs(hf.TENSORS, is_neox_style=False)
HF_MOE_TENSORS = HF_TENSORS | hf.EXPERT_TENSORS | hf.SHARED_EXPERTS_TENSORS | {
    "router_bias": specs.TensorSpec("layers.{}.mlp.moe_statics.e_score_correction_bias", transform=ROW),
}  # fmt: skip
GGUF_MOE_TENSORS = gguf.INTERLEAVED_ROPE_TENSORS | specs.replace(gguf.EXPERT_TENSORS, ("router_bias",), transform=ROW)
IGNORED_NAMES = re.compile(r"mtp_.*")  # a head for the token after the next


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a dense ERNIE 4.5 model from the keys of config.json."""
    attention = hf.parse_attention(values)
    return ModelConfig(**hf.parse_base_fields(values), attention=attention, mlp_bias=values.get_bool("attention_bias"))


def parse_moe_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of an ERNIE 4.5 model with experts from the keys of config.json."""
    hf.reject_biases(values)
    values.get_float("moe_norm_min", 0, MAX_NORM_MIN)
    n_layers, n_shared = values.get_int("num_hidden_layers", max_value=hf.MAX_LAYERS), values.get_count("moe_num_shared_experts")
    step, first, last = values.get_int("moe_layer_interval"), values["moe_layer_start_index"], values["moe_layer_end_index"]
    if type(first) is not int or not 0 <= first < n_layers:
        raise values.make_error("moe_layer_start_index", f"an integer from 0 to {n_layers - 1}")
    if type(last) is not int or not -1 <= last < n_layers:
        raise values.make_error("moe_layer_end_index", f"an integer from -1 to {n_layers - 1}")
    with_experts = {i for i in range(first, n_layers if last == -1 else last + 1) if (i + 1) % step == 0}
    experts = hf.parse_experts(
        values, "moe_intermediate_size", has_selection_bias=True,
        dense_layers=tuple(i for i in range(n_layers) if i not in with_experts),
        shared_hidden_dim=n_shared * values.get_int("moe_intermediate_size"),
    )  # fmt: skip
    return replace(parse_config(values), experts=experts)


def parse_moe_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of an ERNIE 4.5 model with experts from a GGUF file's metadata."""
    return replace(gguf.parse_config(metadata), experts=gguf.parse_experts(metadata, has_selection_bias=True))


FAMILY = (
    HFFamily("ernie4_5", DEFAULTS, parse_config, HF_TENSORS, key_aliases=KEY_ALIASES),
    HFFamily(
        "ernie4_5_moe", MOE_DEFAULTS, parse_moe_config, HF_MOE_TENSORS, (hf.FUSED_EXPERT_TENSORS,),
        ignored_names=IGNORED_NAMES, key_aliases=MOE_KEY_ALIASES,
    ),
    GGUFFamily("ernie4_5", gguf.parse_config, gguf.INTERLEAVED_ROPE_TENSORS),
    GGUFFamily("ernie4_5-moe", parse_moe_gguf_config, GGUF_MOE_TENSORS),
)  # fmt: skip
