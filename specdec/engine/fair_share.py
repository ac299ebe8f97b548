"""Fair sharing of the passes between clients: who is next to start, in which order sequences run, and who is ahead in time."""

from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as GenericSequence

from specdec.engine.sequence import Sequence

MAX_FAIRNESS_GAP_S = 1.0  # lead in pass time over another client, beyond which a client's prompts wait
DELAY_S_PER_TOKEN = 0.1  # that an expected token may be overtaken for: a sequence of 500 by short ones of the next 50 s
PROMPT_TOKENS_PER_TOKEN = 8  # that run in the time of one generated token
MAX_EXPECTED_TOKENS = 2048  # of a sequence, however high its limit is
SHORT_RATIO = 4  # of the work of the shortest running sequence to that of one that needs no free slot


class FairShare:
    """The shares of the clients: counts their pass time, chooses which one starts next, and holds back those ahead of others.

    Pass time is the time of forward passes that is charged to a client, as in the virtual token counter of "Fairness in Serving
    Large Language Models" (arXiv 2401.00588).

    Args:
        max_running: Sequences per pass.
    """

    def __init__(self, max_running: int) -> None:
        """Start without clients."""
        self._max_running, self._seconds = max_running, dict[str, float]()

    def charge(self, token_counts: GenericSequence[tuple[Sequence, int]], seconds: float) -> None:
        """Divide the time of a pass between the clients, in proportion to the tokens that the pass ran for them."""
        n_run = sum(n for _, n in token_counts)
        for sequence, n in token_counts:
            self._seconds[sequence.client.name] += seconds * n / n_run

    def start(self, client: str, running: Collection[Sequence]) -> None:
        """Set the pass time of a client that starts a sequence, so that it gets no credit for the time it was idle.

        It is the lowest pass time of the running clients, or the client's own earlier pass time if that is higher. Idle clients
        that are not ahead of this minimum are forgotten; if no sequence is running, all are.

        Args:
            client: The client's name.
            running: The sequences that run already.
        """
        names = {sequence.client.name for sequence in running}
        min_seconds = min([self._seconds[name] for name in names], default=0.0)
        known = self._seconds if names else dict[str, float]()
        self._seconds = {name: seconds for name, seconds in known.items() if name in names or seconds > min_seconds}
        self._seconds.setdefault(client, min_seconds)

    def get_next(self, waiting: Collection[Sequence], running: Collection[Sequence]) -> Sequence | None:
        """Return the next waiting sequence of the client with the fewest running ones, or None if it has to wait.

        Among the sequences of such clients, short ones overtake long ones that have not waited much longer. It has to wait while
        `max_running` sequences run. If the client has less than its share of them, or the sequence is much shorter than all that
        run, twice as many may run.
        """
        if not waiting:
            return None
        n_running = Counter(sequence.client.name for sequence in running)
        first = min(waiting, key=lambda sequence: (n_running[sequence.client.name], _get_deadline(sequence)))
        n_clients = len({sequence.client.name for sequence in waiting} | n_running.keys())
        has_less = n_running[first.client.name] < max(self._max_running // n_clients, 1)
        is_short = self._max_running > 1 and SHORT_RATIO * _count_work(first) <= min(map(_count_work, running), default=0.0)
        return first if len(running) < self._max_running * (2 if has_less or is_short else 1) else None

    @staticmethod
    def interleave(running: list[Sequence]) -> list[Sequence]:
        """Return the sequences in turns: the first one of each client, then the second of each, and so on."""
        if len(running) < 2:
            return running
        n_before, ranked = Counter[str](), list[tuple[int, Sequence]]()
        for sequence in running:
            ranked.append((n_before[sequence.client.name], sequence))
            n_before[sequence.client.name] += 1
        return [sequence for _, sequence in sorted(ranked, key=lambda each: each[0])]

    def hold_back(self, prefilling: list[Sequence], decode_batch: list[Sequence]) -> list[Sequence]:
        """Return the sequences to prefill, except those of clients that are too far ahead of another one in pass time.

        A client is too far ahead if its pass time exceeds the lowest one in this pass by more than `MAX_FAIRNESS_GAP_S`.

        Args:
            prefilling: The sequences to choose from.
            decode_batch: The sequences that decode in this pass; their clients count for the lowest pass time.
        """
        if len(prefilling) + len(decode_batch) < 2:
            return prefilling
        max_seconds = MAX_FAIRNESS_GAP_S + min(self._seconds[each.client.name] for each in (*decode_batch, *prefilling))
        return [sequence for sequence in prefilling if self._seconds[sequence.client.name] <= max_seconds]


def _get_deadline(sequence: Sequence) -> float:
    """Return the time after which no newer sequence overtakes a waiting one; the longer its expected work, the later it is."""
    return sequence.submit_time + DELAY_S_PER_TOKEN * _count_work(sequence)


def _count_work(sequence: Sequence) -> float:
    """Return the expected work of a sequence in generated tokens."""
    request = sequence.request
    n_generated = min(request.max_tokens, MAX_EXPECTED_TOKENS)  # first, since an int may be too large for a float
    return min(len(request.prompt) / PROMPT_TOKENS_PER_TOKEN + n_generated, MAX_EXPECTED_TOKENS)
