"""The server at a socket: clients that are slow or talk nonsense; the command as a process, from its first line to SIGTERM."""

import asyncio
import contextlib
import http.client
import json
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra [serve] is not installed")
pytest.importorskip("uvicorn", reason="the extra [serve] is not installed")
from specdec import SpeculativeDecoder
from specdec.cli import serve
from specdec.cli.serve import ServeRequest
from specdec.engine.scheduler import Engine
from specdec.server import listener as listening
from specdec.server.app import app_of
from specdec.server.auth import Guard
from specdec.server.listener import Listener, bound
from specdec.server.model_manager import Served, only
from specdec.server.openai_requests import Model
from specdec.server.streaming import Service
from specdec.server.validation import Refused
from tests.conftest import Pair
from tests.fakes.terminal import LONGEST, started


@contextlib.contextmanager
def listener(app: Any, log: list[str], grace: float = 0.0) -> Iterator[tuple[str, int]]:
    """The address of an app that is served in this process."""
    with bound("127.0.0.1", 0) as sock:
        address = sock.getsockname()
        sock.listen()
        server = Listener(Guard(app, (), {"localhost"}, log.append), sock, grace, log.append)
        server.start()
        try:
            yield address
        finally:
            server.stop_listening()
            server.join()


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


def asked(address: tuple[str, int], path: str = "/x") -> bytes:
    connection = http.client.HTTPConnection(*address, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().read()


def test_a_connection_whose_head_does_not_come_is_closed_and_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(listening, "KEEP_ALIVE_SECONDS", 1)
    with listener(hello, []) as address:
        whole = b"GET /x HTTP/1.1\r\nhost: localhost\r\n\r\n"
        for begun in (b"", b"GET / HTTP/1.1\r\nhost: lo", whole + b"GET /"):
            with socket.create_connection(address, timeout=60) as slow:
                slow.sendall(begun)
                assert asked(address) == b"hi"
                came = b"".join(iter(lambda: slow.recv(1000), b""))
                assert (came != b"") is begun.startswith(whole)


def test_what_is_no_http_is_told_in_a_line_and_the_server_goes_on() -> None:
    log = list[str]()
    with listener(hello, log) as address:
        for nonsense in (b"\x16\x03\x01\x02\x00\x01\xfc", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20000, b"\0" * 1000):
            with socket.create_connection(address, timeout=60) as other, contextlib.suppress(ConnectionError):
                other.sendall(nonsense + b"\r\n\r\n")
                other.recv(1000)
        assert asked(address) == b"hi"
    assert log and all("\n" not in line and "Traceback" not in line for line in log)


def test_what_asyncio_says_is_a_line_of_the_log_but_not_that_a_client_has_left(capfd: pytest.CaptureFixture[str]) -> None:
    """For what is written at once, all wait where nobody reads it."""
    log = list[str]()
    with listener(hello, log) as address:
        assert asked(address) == b"hi"
        logging.getLogger("asyncio").warning("socket.send() raised exception.")
        logging.getLogger("asyncio").error("a task\nwas destroyed", exc_info=ValueError("why"))
    assert [line for line in log if "/x" not in line] == ["a task\nwas destroyed: ValueError: why"]
    assert capfd.readouterr().err == ""


def test_connections_that_wait_for_long_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "MOST_CONNECTIONS", 8)
    with listener(hello, []) as address:
        many = [socket.create_connection(address, timeout=60) for _ in range(20)]
        assert asked(address) == b"hi"
        for one in many[:12]:
            assert one.recv(10) == b""
        for one in many:
            one.close()


def test_what_is_not_answered_when_the_server_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "LAST_WORDS_SECONDS", 0)
    has_begun = threading.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        has_begun.set()
        await asyncio.sleep(600)

    with contextlib.ExitStack() as stack:
        with listener(endless, []) as address:
            connection = stack.enter_context(contextlib.closing(http.client.HTTPConnection(*address, timeout=60)))
            connection.request("GET", "/x")
            assert has_begun.wait(60)
        reply = connection.getresponse()
        assert (reply.status, json.loads(reply.read())["error"]["code"]) == (503, "shutting_down")


def test_a_stream_that_is_not_over_when_the_server_ends_has_a_last_event(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "LAST_WORDS_SECONDS", 0)
    decoder = SpeculativeDecoder(pair.endless, None, pair.tokenizer, n_threads=1)
    shelf = only(Served(Model("endless", decoder, None), Engine(decoder, 1, 1, 10**9), 1))
    with contextlib.ExitStack() as stack:
        stack.callback(shelf.close, 0.0)
        with listener(app_of(Service(shelf, "print")), []) as address:
            connection = stack.enter_context(contextlib.closing(http.client.HTTPConnection(*address, timeout=60)))
            body = json.dumps({"prompt": "the then", "max_tokens": 99_000, "stream": True})
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            reply = connection.getresponse()
            assert reply.readline().startswith(b"data: ")
        *_, last, done, end = reply.read().decode().split("\n\n")
        assert (done, end) == ("data: [DONE]", "") and json.loads(last[6:])["error"]["code"] == "shutting_down"


async def refusing(scope: Any, receive: Any, send: Any) -> None:
    raise Refused("too much", status=413)


def test_a_client_that_sends_more_than_is_read_learns_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with listener(refusing, []) as address:
        connection = http.client.HTTPConnection(*address, timeout=60)
        with contextlib.closing(connection):
            for _ in range(2):  # and may ask again
                connection.request("POST", "/x", bytes(20 << 20))
                reply = connection.getresponse()
                assert (reply.status, json.loads(reply.read())["error"]["message"]) == (413, "too much")
        monkeypatch.setattr(listening, "HEADER_SECONDS", 0.3)
        with socket.create_connection(address, timeout=60) as endless, pytest.raises(ConnectionError):
            endless.sendall(b"POST /x HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000\r\n\r\n")
            while True:
                endless.sendall(bytes(1000))


def test_a_port_that_is_taken_is_told() -> None:
    with bound("127.0.0.1", 0) as sock:
        sock.listen()
        with pytest.raises(ValueError, match=r"cannot listen at 127\.0\.0\.1 port \d+: Address already in use"):
            bound("127.0.0.1", sock.getsockname()[1])
    with pytest.raises(ValueError, match=r"cannot listen at nowhere\.invalid"):
        bound("nowhere.invalid", 0)


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("127.1.2.3", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
    ],
)
def test_other_machines_need_a_key_or_leave_to_go_without(host: str, is_local: bool, tmp_path: Path) -> None:
    request = ServeRequest(model="m", host=host)
    if is_local:
        assert request.settled().keys == []
    else:
        with pytest.raises(ValueError, match="--api-key-file FILE names their keys, --no-key lets everybody"):
            request.settled()
    keys = tmp_path / "keys"
    keys.write_text("first\n\n second \n")
    assert ServeRequest(model="m", host=host, no_key=True).settled().keys == []
    assert ServeRequest(model="m", host=host, api_key_file=str(keys)).settled().keys == ["first", "second"]
    for wrong in ("", "\n", "caf\u00e9", "x" * 1001):
        keys.write_text(wrong)
        with pytest.raises(ValueError, match="holds no API key"):
            _ = ServeRequest(model="m", host=host, api_key_file=str(keys)).settled().keys


def test_a_draft_that_is_not_there_is_told_before_a_model_is_asked_for() -> None:
    with pytest.raises(ValueError, match="there is no nowhere here"):
        serve.run(ServeRequest(draft="nowhere"))


def test_a_missing_package_is_told_before_anything_is_loaded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec.loaders import CheckpointError, optional_dependencies

    has = optional_dependencies.has
    monkeypatch.setattr(optional_dependencies, "has", lambda package: package not in ("starlette", "uvicorn") and has(package))
    with pytest.raises(
        CheckpointError, match=r"packages are missing: starlette, .*; uvicorn, .*; pip install starlette uvicorn$"
    ):
        serve.run(ServeRequest(model=str(pair.target)))


def test_a_process_serves_until_sigterm_and_ends_what_runs_with_a_proper_last_event(pair: Pair) -> None:
    """The answer would go on for minutes; it is cut where the grace ends, and the process has done well."""
    arguments = ["serve", "-m", pair.endless, "-d", "none", "-j", 1, "--port", 0, "--grace", 0.5, "--slots", 1]
    with started(arguments) as process:
        deadline = threading.Timer(LONGEST, process.kill)
        deadline.start()
        line = process.stdout.readline().decode()
        address = line.split()[0].removeprefix("http://").split(":")
        assert line.startswith("http://127.0.0.1:") and " serves endless (target fp32)" in line
        connection = http.client.HTTPConnection(address[0], int(address[1]), timeout=LONGEST)
        body = json.dumps({"prompt": "the then", "max_tokens": 99_000, "stream": True})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        reply = connection.getresponse()
        assert json.loads(reply.readline().removeprefix(b"data: "))["choices"][0]["text"]
        process.send_signal(signal.SIGTERM)
        asked_at = time.monotonic()
        with contextlib.closing(connection), reply:
            *_, last, done, end = reply.read().decode().split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert time.monotonic() - asked_at < LONGEST / 2
        assert process.wait(LONGEST) == 0
        assert b"Traceback" not in process.stderr.read()
        deadline.cancel()
