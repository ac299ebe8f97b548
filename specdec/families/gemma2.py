"""Gemma 2 (Gemma Team 2024, arXiv:2408.00118): bounds of attention scores and of logits.

Every second layer has full attention, the others a sliding window. The rest is as in Gemma 3, without norms of heads.
"""

from dataclasses import replace

from specdec.argument_checks import MIN_SCALE, JSONDict
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import ConfigValues
from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily
from specdec.families.gemma3 import BLOCK_FIELDS, GGUF_TENSORS, HF_TENSORS, compute_embedding_scale, compute_score_scale
from specdec.model_config import ModelConfig

DEFAULTS: JSONDict = {
    "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "attention_bias": False, "bos_token_id": 2, "eos_token_id": 1,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None, "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0, "use_bidirectional_attention": None, "rope_theta": 10000.0,
}  # fmt: skip
SCORE_SOFTCAP_KEY, LOGIT_SOFTCAP_KEY, FULL_ATTENTION_INTERVAL = "attn_logit_softcapping", "final_logit_softcapping", 2
# Defaults of GGUF files, and the layers of the model with a score scale that does not follow from the head dimension.
WINDOW, SCORE_SOFTCAP, LOGIT_SOFTCAP, N_LAYERS_27B = 4096, 50.0, 30.0, 46


def parse_config(values: ConfigValues) -> ModelConfig:
    """Build the `ModelConfig` of a Gemma 2 model from the keys of config.json."""
    values.require("use_bidirectional_attention", None, False)
    sizes = hf.parse_base_fields(values, "hidden_activation", hf.GELU_TANH)
    full = hf.get_full_attention_layers(values, sizes["n_layers"], FULL_ATTENTION_INTERVAL)
    scale = compute_score_scale(sizes["head_dim"], values.get_float("query_pre_attn_scalar", MIN_SCALE, 1 / MIN_SCALE))
    score_softcap, logit_softcap = (
        values.get_float(key, MIN_SCALE, 1 / MIN_SCALE, 0.0) for key in (SCORE_SOFTCAP_KEY, LOGIT_SOFTCAP_KEY)
    )
    window = values.get_int("sliding_window") if len(full) < sizes["n_layers"] else 0
    attention = hf.parse_attention(values, window=window, scale=scale, softcap=score_softcap)
    return ModelConfig(
        **sizes, **BLOCK_FIELDS, attention=attention, embedding_scale=compute_embedding_scale(sizes["dim"]),
        layers=hf.make_full_attention_layers(attention, full, sizes["n_layers"]), logit_softcap=logit_softcap,
    )  # fmt: skip


def parse_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Build the `ModelConfig` of a Gemma 2 model from a GGUF file's metadata, which lacks the scales of embeddings and scores."""
    fields, n_layers = metadata.common_fields, metadata.common_fields["n_layers"]
    sizes = gguf.parse_base_fields(
        metadata,
        has_biases=False,
        window=metadata.get_int(gguf.SLIDING_WINDOW_KEY, WINDOW),
        softcap=metadata.get_float(SCORE_SOFTCAP_KEY, MIN_SCALE, 1 / MIN_SCALE, SCORE_SOFTCAP),
    )
    head_dim, attention = sizes["head_dim"], sizes["attention"]
    scale = compute_score_scale(head_dim, fields["dim"] // fields["n_heads"] if n_layers == N_LAYERS_27B else head_dim)
    local = replace(attention.rope, theta=metadata.get_float("rope.freq_base_swa", 1, hf.MAX_THETA, attention.rope.theta))
    sliding, full = replace(attention, scale=scale, rope=local), gguf.get_full_attention_layers(metadata, FULL_ATTENTION_INTERVAL)
    return ModelConfig(
        **{**sizes, "attention": sliding}, **BLOCK_FIELDS, embedding_scale=compute_embedding_scale(fields["dim"]),
        layers=hf.make_full_attention_layers(sliding, full, n_layers, rope=attention.rope),
        logit_softcap=metadata.get_float(LOGIT_SOFTCAP_KEY, MIN_SCALE, 1 / MIN_SCALE, LOGIT_SOFTCAP),
    )  # fmt: skip


FAMILY = (
    HFFamily(
        "gemma2", DEFAULTS, parse_config, HF_TENSORS,
        supported_keys=("query_pre_attn_scalar", SCORE_SOFTCAP_KEY, LOGIT_SOFTCAP_KEY),
    ),
    GGUFFamily(
        "gemma2", parse_gguf_config, GGUF_TENSORS,
        supported_keys=(gguf.SLIDING_WINDOW_KEY, SCORE_SOFTCAP_KEY, LOGIT_SOFTCAP_KEY),
    ),
)  # fmt: skip
