"""Check every kernel against numpy and print its time and throughput: python kernels.py [--dim 576] [--tokens 8] ...

`python kernels.py --source int8` prints how a weight format is multiplied: the reference, then the tile's source.

The kernels are in specdec/kernels.py, specdec/layers/ and specdec/quant/. The references below are float64 and simple.

Shapes: T tokens of the pass, S cached positions, D dim, F hidden_dim, H query heads, G KV heads, K head_dim.
"""

import inspect
import sys
from collections.abc import Iterator
from itertools import chain
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from specdec import kernels
from specdec.bench.measure import time_task
from specdec.bench.pass_speed import make_arithmetic_task, make_read_task
from specdec.layers import activations
from specdec.layers.kv_formats import KV_FORMATS
from specdec.loaders.gguf_blocks import BlockTensor
from specdec.quant import BF16, FP16, FP32, INT4, INT8, PACKED_BF16, WeightFormat, bf16_12bit, groupwise, int8, matmul
from specdec.quant.dot4 import DOT4_BY_NAME
from specdec.quant.gguf_repacking import BLOCK_TYPES, NVFP4, WEIGHT_FORMATS
from specdec.quant.packed_matrix import pack_matrix
from specdec.runtime.memory import LazyMemory, zeros
from specdec.runtime.op_program import Executor, Op
from specdec.runtime.parallel_region import get_available_threads
from specdec.runtime.simd import LANES, MAX_TILE_TOKENS, PANEL_ROWS, round_up

READ_BYTES = 1 << 28  # more than the caches hold
EPS, THETA, SOFTCAP = 1e-5, 10_000.0, 30.0
FLOAT_TOLERANCE = 2e-5  # of the largest value
INT8_TOLERANCE = 0.03  # the products of 4 to 8 bits quantize activations to int8
KV_TOLERANCES = {"f32": 2e-5, "f16": 2e-3, "q8": 0.03}


class Sizes(NamedTuple):
    """The sizes of one layer and one pass."""

    n_tokens: int
    n_positions: int
    dim: int
    hidden_dim: int
    n_heads: int
    n_kv_heads: int
    n_threads: int

    @property
    def head_dim(self) -> int:
        """Rows of one head."""
        return self.dim // self.n_heads


class Case(NamedTuple):
    """A kernel call, the array it writes, and the expected result."""

    name: str
    op: Op
    out: Any
    expected: Any
    tolerance: float = FLOAT_TOLERANCE
    n_bytes: int = 0
    n_macs: int = 0
    pos: int = 0
    n_threads: int = 0  # 0: all of them


def random(*shape: int) -> Any:
    """Return float32 samples of the normal distribution, the same for the same shape."""
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def pad(x: Any) -> Any:
    """Return an aligned copy whose rows are padded with zeros to whole panels, as kernels expect them."""
    out = zeros(*x.shape[:-1], round_up(x.shape[-1], PANEL_ROWS))
    out[..., : x.shape[-1]] = x
    return out


def rms_norm(x: Any, weight: Any) -> Any:
    """Return weight x / sqrt(mean(x^2) + eps) in float64."""
    x = x.astype(np.float64)
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)


def elementwise_cases(s: Sizes) -> Iterator[Case]:
    """Yield norms, sums, scales and activations of T rows of D or F numbers."""
    x, branch, weight, bias = random(s.n_tokens, s.dim), random(1, s.n_tokens, s.dim), random(s.dim), random(s.dim + 1)[1:]
    wide, n = x.astype(np.float64), s.dim
    out = zeros(1, s.n_tokens, round_up(n, PANEL_ROWS))  # every thread of a pass fills an array of its own
    yield Case("rms_norm", kernels.rms_norm(out, pad(x[None]), pad(weight), n, EPS, 0, 0), out[0, :, :n], rms_norm(x, weight),
               n_bytes=2 * x.nbytes, n_threads=1)  # fmt: skip
    out = zeros(1, s.n_tokens, round_up(n, PANEL_ROWS))
    centered = wide - wide.mean(-1, keepdims=True)
    expected = weight * centered / np.sqrt((centered**2).mean(-1, keepdims=True) + EPS) + bias
    yield Case("layer_norm", kernels.layer_norm(out, pad(x[None]), pad(weight), pad(bias), n, EPS, 0), out[0, :, :n], expected,
               n_bytes=2 * x.nbytes, n_threads=1)  # fmt: skip
    out = pad(x)
    yield Case("add_norm", kernels.add_norm(out, pad(branch), pad(weight), n, EPS, 0.5, True), out[:, :n],
               0.5 * (wide + rms_norm(branch[0], weight)), n_bytes=3 * x.nbytes)  # fmt: skip
    out = pad(x)
    yield Case("add_bias", kernels.add_bias(out, pad(bias), 1, False), out[:, :n], wide + bias, n_bytes=2 * x.nbytes)
    out = pad(x)
    yield Case("scale_rows", kernels.scale_rows(out, 0.5, n), out[:, :n], wide / 2, n_bytes=2 * x.nbytes)
    out, table = pad(x), random(s.n_tokens, s.dim + 3)[:, 3:]
    yield Case("add_positions", kernels.add_positions(out, pad(table), depths(s), n), out[:, :n], wide + table,
               n_bytes=3 * x.nbytes)  # fmt: skip
    out, source = zeros(s.n_tokens, round_up(n, PANEL_ROWS)), pad(x[None])
    yield Case("copy_rows", kernels.copy_rows(out, source, 0, 0, n, 0), out[:, :n], wide, n_bytes=2 * x.nbytes)
    out = pad(x)
    yield Case("softcap", activations.softcap(out, SOFTCAP), out[:, :n], SOFTCAP * np.tanh(wide / SOFTCAP), n_bytes=2 * x.nbytes)
    gate, up = random(s.n_tokens, s.hidden_dim), random(s.n_tokens, s.hidden_dim + 1)[:, 1:]
    both, n = interleave_panels(gate, up), s.hidden_dim
    g, u = gate.astype(np.float64), up.astype(np.float64)
    gelu = g / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
    gates = ("swiglu", activations.swiglu, g / (1 + np.exp(-g)) * u), ("geglu", activations.geglu, gelu * u)
    for name, kernel, expected in gates:
        hidden = zeros(1, s.n_tokens, round_up(n, PANEL_ROWS))
        yield Case(name, kernel(hidden, both, 1), hidden[0, :, :n], expected, n_bytes=3 * gate.nbytes)
    hidden = zeros(1, s.n_tokens, round_up(n, PANEL_ROWS))
    yield Case("gelu", activations.gelu(hidden, pad(gate), 1), hidden[0, :, :n], gelu, n_bytes=2 * gate.nbytes)


def interleave_panels(first: Any, second: Any) -> Any:
    """Return rows with the panels of two arrays in turn, as the product of w1 and w3 has them."""
    a, b = (pad(x).reshape(len(x), -1, PANEL_ROWS) for x in (first, second))
    out = zeros(len(first), 2 * a.shape[1] * PANEL_ROWS)
    out[:] = np.stack([a, b], 2).reshape(len(first), -1)
    return out


def depths(s: Sizes) -> Any:
    """Return the depths of tree nodes: none, since all tokens are a chain."""
    return np.zeros(s.n_tokens, np.int64)


def head_cases(s: Sizes) -> Iterator[Case]:
    """Yield the norm and the rotation of heads (T, H K)."""
    x, weight = random(s.n_tokens, s.dim), random(s.head_dim)
    out, heads = pad(x), x.reshape(s.n_tokens, s.n_heads, s.head_dim)
    yield Case("head_norm", kernels.head_norm(out, 1, 0, s.n_heads, s.head_dim, pad(weight), EPS), out[:, : s.dim],
               rms_norm(heads, weight).reshape(x.shape), n_bytes=2 * x.nbytes)  # fmt: skip
    pos, periods = s.n_positions - s.n_tokens, THETA ** (np.arange(0, s.head_dim, 2) / s.head_dim)
    cos, sin = zeros(s.n_positions, s.head_dim + LANES), zeros(s.n_positions, s.head_dim + LANES)
    kernels.fill_rope_tables(cos, sin, periods, s.head_dim, 1.0)
    turns = np.exp(1j * (pos + np.arange(s.n_tokens))[:, None, None] / periods)
    pairs = heads.astype(np.float64).reshape(s.n_tokens, s.n_heads, -1, 2)
    rotated = (pairs[..., 0] + 1j * pairs[..., 1]) * turns
    expected, out = np.stack([rotated.real, rotated.imag], -1).reshape(x.shape), pad(x)
    yield Case("rope", kernels.rope(out, 1, 0, s.dim, cos, sin, depths(s), s.head_dim), out[:, : s.dim], expected,
               n_bytes=4 * x.nbytes, pos=pos)  # fmt: skip


def attention_cases(s: Sizes) -> Iterator[Case]:
    """Yield, for each format of the KV cache, the kernels that write it and the attention of T tokens over S positions."""
    head_dim, kv_dim, pos = s.head_dim, s.n_kv_heads * s.head_dim, s.n_positions - s.n_tokens
    q, keys, values = random(s.n_tokens, s.dim), random(s.n_positions, kv_dim), random(s.n_positions, kv_dim + 1)[:, 1:]
    n_blocks, n_panels = -(-s.n_positions // PANEL_ROWS), -(-head_dim // PANEL_ROWS)
    memory = LazyMemory()
    for name, kv in KV_FORMATS.items():
        cached_keys = memory.zeros((s.n_kv_heads, n_blocks, head_dim, PANEL_ROWS), kv.dtype)
        cached_values = memory.zeros((s.n_kv_heads, n_panels, n_blocks * PANEL_ROWS, PANEL_ROWS), kv.dtype)
        key_scales, value_scales = (zeros(s.n_kv_heads, n_blocks * PANEL_ROWS if kv.is_scaled else 0) for _ in range(2))
        for start in range(0, s.n_positions, s.n_tokens):
            rows = slice(start, min(start + s.n_tokens, s.n_positions))
            n = rows.stop - rows.start
            store_keys = kv.store_keys(cached_keys, key_scales, pad(keys[rows]), 1, 0)
            store_values = kv.store_values(cached_values, value_scales, pad(values[rows]), 1, 0, head_dim)
            Executor([[store_keys], [store_values]])(n, start, n, s.n_threads)
        k_new, v_new = pad(keys[pos:]), pad(values[pos:])
        expected_keys, expected_values = cache_layout(s, encode_kv(s, name, keys), encode_kv(s, name, values))
        stored_dtype = np.float16 if name == "f16" else kv.dtype
        yield Case(f"store_keys_{name}", kv.store_keys(cached_keys, key_scales, k_new, 1, 0), cached_keys.view(stored_dtype),
                   expected_keys, KV_TOLERANCES[name], k_new.nbytes, pos=pos)  # fmt: skip
        yield Case(f"store_values_{name}", kv.store_values(cached_values, value_scales, v_new, 1, 0, head_dim),
                   cached_values.view(stored_dtype), expected_values, KV_TOLERANCES[name], v_new.nbytes, pos=pos)  # fmt: skip
        out = zeros(1, s.n_tokens, round_up(s.dim, PANEL_ROWS))
        scores = zeros(s.n_threads, MAX_TILE_TOKENS, n_blocks * PANEL_ROWS)
        acc = zeros(s.n_threads, MAX_TILE_TOKENS, n_panels * PANEL_ROWS)
        sinks = np.full(s.n_heads, -np.inf, np.float32)
        cache = cached_keys, cached_values, key_scales, value_scales
        op = kv.attention(out, pad(q), *cache, scores, acc, depths(s), np.zeros((1, 1), np.int64), sinks, s.n_heads,
                          s.n_positions, head_dim**-0.5, 0.0)  # fmt: skip
        n_macs = 2 * s.n_heads * head_dim * sum(range(pos + 1, pos + s.n_tokens + 1))
        expected = attend(s, *(x.astype(np.float64) for x in (q, keys, values)))
        yield Case(f"attention_{name}", op, out[0, :, : s.dim], expected, KV_TOLERANCES[name], n_macs=n_macs, pos=pos)


def encode_kv(s: Sizes, name: str, x: Any) -> Any:
    """Return x (S, G, K) as the KV cache holds it; q8: codes of -127 to 127 times a scale for each head and position."""
    x = x.reshape(s.n_positions, s.n_kv_heads, s.head_dim)
    return np.rint(x * 127 / np.abs(x).max(-1, keepdims=True)) if name == "q8" else x


def cache_layout(s: Sizes, keys: Any, values: Any) -> tuple[Any, Any]:
    """Return keys as (G, S / R, K, R) and values as (G, K / R, S, R), R rows a panel, zeros where rows and positions end."""
    n_positions, rows = round_up(s.n_positions, PANEL_ROWS), round_up(s.head_dim, PANEL_ROWS)
    padded_keys = np.zeros((s.n_kv_heads, s.head_dim, n_positions))
    padded_keys[:, :, : s.n_positions] = keys.transpose(1, 2, 0)
    padded_values = np.zeros((s.n_kv_heads, n_positions, rows))
    padded_values[:, : s.n_positions, : s.head_dim] = values.transpose(1, 0, 2)
    by_panel = padded_keys.reshape(s.n_kv_heads, s.head_dim, -1, PANEL_ROWS).transpose(0, 2, 1, 3)
    return by_panel, padded_values.reshape(s.n_kv_heads, n_positions, -1, PANEL_ROWS).transpose(0, 2, 1, 3)


def attend(s: Sizes, q: Any, keys: Any, values: Any) -> Any:
    """Return softmax(q k / sqrt(K)) v, each token over the positions up to its own (Vaswani et al. 2017)."""
    q = q.reshape(s.n_tokens, s.n_heads, s.head_dim)
    keys, values = (np.repeat(x.reshape(s.n_positions, s.n_kv_heads, -1), s.n_heads // s.n_kv_heads, 1) for x in (keys, values))
    scores = np.einsum("thk,shk->hts", q, keys) / np.sqrt(s.head_dim)
    positions = s.n_positions - s.n_tokens + np.arange(s.n_tokens)
    scores[:, np.arange(s.n_positions) > positions[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hts,shk->thk", weights / weights.sum(-1, keepdims=True), values).reshape(s.n_tokens, -1)


def matmul_cases(s: Sizes) -> Iterator[Case]:
    """Yield the embedding and the product of a matrix (F, D) in each weight format, compared with its dequantized weights."""
    weight = random(s.hidden_dim, s.dim) * np.float32(0.02)
    bf16 = (weight.view(np.uint32) >> 16).astype(np.uint16)
    bf16_as_fp32 = (bf16.astype(np.uint32) << 16).view(np.float32)
    for weight_format, tensor, exact in (
        (FP32, weight, weight), (FP16, weight.astype(np.float16), weight.astype(np.float16)), (BF16, bf16, bf16_as_fp32),
        (PACKED_BF16, bf16, bf16_as_fp32), (INT8, weight, None), (INT4, weight, None),
    ):  # fmt: skip
        yield from cases_of_format(s, weight_format, tensor, weight if exact is None else exact, exact is not None)
    for name, weight_format in WEIGHT_FORMATS.items():
        tensor = random_blocks(name, s.hidden_dim, s.dim)
        if tensor is not None:
            yield from cases_of_format(s, weight_format, tensor, tensor[:], True)


def random_blocks(name: str, rows: int, n: int) -> BlockTensor | None:
    """Return a matrix of random GGUF blocks with small scales, None if the type's blocks do not fill its rows."""
    block, rng = BLOCK_TYPES[name], np.random.default_rng(0)
    if n % block.layout.block_columns:
        return None
    raw = rng.integers(0, 256, (rows * n // block.layout.block_columns, block.n_bytes), np.uint8)
    for at in block.scale_offsets:
        raw[:, at : at + 2] = (rng.standard_normal(len(raw)) * 0.002).astype(np.float16).view(np.uint8).reshape(-1, 2)
    if name == NVFP4:  # four scales of 5 bits of exponent and 3 of fraction
        raw[:, :4] = rng.integers(0, 40, (len(raw), 4))
    elif not block.scale_offsets:  # an exponent of two
        raw[:, 0] = rng.integers(118, 124, len(raw))
    return BlockTensor(raw.reshape(rows, -1), name, name)


def cases_of_format(s: Sizes, weight_format: WeightFormat, tensor: Any, expected: Any, is_exact: bool) -> Iterator[Case]:
    """Yield embed and matmul of one weight format. is_exact: whether unpacked weights equal the tensor's."""
    name, matrix = weight_format.name, pack_matrix([tensor], weight_format)
    tokens = np.arange(s.n_tokens, dtype=np.int64) * 7 % s.hidden_dim
    rows, wide = zeros(s.n_tokens, round_up(s.dim, PANEL_ROWS)), expected.astype(np.float64)
    yield Case(f"embed {name}", matrix.embed(rows, tokens), rows[:, : s.dim], wide[tokens],
               FLOAT_TOLERANCE if is_exact else INT8_TOLERANCE * 8, n_bytes=2 * rows.nbytes)  # fmt: skip
    unpacked = unpack(s, matrix)
    x, out = random(s.n_tokens, s.dim), zeros(s.n_tokens, matrix.n_rows)
    scratch = zeros(s.n_threads, s.n_tokens, max(matrix.scratch_words, 1))
    yield Case(f"matmul {name}", matrix.matmul(out, pad(x[None]), scratch), out[:, : s.hidden_dim], x @ unpacked.T,
               INT8_TOLERANCE if matrix.scratch_words else FLOAT_TOLERANCE, matrix.panels.nbytes,
               s.n_tokens * s.dim * s.hidden_dim)  # fmt: skip


def unpack(s: Sizes, matrix: Any) -> Any:
    """Return all weights of a matrix in float64, by the matrix's own embed kernel."""
    out, step = np.empty((s.hidden_dim, s.dim)), kernels.MAX_BATCH_TOKENS
    for start in range(0, s.hidden_dim, step):
        tokens = np.arange(start, min(start + step, s.hidden_dim), dtype=np.int64)
        rows = zeros(len(tokens), round_up(s.dim, PANEL_ROWS))
        Executor([[matrix.embed(rows, tokens)]])(len(tokens), 0, 0, s.n_threads)
        out[tokens] = rows[:, : s.dim]
    return out


def measure(case: Case, s: Sizes) -> tuple[float, float]:
    """Return the error of a case relative to the largest expected value, and the seconds of a run."""
    executor, n_threads = Executor([[case.op]]), case.n_threads or s.n_threads
    executor(s.n_tokens, case.pos, s.n_tokens, n_threads)
    expected = np.asarray(case.expected, np.float64)
    error = float(np.abs(case.out - expected).max() / max(np.abs(expected).max(), 1e-30))
    return error, time_task(lambda: executor(s.n_tokens, case.pos, s.n_tokens, n_threads))


def get_source(name: str) -> str:
    """Return the source of the reference matmul and of the tile of a weight format, such as "fp32", "int8" or "Q4_K".

    Raises:
        typer.BadParameter: There is no such format.
    """
    parts = [inspect.getsource(matmul.multiply_reference)]
    if name in BLOCK_TYPES:
        layout, dot = BLOCK_TYPES[name].layout, DOT4_BY_NAME[int8.DOT4_NAME]
        parts += [groupwise.make_group_sum_source(layout, dot, dot.choose_tile_shape(PANEL_ROWS, dot.max_tokens).rows).strip()]
        parts += map(inspect.getsource, (groupwise.make_param_reader, groupwise.make_group_tile))
    elif name == "int8":
        parts += [inspect.getsource(int8.make_int8_tile)]
    elif name in ("fp32", "bf16", "fp16"):
        parts += [inspect.getsource(matmul.make_float_tile)]
    elif name == "12-bit":
        parts += map(inspect.getsource, (bf16_12bit.make_column_reader, bf16_12bit.make_packed_tile))
    else:
        raise typer.BadParameter(f"--source must be fp32, bf16, fp16, 12-bit, int8, {', '.join(BLOCK_TYPES)}, got {name}")
    return "\n\n".join(parts)


def measure_limits(n_threads: int) -> str:
    """Return the machine's limits: GB/s of a plain read, and GMAC/s of the instructions of tiles on registers alone."""
    gb_per_s = READ_BYTES / time_task(make_read_task(READ_BYTES, n_threads)) / 1e9
    rates = list[float]()
    for is_int8 in (False, True):
        task, n_operations = make_arithmetic_task(is_int8, n_threads)
        rates.append(n_operations / 2 / time_task(task) / 1e9)
    return f"limits: reading {gb_per_s:.0f} GB/s, fp32 {rates[0]:.0f} GMAC/s, int8 {rates[1]:.0f} GMAC/s"


def main(
    dim: Annotated[int, typer.Option(help="Width of the residual stream.", min=8)] = 768,
    hidden_dim: Annotated[int, typer.Option("--hidden-dim", help="Rows of the MLP.", min=8)] = 2048,
    heads: Annotated[int, typer.Option(help="Query heads.", min=1)] = 12,
    kv_heads: Annotated[int, typer.Option("--kv-heads", help="Heads of the KV cache.", min=1)] = 4,
    tokens: Annotated[int, typer.Option("-t", "--tokens", help="Tokens of the pass.", min=1, max=kernels.MAX_BATCH_TOKENS)] = 8,
    positions: Annotated[int, typer.Option("-s", "--positions", help="Positions that attention sees.", min=1)] = 1024,
    threads: Annotated[int, typer.Option("-j", "--threads", help="Threads; 0: all.", min=0, max=get_available_threads())] = 0,
    source: Annotated[str, typer.Option(help="Print the source of this weight format's matmul, such as int8 or Q4_K.")] = "",
) -> None:
    """Check every kernel against numpy, and print its time and its GB/s or GMAC/s."""
    if source:
        print(get_source(source))
        return
    if dim % heads or heads % kv_heads or dim // heads % 2:
        raise typer.BadParameter("dim must be divisible by heads, heads by kv-heads, and the size of a head must be even")
    s = Sizes(tokens, max(positions, tokens), dim, hidden_dim, heads, kv_heads, threads or get_available_threads())
    table = Table(title=f"T {s.n_tokens}, S {s.n_positions}, D {dim}, F {hidden_dim}, {heads} heads, {kv_heads} KV heads, "
                  f"{s.n_threads} threads")  # fmt: skip
    for column in ("kernel", "error", "ms", "GB/s", "GMAC/s"):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    n_wrong, console = 0, Console()
    with console.status("compiling and running") as status:
        for case in chain(elementwise_cases(s), head_cases(s), attention_cases(s), matmul_cases(s)):
            status.update(case.name)
            error, seconds = measure(case, s)
            is_wrong = not error <= case.tolerance
            n_wrong += is_wrong
            rates = (f"{n / seconds / 1e9:.1f}" if n else "" for n in (case.n_bytes, case.n_macs))
            table.add_row(case.name, f"{error:.0e}" + " wrong" * is_wrong, f"{seconds * 1e3:.3f}", *rates,
                          style="bold red" if is_wrong else "")  # fmt: skip
    table.caption = measure_limits(s.n_threads)
    console.print(table)
    if n_wrong:
        console.print(f"{n_wrong} of {table.row_count} kernels are wrong", style="bold red")
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
