"""Other work than texts, a step at a time between passes. Knows no HTTP and no models."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

MOST_WAITING = 4096
Steps = Generator[None, None, Any]  # which ends with a value


class Beside:
    """One piece of work is under way at a time, and clients take turns."""

    def __init__(self) -> None:
        self._waiting = deque[tuple[str, Callable[[], Steps], Future[Any]]]()
        self._steps: Steps | None = None  # of the first
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, work: Sequence[Callable[[], Steps]], who: str) -> list[Future[Any]]:
        """What each of them will end with; one that is cancelled ends. None of them, [], where there is no room."""
        with self._lock:
            if len(self._waiting) + len(work) > MOST_WAITING:
                return []
            futures = [Future[Any]() for _ in work]
            self._waiting += zip([who] * len(work), work, futures, strict=True)
        return futures

    def step(self) -> None:
        """Go on with the first; behind its last step it is another client's turn."""
        if not self._waiting:
            return
        who, begin, future = self._waiting[0]
        with suppress(InvalidStateError):  # of one that is cancelled
            try:
                if not future.cancelled():
                    self._steps = self._steps or begin()
                    next(self._steps)
                    return
            except StopIteration as end:
                future.set_result(end.value)
            except Exception as error:
                future.set_exception(error)
        self._steps = None
        with self._lock:
            self._waiting.popleft()
            if other := next((each for each in self._waiting if each[0] != who), None):
                self._waiting.remove(other)
                self._waiting.appendleft(other)

    def fail(self, error: Exception) -> None:
        """All that waits does."""
        with self._lock:
            waiting, self._waiting, self._steps = self._waiting, deque(), None
        for *_, future in waiting:
            with suppress(InvalidStateError):
                future.set_exception(error)
