"""Slow numpy oracles in float64: what the kernels compute, written for the reader."""

import math
from typing import NamedTuple

import numpy as np

from specdec.architectures import Config
from specdec.machine.vectors import Float32


def rms_norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rope(x, pos):
    """x (..., K) turned by its position, pair by pair."""
    k = x.shape[-1]
    angle = pos / 10000.0 ** (np.arange(0, k, 2) / k)
    even, odd = x[..., 0::2], x[..., 1::2]
    out = np.empty_like(x)
    out[..., 0::2] = even * np.cos(angle) - odd * np.sin(angle)
    out[..., 1::2] = even * np.sin(angle) + odd * np.cos(angle)
    return out


class Quantized(NamedTuple):
    """A matrix (rows, k) of int8 values with a float32 scale for each `group` of them, in the order of a version 2 file."""

    values: np.ndarray
    scales: np.ndarray
    group: int

    def floats(self) -> np.ndarray:
        return (self.values.reshape(-1, self.group) * self.scales.astype(np.float64)[:, None]).reshape(self.values.shape)


def quantized(matrix: Float32, group: int) -> Quantized:
    """Symmetric: the largest of a group becomes 127 (llama2.c's export.py)."""
    parts = matrix.reshape(-1, group)
    scales = np.abs(parts).max(1) / np.float32(127)
    values = np.rint(parts / np.where(scales > 0, scales, 1)[:, None])
    return Quantized(values.astype(np.int8).reshape(matrix.shape), scales, group)


def quantized_activations(x: Float32, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes (k,) and scales (groups,) of x (k,): runq.c's rule, which rounds halves away from zero."""
    parts = np.concatenate([x, np.zeros(-len(x) % group, np.float32)]).reshape(-1, group)
    scales = np.abs(parts).max(1) / np.float32(127)
    ratio = parts / np.where(scales > 0, scales, np.float32(1))[:, None]
    return (np.sign(ratio) * np.floor(np.abs(ratio.astype(np.float64)) + 0.5)).reshape(-1)[: len(x)].astype(np.int64), scales


def product(x: np.ndarray, w: np.ndarray | Quantized) -> np.ndarray:
    """x (T, k) times w (rows, k); with int8 weights x is quantized first, in the largest groups that do not cross rows of w."""
    if not isinstance(w, Quantized):
        return x @ w.T
    group = math.gcd(w.group, x.shape[1])
    seen = np.empty(x.shape)
    for t, row in enumerate(x.astype(np.float32)):
        codes, scales = quantized_activations(row, group)
        seen[t] = codes * np.repeat(scales.astype(np.float64), group)
    return seen @ w.floats().T


def forward(config: Config, tensors: dict, tokens: list[int], window: int | None = None) -> np.ndarray:
    """Logits (T, V) of a whole sequence, each token seeing the last `window` positions up to its own.

    Matrices may be `Quantized` (a list of them where layers have one each): then it is runq.c's forward.
    """
    t = {name: tensor.astype(np.float64) if isinstance(tensor, np.ndarray) else tensor for name, tensor in tensors.items()}
    heads, groups, k = config.n_heads, config.n_kv_heads, config.head_dim
    n = len(tokens)
    embedding = t["tok_emb"]
    x = (embedding.floats() if isinstance(embedding, Quantized) else embedding)[tokens]
    for layer in range(config.n_layers):
        h = rms_norm(x, t["rms_att"][layer])
        q = product(h, t["wq"][layer]).reshape(n, heads, k)
        keys = product(h, t["wk"][layer]).reshape(n, groups, k)
        values = product(h, t["wv"][layer]).reshape(n, groups, k)
        q = np.stack([rope(q[i], i) for i in range(n)])
        keys = np.stack([rope(keys[i], i) for i in range(n)])
        mixed = np.zeros((n, heads, k))
        for i in range(n):
            first = max(0, i + 1 - (window or n))
            for head in range(heads):
                g = head // (heads // groups)
                p = softmax(keys[first : i + 1, g] @ q[i, head] / math.sqrt(k))
                mixed[i, head] = p @ values[first : i + 1, g]
        x = x + product(mixed.reshape(n, -1), t["wo"][layer])
        h = rms_norm(x, t["rms_ffn"][layer])
        a, b = product(h, t["w1"][layer]), product(h, t["w3"][layer])
        x = x + product(a / (1 + np.exp(-a)) * b, t["w2"][layer])
    return product(rms_norm(x, t["rms_final"]), embedding if config.shared_classifier else t["wcls"])


def probabilities(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Temperature, softmax, top-k, the smallest set of those whose mass exceeds top_p; run.c's meaning, by a full sort."""
    n = len(logits)
    if temperature == 0:
        return np.eye(n)[int(np.argmax(logits))]
    p = softmax(np.asarray(logits, np.float64) / temperature)
    order = sorted(range(n), key=lambda i: (-p[i], i))
    if 0 < top_k < n:
        order = order[:top_k]
    if 0 < top_p < 1:
        mass, kept = 0.0, 0
        for i in order:
            mass += p[i]
            kept += 1
            if mass > top_p:
                break
        order = order[:kept]
    out = np.zeros(n)
    out[order] = p[order]
    return out / out.sum()


def chi_square_limit(degrees: int, sigmas: float) -> float:
    """The value that chi-square passes with the odds of a normal variable passing `sigmas` (Wilson and Hilferty 1931)."""
    a = 2 / (9 * degrees)
    return degrees * (1 - a + sigmas * math.sqrt(a)) ** 3
