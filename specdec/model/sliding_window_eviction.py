"""Sliding windows: release the memory of keys and values that no token can see any more.

The slot of a token remains its position: released memory keeps its address, reads as zeros, and is never read. For a sequence
that can be truncated to m tokens or more, layers hold the positions from m - window on.
"""

import mmap
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from specdec.kernels import MAX_BATCH_TOKENS, KVFormat
from specdec.layers.block import kv_bytes_per_position
from specdec.layers.buffers import Buffers
from specdec.model_config import ModelConfig
from specdec.runtime.memory import CAN_RELEASE_PAGES, release_pages
from specdec.runtime.simd import PANEL_ROWS, ceil_div

if TYPE_CHECKING:
    from specdec.model.llama import Llama

MAX_REWIND_BYTES = 128 << 20  # kept beyond windows to truncate a sequence; hybrid models keep as much in snapshots
MIN_REWIND_TOKENS = 512  # that can always be truncated: a proposal, and more than a pass
EVICTION_STEP_TOKENS = 512  # positions that are released at a time


class WindowedLayer(NamedTuple):
    """An attention layer in which a token may not see all positions, and the memory of its keys and values.

    Attributes:
        layer_index: Index of the layer.
        window: Maximum number of positions that a token sees.
        bytes_per_position: Bytes of a position's keys and values.
        n_runs: Number of contiguous runs of positions in memory.
    """

    layer_index: int
    window: int
    bytes_per_position: int
    n_runs: int


class SlidingWindowEvictor:
    """An object that releases memory of the KV cache of windowed layers, for sequences of up to n_positions.

    It releases nothing if the system cannot release pages or the architecture keeps all of them.
    """

    def __init__(self, architecture: "Llama", config: ModelConfig, kv: KVFormat, n_positions: int) -> None:
        """Find the windowed layers, and how many tokens to keep so that a sequence can go back."""
        can_release = architecture.releases_windows and CAN_RELEASE_PAGES
        self._layers = [*_find_windowed_layers(config, kv, n_positions)] if can_release else []
        per_position = sum(layer.bytes_per_position for layer in self._layers)
        self._max_rewind_tokens = max(MAX_REWIND_BYTES // max(per_position, 1), MIN_REWIND_TOKENS)

    def get_min_rewind(self, n: int) -> int:
        """Return the shortest length to which a sequence of n tokens can be truncated later; 0 if nothing is ever released."""
        return max((n - self._max_rewind_tokens) // EVICTION_STEP_TOKENS * EVICTION_STEP_TOKENS, 0) if self._layers else 0

    def evict(self, buffers: Buffers, old_min_rewind: int, min_rewind: int) -> None:
        """Release the keys and values that a sequence no longer needs, now that it is never truncated below min_rewind tokens.

        One position more than a window is kept, since a Gemma 4 assistant sees one more than its target.

        Args:
            buffers: Buffers of the sequence.
            old_min_rewind: The min_rewind of the last call, whose positions are released already; 0 at first.
            min_rewind: Shortest length to which the sequence can be truncated.
        """
        self._release(buffers, lambda layer: (max(old_min_rewind - layer.window - 1, 0), min_rewind - layer.window - 1))

    def evict_all(self, buffers: Buffers) -> None:
        """Release the memory of all keys and values of the windowed layers, which then read as zeros."""
        self._release(buffers, lambda layer: (0, sys.maxsize))

    def saved_bytes(self, n_slots: int) -> int:
        """Return the memory in bytes that eviction saves at any time, at least, in a cache with n_slots slots."""
        # without what a pass, a tree and rounding to a panel add
        n = n_slots - self._max_rewind_tokens - EVICTION_STEP_TOKENS - 2 * MAX_BATCH_TOKENS - PANEL_ROWS
        saved = ((n - each.window) * each.bytes_per_position - 2 * each.n_runs * mmap.PAGESIZE for each in self._layers)
        return sum(max(n_bytes, 0) for n_bytes in saved)

    def _release(self, buffers: Buffers, get_range: Callable[[WindowedLayer], tuple[int, int]]) -> None:
        """Release the whole panels of keys and values of each windowed layer between the positions that get_range returns."""
        for layer in self._layers:
            kv = buffers.layers[layer.layer_index].kv
            assert kv
            n_slots = kv.values.shape[2]
            first, last = (min(at, n_slots) // PANEL_ROWS * PANEL_ROWS for at in get_range(layer))
            for array in kv:
                if first < last and array.size:
                    n_runs = len(array) * (array.shape[1] if array is kv.values else 1)
                    runs = array.reshape(n_runs, -1)
                    release_pages(runs, first * (runs.shape[1] // n_slots), last * (runs.shape[1] // n_slots))


def _find_windowed_layers(config: ModelConfig, kv: KVFormat, n_positions: int) -> Iterator[WindowedLayer]:
    """Yield a `WindowedLayer` for each layer with its own keys and values in which a token may not see all n_positions."""
    for i in range(config.n_layers):
        layer = config.layer_config(i)
        if layer.attention_window < n_positions and layer.has_attention and layer.has_own_kv:
            n_runs = layer.n_kv_heads * (1 + ceil_div(layer.head_dim, PANEL_ROWS) + 2 * kv.is_scaled)
            if latent := layer.attention.latent:
                n_runs = latent.cache_width // PANEL_ROWS + kv.is_scaled
            yield WindowedLayer(i, layer.attention_window, kv_bytes_per_position(layer, kv), n_runs)
