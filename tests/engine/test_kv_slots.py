"""Who sits where: what goes over from one cache to another, who waits for it, and how much memory that takes."""

from dataclasses import replace
from queue import SimpleQueue

import numpy as np
import pytest

from specdec import Sampling, SpeculativeDecoder
from specdec.engine.decoding import Job
from specdec.engine.kv_slots import Seats
from specdec.loaders import load_checkpoint
from specdec.model.registry import architecture_of
from specdec.model.transformer import Transformer
from specdec.tokenizer import BOS
from tests.engine.test_batched_families import letters  # noqa: F401
from tests.engine.test_scheduler import Heard, assert_same, endless, engines, submit  # noqa: F401  (fixtures)
from tests.tools.hf_folders import CONFIGS, FIXTURES

RNG = np.random.default_rng(0)
BEGINS = [BOS, *RNG.integers(3, 64, 12).tolist()]


def some(n):
    return RNG.integers(3, 64, n).tolist()


class Counted(Seats):
    """Seats of a decoder for so many texts of 256 tokens, which counts those that it makes."""

    def __init__(self, decoder, n_texts):
        self.size, self.n_made = decoder.team.seat().target.text_bytes(256, True), 0

        def new():
            self.n_made += 1
            return decoder.team.seat()

        super().__init__(new, int(n_texts * self.size), 16)

    @property
    def n_bytes(self):
        return sum(seat.n_bytes(seat.n_most) for seat in (*self._idle, *self._taken))

    def writes(self, prompt, n_more):
        """A seat that has run a prompt and so many tokens behind it; None: no room."""
        seat = self.take(prompt, len(prompt) + n_more)
        if seat:
            seat.team.target.forward(prompt)
        return seat


def test_what_prompts_begin_with_goes_over_and_each_talk_keeps_its_own(endless):
    seats = Counted(endless, 100)
    first = seats.writes([*BEGINS, *some(60)], 10)
    second = seats.take([*BEGINS, *some(20)], 60)  # from one that is taken
    assert second is not first and (first.n_held, second.n_held) == (73, 13)
    talk = [*BEGINS, *some(40)]
    second.team.target.forward(talk)
    for seat in (first, second):
        seats.give(seat, seat.n_held)
    assert seats.take([*talk, 5, 6], 90) is second  # which goes on
    third = seats.take([*talk[:40], 5, 6], 90)
    assert third not in (first, second) and third.n_held == 40
    fourth = seats.take([BOS, *some(30)], 90)
    assert fourth.n_held == 0 and first.n_held == 73 and seats.n_made == 4


@pytest.mark.parametrize("n_large", [3000, 1700])
def test_a_large_cache_gives_way_to_small_ones_that_begin_alike(endless, n_large):
    seats = Counted(endless, 6)
    seats.give(seats.writes([*BEGINS, *some(n_large)], 2), n_large)
    for _ in range(3):
        taken = [seats.writes([*BEGINS, *some(20)], 100) for _ in range(4)]
        assert all(seat and seat.n_most == 256 for seat in taken) and seats.n_bytes <= 6 * seats.size
        for seat in taken:
            seats.give(seat, 130)


def test_the_largest_text_that_there_is_room_for_begins_anew_where_it_lies(endless):
    seats, prompt = Counted(endless, 6), [*BEGINS, *some(1500)]
    seat = seats.writes([*prompt, *some(100)], 0)
    seats.give(seat, 1613)
    assert seats.take(prompt, 1613) is seat


def test_who_waits_for_room_costs_nothing(endless):
    seats = Counted(endless, 3)
    seats.give(seats.writes([*BEGINS, *some(100)], 0), 113)
    runs, n_made = seats.writes([BOS, 4], 500), seats.n_made
    idle = [*seats._idle]
    assert all(seats.take([*BEGINS, *some(10)], 280) is None for _ in range(20))
    assert seats.n_made == n_made and seats._idle == idle
    seats.give(runs, 500)
    assert seats.take([*BEGINS, *some(10)], 280).n_held == 13


@pytest.mark.parametrize("name", ["lfm2", "qwen35"])
def test_nobody_waits_for_a_state_that_cannot_go_over(name, letters, engines):
    """That of a long text which has gone on."""
    checkpoint = load_checkpoint(FIXTURES / name)
    weights = architecture_of(checkpoint.config).pack(checkpoint.config, checkpoint.tensors)
    model = Transformer(checkpoint.config, weights, 1, 40_000)
    decoder = SpeculativeDecoder(model, None, letters(CONFIGS[name].vocab_size))
    engine, reads, asks = engines(decoder), Heard(), Heard()
    submit(engine, Job([*BEGINS, *some(20_000)], 2, Sampling(0.0)), reads)
    job = Job([*BEGINS, 7, 8, 9], 2, Sampling(0.0))
    while not asks.events:
        with model.lock:
            if engine._running and engine._running[0].model.n_held >= 200:
                submit(engine, job, asks)
                break
    assert_same(decoder, job, asks)
    assert not reads.events


def test_who_leads_a_short_prompt_is_read_before_longer_ones(endless, engines):
    engine, ended = engines(endless), SimpleQueue()

    def hear(name):
        return lambda event: ended.put(name) if isinstance(event, Exception) or getattr(event, "stop_reason", None) else None

    begins = [BOS, *some(150)]
    with endless.target.lock:
        tickets = [submit(engine, Job([BOS, *some(20_000)], 1, Sampling(0.0)), hear("oldest"))]
        tickets += [submit(engine, Job([BOS, *some(500)], 1, Sampling(0.0)), hear("longer")) for _ in range(4)]
        tickets.append(submit(engine, Job([*begins, *some(10_000)], 1, Sampling(0.0)), hear("leader")))
        tickets.append(submit(engine, Job([*begins, 5, 6], 1, Sampling(0.0)), hear("short")))
    assert (first := ended.get(timeout=60)) == "short", first
    for ticket in tickets:
        ticket.cancel()


def test_where_nothing_goes_over_for_want_of_memory_that_text_fails_alone(endless, engines, monkeypatch):
    own, n_failed = Transformer._take_over, 0

    def fails(model, other, n):
        nonlocal n_failed
        if n_failed < 5:
            n_failed += 1
            raise MemoryError("no room")
        own(model, other, n)

    monkeypatch.setattr(Transformer, "_take_over", fails)
    engine, begins = engines(endless, n_slots=3), [BOS, *some(200)]
    jobs = [Job([*begins[: 30 + 5 * i], *some(10)], 20, Sampling(1.0, seed=i)) for i in range(30)]
    heard = [Heard() for _ in jobs]
    for job, told in zip(jobs, heard, strict=True):
        submit(engine, job, told)
    n_told = sum(isinstance(told.all()[-1], Exception) for told in heard)
    for job, told in zip(jobs, heard, strict=True):
        if not isinstance(told.events[-1], Exception):
            assert_same(endless, job, told)
    assert n_told == n_failed == 5 and not engine._seats._taken


@pytest.mark.parametrize("n_slots", [1, 2, 8])
def test_a_prompt_that_was_changed_in_the_middle_finds_all_of_it_again(endless, engines, n_slots):
    """A, with another date A', A: what stood behind the date is there still, however many other talks there were."""
    engine = engines(endless, n_slots)
    one = [BOS, *some(300)]
    two = [*one[:150], 3 + (one[150] - 2) % 61, *one[151:]]

    def n_cached(prompt):
        before, heard = engine.figures.cached_tokens, Heard()
        submit(engine, Job(prompt, 2, Sampling(0.0)), heard)
        heard.all()
        return engine.figures.cached_tokens - before

    assert n_cached(one) == 0 and n_cached(two) == 150
    for _ in range(3):
        assert n_cached(one) == n_cached(two) == 300


def test_a_copy_is_made_in_another_place_than_that_which_is_copied(endless):
    """Where as many are idle as may be, and the longest idle one is that which holds the beginning."""
    seats = Counted(endless, 100)
    seats._most_idle = 2
    one = [*BEGINS, *some(60)]
    first, second = seats.writes(one, 2), seats.writes([BOS, *some(60)], 2)
    for seat in (first, second):
        seats.give(seat, 75)
    seat = seats.take([*one[:30], *second.team.target._held[1:4]], 80)
    assert seat is second and seat.n_held == 30 and first.n_held == len(one) and seats._idle == [first]


def test_a_seat_whose_prompt_cannot_be_restored_takes_no_room(endless):
    class Broken:
        def restore(self, *_):
            raise MemoryError

    seats, made = Counted(endless, 2), []
    new = seats._new
    seats._new = lambda: made.append(1) or replace(new(), prompts=Broken())
    for _ in range(5):
        with pytest.raises(MemoryError):
            seats.take([*BEGINS, *some(10)], 200)
    assert len(made) == 5 and not seats._taken
