"""Files of EAGLE-3 heads for the tests, in every dialect, written from a config and tensors by our names."""

import json
from pathlib import Path
from typing import Any

import numpy as np

import specdec.heads  # noqa: F401  (adds the architectures of heads)
from specdec.model_config import ModelConfig
from tests.tools import gguf_files, hf_folders
from tests.tools.gguf_files import Keys
from tests.tools.half_precision import widen_exactly

DIALECTS = ("eagle", "speculators", "eagle behind model.", "speculators behind model.")
SAFETENSORS_DTYPES = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(np.uint16): "BF16"}
# A tensor's name after the prefix of the layer or the model, in safetensors and in GGUF
OUTER_NAMES = {
    "fc": ("fc", "fc"), "fc_norm": ("", "enc.output_norm"), "rms_final": ("norm", "output_norm"),
    "wcls": ("lm_head", "output"), "tok_emb": ("embed_tokens", "token_embd"),
}  # fmt: skip
LAYER_NAMES = {
    "rms_emb": ("input_layernorm", "attn_norm"), "rms_hidden": ("hidden_norm", "attn_norm_2"),
    "wq": ("self_attn.q_proj", "attn_q"), "wk": ("self_attn.k_proj", "attn_k"), "wv": ("self_attn.v_proj", "attn_v"),
    "wo": ("self_attn.o_proj", "attn_output"), "q_norm": ("self_attn.q_norm", ""), "k_norm": ("self_attn.k_norm", ""),
    "rms_ffn": ("post_attention_layernorm", "ffn_norm"), "w1": ("mlp.gate_proj", "ffn_gate"), "w2": ("mlp.down_proj", "ffn_down"),
    "w3": ("mlp.up_proj", "ffn_up"),
}  # fmt: skip
BIASES = {f"b{name[1:]}": LAYER_NAMES[name][0] for name in ("wq", "wk", "wv", "wo", "w1", "w2", "w3")}
ROTATED = ("wq", "wk", "bq", "bk", "q_norm", "k_norm")


def split_halves(array: Any, head_dim: int) -> Any:
    """Return rows in Hugging Face's order: the first rows of a head's pairs, then the second ones."""
    pairs = array.reshape(-1, head_dim // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)


def make_config_values(config: ModelConfig, dialect: str) -> dict[str, Any]:
    """Return a head's config.json, flat as EAGLE's or that of speculators; layers are included if the dialect has them."""
    head = config.head
    assert head
    layer: dict[str, Any] = {
        "model_type": "qwen3" if config.attention.qk_norm else "llama",
        "vocab_size": config.vocab_size, "hidden_size": config.dim,
        "intermediate_size": config.hidden_dim, "num_hidden_layers": 1, "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads, "head_dim": config.head_dim, "hidden_act": "silu",
        "max_position_embeddings": config.seq_len, "rms_norm_eps": config.norm_eps, "tie_word_embeddings": False,
        "attention_bias": config.attention.wo_bias, "mlp_bias": config.mlp_bias,
    }  # fmt: skip
    if config.rope.theta != 10000:
        layer["rope_theta"] = config.rope.theta
    if scaling := config.rope.scaling:
        layer["rope_scaling"] = {
            "rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor, "original_max_position_embeddings": scaling.original_seq_len,
        }  # fmt: skip
    head_values: dict[str, Any] = {
        "draft_vocab_size": head.draft_vocab_size, "norm_before_residual": head.norm_before_residual,
        "norm_output": head.norm_output,
        "norm_before_fc": head.fc_norm == "whole", "fc_norm": head.fc_norm == "each",
        "target_hidden_size": head.target_dim if head.target_dim != config.dim else None,
    }  # fmt: skip
    if dialect.startswith("eagle"):
        if head.target_layers:
            head_values["eagle_config"] = {
                "eagle_aux_hidden_state_layer_ids": [i - 1 for i in head.target_layers],
                "use_aux_hidden_state": True,
            }
        if config.attention.qkv_bias and not config.attention.wo_bias:
            head_values["qkv_bias"] = True
        return {"architectures": ["LlamaForCausalLM"]} | layer | head_values
    verifier = {"architectures": ["LlamaForCausalLM"], "name_or_path": "org/name"}
    return head_values | {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "transformer_layer_config": layer,
        "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy", "verifier": verifier},
        "eagle_aux_hidden_state_layer_ids": list(head.target_layers) or None,
    }  # fmt: skip


def make_folder_tensors(
    config: ModelConfig, tensors: dict[str, Any], target_ids: Any, dialect: str
) -> dict[str, tuple[str, Any]]:
    """Return dtypes and arrays of a head's safetensors file; tensors: fp32, fp16, or the bits of bf16."""
    head = config.head
    assert head
    layer, prefix = "midlayer." if "eagle" in dialect else "layers.0.", "model." if "behind" in dialect else ""
    result = {}
    for name, array in tensors.items():
        stored = split_halves(array, config.head_dim) if name in ROTATED else array
        if name == "fc_norm" and head.fc_norm == "each":
            result |= {f"{prefix}fc_norm.{i}.weight": norm for i, norm in enumerate(stored)}
        elif name == "fc_norm":
            result[f"{prefix}input_norm.weight"] = stored[0]
        elif name in BIASES:
            result[f"{prefix}{layer}{BIASES[name]}.bias"] = stored
        elif name in OUTER_NAMES:
            result[f"{'' if name == 'wcls' else prefix}{OUTER_NAMES[name][0]}.weight"] = stored
        else:
            result[f"{prefix}{layer}{LAYER_NAMES[name][0]}.weight"] = stored
    typed = {name: (SAFETENSORS_DTYPES[array.dtype], np.ascontiguousarray(array)) for name, array in result.items()}
    if target_ids is not None:
        ids = np.asarray(target_ids, np.int64)
        typed["d2t"] = "I64", ids - np.arange(len(ids))
        typed["t2d"] = "BOOL", np.isin(np.arange(config.vocab_size), ids).astype(np.uint8)
    return typed


def write_folder(
    folder: Path, config: ModelConfig, tensors: dict[str, Any], target_ids: Any = None, dialect: str = "speculators"
) -> Path:
    """Write a head's folder in one of DIALECTS and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(make_config_values(config, dialect)))
    (folder / hf_folders.WEIGHTS).write_bytes(
        hf_folders.safetensors_bytes(make_folder_tensors(config, tensors, target_ids, dialect))
    )
    return folder


def make_gguf_parts(config: ModelConfig, tensors: dict[str, Any], target_ids: Any = None) -> tuple[Keys, dict[str, Any]]:
    """Return metadata and tensors of a head's GGUF file as llama.cpp's converter writes them, vectors in fp32."""
    head = config.head
    assert head
    keys: Keys = {
        "general.architecture": "eagle3",
        "eagle3.block_count": 1,
        "eagle3.context_length": config.seq_len,
        "eagle3.embedding_length": config.dim,
        "eagle3.feed_forward_length": config.hidden_dim,
        "eagle3.attention.head_count": config.n_heads,
        "eagle3.attention.head_count_kv": config.n_kv_heads,
        "eagle3.attention.key_length": config.head_dim,
        "eagle3.attention.value_length": config.head_dim,
        "eagle3.attention.layer_norm_rms_epsilon": config.norm_eps,
        "eagle3.rope.freq_base": config.rope.theta,
        "eagle3.rope.dimension_count": config.head_dim,
        "eagle3.vocab_size": config.vocab_size,
        "eagle3.target_layers": list(head.target_layers),
        "eagle3.target_hidden_size": head.target_dim,
        "eagle3.norm_before_residual": head.norm_before_residual,
    }
    if head.fc_norm:
        keys["eagle3.norm_before_fc"] = True
    stored = {}
    for name, array in (tensors | {"fc_norm": tensors["fc_norm"][0]} if head.fc_norm else tensors).items():
        stored_name = f"blk.0.{LAYER_NAMES[name][1]}" if name in LAYER_NAMES else OUTER_NAMES[name][1]
        stored[f"{stored_name}.weight"] = widen_exactly(array) if array.ndim == 1 else np.ascontiguousarray(array)
    if config.rope.scaling:
        stored["rope_freqs.weight"] = gguf_files.rope_divisors(config)
    if target_ids is not None:
        ids = np.asarray(target_ids, np.int64)
        stored["d2t"] = gguf_files.RawTensor("I64", ids.shape, ids.tobytes())
    return keys, stored


def write_gguf(path: Path, config: ModelConfig, tensors: dict[str, Any], target_ids: Any = None) -> Path:
    """Write a head's GGUF file and return its path.

    llama.cpp has no head norms, no biases, no norm for each state and none of what is fed back.
    """
    path.write_bytes(gguf_files.gguf_bytes(*make_gguf_parts(config, tensors, target_ids)))
    return path
