"""EngineThread: a thread that runs a scheduler for many clients, with auxiliary tasks between its steps. Knows no HTTP."""

import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as GenericSequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from specdec.engine.metrics import Metrics
from specdec.engine.model_runner import Batch
from specdec.engine.prefix_cache import PrefixCache
from specdec.engine.request import GenerationRequest
from specdec.engine.scheduler import Scheduler
from specdec.engine.sequence import Client, Sequence, SequenceStatus
from specdec.events import Event, PrefillProgress, Prompt, Proposal, Step
from specdec.model.model import Model
from specdec.server.auxiliary_tasks import AuxiliaryTask, AuxiliaryTaskQueue
from specdec.speculative_decoder import SpeculativeDecoder

IDLE_SLOTS_PER_SEQUENCE = 4  # idle slots for each running sequence, kept for conversations that may continue
MAX_EXTRA_WAITING = 64  # more requests that may wait when the queue is full, each of a client with no other request

EventCallback = Callable[[Prompt | Step | Exception], None]


class QueueFullError(RuntimeError):
    """The error that rejects a request because too many requests or auxiliary tasks wait already."""

    def __init__(self) -> None:
        """Set the message, which is always the same."""
        super().__init__("the request queue is full; try again later")


class ShutdownError(RuntimeError):
    """The error for a request that is rejected or stopped because the server is shutting down."""

    def __init__(self) -> None:
        """Set the message, which is always the same."""
        super().__init__("the server is shutting down")


class RequestHandle:
    """A submitted generation request, with the callback for its events; it can be cancelled.

    Attributes:
        sequence: The sequence that is generated for the request.
        is_cancelled: Whether `cancel` was called.
    """

    def __init__(self, sequence: Sequence, on_event: EventCallback) -> None:
        """Store the sequence and the callback."""
        self.sequence, self._on_event = sequence, on_event
        self.is_cancelled = False

    def cancel(self) -> None:
        """Mark the request as cancelled: the engine frees the KV cache slot within one step.

        The callback gets no event after the one that is being sent.
        """
        self.is_cancelled = True

    def send(self, event: Event | PrefillProgress | Exception) -> None:
        """Send a prompt, a step or an error to the callback, unless the request is cancelled; other events are dropped.

        A callback that raises cancels its request.
        """
        if self.is_cancelled or isinstance(event, PrefillProgress | Proposal):
            return
        try:
            self._on_event(event)
        except Exception:
            self.cancel()


class EngineThread:
    """A thread that generates the sequences of all requests to a model, up to `max_running` in a forward pass.

    A sequence with a KV cache larger than `cache_bytes` runs alone. Auxiliary tasks get half of the time.

    Args:
        decoder: The target and its draft models.
        max_running: Sequences per pass.
        max_waiting: Requests that may wait for a slot.
        cache_bytes: Memory limit of all KV caches together, in bytes.
    """

    def __init__(self, decoder: SpeculativeDecoder, max_running: int, max_waiting: int, cache_bytes: int) -> None:
        """Start the thread, which first warms up the models."""
        self._decoder, self._max_running, self._max_waiting = decoder, max_running, max_waiting
        self._prefix_cache = PrefixCache(decoder.bundle, IDLE_SLOTS_PER_SEQUENCE * max_running, decoder.prompt_cache, cache_bytes)
        self._scheduler: Scheduler | None = None  # once the models are warmed up
        self._handles = dict[Sequence, RequestHandle]()  # of all unfinished requests
        self._incoming = deque[Sequence]()  # not known to the scheduler yet
        self._auxiliary_tasks = AuxiliaryTaskQueue()
        self._changed = threading.Condition()
        self._is_closed = self._is_aborted = False
        self._startup_error: Exception | None = None
        self._seconds_until_auxiliary = 0.0  # step time before the next auxiliary task step
        self._metrics = Metrics()
        self._thread = threading.Thread(target=self._run_loop, name="engine", daemon=True)
        self._thread.start()

    @property
    def metrics(self) -> Metrics:
        """The counters of the engine, updated with the numbers of sequences that run and wait now."""
        n_running = len(self._scheduler.running) if self._scheduler else 0
        self._metrics.set_load(n_running, len(self._handles) - n_running)
        return self._metrics

    def submit(
        self, requests: GenericSequence[GenerationRequest], callbacks: GenericSequence[EventCallback], client: Client
    ) -> list[RequestHandle]:
        """Queue all sequences of a client's request for generation, or none of them, and return a handle for each.

        Args:
            requests: One per sequence, validated.
            callbacks: One per sequence, called on the engine's thread with each event. The last event is a step with a stop
                reason or an error.
            client: The sender.

        Returns:
            The handles of the sequences, in their order.

        Raises:
            QueueFullError: Too many requests wait. A client without unfinished requests has a higher limit.
            ShutdownError: The engine is shutting down.
        """
        sequences = [Sequence(request, self._decoder.tokenizer, client) for request in requests]
        handles = [RequestHandle(*each) for each in zip(sequences, callbacks, strict=True)]
        with self._changed:
            if self._is_closed:
                raise ShutdownError()
            is_new = all(sequence.client.name != client.name for sequence in self._handles)
            max_unfinished = self._max_running + self._max_waiting + MAX_EXTRA_WAITING * (is_new and bool(self._handles))
            if len(self._handles) + len(handles) > max_unfinished:
                raise QueueFullError()
            self._handles |= {handle.sequence: handle for handle in handles}
            self._incoming.extend(handle.sequence for handle in handles)
            self._changed.notify()
        return handles

    def submit_auxiliary(self, tasks: GenericSequence[Callable[[Model], AuxiliaryTask]], client: Client) -> "list[Future[Any]]":
        """Queue tasks that use the target and run step by step between forward passes, and return their futures.

        Args:
            tasks: Functions that take the target and return a task (see `AuxiliaryTaskQueue`).
            client: The sender.

        Raises:
            QueueFullError: Too many tasks wait; none of the tasks is queued.
            ShutdownError: The engine is shutting down.
        """
        with self._changed:
            if self._is_closed:
                raise ShutdownError()
            if not (futures := self._auxiliary_tasks.add([partial(task, self._decoder.target) for task in tasks], client.name)):
                raise QueueFullError()
            self._changed.notify()
        return futures

    def limit_caches(self, cache_bytes: int) -> None:
        """Set the memory limit of all KV caches in bytes, for sequences that start from now on."""
        self._prefix_cache.limit_bytes(cache_bytes)

    def close(self, grace: float) -> None:
        """Reject new requests, abort those that are unfinished after `grace` seconds, and wait until the thread has ended."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(grace)
        self._is_aborted = True
        self._thread.join()

    def _run_loop(self) -> None:
        try:
            self._decoder.warm_up()
            self._scheduler = self._decoder.make_scheduler(self._prefix_cache, self._max_running, self._metrics)
        except Exception as error:
            self._startup_error = error
        while self._wait_for_work():
            if self._startup_error:
                self._fail_all(self._startup_error)
                continue
            if self._is_aborted:
                self._auxiliary_tasks.fail_all(ShutdownError())
            start = time.perf_counter()
            if self._auxiliary_tasks and (self._seconds_until_auxiliary <= 0 or not self._handles):
                self._auxiliary_tasks.step()
                self._seconds_until_auxiliary = 2 * (time.perf_counter() - start)
            self._step()
            self._seconds_until_auxiliary -= time.perf_counter() - start

    def _wait_for_work(self) -> bool:
        """Block until there is work or the engine is closed; return False once it is closed and has no work left."""
        with self._changed:
            while not (self._handles or self._auxiliary_tasks or self._is_closed):
                self._changed.wait()
            return bool(self._handles or self._auxiliary_tasks)

    def _step(self) -> None:
        """Add and cancel sequences, run a step of the scheduler, send the events, and forget the requests that have ended.

        After the grace period of `close`, all sequences are aborted instead. An error of the step is sent to all of them.
        """
        scheduler = self._scheduler
        assert scheduler
        with self._changed:
            while self._incoming:
                scheduler.add(self._incoming.popleft())
            cancelled = [handle.sequence for handle in self._handles.values() if handle.is_cancelled]
        try:
            for sequence in cancelled:
                scheduler.cancel(sequence)
            batch = Batch(events=scheduler.abort()) if self._is_aborted else scheduler.schedule()
            for sequence, event in batch.events:
                self._handles[sequence].send(event)
            for sequence, event in scheduler.commit(batch, scheduler.runner.run(batch)):
                self._handles[sequence].send(event)
        except Exception as error:  # clients must not wait for a sequence that cannot continue
            for sequence in scheduler.fail_all(error):
                self._handles[sequence].send(error)
        with self._changed:
            for sequence in [sequence for sequence in self._handles if sequence.has_ended]:
                handle = self._handles.pop(sequence)
                if sequence.status is SequenceStatus.FINISHED and not sequence.n_steps:  # since no token was allowed
                    handle.send(Step([], [], 0, 0.0, 0.0, "max_tokens"))

    def _fail_all(self, error: Exception) -> None:
        """Send an error to all requests and tasks, and forget them."""
        with self._changed:
            handles = [*self._handles.values()]
            self._handles.clear()
            self._incoming.clear()
        self._metrics.record_failures(len(handles))
        for handle in handles:
            handle.send(error)
        self._auxiliary_tasks.fail_all(error)
