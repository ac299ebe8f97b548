"""The language models of Qwen2-VL and Qwen2.5-VL (Bai et al. 2025, arXiv:2502.13923), and of Qwen3-VL (arXiv:2511.21631).

They are those of Qwen2 and Qwen3. RoPE turns sections of pairs by the positions of time, height and width, which are equal in
text, so that it is plain RoPE. The vision parts of the files are ignored.
"""

import re

from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import qwen
from specdec.families.config_values import ConfigValues
from specdec.families.family import EXPERT_WEIGHTS, GGUFFamily, HFFamily, replace_in_specs
from specdec.families.llama import parse_gguf_config
from specdec.model_config import AttentionConfig, ModelConfig

QWEN2_DEFAULTS = qwen.DEFAULTS | {
    "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_window_layers": 80, "bos_token_id": 151643, "eos_token_id": 151645,
    "rope_theta": 1e6,
}  # fmt: skip
QWEN3_DEFAULTS = qwen.DEFAULTS | {"head_dim": 128, "max_position_embeddings": 128000, "rope_theta": 500000.0}
MOE_DEFAULTS = qwen.MOE_DEFAULTS | {
    "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 128000,
    "rope_theta": 500000.0, "num_local_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
}  # fmt: skip
IGNORED_NAMES = re.compile(r"visual\..*")
FUSED_EXPERT_TENSORS = replace_in_specs(hf.FUSED_EXPERT_TENSORS, EXPERT_WEIGHTS, is_transposed=True)  # as published


def parse_qwen2_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of the language model of a Qwen2-VL or Qwen2.5-VL model from the keys of config.json."""
    return qwen.make_dense_config(values, AttentionConfig(hf.parse_rope(values, has_sections=True), qkv_bias=True))


def parse_qwen3_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of the language model of a dense Qwen3-VL model from the keys of config.json."""
    attention = hf.parse_attention(values, hf.parse_rope(values, has_sections=True), qk_norm=True)
    return ModelConfig(**hf.parse_base_fields(values), attention=attention)


def parse_moe_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of the language model of a Qwen3-VL model with experts from the keys of config.json."""
    values.require("norm_topk_prob", True)
    return qwen.parse_moe_config(values, hf.parse_rope(values, has_sections=True))


HF_MOE_TENSORS = hf.TENSORS | hf.EXPERT_TENSORS | FUSED_EXPERT_TENSORS
FAMILY = (
    *(
        HFFamily(name, QWEN2_DEFAULTS, parse_qwen2_config, hf.TENSORS, ignored_names=IGNORED_NAMES, multimodal_types=types)
        for model in ("qwen2_vl", "qwen2_5_vl")
        for name, types in ((model, {}), (f"{model}_text", {model: False}))  # published files have no text_config
    ),
    HFFamily(
        "qwen3_vl_text", QWEN3_DEFAULTS, parse_qwen3_config, hf.TENSORS, ignored_names=IGNORED_NAMES,
        multimodal_types={"qwen3_vl": False},
    ),
    HFFamily(
        "qwen3_vl_moe_text", MOE_DEFAULTS, parse_moe_config, HF_MOE_TENSORS, ignored_names=IGNORED_NAMES,
        supported_keys=qwen.MOE_SUPPORTED_KEYS, multimodal_types={"qwen3_vl_moe": False},
    ),
    GGUFFamily("qwen2vl", parse_gguf_config, gguf.TENSORS),
    GGUFFamily("qwen3vl", qwen.parse_qwen3_gguf_config, gguf.TENSORS),
    GGUFFamily(
        "qwen3vlmoe", qwen.parse_qwen3_gguf_config, gguf.TENSORS | gguf.EXPERT_TENSORS, supported_keys=(gguf.EXPERT_COUNT_KEY,)
    ),
)  # fmt: skip
