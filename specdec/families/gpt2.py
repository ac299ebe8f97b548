"""GPT-2 (Radford et al. 2019)."""

import re
from typing import Any

from specdec.config import Config
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import Values
from specdec.families.family import InFolder, InGguf, Keys
from specdec.families.tensor_specs import QKV, QKV_BIASES, Place, named, together

DEFAULTS: dict[str, Any] = {
    "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True, "bos_token_id": 50256, "eos_token_id": 50256,
}  # fmt: skip
ALIASES = {
    "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}  # fmt: skip
PREFIX, HARMLESS = re.compile(r"transformer\."), re.compile(r"h\.\d+\.attn\.(masked_)?bias")  # the causal mask
PLACES = {
    **named("%s.weight", tok_emb="wte", pos_emb="wpe", ln_final="ln_f", wcls="lm_head"),
    "ln_final_bias": Place("ln_f.bias"),
    **named("h.{}.%s.weight", ln_att="ln_1", ln_ffn="ln_2"),
    **named("h.{}.%s.bias", ln_att_bias="ln_1", ln_ffn_bias="ln_2", bo="attn.c_proj", b1="mlp.c_fc", b2="mlp.c_proj"),
    **together(QKV, "h.{}.attn.c_attn.weight", conv=True),
    **together(QKV_BIASES, "h.{}.attn.c_attn.bias"),
    "wo": Place("h.{}.attn.c_proj.weight", conv=True),
    "w1": Place("h.{}.mlp.c_fc.weight", conv=True),
    "w2": Place("h.{}.mlp.c_proj.weight", conv=True),
}
GGUF_PLACES = gguf.OUTER_PLACES | {
    **named("%s.weight", pos_emb="position_embd", ln_final="output_norm"),
    "ln_final_bias": Place("output_norm.bias"),
    **named(gguf.OF_LAYERS, ln_att="attn_norm", wo="attn_output", ln_ffn="ffn_norm", w1="ffn_up", w2="ffn_down"),
    **named(gguf.BIASES, ln_att_bias="attn_norm", bo="attn_output", ln_ffn_bias="ffn_norm", b1="ffn_up", b2="ffn_down"),
    **together(QKV, gguf.OF_LAYERS % "attn_qkv"),
    **together(QKV_BIASES, gguf.BIASES % "attn_qkv"),
}


def config(values: Values) -> Config:
    """The numbers that a config.json says."""
    values.must_be("activation_function", *hf.GELU_TANH)
    values.must_be("scale_attn_weights", True)
    values.must_be("scale_attn_by_inverse_layer_idx", False)
    dim, n_heads = values.whole("n_embd"), values.whole("n_head")
    return Config(
        dim=dim,
        hidden_dim=values.whole("n_inner", 4 * dim),
        n_layers=values.whole("n_layer"),
        n_heads=n_heads,
        n_kv_heads=n_heads,
        vocab_size=values.whole("vocab_size"),
        seq_len=values.whole("n_positions"),
        shared_classifier=values.flag("tie_word_embeddings"),
        architecture="gpt2",
        norm_eps=values.real("layer_norm_epsilon", 0, 1),
    )


def gguf_config(k: Keys) -> Config:
    """The numbers that a GGUF file's keys say."""
    eps = k.real("attention.layer_norm_epsilon", 0, 1)
    return Config(**k.common, n_kv_heads=k.common["n_heads"], architecture="gpt2", norm_eps=eps)


FAMILY = (
    InFolder("gpt2", DEFAULTS, config, PLACES, prefix=PREFIX, harmless=HARMLESS, aliases=ALIASES),
    InGguf("gpt2", gguf_config, GGUF_PLACES),
)
