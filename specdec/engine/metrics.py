"""What a server counts, and Prometheus' text of it. Knows no requests and no models."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

COARSE = 1000  # tokens: a finer number would tell one client how another one's prompts begin
BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds


@dataclass
class Histogram:
    """Seconds, by the first of the bounds that they do not exceed."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds


def _counted(told: str, kind: str, what: str) -> int:
    """A number of `Figures`: what Prometheus calls it, its kind, and what it counts."""
    return field(default=0, metadata={"told": (told, kind, what)})


@dataclass
class Figures:
    """Of texts: how many run and wait now, all else since the start. first_token: seconds from asking to the first token."""

    running: int = _counted("requests_running", "gauge", "Texts that are being written.")
    queued: int = _counted("requests_queued", "gauge", "Texts that wait for a slot.")
    done: int = _counted("requests_done_total", "counter", "Texts that came to their end.")
    cancelled: int = _counted("requests_cancelled_total", "counter", "Texts whose client left.")
    failed: int = _counted("requests_failed_total", "counter", "Texts that ended in an error.")
    prompt_tokens: int = _counted("prompt_tokens_total", "counter", "Tokens of prompts.")
    cached_tokens: int = _counted(
        "prompt_tokens_cached_total", "counter", "Of these, tokens that a cache held already, in whole thousands."
    )
    generated_tokens: int = _counted("generated_tokens_total", "counter", "Tokens that were written.")
    drafted_tokens: int = _counted("drafted_tokens_total", "counter", "Tokens that were guessed.")
    accepted_tokens: int = _counted("accepted_tokens_total", "counter", "Guessed tokens that stood.")
    passes: int = _counted("passes_total", "counter", "Passes of the target.")
    first_token: Histogram = field(default_factory=Histogram)


TOLD = {each.name: each.metadata["told"] for each in fields(Figures) if each.metadata}


def merged(several: Sequence[Figures]) -> Figures:
    """The sums of several."""
    total = Figures(**{name: sum(getattr(each, name) for each in several) for name in TOLD})
    counts = zip(*(each.first_token.counts for each in several), strict=True)
    total.first_token = Histogram([sum(each) for each in counts], sum(each.first_token.total for each in several))
    return total


def exposition(figures: Figures) -> str:
    """Prometheus' text format, version 0.0.4."""
    return "".join(f"{line}\n" for line in _lines(figures))


def _lines(figures: Figures) -> Iterator[str]:
    for name, (told, kind, what) in TOLD.items():
        yield from _head(told, kind, what)
        value = getattr(figures, name)
        yield f"specdec_{told} {value // COARSE * COARSE if name == 'cached_tokens' else value}"
    drafted = figures.drafted_tokens
    yield from _head("acceptance_rate", "gauge", "Accepted over guessed tokens, since the start.")
    yield f"specdec_acceptance_rate {figures.accepted_tokens / drafted if drafted else 0.0:g}"
    yield from _head("first_token_seconds", "histogram", "Seconds from a request to its first token.")
    n = 0
    for bound, count in zip((*map(str, BOUNDS), "+Inf"), figures.first_token.counts, strict=True):
        n += count
        yield f'specdec_first_token_seconds_bucket{{le="{bound}"}} {n}'
    yield f"specdec_first_token_seconds_sum {figures.first_token.total:g}"
    yield f"specdec_first_token_seconds_count {n}"


def _head(name: str, kind: str, what: str) -> list[str]:
    return [f"# HELP specdec_{name} {what}", f"# TYPE specdec_{name} {kind}"]
