"""Clients that could block others: slow readers and senders, large requests and expensive schemas."""

import asyncio
import contextlib
import copy
import functools
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.requests import Request

from specdec import Sampling, SpeculativeDecoder
from specdec.draft.draft_length import CostModel
from specdec.engine import fair_share, model_runner
from specdec.engine.metrics import Metrics, format_prometheus
from specdec.engine.model_runner import Batch, ModelRunner
from specdec.engine.request import GenerationRequest
from specdec.engine.sequence import Client
from specdec.loaders import optional_dependencies
from specdec.model.model import Model
from specdec.server import body_limits, engine_thread, fair_grammar_builds
from specdec.server import listener as listening
from specdec.server.access_control import make_error_response
from specdec.server.body_limits import BodyBuffer, read_body
from specdec.server.engine_thread import QueueFullError
from specdec.server.fair_grammar_builds import BuilderBusyError, ConstraintBuilder, FairSemaphore
from specdec.server.field_validation import APIError
from specdec.server.model_manager import prewarm
from specdec.text import structured_output
from specdec.text.structured_output import CPUTimer
from tests.tools.engine_threads import Output, assert_same, make_engine, make_request, submit  # noqa: F401  (fixtures)
from tests.tools.listeners import hello, listener, send_get
from tests.tools.prompt_caches import CountingCache, endless, random_tokens  # noqa: F401  (a fixture)
from tests.tools.waiting import wait_until

ROOT = Path(__file__).parents[2]
GET_REQUEST = b"GET /x HTTP/1.1\r\nhost: localhost\r\n\r\n"
LARGE = 1 << 20


async def send_large(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(LARGE).encode())]})
    for _ in range(16):
        await send({"type": "http.response.body", "body": bytes(LARGE >> 4), "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def connect_without_reading(address: tuple[str, int]) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.settimeout(60)
    connection.connect(address)
    connection.sendall(GET_REQUEST * 50)
    return connection


def test_clients_that_do_not_read_are_closed_for_new_ones_and_after_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "MAX_CONNECTIONS", 4)
    with listener(send_large, []) as address:
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(connect_without_reading(address)) for _ in range(20)]
            for _ in range(3):
                assert send_get(address) == bytes(LARGE)
            with pytest.raises(ConnectionError):  # the first ones were closed
                while connections[0].recv(1 << 20):
                    pass
                raise ConnectionError
        monkeypatch.setattr(listening, "WRITE_TIMEOUT_S", 0.3)
        with connect_without_reading(address) as blocked:
            time.sleep(0.7)
            n, chunk = 0, b"x"
            with contextlib.suppress(ConnectionError):
                while chunk := blocked.recv(1 << 20):
                    n += len(chunk)
            assert n < 50 * LARGE


def test_a_slow_reader_gets_the_whole_response(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "WRITE_TIMEOUT_S", 1.0)
    with listener(send_large, []) as address, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.settimeout(60)
        slow.connect(address)
        slow.sendall(GET_REQUEST.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        n, start = 0, time.monotonic()
        while chunk := slow.recv(16384):
            n += len(chunk)
            if time.monotonic() - start < 1.5:
                time.sleep(0.03)
        assert n > LARGE


async def answer_late(scope: Any, receive: Any, send: Any) -> None:
    """Answer after a while, or report that the client has disconnected."""
    while (message := await receive())["type"] != "http.disconnect" and message.get("more_body"):
        pass
    disconnected = asyncio.ensure_future(receive())
    done, _ = await asyncio.wait({disconnected}, timeout=0.4 if scope["path"] == "/x" else 60)
    disconnected.cancel()
    if done:
        raise ConnectionResetError
    await hello(scope, receive, send)


def test_half_closed_connections_get_a_response_and_closed_ones_are_noticed() -> None:
    log = list[str]()
    with listener(answer_late, log) as address:
        with socket.create_connection(address, timeout=60) as half_closed:
            half_closed.sendall(GET_REQUEST)
            half_closed.shutdown(socket.SHUT_WR)
            received = b"".join(iter(lambda: half_closed.recv(1000), b""))
            assert received.startswith(b"HTTP/1.1 102 ") and received.endswith(b"hi")
        with socket.create_connection(address, timeout=60) as closed:
            closed.sendall(GET_REQUEST.replace(b"/x", b"/for-long"))
        wait_until(lambda: any("for-long" in line for line in log))
    assert any("for-long" in line and "client disconnected" in line for line in log)


def test_input_that_is_not_http_gets_an_openai_error() -> None:
    with listener(hello, []) as address, socket.create_connection(address, timeout=60) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        received = b"".join(iter(lambda: connection.recv(1000), b""))
    assert (
        b"400" in received.split(b"\r\n")[0]
        and b"content-type: application/json" in received.lower()
        and b'{"error":' in received
    )


def test_nothing_is_read_after_a_body_with_two_lengths() -> None:
    """A proxy may have meant the rest as the body, so the connection is closed (RFC 9112, 6.1)."""
    log = list[str]()
    ambiguous = b"POST /x HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    with listener(hello, log) as address:
        for data, n in ((ambiguous, 1), (GET_REQUEST + ambiguous, 2), (ambiguous.replace(b"content-length: 5\r\n", b""), 2)):
            with socket.create_connection(address, timeout=60) as connection:
                connection.sendall(data + GET_REQUEST.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
                received = b"".join(iter(lambda connection=connection: connection.recv(1000), b""))  # type: ignore[misc]
            assert received.count(b"HTTP/1.1 200") == n


# Bodies


class Sender:
    """A client that sends JSON bodies in chunks."""

    def __init__(self) -> None:
        self.messages = asyncio.Queue[dict[str, Any]]()
        scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
        self.request = Request(scope, self.messages.get)  # type: ignore[arg-type]

    def send(self, n: int, more_body: bool = True) -> None:
        self.messages.put_nowait({"type": "http.request", "body": bytes(n), "more_body": more_body})

    async def read(self, buffer: BodyBuffer) -> int | APIError:
        try:
            async with read_body(self.request, buffer) as data:
                return len(data)
        except APIError as error:
            return error


def test_unfinished_bodies_do_not_block_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The body without progress for the longest time is dropped; small ones are always accepted."""
    monkeypatch.setattr(body_limits, "MAX_TOTAL_BODY_BYTES", 1 << 20)
    monkeypatch.setattr(body_limits, "SMALL_BODY_BYTES", 1000)

    async def run() -> None:
        buffer = BodyBuffer()
        stalled, continued, small, large = (Sender() for _ in range(4))
        reading = [asyncio.ensure_future(each.read(buffer)) for each in (stalled, continued, small, large)]
        stalled.send(500_000)
        await asyncio.sleep(0.05)
        continued.send(400_000)
        await asyncio.sleep(0.05)
        large.send(300_000)
        await asyncio.sleep(0.05)
        small.send(900, False)
        large.send(1, False)
        continued.send(1, False)
        rejected, *sizes = await asyncio.gather(*reading)
        assert isinstance(rejected, APIError) and (rejected.status, rejected.code) == (429, "no_room")
        assert sizes == [400_001, 900, 300_001] and not buffer.bodies

    asyncio.run(run())


def test_a_body_has_a_minimum_transfer_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_limits, "BODY_TIMEOUT_S", 0.5)
    monkeypatch.setattr(body_limits, "SMALL_BODY_BYTES", 1000)

    async def run() -> None:
        buffer, slow_sender, fast_sender = BodyBuffer(), Sender(), Sender()
        reading = [asyncio.ensure_future(each.read(buffer)) for each in (slow_sender, fast_sender)]
        for _ in range(12):
            slow_sender.send(1)
            fast_sender.send(1000)
            await asyncio.sleep(0.1)
        fast_sender.send(1, False)
        error, size = await asyncio.gather(*reading)
        assert isinstance(error, APIError) and error.status == 408 and size == 12_001

    asyncio.run(run())


# Constraints


class Clock:
    """A replacement of `time` that tests advance."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


class SlowGrammar:
    """A grammar that costs some CPU seconds and 0.3 s of a clock, and waits for a gate."""

    request_field = "tools"

    def __init__(self, clock: Clock, seconds: float, gate: threading.Event | None = None) -> None:
        self.clock, self.seconds, self.gate, self.n_built = clock, seconds, gate, 0

    def get_cached(self) -> None:
        return None

    def build(self, cost: CPUTimer) -> "SlowGrammar":
        assert self.gate is None or self.gate.wait(60)
        self.clock.now += 0.3
        cost.seconds += self.seconds
        self.n_built += 1
        return self


def test_schemas_of_a_client_do_not_delay_others_and_cancelled_builds_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, gate = Clock(), threading.Event()
    monkeypatch.setattr(fair_grammar_builds, "MAX_CLIENT_CPU_S", 0.5)
    monkeypatch.setattr(fair_grammar_builds, "time", clock)

    async def run() -> None:
        builder, hostile = ConstraintBuilder(), [SlowGrammar(clock, 0.4, gate) for _ in range(8)]
        builds = [asyncio.ensure_future(builder.build(each, "enemy")) for each in hostile]  # type: ignore[arg-type]
        await asyncio.sleep(0)
        quick = SlowGrammar(clock, 0.0)
        assert await builder.build(quick, "friend") is quick  # type: ignore[arg-type,comparison-overlap]
        builds[1].cancel()
        gate.set()  # none of the others was done before
        done = await asyncio.gather(*builds, return_exceptions=True)
        assert [each.n_built for each in hostile] == [1, 0, 1, 0, 0, 0, 0, 0]
        assert [type(each) for each in done] == [SlowGrammar, asyncio.CancelledError, SlowGrammar, *[BuilderBusyError] * 5]
        gate.clear()
        queued = [
            asyncio.ensure_future(builder.build(SlowGrammar(clock, 0.1, gate), f"{i}"))
            for i in range(fair_grammar_builds.MAX_QUEUED_BUILDS + 4)
        ]  # type: ignore[arg-type]
        await asyncio.sleep(0)
        gate.set()
        results = await asyncio.gather(*queued, return_exceptions=True)
        assert sum(isinstance(each, BuilderBusyError) for each in results) == 2

    asyncio.run(run())


def test_schema_builds_are_charged_as_cpu_time_with_a_correct_retry_after(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(fair_grammar_builds, "time", clock)

    async def run() -> None:
        builder = ConstraintBuilder()
        for _ in range(100):  # these take 30 s of wall time
            await builder.build(SlowGrammar(clock, 0.01), "ann")  # type: ignore[arg-type]
        clock.now += 100.0
        await builder.build(SlowGrammar(clock, 7.375), "ann")  # type: ignore[arg-type]
        with pytest.raises(BuilderBusyError, match="try again in 28 s") as error:
            await builder.build(SlowGrammar(clock, 0.01), "ann")  # type: ignore[arg-type]
        assert (error.value.headers, error.value.param) == ({"retry-after": "28"}, "tools")
        assert make_error_response(error.value).headers["retry-after"] == "28"
        clock.now += 28.0
        await builder.build(SlowGrammar(clock, 0.01), "ann")  # type: ignore[arg-type]

    asyncio.run(run())


@pytest.mark.skipif(not optional_dependencies.is_installed(optional_dependencies.GUIDANCE), reason="needs llguidance")
def test_a_vocabulary_is_built_once_at_load_and_not_charged_to_schemas(endless: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabularies = list[Any]()

    @functools.lru_cache
    def make_slowly(tokenizer: Any) -> Any:
        end = time.thread_time() + 0.5
        while time.thread_time() < end:
            pass
        vocabularies.append(structured_output._LLGuidanceVocabulary(tokenizer))
        return vocabularies[-1]

    monkeypatch.setattr(structured_output, "_make_vocabulary", make_slowly)
    schemas = [{"type": "object", "properties": {f"k{i}": {"type": "integer"}}} for i in range(2)]
    timers = [CPUTimer(), CPUTimer()]
    with ThreadPoolExecutor(2) as pool:
        grammars = [structured_output.make_schema_grammar(endless.tokenizer, schema) for schema in schemas]
        constraints = [*pool.map(structured_output.Grammar.build, grammars, timers)]
    assert len(vocabularies) == 1 and constraints[0].vocabulary is constraints[1].vocabulary
    assert all(timer.seconds < 0.4 for timer in timers), timers
    decoder = SpeculativeDecoder(endless.target, None, copy.copy(endless.tokenizer), n_threads=1)
    prewarm(decoder)
    assert len(vocabularies) == 2 and vocabularies[1].tokenizer is decoder.tokenizer


def test_permits_alternate_between_clients() -> None:
    async def run() -> None:
        semaphore, order = FairSemaphore(2), list[str]()

        async def hold_permit(client: str) -> None:
            async with semaphore.hold(client):
                order.append(client)
                await asyncio.sleep(0.02)

        tasks = [asyncio.ensure_future(hold_permit(client)) for client in ("enemy",) * 5 + ("ann", "bob")]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == ["enemy", "ann", "enemy", "bob", "enemy", "enemy"] and not semaphore.n_waiting

    asyncio.run(run())


# Fairness, and isolation of caches


def test_one_client_cannot_fill_the_queue_for_others(endless: Any, make_engine: Callable[..., Any]) -> None:
    engine, greedy, other = make_engine(endless, max_running=2, max_waiting=3), Client("a", "a"), Client("b", "b")
    outputs = [Output() for _ in range(5)]
    handles = [submit(engine, make_request(endless, 50_000), output, greedy) for output in outputs]
    with pytest.raises(QueueFullError):
        submit(engine, make_request(endless, 5), Output(), greedy)
    output, second = Output(), Output()
    for each in (output, second):
        with contextlib.suppress(QueueFullError):
            submit(engine, make_request(endless, 5), each, other)
    assert_same(endless, make_request(endless, 5), output)
    assert not second.events and not any(output.finished.is_set() for output in outputs)
    for handle in handles[:2]:
        handle.cancel()
    assert outputs[2].started.wait(60)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the schedulers' clock: each token of a pass takes 1 ms."""
    clock, forward = Clock(), Model.forward

    def timed_forward(model: Model, batch: list[Any]) -> Any:
        clock.now += 0.001 * sum(cache.count_uncached_tokens(tokens, n_logits) for cache, tokens, n_logits, _ in batch)
        return forward(model, batch)

    monkeypatch.setattr(Model, "forward", timed_forward)
    for module in (model_runner, engine_thread):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(CostModel, "pass_cost", lambda self, n: 0.001 * n)
    return clock


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> list[tuple[Counter[str], dict[str, int]]]:
    """Record the clients of each pass: their decoding sequences and prefilled tokens."""
    recorded, run = list[tuple[Counter[str], dict[str, int]]](), ModelRunner.run

    def record_run(self: Any, batch: Batch) -> Any:
        n_prefilled = Counter[str]()
        for sequence, n in batch.chunks:
            n_prefilled[sequence.client.name] += n
        if batch.chunks or batch.decoding:
            recorded.append((Counter(sequence.client.name for sequence in batch.decoding), n_prefilled))
        return run(self, batch)

    monkeypatch.setattr(ModelRunner, "run", record_run)
    return recorded


def make_long_request(endless: Any, n: int, seed: int) -> GenerationRequest:
    return GenerationRequest([1, *np.random.default_rng(seed).integers(3, 300, n).tolist()], 3, Sampling(0.0))


def test_two_sequences_of_a_client_run_next_to_many_of_another(
    endless: Any, make_engine: Callable[..., Any], passes: Any
) -> None:
    """A client with two sequences gets half of four slots at once, and half of each pass."""
    engine, outputs, others = make_engine(endless, max_running=4), [Output() for _ in range(12)], [Output(), Output()]
    for output in outputs:
        submit(engine, make_request(endless, 50_000), output, Client("a"))
    assert outputs[3].started.wait(60)
    for output in others:
        submit(engine, make_request(endless, 50_000), output, Client("b"))
    assert all(output.started.wait(60) for output in others) and not outputs[4].events
    n = len(passes)
    wait_until(lambda: len(passes) >= n + 20)
    assert [decode_batch for decode_batch, _ in passes[n : n + 20]] == [Counter(a=2, b=2)] * 20
    steps = [len(output.steps) for output in outputs[:4]]
    wait_until(lambda: len(passes) >= n + 40)
    assert all(len(output.steps) > n_before for output, n_before in zip(outputs, steps, strict=False)), (
        "all sequences make progress"
    )


def test_prompts_of_one_client_do_not_slow_down_another(
    endless: Any, make_engine: Callable[..., Any], passes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They get 0.2 s (200 tokens) ahead, and then as much time as the decoding sequence."""
    monkeypatch.setattr(fair_share, "MAX_FAIRNESS_GAP_S", 0.2)
    engine, output, others = make_engine(endless, max_running=4), Output(), [Output() for _ in range(3)]
    submit(engine, make_request(endless, 50_000), output, Client("b"))
    assert output.started.wait(60)
    for i, other in enumerate(others):
        submit(engine, make_long_request(endless, 300, i), other, Client("a"))
    for other in others:
        other.wait()
    n_steps = n_prefilled_total = 0
    for decode_batch, n_prefilled in passes:
        n_steps, n_prefilled_total = n_steps + decode_batch["b"], n_prefilled_total + n_prefilled["a"]
        assert n_prefilled_total <= 200 + 64 + n_steps
    assert max(n_prefilled["a"] for _, n_prefilled in passes) > 50, "in large chunks"
    n, alone = len(passes), Output()
    submit(engine, make_long_request(endless, 300, 10), alone, Client("b"))
    alone.wait()
    assert len(passes) - n < 30, "a client's own sequences may wait"


def test_prompts_of_clients_are_interleaved(
    endless: Any, make_engine: Callable[..., Any], passes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair_share, "MAX_FAIRNESS_GAP_S", 0.2)
    engine, outputs, other = make_engine(endless, max_running=4), [Output() for _ in range(8)], Output()
    for i, output in enumerate(outputs):
        submit(engine, make_long_request(endless, 1000, i), output, Client("a"))
    submit(engine, make_long_request(endless, 2000, 99), other, Client("b"))
    other.wait()
    first, *_, last = (i for i, (_, n_prefilled) in enumerate(passes) if n_prefilled["b"])
    n_prefilled = [n_prefilled for _, n_prefilled in passes[first : last + 1]]
    assert sum(each["b"] for each in n_prefilled) > 0.4 * sum(each["a"] + each["b"] for each in n_prefilled)


def test_auxiliary_tasks_take_at_most_half_of_the_time(
    endless: Any, make_engine: Callable[..., Any], passes: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task step takes as long as ten passes, so ten passes run between two of them."""
    run = ModelRunner.run

    def timed_run(self: Any, batch: Batch) -> Any:
        results = run(self, batch)
        if batch.chunks or batch.decoding:
            clock.now += 0.125
        return results

    monkeypatch.setattr(ModelRunner, "run", timed_run)
    pass_counts = list[int]()

    def run_task(target: Any) -> Any:
        for _ in range(4):
            pass_counts.append(len(passes))
            clock.now += 1.25
            yield

    engine, output = make_engine(endless, max_running=4), Output()
    submit(engine, make_request(endless, 50_000), output, Client("b"))
    assert output.started.wait(60)
    for future in engine.submit_auxiliary([run_task], Client("a")):
        future.result(60)
    assert [second - first for first, second in itertools.pairwise(pass_counts)] == [10, 10, 10]


def test_sequences_of_a_request_are_queued_all_or_none(endless: Any, make_engine: Callable[..., Any]) -> None:
    engine = make_engine(endless, max_running=1, max_waiting=2)
    submit(engine, make_request(endless, 50_000), Output())
    with pytest.raises(QueueFullError):
        engine.submit([make_request(endless, 5)] * 3, [Output()] * 3, Client())
    assert engine.metrics.queued + engine.metrics.running == 1
    assert engine_thread.MAX_EXTRA_WAITING > 0


def test_caches_are_not_shared_across_cache_salts(endless: Any, make_engine: Callable[..., Any]) -> None:
    prefixes, prompt = CountingCache(endless, 100), [1, *random_tokens(60)]
    first = prefixes.acquire(prompt, 90, "ann")
    first.caches.target.forward(prompt)
    assert prefixes.acquire(prompt, 90, "bob").n_held == 0
    prefixes.release(first, 61)
    assert prefixes.acquire(prompt, 90, "bob").n_held == 0
    assert prefixes.acquire(prompt, 90, "ann").n_held == 61
    small = CountingCache(endless, 100, max_idle=1)
    slot = small.acquire(prompt, 90, "ann")
    slot.caches.target.forward(prompt)
    small.release(slot, 61)
    assert small.acquire(prompt, 90, "bob").n_held == 0  # although it replaces the other slot
    shared = make_engine(endless)
    for client, n_cached in (("ann", 0), ("bob", 0), ("ann", 60)):
        before, output = shared.metrics.cached_tokens, Output()
        request = make_request(endless, 3, "abc " * 20)
        submit(shared, request, output, Client(client, client))
        assert_same(endless, request, output)
        assert (shared.metrics.cached_tokens - before >= 20) is (n_cached > 0)
    assert "prompt_tokens_cached_total 12000\n" in format_prometheus({"m": Metrics(cached_tokens=12_999)})


def test_an_unread_log_does_not_block_the_server() -> None:
    """Its lines are dropped and counted, and the process ends normally."""
    code = (
        "import time, sys; from specdec.ui.stderr_log import StderrLog\n"
        "log = StderrLog()\n"
        "for i in range(50_000): log.write_line('x' * 100)\n"
        "print('said', flush=True); sys.stdin.readline()\n"
        "time.sleep(0.3); log.write_line('at the end'); time.sleep(0.3)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", f"import tests\n{code}"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment, cwd=ROOT) as process:
        assert process.stdout and process.stdout.readline() == "said\n"
        _, log = process.communicate("\n", timeout=60)
    assert process.returncode == 0 and "log lines were dropped" in log and "at the end" in log
