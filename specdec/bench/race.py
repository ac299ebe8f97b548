"""The target alone against the pair on one output, each run separately, so that neither slows the other down."""

import itertools
import json
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdec.events import Event, Statistics, Step
from specdec.sampling import Sampling
from specdec.speculative_decoder import SpeculativeDecoder

MAX_ROUNDS = 5
MAX_MEASURE_S = 3.0  # no round begins after that time


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


@dataclass
class Race:
    """The result of a race between the target alone and the pair (target with draft): the fastest run of each.

    Attributes:
        alone: Fastest run of the target alone.
        pair: Fastest run of the pair.
        n_rounds: Number of runs of each.
        is_same_text: Whether all runs of both have the same tokens and stop reason.
    """

    alone: RecordedRun
    pair: RecordedRun
    n_rounds: int
    is_same_text: bool

    @property
    def speedup(self) -> float:
        """The tokens per second of the pair relative to the target alone; 0 if nothing was generated."""
        plain = self.alone.statistics.tokens_per_second
        return self.pair.statistics.tokens_per_second / plain if plain else 0.0

    @property
    def summary(self) -> str:
        """The result of the race as text, such as "same output, letter for letter; 2.9 times as fast"."""
        same = "same output, letter for letter" if self.is_same_text else "different output"
        return f"{same}; {self.speedup:.{1 if self.speedup >= 1 else 2}f} times as fast" if self.speedup else same

    def format_lines(self, alone: str, pair: str, width: int | None = None) -> list[str]:
        """Return one line of statistics for each run; if they exceed `width`, they are wrapped below the names.

        Args:
            alone: Name of the target alone.
            pair: Name of the pair.
            width: Columns of the terminal, None for any.
        """
        rows = [
            (name, f"{s.n_generated:,}", f"{s.target_passes:,}", format_seconds(s.decode_seconds), f"{s.tokens_per_second:,.0f}")
            for name, s in ((alone, self.alone.statistics), (pair, self.pair.statistics))
        ]
        longest = max(len(alone), len(pair))
        lines = [
            f"{name:{longest}}  {n:>5} tokens in {passes:>5} passes  {seconds:>8}  {rate:>7} tok/s"
            for name, n, passes, seconds, rate in rows
        ]
        if width is None or max(map(len, lines)) <= width:
            return lines
        wrapped = list[str]()
        for name, *values in rows:
            line = "{} tokens, {} passes, {}, {} tok/s".format(*values)
            wrapped += [name, *textwrap.wrap(line, max(width, 1), initial_indent="  ", subsequent_indent="  ")]
        return wrapped

    def to_dict(self) -> dict[str, object]:
        """Return the statistics of both runs, their speed ratio and the equality of their texts as a dict for JSON."""
        sides = {"alone": self.alone.statistics, "pair": self.pair.statistics}
        names = ("n_generated", "target_passes", "decode_seconds", "tokens_per_second")
        fields = {side: {name: getattr(s, name) for name in names} for side, s in sides.items()}
        return {**fields, "ratio": self.speedup or None, "same_text": self.is_same_text, "rounds": self.n_rounds}


def format_seconds(seconds: float) -> str:
    """Return a time in seconds as text: 0.0462 as "46 ms", and 4.62 as "4.6 s"."""
    return f"{seconds * 1e3:.0f} ms" if seconds < 0.9995 else f"{seconds:.1f} s"


def measure(
    decoder: SpeculativeDecoder,
    prompt: str | Sequence[int],
    max_tokens: int,
    sampling: Sampling,
    on_progress: Callable[[float], object] = lambda share: None,
) -> Race:
    """Generate one output with the target alone and the pair in turns; return the fastest run of each, without prefill.

    A short output is generated MAX_ROUNDS times by each, one that takes minutes once. The decoder must be warmed up.

    Args:
        decoder: The pair.
        prompt: Text or tokens.
        max_tokens: Limit of new tokens.
        sampling: Sampling settings.
        on_progress: Called with the completed fraction of the first round, and in later rounds with a value of at most 1.
    """
    both = SpeculativeDecoder(decoder.target, None, decoder.tokenizer), decoder
    runs: list[tuple[RecordedRun, ...]] = []
    begin, written = time.perf_counter(), 0
    while len(runs) < MAX_ROUNDS and (not runs or time.perf_counter() < begin + MAX_MEASURE_S):
        round_runs = []
        for side in both:
            run = RecordedRun()
            for event in side.stream(prompt, max_tokens, sampling):
                run.add(event)
                written += len(event.tokens) if isinstance(event, Step) else 0
                on_progress(min(1.0, written / max(2 * max_tokens, 1)))
            round_runs.append(run)
        runs.append(tuple(round_runs))
    is_same_text = all(run.output == runs[0][0].output for round_runs in runs for run in round_runs)
    alone, pair = (min(round_runs, key=lambda run: run.statistics.decode_seconds) for round_runs in zip(*runs, strict=True))
    return Race(alone, pair, len(runs), is_same_text)


def to_json(race: Race, text: str, **extra: object) -> str:
    """Return a race as the text of one JSON object: the text, its tokens, both runs, their ratio and the fields in `extra`."""
    return json.dumps({"text": text, "tokens": race.pair.tokens} | race.to_dict() | extra)
