"""States of a text as they were at some of its lengths, for a text that goes back farther than buffers remember."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..kernels import MAX_TOKENS
from ..machine.vectors import Float32
from .plan import Buffers
from .states import BASE, TIP

MOST_BYTES = 128 << 20  # of all snapshots of a text; two are kept in any case
LEAST, MOST = 2, 16
APART = 512  # tokens, between those of a prompt
BEFORE_END = 16  # tokens before a prompt's end the last one is taken: templates end what is to go on in words of their own


class Snapshot(NamedTuple):
    """The state behind n tokens: the last inputs of convolutions, and of delta nets the states, if there are any."""

    n: int
    inputs: Float32
    states: Float32 | None

    @property
    def n_bytes(self) -> int:
        return self.inputs.nbytes + (self.states.nbytes if self.states is not None else 0)


class Snapshots:
    """Those of a text, the shortest first."""

    def __init__(self) -> None:
        self._all = list[Snapshot]()

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self._all)

    def best(self, n: int) -> int:
        """The longest length, of n at most, that there is one of; else 0."""
        last = self.last(n)
        return last.n if last else 0

    def forget(self, n: int) -> None:
        """Those of longer texts: the text behind n tokens is another one."""
        self._all = [each for each in self._all if each.n <= n]

    def offer(self, buffers: Buffers, n: int, n_total: int) -> None:
        """A pass has ended behind n tokens of a prompt, of a text that is going to have n_total. Takes one if it is worth it."""
        last = self._all[-1].n if self._all else 0
        if n >= last + APART or (n > last and n == n_total - 1 - BEFORE_END):
            self._take(buffers, n)

    def _take(self, buffers: Buffers, n: int) -> None:
        states = None
        if hasattr(buffers, "states"):
            if (buffers.lengths[..., TIP] != n).any():  # a pass was broken off
                return
            states = buffers.states[:, TIP].copy()
        self.add(Snapshot(n, buffers.inputs[:, _rows(buffers, n)].copy(), states))

    def add(self, snapshot: Snapshot) -> None:
        """One of a longer text. Where there are too many, the one goes whose neighbours are nearest to each other."""
        self._all.append(snapshot)
        most = min(max(MOST_BYTES // snapshot.n_bytes, LEAST), MOST)
        while len(self._all) > most:
            gaps = [after.n - before for before, after in zip([0, *(each.n for each in self._all)], self._all[1:], strict=False)]
            del self._all[gaps.index(min(gaps))]

    def restore(self, buffers: Buffers, n: int) -> None:
        """Let buffers hold the state behind n tokens, of which there is one, and none of fewer."""
        snapshot = next(each for each in self._all if each.n == n)
        buffers.inputs[:, _rows(buffers, n)] = snapshot.inputs
        if snapshot.states is not None:
            buffers.states[:, BASE] = buffers.states[:, TIP] = snapshot.states
            buffers.lengths[...] = n

    def last(self, n: int) -> Snapshot | None:
        """That of the longest length, of n at most."""
        return max((each for each in self._all if each.n <= n), default=None, key=lambda each: each.n)

    def join(self, others: "Snapshots") -> None:
        """Those of longer texts."""
        for each in others:
            self.add(each)

    def take_over(self, other: "Snapshots", n: int) -> None:
        """Those of another text that begins with the same n tokens."""
        self._all = [each for each in other if each.n <= n]


def like(buffers: Buffers, n: int) -> Snapshot:
    """A snapshot whose numbers are yet to come."""
    states = np.empty(buffers.states[:, TIP].shape, np.float32) if hasattr(buffers, "states") else None
    return Snapshot(n, np.empty(buffers.inputs[:, _rows(buffers, n)].shape, np.float32), states)


def snapshot_bytes(shapes: dict[str, tuple[int, ...]]) -> int:
    """What those of a text may take, by the shapes of buffers; nothing where there is no running state."""
    if "inputs" not in shapes:
        return 0
    n_layers, n_rows, n_channels = shapes["inputs"]
    n_bytes = 4 * n_layers * (n_rows - MAX_TOKENS) * n_channels
    n_bytes += 2 * math.prod(shapes.get("states", (0,)))  # one of two, of four bytes each
    return n_bytes * min(max(MOST_BYTES // max(n_bytes, 1), LEAST), MOST)


def _rows(buffers: Buffers, n: int) -> list[int]:
    """Of a ring, those that the next token looks back to."""
    n_rows = buffers.inputs.shape[1]
    return [position % n_rows for position in range(n - (n_rows - MAX_TOKENS), n)]
