"""A request's answer is sent, as it comes or whole, once its model is there; who leaves frees its places. Knows no paths."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from ..decoding import Event, Job, Shape
from ..text.shapes import ShapeError
from .answers import Answer, Delta, event
from .asked import Asked, Model, encoding
from .building import Builder, Busy
from .engine import Client, Closed, Failed, Full, Ticket
from .fields import Refused
from .guard import FAILED, Receive, Scope, Send
from .shelf import Place, Served, Shelf

PIECE_BYTES = 64 << 10  # of an answer that is sent at once: each has a reader's seconds
LOADING_SECONDS = 1.0  # between words of a model that is being loaded
SIGN_OF_LIFE_SECONDS = 5.0  # between comments in a stream that has nothing to say
STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
Value = TypeVar("Value")
# made anew each time: an exception holds on to the frames that raised it, and so to what is in them
FULL = partial(Refused, "as many requests wait as may; ask again later", None, "queue_full", 429)
CLOSING = partial(Refused, "the server is shutting down", None, "shutting_down", 503)
SLOW_SHAPES = partial(
    Refused,
    "shapes of this client, or of many, take long to build; ask again later, or for a smaller one",
    "response_format",
    "shapes_busy",
    429,
)


@asynccontextmanager
async def place_of(shelf: Shelf, body: Mapping[str, Any]) -> AsyncIterator[Place]:
    """That of the model that a body names."""
    name = body.get("model")
    place = await asyncio.to_thread(shelf.begin, name if isinstance(name, str) else "")
    try:
        yield place
    finally:
        shelf.end(place)


@asynccontextmanager
async def watched(receive: Receive) -> "AsyncIterator[asyncio.Future[Any]]":
    """What is done once the client has left."""

    async def leaves() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.ensure_future(leaves())
    try:
        yield leaving
    finally:
        leaving.cancel()


async def unless(
    leaving: "asyncio.Future[Any]", working: "asyncio.Future[Value]", tell: Callable[[], Awaitable[None]] | None = None
) -> Value:
    """What work comes to; tell is awaited now and then. Raises ConnectionResetError once the client has left, which ends it."""
    try:
        while not working.done():
            if tell:
                await tell()
            await asyncio.wait([working, leaving], timeout=LOADING_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if leaving.done() and not working.done():
                raise ConnectionResetError
        return working.result()
    finally:
        working.cancel()


async def loaded(place: Place, leaving: "asyncio.Future[Any]", tell: Callable[[], Awaitable[None]] | None = None) -> Served:
    """A model, once it is loaded, as `unless` has it."""
    if served := place.served:
        return served
    try:
        return await unless(leaving, asyncio.shield(asyncio.wrap_future(place.loading)), tell)
    except Refused as error:
        raise Refused(str(error), error.param, error.code, error.status) from None


@contextmanager
def asking() -> Iterator[None]:
    """Around what an engine is asked for. Raises Refused where there is no room, or no more."""
    try:
        yield
    except Full:
        raise FULL() from None
    except Closed:
        raise CLOSING() from None
    except ValueError as error:
        raise Refused(str(error)) from None


class Answering:
    """A request to write, once its model is loaded: who waits for that in a stream is told."""

    def __init__(
        self,
        shelf: Shelf,
        fingerprint: str,
        building: Builder,
        read: Callable[[Mapping[str, Any], Model], Asked],
        body: Mapping[str, Any],
        turn: AbstractAsyncContextManager[None],
    ) -> None:
        self._shelf, self._fingerprint, self._building = shelf, fingerprint, building
        self._read, self._body, self._turn = read, body, turn
        self._is_open = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with place_of(self._shelf, self._body) as place, watched(receive) as leaving:

            async def tell() -> None:
                await self._open(send)
                told = f": loading {' '.join(place.name.split())}, {place.share:.0%}\n\n"
                await send({"type": "http.response.body", "body": told.encode(), "more_body": True})

            try:
                served = await loaded(place, leaving, tell if self._body.get("stream") is True else None)
                async with self._turn:
                    asked = await asyncio.to_thread(self._read, self._body, served.model)
            except Exception as error:
                if self._is_open and not isinstance(error, OSError):
                    told = error if isinstance(error, Refused) else FAILED()
                    await send({"type": "http.response.body", "body": event(told.body, "error"), "more_body": False})
                raise
            await Writing(served, self._fingerprint, self._building, asked, self._is_open)(scope, leaving, send)

    async def _open(self, send: Send) -> None:
        if not self._is_open:
            self._is_open = True
            await send({"type": "http.response.start", "status": 200, "headers": STREAM})


class Writing:
    """A request's texts are written and sent, as they come or whole. A client that leaves frees their places."""

    def __init__(self, served: Served, fingerprint: str, building: Builder, asked: Asked, is_open: bool) -> None:
        self._served, self._building, self._asked, self._is_open = served, building, asked, is_open
        self._answer = (asked.form or Answer)(asked, served.model, fingerprint)
        self._events: asyncio.Queue[tuple[int, Event | Failed] | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._tickets: Sequence[Ticket] = ()

    async def __call__(self, scope: Scope, leaving: "asyncio.Future[Any]", send: Send) -> None:
        notes: list[str] = scope["notes"]
        leaving.add_done_callback(lambda _: self._events.put_nowait(None))
        try:
            jobs = [replace(job, shape=await self._shape(scope["who"], leaving)) for job in self._asked.jobs]
            self._submit(jobs, scope["who"])
            if self._asked.is_stream:
                await self._stream(send)
            else:
                await self._whole(send)
            notes.append(f"{self._answer.n_prompt}+{self._answer.n_text} tokens")
        finally:
            for ticket in self._tickets:
                ticket.cancel()

    async def _shape(self, who: Client, leaving: "asyncio.Future[Any]") -> Shape | None:
        """What the texts may say. Raises Refused, and ConnectionResetError once the client has left."""
        if not self._asked.grammar:
            return None
        building = asyncio.ensure_future(self._building.built(self._asked.grammar, who.name))
        try:
            with encoding(self._served.model, self._asked.grammar.param):
                return await unless(leaving, building)
        except Busy:
            raise SLOW_SHAPES() from None

    def _submit(self, jobs: Sequence[Job], who: Client) -> None:
        """Raises Refused where there is no room, or no more."""
        hears = [partial(self._hear, i) for i in range(len(jobs))]
        with asking():
            self._tickets = self._served.engine.submit_all(jobs, hears, who)

    def _hear(self, index: int, event: Event | Failed) -> None:
        """Called by the engine's thread, maybe when nobody listens any more."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    async def _deltas(self) -> AsyncIterator[tuple[int, Delta] | None]:
        """What the texts grow by, until all have ended; None where nothing has come for a while.

        Raises ConnectionResetError once the client has left, and what a text failed with.
        """
        left = len(self._asked.jobs)
        while left:
            try:
                waits = self._events.empty()
                told = await asyncio.wait_for(self._events.get(), SIGN_OF_LIFE_SECONDS) if waits else self._events.get_nowait()
            except asyncio.TimeoutError:
                yield None
                continue
            if told is None:
                raise ConnectionResetError
            index, event = told
            if isinstance(event, Failed):
                if isinstance(event.error, ShapeError):
                    raise Refused(str(event.error), self._asked.grammar.param if self._asked.grammar else "response_format")
                raise event.error
            delta = self._answer.choices[index].takes(event)
            left -= delta.finish is not None
            yield index, delta

    async def _whole(self, send: Send) -> None:
        deltas = [Delta() for _ in self._asked.jobs]
        async for told in self._deltas():
            if told:
                deltas[told[0]].add(told[1])
        # a large one takes a second, in which others are to be answered
        pieces = await asyncio.to_thread(lambda: [*_pieces(json_of(self._answer.whole(deltas)))])
        headers = [(b"content-type", b"application/json"), (b"content-length", str(sum(map(len, pieces))).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for i, piece in enumerate(pieces):
            await send({"type": "http.response.body", "body": piece, "more_body": i + 1 < len(pieces)})

    async def _stream(self, send: Send) -> None:
        """Begins with what the prompt's end shows, so that what cannot be written is refused by a status."""
        has_begun, last_sent = False, self._loop.time()

        async def out(told: Callable[[], bytes], is_last: bool = False) -> None:
            nonlocal has_begun, last_sent
            last_sent, first = self._loop.time(), b""
            if not has_begun:
                has_begun, first = True, self._answer.begins()
                if not self._is_open:
                    await send({"type": "http.response.start", "status": 200, "headers": STREAM})
            await send({"type": "http.response.body", "body": first + told(), "more_body": not is_last})

        try:
            async for told in self._deltas():
                if told and told[1]:
                    await out(partial(self._answer.grows, *told))
                elif self._loop.time() - last_sent > SIGN_OF_LIFE_SECONDS:
                    await out(lambda: b": waiting\n\n")
        except OSError:
            raise
        except Exception as error:
            if has_begun or self._is_open:
                told_error = error if isinstance(error, Refused) else FAILED()
                await out(lambda: self._answer.fails(told_error), True)
            raise
        await out(self._answer.ends, True)


def _pieces(data: bytes) -> Iterator[bytes]:
    for first in range(0, len(data), PIECE_BYTES):
        yield data[first : first + PIECE_BYTES]


def json_of(value: Any) -> bytes:
    """Written a part at a time, between which other threads get on."""
    return "".join(json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).iterencode(value)).encode()
