"""Timing of passes over T tokens with random weights, compared with the limits of memory and arithmetic."""

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from rich.table import Table

from specdec.kernels import MAX_BATCH_TOKENS
from specdec.model.llama import LLAMA
from specdec.model.model import Model
from specdec.model_config import ModelConfig
from specdec.quant import INT8
from specdec.quant.dot4 import DOT4_BY_NAME, choose_dot4, keep_words
from specdec.quant.int8 import BYTES_PER_WORD
from specdec.quant.matmul import add_product, choose_tile_shape
from specdec.runtime.memory import all_finite, get_physical_memory_bytes, zeros
from specdec.runtime.peak_arithmetic import N_STEPS, make_chains_kernel, make_peak_run
from specdec.runtime.simd import CPU_FEATURES, FP32_STORAGE, INT32_STORAGE, MAX_TILE_TOKENS, PANEL_ROWS, REGISTER_LANES, Float32

MODEL_SHAPES = {  # the public stories models: dim, hidden_dim, layers, heads, kv heads, vocabulary, seq_len
    "15M": (288, 768, 6, 6, 6, 32000, 256),
    "42M": (512, 1376, 8, 8, 8, 32000, 1024),
    "110M": (768, 2048, 12, 12, 12, 32000, 1024),
}
SHAPE_FIELDS = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")
PASS_TOKENS = (1, 2, 4, 8, 16, 64)
PREFILL_TOKENS = 128
ROUNDS = 15  # each with every T, so that a change of the machine's speed affects them all
Task = Callable[[], object]
MIN_TASK_RUNS, MIN_TASK_S = 3, 0.01  # consecutive runs of a task, as warm-up and again while it is timed


@dataclass(frozen=True)
class PassTiming:
    """The measured time of a forward pass, compared with the machine's limits.

    Attributes:
        tokens: Tokens of the pass.
        seconds: Median time of the pass.
        gb_per_s: Weight bytes read per second.
        gflop_per_s: Arithmetic of the matrices per second.
        share: Speed relative to the nearer limit, 0 to 1.
        limit: The nearer limit, "memory" or "arithmetic".
    """

    tokens: int
    seconds: float
    gb_per_s: float
    gflop_per_s: float
    share: float
    limit: str


@dataclass(frozen=True)
class PassBenchResult:
    """The result of a benchmark of forward passes: the limits of the machine and the time of each pass.

    Attributes:
        shape: Config of the model.
        read_gb_per_s: Median speed of a plain read of as many bytes as the weights have, in the same run.
        gflop_per_s: Median speed of the format's multiply-add on registers alone, in the same run.
        threads: Number of threads.
        weights: Format of the weights.
        rows: Passes that compute the logits of every token, as verification does.
        prefill_tokens: Tokens of the timed prompt.
        prefill_seconds: Time of the prompt, which needs the last token's logits alone.
    """

    shape: ModelConfig
    read_gb_per_s: float
    gflop_per_s: float
    threads: int
    weights: str
    rows: list[PassTiming]
    prefill_tokens: int
    prefill_seconds: float


def parse_shape(text: str) -> ModelConfig:
    """Parse a name in MODEL_SHAPES, or seven numbers separated by commas, into a model config.

    Raises:
        ValueError: The text is neither, the shape is invalid, its context is too short, or it does not fit the memory.
    """
    if text.upper() in MODEL_SHAPES:
        return ModelConfig(*MODEL_SHAPES[text.upper()])
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 7:
        raise ValueError(f"shape is {text!r}; expected {', '.join(MODEL_SHAPES)} or dim,hidden,layers,heads,kv,vocab,seq")
    dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len = numbers
    config = ModelConfig(dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len)
    if error := config.find_error():
        raise ValueError(f"shape is {text!r}: {error}")
    if (needed := 8 * sum(map(math.prod, LLAMA.shapes(config).values()))) > get_physical_memory_bytes():
        raise ValueError(f"shape is {text!r}: making and packing it needs {needed / 2**30:.0f} GiB, more than this machine has")
    if config.seq_len < MAX_BATCH_TOKENS:
        raise ValueError(f"shape is {text!r}: seq must be {MAX_BATCH_TOKENS} or more, the longest pass that is timed")
    return config


def random_tensors(config: ModelConfig, on_progress: Callable[[float], None]) -> dict[str, Float32]:
    """Return every weight tensor of a model config by name, in fp32 with random values; call `on_progress` with the fraction."""
    rng = np.random.default_rng(0)
    shapes, tensors = LLAMA.shapes(config), dict[str, Float32]()
    for i, (name, shape) in enumerate(shapes.items()):
        on_progress(i / len(shapes))
        tensors[name] = rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
    return tensors


def run(
    config: ModelConfig, n_threads: int, is_int8: bool, make_progress: Callable[[str], Callable[[float], None]]
) -> PassBenchResult:
    """Time forward passes of a model with random weights, each from an empty KV cache, and the machine's limits.

    All times are medians of ROUNDS interleaved rounds.

    Args:
        config: Shape of the model.
        n_threads: Number of threads.
        is_int8: Whether to quantize the weights to int8; else they are fp32.
        make_progress: Returns a progress callback for a task's name.
    """
    tensors = random_tensors(config, make_progress("making weights"))
    n_weights = sum(tensor.size for tensor in tensors.values())
    weights = LLAMA.pack(config, tensors, INT8 if is_int8 else None, make_progress("packing weights"))
    model = Model(config, weights, n_threads)
    del tensors
    calculate, flops = _make_arithmetic_task(is_int8, model.n_threads)
    n_prefill = min(PREFILL_TOKENS, config.seq_len)
    passes = [_make_pass_task(model, n_prefill, 1), *(_make_pass_task(model, n, n) for n in PASS_TOKENS)]
    medians = _measure_medians([_make_read_task(weights.n_bytes, model.n_threads), calculate, *passes], make_progress)
    reads, calculations, prefills, *seconds = medians
    flop_seconds = 2 * n_weights * calculations / flops  # lower bound of a token's arithmetic

    def make_timing(n_tokens: int, seconds: float) -> PassTiming:
        needed = {"memory": reads, "arithmetic": flop_seconds * n_tokens}
        limit = max(needed, key=needed.__getitem__)
        flop_per_s = 2 * n_weights * n_tokens / seconds
        return PassTiming(n_tokens, seconds, weights.n_bytes / seconds / 1e9, flop_per_s / 1e9, needed[limit] / seconds, limit)

    return PassBenchResult(
        config,
        weights.n_bytes / reads / 1e9,
        flops / calculations / 1e9,
        model.n_threads,
        weights.format_names,
        [make_timing(n, s) for n, s in zip(PASS_TOKENS, seconds, strict=True)],
        n_prefill,
        prefills,
    )


def _make_arithmetic_task(is_int8: bool, n_threads: int) -> tuple[Task, float]:
    """Return a task that runs the weight format's multiply-add on registers alone, and the task's number of operations."""
    dot = DOT4_BY_NAME[choose_dot4(CPU_FEATURES)]
    if is_int8:
        rows, n_tokens = dot.choose_tile_shape(PANEL_ROWS, dot.max_tokens)
        kernel = make_chains_kernel(dot.prepare, dot.dot4, INT32_STORAGE, rows, dot.lanes, n_tokens)
    else:
        rows, n_tokens = choose_tile_shape(PANEL_ROWS, MAX_TILE_TOKENS)
        kernel = make_chains_kernel(keep_words, add_product, FP32_STORAGE, rows, REGISTER_LANES, n_tokens)
    products = BYTES_PER_WORD if is_int8 else 1
    return make_peak_run(kernel, rows, n_tokens, n_threads), 2 * products * rows * n_tokens * N_STEPS * n_threads


def _make_read_task(n_bytes: int, n_threads: int) -> Task:
    """Return a task that reads `n_bytes` bytes of memory, which this function allocates."""
    block = zeros(n_bytes // 4)
    block[:] = 1.0
    return lambda: all_finite(block, n_threads)


def _make_pass_task(model: Model, n_tokens: int, n_logits: int) -> Task:
    """Return a task that runs a pass over n_tokens new tokens with the last n_logits logits."""
    cache = model.new_cache()

    def run_pass() -> object:
        cache.forward([], 0)
        return cache.forward([1] * n_tokens, n_logits)

    return run_pass


def _measure_medians(tasks: list[Task], make_progress: Callable[[str], Callable[[float], None]]) -> list[float]:
    """Run each task for a warm-up and then once per round, and return the median seconds of each task."""
    on_progress = make_progress("warming up")
    for i, task in enumerate(tasks):
        on_progress(i / len(tasks))
        task()
    on_progress = make_progress("measuring")
    times: list[list[float]] = [[] for _ in range(ROUNDS)]
    for i, (round_times, task) in enumerate(itertools.product(times, tasks)):
        on_progress(i / (ROUNDS * len(tasks)))
        round_times.append(_time_task(task))
    return [statistics.median(task) for task in zip(*times, strict=True)]


def _time_task(task: Task) -> float:
    """Run a task many times and return the mean seconds of a run.

    An equal series of runs that is not timed comes first, to fill the CPU caches with the task's data.
    """
    begin, n = time.perf_counter(), 0
    while n < MIN_TASK_RUNS or time.perf_counter() < begin + MIN_TASK_S:
        task()
        n += 1
    begin = time.perf_counter()
    for _ in range(n):
        task()
    return (time.perf_counter() - begin) / n


def to_json(result: PassBenchResult) -> str:
    """Return the result of a pass benchmark as JSON text; the shape is the seven numbers that `--shape` takes."""
    return json.dumps(asdict(result) | {"shape": {name: getattr(result.shape, name) for name in SHAPE_FIELDS}})


def to_table(result: PassBenchResult, shape: str) -> Table:
    """Return a Rich table of the timed passes, captioned with the prompt's speed and the machine's limits."""
    title = f"{shape}, {result.weights}, {result.threads} thread{'s' * (result.threads != 1)}"
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
