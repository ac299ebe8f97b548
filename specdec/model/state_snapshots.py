"""Snapshots of the recurrent state at some lengths of a sequence, to truncate it further than the buffers allow.

Without one, a conversation that goes on from an earlier point is read anew, which takes 130 s of CPU time for 8,175 tokens of
Qwen3.5-0.8B's shape.
"""

from typing import NamedTuple

from specdec.kernels import MAX_BATCH_TOKENS
from specdec.layers.block import BASE, TIP
from specdec.layers.buffers import Buffers
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
        arrays: Last inputs of each convolution, then the state of each delta net or Mamba-2 layer.
    """

    n_tokens: int
    arrays: list[Float32]

    @property
    def n_bytes(self) -> int:
        """Size in bytes of the snapshot's arrays."""
        return sum(each.nbytes for each in self.arrays)


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

        Without a recurrent state, there is nothing to add.

        Args:
            buffers: Buffers of the model.
            n: Number of tokens of the sequence that have run.
            n_total: Final length of the sequence.
        """
        last = self[-1].n_tokens if self else 0
        is_worth_it = n >= last + SNAPSHOT_INTERVAL_TOKENS or (n > last and n == n_total - 1 - PROMPT_END_OFFSET_TOKENS)
        if is_worth_it and buffers.rings and all((scan.lengths[:, TIP] == n).all() for scan in buffers.scans):
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
        arrays = iter(next(each.arrays for each in self if each.n_tokens == n))
        for ring in buffers.rings:
            ring[_find_ring_rows(ring, n)] = next(arrays)
        for scan in buffers.scans:
            scan.states[BASE] = scan.states[TIP] = next(arrays)
            scan.lengths[...] = n


def take_snapshot(buffers: Buffers, n: int) -> Snapshot:
    """Return a snapshot that copies the recurrent state after n tokens out of the buffers."""
    inputs = [ring[_find_ring_rows(ring, n)] for ring in buffers.rings]
    return Snapshot(n, inputs + [scan.states[TIP].copy() for scan in buffers.scans])


def snapshot_bytes(buffers: Buffers) -> int:
    """Return the maximum size in bytes of all snapshots of a sequence with these buffers; 0 without a recurrent state."""
    n_bytes: int = sum(_count_ring_rows(ring) * ring[0].nbytes for ring in buffers.rings)
    n_bytes += sum(scan.states[TIP].nbytes for scan in buffers.scans)
    if not n_bytes:
        return 0
    return n_bytes * min(max(MAX_SNAPSHOT_BYTES // n_bytes, MIN_SNAPSHOTS), MAX_SNAPSHOTS)


def _count_ring_rows(ring: Float32) -> int:
    """Return the number of earlier tokens' inputs that a convolution with this ring reads."""
    return len(ring) - MAX_BATCH_TOKENS


def _find_ring_rows(ring: Float32, n: int) -> list[int]:
    """Return the indexes of the rows of a ring of inputs that a convolution at position n reads of earlier tokens."""
    return [position % len(ring) for position in range(n - _count_ring_rows(ring), n)]
