"""A request's answer is sent, as it comes or whole, once its model is there; who leaves frees its places. Knows no paths."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from specdec.engine.decoding import Event
from specdec.server.auth import Receive, Scope, Send, told_as
from specdec.server.model_manager import Place, Served, Shelf
from specdec.server.openai_outputs import Answer, Delta, Form, event
from specdec.server.openai_requests import Asked, Model, encoding
from specdec.server.schema_builder import Builder
from specdec.server.validation import Refused, refusing
from specdec.text.structured_output import ShapeError

PIECE_BYTES = 64 << 10  # of an answer that is sent at once: each has a reader's seconds
LOADING_SECONDS = 1.0  # between words of a model that is being loaded
SIGN_OF_LIFE_SECONDS = 5.0  # between comments in a stream that has nothing to say
STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Service:
    """What the paths share. fingerprint: what answers depend on beside the model."""

    shelf: Shelf
    fingerprint: str
    building: Builder = field(default_factory=Builder)


@asynccontextmanager
async def asked_model(
    shelf: Shelf, body: Mapping[str, Any], receive: Receive, tell: Callable[[Place], Awaitable[None]] | None = None
) -> "AsyncIterator[tuple[Served, asyncio.Future[Any]]]":
    """The model that a body names, once it is loaded, of which tell is told until then; and what is done once the client has
    left."""
    name = body.get("model")
    place = await asyncio.to_thread(shelf.begin, name if isinstance(name, str) else "")
    leaving = asyncio.ensure_future(_left(receive))
    try:
        yield await _loaded(place, leaving, partial(tell, place) if tell else None), leaving
    finally:
        leaving.cancel()
        shelf.end(place)


async def _left(receive: Receive) -> None:
    """Until the client has."""
    while (await receive())["type"] != "http.disconnect":
        pass


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
        working.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever has left is told of none


async def _loaded(place: Place, leaving: "asyncio.Future[Any]", tell: Callable[[], Awaitable[None]] | None = None) -> Served:
    """A model, once it is loaded, as `unless` has it."""
    if served := place.served:
        return served
    try:
        return await unless(leaving, asyncio.shield(asyncio.wrap_future(place.loading)), tell)
    except Refused as error:
        raise Refused(str(error), error.param, error.code, error.status) from None


class Answering:
    """A request to write: its model is loaded, of which a stream is told, and its texts are sent, as they come or whole. A client
    that leaves frees their places."""

    def __init__(
        self,
        service: Service,
        read: Callable[[Mapping[str, Any], Model], Asked],
        body: Mapping[str, Any],
        turn: AbstractAsyncContextManager[None],
    ) -> None:
        self._service, self._read, self._body, self._turn = service, read, body, turn
        self._events: asyncio.Queue[tuple[int, Event | Exception] | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._answer: Form | None = None
        self._is_open = self._has_begun = False  # the stream; what it tells of the answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send, self._path, tell = send, scope["path"], self._loads if self._body.get("stream") is True else None
        try:
            async with asked_model(self._service.shelf, self._body, receive, tell) as (served, leaving):
                async with self._turn:
                    asked = await asyncio.to_thread(self._read, self._body, served.model)
                self._answer = (asked.form or Answer)(asked, served.model, self._service.fingerprint)
                await self._write(self._answer, served, scope, leaving)
        except OSError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            if self._is_open:
                await self._out(partial(self._fails, told_as(error)), True)
            raise

    def _fails(self, error: Refused) -> bytes:
        return self._answer.fails(error) if self._answer else event(error.body(self._path), "error")

    async def _loads(self, place: Place) -> None:
        told = f": loading {' '.join(place.name.split())}, {place.share:.0%}\n\n"
        await self._out(told.encode)

    async def _write(self, answer: Form, served: Served, scope: Scope, leaving: "asyncio.Future[Any]") -> None:
        leaving.add_done_callback(lambda _: self._events.put_nowait(None))
        shape, grammar, who = None, answer.asked.grammar, scope["who"]
        if grammar:
            building = asyncio.ensure_future(self._service.building.built(grammar, who.name))
            with encoding(answer.model, grammar.param):
                shape = await unless(leaving, building)
        jobs = [replace(job, shape=shape) for job in answer.asked.jobs]
        with refusing(None):
            tickets = served.engine.submit(jobs, [partial(self._hear, i) for i in range(len(jobs))], who)
        try:
            await (self._stream if answer.asked.is_stream else self._whole)(answer)
            scope["notes"].append(f"{answer.n_prompt}+{answer.n_text} tokens")
        finally:
            for ticket in tickets:
                ticket.cancel()

    def _hear(self, index: int, event: Event | Exception) -> None:
        """Called by the engine's thread, maybe when nobody listens any more."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    async def _deltas(self, answer: Form) -> AsyncIterator[tuple[int, Delta] | None]:
        """What the texts grow by, until all have ended; None where nothing has come for a while.

        Raises ConnectionResetError once the client has left, and what a text failed with.
        """
        left = len(answer.asked.jobs)
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
            if isinstance(event, Exception):
                if isinstance(event, ShapeError):
                    grammar = answer.asked.grammar
                    raise Refused(str(event), grammar.param if grammar else "response_format")
                raise event
            delta = answer.choices[index].takes(event)
            left -= delta.finish is not None
            yield index, delta

    async def _whole(self, answer: Form) -> None:
        deltas = [Delta() for _ in answer.asked.jobs]
        async for told in self._deltas(answer):
            if told:
                deltas[told[0]].add(told[1])
        # a large one takes a second, in which others are to be answered
        pieces = await asyncio.to_thread(lambda: [*_pieces(json_of(answer.whole(deltas)))])
        headers = [(b"content-type", b"application/json"), (b"content-length", str(sum(map(len, pieces))).encode())]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        for i, piece in enumerate(pieces):
            await self._send({"type": "http.response.body", "body": piece, "more_body": i + 1 < len(pieces)})

    async def _stream(self, answer: Form) -> None:
        """Begins with what the prompt's end shows, so that what cannot be written is refused by a status."""
        self._last_sent = self._loop.time()
        async for told in self._deltas(answer):
            if told and told[1]:
                await self._out(partial(answer.grows, *told))
            elif self._loop.time() - self._last_sent > SIGN_OF_LIFE_SECONDS:
                await self._out(lambda: b": waiting\n\n")
        await self._out(answer.ends, True)

    async def _out(self, tell: Callable[[], bytes], is_last: bool = False) -> None:
        """A piece of the stream, before the first of which it is opened, and of an answer's begins."""
        if not self._is_open:
            self._is_open = True
            await self._send({"type": "http.response.start", "status": 200, "headers": STREAM})
        self._last_sent, first = self._loop.time(), b""
        if self._answer and not self._has_begun:
            self._has_begun, first = True, self._answer.begins()
        await self._send({"type": "http.response.body", "body": first + tell(), "more_body": not is_last})


def _pieces(data: bytes) -> Iterator[bytes]:
    for first in range(0, len(data), PIECE_BYTES):
        yield data[first : first + PIECE_BYTES]


def json_of(value: Any) -> bytes:
    """Written a part at a time, between which other threads get on; half a character as `event` does."""
    told = "".join(json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).iterencode(value))
    return told.encode(errors="backslashreplace")
