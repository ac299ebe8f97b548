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


def mixed_bits(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer, of uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def drawn(probs: np.ndarray, seed: int, stream: int, positions: np.ndarray) -> list[int]:
    """The token of each position: the least -log(u) / p of all, the first of equals; every u computed (see `sampling.race`)."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        stream_key = mixed_bits(np.array([seed], np.uint64) + golden * np.uint64(stream + 1))
        keys = mixed_bits(stream_key + golden * (positions.astype(np.uint64) + np.uint64(1)))
        bits = mixed_bits(keys[:, None] + golden * np.arange(1, len(probs) + 1, dtype=np.uint64))
    u = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    times = np.where(probs > 0, -np.log(u) / np.where(probs > 0, probs, 1).astype(np.float64), np.inf)
    return times.argmin(1).tolist() if (probs > 0).any() else [-1] * len(positions)


def kept(probs: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """float32 probs after top_k and top_p, by a full sort; bit for bit, since no sum here rounds before the last division."""
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))[: top_k or None]
    if 0 < top_p < 1:
        mass = np.cumsum(probs[order].astype(np.float64))
        order = order[: int((mass <= top_p).sum()) + 1]
    if len(order) == len(probs) and not 0 < top_p < 1:
        return probs
    out = np.zeros_like(probs)
    out[order] = (probs[order] / probs[sorted(order)].astype(np.float64).sum()).astype(np.float32)
    return out


def chi_square_limit(degrees: int, sigmas: float) -> float:
    """The value that chi-square passes with the odds of a normal variable passing `sigmas` (Wilson and Hilferty 1931)."""
    a = 2 / (9 * degrees)
    return degrees * (1 - a + sigmas * math.sqrt(a)) ** 3
