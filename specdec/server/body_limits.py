"""Limits on incoming request bodies: their size, their speed and the memory of all of them. Knows no models."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.requests import Request

from specdec.server.field_validation import OLLAMA_PREFIX, APIError

MAX_BODY_BYTES = 4 << 20
MAX_TOTAL_BODY_BYTES = 64 << 20  # of all bodies being received, not counting SMALL_BODY_BYTES of each
SMALL_BODY_BYTES = 64 << 10  # always accepted; a body up to this size does not wait for larger ones
BROWSER_HEADERS = ("origin", "referer", "sec-fetch-site")  # of a request that a page sends
BODY_TIMEOUT_S = 10.0  # for each SMALL_BODY_BYTES of a body
TOO_LARGE = partial(APIError, f"the body must have at most {MAX_BODY_BYTES >> 20} MiB", None, "request_too_large", 413)
BUFFER_FULL = partial(
    APIError, "the buffer for request bodies is full, and this one was slowest; send it again", None, "no_room", 429
)


class IncomingBody:
    """A request body that is being received in chunks.

    Attributes:
        data: The bytes received so far.
        last_progress: Event loop time when the last multiple of `SMALL_BODY_BYTES` was complete.
        dropped: A future that is done once the body is dropped to free memory for others.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start an empty body that makes progress now."""
        self.data, self.last_progress = bytearray(), loop.time()
        self.dropped: asyncio.Future[Any] = loop.create_future()
        self._loop = loop

    @property
    def n_counted_bytes(self) -> int:
        """Number of received bytes that count for the limit of all bodies, `MAX_TOTAL_BODY_BYTES`."""
        return max(len(self.data) - SMALL_BODY_BYTES, 0)

    def add(self, chunk: bytes) -> None:
        """Append received bytes to the body; set `last_progress` to now if they complete a multiple of SMALL_BODY_BYTES."""
        n = len(self.data)
        self.data.extend(chunk)
        if n // SMALL_BODY_BYTES < len(self.data) // SMALL_BODY_BYTES:
            self.last_progress = self._loop.time()


class BodyBuffer:
    """All request bodies that are being received; limits their memory against clients that send slowly or much."""

    def __init__(self) -> None:
        """Start without bodies."""
        self.bodies = list[IncomingBody]()

    def reserve(self, n_bytes: int) -> None:
        """Drop large bodies until n_bytes more bytes fit into `MAX_TOTAL_BODY_BYTES`; the longest without progress goes first.

        A dropped body loses its data, and its future `dropped` is done.
        """
        large = sorted((body for body in self.bodies if body.n_counted_bytes), key=lambda body: body.last_progress)
        n_bytes += sum(body.n_counted_bytes for body in large)
        for body in large:
            if n_bytes <= MAX_TOTAL_BODY_BYTES:
                return
            n_bytes -= body.n_counted_bytes
            body.data.clear()
            if not body.dropped.done():
                body.dropped.set_result(None)


@asynccontextmanager
async def read_body(request: Request, buffer: BodyBuffer) -> AsyncIterator[bytes]:
    """Receive the JSON body of a request and yield its bytes; they count for the buffer's memory inside the context.

    Raises:
        APIError: The body is of another type, too large or too slow, or was dropped to free memory.
        ConnectionResetError: The client has disconnected.
    """
    is_plain = request.headers.get("content-encoding", "identity").lower() in ("", "identity")
    if not is_plain or not (_has_json_type(request) or _is_ollama_client(request)):
        message = "the body must be uncompressed JSON with the header content-type: application/json"
        raise APIError(message, None, "unsupported_media_type", 415)
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > 18 or int(length) > MAX_BODY_BYTES:
        raise TOO_LARGE()
    loop = asyncio.get_running_loop()
    body, is_complete = IncomingBody(loop), False
    buffer.bodies.append(body)
    try:
        while not is_complete:
            next_event: asyncio.Future[Any] = asyncio.ensure_future(request.receive())
            try:
                seconds_left = body.last_progress + BODY_TIMEOUT_S - loop.time()
                await asyncio.wait({next_event, body.dropped}, timeout=seconds_left, return_when=asyncio.FIRST_COMPLETED)
            finally:
                is_late = next_event.cancel()
            if body.dropped.done():
                raise BUFFER_FULL()
            if is_late:
                raise APIError("the body was not received in time", None, "request_timeout", 408)
            event = next_event.result()
            if event["type"] == "http.disconnect":
                raise ConnectionResetError
            chunk = event.get("body", b"")
            if len(body.data) + len(chunk) > MAX_BODY_BYTES:
                raise TOO_LARGE()
            body.add(chunk)
            buffer.reserve(0)
            is_complete = not event.get("more_body")
        if body.dropped.done():
            raise BUFFER_FULL()
        yield bytes(body.data)
    finally:
        buffer.bodies.remove(body)


def _has_json_type(request: Request) -> bool:
    content_type: str = request.headers.get("content-type", "")
    return content_type.partition(";")[0].strip().lower() == "application/json"


def _is_ollama_client(request: Request) -> bool:
    """Return whether a request is for ollama's API and does not come from a browser, so that any content type is accepted.

    Clients of ollama may send any type, since ollama ignores it. A page of another site can also send a type other than JSON, for
    which browsers do not ask the server first (CORS). But its browser adds one of the `BROWSER_HEADERS`.
    """
    path: str = request.scope["path"]
    return path.startswith(OLLAMA_PREFIX) and not any(name in request.headers for name in BROWSER_HEADERS)
