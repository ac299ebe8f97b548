"""Turns of clients at what takes long, and the shapes that they ask for, so that nobody's schema keeps others waiting. Knows no
HTTP."""

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from ..decoding import Shape
from ..text.shapes import BUILDERS, Grammar
from .fields import Refused

MOST_WAITING = 32  # shapes that are to be built
MOST_SECONDS = 6.0  # of building that a client may use at once
SECONDS_BACK = 0.05  # that it gets back in a second


class Busy(Refused):
    """Too many shapes wait to be built, or this client's have taken too long."""

    def __init__(self) -> None:
        told = "shapes of this client, or of many, take long to build; ask again later, or for a smaller one"
        super().__init__(told, "response_format", "shapes_busy", 429)


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
        if self._owes(who) > MOST_SECONDS or self._turns.n_waiting >= MOST_WAITING:
            raise Busy()
        await self._turns.begin(who)
        if self._owes(who) > MOST_SECONDS:
            self._turns.end(who)
            raise Busy()
        begin = time.monotonic()
        building = asyncio.get_running_loop().run_in_executor(self._pool, grammar.built)
        building.add_done_callback(lambda done: self._over(who, time.monotonic() - begin, done))
        return await asyncio.shield(building)

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
