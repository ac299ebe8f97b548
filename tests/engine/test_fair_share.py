"""The order in which waiting sequences start, and the pass time of clients."""

from collections import deque
from types import SimpleNamespace
from typing import Any

from specdec.engine.fair_share import DELAY_S_PER_TOKEN, MAX_FAIRNESS_GAP_S, FairShare


def make_sequence(max_tokens: int, submit_time: float = 0.0, client: str = "a", n_prompt: int = 8) -> Any:
    request = SimpleNamespace(prompt=[1] * n_prompt, max_tokens=max_tokens)
    return SimpleNamespace(request=request, submit_time=submit_time, client=SimpleNamespace(name=client))


def start_all(waiting: list[Any], n_slots: int = 1) -> list[Any]:
    """Return the order in which sequences start, if each ends before the next one starts."""
    shares, left, order = FairShare(n_slots), deque(waiting), list[Any]()
    while sequence := shares.get_next(left, []):
        left.remove(sequence)
        order.append(sequence)
    return order


def test_a_short_sequence_starts_before_longer_ones_that_wait_already() -> None:
    long = [make_sequence(500, i / 100) for i in range(60)]
    short = make_sequence(20, 5.0)
    assert start_all([*long, short]) == [short, *long], "equal ones keep their order"
    prefill = make_sequence(20, 0.0, n_prompt=8000)
    assert start_all([prefill, short]) == [short, prefill]


def test_a_maximum_beyond_every_float_waits_like_a_long_one() -> None:
    endless, short = make_sequence(10**400), make_sequence(20, 5.0)
    assert start_all([endless, short]) == [short, endless]


def test_an_old_sequence_is_not_overtaken_any_more() -> None:
    old, late = make_sequence(10**6), 3000 * DELAY_S_PER_TOKEN
    assert start_all([old, make_sequence(1, late), make_sequence(1, late)])[0] is old


def test_a_client_with_fewer_running_sequences_is_next_however_long_its_own_are() -> None:
    shares, running = FairShare(4), [make_sequence(5, client="a")]
    short, long = make_sequence(5, client="a"), make_sequence(5000, 1.0, client="b")
    assert shares.get_next(deque([short, long]), running) is long


def test_one_much_shorter_sequence_needs_no_free_slot() -> None:
    shares, running = FairShare(2), [make_sequence(400), make_sequence(500)]
    short, long = make_sequence(50, 9.0), make_sequence(200)
    assert shares.get_next(deque([long]), running) is None
    assert shares.get_next(deque([long, short]), running) is short
    assert shares.get_next(deque([make_sequence(50)]), [*running, short]) is None


def test_a_new_client_starts_with_the_minimum_pass_time() -> None:
    """A returning client keeps its pass time, unless all others have more."""
    shares, a, b, c = FairShare(4), make_sequence(5, client="a"), make_sequence(5, client="b"), make_sequence(5, client="c")
    gap = 0.75 * MAX_FAIRNESS_GAP_S
    shares.start("a", [])
    shares.charge([(a, 1)], 10 * gap)
    shares.start("b", [a])
    assert shares.hold_back([a, b], []) == [a, b]
    shares.charge([(b, 1)], 2 * gap)
    assert shares.hold_back([a, b], []) == [a]
    shares.start("b", [a])
    assert shares.hold_back([a, b], []) == [a], "it has kept its pass time"
    shares.charge([(a, 1)], 10 * gap)
    shares.start("b", [a])
    shares.charge([(b, 1)], 2 * gap)
    assert shares.hold_back([a, b], []) == [a], "it got no credit for the time it was idle"
    shares.start("c", [])
    shares.charge([(c, 1)], gap)
    shares.start("b", [c])
    shares.charge([(b, 1)], gap)
    assert shares.hold_back([c, b], []) == [c, b], "without running sequences, all clients are forgotten"
