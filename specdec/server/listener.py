"""A socket, the server on it, and how it ends. Knows no requests and no models."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol

from specdec.server.auth import App, Receive, Scope, Send, refusal
from specdec.server.validation import Refused

HEADER_SECONDS = 10.0  # that a client may take for a request's head
READER_SECONDS = 30.0  # that a client may take to read what waits for it, which is a piece of an answer
KEEP_ALIVE_SECONDS = 30  # that a connection waits for its next request
MOST_CONNECTIONS = 128  # beyond which one that waits for its client gives way; twice as many may be answered at once
LAST_WORDS_SECONDS = 5  # behind the grace, for clients that read slowly
# who else writes a log, from what on: asyncio, for which all would wait where nobody reads it, not of writes to who has left
WORDS_OF = {"uvicorn.error": logging.WARNING, "asyncio": logging.ERROR}
PROBES_SECONDS = (0.05, 1.0)  # between signs of life to who sends no more: the first one's, and any later one's


class Patient(H11Protocol):
    """A connection that is closed where its client keeps it waiting: for a request's head, or for what it does not read.

    Where there are too many, the one gives way that has waited longest for its client: those whose client does not read first,
    then those that wait for a head or a body. What comes behind a body that was refused is read, and dropped, as long: or the
    client would never see why.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # so that writing is paused as long as anything waits to be read
        self._timer: asyncio.TimerHandle | None = None
        self._probing: asyncio.TimerHandle | None = None
        self._reader: asyncio.TimerHandle | None = None
        self._since = self.loop.time()  # when it began to wait for its client, if it does
        self._is_over = False
        self._await_head()
        there = [other for other in self.connections if not other._is_over]
        waiting = [other for other in there if other is not self and other.waits_for_client]
        if len(there) > MOST_CONNECTIONS and waiting:
            min(waiting, key=lambda other: (not other.is_stuck, other._since)).give_up()
        elif len(there) > 2 * MOST_CONNECTIONS:
            self.app = too_many

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being answered."""
        return self.cycle is None or bool(self.cycle.response_complete)

    @property
    def is_stuck(self) -> bool:
        """Whether something waits to be read."""
        return self._reader is not None

    @property
    def waits_for_client(self) -> bool:
        """To read, or to send a head or a body."""
        return self.is_stuck or self.is_idle or bool(self.cycle.more_body)

    def data_received(self, data: bytes) -> None:
        was_idle = self.is_idle
        super().data_received(data)
        if was_idle and not self.is_idle and not self.is_stuck:
            self._since = self.loop.time()
        self._await_head()

    def handle_events(self) -> None:
        super().handle_events()
        if self.headers and {b"transfer-encoding", b"content-length"} <= {name for name, _ in self.headers}:
            self.headers.append(CLOSE_HEADER)  # what others take for the rest of its body is no request (RFC 9112, 6.1)

    def eof_received(self) -> bool:
        """Who has asked and sends no more may still read, as `nc -N` does. Who has left looks the same until something is sent:
        so interim responses are, which a client that reads passes over (RFC 9110, 15.2)."""
        if self.is_idle or self.cycle.more_body:
            return False
        self.cycle.keep_alive = False
        self._probe()
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._since = self.loop.time()
        self._reader = self.loop.call_later(READER_SECONDS, self.give_up)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._since = self.loop.time()
        _stop(self._reader)
        self._reader = None

    def on_response_complete(self) -> None:
        if not self.is_stuck:
            self._since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """To what is no HTTP."""
        reply = refusal(Refused(msg.lower().rstrip("."), None, "invalid_request"))
        headers = [*reply.raw_headers, (b"connection", b"close")]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=bytes(reply.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def _probe(self, seconds: float = PROBES_SECONDS[0]) -> None:
        if self.is_idle or self.cycle.response_started or self.scope["http_version"] != "1.1":
            return
        self.transport.write(self.conn.send(h11.InformationalResponse(status_code=102, headers=[], reason="Processing")))
        self._probing = self.loop.call_later(seconds, self._probe, PROBES_SECONDS[1])

    def _await_head(self) -> None:
        """Begins to count, unless a request is being answered, or it counts already."""
        if not self.is_idle:
            _stop(self._timer)
            self._timer = None
        elif self._timer is None and self.timeout_keep_alive_task is None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self.give_up)

    def _forget(self) -> None:
        for timer in (self._timer, self._probing, self._reader):
            _stop(timer)

    def give_up(self) -> None:
        """At once: what waits to be read is dropped."""
        self._is_over = True
        self._forget()
        self.transport.abort()


async def too_many(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a request on a connection beyond those that are answered at once."""
    error = Refused("as many clients are being answered as may; ask again later", None, "too_many_connections", 503)
    await refusal(error, scope["path"])(scope, receive, send)


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer:
        timer.cancel()


class Log(logging.Handler):
    """Others' words, a line each: of an error without where in the code it was."""

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


class Listener(threading.Thread):
    """A server, which is a thread. grace: seconds that answers have once it is to end."""

    def __init__(self, app: App, sock: socket.socket, grace: float, tell: Callable[[str], object]) -> None:
        super().__init__(name="server")
        for name, level in WORDS_OF.items():
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = [Log(tell)], False
            logger.setLevel(level)
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
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(grace) + LAST_WORDS_SECONDS,
        )
        self._server, self._sock = uvicorn.Server(config), sock

    def run(self) -> None:
        self._server.run([self._sock])

    def stop_listening(self) -> None:
        """No new connections; those that are there end with their answers, and with them the server."""
        self._server.should_exit = True
