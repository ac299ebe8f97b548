"""Layers with a window: memory of what no token sees any more goes back to the system. Knows no pass and no tokens.

The slots of a cache stay positions: what is given back reads as zeros, and nobody reads it. Of a text whose shortest length to go
back to is m, layers hold the positions from m - window on.
"""

import mmap
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

from specdec.config import Config
from specdec.kernels import MAX_TOKENS, KVCache
from specdec.layers.base import Architecture, Buffers, Weights
from specdec.layers.block import CACHED, has_own_cache, position_bytes
from specdec.runtime.memory import GIVES_BACK, give_back
from specdec.runtime.simd import ceil_div
from specdec.runtime.tile import STRIP_ROWS

MOST_BYTES = 128 << 20  # that a text keeps beyond windows to go back by, as hybrids do in snapshots
LEAST = 512  # tokens that a text can go back by in any case: a proposal, and more than a pass
STEP = 512  # positions that are given back at a time


class Windowed(NamedTuple):
    """Layer i: how many positions a token sees, what a position takes, in how many runs of memory positions follow each other."""

    i: int
    n_seen: int
    position_bytes: int
    n_runs: int


class Windows:
    """Those of a model for texts of n_positions; none where the system takes nothing back, or the architecture is not asked."""

    def __init__(self, architecture: Architecture, config: Config, weights: Weights, kv: KVCache, n_positions: int) -> None:
        self._caches = architecture.caches
        self._config, self._weights = config, weights
        self._layers = [*_windowed(config, weights, kv, n_positions)] if self._caches and GIVES_BACK else []
        per_position = sum(layer.position_bytes for layer in self._layers)
        self._slack = max(MOST_BYTES // max(per_position, 1), LEAST)

    def shortest(self, n: int) -> int:
        """The length that a text of n tokens may go back to: what lies before its windows is not worth its memory."""
        return max((n - self._slack) // STEP * STEP, 0) if self._layers else 0

    def give_back(self, buffers: Buffers, before: int, shortest: int) -> None:
        """What a text of such a shortest length needs no more, beyond that of a text whose shortest length was another one; an
        assistant sees one position more than its target.
        """
        self._each(buffers, lambda layer: (max(before - layer.n_seen - 1, 0), shortest - layer.n_seen - 1))

    def give_all_back(self, buffers: Buffers) -> None:
        """All that these layers hold."""
        self._each(buffers, lambda layer: (0, sys.maxsize))

    def saved_bytes(self, n_slots: int) -> int:
        """What a cache of so many slots does not hold at any time."""
        n = n_slots - self._slack - STEP - 2 * MAX_TOKENS - STRIP_ROWS  # a pass and a tree, and what a strip holds more
        saved = ((n - each.n_seen) * each.position_bytes - 2 * each.n_runs * mmap.PAGESIZE for each in self._layers)
        return sum(max(n_bytes, 0) for n_bytes in saved)

    def _each(self, buffers: Buffers, positions: Callable[[Windowed], tuple[int, int]]) -> None:
        """Of each layer whole strips of those positions, first and last."""
        caches = self._caches(self._config, self._weights, buffers) if self._caches and self._layers else []
        for layer in self._layers:
            own = caches[layer.i]
            n_slots = own.values.shape[-2]
            first, last = (min(at, n_slots) // STRIP_ROWS * STRIP_ROWS for at in positions(layer))
            for name in CACHED:
                if first < last and (array := getattr(own, name)).size:
                    runs = array.reshape(-1, array[0].size // (array.shape[1] if name == "values" else 1))
                    give_back(runs, first * (runs.shape[1] // n_slots), last * (runs.shape[1] // n_slots))


def _windowed(config: Config, weights: Weights, kv: KVCache, n_positions: int) -> Iterator[Windowed]:
    """The layers with keys and values of their own of which a token of such a text may not see all."""
    for i in range(config.n_layers):
        own = config.of_layer(i)
        if own.n_seen < n_positions and has_own_cache(config, weights, i):
            n_runs = own.n_kv_heads * (1 + ceil_div(own.head_dim, STRIP_ROWS) + 2 * kv.is_scaled)
            yield Windowed(i, own.n_seen, position_bytes(own, kv), n_runs)
