"""Requests to an app without a socket: what a client sends, when it leaves, what comes back."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LOCAL = {"host": "127.0.0.1:8080", "content-type": "application/json"}


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        assert "\n" not in error["message"] and "Traceback" not in error["message"]
        return error

    @property
    def events(self) -> list[Any]:
        """Of a stream that has come to its end."""
        *parts, done, rest = self.body.decode().split("\n\n")
        if parts and parts[0].startswith("event: "):  # by their names, of which the last ends it
            named = [part.partition("\ndata: ") for part in (*parts, done)]
            events = [json.loads(data) for _, _, data in named]
            assert [name for name, _, _ in named] == [f"event: {event['type']}" for event in events] and not rest
            return events
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(part.removeprefix("data: ")) for part in parts]


def ask(
    app: Any,
    path: str,
    body: Any = None,
    headers: Mapping[str, str | None] | None = None,
    method: str | None = None,
    pieces: Sequence[bytes] | None = None,
    leaves_after: int | None = None,
) -> Reply:
    """The reply to a request of a JSON value, or of a body in pieces, behind which nothing may come (None at the end).

    leaves_after: how many pieces of the reply the client takes.
    """
    data = list(pieces) if pieces is not None else [b"" if body is None else json.dumps(body).encode()]
    told = {name: value for name, value in {**LOCAL, **(headers or {})}.items() if value is not None}
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "scheme": "http",
        "method": method or ("GET" if body is None and pieces is None else "POST"), "path": path, "raw_path": path.encode(),
        "query_string": b"", "root_path": "", "server": ("127.0.0.1", 8080), "client": ("127.0.0.1", 1),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in told.items()],
    }  # fmt: skip
    reply = Reply(0, {}, b"")

    async def run() -> None:
        n_sent, gone = 0, asyncio.Event()
        if leaves_after == 0:
            gone.set()

        async def receive() -> Mapping[str, Any]:
            if data:
                piece = data.pop(0)
                return {"type": "http.request", "body": piece, "more_body": bool(data)}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Mapping[str, Any]) -> None:
            nonlocal n_sent
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                reply.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
            else:
                reply.body += message["body"]
                n_sent += 1
            if leaves_after is not None and n_sent >= leaves_after:
                gone.set()

        await asyncio.wait_for(app(scope, receive, send), 120)

    asyncio.run(run())
    return reply
