"""A socket, the server on it, and how it ends. Knows no requests and no models."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .guard import App

HEADER_SECONDS = 10.0  # that a client may take for a request's head
KEEP_ALIVE_SECONDS = 30  # that a connection waits for its next request
MOST_CONNECTIONS = 128  # beyond which those that wait are closed; twice as many may be answered at once
LAST_WORDS_SECONDS = 5  # behind the grace, for clients that read slowly


class Patient(H11Protocol):
    """A connection that is closed where a request's head does not come in time, or where others have waited for less long.

    What comes behind a body that was refused is read, and dropped, as long: or the client would never see why.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._await_head()
        self.since = self.loop.time()
        there = [other for other in self.connections if not other.transport.is_closing()]
        idle = [other for other in there if other.is_idle and other is not self]
        if len(there) > MOST_CONNECTIONS and idle:
            min(idle, key=lambda other: other.since).give_up()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being answered."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        """Begins to count, unless a request is being answered, or it counts already."""
        if not self.is_idle:
            self._forget()
        elif self._timer is None and self.timeout_keep_alive_task is None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self.give_up)

    def _forget(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = None

    def give_up(self) -> None:
        self._forget()
        if not self.transport.is_closing():
            self.transport.close()


class Log(logging.Handler):
    """uvicorn's words, a line each: of an error without where in the code it was."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._tell(f"{record.getMessage().strip()}{f': {type(error).__name__}: {error}' if error else ''}"[:300])


def bound(host: str, port: int) -> socket.socket:
    """A socket that nobody can connect to yet. Raises ValueError where the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except BaseException:
            sock.close()
            raise
    except (OSError, UnicodeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot listen at {host} port {port}: {reason}") from None
    return sock


class Listener:
    """A server on a thread of its own. grace: seconds that answers have once it is to end."""

    def __init__(self, app: App, sock: socket.socket, grace: float, tell: Callable[[str], object]) -> None:
        logger = logging.getLogger("uvicorn.error")
        logger.handlers, logger.propagate = [Log(tell)], False
        config = uvicorn.Config(
            app,
            http=Patient,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=2 * MOST_CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(grace) + LAST_WORDS_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([sock],), name="server")

    def begin(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop_listening(self) -> None:
        """No new connections; those that are there end with their answers, and with them the server."""
        self._server.should_exit = True

    def join(self) -> None:
        self._thread.join()
