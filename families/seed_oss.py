"""Seed-OSS (ByteDance Seed 2025): Llama whose products say apart which of them add biases, those of q, k and v as published."""

from ..architectures import AttentionConfig, Config
from . import folders, ggufs
from .family import InFolder, InGguf
from .llama import gguf_config
from .places import named
from .values import Values

DEFAULTS = folders.DEFAULTS | {
    "vocab_size": 155136, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 80,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288, "attention_bias": True,
    "attention_out_bias": False, "bos_token_id": 0,
}  # fmt: skip


def config(values: Values) -> Config:
    """The numbers that a config.json says."""
    folders.no_window(values)
    folders.all_are(folders.FULL, values)
    biases = {"qkv_bias": values.flag("attention_bias"), "wo_bias": values.flag("attention_out_bias")}
    attention = AttentionConfig(folders.rope(values), **biases)
    return Config(**folders.numbers(values), attention=attention, mlp_bias=values.flag("mlp_bias"))


FAMILY = (
    InFolder("seed_oss", DEFAULTS, config, folders.PLACES),
    InGguf("seed_oss", gguf_config, ggufs.PLACES | named(ggufs.OF_LAYERS, rms_ffn="post_attention_norm")),
)
