"""Times a model of one's own as llama-bench does: prompts, and tokens one by one, behind texts of some depth. Knows no terminals.

Tokens are random, and logits those of the last token of each pass. All cells take turns, round for round, so that a change of the
machine's speed meets them all; a prompt behind a text of some depth is timed without that text.
"""

import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from specdec.model.transformer import Transformer
from specdec.quant.int8 import best_dot4
from specdec.runtime.cpu_topology import known
from specdec.runtime.simd import CPU_FEATURES

ROUNDS, WARM_UP_TOKENS = 5, 4


@dataclass(frozen=True)
class Cell:
    """What is timed: on so many threads, behind so many tokens, a prompt of that many, or that many one by one."""

    threads: int
    depth: int
    tokens: int
    is_prompt: bool

    @property
    def name(self) -> str:
        """As llama-bench calls it."""
        return f"{'pp' if self.is_prompt else 'tg'}{self.tokens}" + f" @ d{self.depth}" * (self.depth > 0)


@dataclass(frozen=True)
class Timed:
    """A cell's tokens a second: the median of all rounds, the least and the most."""

    threads: int
    test: str
    tokens_per_s: float
    least: float
    most: float


@dataclass(frozen=True)
class Report:
    """What a person may send: the model, the machine, and what was timed."""

    model: str
    weights: str
    gib: float
    kv: str
    cpu: str
    cores: str
    instructions: str
    system: str
    timed: list[Timed]


def cells_of(
    prompts: Sequence[int], counts: Sequence[int], depths: Sequence[int], threads: Sequence[int], n_positions: int
) -> list[Cell]:
    """prompts, counts: tokens of prompts, and of texts; 0 for none. threads: numbers of them. Raises ValueError for what does not
    fit so many positions.
    """
    cells = [
        Cell(n_threads, depth, n, is_prompt)
        for n_threads, depth in itertools.product(threads, depths)
        for is_prompt, several in ((True, prompts), (False, counts))
        for n in several
        if n
    ]
    if (needed := max(cell.depth + cell.tokens for cell in cells)) > n_positions:
        raise ValueError(f"texts of {needed} tokens do not fit the model's {n_positions}; choose less of -p, -n or -d")
    return cells


def run(name: str, model: Transformer, cells: Sequence[Cell], tell: Callable[[float], None] = lambda share: None) -> Report:
    """tell: is told the share that is timed."""
    rates = [list[float]() for _ in cells]
    for cell in cells:
        _seconds(model, Cell(cell.threads, 0, min(cell.tokens, WARM_UP_TOKENS), cell.is_prompt))
    for i, (_, (cell, of)) in enumerate(itertools.product(range(ROUNDS), zip(cells, rates, strict=True))):
        tell(i / (ROUNDS * len(cells)))
        of.append(cell.tokens / _seconds(model, cell))
    timed = [
        Timed(cell.threads, cell.name, statistics.median(of), min(of), max(of)) for cell, of in zip(cells, rates, strict=True)
    ]
    words = platform.processor() or platform.machine()
    return Report(
        name, model.weights.kind, model.weights.n_bytes / 2**30, model.kv, cpu_name() or words, known().words,
        best_dot4(CPU_FEATURES), platform.platform(), timed,
    )  # fmt: skip


def cpu_name() -> str:
    """As Linux tells it, or nothing."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return ""


def _seconds(model: Transformer, cell: Cell) -> float:
    """What a cell takes once."""
    rng = np.random.default_rng(cell.depth)
    tokens: list[int] = rng.integers(0, model.config.vocab_size, cell.depth + cell.tokens).tolist()
    model.n_threads = cell.threads
    model.forward([], 0)
    model.forward(tokens[: cell.depth], 0)
    begin = time.perf_counter()
    for end in [len(tokens)] if cell.is_prompt else range(cell.depth + 1, len(tokens) + 1):
        model.forward(tokens[:end])
    return time.perf_counter() - begin


def to_json(report: Report) -> str:
    """One object on a line."""
    return json.dumps(asdict(report))


def to_table(report: Report) -> Table:
    """Tokens a second, and what they were timed on."""
    title = f"{Path(report.model).name}: {report.weights}, {report.gib:.2f} GiB, keys and values {report.kv}"
    caption = f"{report.cpu}; {report.cores}; {report.instructions}; {report.system}"
    table = Table(title=title, caption=f"{caption}. Medians of {ROUNDS} rounds, by turns.")
    for column in ("threads", "test", "tokens/s", "least to most"):
        table.add_column(column, justify="right")
    for each in report.timed:
        table.add_row(str(each.threads), each.test, f"{each.tokens_per_s:.2f}", f"{each.least:.2f} to {each.most:.2f}")
    return table
