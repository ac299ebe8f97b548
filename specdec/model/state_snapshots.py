"""Snapshots of the recurrent state at some lengths of a sequence, to truncate it further than the buffers allow."""

import math
from typing import NamedTuple

from specdec.kernels import MAX_BATCH_TOKENS
from specdec.layers.architecture import Buffers
from specdec.layers.block import BASE, TIP
from specdec.runtime.simd import Float32

MAX_SNAPSHOT_BYTES = 128 << 20  # of all snapshots of a sequence; two are kept in any case
MIN_SNAPSHOTS, MAX_SNAPSHOTS = 2, 16
SNAPSHOT_INTERVAL_TOKENS = 512  # between the snapshots of a prompt
# The last snapshot is taken before the prompt's end, because chat templates end a prompt with tokens of their own.
PROMPT_END_OFFSET_TOKENS = 16


class Snapshot(NamedTuple):
    """A copy of the recurrent state after the first n_tokens tokens of a sequence.

    Attributes:
        n_tokens: Length of the sequence.
        inputs: Last inputs of the convolutions.
        states: States of the delta nets or Mamba-2 layers, if there are any.
    """

    n_tokens: int
    inputs: Float32
    states: Float32 | None

    @property
    def n_bytes(self) -> int:
        """Size in bytes of the snapshot's arrays."""
        return self.inputs.nbytes + (self.states.nbytes if self.states is not None else 0)


class Snapshots(list[Snapshot]):
    """A list of the recurrent-state snapshots of one sequence, in order of length."""

    def find_longest(self, n: int) -> int:
        """Return the length of the longest snapshot of at most n tokens, or 0 if there is none."""
        return max((each.n_tokens for each in self if each.n_tokens <= n), default=0)

    def drop_after(self, n: int) -> None:
        """Drop the snapshots of more than n tokens."""
        self[:] = [each for each in self if each.n_tokens <= n]

    def maybe_take(self, buffers: Buffers, n: int, n_total: int) -> None:
        """Add a snapshot of the buffers after a prefill pass if it is worth its memory and the pass was not interrupted.

        Args:
            buffers: Buffers of the model.
            n: Number of tokens of the sequence that have run.
            n_total: Final length of the sequence.
        """
        last = self[-1].n_tokens if self else 0
        is_worth_it = n >= last + SNAPSHOT_INTERVAL_TOKENS or (n > last and n == n_total - 1 - PROMPT_END_OFFSET_TOKENS)
        if is_worth_it and not (hasattr(buffers, "states") and (buffers.lengths[..., TIP] != n).any()):
            self.add(take_snapshot(buffers, n))

    def add(self, snapshot: Snapshot) -> None:
        """Append a snapshot that is longer than all others, and drop others until the number of snapshots is within the limits.

        Each time, the snapshot with the smallest gap between its two neighbors is dropped. The last one always stays.
        """
        self.append(snapshot)
        max_snapshots = min(max(MAX_SNAPSHOT_BYTES // snapshot.n_bytes, MIN_SNAPSHOTS), MAX_SNAPSHOTS)
        while len(self) > max_snapshots:
            gaps = [
                after.n_tokens - before for before, after in zip([0, *(each.n_tokens for each in self)], self[1:], strict=False)
            ]
            del self[gaps.index(min(gaps))]

    def restore(self, buffers: Buffers, n: int) -> None:
        """Write the snapshot of n tokens, which must exist, to the buffers; they then hold no state of fewer tokens."""
        snapshot = next(each for each in self if each.n_tokens == n)
        buffers.inputs[:, _find_ring_rows(buffers, n)] = snapshot.inputs
        if snapshot.states is not None:
            buffers.states[:, BASE] = buffers.states[:, TIP] = snapshot.states
            buffers.lengths[...] = n


def take_snapshot(buffers: Buffers, n: int) -> Snapshot:
    """Return a snapshot that copies the recurrent state after n tokens out of the buffers."""
    states = buffers.states[:, TIP].copy() if hasattr(buffers, "states") else None
    return Snapshot(n, buffers.inputs[:, _find_ring_rows(buffers, n)].copy(), states)


def snapshot_bytes(shapes: dict[str, tuple[int, ...]]) -> int:
    """Return the maximum size in bytes of all snapshots of a sequence, given buffer shapes; 0 without a recurrent state."""
    if "inputs" not in shapes:
        return 0
    n_layers, n_rows, n_channels = shapes["inputs"]
    n_bytes = 4 * n_layers * (n_rows - MAX_BATCH_TOKENS) * n_channels
    n_bytes += 2 * math.prod(shapes.get("states", (0,)))  # one of the two states, 4 bytes per number
    return n_bytes * min(max(MAX_SNAPSHOT_BYTES // max(n_bytes, 1), MIN_SNAPSHOTS), MAX_SNAPSHOTS)


def _find_ring_rows(buffers: Buffers, n: int) -> list[int]:
    """Return the indexes of the rows of the ring buffer `inputs` that a convolution at position n reads of earlier tokens."""
    n_rows = buffers.inputs.shape[1]
    return [position % n_rows for position in range(n - (n_rows - MAX_BATCH_TOKENS), n)]
