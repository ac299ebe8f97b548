"""GPT-2 (Radford et al. 2019)."""

import re
from typing import Any

from ..architectures import Config
from . import folders, ggufs
from .family import Family, InFolder, InGguf, Keys
from .places import QKV, QKV_BIASES, Place
from .values import Values

DEFAULTS: dict[str, Any] = {
    "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True, "bos_token_id": 50256, "eos_token_id": 50256,
}  # fmt: skip
ALIASES = {
    "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}  # fmt: skip
PLACES = {
    "tok_emb": Place("wte.weight"),
    "pos_emb": Place("wpe.weight"),
    "ln_att": Place("h.{}.ln_1.weight"),
    "ln_att_bias": Place("h.{}.ln_1.bias"),
    **dict.fromkeys(QKV, Place("h.{}.attn.c_attn.weight", conv=True, among=QKV)),
    **dict.fromkeys(QKV_BIASES, Place("h.{}.attn.c_attn.bias", among=QKV_BIASES)),
    "wo": Place("h.{}.attn.c_proj.weight", conv=True),
    "bo": Place("h.{}.attn.c_proj.bias"),
    "ln_ffn": Place("h.{}.ln_2.weight"),
    "ln_ffn_bias": Place("h.{}.ln_2.bias"),
    "w1": Place("h.{}.mlp.c_fc.weight", conv=True),
    "b1": Place("h.{}.mlp.c_fc.bias"),
    "w2": Place("h.{}.mlp.c_proj.weight", conv=True),
    "b2": Place("h.{}.mlp.c_proj.bias"),
    "ln_final": Place("ln_f.weight"),
    "ln_final_bias": Place("ln_f.bias"),
    "wcls": Place(folders.HEAD),
}
GGUF_PLACES = ggufs.OUTER_PLACES | {
    "pos_emb": Place("position_embd.weight"),
    "ln_att": Place("blk.{}.attn_norm.weight"),
    "ln_att_bias": Place("blk.{}.attn_norm.bias"),
    **dict.fromkeys(QKV, Place("blk.{}.attn_qkv.weight", among=QKV)),
    **dict.fromkeys(QKV_BIASES, Place("blk.{}.attn_qkv.bias", among=QKV_BIASES)),
    "wo": Place("blk.{}.attn_output.weight"),
    "bo": Place("blk.{}.attn_output.bias"),
    "ln_ffn": Place("blk.{}.ffn_norm.weight"),
    "ln_ffn_bias": Place("blk.{}.ffn_norm.bias"),
    "w1": Place("blk.{}.ffn_up.weight"),
    "b1": Place("blk.{}.ffn_up.bias"),
    "w2": Place("blk.{}.ffn_down.weight"),
    "b2": Place("blk.{}.ffn_down.bias"),
    "ln_final": Place("output_norm.weight"),
    "ln_final_bias": Place("output_norm.bias"),
}


def config(values: Values) -> Config:
    """The numbers that a config.json says."""
    values.must_be("activation_function", *folders.GELU_TANH)
    values.must_be("scale_attn_weights", True)
    values.must_be("scale_attn_by_inverse_layer_idx", False)
    dim, n_heads = values.whole("n_embd"), values.whole("n_head")
    return Config(
        dim=dim,
        hidden_dim=4 * dim if values["n_inner"] is None else values.whole("n_inner"),
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


FAMILY = Family(
    (
        InFolder(
            "gpt2", DEFAULTS, config, PLACES, prefix=re.compile(r"transformer\."),
            harmless=re.compile(r"h\.\d+\.attn\.(masked_)?bias"),  # the causal mask
            aliases=ALIASES,
        ),
    ),
    (InGguf("gpt2", gguf_config, GGUF_PLACES),),
)  # fmt: skip
