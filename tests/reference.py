"""Slow numpy oracles in float64: what the kernels compute, written for the reader."""

import math

import numpy as np

from specdec.kernels import Config, Float32


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


def forward(config: Config, tensors: dict[str, Float32], tokens: list[int], window: int | None = None) -> np.ndarray:
    """Logits (T, V) of a whole sequence, each token seeing the last `window` positions up to its own."""
    t = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    heads, groups, k = config.n_heads, config.n_kv_heads, config.head_dim
    n = len(tokens)
    x = t["tok_emb"][tokens]
    for layer in range(config.n_layers):
        h = rms_norm(x, t["rms_att"][layer])
        q = (h @ t["wq"][layer].T).reshape(n, heads, k)
        keys = (h @ t["wk"][layer].T).reshape(n, groups, k)
        values = (h @ t["wv"][layer].T).reshape(n, groups, k)
        q = np.stack([rope(q[i], i) for i in range(n)])
        keys = np.stack([rope(keys[i], i) for i in range(n)])
        mixed = np.zeros((n, heads, k))
        for i in range(n):
            first = max(0, i + 1 - (window or n))
            for head in range(heads):
                g = head // (heads // groups)
                p = softmax(keys[first : i + 1, g] @ q[i, head] / math.sqrt(k))
                mixed[i, head] = p @ values[first : i + 1, g]
        x = x + mixed.reshape(n, -1) @ t["wo"][layer].T
        h = rms_norm(x, t["rms_ffn"][layer])
        a, b = h @ t["w1"][layer].T, h @ t["w3"][layer].T
        x = x + (a / (1 + np.exp(-a)) * b) @ t["w2"][layer].T
    classifier = t["tok_emb"] if config.shared_classifier else t["wcls"]
    return rms_norm(x, t["rms_final"]) @ classifier.T


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
