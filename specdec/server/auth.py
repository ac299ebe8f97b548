"""Who may ask: hosts, origins, keys; and that no answer tells of the inside. Knows nothing of what is asked.

A page of another site can send requests to a server of this machine, and by DNS rebinding read the answers too: its browser
then takes the server for the site's own. So a request has to name this host, or an address, or bring a key; and what a browser
sends has to come from the page of this server.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

from starlette.responses import JSONResponse, Response

from specdec.engine.scheduler import Client, Closed
from specdec.server.validation import Refused

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
OPEN = ("/", "/health")  # for who has no key, too: they tell nothing
QUIET = ("/health", "/metrics")  # that somebody asks for all the time
NETWORK_BITS = {4: 32, 6: 64}  # of an address, that are one client's
OURS = ("same-origin", "none")  # as browsers say that they come from here, or from nowhere


class Guard:
    """Around an app: refuses who may not ask, notes who asks, tells errors in OpenAI's shape and each request in a line.

    keys: of which one has to be brought; empty: none. hosts: names that a request may call this host by where there are no keys,
    beside addresses. tell: a line of the log.
    """

    def __init__(self, app: App, keys: Collection[str], hosts: Collection[str], tell: Callable[[str], object]) -> None:
        self._app, self._hosts, self._tell = app, {host.lower() for host in hosts}, tell
        self._keys = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        begin, status, notes = time.perf_counter(), 0, scope.setdefault("notes", list[str]())
        name = f"req_{secrets.token_hex(8)}"

        async def sending(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-content-type-options", b"nosniff"),
                    (b"x-request-id", name.encode()),
                ]
            await send(message)

        try:
            scope["who"] = self._checked(scope)
            await self._app(scope, receive, sending)
        except (Exception, asyncio.CancelledError) as error:
            has_left = isinstance(error, OSError)  # the client, or it reads nothing
            note = error.note if isinstance(error, Refused) else f"{type(error).__name__}: {error}"[:200]
            notes.append("left" if has_left else note)
            if not status:
                with suppress(OSError):
                    await refusal(told_as(error), scope["path"])(scope, receive, sending)
            status *= not has_left
        finally:
            if scope["path"] not in QUIET:
                seconds = time.perf_counter() - begin
                told = f"{scope['method'][:8]} {scope['path'][:60]!r} {status or '-'} {seconds:.2f} s"
                self._tell(" ".join([told, *([", ".join(noted)] if (noted := [*filter(None, notes)]) else []), f"({name})"]))

    def _checked(self, scope: Scope) -> Client:
        """Who asks: the owner of a key, or an address. Raises Refused for who may not."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        has_none = "host" not in headers and scope["http_version"] == "1.0"  # which no browser speaks
        if not (self._keys or has_none or self._is_ours(host)):
            raise Refused(f"this server is not {host[:80]!r}; ask it by its address", None, "host_not_allowed", 403)
        if not _is_from_here(headers, host, scope):
            raise Refused("pages of other sites may not ask here", None, "origin_not_allowed", 403)
        key = self._key_of(headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}")
        if self._keys and scope["path"] not in OPEN and not key:
            told = "the API key is missing or wrong; Authorization: Bearer KEY brings it"
            raise Refused(told, None, "invalid_api_key", 401, {"www-authenticate": "Bearer"})
        return Client(key or _network(scope), key)

    def _is_ours(self, host: str) -> bool:
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        with suppress(ValueError):
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
            return True
        return name.lower() in self._hosts

    def _key_of(self, brought: str) -> str:
        """Which of the keys is brought, "" for none; in a time that does not tell how much of it is right."""
        kind, _, key = brought.partition(" ")
        found = [ours for ours in self._keys if hmac.compare_digest(_digest(key.strip()), ours)]
        return found[0].hex() if found and kind.lower() == "bearer" else ""


def told_as(error: BaseException) -> Refused:
    """What a client is told of an error: of one of the inside nothing. Requests are cancelled where the server ends."""
    if isinstance(error, asyncio.CancelledError):
        return Closed()
    return error if isinstance(error, Refused) else Refused("the server failed; its log says more", None, "server_error", 500)


def refusal(error: Refused, path: str = "") -> Response:
    """The answer at that path."""
    later = {"retry-after": "1"} if error.status in (429, 503) else {}
    return JSONResponse(error.body(path), error.status, {**later, **error.headers})


def _is_from_here(headers: Mapping[str, str], host: str, scope: Scope) -> bool:
    """Whether no page of another site has sent this. Another site may link to the page, which is all that it may."""
    if "origin" in headers:
        return headers["origin"].partition("://")[2].lower() == host.lower() != ""
    is_link = scope["method"] == "GET" and scope["path"] == "/"
    return headers.get("sec-fetch-site", "none") in OURS or is_link


def _network(scope: Scope) -> str:
    """The address that a request came from; of IPv6 the part that one owner has."""
    try:
        address = ipaddress.ip_address((scope.get("client") or ("",))[0])
        address = getattr(address, "ipv4_mapped", None) or address
        return str(ipaddress.ip_network((int(address), NETWORK_BITS[address.version]), strict=False))
    except ValueError:
        return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
