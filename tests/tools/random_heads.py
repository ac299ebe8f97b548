"""Draft heads for the tests: random weights for a target, and a head with them."""

from pathlib import Path
from typing import Any

import numpy as np

from specdec.head_config import HeadConfig
from specdec.heads.eagle3 import EAGLE3
from specdec.heads.head import Head, HeadCache
from specdec.loaders.model_loader import load_model
from specdec.model.kv_cache import KVCache
from specdec.model.model import Model
from specdec.model_config import ModelConfig
from specdec.quant import FP32, WeightFormat
from specdec.runtime.simd import Int64
from tests.conftest import Pair
from tests.tools import reference
from tests.tools.configs import make_config
from tests.tools.head_files import write_folder


def random_head(
    target: ModelConfig, seed: int = 0, draft_vocab_size: int = 0, **fields: Any
) -> tuple[ModelConfig, dict[str, Any], Int64 | None]:
    """Return config, tensors and target_ids of a head for a target.

    draft_vocab_size is the target's by default, without target_ids. fields are those of ModelConfig or HeadConfig; by default
    the head is a llama as wide as the target.
    """
    head_fields = {name: fields.pop(name) for name in HeadConfig.__dataclass_fields__ if name in fields}
    defaults = {
        "target_dim": target.dim, "target_layers": (0, target.n_layers - 1, target.n_layers),
        "draft_vocab_size": draft_vocab_size or target.vocab_size, "own_embedding": False,
        "own_classifier": bool(draft_vocab_size),
    }  # fmt: skip
    sizes = {
        "dim": target.dim, "hidden_dim": target.hidden_dim, "n_layers": 1, "n_heads": target.n_heads,
        "n_kv_heads": target.n_kv_heads, "vocab_size": target.vocab_size, "seq_len": target.seq_len, "architecture": "eagle3",
    }  # fmt: skip
    config = make_config(**{**sizes, **fields}, head=HeadConfig(**{**defaults, **head_fields}))
    rng = np.random.default_rng(seed)
    tensors = {
        name: (1 + 0.2 * noise if "norm" in name or name.startswith("rms") else noise / np.sqrt(shape[-1]) * 2).astype(np.float32)
        for name, shape in EAGLE3.shapes(config).items()
        for noise in [rng.standard_normal(shape)]
    }
    ids = np.sort(rng.permutation(target.vocab_size)[:draft_vocab_size]) if draft_vocab_size else None
    return config, tensors, ids


def make_head(target: Model, weight_format: WeightFormat = FP32, n_threads: int = 1, **fields: Any) -> Head:
    """Return a random head for a target."""
    config, tensors, ids = random_head(target.config, **fields)
    return Head(config, EAGLE3.plan_weights(config, tensors, weight_format).pack(), target, ids, n_threads, target.n_positions)


def new_head_cache(head: Head, target_cache: KVCache | None = None) -> HeadCache:
    """Return a new cache of a head, over a new cache of its target if none is given."""
    return head.new_draft_cache(target_cache or head.target.new_cache(head.target_layers))


def compute_oracle_logits(config: ModelConfig, tensors: dict[str, Any], states: Any, tokens: list[int]) -> Any:
    """Return the logits (n - 1, R) of each pair in float64; pairs without states run with the head's own output.

    tensors include the target's tok_emb and wcls if the head has none.
    """
    t, head, eps = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}, config.head, config.norm_eps
    assert head is not None
    angles, keys, values, logits = reference.rope_frequencies(config), [], [], []
    for i, token in enumerate(tokens[1:]):
        if i < len(states):
            feature = states[i].astype(np.float64)
            if head.fc_norm:
                feature = reference.rms_norm(feature.reshape(t["fc_norm"].shape), t["fc_norm"], eps).reshape(-1)
            x = t["fc"] @ feature
        elif head.norm_output:
            x = reference.rms_norm(x, t["rms_final"], eps)
        normed = reference.rms_norm(x, t["rms_hidden"], eps)
        pair = np.concatenate([reference.rms_norm(t["tok_emb"][token], t["rms_emb"], eps), normed])
        q, k, v = ((t[f"w{c}"] @ pair + t.get(f"b{c}", 0)).reshape(-1, config.head_dim) for c in "qkv")
        if config.attention.qk_norm:
            q, k = reference.rms_norm(q, t["q_norm"], eps), reference.rms_norm(k, t["k_norm"], eps)
        q = reference.rope(q, i * angles)
        keys.append(reference.rope(k, i * angles))
        values.append(v)
        seen, mixed = slice(max(0, i + 1 - config.attention_window), i + 1), []
        for row, g in zip(q, np.arange(len(q)) // (len(q) // len(v)), strict=True):
            p = reference.softmax(np.array(keys)[seen, g] @ row / np.sqrt(config.head_dim))
            mixed.append(p @ np.array(values)[seen, g])
        x = (normed if head.norm_before_residual else x) + t["wo"] @ np.concatenate(mixed) + t.get("bo", 0)
        normed = reference.rms_norm(x, t["rms_ffn"], eps)
        gate, up = t["w1"] @ normed + t.get("b1", 0), t["w3"] @ normed + t.get("b3", 0)
        x = x + t["w2"] @ (gate / (1 + np.exp(-gate)) * up) + t.get("b2", 0)
        logits.append(t["wcls"] @ reference.rms_norm(x, t["rms_final"], eps))
    return np.array(logits)


def head_folder(path: Path, pair: Pair, dialect: str = "speculators", **numbers) -> Path:
    config, tensors, ids = random_head(
        load_model(pair.target).config, **{"draft_vocab_size": 80, "target_layers": (1, 2, 3)} | numbers
    )
    return write_folder(path, config, tensors, ids, dialect)
