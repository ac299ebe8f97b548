"""Fair sharing of the passes between clients: who is next to start, in which order sequences run, and who is ahead in time."""

from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as GenericSequence

from specdec.engine.sequence import Sequence

MAX_FAIRNESS_GAP_S = 1.0  # lead in pass time over another client, beyond which a client's prompts wait


class FairShare:
    """The pass time of each client: of those that run, and of those that were ahead of them.

    After the virtual token counter of "Fairness in Serving Large Language Models" (arXiv 2401.00588).

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

        It is the lowest pass time of the running clients, or the client's own earlier pass time if that is higher.
        """
        names = {sequence.client.name for sequence in running}
        min_seconds = min([self._seconds[name] for name in names], default=0.0)
        known = self._seconds if names else dict[str, float]()
        self._seconds = {name: seconds for name, seconds in known.items() if name in names or seconds > min_seconds}
        self._seconds.setdefault(client, min_seconds)

    def get_next(self, waiting: Collection[Sequence], running: Collection[Sequence]) -> Sequence | None:
        """Return the first waiting sequence of the client with the fewest running ones, or None if it has to wait.

        It has to wait while no slot is free, unless the client has less than its share of the slots.
        """
        if not waiting:
            return None
        n_running = Counter(sequence.client.name for sequence in running)
        first = min(waiting, key=lambda sequence: n_running[sequence.client.name])
        n_clients = len({sequence.client.name for sequence in waiting} | n_running.keys())
        has_less = n_running[first.client.name] < max(self._max_running // n_clients, 1)
        return first if len(running) < self._max_running * (2 if has_less else 1) else None

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
        """Return the sequences to prefill whose clients are not too far ahead of the others in this pass."""
        if len(prefilling) + len(decode_batch) < 2:
            return prefilling
        max_seconds = MAX_FAIRNESS_GAP_S + min(self._seconds[each.client.name] for each in (*decode_batch, *prefilling))
        return [sequence for sequence in prefilling if self._seconds[sequence.client.name] <= max_seconds]
