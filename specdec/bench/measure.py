"""The measuring core of `race`, `sweep` and `bench`: tasks take turns, so that a change of the machine's speed affects all."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rich.table import Table

from specdec.events import Event, Statistics, Step

T = TypeVar("T")
OnProgress = Callable[[float], object]  # takes the completed fraction
MIN_TASK_RUNS, MIN_TASK_S = 3, 0.01  # consecutive runs of a task, as warm-up and again while it is timed


def ignore_progress(share: float) -> None:
    """Do nothing with a completed fraction."""


def take_turns(
    tasks: Sequence[Callable[[], T]], n_rounds: int, on_progress: OnProgress = ignore_progress, first: int = 0
) -> Iterator[list[T]]:
    """Run all tasks in turn for some rounds, and yield the results of each round. Each round begins with another task.

    Args:
        tasks: The tasks; the results of a round are in their order.
        n_rounds: Number of rounds.
        on_progress: Called with the completed fraction.
        first: Index of the task that begins the first round, modulo their number.
    """
    n = len(tasks)
    for number in range(n_rounds):
        results = dict[int, T]()
        for i in range(first + number, first + number + n):
            on_progress((number + len(results) / n) / n_rounds)
            results[i % n] = tasks[i % n]()
        yield [results[i] for i in range(n)]


def time_task(task: Callable[[], object]) -> float:
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


@dataclass
class RecordedRun:
    """The recorded decoding events of one generation, and their statistics."""

    events: list[Event] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)

    def add(self, event: Event) -> None:
        """Record a decoding event and add it to the statistics."""
        self.events.append(event)
        self.statistics.add(event)

    @property
    def output(self) -> tuple[list[int], str | None]:
        """The generated tokens and the stop reason, for comparison with those of other runs."""
        return self.tokens, self.statistics.stop_reason

    @property
    def steps(self) -> list[Step]:
        """The verified steps among the recorded events, in order."""
        return [event for event in self.events if isinstance(event, Step)]

    @property
    def tokens(self) -> list[int]:
        """The generated tokens of all steps, in order."""
        return [token for step in self.steps for token in step.tokens]

    @property
    def end_seconds(self) -> list[float]:
        """The measured end of each step, in seconds from the beginning of the first."""
        return list(itertools.accumulate(step.seconds for step in self.steps))


def record(events: Iterable[Event], on_event: Callable[[Event], object] = lambda event: None) -> RecordedRun:
    """Consume the decoding events of a generation and return them as a run; call `on_event` after each."""
    run = RecordedRun()
    for event in events:
        run.add(event)
        on_event(event)
    return run


def make_table(rows: Sequence[dict[str, str]], title: str, caption: str) -> Table:
    """Return a Rich table of the rows, whose keys are the column titles."""
    table = Table(*rows[0], title=title, caption=caption)
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        table.add_row(*row.values())
    return table
