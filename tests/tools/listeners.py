"""A listener on a free port, and raw requests to it."""

import contextlib
import http.client
from collections.abc import Iterator
from typing import Any

from specdec.server.access_control import AuthMiddleware
from specdec.server.listener import Listener, bind_socket


@contextlib.contextmanager
def listener(app: Any, log: list[str], grace: float = 0.0) -> Iterator[tuple[str, int]]:
    """Serve an app in this process and yield its address."""
    with bind_socket("127.0.0.1", 0) as sock:
        address = sock.getsockname()
        sock.listen()
        server = Listener(AuthMiddleware(app, (), {"localhost"}, log.append), sock, grace, log.append)
        server.start()
        try:
            yield address
        finally:
            server.stop_listening()
            server.join()


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


def send_get(address: tuple[str, int], path: str = "/x") -> bytes:
    connection = http.client.HTTPConnection(*address, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().read()
