"""Texts that are wanted, one after the other, on a thread that owns the target. Knows no HTTP."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..decoder import SpeculativeDecoder
from ..decoding import Event, Prompt, Shape, Step
from ..sampling import Sampling
from .metrics import Figures

INTERRUPTED = "interrupted"


class Full(Exception):
    """As many texts wait as may."""


class Closed(Exception):
    """No more texts are taken."""


@dataclass(frozen=True)
class Job:
    """One text that is wanted.

    prompt: ids, BOS first. top_logprobs: None for no log probabilities; else of how many of the likeliest tokens beside the
    text's own. prediction: tokens that the client expects, proposed as long as they stand. shape: what the text is to match.
    """

    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    stops: Sequence[str] = ()
    top_logprobs: int | None = None
    prediction: Sequence[int] = ()
    shape: Shape | None = None


@dataclass(frozen=True)
class Failed:
    """In the place of a text's last step."""

    error: Exception


Hear = Callable[[Event | Failed], None]


class Ticket:
    """A text that was asked for."""

    def __init__(self, job: Job, hear: Hear) -> None:
        self.job, self.hear, self.asked = job, hear, time.perf_counter()
        self.is_cancelled = False

    def cancel(self) -> None:
        """Its place is free within a step."""
        self.is_cancelled = True


class Engine:
    """See `Job`; n_slots: texts that are written at once; n_queue: that wait beside them."""

    def __init__(self, decoder: SpeculativeDecoder, n_slots: int, n_queue: int, cache_bytes: int) -> None:
        self._decoder, self._most = decoder, n_slots + n_queue
        self._waiting: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._n, self._is_closed, self._is_cut = 0, False, False
        self.figures = Figures()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def submit(self, job: Job, hear: Hear) -> Ticket:
        """`hear` is called on the engine's thread with the text's events. Raises Full, Closed."""
        if job.top_logprobs is not None:
            raise ValueError("log probabilities are not done by this engine")
        with self._lock:
            if self._is_closed:
                raise Closed
            if self._n >= self._most:
                raise Full
            self._n += 1
            self.figures.queued += 1
        ticket = Ticket(job, hear)
        self._waiting.put(ticket)
        return ticket

    def close(self, grace: float) -> None:
        """No new texts; those that run end, or are cut after so many seconds."""
        with self._lock:
            self._is_closed = True
        self._waiting.put(None)
        self._thread.join(grace)
        self._is_cut = True
        self._thread.join()

    def _work(self) -> None:
        while ticket := self._waiting.get():
            self.figures.queued -= 1
            self.figures.running += 1
            try:
                self._write(ticket)
            except Exception as error:
                self.figures.failed += 1
                ticket.hear(Failed(error))
            with self._lock:
                self.figures.running -= 1
                self._n -= 1

    def _write(self, ticket: Ticket) -> None:
        job, figures = ticket.job, self.figures
        if self._is_cut and not ticket.is_cancelled:
            ticket.hear(Prompt(job.prompt, 0.0))
            ticket.hear(Step([], [], 0, 0.0, 0.0, INTERRUPTED))
            return
        is_first = True
        for event in self._decoder.stream(job.prompt, job.max_tokens, job.sampling, stop=list(job.stops), shape=job.shape):
            if ticket.is_cancelled:
                figures.cancelled += 1
                return
            if isinstance(event, Prompt):
                figures.prompt_tokens += len(event.tokens)
            elif isinstance(event, Step):
                if is_first:
                    is_first = False
                    figures.first_token.add(time.perf_counter() - ticket.asked)
                figures.passes += 1
                figures.generated_tokens += len(event.tokens)
                figures.drafted_tokens += len(event.draft_tokens)
                figures.accepted_tokens += event.n_accepted
                if self._is_cut and event.stop_reason is None:
                    event = replace(event, stop_reason=INTERRUPTED)
                ticket.hear(event)
                if event.stop_reason:
                    break
                continue
            ticket.hear(event)
        figures.done += 1
