"""Seed-OSS (ByteDance Seed 2025): Llama whose products say apart which of them add biases, those of q, k and v as published."""

from specdec.config import AttentionConfig, Config
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import Values
from specdec.families.family import InFolder, InGguf
from specdec.families.llama import gguf_config
from specdec.families.tensor_specs import named

DEFAULTS = hf.DEFAULTS | {
    "vocab_size": 155136, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 80,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288, "attention_bias": True,
    "attention_out_bias": False, "bos_token_id": 0,
}  # fmt: skip


def config(values: Values) -> Config:
    """The numbers that a config.json says."""
    hf.no_window(values)
    hf.all_are(hf.FULL, values)
    biases = {"qkv_bias": values.flag("attention_bias"), "wo_bias": values.flag("attention_out_bias")}
    attention = AttentionConfig(hf.rope(values), **biases)
    return Config(**hf.numbers(values), attention=attention, mlp_bias=values.flag("mlp_bias"))


FAMILY = (
    InFolder("seed_oss", DEFAULTS, config, hf.PLACES),
    InGguf("seed_oss", gguf_config, gguf.PLACES | named(gguf.OF_LAYERS, rms_ffn="post_attention_norm")),
)
