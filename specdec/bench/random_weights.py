"""Times passes of a model with random weights over T tokens, beside what they are up against: memory, and arithmetic."""

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from rich.table import Table

from specdec.config import Config
from specdec.kernels import MAX_TOKENS
from specdec.model.llama import LLAMA
from specdec.model.transformer import Transformer
from specdec.quant import INT8
from specdec.quant.int8 import QUADS, best_dot4, dot4
from specdec.runtime import peak_arithmetic
from specdec.runtime.memory import all_finite, physical_memory_bytes, zeros
from specdec.runtime.simd import CPU_FEATURES, F32, I32, Float32
from specdec.runtime.tile import STRIP_ROWS

SHAPES = {  # the public stories models: dim, hidden_dim, layers, heads, kv heads, vocabulary, seq_len
    "15M": (288, 768, 6, 6, 6, 32000, 256),
    "42M": (512, 1376, 8, 8, 8, 32000, 1024),
    "110M": (768, 2048, 12, 12, 12, 32000, 1024),
}
TOKENS = (1, 2, 4, 8, 16, 64)
PREFILL_TOKENS = 128
ROUNDS = 15  # each with every T, so that a change of the machine's speed meets them all
Job = Callable[[], object]
MIN_RUNS, MIN_SECONDS = 3, 0.01  # of a job in a row, before and while it is timed


@dataclass(frozen=True)
class Row:
    """A pass over that many tokens: median seconds, bytes of weights a second, arithmetic of the matrices a second.

    share: of what the nearer limit allows, the memory's or that of arithmetic, as `limit` says.
    """

    tokens: int
    seconds: float
    gb_per_s: float
    gflop_per_s: float
    share: float
    limit: str


@dataclass(frozen=True)
class Result:
    """shape: of the model; read_gb_per_s, gflop_per_s: both limits, medians of as many rounds of the same run: what a plain read
    of as many bytes as the weights take reaches, and the kind's multiply-add on registers alone.

    rows: passes that compute every token's logits, as a verification does; prefill: a prompt, which needs the last one's alone.
    """

    shape: Config
    read_gb_per_s: float
    gflop_per_s: float
    threads: int
    weights: str
    rows: list[Row]
    prefill_tokens: int
    prefill_seconds: float


def parse_shape(text: str) -> Config:
    """One of SHAPES or seven numbers. Raises ValueError."""
    if text.upper() in SHAPES:
        return Config(*SHAPES[text.upper()])
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 7:
        raise ValueError(f"shape is {text!r}; expected {', '.join(SHAPES)} or dim,hidden,layers,heads,kv,vocab,seq")
    dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len = numbers
    config = Config(dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len)
    if flaw := config.flaw():
        raise ValueError(f"shape is {text!r}: {flaw}")
    if (needed := 8 * sum(map(math.prod, LLAMA.shapes(config).values()))) > physical_memory_bytes():
        raise ValueError(f"shape is {text!r}: making and packing it takes {needed / 2**30:.0f} GiB, more than there is")
    if config.seq_len < MAX_TOKENS:
        raise ValueError(f"shape is {text!r}: seq must be {MAX_TOKENS} or more, the longest pass that is timed")
    return config


def random_tensors(config: Config, tell: Callable[[float], None]) -> dict[str, Float32]:
    """Every tensor of the config, in fp32."""
    rng = np.random.default_rng(0)
    shapes, tensors = LLAMA.shapes(config), dict[str, Float32]()
    for i, (name, shape) in enumerate(shapes.items()):
        tell(i / len(shapes))
        tensors[name] = rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
    return tensors


def run(config: Config, n_threads: int, is_int8: bool, telling: Callable[[str], Callable[[float], None]]) -> Result:
    """Passes from an empty cache, of fp32 weights or of int8 ones; medians of ROUNDS, everything interleaved.

    telling: of what is being done gives what is told the share that is done.
    """
    tensors = random_tensors(config, telling("making weights"))
    n_weights = sum(tensor.size for tensor in tensors.values())
    weights = LLAMA.pack(config, tensors, INT8 if is_int8 else None, telling("packing weights"))
    model = Transformer(config, weights, n_threads)
    del tensors
    calculate, flops = _arithmetic(is_int8, model.n_threads)
    n_prefill = min(PREFILL_TOKENS, config.seq_len)
    passes = [_pass(model, n_prefill, 1), *(_pass(model, n, n) for n in TOKENS)]
    medians = _medians([_read(weights.n_bytes, model.n_threads), calculate, *passes], telling)
    reads, calculations, prefills, *seconds = medians
    flop_seconds = 2 * n_weights * calculations / flops  # that a token's arithmetic takes at the least

    def row(n_tokens: int, seconds: float) -> Row:
        needed = {"memory": reads, "arithmetic": flop_seconds * n_tokens}
        limit = max(needed, key=needed.__getitem__)
        flop_per_s = 2 * n_weights * n_tokens / seconds
        return Row(n_tokens, seconds, weights.n_bytes / seconds / 1e9, flop_per_s / 1e9, needed[limit] / seconds, limit)

    return Result(
        config,
        weights.n_bytes / reads / 1e9,
        flops / calculations / 1e9,
        model.n_threads,
        weights.kind,
        [row(n, s) for n, s in zip(TOKENS, seconds, strict=True)],
        n_prefill,
        prefills,
    )


def _arithmetic(is_int8: bool, n_threads: int) -> tuple[Job, float]:
    """The multiply-add of such weights on registers alone, and how many operations that is."""
    dot = dot4(best_dot4(CPU_FEATURES))
    instruction, lane, products, shape = (
        (dot.multiply_add, I32, QUADS, dot.shape(STRIP_ROWS, dot.most_tokens))
        if is_int8
        else (peak_arithmetic.fma, F32, 1, peak_arithmetic.FLOATS)
    )
    n = 2 * products * shape.rows * shape.n_tokens * peak_arithmetic.STEPS * n_threads
    return peak_arithmetic.arithmetic(instruction, lane, shape, n_threads), n


def _read(n_bytes: int, n_threads: int) -> Job:
    """A plain read of so many bytes."""
    block = zeros(n_bytes // 4)
    block[:] = 1.0
    return lambda: all_finite(block, n_threads)


def _pass(model: Transformer, n_tokens: int, n_logits: int) -> Job:
    """From an empty cache."""

    def once() -> object:
        model.forward([], 0)
        return model.forward([1] * n_tokens, n_logits)

    return once


def _medians(jobs: list[Job], telling: Callable[[str], Callable[[float], None]]) -> list[float]:
    """Seconds of each job, once all are warm."""
    tell = telling("warming up")
    for i, job in enumerate(jobs):
        tell(i / len(jobs))
        job()
    tell = telling("measuring")
    times: list[list[float]] = [[] for _ in range(ROUNDS)]
    for i, (taken, job) in enumerate(itertools.product(times, jobs)):
        tell(i / (ROUNDS * len(jobs)))
        taken.append(_seconds(job))
    return [statistics.median(job) for job in zip(*times, strict=True)]


def _seconds(job: Job) -> float:
    """Of one run of the job among many: as many go before, and fill the caches with its data."""
    begin, n = time.perf_counter(), 0
    while n < MIN_RUNS or time.perf_counter() < begin + MIN_SECONDS:
        job()
        n += 1
    begin = time.perf_counter()
    for _ in range(n):
        job()
    return (time.perf_counter() - begin) / n


def to_json(result: Result) -> str:
    return json.dumps(asdict(result))


def to_table(result: Result, shape: str) -> Table:
    title = f"{shape}, {result.weights}, {result.threads} threads"
    speed = result.prefill_tokens / result.prefill_seconds
    caption = (
        f"a prompt of {result.prefill_tokens} tokens: {result.prefill_seconds * 1e3:.1f} ms, {speed:.0f} tok/s\n"
        f"limits: a plain read {result.read_gb_per_s:.1f} GB/s, in registers {result.gflop_per_s:.0f} GFLOP/s"
    )
    table = Table("tokens", "ms", "x one", "GB/s", "GFLOP/s", "of the nearer limit", title=title, caption=caption)
    for column in table.columns:
        column.justify = "right"
    for row in result.rows:
        table.add_row(
            f"{row.tokens}",
            f"{row.seconds * 1e3:.2f}",
            f"{row.seconds / result.rows[0].seconds:.2f}",
            f"{row.gb_per_s:.1f}",
            f"{row.gflop_per_s:.0f}",
            f"{row.limit} {row.share:.0%}",
        )
    return table
