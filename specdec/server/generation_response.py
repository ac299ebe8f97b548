"""The response of a generation request: streamed or complete, with cancellation when the client disconnects. Knows no paths."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from specdec.argument_checks import JSONObject
from specdec.events import Event
from specdec.server.access_control import Receive, Scope, Send, to_api_error
from specdec.server.fair_grammar_builds import ConstraintBuilder
from specdec.server.generation_fields import ServedModel, wrap_encoding_errors
from specdec.server.json_values import encode_json
from specdec.server.model_manager import ModelEntry, ModelInstance, ModelManager
from specdec.server.openai_chat import ParsedRequest
from specdec.server.response_formatter import ChoiceDelta, ResponseFormatter, format_sse_event, make_random_id

MAX_WRITE_BYTES = 64 << 10  # per write of a response, each with the listener's write timeout
PROGRESS_INTERVAL_S = 1.0  # between progress comments while a model is being loaded
HEARTBEAT_INTERVAL_S = 5.0  # between comments in a stream without output
RequestParser = Callable[[JSONObject, ServedModel], ParsedRequest]
Value = TypeVar("Value")


@dataclass(frozen=True)
class ServerState:
    """The state that all endpoints share.

    Attributes:
        model_manager: The served models.
        constraint_builder: Builds the constraints of structured output.
    """

    model_manager: ModelManager
    constraint_builder: ConstraintBuilder = field(default_factory=ConstraintBuilder)


@asynccontextmanager
async def acquire_model(
    model_manager: ModelManager,
    body: JSONObject,
    receive: Receive,
    on_loading: Callable[[ModelEntry], Awaitable[None]] | None = None,
) -> "AsyncIterator[tuple[ModelInstance, asyncio.Future[Any]]]":
    """Yield the loaded model that a request body names, and a future that is done when the client disconnects.

    Loads the model first if needed; it stays loaded inside the context.

    Args:
        model_manager: The models.
        body: The request's body.
        receive: The request's ASGI receive.
        on_loading: Called every `PROGRESS_INTERVAL_S` while the model is being loaded.

    Raises:
        APIError: There is no such model, or it cannot be loaded.
        ShutdownError: The server is shutting down.
        ConnectionResetError: The client has disconnected while the model was being loaded.
    """
    name = body.get("model")
    entry = await asyncio.to_thread(model_manager.acquire, name if isinstance(name, str) else "")
    disconnected = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        if not entry.instance:
            loading = asyncio.shield(asyncio.wrap_future(entry.loading))
            await wait_unless_disconnected(disconnected, loading, partial(on_loading, entry) if on_loading else None)
        assert entry.instance
        yield entry.instance, disconnected
    finally:
        disconnected.cancel()
        model_manager.release(entry)


async def _wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client disconnects; other messages from the client are dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def wait_unless_disconnected(
    disconnected: "asyncio.Future[Any]", task: "asyncio.Future[Value]", on_wait: Callable[[], Awaitable[None]] | None = None
) -> Value:
    """Wait for a task and return its result, unless the client disconnects first.

    Args:
        disconnected: Done once the client has disconnected.
        task: The task; it is cancelled if the wait ends before it is done.
        on_wait: Called every `PROGRESS_INTERVAL_S` until the task is done.

    Raises:
        ConnectionResetError: The client has disconnected.

    Also raises the error of the task.
    """
    try:
        while not task.done():
            if on_wait:
                await on_wait()
            await asyncio.wait([task, disconnected], timeout=PROGRESS_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
            if disconnected.done() and not task.done():
                raise ConnectionResetError
        return task.result()
    finally:
        task.cancel()
        # mark an error as retrieved: nobody waits for the result once the client has left
        task.add_done_callback(lambda done: done.cancelled() or done.exception())


class ResponseStreamer:
    """The ASGI response to a generation request: waits for its model, then sends the output as a stream or as a whole.

    A client that disconnects frees its slots. A stream reports the loading of the model.

    Args:
        state: The server's state.
        interface: Parser of the body, and class of the response.
        body: The request's body.
        permit: A context to enter while the body is parsed.
    """

    def __init__(
        self,
        state: ServerState,
        interface: tuple[RequestParser, type[ResponseFormatter]],
        body: JSONObject,
        permit: AbstractAsyncContextManager[None],
    ) -> None:
        """Store the request; it is parsed when the response starts."""
        self._state, (self._parse, self._formatter_class), self._body, self._permit = state, interface, body, permit
        self._events: asyncio.Queue[tuple[int, Event | Exception] | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._response: ResponseFormatter | None = None
        self._random_id, self._n_loading = make_random_id(), 0
        self._is_open = self._has_started = False  # the HTTP stream; the events of the response in it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Load the model, parse the body, generate the outputs and send the response.

        An error is always raised. In a stream that is open, it is also sent as the last event. The interface may also send one
        that is raised before the body is parsed as an event, with `format_rejection`.
        """
        self._send = send
        on_loading = self._send_progress if self._body.get("stream") is True else None
        try:
            async with acquire_model(self._state.model_manager, self._body, receive, on_loading) as (instance, disconnected):
                async with self._permit:
                    requests, options = await asyncio.to_thread(self._parse, self._body, instance.model)
                stream = self._random_id, self._n_loading
                self._response = self._formatter_class(self._body, requests, options, instance.model, *stream)
                await self._respond(self._response, instance, scope, disconnected)
        except OSError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            reject = self._formatter_class.format_rejection
            is_early = self._body.get("stream") is True and not self._response
            if is_early and (rejection := reject(to_api_error(error), self._random_id, self._n_loading)):
                await self._send_chunk(rejection, True)
            elif self._is_open:
                api_error = to_api_error(error)
                events = self._format_start()
                if self._response:
                    events += self._response.format_error(api_error)
                else:
                    events += format_sse_event(api_error.format_body(scope["path"]), "error")
                await self._send_chunk(events, True)
            raise

    async def _send_progress(self, entry: ModelEntry) -> None:
        text = f"loading {' '.join(entry.name.split())}, {entry.progress:.0%}"
        if chunk := self._formatter_class.format_loading(text, self._random_id, self._n_loading):
            self._n_loading += 1
            await self._send_chunk(chunk)

    async def _respond(
        self, response: ResponseFormatter, instance: ModelInstance, scope: Scope, disconnected: "asyncio.Future[Any]"
    ) -> None:
        disconnected.add_done_callback(lambda _: self._events.put_nowait(None))
        requests, grammar, client = response.requests, response.options.grammar, scope["api_client"]
        if grammar:
            build = asyncio.ensure_future(self._state.constraint_builder.build(grammar, client.name))
            with wrap_encoding_errors(response.model, grammar.request_field):
                constraint = await wait_unless_disconnected(disconnected, build)
            requests = await asyncio.to_thread(response.options.constrain, requests, constraint)
        handles = instance.engine.submit(requests, [partial(self._on_event, i) for i in range(len(requests))], client)
        try:
            await (self._send_stream if response.options.shared.is_stream else self._send_complete)(response)
            scope["notes"].append(f"{response.n_prompt}+{response.n_generated} tokens")
        finally:
            for handle in handles:
                handle.cancel()

    def _on_event(self, index: int, event: Event | Exception) -> None:
        """Pass an event of the output `index` from the engine's thread to the event loop, unless the loop has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    async def _iter_deltas(self, response: ResponseFormatter) -> AsyncIterator[tuple[int, ChoiceDelta] | None]:
        """Yield the index of an output and its delta for each event, until all outputs are finished.

        Yields None when there was no event for `HEARTBEAT_INTERVAL_S`.

        Raises:
            ConnectionResetError: The client has disconnected.
            APIError: The constraint cannot be satisfied.

        Also raises any other error of a sequence.
        """
        n_unfinished = len(response.choices)
        while n_unfinished:
            try:
                is_empty = self._events.empty()
                item = await asyncio.wait_for(self._events.get(), HEARTBEAT_INTERVAL_S) if is_empty else self._events.get_nowait()
            except asyncio.TimeoutError:
                yield None
                continue
            if item is None:
                raise ConnectionResetError
            index, event = item
            if isinstance(event, Exception):
                raise response.options.explain(event)
            delta = response.choices[index].process_event(event)
            n_unfinished -= delta.finish_reason is not None
            yield index, delta

    async def _send_complete(self, response: ResponseFormatter) -> None:
        deltas = [ChoiceDelta() for _ in response.choices]
        async for item in self._iter_deltas(response):
            if item:
                deltas[item[0]].add(item[1])
        # a large response takes a second to format, so a thread does it
        chunks = await asyncio.to_thread(lambda: [*split_body(encode_json(response.format_response(deltas)))])
        headers = [(b"content-type", b"application/json"), (b"content-length", str(sum(map(len, chunks))).encode())]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        for i, chunk in enumerate(chunks):
            await self._send({"type": "http.response.body", "body": chunk, "more_body": i + 1 < len(chunks)})

    async def _send_stream(self, response: ResponseFormatter) -> None:
        """Send the outputs as server-sent events while they are generated, with heartbeats when there are none for a while.

        The response starts with the first delta, so that an error before that gets an HTTP status.
        """
        self._last_sent = self._loop.time()
        async for item in self._iter_deltas(response):
            if item and item[1]:
                await self._send_chunk(self._format_start() + response.format_delta(*item))
            elif self._loop.time() - self._last_sent > HEARTBEAT_INTERVAL_S:
                await self._send_chunk(self._format_start() + response.format_heartbeat())
        await self._send_chunk(self._format_start() + response.format_end(), True)

    def _format_start(self) -> bytes:
        """Return the first events of the response, once; empty if they were returned before, or the request is not parsed yet."""
        if self._has_started or not self._response:
            return b""
        self._has_started = True
        return self._response.format_start()

    async def _send_chunk(self, chunk: bytes, is_last: bool = False) -> None:
        """Send a chunk of the event stream, after the HTTP headers if it is the first one."""
        if not self._is_open:
            self._is_open = True
            headers = [(b"content-type", self._formatter_class.media_type), (b"cache-control", b"no-store")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self._last_sent = self._loop.time()
        await self._send({"type": "http.response.body", "body": chunk, "more_body": not is_last})


def split_body(data: bytes) -> Iterator[bytes]:
    """Yield a response body in pieces of at most `MAX_WRITE_BYTES`."""
    for first in range(0, len(data), MAX_WRITE_BYTES):
        yield data[first : first + MAX_WRITE_BYTES]
