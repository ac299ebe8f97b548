"""A tuner of the number of threads during generation: fewer if another program has taken a core, independent of models.

Threads wait for each other five times per layer, and one that loses its core in the middle of a chunk delays all of them. So
fewer threads may be faster next to a busy loop: the included pair writes 1,760 tokens per second there, and 250 with a fixed
number of threads. No token depends on the number of threads.
"""

import threading
from collections.abc import Callable, Sequence

WINDOW_S = 0.02  # steps of this duration are evaluated together: a program's time slice lasts some milliseconds
SLOW_RATIO = 1.5  # of a window's time to the minimum of such steps: beyond it other numbers of threads are tried
SWITCH_MARGIN = 1.1  # how much faster another number of threads must be than the default
MAX_TRIAL_SHARE = 0.02  # of the time that trials may lose
MIN_WAIT_S = 0.25  # between two trials
BASELINE_DRIFT = 1.0005  # growth of the known minimum per step, since steps take longer as a sequence grows

# For the choice before the first sequence: tokens per trial; time of all; how much faster than the first number another must be;
# time of a step beyond which the numbers are tried in the first steps of a sequence instead, to begin it sooner
TRIAL_TOKENS, TRIAL_BUDGET_S, TRIAL_MARGIN, MAX_TRIAL_STEP_S = 4, 0.05, 1.25, 0.05


class ThreadTuner:
    """A controller that changes the number of threads of all models during generation, according to the time of steps.

    A trial runs some steps on each number and keeps the fastest one. It begins when steps have become slow, and from time to time
    while a number other than the default is in use.

    Args:
        choices: The numbers of threads to choose from; the first is the default.
        n_threads: The number of threads in use.
        set_threads: Sets the number of threads for all models.
        is_untried: Whether the numbers have not been tried yet; then the first steps do.
    """

    def __init__(
        self, choices: Sequence[int], n_threads: int, set_threads: Callable[[int], None], is_untried: bool = False
    ) -> None:
        """Start with `n_threads` threads and without measured steps."""
        self._is_untried = is_untried
        self.n_threads, self._choices, self._default, self._set_threads = n_threads, choices, choices[0], set_threads
        self._min_seconds: dict[int, float] = {}  # minimum time of a step, by the number of tokens that the pass ran
        self._window_seconds = self._expected_seconds = 0.0  # time of this window's steps, and the minimum for such steps
        self._pending_choices: list[int] = []  # numbers of threads yet to try in this trial
        self._trial_results: dict[int, tuple[float, float]] = {}  # by number: slowdown and seconds of its window
        self._wait_seconds = MIN_WAIT_S  # seconds until the next trial
        self._n_slow_windows = 0  # windows in a row
        self._lock = threading.Lock()

    def record_step(self, n_tokens: int, seconds: float) -> None:
        """Record the time of a decoding step, which may begin or end a trial and change the number of threads.

        The step is ignored if another thread, or code that a signal handler interrupted, is in this method.

        Args:
            n_tokens: Number of tokens that the pass of the step ran.
            seconds: Time of the step.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._add_step(n_tokens, seconds)
        finally:
            self._lock.release()

    def _add_step(self, n_tokens: int, seconds: float) -> None:
        """Add a step to the current window, and end the window after WINDOW_S; the first step of a size only sets its minimum."""
        known = self._min_seconds.get(n_tokens)
        self._min_seconds[n_tokens] = min(seconds, BASELINE_DRIFT * known) if known else seconds
        if not known:
            return
        self._window_seconds, self._expected_seconds = self._window_seconds + seconds, self._expected_seconds + known
        if self._window_seconds >= WINDOW_S:
            self._end_window(self._window_seconds / self._expected_seconds, self._window_seconds)
            self._window_seconds = self._expected_seconds = 0.0

    def _end_window(self, slowdown: float, seconds: float) -> None:
        """Evaluate a window of steps: begin, continue or end a trial, and possibly switch to another number of threads.

        Args:
            slowdown: Time of the window, relative to the sum of the minimum times for its steps.
            seconds: Time of the window.
        """
        self._wait_seconds -= seconds
        self._n_slow_windows = self._n_slow_windows + 1 if slowdown > SLOW_RATIO else 0
        if self._pending_choices:
            # stored before it is removed, so that an interrupt in between loses none
            self._trial_results[self._pending_choices[0]] = slowdown, seconds
            del self._pending_choices[0]
        # two slow windows, since one may be a single stall
        elif self._is_untried or (self._wait_seconds <= 0 and (self._n_slow_windows > 1 or self.n_threads != self._default)):
            self._is_untried = False
            self._trial_results = {self.n_threads: (slowdown, seconds)}
            self._pending_choices = [n for n in self._choices if n != self.n_threads]
        else:
            return
        if self._pending_choices:
            self._switch_to(self._pending_choices[0])
            return
        best = min(self._trial_results, key=lambda n: self._trial_results[n][0])
        best_slowdown, default_slowdown = self._trial_results[best][0], self._trial_results[self._default][0]
        lost = sum(seconds * (1 - best_slowdown / slowdown) for slowdown, seconds in self._trial_results.values())
        self._wait_seconds = max(MIN_WAIT_S, lost / MAX_TRIAL_SHARE)
        self._switch_to(best if SWITCH_MARGIN * best_slowdown < default_slowdown else self._default)

    def _switch_to(self, n: int) -> None:
        self.n_threads = n
        self._set_threads(n)


def choose_threads(set_threads: Callable[[int], None], choices: Sequence[int], trial: Callable[[int], float]) -> dict[int, float]:
    """Try numbers of threads, set the fastest one, and return the time on each.

    The numbers are tried in turn until the trials have taken TRIAL_BUDGET_S. The first one stays unless the fastest is better by
    TRIAL_MARGIN.

    Args:
        set_threads: Sets the number of threads for all models.
        choices: The numbers to try.
        trial: A function that generates the given number of tokens and returns the seconds that it took.

    Returns:
        The time on each number of threads, relative to the first one.
    """
    first, seconds = choices[0], dict.fromkeys(choices, 0.0)
    set_threads(1)
    trial(1)  # a single thread runs other code, which may have to be compiled or loaded first
    while sum(seconds.values()) < TRIAL_BUDGET_S:
        for n in seconds:
            set_threads(n)
            seconds[n] += trial(TRIAL_TOKENS)
    best = min(seconds, key=seconds.__getitem__)
    set_threads(best if TRIAL_MARGIN * seconds[best] < seconds[first] else first)
    return {n: elapsed / seconds[first] for n, elapsed in seconds.items()}
