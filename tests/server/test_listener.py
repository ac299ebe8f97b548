"""The server on a socket, with slow or invalid clients, and the command as a process until SIGTERM."""

import asyncio
import contextlib
import http.client
import json
import logging
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from specdec import SpeculativeDecoder
from specdec.cli import serve
from specdec.cli.serve import ServeRequest
from specdec.server import listener as listener_module
from specdec.server.access_control import read_api_keys
from specdec.server.app import Endpoints
from specdec.server.engine_thread import EngineThread
from specdec.server.field_validation import APIError
from specdec.server.generation_fields import ServedModel
from specdec.server.generation_response import ServerState
from specdec.server.listener import bind_socket
from specdec.server.model_manager import ModelInstance, make_single_model_manager
from tests.conftest import Pair
from tests.fakes.terminal import TIMEOUT_S, run_process
from tests.tools.listeners import hello, listener, send_get


def test_a_connection_without_complete_headers_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "HEADER_TIMEOUT_S", 0.3)
    monkeypatch.setattr(listener_module, "KEEP_ALIVE_TIMEOUT_S", 1)
    with listener(hello, []) as address:
        complete = b"GET /x HTTP/1.1\r\nhost: localhost\r\n\r\n"
        for partial in (b"", b"GET / HTTP/1.1\r\nhost: lo", complete + b"GET /"):
            with socket.create_connection(address, timeout=60) as slow:
                slow.sendall(partial)
                assert send_get(address) == b"hi"
                received = b"".join(iter(lambda: slow.recv(1000), b""))
                assert (received != b"") is partial.startswith(complete)


def test_input_that_is_not_http_is_logged_in_a_line() -> None:
    log = list[str]()
    with listener(hello, log) as address:
        for nonsense in (b"\x16\x03\x01\x02\x00\x01\xfc", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20000, b"\0" * 1000):
            with socket.create_connection(address, timeout=60) as connection, contextlib.suppress(ConnectionError):
                connection.sendall(nonsense + b"\r\n\r\n")
                connection.recv(1000)
        assert send_get(address) == b"hi"
    assert log and all("\n" not in line and "Traceback" not in line for line in log)


def test_asyncio_errors_are_logged_in_a_line_without_disconnects(capfd: pytest.CaptureFixture[str]) -> None:
    """Written directly, they would block the server where nobody reads the log."""
    log = list[str]()
    with listener(hello, log) as address:
        assert send_get(address) == b"hi"
        logging.getLogger("asyncio").warning("socket.send() raised exception.")
        logging.getLogger("asyncio").error("a task\nwas destroyed", exc_info=ValueError("why"))
    assert [line for line in log if "/x" not in line] == ["a task\nwas destroyed: ValueError: why"]
    assert capfd.readouterr().err == ""


def test_long_idle_connections_are_closed_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "MAX_CONNECTIONS", 8)
    with listener(hello, []) as address:
        connections = [socket.create_connection(address, timeout=60) for _ in range(20)]
        assert send_get(address) == b"hi"
        for connection in connections[:12]:
            assert connection.recv(10) == b""
        for connection in connections:
            connection.close()


def test_unanswered_requests_get_an_error_at_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "SHUTDOWN_MARGIN_S", 0)
    has_started = threading.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        has_started.set()
        await asyncio.sleep(600)

    with contextlib.ExitStack() as stack:
        with listener(endless, []) as address:
            connection = stack.enter_context(contextlib.closing(http.client.HTTPConnection(*address, timeout=60)))
            connection.request("GET", "/x")
            assert has_started.wait(60)
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["error"]["code"]) == (503, "shutting_down")


def test_an_unfinished_stream_gets_an_error_event_at_shutdown(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "SHUTDOWN_MARGIN_S", 0)
    decoder = SpeculativeDecoder(pair.endless, None, pair.tokenizer, n_threads=1)
    manager = make_single_model_manager(
        ModelInstance(ServedModel("endless", decoder, None), EngineThread(decoder, 1, 1, 10**9), 1)
    )
    with contextlib.ExitStack() as stack:
        stack.callback(manager.close, 0.0)
        with listener(Endpoints(ServerState(manager)), []) as address:
            connection = stack.enter_context(contextlib.closing(http.client.HTTPConnection(*address, timeout=60)))
            body = json.dumps({"prompt": "the then", "max_tokens": 99_000, "stream": True})
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            response = connection.getresponse()
            assert response.readline().startswith(b"data: ")
        *_, last, done, end = response.read().decode().split("\n\n")
        assert (done, end) == ("data: [DONE]", "") and json.loads(last[6:])["error"]["code"] == "shutting_down"


async def reject(scope: Any, receive: Any, send: Any) -> None:
    raise APIError("too much", status=413)


def test_a_client_can_read_why_its_body_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with listener(reject, []) as address:
        connection = http.client.HTTPConnection(*address, timeout=60)
        with contextlib.closing(connection):
            for _ in range(2):  # the connection can be used again
                connection.request("POST", "/x", bytes(20 << 20))
                response = connection.getresponse()
                assert (response.status, json.loads(response.read())["error"]["message"]) == (413, "too much")
        monkeypatch.setattr(listener_module, "HEADER_TIMEOUT_S", 0.3)
        with socket.create_connection(address, timeout=60) as raw_connection, pytest.raises(ConnectionError):
            raw_connection.sendall(b"POST /x HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000\r\n\r\n")
            while True:
                raw_connection.sendall(bytes(1000))


def test_an_unavailable_address_is_reported() -> None:
    with bind_socket("127.0.0.1", 0) as sock:
        sock.listen()
        with pytest.raises(ValueError, match=r"cannot listen at 127\.0\.0\.1 port \d+: Address already in use"):
            bind_socket("127.0.0.1", sock.getsockname()[1])
    with pytest.raises(ValueError, match=r"cannot listen at nowhere\.invalid"):
        bind_socket("nowhere.invalid", 0)


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
def test_other_machines_need_a_key_or_the_no_key_option(host: str, is_local: bool) -> None:
    request = ServeRequest(model="m", host=host)
    if is_local:
        request.resolve()
    else:
        with pytest.raises(ValueError, match="use --api-key-file FILE for their keys, or --no-key"):
            request.resolve()
    ServeRequest(model="m", host=host, no_key=True).resolve()
    ServeRequest(model="m", host=host, api_key_file="keys").resolve()


def test_a_file_of_api_keys_has_one_per_line(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first\n\n second \n")
    assert read_api_keys(keys) == ["first", "second"]
    for invalid in ("", "\n", "caf\u00e9", "x" * 1001):
        keys.write_text(invalid)
        with pytest.raises(ValueError, match="must have one API key per line"):
            read_api_keys(keys)
    with pytest.raises(ValueError, match="cannot read"):
        read_api_keys(tmp_path)


def test_a_missing_draft_is_reported_at_startup() -> None:
    with pytest.raises(ValueError, match="'nowhere' not found here"):
        serve.run(ServeRequest(draft="nowhere"))


def test_a_missing_package_is_reported_before_loading(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec.loaders import CheckpointError, optional_dependencies

    is_installed = optional_dependencies.is_installed
    monkeypatch.setattr(
        optional_dependencies, "is_installed", lambda package: package not in ("starlette", "uvicorn") and is_installed(package)
    )
    with pytest.raises(
        CheckpointError, match=r"packages not found: starlette, .*; uvicorn, .*; install with: pip install starlette uvicorn$"
    ):
        serve.run(ServeRequest(model=str(pair.target)))


def test_a_process_serves_until_sigterm_and_completes_open_streams(pair: Pair) -> None:
    """The stream would take minutes; it is aborted at the end of the grace period, and the exit code is 0."""
    arguments = ["serve", "-m", pair.endless, "-d", "none", "-j", 1, "--port", 0, "--grace", 0.5, "--slots", 1]
    with run_process(arguments) as process:
        deadline = threading.Timer(TIMEOUT_S, process.kill)
        deadline.start()
        line = process.stdout.readline().decode()
        address = line.split()[0].removeprefix("http://").split(":")
        assert line.startswith("http://127.0.0.1:") and " serves endless (target fp32)" in line
        connection = http.client.HTTPConnection(address[0], int(address[1]), timeout=TIMEOUT_S)
        body = json.dumps({"prompt": "the then", "max_tokens": 99_000, "stream": True})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        assert json.loads(response.readline().removeprefix(b"data: "))["choices"][0]["text"]
        process.send_signal(signal.SIGTERM)
        signal_time = time.monotonic()
        with contextlib.closing(connection), response:
            *_, last, done, end = response.read().decode().split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert time.monotonic() - signal_time < TIMEOUT_S / 2
        assert process.wait(TIMEOUT_S) == 0
        assert b"Traceback" not in process.stderr.read()
        deadline.cancel()
