"""Sliding windows: release the memory of keys and values that no token can see any more.

The slot of a token remains its position: released memory keeps its address, reads as zeros, and is never read. For a sequence
that can be truncated to m tokens or more, layers hold the positions from m - window on.
"""

import mmap
from typing import TYPE_CHECKING

from specdec.kernels import MAX_BATCH_TOKENS, KVFormat
from specdec.layers.block import kv_bytes_per_position
from specdec.layers.buffers import Buffers, KVState
from specdec.model_config import ModelConfig
from specdec.runtime.memory import CAN_RELEASE_PAGES, release_pages
from specdec.runtime.simd import PANEL_ROWS, Array

if TYPE_CHECKING:
    from specdec.model.llama import Llama

MAX_REWIND_BYTES = 128 << 20  # kept beyond windows to truncate a sequence; hybrid models keep as much in snapshots
MIN_REWIND_TOKENS = 512  # that can always be truncated: a proposal, and more than a pass
EVICTION_STEP_TOKENS = 512  # positions that are released at a time


class SlidingWindowEvictor:
    """An object that releases memory of the KV cache of windowed layers, for sequences of up to n_positions.

    These are the layers with their own keys and values in which a token may not see all positions. It releases nothing if the
    system cannot release pages, the architecture keeps all of them, or there is a recurrent state.
    """

    def __init__(self, architecture: "Llama", config: ModelConfig, kv: KVFormat, n_positions: int) -> None:
        """Find the windowed layers, and how many tokens to keep so that a sequence can go back."""
        self._windows, per_position = dict[int, int](), 0  # the maximum number of positions that a token sees, by layer
        can_release = architecture.releases_windows and CAN_RELEASE_PAGES and not any(layer.mixer for layer in config.layers)
        for i in range(config.n_layers if can_release else 0):
            layer = config.layer_config(i)
            if layer.attention_window < n_positions and layer.has_attention and layer.has_own_kv:
                self._windows[i] = layer.attention_window
                per_position += kv_bytes_per_position(layer, kv)
        self._max_rewind_tokens = max(MAX_REWIND_BYTES // max(per_position, 1), MIN_REWIND_TOKENS)

    def get_min_rewind(self, n: int) -> int:
        """Return the shortest length to which a sequence of n tokens can be truncated later; 0 if nothing is ever released."""
        return max((n - self._max_rewind_tokens) // EVICTION_STEP_TOKENS * EVICTION_STEP_TOKENS, 0) if self._windows else 0

    def evict(self, buffers: Buffers, old_min_rewind: int, min_rewind: int) -> None:
        """Release the keys and values that a sequence no longer needs, now that it is never truncated below min_rewind tokens.

        Whole panels are released, which then read as zeros. One position more than a window is kept, since a Gemma 4 assistant
        sees one more than its target.

        Args:
            buffers: Buffers of the sequence.
            old_min_rewind: The min_rewind of the last call, whose positions are released already; 0 at first.
            min_rewind: Shortest length to which the sequence can be truncated; `sys.maxsize` releases all positions.
        """
        n_slots = buffers.sizes.n_positions
        for i, window in self._windows.items():
            first, last = (min(max(n - window - 1, 0), n_slots) // PANEL_ROWS * PANEL_ROWS for n in (old_min_rewind, min_rewind))
            if first < last:
                for runs in _find_runs(buffers.layers[i].kv):
                    release_pages(runs, first * runs.shape[1] // n_slots, last * runs.shape[1] // n_slots)

    def saved_bytes(self, buffers: Buffers) -> int:
        """Return the memory in bytes that eviction saves at any time, at least, in a cache with these buffers."""
        # without what a pass, a tree and rounding to a panel add
        n_slots, n_saved = buffers.sizes.n_positions, 0
        n = n_slots - self._max_rewind_tokens - EVICTION_STEP_TOKENS - 2 * MAX_BATCH_TOKENS - PANEL_ROWS
        for i, window in self._windows.items():
            runs = _find_runs(buffers.layers[i].kv)
            n_bytes = (n - window) * sum(each.nbytes for each in runs) // n_slots
            n_saved += max(n_bytes - 2 * sum(map(len, runs)) * mmap.PAGESIZE, 0)
        return n_saved


def _find_runs(kv: KVState | None) -> list[Array]:
    """Return a layer's keys, values and scales as arrays in which each row is a contiguous run of all positions."""
    assert kv
    n_runs = [len(kv.keys), kv.values.shape[0] * kv.values.shape[1], len(kv.key_scales), len(kv.value_scales)]
    return [array.reshape(n, -1) for n, array in zip(n_runs, kv, strict=True) if array.size]
