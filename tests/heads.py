"""Heads for the tests: random weights for a target, and a head of them."""

from typing import Any

import numpy as np

from specdec.architectures import Config, HeadConfig
from specdec.architectures.eagle3 import EAGLE3, shapes
from specdec.drafting.heads import Head
from specdec.machine.vectors import Int64
from specdec.transformer import Transformer
from specdec.weights import FP32, Kind


def random_head(target: Config, seed: int = 0, n_rows: int = 0, **numbers: Any) -> tuple[Config, dict[str, Any], Int64 | None]:
    """Config, tensors and target_ids of a head for a target; n_rows: as many as the target by default, without target_ids.

    numbers: of the Config or of the HeadConfig; by default a head of llama's, as wide as the target.
    """
    of_head = {name: numbers.pop(name) for name in HeadConfig.__dataclass_fields__ if name in numbers}
    defaults = {
        "target_dim": target.dim, "layers": (0, target.n_layers - 1, target.n_layers), "n_rows": n_rows or target.vocab_size,
        "own_embedding": False, "own_classifier": bool(n_rows),
    }  # fmt: skip
    sizes = {
        "dim": target.dim, "hidden_dim": target.hidden_dim, "n_layers": 1, "n_heads": target.n_heads,
        "n_kv_heads": target.n_kv_heads, "vocab_size": target.vocab_size, "seq_len": target.seq_len, "architecture": "eagle3",
    }  # fmt: skip
    config = Config(**{**sizes, **numbers}, head=HeadConfig(**{**defaults, **of_head}))
    rng = np.random.default_rng(seed)
    tensors = {
        name: (1 + 0.2 * noise if "norm" in name or name.startswith("rms") else noise / np.sqrt(shape[-1]) * 2).astype(np.float32)
        for name, shape in shapes(config).items()
        for noise in [rng.standard_normal(shape)]
    }
    ids = np.sort(rng.permutation(target.vocab_size)[:n_rows]) if n_rows else None
    return config, tensors, ids


def head_of(target: Transformer, kind: Kind = FP32, n_threads: int = 1, **numbers: Any) -> Head:
    """A random head for that target."""
    config, tensors, ids = random_head(target.config, **numbers)
    return Head(config, EAGLE3.pack(config, tensors, kind), target, ids, n_threads, target.n_positions)
