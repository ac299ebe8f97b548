"""Bodies of requests as they come: in what time, and how much of all of them there is room for. Knows no models."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.requests import Request

from specdec.server.validation import Refused

MOST_BYTES, MOST_OF_ALL_BYTES = 4 << 20, 64 << 20  # of a body; of all that are being read, without what is small of each
SMALL_BYTES = 64 << 10  # of a body: so much of any is read, and one that is no larger waits for no larger one
BODY_SECONDS = 10.0  # that a client may take for so much of a body
TOO_LARGE = partial(Refused, f"the body has more than {MOST_BYTES >> 20} MiB", None, "request_too_large", 413)
NO_ROOM = partial(Refused, "the bodies of others take all room, and this one came slowest; send it again", None, "no_room", 429)


class Body:
    """One that is being read. since: when so much of it had come as is small, or a multiple of that."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.data, self.since = bytearray(), loop.time()
        self.is_dropped: asyncio.Future[Any] = loop.create_future()
        self._loop = loop

    @property
    def n_counted(self) -> int:
        return max(len(self.data) - SMALL_BYTES, 0)

    def add(self, piece: bytes) -> None:
        n = len(self.data)
        self.data.extend(piece)
        if n // SMALL_BYTES < len(self.data) // SMALL_BYTES:
            self.since = self._loop.time()


class Room:
    """What all bodies together may take, of clients that send slowly or much."""

    def __init__(self) -> None:
        self.bodies = list[Body]()

    def make(self, n: int) -> None:
        """Room for so many bytes more: the bodies that have come slowest of late are dropped."""
        large = sorted((body for body in self.bodies if body.n_counted), key=lambda body: body.since)
        n += sum(body.n_counted for body in large)
        for body in large:
            if n <= MOST_OF_ALL_BYTES:
                return
            n -= body.n_counted
            body.data.clear()
            if not body.is_dropped.done():
                body.is_dropped.set_result(None)


@asynccontextmanager
async def body_of_bytes(request: Request, room: Room) -> AsyncIterator[bytes]:
    """All of a body of JSON. Raises Refused for one of another kind, that is too large or comes too slowly."""
    kind, coding = request.headers.get("content-type", ""), request.headers.get("content-encoding", "identity")
    if kind.partition(";")[0].strip().lower() != "application/json" or coding.lower() not in ("", "identity"):
        problem = "the body has to be JSON, not compressed, with the header content-type: application/json"
        raise Refused(problem, None, "unsupported_media_type", 415)
    size = request.headers.get("content-length", "0")
    if not size.isdecimal() or len(size) > 18 or int(size) > MOST_BYTES:
        raise TOO_LARGE()
    loop = asyncio.get_running_loop()
    body, is_whole = Body(loop), False
    room.bodies.append(body)
    try:
        while not is_whole:
            receiving: asyncio.Future[Any] = asyncio.ensure_future(request.receive())
            try:
                left = body.since + BODY_SECONDS - loop.time()
                await asyncio.wait({receiving, body.is_dropped}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            finally:
                is_late = receiving.cancel()
            if body.is_dropped.done():
                raise NO_ROOM()
            if is_late:
                raise Refused("the body comes too slowly", None, "request_timeout", 408)
            message = receiving.result()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError
            piece = message.get("body", b"")
            if len(body.data) + len(piece) > MOST_BYTES:
                raise TOO_LARGE()
            body.add(piece)
            room.make(0)
            is_whole = not message.get("more_body")
        if body.is_dropped.done():
            raise NO_ROOM()
        yield bytes(body.data)
    finally:
        room.bodies.remove(body)
