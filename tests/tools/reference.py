"""Slow numpy oracles in float64: what the kernels compute, written for the reader."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from specdec.mixer_config import Mamba2Config, ShortConvConfig
from specdec.model_config import ModelConfig, YarnRopeScaling
from specdec.runtime.simd import Float32
from tests.tools.configs import replace_config


def rms_norm(x, weight, eps=1e-5):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def layer_norm(x, weight, bias, eps=1e-5):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * weight + bias


def gelu(x):
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rope_frequencies(config):
    """Return radians per position (K / 2,), with Llama 3.1's scaling pair by pair, by wavelengths, as in its paper's code."""
    frequencies = []
    for i in range(config.rotary_dim // 2):
        frequency = config.rope.theta ** (-2 * i / config.rotary_dim)
        if config.rope.freq_factors:
            frequency /= config.rope.freq_factors[i]
        s = config.rope.scaling
        if isinstance(s, YarnRopeScaling):
            at = [
                config.rotary_dim * math.log(s.original_seq_len / rotations / 2 / math.pi) / 2 / math.log(config.rope.theta)
                for rotations in (s.beta_fast, s.beta_slow)
            ]
            first, last = (math.floor(at[0]), math.ceil(at[1])) if s.truncate else at
            first, last = max(first, 0), min(last, config.rotary_dim - 1)
            ramp = 1 - min(max((i - first) / (last - first if last != first else 0.001), 0), 1)
            frequency = frequency * ramp + frequency / s.factor * (1 - ramp)
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
    """Rotate the first pairs of x (..., K) by one angle each and scale them."""
    n = 2 * len(angle)
    even, odd = x[..., 0:n:2], x[..., 1:n:2]
    out = x.copy()
    out[..., 0:n:2] = (even * np.cos(angle) - odd * np.sin(angle)) * scale
    out[..., 1:n:2] = (even * np.sin(angle) + odd * np.cos(angle)) * scale
    return out


class QuantizedMatrix(NamedTuple):
    """A matrix (rows, k) of int8 values with a float32 scale for each group, in the order of a version 2 file."""

    values: np.ndarray
    scales: np.ndarray
    group: int

    def to_floats(self) -> np.ndarray:
        return (self.values.reshape(-1, self.group) * self.scales.astype(np.float64)[:, None]).reshape(self.values.shape)


class Int8ActivationMatrix(NamedTuple):
    """A matrix (rows, k) of floats that is multiplied by activations in int8, with a scale for each group."""

    values: np.ndarray
    group: int

    def to_floats(self) -> np.ndarray:
        return self.values.astype(np.float64)


def quantize(matrix: Float32, group: int) -> QuantizedMatrix:
    """Quantize symmetrically: the largest of a group becomes 127 (llama2.c's export.py)."""
    parts = matrix.reshape(-1, group)
    scales = np.abs(parts).max(1) / np.float32(127)
    values = np.rint(parts / np.where(scales > 0, scales, 1)[:, None])
    return QuantizedMatrix(values.astype(np.int8).reshape(matrix.shape), scales, group)


def quantize_activations(x: Float32, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Return codes (k,) and scales (groups,) of x (k,) by runq.c's rule, which rounds halves away from zero."""
    parts = np.concatenate([x, np.zeros(-len(x) % group, np.float32)]).reshape(-1, group)
    scales = np.abs(parts).max(1) / np.float32(127)
    ratio = parts / np.where(scales > 0, scales, np.float32(1))[:, None]
    return (np.sign(ratio) * np.floor(np.abs(ratio.astype(np.float64)) + 0.5)).reshape(-1)[: len(x)].astype(np.int64), scales


def matmul(x: np.ndarray, w: np.ndarray | QuantizedMatrix | Int8ActivationMatrix) -> np.ndarray:
    """Return x (T, k) times w (rows, k).

    With int8 weights x is quantized first, in the largest groups that do not cross rows of w.
    """
    if isinstance(w, np.ndarray):
        return x @ w.T
    group = math.gcd(w.group, x.shape[1]) if isinstance(w, QuantizedMatrix) else w.group
    quantized = np.empty(x.shape)
    for t, row in enumerate(x.astype(np.float32)):
        codes, scales = quantize_activations(row, group)
        quantized[t] = codes * np.repeat(scales.astype(np.float64), group)[: len(row)]
    return quantized @ w.to_floats().T


def round_to_q8(x):
    """Return numbers (..., K) after rounding to bytes with a scale for each K: the largest becomes 127."""
    x = x.astype(np.float32)
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    codes = np.where(scale > 0, x / np.where(scale > 0, scale, 1), 0)
    return np.sign(codes) * np.floor(np.abs(codes) + 0.5) * scale


def attention(q, keys, values, window=None, round_kv=np.float64, scale=None, sinks=None, softcap=0.0):
    """Return softmax(scale q keys) values, where each token sees `window` positions up to its own.

    q (T, H, K); keys and values (T, G, K), rounded by round_kv. scale is 1 / sqrt(K) by default. sinks (H,): an additional
    score without a value. softcap: bound of the scores, or 0.
    """
    keys, values = (round_kv(x).astype(np.float64) for x in (keys, values))
    n, heads, k = q.shape
    mixed = np.zeros((n, heads, values.shape[-1]))
    for i in range(n):
        first = max(0, i + 1 - (window or n))
        for head in range(heads):
            g = head // (heads // keys.shape[1])
            scores = keys[first : i + 1, g] @ q[i, head] * (scale or 1 / math.sqrt(k))
            scores = softcap * np.tanh(scores / softcap) if softcap else scores
            p = softmax(scores) if sinks is None else softmax(np.append(scores, sinks[head]))[:-1]
            mixed[i, head] = p @ values[first : i + 1, g]
    return mixed.reshape(n, -1)


def forward(
    config: ModelConfig, tensors: dict, tokens: list[int], window: int | None = None, round_kv: Callable = np.float64
) -> np.ndarray:
    """Return the logits (T, V) of a whole sequence, each token seeing the last `window` positions up to its own.

    Matrices may be `QuantizedMatrix`, or a list of them for layers: then it is runq.c's forward. Biases and head norms apply if
    their tensors exist. With LongRoPE, each row is of the sequence up to it. round_kv: as in `attention`.
    """
    if config.rope.longrope_threshold:
        short_config = replace_config(config, longrope_threshold=0, long_freq_factors=())
        long_config = replace_config(short_config, rope_divisors=config.rope.long_freq_factors)
        prefixes = [
            (long_config if n > config.rope.longrope_threshold else short_config, tokens[:n]) for n in range(1, len(tokens) + 1)
        ]
        return np.stack([forward(prefix_config, tensors, prefix, window, round_kv)[-1] for prefix_config, prefix in prefixes])
    t = LayerTensors({k: v.astype(np.float64) if isinstance(v, np.ndarray) else v for k, v in tensors.items()})
    n, eps, layers = len(tokens), config.norm_eps, ReferenceLayers(config, t, len(tokens), window, round_kv)
    embedding, inputs = t["tok_emb"], None
    x = (embedding if isinstance(embedding, np.ndarray) else embedding.to_floats())[tokens] * config.embedding_scale
    if config.learned_positions:
        x = x + t["pos_emb"][:n]
    if config.per_layer_inputs:
        width = config.per_layer_inputs.dim
        inputs = matmul(x, t["inputs"]).reshape(n, config.n_layers, width) / math.sqrt(config.dim)
        rows = t["input_rows"][tokens].reshape(inputs.shape) * math.sqrt(width)
        inputs = (rms_norm(inputs, t["inputs_norm_in"], eps) + rows) / math.sqrt(2)
    for i in range(config.n_layers):
        blocks = config.layer_config(i).blocks
        if blocks != "second":
            x = x + layers.branch(layers.mix(layers.branch(x, "rms_att", i), i), "rms_att_out", i)
        if blocks != "first":
            x = layers.feed_forward(x, i, inputs)
    normed = layer_norm(x, t["rms_final"], t["rms_final_bias"], eps) if config.layer_norm else rms_norm(x, t["rms_final"], eps)
    logits = matmul(normed, embedding if config.shared_classifier else t["wcls"]) + t.get("wcls_bias", 0)
    return config.logit_softcap * np.tanh(logits / config.logit_softcap) if config.logit_softcap else logits


class ReferenceLayers:
    """The layers of `forward` over n tokens; x is (n, ...), i the number of a layer, `cached` the keys and values of each."""

    def __init__(self, config: ModelConfig, tensors: "LayerTensors", n: int, window: int | None, round_kv: Callable) -> None:
        self.config, self.t, self.n, self.window, self.round_kv = config, tensors, n, window, round_kv
        self.cached: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def project(self, x, c, i):
        return matmul(x, self.t[f"w{c}"][i]) + (self.t[f"b{c}"][i] if f"b{c}" in self.t else 0)

    def branch(self, x, name, i):
        t, eps = self.t, self.config.norm_eps
        if self.config.layer_norm and name in t:
            return layer_norm(x, t[name][i], t[f"{name}_bias"][i], eps)
        return rms_norm(x, t[name][i], eps) if name in t else x

    def mix(self, x, i):
        own = self.config.layer_config(i)
        if isinstance(own.mixer, ShortConvConfig):
            return short_conv(x, self.t, i, own.mixer)
        if isinstance(own.mixer, Mamba2Config):
            made = mamba2(x, self.t, i, own.mixer, self.config.norm_eps)
            return made + self.attend(x, i, own) if own.mixer.is_parallel else made
        return self.attend(x, i, own)

    def attend(self, x, i, own):
        if own.attention.latent:
            return latent_attention(x, self.t, i, own, self.round_kv)
        common, window = self.config.attention, own.attention.window
        seen = (self.window or window) if window == common.window else window
        sinks = self.t["sinks"][i] if common.sinks else None
        if own.attention.kv_layer is None:
            self.cached[i] = self.heads(x, "k", i), self.heads(x, "v", i)
        keys, values = self.cached[i if own.attention.kv_layer is None else own.attention.kv_layer]
        options = self.round_kv, own.softmax_scale, sinks, own.attention.softcap
        return self.project(
            self.branch(attention(self.heads(x, "q", i), keys, values, seen, *options), "att_sub_norm", i), "o", i
        )

    def heads(self, x, c, i):
        config, t, n, eps = self.config, self.t, self.n, self.config.norm_eps
        own = config.layer_config(i)
        x = matmul(x, t["wk_as_v"][i]) if c == "v" and own.attention.values_are_keys else self.project(x, c, i)
        if config.attention.projection_scales:
            x = x * config.attention.projection_scales["qkv".index(c)]
        if c != "v" and config.attention.qk_norm == "whole":
            x = rms_norm(x, t[f"{c}_norm"][i], eps)
        x = x.reshape(n, -1, own.head_dim)
        if c == "v" and config.attention.value_norm:
            x = rms_norm(x, 1, eps)
        if c != "v":
            x = rms_norm(x, t[f"{c}_norm"][i], eps) if config.attention.qk_norm is True else x
            angles = rope_frequencies(own) * own.attention.has_rope
            x = np.stack([rope(x[pos], pos * angles, config.rope.attention_factor) for pos in range(n)])
            x = rms_norm(x, t[f"{c}_norm"][i], eps) if config.attention.qk_norm == "rotated" else x
        if c == "q" and config.rope.query_scale:
            x = x * (1 + config.rope.query_scale * np.log(1 + np.arange(n) // config.rope.query_span))[:, None, None]
        return x

    def feed_forward(self, x, i, inputs):
        """Return x after the second block of a layer; inputs (n, L, P) are those per layer, or None."""
        config, t, eps = self.config, self.t, self.config.norm_eps
        h = self.branch(x, "rms_ffn", i)
        if config.experts and i not in config.experts.dense_layers and not config.experts.has_parallel_mlp:
            return x + moe(h, t, i, config.experts, None, ACTIVATIONS[config.activation])
        own_scale, gate_scale = config.mlp_scales or (1, 1)
        gate = 1 if config.activation in UNGATED else self.project(h, "3", i) * gate_scale
        activation = xielu(t, i) if config.activation == "xielu" else ACTIVATIONS[config.activation]
        made = self.branch(activation(self.project(h, "1", i) * own_scale) * gate, "ffn_sub_norm", i)
        made = self.project(made, "2", i)
        if config.experts and config.experts.has_parallel_mlp:
            routed = rms_norm(x, t["router_scale"][i], eps) / math.sqrt(config.dim)
            own = moe(self.branch(x, "rms_experts", i), t, i, config.experts, routed, gelu)
            made = self.branch(made, "rms_mlp_out", i) + self.branch(own, "rms_experts_out", i)
        x = x + self.branch(made, "rms_ffn_out", i)
        if config.per_layer_inputs:
            gated = gelu(matmul(x, t["inputs_gate"][i])) * inputs[:, i]
            x = x + rms_norm(matmul(gated, t["inputs_back"][i]), t["inputs_norm"][i], eps)
        return x * t["layer_scale"][i] if config.layer_scale else x


class LayerTensors(dict):
    """Tensors, where those with a layer's number in their name are also found by name, then number."""

    def __init__(self, tensors: dict) -> None:
        super().__init__(tensors)
        for name, tensor in tensors.items():
            layer, _, own = name.rpartition(".")
            if layer:
                self.setdefault(own, {})[int(layer)] = tensor


def silu(x):
    return x / (1 + np.exp(-x))


def relu2(x):
    return np.maximum(x, 0) ** 2


def xielu(t, i):
    """Return the xIELU of layer i, a function, from its tensors alpha_p, alpha_n, beta and eps."""
    alpha_p, alpha_n, beta, eps = (t[name][i] for name in ("alpha_p", "alpha_n", "beta", "eps"))
    positive, negative = np.logaddexp(0, alpha_p), beta + np.logaddexp(0, alpha_n)
    return lambda x: np.where(x > 0, positive * x * x, negative * (np.expm1(np.minimum(x, eps)) - x)) + beta * x


UNGATED = ("relu2", "ungated_gelu", "xielu")
ACTIVATIONS = {"silu": silu, "gelu": gelu, "ungated_gelu": gelu, "relu2": relu2, "gated_relu2": relu2}


def moe(x, t, i, e, routed=None, activation=silu):
    """Return the weighted sum over each token's experts, with the shared expert; routed: input of the router, if not x."""
    numbers = (1, 2) if activation is relu2 else (1, 2, 3)

    def mlp(x, w1, w2, w3=None):
        return matmul(activation(matmul(x, w1)) * (1 if w3 is None else matmul(x, w3)), w2)

    def clamped_mlp(x, expert):
        w, b = ([t[f"experts_{prefix}{n}"][i][expert] for n in (1, 2, 3)] for prefix in "wb")
        gate, up = (
            np.minimum(matmul(x, w[0]) + b[0], e.swiglu_limit),
            np.clip(matmul(x, w[2]) + b[2], -e.swiglu_limit, e.swiglu_limit),
        )
        return matmul((up + 1) * gate / (1 + np.exp(-e.swiglu_alpha * gate)), w[1]) + b[1]

    scores = matmul(x if routed is None else routed, t["router"][i]) + (t["router_b"][i] if e.swiglu_limit else 0)
    out = np.zeros(x.shape)
    for row, (h, score) in enumerate(zip(x, scores, strict=True)):
        probs = 1 / (1 + np.exp(-score)) if e.is_sigmoid else np.exp(score - score.max()) / np.exp(score - score.max()).sum()
        selection = keep_best_groups(probs + (t["router_bias"][i] if e.has_selection_bias else 0), e)
        chosen = np.argsort(-selection, kind="stable")[: e.n_experts_used]
        weights = probs[chosen] * e.routed_scaling_factor
        weights = weights / (probs[chosen].sum() + (e.sum_eps if e.is_sigmoid else 0)) if e.norm_topk_prob else weights
        if e.sparsemixer_threshold:
            weights = [get_sparse_share(score, chosen, rank, e.sparsemixer_threshold) for rank in range(len(chosen))]
        weights = weights * t["expert_scale"][i][chosen] if e.has_parallel_mlp else weights
        for expert, weight in zip(chosen, weights, strict=True):
            output = clamped_mlp(h, expert) if e.swiglu_limit else mlp(h, *(t[f"experts_w{n}"][i][expert] for n in numbers))
            out[row] += weight * output
    if e.shared_hidden_dim:
        gate = 1 / (1 + np.exp(-matmul(x, t["shared_gate"][i]))) if e.shared_gate else 1
        out += gate * mlp(x, *(t[f"shared_w{n}"][i] for n in numbers))
    return out


def get_sparse_share(scores, chosen, rank, threshold):
    """Return SparseMixer's weight of a chosen expert: its softmax among those that are left and nearly as good."""
    left = np.setdiff1d(np.arange(len(scores)), chosen[:rank])
    best = scores[chosen[rank]]
    near = left[(best - scores[left]) / np.maximum(np.abs(scores[left]), best) <= threshold]
    return 1 / np.exp(scores[near] - best).sum()


def keep_best_groups(scores, e):
    """Return the scores (E,), -inf for experts outside of the best groups."""
    groups = scores.reshape(e.n_groups, -1)
    best = np.argsort(-np.sort(groups, 1)[:, -2 if e.is_sigmoid else -1 :].sum(1), kind="stable")[: e.n_groups_used]
    return np.where(np.isin(np.arange(e.n_groups), best)[:, None], groups, -np.inf).reshape(-1)


def latent_attention(x, t, i, own, round_kv):
    """Return multi-head latent attention with keys and values of each head, as DeepSeek-V2's paper defines it (section 2.1)."""
    a, n, heads = own.attention.latent, len(x), own.n_heads
    q = matmul(rms_norm(matmul(x, t["wq_a"][i]), t["q_a_norm"][i], 1e-6), t["wq_b"][i]) if a.q_rank else matmul(x, t["wq"][i])
    latent, shared = np.split(matmul(x, t["wkv_a"][i]), [a.kv_rank], 1)
    q, latent = q.reshape(n, heads, -1), rms_norm(latent, t["kv_a_norm"][i], 1e-6)
    angles, scale = rope_frequencies(own), own.rope.attention_factor
    shared = np.stack([rope(shared[pos], pos * angles, scale) for pos in range(n)])
    q_rope = np.stack([rope(q[pos, :, a.nope_dim :], pos * angles, scale) for pos in range(n)])
    cached = round_kv(np.concatenate([latent, shared], 1)).astype(np.float64)
    latent, shared = cached[:, : a.kv_rank], cached[:, a.kv_rank :]
    mixed = []
    for head in range(heads):
        own_q = np.concatenate([q[:, head, : a.nope_dim], q_rope[:, head]], 1)
        keys, values = np.concatenate([latent @ t["wk_b"][i][head], shared], 1), latent @ t["wv_b"][i][head].T
        mixed.append(attention(own_q[:, None], keys[:, None], values[:, None], own.attention.window, scale=own.softmax_scale))
    return matmul(np.concatenate(mixed, 1), t["wo"][i])


def short_conv(x, t, i, conv):
    """Return c * conv(b * x), projected, where b, c, x are projections of x; the last weight is the newest token's."""

    def project(x, name):
        return matmul(x, t[name][i]) + (t[f"{name}_bias"][i] if conv.bias else 0)

    b, c, x = (project(x, f"conv_{name}") for name in "bcx")
    out = np.zeros(x.shape) + (t["conv_bias"][i] if conv.bias else 0)
    for pos in range(len(x)):
        for j in range(conv.kernel_size):
            if (source := pos - (conv.kernel_size - 1) + j) >= 0:
                out[pos] += t["conv"][i][j] * (b * x)[source]
    return project(c * out, "conv_out")


def mamba2(x, t, i, m, eps):
    """Return a Mamba-2 layer's output, token by token, with one head's state (P, N) after the other."""
    xbc, z, dt = (matmul(x, t[f"mamba_{name}"][i]) for name in ("xbc", "z", "dt"))
    if m.scales:
        n = m.n_groups * m.state_dim
        z, xbc, dt = m.scales[0] * z, np.repeat(m.scales[1:4], (m.inner_dim, n, n)) * xbc, m.scales[4] * dt
    conv = np.zeros(xbc.shape) + (t["conv_bias"][i] if m.conv_bias else 0)
    for pos in range(len(x)):
        for j in range(m.kernel_size):
            if (source := pos - (m.kernel_size - 1) + j) >= 0:
                conv[pos] += t["conv"][i][j] * xbc[source]
    values, b, c = np.split(silu(conv), [m.inner_dim, m.inner_dim + m.n_groups * m.state_dim], axis=1)
    dt = np.log1p(np.exp(dt + t["dt"][i]))
    y = np.zeros((len(x), m.inner_dim))
    for head in range(m.n_heads):
        group, rows = head // (m.n_heads // m.n_groups), slice(head * m.head_dim, (head + 1) * m.head_dim)
        state, columns = np.zeros((m.head_dim, m.state_dim)), slice(group * m.state_dim, (group + 1) * m.state_dim)
        for pos in range(len(x)):
            decay = np.exp(t["rate"][i][head] * dt[pos, head])
            state = decay * state + np.outer(dt[pos, head] * values[pos, rows], b[pos, columns])
            y[pos, rows] = state @ c[pos, columns] + t["skip"][i][head] * values[pos, rows]
    y = (y * silu(z)).reshape(len(x), m.n_groups, -1)
    y = rms_norm(y, t["mamba_norm"][i], eps) if m.has_norm else y
    return m.output_scale * matmul(y.reshape(len(x), -1), t["mamba_out"][i])


def probabilities(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Return probabilities after temperature, softmax, top-k and top-p as run.c defines them, by a full sort."""
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


def mix_bits(x: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finalizer to uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw_tokens(probs: np.ndarray, seed: int, stream: int, positions: np.ndarray) -> list[int]:
    """Return the token of each position: the least -log(u) / p of all, the first of equals; every u is computed.

    See `sampling.draw_gumbel_top_k`.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        stream_key = mix_bits(np.array([seed], np.uint64) + golden * np.uint64(stream + 1))
        keys = mix_bits(stream_key + golden * (positions.astype(np.uint64) + np.uint64(1)))
        bits = mix_bits(keys[:, None] + golden * np.arange(1, len(probs) + 1, dtype=np.uint64))
    u = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    times = np.where(probs > 0, -np.log(u) / np.where(probs > 0, probs, 1).astype(np.float64), np.inf)
    return times.argmin(1).tolist() if (probs > 0).any() else [-1] * len(positions)


def truncate_probs(probs: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Return float32 probs after top_k and top_p, by a full sort; exact, since no sum here rounds before the last division."""
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
    """Return the value that chi-square exceeds as rarely as a normal variable exceeds `sigmas` (Wilson and Hilferty 1931)."""
    a = 2 / (9 * degrees)
    return degrees * (1 - a + sigmas * math.sqrt(a)) ** 3


def check_counts(counts: dict, expected: dict, min_cells: int | None = None) -> None:
    """Check counts of outcomes against their probabilities by chi-square, with a false alarm below 1e-6.

    Outcomes that are expected less than 8 times are one cell; at least min_cells others must be left, by default all.
    """
    assert set(counts) <= set(expected)
    n_runs = sum(counts.values())
    big = {cell: n_runs * p for cell, p in expected.items() if n_runs * p >= 8}
    assert len(big) >= (min_cells or len(expected))
    rest = n_runs - sum(big.values())
    chi_square = sum((counts.get(cell, 0) - e) ** 2 / e for cell, e in big.items())
    if rest >= 8:
        chi_square += (sum(n for cell, n in counts.items() if cell not in big) - rest) ** 2 / rest
    n_cells = len(big) + (len(big) < len(expected))
    assert chi_square < chi_square_limit(n_cells - 1, 4.8)
