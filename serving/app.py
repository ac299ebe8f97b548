"""The server's answers: one function a path. Knows requests and answers, an engine, and nothing of sockets."""

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from ..decoding import Event, Shape
from ..text.shapes import ShapeError
from .answers import Answer, Delta
from .asked import Asked, Model, chat_asked, completion_asked, encoding
from .building import Builder, Busy, Turns
from .embeddings import embeddings_asked
from .engine import Client, Closed, Engine, Failed, Full, Job, Ticket
from .fields import Refused, body_of
from .guard import FAILED, App, Receive, Scope, Send, refusal
from .messages import messages_asked, tokens_counted
from .metrics import exposition
from .responses import response_asked
from .tokens import detokenized, tokenized

PAGE = Path(__file__).with_name("page.html")
MOST_BYTES, MOST_OF_ALL_BYTES = 4 << 20, 64 << 20  # of a body; of all that are being read, without what is small of each
SMALL_BYTES = 64 << 10  # of a body: so much of any is read, and one that is no larger waits for no larger one
LARGE_AT_ONCE = 1  # other bodies of which tokens are made: small ones have another process then
BODY_SECONDS = 10.0  # that a client may take for so much of a body
PIECE_BYTES = 64 << 10  # of an answer that is sent at once: each has a reader's seconds
SIGN_OF_LIFE_SECONDS = 5.0  # between comments in a stream that has nothing to say
Read = Callable[[Mapping[str, Any], Model], Asked]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Service:
    """What the paths share.

    fingerprint: what answers depend on beside the model; created: when, in Unix seconds.
    """

    model: Model
    engine: Engine
    fingerprint: str
    created: int


def app_of(service: Service) -> App:
    """All paths."""
    page, policy = _page()
    model, room, building, large = service.model, Room(), Builder(), Turns(LARGE_AT_ONCE)

    async def show_page(_: Request) -> Response:
        headers = {"content-security-policy": policy, "referrer-policy": "no-referrer", "x-frame-options": "DENY"}
        return HTMLResponse(page, headers=headers)

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(exposition(service.engine.figures), media_type="text/plain; version=0.0.4")

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [told_of(service)]})

    async def one_model(request: Request) -> Response:
        if request.path_params["name"] != model.name:
            raise Refused(f"there is no such model here; there is {model.name}", "model", "model_not_found", 404)
        return JSONResponse(told_of(service))

    async def read_by(read: Callable[[Mapping[str, Any], Model], Value], request: Request) -> Value:
        async with body_of_bytes(request, room) as data:
            reading = large.of(request.scope["who"].name) if len(data) > SMALL_BYTES else nullcontext()
            async with reading:  # what makes tokens of large ones would keep small ones waiting
                return await asyncio.to_thread(lambda: read(body_of(data), model))

    def writing(read: Read) -> Callable[[Request], Awaitable[Any]]:
        async def write(request: Request) -> Any:
            return Writing(service, building, await read_by(read, request))

        return write

    def telling(read: Callable[[Mapping[str, Any], Model], Any]) -> Callable[[Request], Awaitable[Response]]:
        async def tell(request: Request) -> Response:
            return JSONResponse(await read_by(read, request))

        return tell

    async def embed(request: Request) -> Response:
        asked, who = await read_by(embeddings_asked, request), request.scope["who"]
        try:
            vectors = await leaving(request, asyncio.gather(*map(asyncio.wrap_future, service.engine.beside(asked.work, who))))
        except Full:
            raise FULL() from None
        except Closed:
            raise CLOSING() from None
        answer = await asyncio.to_thread(lambda: json_of(asked.answer(vectors, model.name)))
        return Response(answer, media_type="application/json")

    routes = [
        Route("/", show_page),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model),
        Route("/v1/chat/completions", writing(chat_asked), methods=["POST"]),
        Route("/v1/completions", writing(completion_asked), methods=["POST"]),
        Route("/v1/embeddings", embed, methods=["POST"]),
        Route("/v1/messages", writing(messages_asked), methods=["POST"]),
        Route("/v1/messages/count_tokens", telling(tokens_counted), methods=["POST"]),
        Route("/v1/responses", writing(response_asked), methods=["POST"]),
        Route("/tokenize", telling(tokenized), methods=["POST"]),
        Route("/detokenize", telling(detokenized), methods=["POST"]),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: wrong, Refused: wrong, Exception: wrong})

    async def without_slash(scope: Scope, receive: Receive, send: Send) -> None:
        """A path means the same with a slash at its end: nobody is sent elsewhere."""
        await app({**scope, "path": scope["path"].rstrip("/") or "/"}, receive, send)

    return without_slash


async def wrong(request: Request, error: Exception) -> Response:
    """What an error is told as."""
    if isinstance(error, HTTPException):
        words = {404: "there is nothing at this path", 405: "this path does not take this method"}
        error = Refused(words.get(error.status_code, error.detail), None, None, error.status_code)
    if isinstance(error, Refused):
        request.scope["notes"].append(error.note)
    return refusal(error if isinstance(error, Refused) else FAILED())


# made anew each time: an exception holds on to the frames that raised it, and so to what is in them
FULL = partial(Refused, "as many requests wait as may; ask again later", None, "queue_full", 429, "rate_limit_error")
CLOSING = partial(Refused, "the server is shutting down", None, "shutting_down", 503)
NO_JSON = partial(Refused, "the body has to be application/json", None, "unsupported_media_type", 415)
TOO_LARGE = partial(Refused, f"the body has more than {MOST_BYTES >> 20} MiB", None, "request_too_large", 413)
TOO_SLOW = partial(Refused, "the body comes too slowly", None, "request_timeout", 408)
NO_ROOM = partial(
    Refused,
    "the bodies of others take all room, and this one came slowest; send it again",
    None,
    "no_room",
    429,
    "rate_limit_error",
)
SLOW_SHAPES = partial(
    Refused,
    "shapes of this client, or of many, take long to build; ask again later, or for a smaller one",
    "response_format",
    "shapes_busy",
    429,
    "rate_limit_error",
)


async def leaving(request: Request, working: "asyncio.Future[Value]") -> Value:
    """What work comes to, unless the client leaves, which ends it. Raises ConnectionResetError then."""
    gone: asyncio.Future[Any] = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ConnectionResetError
        return working.result()
    finally:
        gone.cancel()
        working.cancel()


def told_of(service: Service) -> dict[str, Any]:
    """The model, as OpenAI tells of one; and what the page has to know."""
    decoder = service.model.decoder
    more = {
        "context": decoder.n_positions,
        "weights": decoder.weights,
        "has_draft": decoder.has_draft,
        "can_chat": service.model.template is not None,
    }
    return {"id": service.model.name, "object": "model", "created": service.created, "owned_by": "specdec", "specdec": more}


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
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise NO_JSON()
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
                if not receiving.done():
                    receiving.cancel()
            if body.is_dropped.done():
                raise NO_ROOM()
            if not receiving.done():
                raise TOO_SLOW()
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


class Writing:
    """A request's texts are written and sent, as they come or whole. A client that leaves frees their places."""

    def __init__(self, service: Service, building: Builder, asked: Asked) -> None:
        self._service, self._building, self._asked = service, building, asked
        self._answer = (asked.form or Answer)(asked, service.model, service.fingerprint)
        self._events: asyncio.Queue[tuple[int, Event | Failed] | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._tickets: Sequence[Ticket] = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        notes: list[str] = scope["notes"]
        watching = asyncio.ensure_future(self._watch(receive))
        try:
            jobs = [replace(job, shape=await self._shape(scope["who"], watching)) for job in self._asked.jobs]
            self._submit(jobs, scope["who"])
            if self._asked.is_stream:
                await self._stream(send)
            else:
                await self._whole(send)
            notes.append(f"{self._answer.n_prompt}+{self._answer.n_text} tokens")
        finally:
            watching.cancel()
            for ticket in self._tickets:
                ticket.cancel()

    async def _shape(self, who: Client, leaving: "asyncio.Future[Any]") -> Shape | None:
        """What the texts may say. Raises Refused, and ConnectionResetError once the client has left."""
        if not self._asked.grammar:
            return None
        building: asyncio.Future[Any] = asyncio.ensure_future(self._building.built(self._asked.grammar, who.name))
        await asyncio.wait({building, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not building.done():
            building.cancel()
            raise ConnectionResetError
        try:
            with encoding(self._service.model, self._asked.grammar.param):
                shape: Shape = building.result()
                return shape
        except Busy:
            raise SLOW_SHAPES() from None

    def _submit(self, jobs: Sequence[Job], who: Client) -> None:
        """Raises Refused where there is no room, or no more."""
        hears = [partial(self._hear, i) for i in range(len(jobs))]
        try:
            self._tickets = self._service.engine.submit_all(jobs, hears, who)
        except Full:
            raise FULL() from None
        except Closed:
            raise CLOSING() from None
        except ValueError as error:
            raise Refused(str(error)) from None

    def _hear(self, index: int, event: Event | Failed) -> None:
        """Called by the engine's thread, maybe when nobody listens any more."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    async def _watch(self, receive: Receive) -> None:
        """Tells when the client has left."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._events.put_nowait(None)

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
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
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
            if has_begun:
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


def _page() -> tuple[str, str]:
    """The page, and the policy that lets its own style and script run, and nothing else."""
    page = PAGE.read_text(encoding="utf-8")

    def source(tag: str) -> str:
        inside = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        hashes = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in inside]
        return " ".join(f"'sha256-{each}'" for each in hashes)

    return page, (
        f"default-src 'none'; script-src {source('script')}; style-src {source('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
