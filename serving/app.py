"""The server's answers: one function a path. Knows requests and answers, an engine, and nothing of sockets."""

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from ..decoding import Event
from .answers import Answer, Delta
from .asked import Asked, Model, Refused, body_of, chat_asked, completion_asked
from .engine import Closed, Engine, Failed, Full, Ticket
from .guard import FAILED, App, Receive, Scope, Send, refusal
from .metrics import exposition

PAGE = Path(__file__).with_name("page.html")
MOST_BYTES, MOST_OF_ALL_BYTES = 4 << 20, 64 << 20  # of a body; of all that are being read
BODY_SECONDS, SEND_SECONDS = 30.0, 30.0  # that a client may take for a body, and for reading what it was sent
SIGN_OF_LIFE_SECONDS = 10.0  # between comments in a stream that has nothing to say yet
DONE = b"data: [DONE]\n\n"
Value = TypeVar("Value")
Read = Callable[[Mapping[str, Any], Model], Asked]


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
    model, room = service.model, Room()

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

    def writing(read: Read) -> Callable[[Request], Awaitable[Any]]:
        async def write(request: Request) -> Any:
            async with body_of_bytes(request, room) as data:
                return Writing(service, await asyncio.to_thread(lambda: read(body_of(data), model)))

        return write

    async def wrong(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            words = {404: "there is nothing at this path", 405: "this path does not take this method"}
            error = Refused(words.get(error.status_code, error.detail), None, None, error.status_code)
        if isinstance(error, Refused):
            request.scope["notes"].append(error.code or "")
        return refusal(error if isinstance(error, Refused) else FAILED())

    routes = [
        Route("/", show_page),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model),
        Route("/v1/chat/completions", writing(chat_asked), methods=["POST"]),
        Route("/v1/completions", writing(completion_asked), methods=["POST"]),
    ]
    app: App = Starlette(routes=routes, exception_handlers={HTTPException: wrong, Refused: wrong, Exception: wrong})
    return app


# made anew each time: an exception holds on to the frames that raised it, and so to what is in them
FULL = partial(Refused, "as many requests wait as may; ask again later", None, "queue_full", 429, "rate_limit_error")
CLOSING = partial(Refused, "the server is shutting down", None, "shutting_down", 503)
NO_JSON = partial(Refused, "the body has to be application/json", None, "unsupported_media_type", 415)
TOO_LARGE = partial(Refused, f"the body has more than {MOST_BYTES >> 20} MiB", None, "request_too_large", 413)
TOO_SLOW = partial(Refused, f"the body did not come within {BODY_SECONDS:.0f} s", None, "request_timeout", 408)


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


class Room:
    """What all bodies together may take, of clients that send slowly or much."""

    def __init__(self) -> None:
        self.n_bytes = 0

    def take(self, n: int) -> None:
        """Raises Refused where there is no more of it."""
        if self.n_bytes + n > MOST_OF_ALL_BYTES:
            raise FULL()
        self.n_bytes += n


@asynccontextmanager
async def body_of_bytes(request: Request, room: Room) -> AsyncIterator[bytes]:
    """All of a body of JSON. Raises Refused for one of another kind, that is too large or comes too slowly."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise NO_JSON()
    size = request.headers.get("content-length", "0")
    if not size.isdecimal() or len(size) > 18 or int(size) > MOST_BYTES:
        raise TOO_LARGE()
    data = bytearray()

    async def read() -> None:
        is_whole = False
        while not is_whole:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError
            piece = message.get("body", b"")
            if len(data) + len(piece) > MOST_BYTES:
                raise TOO_LARGE()
            room.take(len(piece))
            data.extend(piece)
            is_whole = not message.get("more_body")

    try:
        try:
            await asyncio.wait_for(read(), BODY_SECONDS)
        except asyncio.TimeoutError:
            raise TOO_SLOW() from None
        yield bytes(data)
    finally:
        room.n_bytes -= len(data)


class Writing:
    """A request's texts are written and sent, as they come or whole. A client that leaves frees their places."""

    def __init__(self, service: Service, asked: Asked) -> None:
        self._engine, self._asked = service.engine, asked
        self._answer = Answer(asked, service.model, service.fingerprint)
        self._events: asyncio.Queue[tuple[int, Event | Failed] | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._tickets = list[Ticket]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        notes: list[str] = scope["notes"]
        watching = asyncio.ensure_future(self._watch(receive))
        try:
            self._submit()
            if self._asked.is_stream:
                await self._stream(send)
            else:
                await self._whole(scope, receive, send)
            usage = self._answer.usage
            notes.append(f"{usage['prompt_tokens']}+{usage['completion_tokens']} tokens")
        finally:
            watching.cancel()
            for ticket in self._tickets:
                ticket.cancel()

    def _submit(self) -> None:
        """Raises Refused where there is no room, or no more."""
        try:
            for i, job in enumerate(self._asked.jobs):
                self._tickets.append(self._engine.submit(job, lambda event, i=i: self._hear(i, event)))  # type: ignore[misc]
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
                raise event.error
            delta = self._answer.choices[index].takes(event)
            left -= delta.finish is not None
            yield index, delta

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        deltas = [Delta() for _ in self._asked.jobs]
        async for told in self._deltas():
            if told:
                deltas[told[0]].add(told[1])
        await _in_time(JSONResponse(self._answer.whole(deltas))(scope, receive, send))

    async def _stream(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def out(data: bytes, is_last: bool = False) -> None:
            await _in_time(send({"type": "http.response.body", "body": data, "more_body": not is_last}))

        if self._asked.is_chat:
            await out(b"".join(_event(self._answer.opening(i)) for i in range(len(self._asked.jobs))))
        try:
            async for told in self._deltas():
                if told is None:
                    await out(b": waiting\n\n")
                elif told[1]:
                    await out(_event(self._answer.chunk(*told)))
        except OSError:
            raise
        except Exception:
            await out(_event(FAILED().body) + DONE, True)
            raise
        last = self._answer.last_chunk()
        await out((_event(last) if last else b"") + DONE, True)


async def _in_time(sending: Awaitable[Value]) -> Value:
    """Raises ConnectionResetError for a client that does not read."""
    try:
        return await asyncio.wait_for(sending, SEND_SECONDS)
    except asyncio.TimeoutError:
        raise ConnectionResetError from None


def _event(value: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


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
