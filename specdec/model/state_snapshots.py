"""States of a text as they were at some of its lengths, for a text that goes back farther than buffers remember."""

import math
from typing import NamedTuple

from specdec.kernels import MAX_TOKENS
from specdec.layers.base import Buffers
from specdec.layers.recurrent import BASE, TIP
from specdec.runtime.simd import Float32

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


class Snapshots(list[Snapshot]):
    """Those of a text, the shortest first."""

    def best(self, n: int) -> int:
        """The longest length, of n at most, that there is one of; else 0."""
        return max((each.n for each in self if each.n <= n), default=0)

    def forget(self, n: int) -> None:
        """Those of longer texts: the text behind n tokens is another one."""
        self[:] = [each for each in self if each.n <= n]

    def offer(self, buffers: Buffers, n: int, n_total: int) -> None:
        """A pass has ended behind n tokens of a prompt, of a text that is going to have n_total. Takes one if it is worth it, and
        not of a pass that was broken off.
        """
        last = self[-1].n if self else 0
        is_worth_it = n >= last + APART or (n > last and n == n_total - 1 - BEFORE_END)
        if is_worth_it and not (hasattr(buffers, "states") and (buffers.lengths[..., TIP] != n).any()):
            self.add(snapshot_of(buffers, n))

    def add(self, snapshot: Snapshot) -> None:
        """One of a longer text. Where there are too many, the one goes whose neighbours are nearest to each other."""
        self.append(snapshot)
        most = min(max(MOST_BYTES // snapshot.n_bytes, LEAST), MOST)
        while len(self) > most:
            gaps = [after.n - before for before, after in zip([0, *(each.n for each in self)], self[1:], strict=False)]
            del self[gaps.index(min(gaps))]

    def restore(self, buffers: Buffers, n: int) -> None:
        """Let buffers hold the state behind n tokens, of which there is one, and none of fewer."""
        snapshot = next(each for each in self if each.n == n)
        buffers.inputs[:, _rows(buffers, n)] = snapshot.inputs
        if snapshot.states is not None:
            buffers.states[:, BASE] = buffers.states[:, TIP] = snapshot.states
            buffers.lengths[...] = n


def snapshot_of(buffers: Buffers, n: int) -> Snapshot:
    """What buffers hold of n tokens."""
    states = buffers.states[:, TIP].copy() if hasattr(buffers, "states") else None
    return Snapshot(n, buffers.inputs[:, _rows(buffers, n)].copy(), states)


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
