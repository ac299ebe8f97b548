"""The target alone against the pair on one text, each measured by itself: neither disturbs the other. Knows no terminals."""

import itertools
import json
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.decoder import SpeculativeDecoder
from specdec.engine.decoding import Event, Statistics, Step
from specdec.sampling import Sampling

MOST_ROUNDS = 5
ENOUGH_SECONDS = 3.0  # of running, after which no other round begins


@dataclass
class Lane:
    """A text as one of several wrote it: all events of a run, and their sums."""

    events: list[Event] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)

    def add(self, event: Event) -> None:
        self.events.append(event)
        self.statistics.add(event)

    @property
    def written(self) -> tuple[list[int], str | None]:
        """What two runs must have in common: the tokens, and why they ended."""
        return self.tokens, self.statistics.stop_reason

    @property
    def steps(self) -> list[Step]:
        return [event for event in self.events if isinstance(event, Step)]

    @property
    def tokens(self) -> list[int]:
        """What was written behind the prompt."""
        return [token for step in self.steps for token in step.tokens]

    @property
    def ends(self) -> list[float]:
        """Seconds from the beginning of the first step to the end of each, as they were measured."""
        return list(itertools.accumulate(step.seconds for step in self.steps))


@dataclass
class Race:
    """The fastest run of each of the two. is_same_text: whether all runs of both wrote the same tokens and ended alike."""

    alone: Lane
    pair: Lane
    n_rounds: int
    is_same_text: bool

    @property
    def ratio(self) -> float:
        """Tokens a second of the pair over those of the target alone; 0 where nothing was written."""
        plain = self.alone.statistics.tokens_per_second
        return self.pair.statistics.tokens_per_second / plain if plain else 0.0

    @property
    def sentence(self) -> str:
        """What came of it: "same text, letter for letter; 2.9 times as fast"."""
        same = "same text, letter for letter" if self.is_same_text else "another text"
        return f"{same}; {self.ratio:.{1 if self.ratio >= 1 else 2}f} times as fast" if self.ratio else same

    def report(self, alone: str, pair: str, width: int | None = None) -> list[str]:
        """The figures of both behind their names, a line each; in lines of that width under them, where they are longer."""
        rows = [
            (name, f"{s.n_generated:,}", f"{s.target_passes:,}", seconds_told(s.decode_seconds), f"{s.tokens_per_second:,.0f}")
            for name, s in ((alone, self.alone.statistics), (pair, self.pair.statistics))
        ]
        longest = max(len(alone), len(pair))
        lines = [
            f"{name:{longest}}  {n:>5} tokens in {passes:>5} passes  {seconds:>8}  {rate:>7} tok/s"
            for name, n, passes, seconds, rate in rows
        ]
        if width is None or max(map(len, lines)) <= width:
            return lines
        told = list[str]()
        for name, *figures in rows:
            words = "{} tokens, {} passes, {}, {} tok/s".format(*figures)
            told += [name, *textwrap.wrap(words, max(width, 1), initial_indent="  ", subsequent_indent="  ")]
        return told

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        sides = {"alone": self.alone.statistics, "pair": self.pair.statistics}
        names = ("n_generated", "target_passes", "decode_seconds", "tokens_per_second")
        told = {side: {name: getattr(s, name) for name in names} for side, s in sides.items()}
        return {**told, "ratio": self.ratio or None, "same_text": self.is_same_text, "rounds": self.n_rounds}


def seconds_told(seconds: float) -> str:
    """Of 0.0462 "46 ms", of 4.62 "4.6 s"."""
    return f"{seconds * 1e3:.0f} ms" if seconds < 0.9995 else f"{seconds:.1f} s"


def measure(
    decoder: SpeculativeDecoder,
    prompt: str | Sequence[int],
    max_tokens: int,
    sampling: Sampling,
    tell: Callable[[float], object] = lambda share: None,
) -> Race:
    """Both write the text in turns, and the fastest run of each counts; the prompt's own pass does not.

    A text of a moment is written MOST_ROUNDS times by each, one of minutes once. tell: is told the share of the first round that
    is done. The decoder is to be warm.
    """
    both = SpeculativeDecoder(decoder.target, None, decoder.tokenizer), decoder
    runs: list[tuple[Lane, ...]] = []
    begin, written = time.perf_counter(), 0
    while len(runs) < MOST_ROUNDS and (not runs or time.perf_counter() < begin + ENOUGH_SECONDS):
        lanes = []
        for writer in both:
            lane = Lane()
            for event in writer.stream(prompt, max_tokens, sampling):
                lane.add(event)
                written += len(event.tokens) if isinstance(event, Step) else 0
                tell(min(1.0, written / max(2 * max_tokens, 1)))
            lanes.append(lane)
        runs.append(tuple(lanes))
    is_same_text = all(lane.written == runs[0][0].written for lanes in runs for lane in lanes)
    alone, pair = (min(lanes, key=lambda lane: lane.statistics.decode_seconds) for lanes in zip(*runs, strict=True))
    return Race(alone, pair, len(runs), is_same_text)


def to_json(race: Race, text: str, **extra: Any) -> str:
    """One JSON object: the text, its tokens, both runs, their ratio, and what the caller adds."""
    return json.dumps({"text": text, "tokens": race.pair.tokens} | race.figures() | extra)
