"""A second architecture, for the seam that `Architecture` is: GPT-2's pass (Radford et al. 2019) on tensors of its own names.

LayerNorm with bias, learned positions, biases everywhere, GELU; the classifier is the embedding. Its own operations are here.
"""

import math

import numpy as np

from specdec.architectures import Architecture, Config, Weights
from specdec.architectures.plan import Part, Vector
from specdec.kernels import Buffers, attention, store_keys, store_values
from specdec.machine.programs import Floats1, Floats2, Floats3, Operation, Pass, Program, Row
from specdec.machine.threads import share
from specdec.machine.tiles import STRIP_ROWS
from specdec.weights.matrix import n_strips


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    n, d, f = config.n_layers, config.dim, config.hidden_dim
    matrices = dict.fromkeys(("wq", "wk", "wv", "wo"), (n, d, d)) | {"w_up": (n, f, d), "w_down": (n, d, f)}
    biases = dict.fromkeys(("bq", "bk", "bv", "bo", "b_down", "ln1", "ln1_b", "ln2", "ln2_b"), (n, d)) | {"b_up": (n, f)}
    tables = {"wte": (config.vocab_size, d), "wpe": (config.seq_len, d), "ln_f": (d,), "ln_f_b": (d,)}
    return matrices | biases | tables


def parts(config: Config) -> dict[str, Part]:
    d, f = config.dim, config.hidden_dim
    table = Part((("wte", None),), (config.vocab_size,), d)
    matrices = {"embedding": table, "classifier": table}
    for i in range(config.n_layers):
        matrices[f"{i}.qkv"] = Part((("wq", i), ("wk", i), ("wv", i)), (d, d, d), d)
        matrices[f"{i}.wo"] = Part((("wo", i),), (d,), d)
        matrices[f"{i}.up"] = Part((("w_up", i),), (f,), d)
        matrices[f"{i}.down"] = Part((("w_down", i),), (d,), f)
    return matrices


def vectors(config: Config) -> dict[str, Vector]:
    d, f = config.dim, config.hidden_dim
    own = {name: Vector(((name, None),), (d,)) for name in ("ln_f", "ln_f_b")}
    own["wpe"] = Vector(tuple(("wpe", i) for i in range(config.seq_len)), (d,) * config.seq_len)
    for i in range(config.n_layers):
        own |= {f"{i}.{name}": Vector(((name, i),), (d,)) for name in ("bo", "b_down", "ln1", "ln1_b", "ln2", "ln2_b")}
        own[f"{i}.bqkv"] = Vector((("bq", i), ("bk", i), ("bv", i)), (d, d, d))
        own[f"{i}.b_up"] = Vector((("b_up", i),), (f,))
    return own


def _add_positions(run: Pass, thread: int, x: Floats2, positions: Floats2, n: int) -> None:
    first, last = share(n, thread, run.n_threads)
    for t in range(run.n_tokens):
        for k in range(first, last):
            x[t, k] += positions[run.pos + t, k]


def _layer_norm(
    run: Pass, thread: int, out: Floats3, x: Floats3, weight: Floats1, bias: Floats1, dim: int, eps: float, of_logits: int
) -> None:
    n_tokens = run.n_logits if of_logits else run.n_tokens
    for t in range(n_tokens):
        row = x[0, run.n_tokens - n_tokens + t]
        mean, variance = np.float32(0.0), np.float32(0.0)
        for k in range(dim):
            mean += row[k] / np.float32(dim)
        for k in range(dim):
            variance += (row[k] - mean) ** 2 / np.float32(dim)
        for k in range(row.size):
            out[thread, t, k] = (row[k] - mean) / np.sqrt(variance + eps) * weight[k] + bias[k]


def _add_bias(run: Pass, thread: int, out: Floats2, bias: Floats1) -> None:
    first, last = share(out.shape[1] // STRIP_ROWS, thread, run.n_threads)
    for t in range(run.n_tokens):
        for row in range(first * STRIP_ROWS, last * STRIP_ROWS):
            out[t, row] += bias[row]


def _gelu(run: Pass, thread: int, hidden: Floats3, up: Floats2) -> None:
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016)."""
    first, last = share(up.shape[1] // STRIP_ROWS, thread, run.n_threads)
    for t in range(run.n_tokens):
        for row in range(first * STRIP_ROWS, last * STRIP_ROWS):
            v = up[t, row]
            hidden[0, t, row] = v / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v * v * v)))


add_positions, layer_norm, add_bias, gelu = (Operation(f, kept=False) for f in (_add_positions, _layer_norm, _add_bias, _gelu))


def program(config: Config, weights: Weights, b: Buffers) -> Program:
    w, v = weights.matrices, weights.vectors
    k_row = n_strips(config.dim) * STRIP_ROWS
    strips = 3 * n_strips(config.dim)

    def norm(name: str, of_logits: bool = False) -> Row:
        return layer_norm(b.normed, b.x, v[name], v[f"{name}_b"], config.dim, config.norm_eps, of_logits)

    def layer(i: int) -> Program:
        return [
            [
                norm(f"{i}.ln1"),
                w[f"{i}.qkv"].product(b.qkv, b.normed, b.scratch),
                add_bias(b.qkv, v[f"{i}.bqkv"]),
                store_keys(b.keys[i], b.qkv, strips, k_row),
                store_values(b.values[i], b.qkv, strips, 2 * k_row, config.head_dim),
            ],
            [attention(b.heads, b.qkv, b.keys[i], b.values[i], b.scores, b.mixed, config.n_heads, config.seq_len)],
            [w[f"{i}.wo"].product(b.x[0], b.heads, b.scratch, adding=True), add_bias(b.x[0], v[f"{i}.bo"])],
            [
                norm(f"{i}.ln2"),
                w[f"{i}.up"].product(b.up, b.normed, b.scratch),
                add_bias(b.up, v[f"{i}.b_up"]),
                gelu(b.hidden, b.up),
            ],
            [w[f"{i}.down"].product(b.x[0], b.hidden, b.scratch, adding=True), add_bias(b.x[0], v[f"{i}.b_down"])],
        ]

    positions = v["wpe"].reshape(config.seq_len, -1)
    return [
        [w["embedding"].embedding(b.x[0], b.tokens), add_positions(b.x[0], positions, config.dim)],
        *(phase for i in range(config.n_layers) for phase in layer(i)),
        [norm("ln_f", of_logits=True), w["classifier"].product(b.logits, b.normed, b.scratch, of_logits=True)],
    ]


GPT2 = Architecture(shapes, parts, vectors, program)


def reference(config: Config, tensors: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Logits (T, V) of a whole text, in float64."""
    t = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    heads, k, n = config.n_heads, config.head_dim, len(tokens)

    def norm(x, name, i=...):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * t[name][i] + t[f"{name}_b"][i]

    x = t["wte"][tokens] + t["wpe"][:n]
    seen = np.tril(np.ones((n, n), bool))
    for i in range(config.n_layers):
        h = norm(x, "ln1", i)
        q, key, value = ((h @ t[f"w{c}"][i].T + t[f"b{c}"][i]).reshape(n, heads, k).swapaxes(0, 1) for c in "qkv")
        scores = np.where(seen, q @ key.swapaxes(1, 2) / math.sqrt(k), -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (p / p.sum(-1, keepdims=True) @ value).swapaxes(0, 1).reshape(n, -1)
        x = x + mixed @ t["wo"][i].T + t["bo"][i]
        u = norm(x, "ln2", i) @ t["w_up"][i].T + t["b_up"][i]
        u = u / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
        x = x + u @ t["w_down"][i].T + t["b_down"][i]
    return norm(x, "ln_f") @ t["wte"].T
