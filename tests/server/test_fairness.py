"""Clients that would keep others waiting: who reads nothing, sends slowly, asks for much, or for what takes long to build."""

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

pytest.importorskip("starlette", reason="the extra [serve] is not installed")
pytest.importorskip("uvicorn", reason="the extra [serve] is not installed")
from starlette.requests import Request

from specdec import Sampling, SpeculativeDecoder
from specdec.cli import serve
from specdec.engine import scheduler
from specdec.engine.decoding import Job
from specdec.engine.metrics import Figures, exposition
from specdec.engine.scheduler import Client, Full
from specdec.loaders import optional_dependencies
from specdec.server import body_limits, schema_builder
from specdec.server import listener as listening
from specdec.server.auth import refusal
from specdec.server.body_limits import Room, body_of_bytes
from specdec.server.schema_builder import Builder, Busy, Turns
from specdec.server.validation import Refused
from specdec.text import structured_output
from specdec.text.structured_output import Cost
from tests.engine.test_kv_slots import Counted, some
from tests.engine.test_scheduler import Heard, a_job, assert_same, endless, engines, submit  # noqa: F401  (fixtures)
from tests.server.test_listener import asked, hello, listener

ROOT = Path(__file__).parents[2]
ASKS = b"GET /x HTTP/1.1\r\nhost: localhost\r\n\r\n"
LARGE = 1 << 20


async def much(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(LARGE).encode())]})
    for _ in range(16):
        await send({"type": "http.response.body", "body": bytes(LARGE >> 4), "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def who_reads_nothing(address: tuple[str, int]) -> socket.socket:
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    one.settimeout(60)
    one.connect(address)
    one.sendall(ASKS * 50)
    return one


def test_clients_that_read_nothing_make_room_and_are_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "MOST_CONNECTIONS", 4)
    with listener(much, []) as address:
        with contextlib.ExitStack() as stack:
            many = [stack.enter_context(who_reads_nothing(address)) for _ in range(20)]
            for _ in range(3):
                assert asked(address) == bytes(LARGE)
            with pytest.raises(ConnectionError):  # the first ones have given way
                while many[0].recv(1 << 20):
                    pass
                raise ConnectionError
        monkeypatch.setattr(listening, "READER_SECONDS", 0.3)
        with who_reads_nothing(address) as stuck:
            time.sleep(0.7)
            n, piece = 0, b"x"
            with contextlib.suppress(ConnectionError):
                while piece := stuck.recv(1 << 20):
                    n += len(piece)
            assert n < 50 * LARGE


def test_who_reads_slowly_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "READER_SECONDS", 1.0)
    with listener(much, []) as address, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.settimeout(60)
        slow.connect(address)
        slow.sendall(ASKS.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        n, begin = 0, time.monotonic()
        while piece := slow.recv(16384):
            n += len(piece)
            if time.monotonic() - begin < 1.5:
                time.sleep(0.03)
        assert n > LARGE


async def late(scope: Any, receive: Any, send: Any) -> None:
    """Answers behind a while, or tells that its client has left."""
    while (message := await receive())["type"] != "http.disconnect" and message.get("more_body"):
        pass
    leaving = asyncio.ensure_future(receive())
    done, _ = await asyncio.wait({leaving}, timeout=0.4 if scope["path"] == "/x" else 60)
    leaving.cancel()
    if done:
        raise ConnectionResetError
    await hello(scope, receive, send)


def test_who_sends_no_more_still_reads_and_who_has_left_is_noticed() -> None:
    log = list[str]()
    with listener(late, log) as address:
        with socket.create_connection(address, timeout=60) as half:
            half.sendall(ASKS)
            half.shutdown(socket.SHUT_WR)
            came = b"".join(iter(lambda: half.recv(1000), b""))
            assert came.startswith(b"HTTP/1.1 102 ") and came.endswith(b"hi")
        with socket.create_connection(address, timeout=60) as gone:
            gone.sendall(ASKS.replace(b"/x", b"/for-long"))
        end = time.monotonic() + 30
        while not any("for-long" in line for line in log):
            assert time.monotonic() < end
            time.sleep(0.01)
    assert any("for-long" in line and "left" in line for line in log)


def test_what_is_no_http_is_told_in_openais_shape() -> None:
    with listener(hello, []) as address, socket.create_connection(address, timeout=60) as other:
        other.sendall(b"nonsense\r\n\r\n")
        came = b"".join(iter(lambda: other.recv(1000), b""))
    assert b"400" in came.split(b"\r\n")[0] and b"content-type: application/json" in came.lower() and b'{"error":' in came


def test_what_comes_behind_a_body_of_two_lengths_is_no_request() -> None:
    """Transfer-Encoding with Content-Length ends the connection (RFC 9112, 6.1): a proxy may have meant the rest as the body."""
    log = list[str]()
    both = b"POST /x HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    with listener(hello, log) as address:
        for first, n in ((both, 1), (ASKS + both, 2), (both.replace(b"content-length: 5\r\n", b""), 2)):
            with socket.create_connection(address, timeout=60) as other:
                other.sendall(first + ASKS.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
                came = b"".join(iter(lambda other=other: other.recv(1000), b""))  # type: ignore[misc]
            assert came.count(b"HTTP/1.1 200") == n


# Bodies


class Sender:
    """Sends bodies of JSON as it is told to."""

    def __init__(self) -> None:
        self.messages = asyncio.Queue[dict[str, Any]]()
        scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
        self.request = Request(scope, self.messages.get)  # type: ignore[arg-type]

    def send(self, n: int, more: bool = True) -> None:
        self.messages.put_nowait({"type": "http.request", "body": bytes(n), "more_body": more})

    async def read(self, room: Room) -> int | Refused:
        try:
            async with body_of_bytes(self.request, room) as data:
                return len(data)
        except Refused as error:
            return error


def test_unfinished_bodies_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that has stood still for longest gives way, and small ones always get in."""
    monkeypatch.setattr(body_limits, "MOST_OF_ALL_BYTES", 1 << 20)
    monkeypatch.setattr(body_limits, "SMALL_BYTES", 1000)

    async def run() -> None:
        room = Room()
        stuck, goes_on, small, large = (Sender() for _ in range(4))
        reading = [asyncio.ensure_future(each.read(room)) for each in (stuck, goes_on, small, large)]
        stuck.send(500_000)
        await asyncio.sleep(0.05)
        goes_on.send(400_000)
        await asyncio.sleep(0.05)
        large.send(300_000)
        await asyncio.sleep(0.05)
        small.send(900, False)
        large.send(1, False)
        goes_on.send(1, False)
        refused, *sizes = await asyncio.gather(*reading)
        assert isinstance(refused, Refused) and (refused.status, refused.code) == (429, "no_room")
        assert sizes == [400_001, 900, 300_001] and not room.bodies

    asyncio.run(run())


def test_a_body_has_to_come_at_a_least_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_limits, "BODY_SECONDS", 0.5)
    monkeypatch.setattr(body_limits, "SMALL_BYTES", 1000)

    async def run() -> None:
        room, drips, flows = Room(), Sender(), Sender()
        reading = [asyncio.ensure_future(each.read(room)) for each in (drips, flows)]
        for _ in range(12):
            drips.send(1)
            flows.send(1000)
            await asyncio.sleep(0.1)
        flows.send(1, False)
        slow, size = await asyncio.gather(*reading)
        assert isinstance(slow, Refused) and slow.status == 408 and size == 12_001

    asyncio.run(run())


# Shapes


class Clock:
    """In the place of `time`: it goes on by what grammars take."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


class Slow:
    """A grammar that takes so many seconds of the CPU, and 0.3 of a clock, and is not done before it may be."""

    param = "tools"

    def __init__(self, clock: Clock, seconds: float, may: threading.Event | None = None) -> None:
        self.clock, self.seconds, self.may, self.n_built = clock, seconds, may, 0

    def kept(self) -> None:
        return None

    def build(self, cost: Cost) -> "Slow":
        assert self.may is None or self.may.wait(60)
        self.clock.now += 0.3
        cost.seconds += self.seconds
        self.n_built += 1
        return self


def test_a_clients_shapes_keep_no_other_client_waiting_and_who_left_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, may = Clock(), threading.Event()
    monkeypatch.setattr(schema_builder, "MOST_SECONDS", 0.5)
    monkeypatch.setattr(schema_builder, "time", clock)

    async def run() -> None:
        builder, hostile = Builder(), [Slow(clock, 0.4, may) for _ in range(8)]
        asks = [asyncio.ensure_future(builder.built(each, "enemy")) for each in hostile]  # type: ignore[arg-type]
        await asyncio.sleep(0)
        quick = Slow(clock, 0.0)
        assert await builder.built(quick, "friend") is quick  # type: ignore[arg-type,comparison-overlap]
        asks[1].cancel()
        may.set()  # the first of the others was not done before
        done = await asyncio.gather(*asks, return_exceptions=True)
        assert [each.n_built for each in hostile] == [1, 0, 1, 0, 0, 0, 0, 0]
        assert [type(each) for each in done] == [Slow, asyncio.CancelledError, Slow, *[Busy] * 5]
        may.clear()
        many = [
            asyncio.ensure_future(builder.built(Slow(clock, 0.1, may), f"{i}")) for i in range(schema_builder.MOST_WAITING + 4)
        ]  # type: ignore[arg-type]
        await asyncio.sleep(0)
        may.set()
        told = await asyncio.gather(*many, return_exceptions=True)
        assert sum(isinstance(each, Busy) for each in told) == 2

    asyncio.run(run())


def test_a_client_pays_for_its_schemas_in_time_of_the_cpu_and_is_told_the_true_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(schema_builder, "time", clock)

    async def run() -> None:
        builder = Builder()
        for _ in range(100):  # which take 30 s beside others
            await builder.built(Slow(clock, 0.01), "ann")  # type: ignore[arg-type]
        clock.now += 100.0
        await builder.built(Slow(clock, 7.375), "ann")  # type: ignore[arg-type]
        with pytest.raises(Busy, match="ask again in 28 s") as told:
            await builder.built(Slow(clock, 0.01), "ann")  # type: ignore[arg-type]
        assert (told.value.headers, told.value.param) == ({"retry-after": "28"}, "tools")
        assert refusal(told.value).headers["retry-after"] == "28"
        clock.now += 28.0
        await builder.built(Slow(clock, 0.01), "ann")  # type: ignore[arg-type]

    asyncio.run(run())


@pytest.mark.skipif(not optional_dependencies.has(optional_dependencies.GUIDANCE), reason="needs llguidance")
def test_a_vocabulary_is_made_once_at_load_and_no_schema_costs_it(endless: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Any]()

    @functools.lru_cache
    def slow(tokenizer: Any) -> Any:
        end = time.thread_time() + 0.5
        while time.thread_time() < end:
            pass
        made.append(structured_output._Vocabulary(tokenizer))
        return made[-1]

    monkeypatch.setattr(structured_output, "_made", slow)
    schemas = [{"type": "object", "properties": {f"k{i}": {"type": "integer"}}} for i in range(2)]
    costs = [Cost(), Cost()]
    with ThreadPoolExecutor(2) as pool:
        grammars = [structured_output.grammar_of(endless.tokenizer, schema) for schema in schemas]
        built = [*pool.map(structured_output.Grammar.build, grammars, costs)]
    assert len(made) == 1 and built[0].vocabulary is built[1].vocabulary
    assert all(cost.seconds < 0.4 for cost in costs), costs
    decoder = SpeculativeDecoder(endless.target, None, copy.copy(endless.tokenizer), n_threads=1)
    serve.awake(decoder)
    assert len(made) == 2 and made[1].tokenizer is decoder.tokenizer


def test_large_bodies_of_one_client_keep_no_other_client_waiting() -> None:
    async def run() -> None:
        turns, order = Turns(2), list[str]()

        async def takes(who: str) -> None:
            async with turns.of(who):
                order.append(who)
                await asyncio.sleep(0.02)

        asks = [asyncio.ensure_future(takes(who)) for who in ("enemy",) * 5 + ("ann", "bob")]
        await asyncio.sleep(0)
        asks[2].cancel()
        await asyncio.gather(*asks, return_exceptions=True)
        assert order == ["enemy", "ann", "enemy", "bob", "enemy", "enemy"] and not turns.n_waiting

    asyncio.run(run())


# Turns, and whose caches are whose


def test_one_client_keeps_no_other_one_out(endless: Any, engines: Callable[..., Any]) -> None:
    busy, greedy, other = engines(endless, n_slots=2, n_queue=3), Client("a", "a"), Client("b", "b")
    many = [Heard() for _ in range(5)]
    tickets = [submit(busy, a_job(endless, 50_000), heard, greedy) for heard in many]
    with pytest.raises(Full):
        submit(busy, a_job(endless, 5), Heard(), greedy)
    heard, second = Heard(), Heard()
    for told in (heard, second):
        with contextlib.suppress(Full):
            submit(busy, a_job(endless, 5), told, other)
    assert_same(endless, a_job(endless, 5), heard)
    assert not second.events and not any(told.ended.is_set() for told in many)
    for ticket in tickets[:2]:
        ticket.cancel()
    assert many[2].spoke.wait(60)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Of engines: it goes on by 1 ms for each token of a pass."""
    clock, forward = Clock(), scheduler.Transformer.forward_together

    def timed(jobs: list[Any]) -> Any:
        clock.now += 0.001 * sum(model.n_to_run(tokens, n_logits) for model, tokens, n_logits, _ in jobs)
        return forward(jobs)

    monkeypatch.setattr(scheduler.Transformer, "forward_together", timed)
    monkeypatch.setattr(scheduler, "time", clock)
    monkeypatch.setattr(scheduler.CostModel, "pass_cost", lambda self, n: 0.001 * n)
    return clock


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> list[tuple[Counter[str], dict[str, int]]]:
    """Of each pass the clients whose texts make a step, and how many tokens of whose prompts are read."""
    seen, run = list[tuple[Counter[str], dict[str, int]]](), scheduler.Engine._run

    def spied(self: Any, stepping: list[Any], pieces: list[tuple[Any, int]]) -> None:
        read = Counter[str]()
        for writing, n in pieces:
            read[writing.ticket.who.name] += n
        seen.append((Counter(writing.ticket.who.name for writing in stepping), read))
        run(self, stepping, pieces)

    monkeypatch.setattr(scheduler.Engine, "_run", spied)
    return seen


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def a_long_job(endless: Any, n: int, seed: int) -> Job:
    return Job([1, *np.random.default_rng(seed).integers(3, 300, n).tolist()], 3, Sampling(0.0))


def test_two_texts_of_a_client_run_beside_many_of_another_one(endless: Any, engines: Callable[..., Any], passes: Any) -> None:
    """A client of two has half of four slots at once, and half of each pass."""
    busy, many, two = engines(endless, n_slots=4), [Heard() for _ in range(12)], [Heard(), Heard()]
    for heard in many:
        submit(busy, a_job(endless, 50_000), heard, Client("a"))
    assert many[3].spoke.wait(60)
    for heard in two:
        submit(busy, a_job(endless, 50_000), heard, Client("b"))
    assert all(heard.spoke.wait(60) for heard in two) and not many[4].events
    n = len(passes)
    until(lambda: len(passes) >= n + 20)
    assert [stepping for stepping, _ in passes[n : n + 20]] == [Counter(a=2, b=2)] * 20
    steps = [len(heard.steps) for heard in many[:4]]
    until(lambda: len(passes) >= n + 40)
    assert all(len(heard.steps) > before for heard, before in zip(many, steps, strict=False)), "nobody stands still"


def test_one_clients_prompts_do_not_slow_down_another_ones_text(
    endless: Any,
    engines: Callable[..., Any],
    passes: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is ahead by 0.2 s, which are 200 tokens, and then takes as much time as the text."""
    monkeypatch.setattr(scheduler, "AHEAD_SECONDS", 0.2)
    busy, heard, many = engines(endless, n_slots=4), Heard(), [Heard() for _ in range(3)]
    submit(busy, a_job(endless, 50_000), heard, Client("b"))
    assert heard.spoke.wait(60)
    for i, other in enumerate(many):
        submit(busy, a_long_job(endless, 300, i), other, Client("a"))
    for other in many:
        other.all()
    n_steps = n_read = 0
    for stepping, read in passes:
        n_steps, n_read = n_steps + stepping["b"], n_read + read["a"]
        assert n_read <= 200 + 64 + n_steps
    assert max(read["a"] for _, read in passes) > 50, "in pieces that are worth their passes"
    n, alone = len(passes), Heard()
    submit(busy, a_long_job(endless, 300, 10), alone, Client("b"))
    alone.all()
    assert len(passes) - n < 30, "its own wait as long as it wants"


def test_a_client_that_comes_anew_has_had_as_little_as_any_other(endless: Any, engines: Callable[..., Any], clock: Clock) -> None:
    """And one that comes again what it had, unless all others had more."""
    busy = engines(endless, n_slots=4)
    first, second = Heard(), Heard()
    ticket = submit(busy, a_job(endless, 50_000), first, Client("a"))
    until(lambda: len(first.steps) > 100)
    submit(busy, a_long_job(endless, 200, 1), second, Client("b"))
    second.all()
    assert busy._used["b"] > 0.3
    had = busy._used["b"]
    again = Heard()
    submit(busy, a_job(endless, 3), again, Client("b"))
    again.all()
    assert busy._used["b"] >= had
    ticket.cancel()
    until(lambda: not busy._running)
    alone = Heard()
    submit(busy, a_job(endless, 3), alone, Client("c"))
    alone.all()
    assert busy._used.keys() == {"c"} and busy._used["c"] < 0.1


def test_prompts_of_clients_are_read_by_turns(
    endless: Any,
    engines: Callable[..., Any],
    passes: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "AHEAD_SECONDS", 0.2)
    busy, many, other = engines(endless, n_slots=4), [Heard() for _ in range(8)], Heard()
    for i, heard in enumerate(many):
        submit(busy, a_long_job(endless, 1000, i), heard, Client("a"))
    submit(busy, a_long_job(endless, 2000, 99), other, Client("b"))
    other.all()
    first, *_, last = (i for i, (_, read) in enumerate(passes) if read["b"])
    read = [read for _, read in passes[first : last + 1]]
    assert sum(each["b"] for each in read) > 0.4 * sum(each["a"] + each["b"] for each in read)


def test_other_work_takes_no_more_time_than_texts(
    endless: Any,
    engines: Callable[..., Any],
    passes: Any,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step of it takes as long as ten passes, so ten passes come between two of them."""
    run = scheduler.Engine._run

    def timed(self: Any, stepping: list[Any], pieces: list[Any]) -> None:
        run(self, stepping, pieces)
        clock.now += 0.125

    monkeypatch.setattr(scheduler.Engine, "_run", timed)
    at = list[int]()

    def work(target: Any) -> Any:
        for _ in range(4):
            at.append(len(passes))
            clock.now += 1.25
            yield

    busy, heard = engines(endless, n_slots=4), Heard()
    submit(busy, a_job(endless, 50_000), heard, Client("b"))
    assert heard.spoke.wait(60)
    for future in busy.beside([work], Client("a")):
        future.result(60)
    assert [after - before for before, after in itertools.pairwise(at)] == [10, 10, 10]


def test_all_texts_of_a_request_are_taken_or_none(endless: Any, engines: Callable[..., Any]) -> None:
    busy = engines(endless, n_slots=1, n_queue=2)
    submit(busy, a_job(endless, 50_000), Heard())
    with pytest.raises(Full):
        busy.submit([a_job(endless, 5)] * 3, [Heard()] * 3, Client())
    assert busy.figures.queued + busy.figures.running == 1
    assert scheduler.MORE_CLIENTS > 0


def test_what_one_owner_said_is_in_nobody_elses_cache(endless: Any, engines: Callable[..., Any]) -> None:
    seats, prompt = Counted(endless, 100), [1, *some(60)]
    first = seats.take(prompt, 90, "ann")
    first.team.target.forward(prompt)
    assert seats.take(prompt, 90, "bob").n_held == 0
    seats.give(first, 61)
    assert seats.take(prompt, 90, "bob").n_held == 0
    assert seats.take(prompt, 90, "ann").n_held == 61
    few = Counted(endless, 100)
    few._most_idle = 1
    seat = few.take(prompt, 90, "ann")
    seat.team.target.forward(prompt)
    few.give(seat, 61)
    assert few.take(prompt, 90, "bob").n_held == 0  # though it sits where the other one was
    shared = engines(endless)
    for who, n in (("ann", 0), ("bob", 0), ("ann", 60)):
        before, heard = shared.figures.cached_tokens, Heard()
        job = a_job(endless, 3, "abc " * 20)
        submit(shared, job, heard, Client(who, who))
        assert_same(endless, job, heard)
        assert (shared.figures.cached_tokens - before >= 20) is (n > 0)
    assert "prompt_tokens_cached_total 12000\n" in exposition(Figures(cached_tokens=12_999))


def test_a_log_that_nobody_reads_stops_nothing() -> None:
    """Its lines are dropped and counted; the process ends as it would."""
    code = (
        "import specdec.cli.serve as serve, time, sys\n"
        "log = serve.Log()\n"
        "for i in range(50_000): log.tell('x' * 100)\n"
        "print('said', flush=True); sys.stdin.readline()\n"
        "time.sleep(0.3); log.tell('at the end'); time.sleep(0.3)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", f"import tests\n{code}"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment, cwd=ROOT) as process:
        assert process.stdout and process.stdout.readline() == "said\n"
        _, log = process.communicate("\n", timeout=60)
    assert process.returncode == 0 and "lines of the log were dropped" in log and "at the end" in log
