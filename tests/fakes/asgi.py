"""HTTP requests to an ASGI app without a socket."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LOCAL_HEADERS = {"host": "127.0.0.1:8080", "content-type": "application/json"}


@dataclass
class Response:
    """A response of the app."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """Return the parsed body."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """Return the error, and check its format."""
        error: dict[str, Any] = self.json["error"]
        assert set(error) - {"details"} == {"message", "type", "param", "code"} and error["message"]
        assert "\n" not in error["message"] and "Traceback" not in error["message"]
        return error

    @property
    def events(self) -> list[Any]:
        """Return the events of a complete stream."""
        *parts, last, tail = self.body.decode().split("\n\n")
        if parts and parts[0].startswith("event: "):  # named events, without [DONE]
            events_by_name = [part.partition("\ndata: ") for part in (*parts, last)]
            events = [json.loads(data) for _, _, data in events_by_name]
            assert [name for name, _, _ in events_by_name] == [f"event: {event['type']}" for event in events] and not tail
            return events
        assert (last, tail) == ("data: [DONE]", "")
        return [json.loads(part.removeprefix("data: ")) for part in parts]


def send_request(
    app: Any,
    path: str,
    body: Any = None,
    headers: Mapping[str, str | None] | None = None,
    method: str | None = None,
    chunks: Sequence[bytes] | None = None,
    disconnect_after: int | None = None,
) -> Response:
    """Send a request with a JSON body, or with a body in chunks, and return the response.

    Args:
        app: The app.
        path: The path.
        body: The JSON value.
        headers: Headers that replace the default ones; None removes one.
        method: The method; by default GET without a body and POST with one.
        chunks: Chunks of a raw body. After them the client sends nothing.
        disconnect_after: Number of response chunks after which the client disconnects.
    """
    data = list(chunks) if chunks is not None else [b"" if body is None else json.dumps(body).encode()]
    all_headers = {name: value for name, value in {**LOCAL_HEADERS, **(headers or {})}.items() if value is not None}
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "scheme": "http",
        "method": method or ("GET" if body is None and chunks is None else "POST"), "path": path, "raw_path": path.encode(),
        "query_string": b"", "root_path": "", "server": ("127.0.0.1", 8080), "client": ("127.0.0.1", 1),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in all_headers.items()],
    }  # fmt: skip
    response = Response(0, {}, b"")

    async def run() -> None:
        n_sent, disconnected = 0, asyncio.Event()
        if disconnect_after == 0:
            disconnected.set()

        async def receive() -> Mapping[str, Any]:
            if data:
                chunk = data.pop(0)
                return {"type": "http.request", "body": chunk, "more_body": bool(data)}
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def send(message: Mapping[str, Any]) -> None:
            nonlocal n_sent
            if message["type"] == "http.response.start":
                response.status = message["status"]
                response.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
            else:
                response.body += message["body"]
                n_sent += 1
            if disconnect_after is not None and n_sent >= disconnect_after:
                disconnected.set()

        await asyncio.wait_for(app(scope, receive, send), 120)

    asyncio.run(run())
    return response
