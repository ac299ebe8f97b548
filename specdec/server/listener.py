"""The HTTP server on a socket, with timeouts and a connection limit. Knows no requests and no models."""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol

from specdec.server.access_control import App, Receive, Scope, Send, make_error_response
from specdec.server.field_validation import APIError
from specdec.server.field_validation import logger as server_logger

HEADER_TIMEOUT_S = 10.0  # for a client to send a request's headers
WRITE_TIMEOUT_S = 30.0  # for a client to read one chunk of a response
KEEP_ALIVE_TIMEOUT_S = 30  # between the requests of a connection
MAX_CONNECTIONS = 128  # beyond it, a connection that waits for its client is closed; twice as many may be served at once
SHUTDOWN_MARGIN_S = 5  # after the grace period, for clients that read slowly
POLL_INTERVAL_S, ARRIVAL_S = 0.02, 0.3  # until the socket is closed; then until requests of accepted connections have arrived
# forwarded logs. asyncio would block all on an unread stderr; its warnings of writes to clients that left are dropped
LOG_LEVELS = {"uvicorn.error": logging.WARNING, "asyncio": logging.ERROR}
PROBE_INTERVALS_S = (0.05, 1.0)  # before the first interim response to a half-closed connection, and before the others


class TimeoutH11Protocol(H11Protocol):
    """An HTTP connection that is closed when its client is too slow to send headers or to read the response.

    With too many connections, the one that has waited longest for its client is closed: first those with a client that does not
    read, then those that wait for headers or a body. The rest of a rejected body is read and dropped for as long as headers may
    take; otherwise the client would never see the error.
    """

    def connection_made(self, transport: Any) -> None:
        """Start the timers of a new connection.

        If there are too many connections, aborts the one that has waited longest for its client. If none waits, and there are
        twice as many, makes the new connection reject its requests.
        """
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # pause writing while the client has unread data
        self._header_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._waiting_since = self.loop.time()  # start of the wait for the client, if any
        self._is_aborted = False
        self._start_header_timer()
        open_connections = [other for other in self.connections if not other._is_aborted]
        idle_connections = [other for other in open_connections if other is not self and other.is_waiting_for_client]
        if len(open_connections) > MAX_CONNECTIONS and idle_connections:
            min(idle_connections, key=lambda other: (not other.is_write_blocked, other._waiting_since)).abort()
        elif len(open_connections) > 2 * MAX_CONNECTIONS:
            self.app = reject_connection

    @property
    def is_idle(self) -> bool:
        """Whether the connection has no request that is being answered."""
        return self.cycle is None or bool(self.cycle.response_complete)

    @property
    def is_write_blocked(self) -> bool:
        """Whether the response is paused because the client has not read what was sent."""
        return self._write_timer is not None

    @property
    def is_waiting_for_client(self) -> bool:
        """Whether the connection waits for its client to read, or to send headers or a body."""
        return self.is_write_blocked or self.is_idle or bool(self.cycle.more_body)

    def data_received(self, data: bytes) -> None:
        """Process bytes from the client; start or stop the header timeout, and restart the waiting time if a request starts."""
        was_idle = self.is_idle
        super().data_received(data)
        if was_idle and not self.is_idle and not self.is_write_blocked:
            self._waiting_since = self.loop.time()
        self._start_header_timer()

    def handle_events(self) -> None:
        """Process parsed input; close the connection after a request with both Transfer-Encoding and Content-Length."""
        super().handle_events()
        if self.headers and {b"transfer-encoding", b"content-length"} <= {name for name, _ in self.headers}:
            self.headers.append(CLOSE_HEADER)  # a proxy may take the next request for the body's rest (RFC 9112, 6.1)

    def eof_received(self) -> bool:
        """Return whether to keep a half-closed connection open: True while its request is being answered; then send probes.

        A client such as `nc -N` half-closes its connection. A client that has disconnected looks the same until something is
        sent. So the probes are interim responses, which a client that still reads skips (RFC 9110, 15.2).
        """
        if self.is_idle or self.cycle.more_body:
            return False
        self.cycle.keep_alive = False
        self._probe()
        return True

    def pause_writing(self) -> None:
        """Pause the response because the client does not read, and start the timeout that aborts the connection."""
        super().pause_writing()
        self._waiting_since = self.loop.time()
        self._write_timer = self.loop.call_later(WRITE_TIMEOUT_S, self.abort)

    def resume_writing(self) -> None:
        """Resume the response because the client has read, and stop the write timeout."""
        super().resume_writing()
        self._waiting_since = self.loop.time()
        _cancel_timer(self._write_timer)
        self._write_timer = None

    def on_response_complete(self) -> None:
        """Start to wait for the next request of the client, once a response is complete."""
        if not self.is_write_blocked:
            self._waiting_since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timers, since the connection is closed."""
        self._cancel_timers()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer input that is not HTTP with an error (status 400) in the API's format, and close the connection."""
        response = make_error_response(APIError(msg.lower().rstrip("."), None, "invalid_request"))
        headers = [*response.raw_headers, (b"connection", b"close")]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def _probe(self, seconds: float = PROBE_INTERVALS_S[0]) -> None:
        if self.is_idle or self.cycle.response_started or self.scope["http_version"] != "1.1":
            return
        self.transport.write(self.conn.send(h11.InformationalResponse(status_code=102, headers=[], reason="Processing")))
        self._probe_timer = self.loop.call_later(seconds, self._probe, PROBE_INTERVALS_S[1])

    def _start_header_timer(self) -> None:
        """Start the header timeout if it does not run yet, or stop it while a request is being answered."""
        if not self.is_idle:
            _cancel_timer(self._header_timer)
            self._header_timer = None
        elif self._header_timer is None and self.timeout_keep_alive_task is None:
            self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self.abort)

    def _cancel_timers(self) -> None:
        for timer in (self._header_timer, self._probe_timer, self._write_timer):
            _cancel_timer(timer)

    def abort(self) -> None:
        """Close the connection at once, and drop what the client has not read yet."""
        self._is_aborted = True
        self._cancel_timers()
        self.transport.abort()


async def reject_connection(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request with the error that there are too many connections (status 503); an ASGI app."""
    error = APIError("too many connections; try again later", None, "too_many_connections", 503)
    await make_error_response(error, scope["path"])(scope, receive, send)


def _cancel_timer(timer: asyncio.TimerHandle | None) -> None:
    if timer:
        timer.cancel()


class LogForwarder(logging.Handler):
    """A log handler that forwards records as single lines, without tracebacks."""

    def __init__(self, log: Callable[[str], object]) -> None:
        """Forward warnings and errors to `log`."""
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Forward a log record to the callback as one line of at most 300 characters."""
        error = record.exc_info[1] if record.exc_info else None
        self._log(f"{record.getMessage().strip()}{f': {type(error).__name__}: {error}' if error else ''}"[:300])


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a TCP socket that is bound to the host and port and does not listen yet.

    Raises:
        ValueError: The address is not available.
    """
    try:
        family, socket_type, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket_type, protocol)
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
    """A thread that runs the HTTP server on a socket.

    Args:
        app: The ASGI app.
        sock: A bound socket.
        grace: Seconds that responses may take after `stop_listening`.
        log: Callback for a log line.
    """

    def __init__(self, app: App, sock: socket.socket, grace: float, log: Callable[[str], object]) -> None:
        """Configure the HTTP server, which runs from `start` on, and forward the server's and the libraries' logs."""
        super().__init__(name="server")
        for name, level in LOG_LEVELS.items():
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = [LogForwarder(log)], False
            logger.setLevel(level)
        server_logger.handlers = [LogForwarder(log)]
        config = uvicorn.Config(
            app,
            http=TimeoutH11Protocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_TIMEOUT_S,
            timeout_graceful_shutdown=int(grace) + SHUTDOWN_MARGIN_S,
        )
        self._server, self._sock = uvicorn.Server(config), sock

    @property
    def address(self) -> str:
        """The URL of the server."""
        host, port = self._sock.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def run(self) -> None:
        """Serve requests until the server is stopped and its open responses have ended."""
        self._server.run([self._sock])

    def stop_listening(self) -> None:
        """Stop accepting connections, and wait for the requests that are on their way.

        The server's thread ends when the open responses do.
        """
        self._server.should_exit = True
        deadline = time.monotonic() + SHUTDOWN_MARGIN_S
        while self._sock.fileno() >= 0 and self.is_alive() and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL_S)
        time.sleep(ARRIVAL_S)
