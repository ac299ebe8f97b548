"""GPT-2 (Radford et al. 2019): how to read its configs and tensors in folders and GGUF files."""

import re
from typing import Any

from specdec.argument_checks import JSONDict
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families import tensor_specs as specs
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
from specdec.model_config import AttentionConfig, ModelConfig

DEFAULTS: JSONDict = {
    "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True, "bos_token_id": 50256, "eos_token_id": 50256,
}  # fmt: skip
KEY_ALIASES = {
    "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}  # fmt: skip
PREFIX, IGNORED_NAMES = re.compile(r"transformer\."), re.compile(r"h\.\d+\.attn\.(masked_)?bias")  # the causal mask
HF_TENSORS = {
    **specs.make("%s.weight", tok_emb="wte", pos_emb="wpe", rms_final="ln_f", wcls="lm_head"),
    "rms_final_bias": specs.TensorSpec("ln_f.bias"),
    **specs.make("h.{}.%s.weight", rms_att="ln_1", rms_ffn="ln_2"),
    **specs.make("h.{}.%s.bias", rms_att_bias="ln_1", rms_ffn_bias="ln_2", bo="attn.c_proj", b1="mlp.c_fc", b2="mlp.c_proj"),
    **specs.fuse(specs.QKV, "h.{}.attn.c_attn.weight", is_transposed=True),
    **specs.fuse(specs.QKV_BIASES, "h.{}.attn.c_attn.bias"),
    "wo": specs.TensorSpec("h.{}.attn.c_proj.weight", is_transposed=True),
    "w1": specs.TensorSpec("h.{}.mlp.c_fc.weight", is_transposed=True),
    "w2": specs.TensorSpec("h.{}.mlp.c_proj.weight", is_transposed=True),
}
GGUF_TENSORS = gguf.OUTER_TENSORS | {
    **specs.make("%s.weight", pos_emb="position_embd", rms_final="output_norm"),
    "rms_final_bias": specs.TensorSpec("output_norm.bias"),
    **specs.make(gguf.LAYER_WEIGHT, rms_att="attn_norm", wo="attn_output", rms_ffn="ffn_norm", w1="ffn_up", w2="ffn_down"),
    **specs.make(
        gguf.LAYER_BIAS, rms_att_bias="attn_norm", bo="attn_output", rms_ffn_bias="ffn_norm", b1="ffn_up", b2="ffn_down"
    ),
    **specs.fuse(specs.QKV, gguf.LAYER_WEIGHT % "attn_qkv"),
    **specs.fuse(specs.QKV_BIASES, gguf.LAYER_BIAS % "attn_qkv"),
}
BLOCK_FIELDS: dict[str, Any] = {
    "attention": AttentionConfig(has_rope=False, qkv_bias=True, wo_bias=True), "activation": "ungated_gelu", "mlp_bias": True,
    "layer_norm": True, "learned_positions": True,
}  # fmt: skip


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a GPT-2 model from the keys of config.json."""
    values.require("activation_function", *hf.GELU_TANH)
    values.require("scale_attn_weights", True)
    values.require("scale_attn_by_inverse_layer_idx", False)
    dim, n_heads = values.get_int("n_embd"), values.get_int("n_head")
    return ModelConfig(
        dim=dim,
        hidden_dim=values.get_int("n_inner", 4 * dim),
        n_layers=values.get_int("n_layer"),
        n_heads=n_heads,
        n_kv_heads=n_heads,
        vocab_size=values.get_int("vocab_size"),
        seq_len=values.get_int("n_positions"),
        shared_classifier=values.get_bool("tie_word_embeddings"),
        norm_eps=values.get_float("layer_norm_epsilon", 0, 1),
        **BLOCK_FIELDS,
    )


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a GPT-2 model from a GGUF file's metadata."""
    n_kv_heads, eps = metadata.common_fields["n_heads"], metadata.get_float(gguf.LAYER_NORM_EPS_KEY, 0, 1)
    return ModelConfig(**metadata.common_fields, n_kv_heads=n_kv_heads, norm_eps=eps, **BLOCK_FIELDS)


FAMILY = (
    HFFamily("gpt2", DEFAULTS, parse_config, HF_TENSORS, prefix=PREFIX, ignored_names=IGNORED_NAMES, key_aliases=KEY_ALIASES),
    GGUFFamily("gpt2", parse_gguf_config, GGUF_TENSORS),
)
