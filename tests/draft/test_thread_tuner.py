"""Threads, chosen anew while a text is written. The machine is made up, and its clock the steps' own seconds."""

import pytest

from specdec.draft.thread_tuner import LOST_SHARE, SLOW, Pace

QUIET = {1: 1.8, 2: 1.3, 3: 1.1, 4: 1.0}  # a step on so many threads of four cores
ONE_TAKEN = {1: 1.8, 2: 1.4, 3: 1.2, 4: 7.0}
ALL_TAKEN = {1: 3.6, 2: 6.0, 3: 7.0, 4: 8.0}


class Machine:
    """Steps that take what such a machine takes; step: in seconds, of the fastest."""

    def __init__(self, step: float, most: int = 4) -> None:
        self.step, self.used = step, [most]
        self.pace = Pace([*range(most, 0, -1)], most, self.used.append)
        self.seconds = 0.0

    def write(self, takes: dict[int, float], seconds: float, n_proposed: int = 3) -> float:
        """Steps for so long; what they took, as so many times what the best number of threads would have taken."""
        begin, n, end = self.seconds, 0, self.seconds + seconds
        while self.seconds < end:
            step = self.step * takes[self.used[-1]]
            self.seconds += step
            self.pace.saw(n_proposed, step)
            n += 1
        return (self.seconds - begin) / (n * self.step * min(takes.values()))


@pytest.mark.parametrize("step", [0.0003, 0.02, 0.3])
def test_a_core_that_is_taken_costs_a_window_and_trials_their_share(step: float) -> None:
    machine = Machine(step)
    assert machine.write(QUIET, 100 * step) == pytest.approx(1) and machine.used == [4]
    long = max(20.0, 1000 * step)
    for takes in (ONE_TAKEN, ALL_TAKEN, QUIET):
        machine.write(takes, long)
        assert machine.write(takes, 5 * long) < 1 + 2 * LOST_SHARE, takes
    n = len(machine.used)
    assert machine.used[-1] == machine.pace.n_threads == 4
    assert machine.write(QUIET, long) == pytest.approx(1) and len(machine.used) == n


def test_steps_that_are_slow_on_any_number_of_threads_stay_on_all_of_them() -> None:
    machine = Machine(0.001)
    machine.write(QUIET, 1)
    hot = {n: 2 * SLOW * times for n, times in QUIET.items()}
    assert machine.write(hot, 20) < 1 + 2 * LOST_SHARE
    assert machine.used[-1] == 4


def test_steps_that_take_longer_and_longer_are_not_slow() -> None:
    machine = Machine(0.001)
    for percent in range(100, 400):
        machine.write({4: percent / 100}, 0.1)
    assert machine.used == [4]


def test_a_single_stall_and_steps_of_lengths_that_were_not_seen_start_nothing() -> None:
    machine = Machine(0.001)
    machine.write(QUIET, 1)
    machine.pace.saw(3, 0.02)
    machine.write(QUIET, 1)
    for n_proposed in range(4, 40):
        machine.pace.saw(n_proposed, 0.5)
    machine.write(QUIET, 1)
    assert machine.used == [4]


def test_two_threads_have_one_other_number() -> None:
    machine = Machine(0.001, most=2)
    machine.write({1: 1.7, 2: 1.0}, 1)
    machine.write({1: 1.7, 2: 8.0}, 2)
    assert machine.write({1: 1.7, 2: 8.0}, 20) < 1 + 2 * LOST_SHARE
    assert {*machine.used} == {1, 2}


def test_steps_that_another_text_tells_in_the_middle_of_a_choice_are_left_out() -> None:
    machine = Machine(0.02)
    use = machine.used.append

    def interrupted(n: int) -> None:
        machine.pace._use = use
        machine.write(ONE_TAKEN, 5)
        use(n)

    machine.pace._use = interrupted
    machine.write(QUIET, 1)
    while machine.pace._use is interrupted:
        machine.write(ONE_TAKEN, 0.1)
    assert machine.pace.n_threads == machine.used[-1]
    assert machine.write(ONE_TAKEN, 20) < 1.5 and machine.pace.n_threads == machine.used[-1] == 3
