"""Shapes that requests ask for: built a few at a time, by turns, so that nobody's schema keeps others waiting. Knows no HTTP."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..decoding import Shape
from ..text.shapes import BUILDERS, Grammar

MOST_WAITING = 32  # shapes that are to be built
MOST_SECONDS = 6.0  # of building that a client may use at once
SECONDS_BACK = 0.05  # that it gets back in a second


class Busy(Exception):
    """Too many shapes wait to be built, or this client's have taken too long."""


class Builder:
    """Of one event loop. A client has one shape built at a time; who is cancelled before its turn costs nothing."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(BUILDERS, "shapes")
        self._waiting = list[tuple[str, asyncio.Future[None]]]()  # by whom, and what tells that it is their turn
        self._building = set[str]()
        self._spent = dict[str, tuple[float, float]]()  # seconds, and when that was

    async def built(self, grammar: Grammar, who: str) -> Shape:
        """The shape; who: the client. Raises Busy, and what `Grammar.built` raises."""
        if (kept := grammar.kept()) is not None:
            return kept
        self._check(who)
        if len(self._waiting) >= MOST_WAITING:
            raise Busy
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((who, turn))
        self._next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove((who, turn))
            else:
                self._over(who, 0.0)
            raise
        try:
            self._check(who)
        except Busy:
            self._over(who, 0.0)
            raise
        begin = time.monotonic()
        building = asyncio.get_running_loop().run_in_executor(self._pool, grammar.built)
        building.add_done_callback(lambda done: self._over(who, time.monotonic() - begin, done))
        return await asyncio.shield(building)

    def _next(self) -> None:
        """Turns for those that wait, in order, as long as there are builders: of a client of whom nothing is being built."""
        for who, turn in [*self._waiting]:
            if len(self._building) < BUILDERS and who not in self._building and not turn.done():
                self._waiting.remove((who, turn))
                self._building.add(who)
                turn.set_result(None)

    def _over(self, who: str, seconds: float, done: "asyncio.Future[Any] | None" = None) -> None:
        if done and not done.cancelled():
            done.exception()  # which is told to whom it is for, if anybody still waits
        self._building.discard(who)
        self._spent[who] = self._owes(who) + seconds, time.monotonic()
        for each in [each for each in self._spent if not self._owes(each)]:
            del self._spent[each]
        self._next()

    def _owes(self, who: str) -> float:
        seconds, when = self._spent.get(who, (0.0, 0.0))
        return max(seconds - SECONDS_BACK * (time.monotonic() - when), 0.0)

    def _check(self, who: str) -> None:
        if self._owes(who) > MOST_SECONDS:
            raise Busy
