"""Slow numpy oracles in float64: what the kernels compute, written for the reader."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from specdec.config import Config, ConvConfig, YarnScaling
from specdec.runtime.simd import Float32
from tests.tools.configs import changed


def rms_norm(x, weight, eps=1e-5):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def layer_norm(x, weight, bias, eps=1e-5):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * weight + bias


def gelu(x):
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def frequencies(config):
    """Radians a position (K / 2,): Llama 3.1's scaling pair by pair, by wavelengths, as its paper's code says it."""
    frequencies = []
    for i in range(config.n_turned // 2):
        frequency = config.rope.theta ** (-2 * i / config.n_turned)
        if config.rope.divisors:
            frequency /= config.rope.divisors[i]
        s = config.rope.scaling
        if isinstance(s, YarnScaling):
            at = [
                config.n_turned * math.log(s.original_seq_len / turns / 2 / math.pi) / 2 / math.log(config.rope.theta)
                for turns in (s.beta_fast, s.beta_slow)
            ]
            first, last = (math.floor(at[0]), math.ceil(at[1])) if s.in_whole_pairs else at
            first, last = max(first, 0), min(last, config.n_turned - 1)
            kept = 1 - min(max((i - first) / (last - first if last != first else 0.001), 0), 1)
            frequency = frequency * kept + frequency / s.factor * (1 - kept)
        elif s:
            wavelength = 2 * math.pi / frequency
            if wavelength > s.original_seq_len / s.low_freq_factor:
                frequency /= s.factor
            elif wavelength >= s.original_seq_len / s.high_freq_factor:
                smooth = (s.original_seq_len / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
                frequency = (1 - smooth) * frequency / s.factor + smooth * frequency
        frequencies.append(frequency)
    return np.array(frequencies)


def rope(x, angle, scale=1.0):
    """x (..., K) whose first pairs are turned by angles, one a pair, and scaled."""
    n = 2 * len(angle)
    even, odd = x[..., 0:n:2], x[..., 1:n:2]
    out = x.copy()
    out[..., 0:n:2] = (even * np.cos(angle) - odd * np.sin(angle)) * scale
    out[..., 1:n:2] = (even * np.sin(angle) + odd * np.cos(angle)) * scale
    return out


class Quantized(NamedTuple):
    """A matrix (rows, k) of int8 values with a float32 scale for each `group` of them, in the order of a version 2 file."""

    values: np.ndarray
    scales: np.ndarray
    group: int

    def floats(self) -> np.ndarray:
        return (self.values.reshape(-1, self.group) * self.scales.astype(np.float64)[:, None]).reshape(self.values.shape)


class Seen(NamedTuple):
    """A matrix (rows, k) of floats whose products see activations in int8, in groups of so many."""

    numbers: np.ndarray
    group: int

    def floats(self) -> np.ndarray:
        return self.numbers.astype(np.float64)


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


def product(x: np.ndarray, w: np.ndarray | Quantized | Seen) -> np.ndarray:
    """x (T, k) times w (rows, k); with int8 weights x is quantized first, in the largest groups that do not cross rows of w."""
    if isinstance(w, np.ndarray):
        return x @ w.T
    group = math.gcd(w.group, x.shape[1]) if isinstance(w, Quantized) else w.group
    seen = np.empty(x.shape)
    for t, row in enumerate(x.astype(np.float32)):
        codes, scales = quantized_activations(row, group)
        seen[t] = codes * np.repeat(scales.astype(np.float64), group)[: len(row)]
    return seen @ w.floats().T


def bytes_of(x):
    """Numbers (..., K) as bytes with a scale each K say them: its largest is 127."""
    x = x.astype(np.float32)
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    codes = np.where(scale > 0, x / np.where(scale > 0, scale, 1), 0)
    return np.sign(codes) * np.floor(np.abs(codes) + 0.5) * scale


def attention(q, keys, values, window=None, kept=np.float64, scale=None, sinks=None):
    """softmax(scale q keys) values, (T, H, K) of q and (T, G, K) of the others, each token over `window` up to its own.

    kept: what keys and values are rounded to; scale: by default 1 / sqrt(K); sinks (H,): a score more, of no value.
    """
    keys, values = (kept(x).astype(np.float64) for x in (keys, values))
    n, heads, k = q.shape
    mixed = np.zeros((n, heads, k))
    for i in range(n):
        first = max(0, i + 1 - (window or n))
        for head in range(heads):
            g = head // (heads // keys.shape[1])
            scores = keys[first : i + 1, g] @ q[i, head] * (scale or 1 / math.sqrt(k))
            p = softmax(scores) if sinks is None else softmax(np.append(scores, sinks[head]))[:-1]
            mixed[i, head] = p @ values[first : i + 1, g]
    return mixed.reshape(n, -1)


def forward(
    config: Config, tensors: dict, tokens: list[int], window: int | None = None, kept: Callable = np.float64
) -> np.ndarray:
    """Logits (T, V) of a whole sequence, each token seeing the last `window` positions up to its own; kept: as in `attention`.

    Matrices may be `Quantized` (a list of them where layers have one each): then it is runq.c's forward. A bias or a norm of
    heads is there where its tensor is. Of a family that turns long texts otherwise, each row is of the text up to it.
    """
    if config.rope.n_short:
        short = changed(config, n_short=0, long_divisors=())
        long = changed(short, rope_divisors=config.rope.long_divisors)
        texts = [(long if n > config.rope.n_short else short, tokens[:n]) for n in range(1, len(tokens) + 1)]
        return np.stack([forward(turned, tensors, text, window, kept)[-1] for turned, text in texts])
    t = {name: tensor.astype(np.float64) if isinstance(tensor, np.ndarray) else tensor for name, tensor in tensors.items()}
    if config.architecture == "gpt2":
        return gpt2_forward(config, t, tokens, kept)
    t, n, eps = ByLayer(t), len(tokens), config.norm_eps

    def projected(x, c, i):
        return product(x, t[f"w{c}"][i]) + (t[f"b{c}"][i] if f"b{c}" in t else 0)

    def mixed(x, i):
        own = config.of_layer(i)
        if isinstance(own.mixer, ConvConfig):
            return convolved(x, t, i, own.mixer)
        seen = (window or own.attention.window) if own.attention.window == config.attention.window else own.attention.window
        sinks = t["sinks"][i] if config.attention.sinks else None
        if own.attention.kv_layer is None:
            cached[i] = heads(x, "k", i), heads(x, "v", i)
        keys, values = cached[i if own.attention.kv_layer is None else own.attention.kv_layer]
        return projected(attention(heads(x, "q", i), keys, values, seen, kept, own.score_scale, sinks), "o", i)

    def heads(x, c, i):
        own = config.of_layer(i)
        x = product(x, t["wk_as_v"][i]) if c == "v" and own.attention.values_are_keys else projected(x, c, i)
        if c != "v" and config.attention.qk_norm == "whole":
            x = rms_norm(x, t[f"{c}_norm"][i], eps)
        x = x.reshape(n, -1, own.head_dim)
        if c == "v" and config.attention.value_norm:
            x = rms_norm(x, 1, eps)
        if c != "v":
            x = rms_norm(x, t[f"{c}_norm"][i], eps) if config.attention.qk_norm is True else x
            angles = frequencies(own) * own.attention.is_turned
            x = np.stack([rope(x[pos], pos * angles, config.rope.scale) for pos in range(n)])
        if c == "q" and config.rope.query_scale:
            x = x * (1 + config.rope.query_scale * np.log(1 + np.arange(n) // config.rope.query_span))[:, None, None]
        return x

    def branch(x, name, i):
        return rms_norm(x, t[name][i], eps) if name in t else x

    embedding, cached = t["tok_emb"], {}
    x = (embedding if isinstance(embedding, np.ndarray) else embedding.floats())[tokens] * config.embedding_scale
    if config.inputs:
        width = config.inputs.dim
        inputs = product(x, t["inputs"]).reshape(n, config.n_layers, width) / math.sqrt(config.dim)
        rows = t["input_rows"][tokens].reshape(inputs.shape) * math.sqrt(width)
        inputs = (rms_norm(inputs, t["inputs_norm_in"], eps) + rows) / math.sqrt(2)
    for i in range(config.n_layers):
        x = x + branch(mixed(branch(x, "rms_att", i), i), "rms_att_out", i)
        h = branch(x, "rms_ffn", i)
        if config.experts and i not in config.experts.dense_layers and not config.experts.is_beside:
            x = x + mixture(h, t, i, config.experts)
            continue
        gate, up = projected(h, "1", i), projected(h, "3", i)
        gated = gelu(gate) if config.activation == "gelu" else gate / (1 + np.exp(-gate))
        made = projected(gated * up, "2", i)
        if config.experts and config.experts.is_beside:
            routed = rms_norm(x, t["router_scale"][i], eps) / math.sqrt(config.dim)
            own = mixture(branch(x, "rms_experts", i), t, i, config.experts, routed, gelu)
            made = branch(made, "rms_mlp_out", i) + branch(own, "rms_experts_out", i)
        x = x + branch(made, "rms_ffn_out", i)
        if config.inputs:
            gated = gelu(product(x, t["inputs_gate"][i])) * inputs[:, i]
            x = x + rms_norm(product(gated, t["inputs_back"][i]), t["inputs_norm"][i], eps)
        if config.layer_scale:
            x = x * t["layer_scale"][i]
    logits = product(rms_norm(x, t["rms_final"], eps), embedding if config.shared_classifier else t["wcls"])
    return config.logit_cap * np.tanh(logits / config.logit_cap) if config.logit_cap else logits


class ByLayer(dict):
    """Tensors, of which those that only some layers have are called by their layer's number, as of layers, by number."""

    def __init__(self, tensors: dict) -> None:
        super().__init__(tensors)
        for name, tensor in tensors.items():
            layer, _, own = name.rpartition(".")
            if layer:
                self.setdefault(own, {})[int(layer)] = tensor


def silu(x):
    return x / (1 + np.exp(-x))


def mixture(x, t, i, e, routed=None, activation=silu):
    """The weighted sum over each token's experts, and the expert that all share; routed: what the router takes, if not x."""

    def mlp(x, w1, w2, w3):
        return product(activation(product(x, w1)) * product(x, w3), w2)

    def clamped(x, expert):
        w, b = ([t[f"experts_{kind}{n}"][i][expert] for n in (1, 2, 3)] for kind in "wb")
        gate, up = np.minimum(product(x, w[0]) + b[0], e.limit), np.clip(product(x, w[2]) + b[2], -e.limit, e.limit)
        return product((up + 1) * gate / (1 + np.exp(-e.alpha * gate)), w[1]) + b[1]

    scores = product(x if routed is None else routed, t["router"][i]) + (t["router_b"][i] if e.limit else 0)
    out = np.zeros(x.shape)
    for row, (h, score) in enumerate(zip(x, scores, strict=True)):
        odds = 1 / (1 + np.exp(-score)) if e.is_sigmoid else np.exp(score - score.max()) / np.exp(score - score.max()).sum()
        chosen = np.argsort(-(odds + (t["router_bias"][i] if e.is_biased else 0)), kind="stable")[: e.n_chosen]
        weights = odds[chosen] * e.scale
        weights = weights / (odds[chosen].sum() + (1e-6 if e.is_sigmoid else 0)) if e.is_normed else weights
        weights = weights * t["expert_scale"][i][chosen] if e.is_beside else weights
        for expert, weight in zip(chosen, weights, strict=True):
            own = clamped(h, expert) if e.limit else mlp(h, *(t[f"experts_w{n}"][i][expert] for n in (1, 2, 3)))
            out[row] += weight * own
    if e.shared_dim:
        gate = 1 / (1 + np.exp(-product(x, t["shared_gate"][i]))) if e.shared_gate else 1
        out += gate * mlp(x, *(t[f"shared_w{n}"][i] for n in (1, 2, 3)))
    return out


def convolved(x, t, i, conv):
    """c * conv(b * x), projected, of b, c, x = x projected; of the convolution's taps the last is that of the newest token."""

    def projected(x, name):
        return product(x, t[name][i]) + (t[f"{name}_bias"][i] if conv.bias else 0)

    b, c, x = (projected(x, f"conv_{name}") for name in "bcx")
    out = np.zeros(x.shape) + (t["conv_bias"][i] if conv.bias else 0)
    for pos in range(len(x)):
        for j in range(conv.n_taps):
            if (seen := pos - (conv.n_taps - 1) + j) >= 0:
                out[pos] += t["conv"][i][j] * (b * x)[seen]
    return projected(c * out, "conv_out")


def gpt2_forward(config: Config, t: dict, tokens: list[int], kept: Callable) -> np.ndarray:
    """`forward` of GPT-2: tensors of float64."""
    n, k = len(tokens), config.head_dim
    x = t["tok_emb"][tokens] + t["pos_emb"][:n]

    def norm(x, name, i=...):
        return layer_norm(x, t[f"ln_{name}"][i], t[f"ln_{name}_bias"][i], config.norm_eps)

    def projected(x, c, i):
        return x @ t[f"w{c}"][i].T + t[f"b{c}"][i]

    for i in range(config.n_layers):
        h = norm(x, "att", i)
        x = x + projected(attention(*(projected(h, c, i).reshape(n, -1, k) for c in "qkv"), kept=kept), "o", i)
        x = x + projected(gelu(projected(norm(x, "ffn", i), "1", i)), "2", i)
    return norm(x, "final") @ (t["tok_emb"] if config.shared_classifier else t["wcls"]).T


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
    wide = probs.astype(np.float64)  # numpy 1 would divide float32 by a scalar in float32
    out[order] = (wide[order] / wide[sorted(order)].sum()).astype(np.float32)
    return out


def chi_square_limit(degrees: int, sigmas: float) -> float:
    """The value that chi-square passes with the odds of a normal variable passing `sigmas` (Wilson and Hilferty 1931)."""
    a = 2 / (9 * degrees)
    return degrees * (1 - a + sigmas * math.sqrt(a)) ** 3
