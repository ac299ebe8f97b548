"""Turns of clients at what takes long, and the shapes that they ask for, so that nobody's schema keeps others waiting. Knows no
HTTP."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from specdec.engine.decoding import Shape
from specdec.server.validation import Refused
from specdec.text.structured_output import BUILDERS, Cost, Grammar

MOST_WAITING = 32  # shapes that are to be built
MOST_SECONDS = 6.0  # of the CPU, that a client's shapes may take at once
SECONDS_BACK = 0.05  # that it gets back in a second


class Busy(Refused):
    """Too many shapes wait to be built, or this client's have taken too long. seconds: until one may be asked for again."""

    def __init__(self, told: str, param: str, seconds: float) -> None:
        n = max(math.ceil(seconds), 1)
        super().__init__(f"{told}; ask again in {n} s, or for a smaller one", param, "shapes_busy", 429, {"retry-after": str(n)})


class Turns:
    """Of one event loop: so many at once, of each client one; the next is who waits longest of those whose client has none."""

    def __init__(self, most: int) -> None:
        self._most, self._waiting, self._busy = most, list[tuple[str, asyncio.Future[None]]](), set[str]()

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    async def begin(self, who: str) -> None:
        """Who is cancelled has none."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((who, turn))
        self._next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove((who, turn))
            else:
                self.end(who)
            raise

    def end(self, who: str) -> None:
        self._busy.remove(who)
        self._next()

    @asynccontextmanager
    async def of(self, who: str) -> AsyncIterator[None]:
        await self.begin(who)
        try:
            yield
        finally:
            self.end(who)

    def _next(self) -> None:
        for who, turn in [*self._waiting]:
            if len(self._busy) < self._most and who not in self._busy and not turn.done():
                self._waiting.remove((who, turn))
                self._busy.add(who)
                turn.set_result(None)


class Builder:
    """Shapes, by turns. Who is cancelled before its turn costs nothing."""

    def __init__(self) -> None:
        self._pool, self._turns = ThreadPoolExecutor(BUILDERS, "shapes"), Turns(BUILDERS)
        self._spent = dict[str, tuple[float, float]]()  # seconds, and when that was

    async def built(self, grammar: Grammar, who: str) -> Shape:
        """The shape; who: the client. Raises Busy, and what `Grammar.built` raises."""
        if (kept := grammar.kept()) is not None:
            return kept
        if self._turns.n_waiting >= MOST_WAITING:
            raise Busy("as many schemas wait to be built as may", grammar.param, 1.0)
        self._check(who, grammar.param)
        await self._turns.begin(who)
        try:
            self._check(who, grammar.param)
        except Busy:
            self._turns.end(who)
            raise
        cost = Cost()
        building = asyncio.get_running_loop().run_in_executor(self._pool, grammar.build, cost)
        building.add_done_callback(lambda done: self._over(who, cost.seconds, done))
        return await asyncio.shield(building)

    def _check(self, who: str, param: str) -> None:
        """Raise Busy for a client whose shapes have taken more than its seconds."""
        if (seconds := self._owes(who) - MOST_SECONDS) > 0:
            raise Busy("this client's schemas took long to build", param, seconds / SECONDS_BACK)

    def _over(self, who: str, seconds: float, done: "asyncio.Future[Any]") -> None:
        if not done.cancelled():
            done.exception()  # which is told to whom it is for, if anybody still waits
        self._spent[who] = self._owes(who) + seconds, time.monotonic()
        for each in [each for each in self._spent if not self._owes(each)]:
            del self._spent[each]
        self._turns.end(who)

    def _owes(self, who: str) -> float:
        seconds, when = self._spent.get(who, (0.0, 0.0))
        return max(seconds - SECONDS_BACK * (time.monotonic() - when), 0.0)
