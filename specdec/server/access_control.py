"""Access control by host, origin and API key; hides internal errors from clients. Knows nothing about the requests' content.

A page of another site can send requests to a server on this machine. With DNS rebinding it can read the responses too, since
the browser takes the server for the site's own. So a request must name this host or an address, or send a key. A request from
a browser must come from this server's page.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse, Response

from specdec.argument_checks import decode_text, wrap_read_errors
from specdec.engine.sequence import Client
from specdec.server.engine_thread import QueueFullError, ShutdownError
from specdec.server.field_validation import APIError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
PUBLIC_PATHS = ("/", "/health")  # need no key, since they reveal nothing
UNLOGGED_PATHS = ("/health", "/metrics")  # polled all the time
MAX_KEY_LENGTH = 1000
CLIENT_PREFIX_BITS = {4: 32, 6: 64}  # bits of an address that identify a client, by IP version
TRUSTED_FETCH_SITES = ("same-origin", "none")  # values of sec-fetch-site for this server's page and for no page


class AuthMiddleware:
    """ASGI middleware that authenticates requests, formats errors and logs a line per request.

    A request is rejected if its host is not allowed, if a page of another site sent it, or if a key is needed and missing. Each
    response gets an `x-request-id` header, and the log line has the same id.

    Args:
        app: The ASGI app that handles the authenticated requests.
        keys: The valid API keys; if empty, none is needed.
        hosts: Host names that requests may be sent to. IP addresses are always allowed, and any host is if there are keys.
        log: Callback for a log line.
    """

    def __init__(self, app: App, keys: Collection[str], hosts: Collection[str], log: Callable[[str], object]) -> None:
        """Store the app and the digests of the keys."""
        self._app, self._allowed_hosts, self._log = app, {host.lower() for host in hosts}, log
        self._key_digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Authenticate a request and run the app; answer with an error response if either raises, and log one line.

        Sets `api_client` in the scope, and `notes`, a list of texts for the log line. No exception is passed on. One that is
        raised after the response has started is only logged. Scopes other than HTTP requests are ignored.
        """
        if scope["type"] != "http":
            return
        start, status, notes = time.perf_counter(), 0, scope.setdefault("notes", list[str]())
        request_id = f"req_{secrets.token_hex(8)}"

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-content-type-options", b"nosniff"),
                    (b"x-request-id", request_id.encode()),
                ]
            await send(message)

        try:
            scope["api_client"] = self._authenticate(scope)
            await self._app(scope, receive, send_with_headers)
        except (Exception, asyncio.CancelledError) as error:
            is_disconnected, api_error = isinstance(error, OSError), to_api_error(error)  # the client left, or does not read
            note = f"{type(error).__name__}: {error}"[:200] if api_error.status == 500 else api_error.note
            notes.append("client disconnected" if is_disconnected else note)
            if not status:
                with suppress(OSError):
                    await make_error_response(api_error, scope["path"])(scope, receive, send_with_headers)
            status *= not is_disconnected
        finally:
            if scope["path"] not in UNLOGGED_PATHS:
                seconds = time.perf_counter() - start
                line = f"{scope['method'][:8]} {scope['path'][:60]!r} {status or '-'} {seconds:.2f} s"
                note = ", ".join(filter(None, notes))
                self._log(f"{line} {note} ({request_id})" if note else f"{line} ({request_id})")

    def _authenticate(self, scope: Scope) -> Client:
        """Return the client that sends a request, identified by its API key or else by its network address.

        Raises:
            APIError: The host or the origin is not allowed, or a key is needed and missing or wrong.
        """
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        is_http_1_0 = "host" not in headers and scope["http_version"] == "1.0"  # no browser uses HTTP/1.0
        if not (self._key_digests or is_http_1_0 or self._is_allowed_host(host)):
            raise APIError(f"the host {host[:80]!r} is not allowed; use the server's address", None, "host_not_allowed", 403)
        if not _is_same_origin(headers, host, scope):
            raise APIError("requests from other origins are not allowed", None, "origin_not_allowed", 403)
        key = self._find_key(headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}")
        if self._key_digests and scope["path"] not in PUBLIC_PATHS and not key:
            message = "the API key is missing or wrong; send the header Authorization: Bearer KEY"
            raise APIError(message, None, "invalid_api_key", 401, {"www-authenticate": "Bearer"})
        return Client(key or _get_client_network(scope), key)

    def _is_allowed_host(self, host: str) -> bool:
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        with suppress(ValueError):
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
            return True
        return name.lower() in self._allowed_hosts

    def _find_key(self, authorization: str) -> str:
        """Return the hex digest of the valid API key in an authorization header, or "" if there is none.

        Keys are compared in constant time, which does not reveal how much of a wrong key is right.
        """
        scheme, _, key = authorization.partition(" ")
        matches = [digest for digest in self._key_digests if hmac.compare_digest(_digest(key.strip()), digest)]
        return matches[0].hex() if matches and scheme.lower() == "bearer" else ""


def read_api_keys(path: Path) -> list[str]:
    """Return the API keys in a file, one per line.

    Raises:
        ValueError: The file cannot be read, has no key, or has an invalid one.
    """
    with wrap_read_errors(path, ValueError):
        lines = decode_text(path.read_bytes()).splitlines()
    keys = [line.strip() for line in lines if line.strip()]
    if not keys or not all(key.isascii() and key.isprintable() and len(key) <= MAX_KEY_LENGTH for key in keys):
        expected = f"one API key per line, in printable ASCII of at most {MAX_KEY_LENGTH} characters"
        raise ValueError(f"{path} must have {expected}")
    return keys


def to_api_error(error: BaseException) -> APIError:
    """Convert an exception into the APIError to send to a client, without details of internal errors.

    A full queue becomes status 429. `ShutdownError` and cancellation, which means a shutdown, become 503, and other errors 500.
    """
    if isinstance(error, QueueFullError):
        return APIError(str(error), None, "queue_full", 429)
    if isinstance(error, ShutdownError | asyncio.CancelledError):
        return APIError(str(error) or str(ShutdownError()), None, "shutting_down", 503)
    if isinstance(error, APIError):
        return error
    return APIError("internal server error; see the server's log", None, "server_error", 500)


def make_error_response(error: APIError, path: str = "") -> Response:
    """Return the JSON response for an error, in the format of the API of the request path: OpenAI's, Anthropic's or ollama's.

    A response with status 429 or 503 has a `retry-after` header.
    """
    retry = {"retry-after": "1"} if error.status in (429, 503) else {}
    return JSONResponse(error.format_body(path), error.status, {**retry, **error.headers})


def _is_same_origin(headers: Mapping[str, str], host: str, scope: Scope) -> bool:
    """Return whether a request comes from this server's page or from no page at all; False for a page of another site.

    A link from another site to the chat page is allowed.
    """
    if "origin" in headers:
        return headers["origin"].partition("://")[2].lower() == host.lower() != ""
    is_link = scope["method"] == "GET" and scope["path"] == "/"
    return headers.get("sec-fetch-site", "none") in TRUSTED_FETCH_SITES or is_link


def _get_client_network(scope: Scope) -> str:
    """Return the network that identifies a client: its IPv4 address or its /64 network of IPv6; "" if it is not known."""
    try:
        address = ipaddress.ip_address((scope.get("client") or ("",))[0])
        address = getattr(address, "ipv4_mapped", None) or address
        return str(ipaddress.ip_network((int(address), CLIENT_PREFIX_BITS[address.version]), strict=False))
    except ValueError:
        return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
