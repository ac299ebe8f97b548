"""The target alone against the pair on one output, each run separately, so that neither slows the other down."""

import json
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from specdec.bench.measure import OnProgress, RecordedRun, ignore_progress, record, take_turns
from specdec.events import Event, Step
from specdec.sampling import Sampling
from specdec.speculative_decoder import SpeculativeDecoder

MAX_ROUNDS = 5
MAX_MEASURE_S = 3.0  # no round begins after that time


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
        """Return one line of statistics for each run; if they exceed `width`, they are wrapped.

        Args:
            alone: Name of the target alone.
            pair: Name of the pair.
            width: Columns of the terminal, None for any.
        """
        lines = list[str]()
        for name, s in ((alone, self.alone.statistics), (pair, self.pair.statistics)):
            counts = f"{s.n_generated:>5,} tokens in {s.target_passes:>5,} passes"
            speed = f"{format_seconds(s.decode_seconds):>8}  {s.tokens_per_second:>7,.0f} tok/s"
            lines.append(f"{name:{max(len(alone), len(pair))}}  {counts}  {speed}")
        if width is None or max(map(len, lines)) <= width:
            return lines
        short = (" ".join(line.split()) for line in lines)
        return [part for line in short for part in textwrap.wrap(line, max(width, 1), subsequent_indent="  ")]


def format_seconds(seconds: float) -> str:
    """Return a time in seconds as text: 0.0462 as "46 ms", and 4.62 as "4.6 s"."""
    return f"{seconds * 1e3:.0f} ms" if seconds < 0.9995 else f"{seconds:.1f} s"


def measure(
    decoder: SpeculativeDecoder,
    prompt: str | Sequence[int],
    max_tokens: int,
    sampling: Sampling,
    on_progress: OnProgress = ignore_progress,
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
    n_written = 0

    def count_tokens(event: Event) -> None:
        nonlocal n_written
        n_written += len(event.tokens) if isinstance(event, Step) else 0
        on_progress(min(1.0, n_written / max(2 * max_tokens, 1)))

    def run(side: SpeculativeDecoder) -> RecordedRun:
        return record(side.stream(prompt, max_tokens, sampling), count_tokens)

    target_alone = SpeculativeDecoder(decoder.target, None, decoder.tokenizer)
    rounds, end = list[list[RecordedRun]](), time.perf_counter() + MAX_MEASURE_S
    for runs in take_turns([partial(run, target_alone), partial(run, decoder)], MAX_ROUNDS):
        rounds.append(runs)
        if time.perf_counter() >= end:
            break
    is_same_text = all(each.output == rounds[0][0].output for runs in rounds for each in runs)
    alone, pair = (min(runs, key=lambda each: each.statistics.decode_seconds) for runs in zip(*rounds, strict=True))
    return Race(alone, pair, len(rounds), is_same_text)


def to_json(race: Race, text: str, **extra: object) -> str:
    """Return a race as the text of one JSON object: the text, its tokens, both runs, their ratio and the fields in `extra`."""
    names = ("n_generated", "target_passes", "decode_seconds", "tokens_per_second")
    sides = {"alone": race.alone.statistics, "pair": race.pair.statistics}
    runs = {side: {name: getattr(statistics, name) for name in names} for side, statistics in sides.items()}
    result = {"ratio": race.speedup or None, "same_text": race.is_same_text, "rounds": race.n_rounds}
    return json.dumps({"text": text, "tokens": race.pair.tokens} | runs | result | extra)
