"""The server's counters, which observe a scheduler, and their Prometheus text format. Knows no models."""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields

from specdec.engine.model_runner import Batch, Results
from specdec.engine.observers import StepObserver
from specdec.engine.sequence import Sequence, SequenceStatus
from specdec.events import Step

CACHED_TOKENS_GRANULARITY = 1000  # a finer number would reveal to one client how another one's prompts begin
BUCKET_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass
class Histogram:
    """A histogram of durations in seconds.

    Attributes:
        counts: Number of durations in each bucket: up to each of `BUCKET_BOUNDS_S`, and above the last one.
        total: Sum of the durations, in seconds.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKET_BOUNDS_S) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        """Add a duration in seconds to the histogram."""
        self.counts[bisect_left(BUCKET_BOUNDS_S, seconds)] += 1
        self.total += seconds


def _make_metric(name: str, metric_type: str, description: str) -> int:
    """Return a dataclass field for a number in `Metrics`, 0 by default, with its Prometheus name, type and description."""
    return field(default=0, metadata={"prometheus": (name, metric_type, description)})


@dataclass
class Metrics(StepObserver):
    """The server's counters since the start, and the numbers of sequences that run and wait now.

    Attributes:
        time_to_first_token: Seconds from the submission of a request to its first token.
    """

    running: int = _make_metric("requests_running", "gauge", "Sequences that are being generated.")
    queued: int = _make_metric("requests_queued", "gauge", "Sequences that wait for a slot.")
    done: int = _make_metric("requests_done_total", "counter", "Sequences that finished.")
    cancelled: int = _make_metric("requests_cancelled_total", "counter", "Sequences whose client disconnected.")
    failed: int = _make_metric("requests_failed_total", "counter", "Sequences that failed with an error.")
    prompt_tokens: int = _make_metric("prompt_tokens_total", "counter", "Prompt tokens.")
    cached_tokens: int = _make_metric(
        "prompt_tokens_cached_total", "counter", "Prompt tokens found in a cache, in whole thousands."
    )
    generated_tokens: int = _make_metric("generated_tokens_total", "counter", "Generated tokens.")
    drafted_tokens: int = _make_metric("drafted_tokens_total", "counter", "Draft tokens.")
    accepted_tokens: int = _make_metric("accepted_tokens_total", "counter", "Accepted draft tokens.")
    passes: int = _make_metric("passes_total", "counter", "Forward passes of the target.")
    time_to_first_token: Histogram = field(default_factory=Histogram)

    def on_prompt(self, sequence: Sequence) -> None:
        """Count a prompt, and its tokens that were found in a cache."""
        self.prompt_tokens += len(sequence.request.prompt)
        self.cached_tokens += sequence.n_cached

    def on_pass(self, batch: Batch, results: Results, steps: Mapping[Sequence, Step]) -> None:
        """Count a forward pass of the target and its tokens, and the time of each first token."""
        self.passes += 1
        for sequence, step in steps.items():
            self.generated_tokens += len(step.tokens)
            self.drafted_tokens += len(step.draft_tokens)
            self.accepted_tokens += step.n_accepted
            if step.tokens and sequence.n_steps == 1:
                assert sequence.first_token_seconds is not None
                self.time_to_first_token.observe(sequence.first_token_seconds)

    def on_end(self, sequence: Sequence) -> None:
        """Count a sequence that has ended."""
        self.done += sequence.status is SequenceStatus.FINISHED
        self.cancelled += sequence.status is SequenceStatus.CANCELLED
        self.failed += sequence.status is SequenceStatus.FAILED

    def record_failures(self, n: int) -> None:
        """Count sequences that failed before a scheduler had them."""
        self.failed += n

    def set_load(self, running: int, queued: int) -> None:
        """Set the numbers of sequences that run and that wait."""
        self.running, self.queued = running, queued


MODEL_METRICS = ("generated_tokens", "drafted_tokens", "accepted_tokens")  # the rest of the generated ones cost a pass each
PROMETHEUS_METRICS = {each.name: each.metadata["prometheus"] for each in fields(Metrics) if each.metadata}


def merge_metrics(parts: Collection[Metrics]) -> Metrics:
    """Return new metrics that are the sums of the given ones, for example of several models."""
    total = Metrics(**{name: sum(getattr(each, name) for each in parts) for name in PROMETHEUS_METRICS})
    counts = zip(*(each.time_to_first_token.counts for each in parts), strict=True)
    total.time_to_first_token = Histogram([sum(each) for each in counts], sum(each.time_to_first_token.total for each in parts))
    return total


def format_prometheus(metrics_by_model: Mapping[str, Metrics]) -> str:
    """Return the sums of the models' metrics, and what drafts brought per model, in Prometheus' text format, version 0.0.4.

    The number of cached tokens is rounded down to `CACHED_TOKENS_GRANULARITY`.
    """
    total = merge_metrics([Metrics(), *metrics_by_model.values()])
    lines = [*_format_lines(total), *_format_model_lines(metrics_by_model)]
    return "".join(f"{line}\n" for line in lines)


def _format_model_lines(metrics_by_model: Mapping[str, Metrics]) -> Iterator[str]:
    for attribute in MODEL_METRICS:
        name, metric_type, description = PROMETHEUS_METRICS[attribute]
        yield from _format_header(f"model_{name}", metric_type, f"{description.removesuffix('.')}, by model.")
        for model, metrics in metrics_by_model.items():
            label = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
            yield f'specdec_model_{name}{{model="{label}"}} {getattr(metrics, attribute)}'


def _format_lines(metrics: Metrics) -> Iterator[str]:
    for attribute, (metric_name, metric_type, description) in PROMETHEUS_METRICS.items():
        yield from _format_header(metric_name, metric_type, description)
        value = getattr(metrics, attribute)
        yield (
            f"specdec_{metric_name} "
            f"{value // CACHED_TOKENS_GRANULARITY * CACHED_TOKENS_GRANULARITY if attribute == 'cached_tokens' else value}"
        )
    drafted = metrics.drafted_tokens
    yield from _format_header("acceptance_rate", "gauge", "Accepted per draft token, since the start.")
    yield f"specdec_acceptance_rate {metrics.accepted_tokens / drafted if drafted else 0.0:g}"
    yield from _format_header("first_token_seconds", "histogram", "Seconds from a request to its first token.")
    n_cumulative = 0
    for bound, count in zip((*map(str, BUCKET_BOUNDS_S), "+Inf"), metrics.time_to_first_token.counts, strict=True):
        n_cumulative += count
        yield f'specdec_first_token_seconds_bucket{{le="{bound}"}} {n_cumulative}'
    yield f"specdec_first_token_seconds_sum {metrics.time_to_first_token.total:g}"
    yield f"specdec_first_token_seconds_count {n_cumulative}"


def _format_header(name: str, metric_type: str, description: str) -> list[str]:
    return [f"# HELP specdec_{name} {description}", f"# TYPE specdec_{name} {metric_type}"]
