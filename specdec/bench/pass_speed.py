"""Timing of passes over T tokens with random weights, compared with the limits of memory and arithmetic."""

import json
import math
import re
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
from rich.table import Table

from specdec.bench.measure import make_table, take_turns, time_task
from specdec.bench.peak_arithmetic import N_STEPS, make_chains_kernel, make_peak_run
from specdec.kernels import MAX_BATCH_TOKENS
from specdec.model.llama import LLAMA
from specdec.model.model import Model
from specdec.model_config import ModelConfig
from specdec.quant import INT8
from specdec.quant.dot4 import DOT4_BY_NAME, choose_dot4, keep_words
from specdec.quant.int8 import BYTES_PER_WORD
from specdec.quant.matmul import add_product, choose_tile_shape
from specdec.runtime.memory import all_finite, get_physical_memory_bytes, zeros
from specdec.runtime.simd import CPU_FEATURES, FP32_STORAGE, INT32_STORAGE, MAX_TILE_TOKENS, PANEL_ROWS, Float32

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
    if not re.fullmatch(r"\d{1,9}(,\d{1,9}){6}", text, re.ASCII):
        raise ValueError(f"shape is {text!r}; expected {', '.join(MODEL_SHAPES)} or dim,hidden,layers,heads,kv,vocab,seq")
    dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len = map(int, text.split(","))
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
    weights = LLAMA.plan_weights(config, tensors, INT8 if is_int8 else None).pack(make_progress("packing weights"))
    model = Model(config, weights, n_threads)
    del tensors
    calculate, flops = make_arithmetic_task(is_int8, model.n_threads)
    n_prefill = min(PREFILL_TOKENS, config.seq_len)
    passes = [_make_pass_task(model, n_prefill, 1), *(_make_pass_task(model, n, n) for n in PASS_TOKENS)]
    tasks = [make_read_task(weights.n_bytes, model.n_threads), calculate, *passes]
    for _ in take_turns(tasks, 1, make_progress("warming up")):
        pass
    rounds = take_turns([partial(time_task, task) for task in tasks], ROUNDS, make_progress("measuring"))
    reads, calculations, prefills, *seconds = map(statistics.median, zip(*rounds, strict=True))
    flop_seconds = 2 * n_weights * calculations / flops  # lower bound of a token's arithmetic

    def make_timing(n_tokens: int, seconds: float) -> PassTiming:
        needed = {"memory": reads, "arithmetic": flop_seconds * n_tokens}
        limit = max(needed, key=needed.__getitem__)
        flop_per_s = 2 * n_weights * n_tokens / seconds
        return PassTiming(n_tokens, seconds, weights.n_bytes / seconds / 1e9, flop_per_s / 1e9, needed[limit] / seconds, limit)

    limits = weights.n_bytes / reads / 1e9, flops / calculations / 1e9
    rows = [make_timing(n, s) for n, s in zip(PASS_TOKENS, seconds, strict=True)]
    return PassBenchResult(config, *limits, model.n_threads, weights.format_names, rows, n_prefill, prefills)


def make_arithmetic_task(is_int8: bool, n_threads: int) -> tuple[Task, float]:
    """Return a task that runs the weight format's multiply-add on registers alone, and the task's number of operations."""
    dot = DOT4_BY_NAME[choose_dot4(CPU_FEATURES)]
    if is_int8:
        rows, n_tokens, lanes = dot.choose_tile_shape(PANEL_ROWS, dot.max_tokens)
        kernel = make_chains_kernel(dot.prepare, dot.dot4, INT32_STORAGE, rows, lanes, n_tokens)
    else:
        rows, n_tokens, lanes = choose_tile_shape(PANEL_ROWS, MAX_TILE_TOKENS)
        kernel = make_chains_kernel(keep_words, add_product, FP32_STORAGE, rows, lanes, n_tokens)
    products = BYTES_PER_WORD if is_int8 else 1
    return make_peak_run(kernel, rows, n_tokens, n_threads), 2 * products * rows * n_tokens * N_STEPS * n_threads


def make_read_task(n_bytes: int, n_threads: int) -> Task:
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
    rows = [
        {
            "tokens": f"{row.tokens}",
            "ms": f"{row.seconds * 1e3:.2f}",
            "x one": f"{row.seconds / result.rows[0].seconds:.2f}",
            "GB/s": f"{row.gb_per_s:.1f}",
            "GFLOP/s": f"{row.gflop_per_s:.0f}",
            "of the nearer limit": f"{row.limit} {row.share:.0%}",
        }
        for row in result.rows
    ]
    return make_table(rows, title, caption)
