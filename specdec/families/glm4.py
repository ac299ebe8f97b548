"""GLM-4 0414 (Z.ai 2025): norms around blocks, biases of q, k and v, and RoPE of half of a head's rows, whose pairs are
neighbours in every file.
"""

from specdec.config import AttentionConfig, Config
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import Values
from specdec.families.family import InFolder, InGguf, Keys
from specdec.families.tensor_specs import GATED, TURNED, changed, named, together

DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 151552, "intermediate_size": 13696, "num_hidden_layers": 40, "num_key_value_heads": 2, "head_dim": 128,
    "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7, "bos_token_id": None, "eos_token_id": [151329, 151336, 151338],
    "attention_bias": True, "partial_rotary_factor": 0.5,
}  # fmt: skip
PLACES = (
    changed(hf.PLACES, TURNED, halves=False)
    | named(hf.OF_LAYERS, rms_att_out="post_self_attn_layernorm", rms_ffn_out="post_mlp_layernorm")
    | together(GATED, hf.OF_LAYERS % "mlp.gate_up_proj")
)
GGUF_PLACES = gguf.PAIRS_PLACES | gguf.NORMS_BEHIND | together(GATED, gguf.OF_LAYERS % "ffn_up")


def config(values: Values) -> Config:
    """The numbers that a config.json says."""
    rope = hf.rope_values(values)
    rope.must_be("rope_type", "default")
    rope.must_be("mrope_section", None)
    values.must_be("mlp_bias", False)
    hf.no_window(values)
    turned = hf.partial_rope(rope, values, values, rope)
    attention = AttentionConfig(turned, qkv_bias=values.flag("attention_bias"))
    return Config(**hf.numbers(values), attention=attention, norms="around")


def gguf_config(k: Keys) -> Config:
    """The numbers that a GGUF file's keys say. Sections are of models beside images, whose rows lie in another order."""
    k.must_be("rope.dimension_sections", None)
    return Config(**gguf.numbers(k, is_partial=True), norms="around")


FAMILY = (
    InFolder("glm4", DEFAULTS, config, PLACES, does=("partial_rotary_factor",)),
    InGguf("glm4", gguf_config, GGUF_PLACES),
)
