"""Timing of a model as in llama-bench: prompts, and single tokens, at given depths.

Tokens are random, and only the last token of each pass has its logits computed. All cases take turns, round by round, so that a
change of the machine's speed affects them all. A prompt at a depth is timed without the tokens before it.
"""

import itertools
import json
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich.table import Table

from specdec.bench.measure import OnProgress, ignore_progress, make_table, take_turns
from specdec.model.model import Model
from specdec.quant.dot4 import choose_dot4
from specdec.runtime.cpu_topology import get_topology
from specdec.runtime.simd import CPU_FEATURES

ROUNDS, WARM_UP_TOKENS = 5, 4


@dataclass(frozen=True)
class BenchCase:
    """A timed workload: a prompt of `tokens` tokens, or `tokens` single tokens, after `depth` tokens."""

    threads: int
    depth: int
    tokens: int
    is_prompt: bool

    @property
    def name(self) -> str:
        """The name that llama-bench gives the workload, such as "pp512" or "tg128 @ d1024"."""
        return f"{'pp' if self.is_prompt else 'tg'}{self.tokens}" + f" @ d{self.depth}" * (self.depth > 0)


@dataclass(frozen=True)
class BenchResult:
    """The tokens per second of a case: median, minimum and maximum of all rounds."""

    threads: int
    test: str
    tokens_per_s: float
    least: float
    most: float


@dataclass(frozen=True)
class BenchReport:
    """The report of a model benchmark: the model, the machine and the results, ready to share."""

    model: str
    weights: str
    gib: float
    kv: str
    cpu: str
    cores: str
    instructions: str
    system: str
    timed: list[BenchResult]


def make_cases(
    prompts: Sequence[int], counts: Sequence[int], depths: Sequence[int], threads: Sequence[int], n_positions: int
) -> list[BenchCase]:
    """Return the cases to time: all combinations of thread counts, depths and workloads.

    Args:
        prompts: Numbers of prompt tokens; 0 for none.
        counts: Numbers of generated tokens; 0 for none.
        depths: Numbers of tokens before the timed ones.
        threads: Thread counts.
        n_positions: Positions of the model.

    Raises:
        ValueError: A case does not fit the positions.
    """
    cases = [
        BenchCase(n_threads, depth, n, is_prompt)
        for n_threads, depth in itertools.product(threads, depths)
        for is_prompt, sizes in ((True, prompts), (False, counts))
        for n in sizes
        if n
    ]
    if (needed := max(case.depth + case.tokens for case in cases)) > n_positions:
        raise ValueError(f"sequences of {needed} tokens exceed the model's {n_positions}; choose smaller -p, -n or -d")
    return cases


def run(name: str, model: Model, cases: Sequence[BenchCase], on_progress: OnProgress = ignore_progress) -> BenchReport:
    """Time all cases of a model benchmark in ROUNDS interleaved rounds, after a warm-up, and return the report.

    Args:
        name: Name of the model, for the report.
        model: The model.
        cases: The cases.
        on_progress: Called with the completed fraction.
    """
    for case in cases:
        _time_case(model, BenchCase(case.threads, 0, min(case.tokens, WARM_UP_TOKENS), case.is_prompt))
    rounds = take_turns([partial(_time_case, model, case) for case in cases], ROUNDS, on_progress)
    timed = list[BenchResult]()
    for case, seconds in zip(cases, zip(*rounds, strict=True), strict=True):
        rates = [case.tokens / each for each in seconds]
        timed.append(BenchResult(case.threads, case.name, statistics.median(rates), min(rates), max(rates)))
    weights, cpu = model.weights, read_cpu_name() or platform.processor() or platform.machine()
    machine = cpu, get_topology().description, choose_dot4(CPU_FEATURES), platform.platform()
    return BenchReport(name, weights.format_names, weights.n_bytes / 2**30, model.kv, *machine, timed)


def read_cpu_name() -> str:
    """Return the CPU's model name from /proc/cpuinfo; "" if there is none."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return ""


def _time_case(model: Model, case: BenchCase) -> float:
    """Run one case with random tokens and return its seconds; set the model's thread count first."""
    rng = np.random.default_rng(case.depth)
    tokens: list[int] = rng.integers(0, model.config.vocab_size, case.depth + case.tokens).tolist()
    model.n_threads = case.threads
    cache = model.new_cache()
    cache.forward(tokens[: case.depth], 0)
    begin = time.perf_counter()
    for end in [len(tokens)] if case.is_prompt else range(case.depth + 1, len(tokens) + 1):
        cache.forward(tokens[:end])
    return time.perf_counter() - begin


def to_json(report: BenchReport) -> str:
    """Return the report of a model benchmark as one line of JSON."""
    return json.dumps(asdict(report))


def to_table(report: BenchReport) -> Table:
    """Return a Rich table of the tokens per second of each case, captioned with the machine."""
    title = f"{Path(report.model).name}: {report.weights}, {report.gib:.2f} GiB, keys and values {report.kv}"
    caption = f"{report.cpu}; {report.cores}; {report.instructions}; {report.system}. Medians of {ROUNDS} rounds, by turns."
    rows = [
        {"threads": f"{each.threads}", "test": each.test, "tokens/s": f"{each.tokens_per_s:.2f}",
         "least to most": f"{each.least:.2f} to {each.most:.2f}"}
        for each in report.timed
    ]  # fmt: skip
    return make_table(rows, title, caption)
