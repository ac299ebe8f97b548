"""The thread tuner on a simulated machine, with the seconds of steps as its clock."""

from collections.abc import Callable

import pytest

from specdec.draft.thread_tuner import MAX_TRIAL_SHARE, SLOW_RATIO, ThreadTuner

QUIET = {1: 1.8, 2: 1.3, 3: 1.1, 4: 1.0}  # relative time of a step by number of threads, on four cores
ONE_TAKEN = {1: 1.8, 2: 1.4, 3: 1.2, 4: 7.0}
ALL_TAKEN = {1: 3.6, 2: 6.0, 3: 7.0, 4: 8.0}


class Machine:
    """A machine that runs steps in given times; `step` is the time in seconds on the best number of threads."""

    def __init__(self, step: float, max_threads: int = 4, is_untried: bool = False) -> None:
        self.step, self.used = step, [max_threads]
        self.set_threads: Callable[[int], None] = self.used.append
        choices = [*range(max_threads, 0, -1)]
        self.tuner = ThreadTuner(choices, max_threads, lambda n_threads: self.set_threads(n_threads), is_untried)
        self.seconds = 0.0

    def run_steps(self, times_by_threads: dict[int, float], seconds: float, n_proposed: int = 3) -> float:
        """Run steps for some seconds; return their time relative to that on the best number of threads."""
        begin, n, end = self.seconds, 0, self.seconds + seconds
        while self.seconds < end:
            step = self.step * times_by_threads[self.used[-1]]
            self.seconds += step
            self.tuner.record_step(n_proposed, step)
            n += 1
        return (self.seconds - begin) / (n * self.step * min(times_by_threads.values()))


@pytest.mark.parametrize("step", [0.0003, 0.02, 0.3])
def test_a_busy_core_costs_one_window_and_the_share_of_trials(step: float) -> None:
    machine = Machine(step)
    assert machine.run_steps(QUIET, 100 * step) == pytest.approx(1) and machine.used == [4]
    long = max(20.0, 1000 * step)
    for times_by_threads in (ONE_TAKEN, ALL_TAKEN, QUIET):
        machine.run_steps(times_by_threads, long)
        assert machine.run_steps(times_by_threads, 5 * long) < 1 + 2 * MAX_TRIAL_SHARE, times_by_threads
    n = len(machine.used)
    assert machine.used[-1] == machine.tuner.n_threads == 4
    assert machine.run_steps(QUIET, long) == pytest.approx(1) and len(machine.used) == n


@pytest.mark.parametrize(("times_by_threads", "best"), [(QUIET, 4), (ONE_TAKEN, 3)])
def test_first_steps_try_each_number_once_if_none_was_tried(times_by_threads: dict[int, float], best: int) -> None:
    machine = Machine(0.3, is_untried=True)
    machine.run_steps(times_by_threads, 0.3 * 30)
    assert machine.used == [4, 3, 2, 1, best]


def test_all_threads_stay_in_use_if_steps_are_slow_on_any_number() -> None:
    machine = Machine(0.001)
    machine.run_steps(QUIET, 1)
    slow = {n: 2 * SLOW_RATIO * times for n, times in QUIET.items()}
    assert machine.run_steps(slow, 20) < 1 + 2 * MAX_TRIAL_SHARE
    assert machine.used[-1] == 4


def test_steps_that_slow_down_gradually_start_no_trial() -> None:
    machine = Machine(0.001)
    for percent in range(100, 400):
        machine.run_steps({4: percent / 100}, 0.1)
    assert machine.used == [4]


def test_a_single_stall_or_a_new_draft_length_starts_no_trial() -> None:
    machine = Machine(0.001)
    machine.run_steps(QUIET, 1)
    machine.tuner.record_step(3, 0.02)
    machine.run_steps(QUIET, 1)
    for n_proposed in range(4, 40):
        machine.tuner.record_step(n_proposed, 0.5)
    machine.run_steps(QUIET, 1)
    assert machine.used == [4]


def test_with_two_threads_only_one_is_the_alternative() -> None:
    machine = Machine(0.001, max_threads=2)
    machine.run_steps({1: 1.7, 2: 1.0}, 1)
    machine.run_steps({1: 1.7, 2: 8.0}, 2)
    assert machine.run_steps({1: 1.7, 2: 8.0}, 20) < 1 + 2 * MAX_TRIAL_SHARE
    assert {*machine.used} == {1, 2}


def test_steps_recorded_during_a_switch_are_ignored() -> None:
    machine = Machine(0.02)

    def interrupted(n: int) -> None:
        machine.set_threads = machine.used.append
        machine.run_steps(ONE_TAKEN, 5)
        machine.used.append(n)

    machine.set_threads = interrupted
    machine.run_steps(QUIET, 1)
    while machine.set_threads is interrupted:
        machine.run_steps(ONE_TAKEN, 0.1)
    assert machine.tuner.n_threads == machine.used[-1]
    assert machine.run_steps(ONE_TAKEN, 20) < 1.5 and machine.tuner.n_threads == machine.used[-1] == 3
