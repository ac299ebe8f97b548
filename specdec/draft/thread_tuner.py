"""How many threads a text is written on, while it is: fewer where another program has taken a core. Knows no models.

Threads wait for each other five times a layer, and one that loses its core in the middle of a part holds up all of them: so fewer
may be faster beside a busy loop. No token depends on the number of threads.
"""

import threading
from collections.abc import Callable, Sequence

WINDOW_SECONDS = 0.02  # of steps that are judged together: a program's time slice lasts some milliseconds
SLOW = 1.5  # times the least that such steps took: other numbers of threads are tried
MARGIN = 1.1  # a number of threads has to be so much faster than the likeliest
LOST_SHARE = 0.02  # of the time: what trials may lose
LEAST_WAIT = 0.25  # seconds between two trials
DRIFT = 1.0005  # what is known as the least rises by so much a step: steps take longer as a text grows

# Of the choice before the first text: tokens a trial; the first number unless so much slower
TRIAL_TOKENS, TRIAL_SECONDS, TRIAL_MARGIN = 4, 0.05, 1.25


class Pace:
    """Chooses the number of threads by what steps take.

    choices: numbers that may be best, the likeliest first; n_threads: those in use; use: makes all models run on so many. A trial
    writes some steps on each, and keeps the fastest. It begins where steps have become slow and, while another number than the
    likeliest is in use, from time to time.
    """

    def __init__(self, choices: Sequence[int], n_threads: int, use: Callable[[int], None]) -> None:
        self.n_threads, self._choices, self._first, self._use = n_threads, choices, choices[0], use
        self._least: dict[int, float] = {}  # seconds of a step, by how many tokens were proposed
        self._took = self._expected = 0.0  # seconds of the steps of this window, and the least that such steps took
        self._to_try: list[int] = []  # numbers of threads, in a trial
        self._tried: dict[int, tuple[float, float]] = {}  # of each: `times` and seconds of its window
        self._wait = LEAST_WAIT  # seconds until the next trial
        self._n_slow = 0  # windows in a row
        self._lock = threading.Lock()

    def saw(self, n_proposed: int, seconds: float) -> None:
        """A step, on as many threads as are in use; left out in the middle of another's, of a thread or a signal handler."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._take(n_proposed, seconds)
        finally:
            self._lock.release()

    def _take(self, n_proposed: int, seconds: float) -> None:
        known = self._least.get(n_proposed)
        self._least[n_proposed] = min(seconds, DRIFT * known) if known else seconds
        if not known:
            return
        self._took, self._expected = self._took + seconds, self._expected + known
        if self._took >= WINDOW_SECONDS:
            self._judge(self._took / self._expected, self._took)
            self._took = self._expected = 0.0

    def _judge(self, times: float, seconds: float) -> None:
        """A window is over: what it took, in seconds and as so many times the least."""
        self._wait -= seconds
        self._n_slow = self._n_slow + 1 if times > SLOW else 0
        if self._to_try:
            self._tried[self._to_try[0]] = times, seconds  # then taken off: an interrupt in between loses none
            del self._to_try[0]
        elif self._wait <= 0 and (self._n_slow > 1 or self.n_threads != self._first):  # one may be a single stall
            self._tried = {self.n_threads: (times, seconds)}
            self._to_try = [n for n in self._choices if n != self.n_threads]
        else:
            return
        if self._to_try:
            self._set(self._to_try[0])
            return
        best = min(self._tried, key=lambda n: self._tried[n][0])
        fastest, of_first = self._tried[best][0], self._tried[self._first][0]
        lost = sum(seconds * (1 - fastest / times) for times, seconds in self._tried.values())
        self._wait = max(LEAST_WAIT, lost / LOST_SHARE)
        self._set(best if MARGIN * fastest < of_first else self._first)

    def _set(self, n: int) -> None:
        self.n_threads = n
        self._use(n)


def choose_threads(use: Callable[[int], None], choices: Sequence[int], trial: Callable[[int], float]) -> dict[int, float]:
    """The first of those numbers of threads, or another that is clearly faster; each is tried in turn until the trials have taken
    TRIAL_SECONDS. What each took, as so many times what the first did.

    use: makes all models run on so many; trial: tells what so many tokens take.
    """
    first, seconds = choices[0], dict.fromkeys(choices, 0.0)
    use(1)
    trial(1)  # one thread runs code of its own, which may be yet to be compiled, or loaded
    while sum(seconds.values()) < TRIAL_SECONDS:
        for n in seconds:
            use(n)
            seconds[n] += trial(TRIAL_TOKENS)
    best = min(seconds, key=seconds.__getitem__)
    use(best if TRIAL_MARGIN * seconds[best] < seconds[first] else first)
    return {n: taken / seconds[first] for n, taken in seconds.items()}
