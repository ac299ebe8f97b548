"""Model: the weights of a language model and its forward pass over a batch of sequences, each with its own KV cache.

Shapes: N logits of a sequence, V vocab.
"""

import bisect
import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

from specdec.argument_checks import check_choice, check_int
from specdec.kernels import MAX_BATCH_TOKENS
from specdec.layers.block import kv_bytes_per_position
from specdec.layers.buffers import Allocator, Buffers, BufferSizes, SharedBuffers
from specdec.layers.kv_formats import KV_FORMATS
from specdec.layers.weights import Weights
from specdec.model import get_architecture
from specdec.model.kv_cache import KVCache
from specdec.model.sliding_window_eviction import SlidingWindowEvictor
from specdec.model.state_snapshots import snapshot_bytes
from specdec.model_config import ModelConfig
from specdec.runtime.cpu_topology import get_thread_choices
from specdec.runtime.op_program import BatchEntry
from specdec.runtime.parallel_region import create_fork_safe_lock, get_available_threads, rebuild
from specdec.runtime.simd import PANEL_ROWS, Float32, Int64, round_up

KVFormatName = Literal["auto", "f32", "f16", "q8"]  # format of keys and values
# One sequence of a batch: its cache, all of its tokens, the number of logits at its end, and optionally its final length
BatchInput = tuple[KVCache, Sequence[int], int] | tuple[KVCache, Sequence[int], int, int]
REENTRANT_CALL_MESSAGE = "this thread is in the middle of a pass of this model; a signal handler cannot use it"


def get_kv_format(weights: Weights, kv: KVFormatName) -> KVFormatName:
    """Return the KV cache format kv; "auto" becomes "f32" if all weights are float32, else "f16"."""
    if kv == "auto":
        return "f32" if weights.format_names == "fp32" else "f16"
    return kv


def count_kv_bytes_per_token(config: ModelConfig, kv: KVFormatName) -> int:
    """Return the bytes that a token takes in the KV caches of all layers that have one, in the format kv, which is not "auto"."""
    layers = (config.layer_config(i) for i in range(config.n_layers))
    return sum(kv_bytes_per_position(layer, KV_FORMATS[kv]) for layer in layers if layer.has_own_kv and layer.has_attention)


class Model:
    """A language model on CPU threads: packed weights and a forward program. It knows no sequence; see `new_cache`.

    Threads may share a model. One pass runs at a time; its logits are valid until the next pass, so hold `lock` while reading
    logits that another thread's pass must not overwrite. A model can be pickled and copied. Beyond its seq_len it sees a sliding
    window of that many positions.

    Args:
        config: Config of the model.
        weights: Packed weights (`WeightPlan.pack`).
        n_threads: Number of threads; by default all cores.
        n_positions: Maximum length of a sequence. By default seq_len, which is also the limit of learned positions.
        kv: Format of keys and values: "f32"; "f16", rounded to nearest and NaN beyond its range; "q8", bytes with a scale for
            each head; "auto", f32 if all weights are f32, else f16.

    Attributes:
        config: Config of the model.
        weights: Packed weights, in arrays that begin at cache lines.
        architecture: The architecture that the config names.
        has_recurrent_state: Whether a sequence has a recurrent state next to its keys and values.
        kv: Format of keys and values: f32, f16 or q8.
        n_positions: Maximum length of a sequence in tokens.
        max_threads: Largest value of `n_threads`.
        lock: Lock to hold while reading logits that no other pass may overwrite.
        n_passes: Number of passes so far, so that a reader of logits can detect a pass that a signal handler ran meanwhile.

    Raises:
        ValueError: If weights do not have the config's shapes, the machine does not have n_threads, n_positions is below 1 or
            above the config's max_positions, or kv is unknown.
    """

    lock: "threading._RLock"
    # As a draft: layers before which it reads its target's hidden states (heads/head.py), and the number of the target's tokens
    # that it can propose, or None if it is the whole vocabulary
    target_layers: tuple[int, ...] = ()
    n_shared_tokens: int | None = None

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        n_threads: int | None = None,
        n_positions: int | None = None,
        kv: KVFormatName = "auto",
    ) -> None:
        """Check the config and the weights, and choose the threads and the KV cache format."""
        if error := config.find_error():
            raise ValueError(error)
        self.architecture = get_architecture(config)
        self.architecture.plan_weights(config, {}).check(weights)
        self.config, self.weights = config, weights.align()
        self.has_recurrent_state = any(layer.mixer for layer in config.layers)
        self.kv: KVFormatName = get_kv_format(weights, check_choice("kv", kv, get_args(KVFormatName)))
        self.max_threads = get_available_threads()
        self.n_threads = get_thread_choices()[0] if n_threads is None else n_threads
        self.max_threads = self.max_threads if n_threads is None else self.n_threads
        self.n_positions = config.seq_len if n_positions is None else check_int("n_positions", n_positions, 1)
        if config.learned_positions:
            self.n_positions = min(self.n_positions, config.seq_len)
        if 0 < config.max_positions < self.n_positions:
            raise ValueError(
                f"n_positions must be at most {config.max_positions}, got {self.n_positions}: beyond that, the model has other "
                "RoPE angles, which are not supported"
            )
        self.window_evictor = SlidingWindowEvictor(self.architecture, config, KV_FORMATS[self.kv], self.n_positions)
        create_fork_safe_lock(self, "lock")
        self._shared_buffers = SharedBuffers()
        self._experts_read: Int64 | None = None  # number of experts that the last pass has read in each layer
        self._is_running = False
        self.n_passes = 0

    def __repr__(self) -> str:
        """Return the architecture, the sizes and the weight formats as text."""
        c = self.config
        return f"<{c.architecture} of {c.n_layers} layers x {c.dim}, {c.vocab_size} tokens, {self.weights.format_names}>"

    def __reduce__(self) -> tuple[object, ...]:
        """Return what pickle needs to rebuild the model with the same weights and options."""
        options = {"n_threads": self.max_threads, "n_positions": self.n_positions, "kv": self.kv}
        return rebuild, (type(self), self._get_parts(), options)

    def _get_parts(self) -> tuple[Any, ...]:
        """Return the arguments of the constructor other than options."""
        return self.config, self.weights

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the model takes, and of logits at each token."""
        return self.config.vocab_size

    @property
    def longrope_threshold(self) -> int:
        """Length of the longest sequence that uses the short LongRoPE factors; 0 without LongRoPE."""
        return self.config.rope.longrope_threshold

    @property
    def can_run_trees(self) -> bool:
        """Whether the model supports token trees (`forward_tree`)."""
        return self.architecture.can_run_trees and not self.has_recurrent_state

    @property
    def n_threads(self) -> int:
        """Number of threads of a pass, at most the number given at construction; it changes only the speed."""
        return self._n_threads

    @n_threads.setter
    def n_threads(self, n: int) -> None:
        self._n_threads = check_int("n_threads", n, 1, self.max_threads)

    @property
    def experts_read(self) -> tuple[float, int]:
        """Mean number of experts that an MoE layer read in the last pass, and its number for one token; 0, 0 without experts."""
        if not self.config.experts or self._experts_read is None:
            return 0.0, 0
        counts = [n for n in self._experts_read.tolist() if n]
        return sum(counts) / max(len(counts), 1), self.config.experts.n_experts_used

    def new_cache(self, hidden_layers: Sequence[int] = ()) -> KVCache:
        """Return an empty KV cache for a new sequence.

        Args:
            hidden_layers: Layers before which the hidden states are kept next to the cache (`KVCache.get_hidden_states`).
                n_layers stands for the output of the last layer, n_layers + 1 for that of the last norm.

        Raises:
            ValueError: If a layer does not exist or is given twice.
            TypeError: If hidden_layers are not integers.
        """
        return KVCache(self, hidden_layers)

    def new_draft_cache(self, target_cache: KVCache) -> KVCache:
        """Return an empty KV cache of this model as a draft, for the sequence that a target's cache holds."""
        return self.new_cache()

    def can_draft_for(self, target: "Model") -> bool:
        """Return whether the model can draft for any target with its vocabulary; a head can draft only for its own target."""
        return True

    def forward(self, batch: Sequence[BatchInput]) -> list[Float32]:
        """Run the tokens of several sequences that their caches do not hold, in one pass, and return the logits of each sequence.

        The results are bit-identical to those of separate passes and valid until the next pass. A single sequence may take
        several passes. With LongRoPE, a sequence runs anew when it gets long. A single sequence with logits on both sides of that
        length runs all of it twice, which `get_token_headroom` avoids.

        Args:
            batch: (cache, tokens, n_logits) or (cache, tokens, n_logits, n_total) of each sequence: all of its tokens, the number
                of logits at its last tokens (0 for a prefill chunk), and the final length of a sequence that is prefilled in
                chunks; by default one token more.

        Returns:
            Logits (n_logits, V) of each sequence.

        Raises:
            ValueError: If n_logits exceeds the tokens or MAX_BATCH_TOKENS, a token is out of range, or there are more tokens than
                n_positions. With several sequences also if more than MAX_BATCH_TOKENS tokens must run (see
                `KVCache.count_uncached_tokens`), the caches are not different ones of this model with the same hidden_layers, or
                a sequence gets longer than LongRoPE's threshold.
            TypeError: If tokens are not integers.
            MemoryError: If a cache cannot grow.
            RuntimeError: In a signal handler that interrupts a pass.
        """
        jobs = [(each[0], *each[0].check_input(each[1], each[2]), each[3] if len(each) > 3 else 0) for each in batch]
        caches = [cache for cache, *_ in jobs]
        if any(cache.model is not self or cache.hidden_layers != caches[0].hidden_layers for cache in caches):
            raise ValueError("the caches of a batch must belong to this model and have the same hidden_layers")
        if len({*map(id, caches)}) < len(caches):
            raise ValueError("the caches of a batch must be different ones")
        with self.exclusive():
            if len(jobs) == 1:
                cache, tokens, n_logits, n_total = jobs[0]
                return [cache.run(tokens, n_logits, n_total)]
            logits = self._run_batch(sorted(jobs, key=lambda job: job[2] > 0))
        return [logits[id(cache)] for cache in caches]

    def _run_batch(self, jobs: list[tuple[KVCache, list[int], int, int]]) -> dict[int, Float32]:
        """Run the pass of `forward` over several sequences, and return the logits of each by the `id` of its cache.

        Args:
            jobs: (cache, tokens, n_logits, n_total) of each sequence, those without logits first.

        Raises:
            ValueError: If more than MAX_BATCH_TOKENS tokens must run, a token is out of range, or a sequence gets longer than
                LongRoPE's threshold.
        """
        self.n_passes += 1
        new = [cache.select_uncached(tokens, n_logits, n_total) for cache, tokens, n_logits, n_total in jobs]
        if (n := sum(map(len, new))) > MAX_BATCH_TOKENS:
            raise ValueError(f"{n} tokens of {len(jobs)} sequences must run; a pass runs at most {MAX_BATCH_TOKENS}")
        entries, row = list[BatchEntry](), 0
        n_rows = sum(len(own) for own, (_, _, n_logits, _) in zip(new, jobs, strict=True) if n_logits)
        for (cache, tokens, n_logits, _), own in zip(jobs, new, strict=True):
            cache.begin_batch(tokens, own, row)
            if own:
                entries.append(BatchEntry(cache.executor, len(own), len(tokens) - len(own), n_logits))
            row += len(own)
        if entries:
            entries[0].executor.run_batch(entries, n_rows, self.n_threads)
        end, logits = n_rows - n, dict[int, Float32]()
        for (cache, _, n_logits, n_total), own in zip(jobs, new, strict=True):
            end += len(own)
            logits[id(cache)] = cache.end_batch(own, n_logits, n_total, end)
        return logits

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the model's lock for a pass or a change of a cache; raise RuntimeError if this thread is in a pass already."""
        with self.lock:
            if self._is_running:
                raise RuntimeError(REENTRANT_CALL_MESSAGE)
            try:
                self._is_running = True
                yield
            finally:
                self._is_running = False

    def grow_buffers(self, n_slots: int, n_hidden_layers: int, old: Buffers | None) -> Buffers:
        """Return buffers for a sequence of n_slots tokens, with the contents of `old`, the smaller buffers of the sequence.

        The buffers that all caches of the model share grow, too, if n_slots exceeds that of all earlier calls.

        Raises:
            MemoryError: If there is not enough memory.
        """
        buffers = self._fill(Allocator(self._shared_buffers, old.new.own if old else ()), n_slots, n_hidden_layers)
        self._experts_read = buffers.experts_read
        return buffers

    def _fill(self, new: Allocator, n_slots: int, n_hidden_layers: int) -> Buffers:
        """Return the buffers that an allocator makes for a sequence of n_slots tokens."""
        sizes = BufferSizes(KV_FORMATS[self.kv], n_slots, self.max_threads, n_hidden_layers)
        return self.architecture.make_buffers(self.config, self.weights, sizes, new)

    def get_sequence_bytes(self, n_positions: int, is_additional: bool = False, n_hidden_layers: int = 0) -> int:
        """Return the memory in bytes that a sequence of n_positions tokens needs in addition to the weights.

        Includes the buffers, slots for MAX_BATCH_TOKENS tokens after the sequence (a pass or a token tree), and the maximum size
        of the snapshots of a recurrent state. Subtracts the minimum that the eviction of sliding windows saves.

        Args:
            n_positions: Length of the sequence.
            is_additional: Count only the memory that one more sequence adds, without shared buffers.
            n_hidden_layers: Number of layers whose hidden states are kept.
        """
        n_slots = round_up(n_positions + MAX_BATCH_TOKENS, PANEL_ROWS)
        plan = self._fill(Allocator(is_plan=True), n_slots, n_hidden_layers)
        n_bytes = snapshot_bytes(plan) - self.window_evictor.saved_bytes(plan)
        n_bytes += sum(each.array.nbytes for each in plan.new.own)
        return n_bytes if is_additional else n_bytes + plan.new.shared.n_bytes + self._block_bytes

    @functools.cached_property
    def _block_bytes(self) -> int:
        """Size in bytes of the arrays of passes that the blocks make for themselves."""
        plan = self._fill(Allocator(is_plan=True), PANEL_ROWS, 0)
        n_before = plan.new.shared.n_bytes
        self.architecture.program(self.config, self.weights, plan)
        return plan.new.shared.n_bytes - n_before

    def find_max_positions(self, n_bytes: float, max_positions: int) -> int:
        """Return the number of positions, 1 to max_positions, of the longest sequence that fits n_bytes of memory.

        It does not exceed the config's max_positions. It is 1 even if that does not fit.
        """
        longest = min(max_positions, self.config.max_positions or max_positions)
        if self.get_sequence_bytes(longest) <= n_bytes:  # bisecting would cost a start 8 ms
            return longest
        lengths = range(1, longest + 1)
        return max(bisect.bisect_right(lengths, n_bytes, key=self.get_sequence_bytes), 1)

    def with_capacity(self, n_positions: int) -> "Model":
        """Return a model with the same weights and n_positions positions, and a lock of its own."""
        options: dict[str, Any] = {"n_threads": self.max_threads, "n_positions": n_positions, "kv": self.kv}
        model = type(self)(*self._get_parts(), **options)
        model.n_threads = self._n_threads
        return model


def get_token_headroom(n_tokens: int, n_positions: int, longrope_threshold: int) -> int:
    """Return how many tokens can follow a sequence of n_tokens tokens in one pass with logits of all of them.

    The limit is n_positions. With LongRoPE, a sequence within longrope_threshold must not get longer than this in the pass.
    """
    return (longrope_threshold if n_tokens <= longrope_threshold else n_positions) - n_tokens
