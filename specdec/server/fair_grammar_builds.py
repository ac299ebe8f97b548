"""Fair scheduling of slow work between clients, and the builder of grammars for structured output. Knows no HTTP.

A client's schema does not keep other clients waiting.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from specdec.protocols import Constraint
from specdec.server.field_validation import APIError
from specdec.text.structured_output import MAX_CONCURRENT_BUILDS, CPUTimer, Grammar

MAX_QUEUED_BUILDS = 32
MAX_CLIENT_CPU_S = 6.0  # CPU seconds that a client's constraints may use at once
CPU_REFILL_RATE = 0.05  # CPU seconds that a client gets back per second


class BuilderBusyError(APIError):
    """The error (HTTP status 429) when too many constraints wait to be built, or a client has used too much CPU time.

    Args:
        message: The reason.
        param: The request field with the schema.
        retry_after_s: Seconds until the client may try again.
    """

    def __init__(self, message: str, param: str, retry_after_s: float) -> None:
        """Add the time of the next try, in whole seconds, to the message and to the headers."""
        n = max(math.ceil(retry_after_s), 1)
        super().__init__(
            f"{message}; try again in {n} s, or with a smaller schema", param, "constraints_busy", 429, {"retry-after": str(n)}
        )


class FairSemaphore:
    """A semaphore of one event loop that gives each client at most one permit at a time.

    The next permit goes to the client that waits longest among those without one.

    Args:
        max_concurrent: Most permits held at a time.
    """

    def __init__(self, max_concurrent: int) -> None:
        """Create a semaphore that no client holds."""
        self._max_concurrent, self._waiting, self._active = max_concurrent, list[tuple[str, asyncio.Future[None]]](), set[str]()

    @property
    def n_waiting(self) -> int:
        """Number of requests that wait for a permit."""
        return len(self._waiting)

    async def acquire(self, client: str) -> None:
        """Wait until the client gets a permit; if the wait is cancelled, the client holds none."""
        permit = asyncio.get_running_loop().create_future()
        self._waiting.append((client, permit))
        self._wake_next()
        try:
            await permit
        except asyncio.CancelledError:
            if permit.cancelled():
                self._waiting.remove((client, permit))
            else:
                self.release(client)
            raise

    def release(self, client: str) -> None:
        """Give back the permit of a client, and wake a waiting client."""
        self._active.remove(client)
        self._wake_next()

    @asynccontextmanager
    async def hold(self, client: str) -> AsyncIterator[None]:
        """Wait for a permit of the client, hold it inside the context, and give it back at the end."""
        await self.acquire(client)
        try:
            yield
        finally:
            self.release(client)

    def _wake_next(self) -> None:
        for client, permit in [*self._waiting]:
            if len(self._active) < self._max_concurrent and client not in self._active and not permit.done():
                self._waiting.remove((client, permit))
                self._active.add(client)
                permit.set_result(None)


class ConstraintBuilder:
    """Builds the constraints of structured output from grammars, in worker threads that clients take turns to use.

    A build that is cancelled before its turn costs nothing.
    """

    def __init__(self) -> None:
        """Create the worker threads' pool, and start without a debt of CPU time."""
        self._pool = ThreadPoolExecutor(MAX_CONCURRENT_BUILDS, "constraints")
        self._semaphore = FairSemaphore(MAX_CONCURRENT_BUILDS)
        self._cpu_seconds = dict[str, tuple[float, float]]()  # debt, and the time of its last update

    async def build(self, grammar: Grammar, client: str) -> Constraint:
        """Return the constraint of a grammar: the cached one, or one that a worker thread builds when it is the client's turn.

        The CPU time of the build counts for the client. A build that has started continues if the caller is cancelled. Also
        raises the errors of `Grammar.build`.

        Raises:
            BuilderBusyError: Too many builds wait, or the client has used too much CPU time.
        """
        if (cached := grammar.get_cached()) is not None:
            return cached
        if self._semaphore.n_waiting >= MAX_QUEUED_BUILDS:
            raise BuilderBusyError("too many schemas wait to be built", grammar.request_field, 1.0)
        self._check_budget(client, grammar.request_field)
        await self._semaphore.acquire(client)
        try:
            self._check_budget(client, grammar.request_field)
        except BuilderBusyError:
            self._semaphore.release(client)
            raise
        timer = CPUTimer()
        building = asyncio.get_running_loop().run_in_executor(self._pool, grammar.build, timer)
        building.add_done_callback(lambda done: self._finish_build(client, timer.seconds, done))
        return await asyncio.shield(building)

    def _check_budget(self, client: str, param: str) -> None:
        """Raise BuilderBusyError for the field `param` if the builds of a client have used more than its CPU time."""
        if (seconds := self._get_cpu_debt(client) - MAX_CLIENT_CPU_S) > 0:
            raise BuilderBusyError("this client's schemas took too long to build", param, seconds / CPU_REFILL_RATE)

    def _finish_build(self, client: str, seconds: float, done: "asyncio.Future[Any]") -> None:
        if not done.cancelled():
            done.exception()  # marks it as retrieved; the caller of build gets it, if still there
        self._cpu_seconds[client] = self._get_cpu_debt(client) + seconds, time.monotonic()
        for name in [name for name in self._cpu_seconds if not self._get_cpu_debt(name)]:
            del self._cpu_seconds[name]
        self._semaphore.release(client)

    def _get_cpu_debt(self, client: str) -> float:
        seconds, since = self._cpu_seconds.get(client, (0.0, 0.0))
        return max(seconds - CPU_REFILL_RATE * (time.monotonic() - since), 0.0)
