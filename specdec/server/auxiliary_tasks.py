"""Tasks other than generation, which run step by step between forward passes. Knows no HTTP and no models."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, Protocol

MAX_QUEUED_TASKS = 4096
AuxiliaryTask = Generator[None, None, Any]  # yields between its steps and returns its result


class AuxiliaryRequest(Protocol):
    """The protocol of parsed requests that auxiliary tasks answer."""

    @property
    def tasks(self) -> Sequence[Callable[[Any], AuxiliaryTask]]:
        """Functions that take the target and return a task."""

    def format_response(self, results: Sequence[Any], name: str) -> bytes:
        """Return the response as JSON, given the results of the tasks and the model's name."""


class AuxiliaryTaskQueue:
    """A queue of tasks that run one at a time, step by step; after each task, another client gets a turn."""

    def __init__(self) -> None:
        """Create an empty queue."""
        self._waiting = deque[tuple[str, Callable[[], AuxiliaryTask], Future[Any]]]()
        self._running_task: AuxiliaryTask | None = None  # of the first entry
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        """Return whether a task waits or runs."""
        return bool(self._waiting)

    def add(self, tasks: Sequence[Callable[[], AuxiliaryTask]], client: str) -> list[Future[Any]]:
        """Queue all given tasks of a client, or none if they do not fit into the queue.

        Args:
            tasks: Functions that start a task: a generator that yields between its steps and returns its result.
            client: Name of the client.

        Returns:
            The future of each task, which can be cancelled; empty if the queue is full.
        """
        with self._lock:
            if len(self._waiting) + len(tasks) > MAX_QUEUED_TASKS:
                return []
            futures = [Future[Any]() for _ in tasks]
            self._waiting += zip([client] * len(tasks), tasks, futures, strict=True)
        return futures

    def step(self) -> None:
        """Run the next step of the first task; do nothing if the queue is empty.

        When the task ends, sets the result or error of its future and moves a task of another client to the front. A cancelled
        task is removed.
        """
        if not self._waiting:
            return
        client, start, future = self._waiting[0]
        with suppress(InvalidStateError):  # the task was cancelled
            try:
                if not future.cancelled():
                    self._running_task = self._running_task or start()
                    next(self._running_task)
                    return
            except StopIteration as end:
                future.set_result(end.value)
            except Exception as error:
                future.set_exception(error)
        self._running_task = None
        with self._lock:
            self._waiting.popleft()
            if next_task := next((task for task in self._waiting if task[0] != client), None):
                self._waiting.remove(next_task)
                self._waiting.appendleft(next_task)

    def fail_all(self, error: Exception) -> None:
        """Remove all tasks from the queue and set the given error as the exception of their futures."""
        with self._lock:
            waiting, self._waiting, self._running_task = self._waiting, deque(), None
        for *_, future in waiting:
            with suppress(InvalidStateError):
                future.set_exception(error)
