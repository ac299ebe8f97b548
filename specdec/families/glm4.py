"""GLM-4 0414 (Z.ai 2025): pre- and post-norms, biases of q, k and v, and RoPE on half of each head.

RoPE pairs are adjacent in every file.
"""

from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import tensor_specs as specs
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
from specdec.model_config import AttentionConfig, ModelConfig

DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 151552, "intermediate_size": 13696, "num_hidden_layers": 40, "num_key_value_heads": 2, "head_dim": 128,
    "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7, "bos_token_id": None, "eos_token_id": [151329, 151336, 151338],
    "attention_bias": True, "partial_rotary_factor": 0.5,
}  # fmt: skip
HF_TENSORS = (
    specs.set_rope_pairs(hf.TENSORS, is_neox_style=False)
    | specs.make(hf.LAYER_WEIGHT, rms_att_out="post_self_attn_layernorm", rms_ffn_out="post_mlp_layernorm")
    | specs.fuse(specs.GATE_UP, hf.LAYER_WEIGHT % "mlp.gate_up_proj")
)
GGUF_TENSORS = gguf.INTERLEAVED_ROPE_TENSORS | gguf.POST_NORM_TENSORS | specs.fuse(specs.GATE_UP, gguf.LAYER_WEIGHT % "ffn_up")


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a GLM-4 model from the keys of config.json."""
    attention = AttentionConfig(hf.parse_plain_partial_rope(values), qkv_bias=values.get_bool("attention_bias"))
    return ModelConfig(**hf.parse_base_fields(values), attention=attention, norm_placement="around")


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a GLM-4 model from a GGUF file's metadata.

    Multimodal models, which have RoPE sections, are rejected: their rows have another order.
    """
    metadata.require("rope.dimension_sections", None)
    return ModelConfig(**gguf.parse_base_fields(metadata, has_partial_rope=True), norm_placement="around")


FAMILY = (
    HFFamily("glm4", DEFAULTS, parse_config, HF_TENSORS, supported_keys=("partial_rotary_factor",)),
    GGUFFamily("glm4", parse_gguf_config, GGUF_TENSORS),
)
