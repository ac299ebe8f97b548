"""ERNIE 4.5 with experts (Baidu 2025): a bias of softmax probabilities helps to choose them; some process every token."""

import re
from dataclasses import replace

from specdec.families import ernie4_5
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import ConfigValues
from specdec.families.family import (
    GGUFFamily,
    GGUFMetadata,
    HFFamily,
    TensorSpec,
    TensorTransform,
    make_tensor_specs,
    replace_in_specs,
)
from specdec.families.llama import parse_gguf_config as parse_llama_gguf_config
from specdec.model_config import ModelConfig

MAX_NORM_MIN = 1e-12  # the smallest divisor of the experts' weights in all published files, which no sum reaches
DEFAULTS = ernie4_5.DEFAULTS | {
    "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28, "num_attention_heads": 20,
    "num_key_value_heads": 4, "head_dim": None, "moe_intermediate_size": 1536, "num_experts_per_tok": 6, "num_experts": 64,
    "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1,
    "moe_norm_min": MAX_NORM_MIN,
}  # fmt: skip
KEY_ALIASES = {"use_bias": "attention_bias", "moe_k": "num_experts_per_tok", "moe_num_experts": "num_experts"}
ROW = TensorTransform(lambda stored: stored.reshape(-1), lambda shape: (1, *shape))
HF_TENSORS = ernie4_5.HF_TENSORS | hf.EXPERT_TENSORS | {
    "router_bias": TensorSpec("layers.{}.mlp.moe_statics.e_score_correction_bias", transform=ROW),
    **make_tensor_specs(
        hf.LAYER_WEIGHT, shared_w1="mlp.shared_experts.gate_proj", shared_w2="mlp.shared_experts.down_proj",
        shared_w3="mlp.shared_experts.up_proj",
    ),
}  # fmt: skip
GGUF_TENSORS = gguf.INTERLEAVED_ROPE_TENSORS | replace_in_specs(gguf.EXPERT_TENSORS, ("router_bias",), transform=ROW)
IGNORED_NAMES = re.compile(r"mtp_.*")  # a head for the token after the next


def parse_config(values: ConfigValues) -> ModelConfig:
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
    return replace(ernie4_5.parse_config(values), experts=experts)


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of an ERNIE 4.5 model with experts from a GGUF file's metadata."""
    experts = gguf.parse_experts(metadata, has_selection_bias=True)
    return replace(parse_llama_gguf_config(metadata), experts=experts)


FAMILY = (
    HFFamily(
        "ernie4_5_moe", DEFAULTS, parse_config, HF_TENSORS, (hf.FUSED_EXPERT_TENSORS,), ignored_names=IGNORED_NAMES,
        supported_keys=("num_experts",), key_aliases=KEY_ALIASES,
    ),
    GGUFFamily(
        "ernie4_5-moe", parse_gguf_config, GGUF_TENSORS, supported_keys=(gguf.EXPERT_COUNT_KEY,)
    ),
)  # fmt: skip
