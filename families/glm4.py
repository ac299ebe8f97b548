"""GLM-4 0414 (Z.ai 2025): norms around blocks, biases of q, k and v, and RoPE of half of a head's rows, whose pairs are
neighbours in every file.
"""

from ..architectures import AttentionConfig, Config
from . import folders, ggufs
from .family import InFolder, InGguf, Keys
from .places import GATED, TURNED, changed, named, together
from .values import Values

DEFAULTS = folders.DEFAULTS | {
    "vocab_size": 151552, "intermediate_size": 13696, "num_hidden_layers": 40, "num_key_value_heads": 2, "head_dim": 128,
    "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7, "bos_token_id": None, "eos_token_id": [151329, 151336, 151338],
    "attention_bias": True, "partial_rotary_factor": 0.5,
}  # fmt: skip
PLACES = (
    changed(folders.PLACES, TURNED, halves=False)
    | named(folders.OF_LAYERS, rms_att_out="post_self_attn_layernorm", rms_ffn_out="post_mlp_layernorm")
    | together(GATED, folders.OF_LAYERS % "mlp.gate_up_proj")
)
GGUF_PLACES = ggufs.PAIRS_PLACES | ggufs.NORMS_BEHIND | together(GATED, ggufs.OF_LAYERS % "ffn_up")


def config(values: Values) -> Config:
    """The numbers that a config.json says."""
    rope = folders.rope_values(values)
    rope.must_be("rope_type", "default")
    rope.must_be("mrope_section", None)
    values.must_be("mlp_bias", False)
    folders.no_window(values)
    turned = folders.partial_rope(rope, values, values, rope)
    attention = AttentionConfig(turned, qkv_bias=values.flag("attention_bias"))
    return Config(**folders.numbers(values), attention=attention, norms="around")


def gguf_config(k: Keys) -> Config:
    """The numbers that a GGUF file's keys say. Sections are of models beside images, whose rows lie in another order."""
    k.must_be("rope.dimension_sections", None)
    return Config(**ggufs.numbers(k, is_partial=True), norms="around")


FAMILY = (
    InFolder("glm4", DEFAULTS, config, PLACES, does=("partial_rotary_factor",)),
    InGguf("glm4", gguf_config, GGUF_PLACES),
)
