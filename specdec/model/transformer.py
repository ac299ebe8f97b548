"""Transformer: a model's forward pass, its buffers and the KV cache of one sequence.

Shapes: N logits of a pass, L hidden layers that are kept, D dim, V vocab.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from specdec.argument_checks import check_choice, check_int, check_ints, count_common_prefix, shorten
from specdec.kernels import MAX_BATCH_TOKENS, build_tree_paths
from specdec.layers.architecture import Buffers, BufferSizes, SharedBuffers, Weights
from specdec.layers.kv_formats import KV_FORMATS
from specdec.layers.rope import TreeNode, compute_depths, compute_lengths
from specdec.model import get_architecture
from specdec.model.sliding_window_eviction import SlidingWindowEvictor
from specdec.model.state_snapshots import PROMPT_END_OFFSET_TOKENS, Snapshots, snapshot_bytes
from specdec.model_config import ModelConfig
from specdec.runtime.cpu_topology import get_thread_choices
from specdec.runtime.matmul_tile import MAX_TILE_TOKENS, PANEL_ROWS
from specdec.runtime.memory import zeros
from specdec.runtime.op_program import BatchEntry, Executor
from specdec.runtime.parallel_region import create_fork_safe_lock, get_available_threads, rebuild
from specdec.runtime.simd import Float32, round_up

MAX_PREFILL_CHUNK_S = 0.3  # of a pass over a chunk of a long prompt: keyboard input is read between two passes
FIRST_PREFILL_CHUNK_TOKENS, MIN_PREFILL_CHUNK_TOKENS = 2 * MAX_TILE_TOKENS, MAX_TILE_TOKENS
INITIAL_CAPACITY = 256  # positions in the cache before the sequence grows
KVFormatName = Literal["auto", "f32", "f16", "q8"]  # format of keys and values
ReturnT = TypeVar("ReturnT")
REENTRANT_CALL_MESSAGE = "this thread is in the middle of a pass of this model; a signal handler cannot use it"


def get_kv_format(weights: Weights, kv: KVFormatName) -> KVFormatName:
    """Return the KV cache format kv; "auto" becomes "f32" if all weights are float32, else "f16"."""
    if kv == "auto":
        return "f32" if weights.format_names == "fp32" else "f16"
    return kv


class ModelLock:
    """The lock, pass counter and buffers that a model and its clones share, so that only one of them runs at a time."""

    def __init__(self) -> None:
        self.lock: threading._RLock
        create_fork_safe_lock(self, "lock")
        self.is_running = False
        self.n_passes = 0
        self.shared_buffers = SharedBuffers()


class Transformer:
    """A model on CPU threads with the KV cache of the sequence that it ran last.

    The logits always belong to the requested tokens: the cache knows which tokens it holds, those of the last tree among them.
    Threads may share a model; hold `lock` while reading logits that another thread's pass must not overwrite. A model can be
    pickled and copied. Buffers grow with the sequence. Beyond its seq_len a model sees a sliding window of that many positions.

    Args:
        config: Config of the model.
        weights: Packed weights (`Architecture.pack`).
        n_threads: Number of threads; by default all cores.
        n_positions: Maximum length of a sequence. By default seq_len, which is also the limit of learned positions.
        kv: Format of keys and values: "f32"; "f16", rounded to nearest and NaN beyond its range; "q8", bytes with a scale for
            each head; "auto", f32 if all weights are f32, else f16.
        hidden_layers: Layers before which the hidden states are kept, next to the cache; see `get_hidden_states`.
        clone_of: A model with the same weights that this one can share passes with; see `clone_for_sequence`.

    Raises:
        ValueError: If weights do not have the config's shapes, the machine does not have n_threads, n_positions is below 1, kv is
            unknown, or hidden_layers do not exist.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        n_threads: int | None = None,
        n_positions: int | None = None,
        kv: KVFormatName = "auto",
        hidden_layers: Sequence[int] = (),
        clone_of: "Transformer | None" = None,
    ) -> None:
        if error := config.find_error():
            raise ValueError(error)
        self._architecture = get_architecture(config)
        self._architecture.check(config, weights)
        self._config, self._weights = config, clone_of.weights if clone_of else weights.align()
        self.kv: KVFormatName = get_kv_format(weights, check_choice("kv", kv, get_args(KVFormatName)))  # f32, f16 or q8
        self.longrope_threshold = config.rope.longrope_threshold  # longest sequence with the short factors; 0: no LongRoPE
        self._max_threads = get_available_threads()
        self.n_threads = get_thread_choices()[0] if n_threads is None else n_threads
        self._max_threads = self._max_threads if n_threads is None else self.n_threads
        self._n_positions = config.seq_len if n_positions is None else check_int("n_positions", n_positions, 1)
        if self._architecture.learned_positions:
            self._n_positions = min(self._n_positions, config.seq_len)
        self._model_lock: ModelLock = clone_of._model_lock if clone_of else ModelLock()
        self._cached_tokens: list[int] = []  # of the sequence, with keys and values in the cache
        self._tree_nodes: list[TreeNode] = []  # of the tree in the slots behind them
        self._has_long_rope = False  # whether the cached keys are rotated with the long factors
        self._min_rewind = 0  # shortest length, except 0, that the cache can be truncated to without a snapshot
        self._snapshots = Snapshots()
        self._window_evictor = SlidingWindowEvictor(
            self._architecture, config, self._weights, KV_FORMATS[self.kv], self._n_positions
        )
        self.has_recurrent_state = self._architecture.n_rewindable_states > 0  # of one sequence, next to keys and values
        self._capacity = 0
        self._buffers: Buffers
        self._executors: list[Executor]  # of normal sequences, and of those with long RoPE factors if there are any
        self._hidden_layers: tuple[int, ...] = ()
        self._build(round_up(min(self._n_positions, INITIAL_CAPACITY), PANEL_ROWS), self._check_hidden_layers(hidden_layers))

    def __repr__(self) -> str:
        c = self._config
        return f"<{c.architecture} of {c.n_layers} layers x {c.dim}, {c.vocab_size} tokens, {self._weights.format_names}>"

    def __reduce__(self) -> tuple[Any, ...]:
        options = {
            "n_threads": self._max_threads, "n_positions": self._n_positions, "kv": self.kv, "hidden_layers": self.hidden_layers,
        }  # fmt: skip
        return rebuild, (Transformer, (self._config, self._weights), options)

    @property
    def config(self) -> ModelConfig:
        """Config that the model was made with."""
        return self._config

    @property
    def weights(self) -> Weights:
        """Packed weights, in arrays that begin at cache lines."""
        return self._weights

    @property
    def lock(self) -> "threading._RLock":
        """Lock to hold while reading logits that no other pass may overwrite."""
        return self._model_lock.lock

    @property
    def n_passes(self) -> int:
        """Number of passes so far, so that a reader of logits can detect a pass that a signal handler ran meanwhile."""
        return self._model_lock.n_passes

    @property
    def experts_read(self) -> tuple[float, int]:
        """Mean number of experts that an MoE layer read in the last pass, and its number for one token; 0, 0 without experts."""
        if not self._config.experts:
            return 0.0, 0
        counts = [n for n in self._buffers.experts_read.tolist() if n]
        return sum(counts) / max(len(counts), 1), self._config.experts.n_experts_used

    @property
    def n_positions(self) -> int:
        """Maximum length of a sequence in tokens."""
        return self._n_positions

    @property
    def can_run_trees(self) -> bool:
        """Whether the model supports token trees (`forward_tree`)."""
        return self._architecture.move_path is not None

    @property
    def n_threads(self) -> int:
        """Number of threads of a pass, at most the number given at construction; it changes only the speed."""
        return self._n_threads

    @n_threads.setter
    def n_threads(self, n: int) -> None:
        self._n_threads = check_int("n_threads", n, 1, self._max_threads)

    @property
    def n_cached_tokens(self) -> int:
        """Number of tokens of the last sequence that the KV cache holds."""
        return len(self._cached_tokens)

    @property
    def full_kv_start(self) -> int:
        """First position for which every layer still holds keys and values; layers with a window release older ones."""
        return 0 if self.has_recurrent_state else self._min_rewind

    @property
    def has_long_rope(self) -> bool:
        """Whether the last sequence uses long RoPE factors, from its first token on."""
        return self._has_long_rope

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers before which the hidden states are kept; none by default, which costs nothing.

        n_layers stands for the output of the last layer, n_layers + 1 for that of the last norm. A change empties the cache; it
        raises ValueError and TypeError for layers that do not exist, and RuntimeError like `forward`.
        """
        return self._hidden_layers

    @hidden_layers.setter
    def hidden_layers(self, layers: Sequence[int]) -> None:
        self._run_exclusive(self._build, self._capacity, self._check_hidden_layers(layers))

    def get_hidden_states(self, tokens: list[int], first: int) -> Float32:
        """Return the cached residual stream before each of `hidden_layers`, side by side, valid until the next call.

        A family with a residual_scale holds the stream divided by it. If the tokens follow a path of the last tree, the path is
        committed.

        Args:
            tokens: Tokens of a sequence; only those that the cache holds now have hidden states, whichever sequence ran them.
            first: First position.

        Returns:
            (n, L D); n may be 0.

        Raises:
            RuntimeError: As in `forward`.
        """
        return self._run_exclusive(self._get_hidden_states, tokens, first)

    def get_sequence_bytes(self, n_positions: int, is_additional: bool = False) -> int:
        """Return the memory in bytes, without the weights, of a sequence of n_positions tokens with a tree at its end.

        Args:
            n_positions: Length of the sequence.
            is_additional: Count only the memory that one more sequence adds, without shared buffers.
        """
        sizes = self._get_buffer_sizes(round_up(n_positions + MAX_BATCH_TOKENS, PANEL_ROWS), len(self._hidden_layers))
        specs = self._architecture.get_buffer_specs(self._config, self._weights, sizes)
        n_bytes = snapshot_bytes({name: spec.shape for name, spec in specs.items()})
        n_bytes -= self._window_evictor.saved_bytes(sizes.n_positions)
        return n_bytes + sum(spec.n_bytes for spec in specs.values() if spec.is_per_sequence or not is_additional)

    def find_max_positions(self, n_bytes: float, max_positions: int) -> int:
        """Return the number of positions, 1 to max_positions, of about the longest sequence that fits n_bytes of memory."""
        while max_positions > 1 and self.get_sequence_bytes(max_positions) > n_bytes:
            max_positions -= max(1, max_positions // 64)
        return max_positions

    def with_capacity(self, n_positions: int) -> "Transformer":
        """Return a model with the same weights, n_positions positions, an empty cache and a lock of its own; no hidden_layers."""
        model = Transformer(self._config, self._weights, self._max_threads, n_positions, self.kv)
        model.n_threads = self._n_threads
        return model

    def clone_for_sequence(self, hidden_layers: Sequence[int] | None = None) -> "Transformer":
        """Return a clone of the model that has an empty cache of its own, for another sequence, and shares weights and lock.

        The two can share passes (`forward_batch`); otherwise only one of them runs at a time. Logits of one are valid
        until the next call of either. A clone with other hidden_layers cannot share passes.
        """
        layers = self._hidden_layers if hidden_layers is None else hidden_layers
        return Transformer(self._config, self._weights, self._max_threads, self._n_positions, self.kv, layers, clone_of=self)

    def copy_kv(self, other: "Transformer", tokens: list[int]) -> None:
        """Replace the cache by what another model's cache holds of a sequence, except its last token, which is yet to run.

        No thread may run the other model meanwhile.

        Args:
            other: A clone (`clone_for_sequence`) or a model `with_capacity`.
            tokens: Tokens of the sequence.

        Raises:
            ValueError: If other has another config, KV format, hidden layers or weights.
            MemoryError: If the cache cannot grow.
            RuntimeError: As in `forward`.
        """
        self._run_exclusive(self._copy_kv, other, max(len(tokens) - 1, 0) - other.count_prefill_tokens(tokens))

    @staticmethod
    def forward_batch(
        sequences: Sequence[tuple["Transformer", Sequence[int], int] | tuple["Transformer", Sequence[int], int, int]],
    ) -> list[Float32]:
        """Run `forward` of several sequences in one pass; the results are bit-identical to separate calls.

        Args:
            sequences: (model, tokens, n_logits) or (model, tokens, n_logits, n_total) of each. The models are different clones of
                one; the first one's n_threads counts.

        Returns:
            Logits (n_logits, V) of each sequence.

        Raises:
            ValueError: If more than MAX_BATCH_TOKENS tokens must run (see `count_uncached_tokens`), the models are not different
                clones with the same hidden_layers, a sequence gets longer than LongRoPE's threshold, and as in `forward`.
            TypeError, MemoryError, RuntimeError: As in `forward`.
        """
        jobs = [
            (sequence[0], *sequence[0]._check_request(sequence[1], sequence[2]), sequence[3] if len(sequence) > 3 else 0)
            for sequence in sequences
        ]
        if not jobs:
            return []
        lead, models = jobs[0][0], [job[0] for job in jobs]
        is_valid = all(each._model_lock is lead._model_lock and each._hidden_layers == lead._hidden_layers for each in models)
        if len({*map(id, models)}) < len(models) or not is_valid:
            raise ValueError("the models of a batch must be different clones of one model with the same hidden_layers")
        logits = lead._run_exclusive(lead._forward_batch, sorted(jobs, key=lambda job: job[2] > 0))
        return [logits[id(model)] for model in models]

    def count_uncached_tokens(self, tokens: Sequence[int], n_logits: int) -> int:
        """Return the number of tokens that `forward` would run now: those not cached, and the last n_logits."""
        tokens, n_logits = self._check_request(tokens, n_logits)
        with self.lock:
            is_reusable = self._has_long_rope == self._find_long_rope_rows(tokens, [], n_logits).any()
            return len(tokens) - self._count_reusable_tokens(tokens, len(tokens) - n_logits) * bool(is_reusable)

    def forward(self, tokens: Sequence[int], n_logits: int = 1, n_total: int = 0) -> Float32:
        """Return logits at the last n_logits tokens of a sequence, valid until the next call; run tokens that are not cached.

        With LongRoPE, a sequence runs anew when it gets long. A pass with logits on both sides of that length runs all of it
        twice, which `get_token_headroom` avoids.

        Args:
            tokens: All tokens of the sequence.
            n_logits: Number of logits; 0 for a prefill chunk.
            n_total: Final length of a sequence that is prefilled chunk by chunk; 0 stands for one token more.

        Returns:
            Logits (n_logits, V).

        Raises:
            ValueError: If n_logits exceeds the tokens or MAX_BATCH_TOKENS, a token is out of range, or there are more tokens than
                n_positions.
            TypeError: If tokens are not integers.
            MemoryError: If the cache cannot grow.
            RuntimeError: In a signal handler that interrupts a pass.
        """
        tokens, n_logits = self._check_request(tokens, n_logits)
        return self._run_exclusive(self._forward, tokens, [], n_logits, n_total)

    def count_prefill_tokens(self, tokens: list[int]) -> int:
        """Return the number of tokens that `prefill` would run: all but the last, without those that the cache holds."""
        limit = max(len(tokens) - 1, 0)
        is_reusable = self._has_long_rope == self._config.has_long_rope(len(tokens))
        return limit - self._count_reusable_tokens(tokens, limit) * is_reusable

    def count_tokens_to_snapshot(self, tokens: list[int]) -> int:
        """Return the number of tokens to prefill up to the last snapshot (recurrent models) or, without one, the prompt's end."""
        left = self.count_prefill_tokens(tokens)
        return left - PROMPT_END_OFFSET_TOKENS if self.has_recurrent_state and left > PROMPT_END_OFFSET_TOKENS else left

    def prefill(self, tokens: list[int]) -> Iterator[int]:
        """Run all tokens but the last in chunks to fill the cache; yield the number of tokens left to run after each chunk.

        Chunks adapt so that a pass takes no longer than a user at the keyboard would wait, as far as it can be split.
        """
        left, n = self.count_prefill_tokens(tokens), FIRST_PREFILL_CHUNK_TOKENS
        stop = left - self.count_tokens_to_snapshot(tokens)
        while left:
            begin, left = time.perf_counter(), max(left - n, stop if left > stop else 0)
            self.forward(tokens[: len(tokens) - 1 - left], n_logits=0, n_total=len(tokens))
            seconds = time.perf_counter() - begin
            yield left
            if seconds > MAX_PREFILL_CHUNK_S:
                n = max(n // 2, MIN_PREFILL_CHUNK_TOKENS)
            elif seconds < MAX_PREFILL_CHUNK_S / 2:
                n = min(2 * n, MAX_BATCH_TOKENS)

    def forward_tree(
        self, tokens: Sequence[int], nodes: Sequence[int], parents: Sequence[int], n_logits: int | None = None
    ) -> Float32:
        """Return logits of a sequence and a token tree behind it (SpecInfer, arXiv:2305.09781), valid until the next call.

        The logits of a node are bit-identical to those of `forward` with the sequence and the node's path. The pass runs what the
        cache does not hold and the last n_logits: nodes that are appended to the last call's tree, with logits of them alone, run
        alone.

        Args:
            tokens: All tokens of the sequence.
            nodes: Tokens of the tree; a path that will probably be accepted is best placed first.
            parents: Index of each node's parent, an earlier node, or -1 if it follows the sequence.
            n_logits: Number of logits, counted from the last node back; by default one more than there are nodes.

        Returns:
            Logits (n_logits, V), at the last token and then at each node.

        Raises:
            ValueError: If there are MAX_BATCH_TOKENS nodes or more, the family does not support trees, or as in `forward`.
            TypeError, MemoryError, RuntimeError: As in `forward`.
        """
        if not self.can_run_trees:
            raise ValueError("token trees are not supported by models with a recurrent state")
        tokens = tokens if isinstance(tokens, list) else check_ints("tokens", tokens)
        nodes, parents = check_ints("nodes", nodes), check_ints("parents", parents)
        n, n_rows = len(tokens), len(nodes) + 1
        if not n or n_rows > MAX_BATCH_TOKENS or len(nodes) != len(parents):
            counts = f"{len(nodes)} nodes with {len(parents)} parents behind {n} tokens"
            raise ValueError(
                f"{counts}; expected at most {MAX_BATCH_TOKENS - 1} nodes with a parent each, behind one token or more"
            )
        for node, parent in enumerate(parents):
            if not -1 <= parent < node:
                raise ValueError(f"parents[{node}] is {shorten(parent)}; expected -1 to {node - 1}")
        if n + (deepest := max(compute_depths(parents), default=0)) > self._n_positions:
            raise ValueError(f"{n} tokens and a tree of depth {deepest} do not fit {self._n_positions} positions")
        n_logits = n_rows if n_logits is None else check_int("n_logits", n_logits, 0, n_rows)
        return self._run_exclusive(self._forward, tokens, [*zip(nodes, parents, strict=True)], n_logits)

    def commit_path(self, path: Sequence[int]) -> None:
        """Append the tokens of a path of the last tree to the cached sequence, and drop all other nodes of the tree.

        Without this call, a later pass over a sequence that follows a path of the tree commits that path by itself.

        Args:
            path: Indexes of nodes, from one that follows the sequence on down.

        Raises:
            ValueError: If there is no such path.
            TypeError, RuntimeError: As in `forward`.
        """
        self._run_exclusive(self._commit_path, check_ints("path", path))

    def export_kv(self, work: Callable[[Buffers, list[int], Snapshots], ReturnT]) -> ReturnT:
        """Call `work` with the buffers, the cached tokens and the snapshots, under the model's lock, and return its result."""
        return self._run_exclusive(lambda: work(self._buffers, self._cached_tokens, self._snapshots))

    def import_kv(self, tokens: list[int], fill: Callable[[Buffers, int], tuple[int, Snapshots]]) -> None:
        """Load keys, values and states of a sequence into the cache, behind those of its tokens that are cached already.

        Args:
            tokens: Tokens of the sequence.
            fill: Function that fills buffers, given them and the number of cached tokens; returns the new number, and snapshots.
        """
        self._run_exclusive(self._import_kv, tokens, fill)

    def _import_kv(self, tokens: list[int], fill: Callable[[Buffers, int], tuple[int, Snapshots]]) -> None:
        self._reserve(len(tokens))
        self._switch_rope(self._config.has_long_rope(len(tokens)))
        self._rewind(n_kept := self._count_reusable_tokens(tokens, len(tokens) - 1))
        n, snapshots = fill(self._buffers, n_kept)
        if n > n_kept:
            self._cached_tokens, self._min_rewind = tokens[:n], n + 1 if self.has_recurrent_state else self._min_rewind
            for snapshot in snapshots:
                self._snapshots.add(snapshot)
            self._truncate(n)

    def _run_exclusive(self, work: Callable[..., ReturnT], *arguments: Any) -> ReturnT:
        """Call `work` under the model lock and return its result; raise RuntimeError if this thread is in a pass already."""
        model_lock = self._model_lock
        with model_lock.lock:
            if model_lock.is_running:
                raise RuntimeError(REENTRANT_CALL_MESSAGE)
            try:
                model_lock.is_running = True
                return work(*arguments)
            finally:
                model_lock.is_running = False

    def _check_request(self, tokens: Sequence[int], n_logits: int) -> tuple[list[int], int]:
        """Return tokens as a list of ints, and n_logits; raise ValueError or TypeError if they do not fit `forward`."""
        tokens = tokens if isinstance(tokens, list) else check_ints("tokens", tokens)
        n = len(tokens)
        if type(n_logits) is not int or not 0 <= n_logits <= min(n, MAX_BATCH_TOKENS):
            n_logits = check_int("n_logits", n_logits, 0, min(n, MAX_BATCH_TOKENS))
        if n > self._n_positions:
            raise ValueError(f"{n} tokens do not fit {self._n_positions} positions")
        return tokens, n_logits

    def _forward(self, tokens: list[int], nodes: list[TreeNode], n_logits: int, n_total: int = 0) -> Float32:
        """Run a pass and return its logits, each computed with the RoPE factors for the length of its sequence."""
        self._model_lock.n_passes += 1
        if not self._config.rope.longrope_threshold:
            return self._run(tokens, nodes, n_logits, n_total)
        are_long = self._find_long_rope_rows(tokens, nodes, n_logits, n_total)
        if are_long.any() and not are_long.all():
            self._switch_rope(False)
            short_logits = self._run(tokens, nodes, n_logits).copy()
            self._switch_rope(True)
            logits = self._run(tokens, nodes, n_logits)
            logits[~are_long] = short_logits[~are_long]
            return logits
        self._switch_rope(bool(are_long[0]))
        return self._run(tokens, nodes, n_logits)

    def _find_long_rope_rows(self, tokens: list[int], nodes: list[TreeNode], n_logits: int, n_total: int = 0) -> npt.NDArray[Any]:
        """Return a bool for each row of logits, or one for the sequence if n_logits is 0: whether it uses long RoPE factors."""
        lengths = compute_lengths(tokens, nodes, n_logits) if n_logits else [max(n_total, len(tokens) + 1)]
        return np.array([self._config.has_long_rope(n) for n in lengths], bool)

    def _switch_rope(self, is_long: bool) -> None:
        """Select the long or short RoPE factors; clear the KV cache if the selection changes."""
        if is_long != self._has_long_rope:
            self._rewind(0)
            self._has_long_rope, self._executor = is_long, self._executors[is_long]

    def _run(self, tokens: list[int], nodes: list[TreeNode], n_logits: int, n_total: int = 0) -> Float32:
        """Run the tokens and tree nodes that the cache does not hold, and the last n_logits of both; return the logits."""
        limit = len(tokens) - max(0, n_logits - len(nodes))
        start, n_nodes = self._count_reusable_tokens(tokens, limit), 0
        if self._tree_nodes and start == len(self._cached_tokens):
            if start < limit:
                start = self._commit_path(self._find_tree_path(tokens[start:limit]))
            elif start == len(tokens):
                n_nodes = count_common_prefix(self._tree_nodes, nodes, len(nodes) - n_logits)
        new = self._check_tokens("tokens", tokens[start:])
        if nodes:
            new += self._check_tokens("nodes", [token for token, _ in nodes[n_nodes:]])
        self._reserve(len(tokens) + len(nodes))
        if self._tree_nodes:
            del self._tree_nodes[n_nodes:]
        self._truncate(start)
        if nodes:
            build_tree_paths(self._buffers.depths, self._buffers.paths, np.array([parent for _, parent in nodes]), len(nodes))
        while new:
            # Of several passes, the last is full, so that it holds all n_logits tokens and all nodes.
            batch = new[: len(new) % MAX_BATCH_TOKENS or MAX_BATCH_TOKENS]
            del new[: len(batch)]
            self._weights.load_tokens(batch, self._buffers, 0)
            self._advance(len(batch))
            self._executor(len(batch), len(self._cached_tokens) + n_nodes, 0 if new else n_logits, self._n_threads, len(tokens))
            self._cached_tokens += batch[: len(tokens) - len(self._cached_tokens)] if nodes else batch
        if nodes:
            self._tree_nodes += nodes[n_nodes:]
        elif not n_logits:
            self._maybe_take_snapshot(n_total)
        logits: Float32 = self._buffers.logits[:n_logits, : self._config.vocab_size]
        return logits

    def _forward_batch(self, jobs: list[tuple["Transformer", list[int], int, int]]) -> dict[int, Float32]:
        """Run the pass of `forward_batch` and return the logits of each sequence by the `id` of its model.

        In the pass, sequences without logits come first, those with logits last.
        """
        self._model_lock.n_passes += 1
        for model, tokens, n_logits, n_total in jobs:
            are_long = model._find_long_rope_rows(tokens, [], n_logits, n_total)
            if are_long.any() and not are_long.all():
                threshold = self._config.rope.longrope_threshold
                raise ValueError(
                    f"a sequence of a batch gets longer than {threshold} tokens, where its RoPE factors change; run it alone"
                )
            model._switch_rope(bool(are_long[0]))
        starts = [model._count_reusable_tokens(tokens, len(tokens) - n_logits) for model, tokens, n_logits, _ in jobs]
        new = [model._check_tokens("tokens", tokens[start:]) for (model, tokens, *_), start in zip(jobs, starts, strict=True)]
        if (n := sum(map(len, new))) > MAX_BATCH_TOKENS:
            raise ValueError(f"{n} tokens of {len(jobs)} sequences must run; a pass runs at most {MAX_BATCH_TOKENS}")
        entries, row, n_rows = [], 0, sum(len(batch) for batch, job in zip(new, jobs, strict=True) if job[2])
        for (model, tokens, n_logits, _), start, batch in zip(jobs, starts, new, strict=True):
            model._reserve(len(tokens))
            model._rewind(start)
            model._advance(len(batch))
            self._weights.load_tokens(batch, self._buffers, row)
            if batch:
                entries.append(BatchEntry(model._executor, len(batch), start, n_logits))
            row += len(batch)
        self._executor.run_batch(entries, n_rows, self._n_threads)
        rows, end, logits = self._buffers.logits[:, : self._config.vocab_size], n_rows - n, dict[int, Float32]()
        for (model, _, n_logits, n_total), batch in zip(jobs, new, strict=True):
            model._cached_tokens += batch
            end += len(batch)
            logits[id(model)] = rows[end - n_logits : end]
            if not n_logits:
                model._maybe_take_snapshot(n_total)
        return logits

    def _rewind(self, n: int) -> None:
        """Drop the nodes of the last tree and truncate the cached sequence to n tokens."""
        self._tree_nodes.clear()
        self._truncate(n)

    def _truncate(self, n: int) -> None:
        """Truncate the cached sequence, and the recurrent state, to n tokens.

        n is 0, at least `_min_rewind`, or the length of a snapshot.
        """
        del self._cached_tokens[n:]
        self._snapshots.drop_after(n)
        if 0 < n < self._min_rewind:
            self._snapshots.restore(self._buffers, n)
        elif n < self._min_rewind:
            self._window_evictor.evict_all(self._buffers)
        self._min_rewind = min(self._min_rewind, n)

    def _maybe_take_snapshot(self, n_total: int) -> None:
        """Take a snapshot after a prefill pass if it is worth its memory."""
        if self.has_recurrent_state:
            self._snapshots.maybe_take(self._buffers, len(self._cached_tokens), n_total)

    def _copy_kv(self, other: "Transformer", n: int) -> None:
        """Replace this model's cache by the first n tokens of another model's cache; see `copy_kv`."""
        own, others = ((m._config, m.kv, m._hidden_layers, m._weights.array_ids) for m in (self, other))
        if own != others:
            raise ValueError("a KV cache can be copied only between models with the same config, weights, kv and hidden_layers")
        cached = other._cached_tokens[:n]
        self._reserve(n)
        self._switch_rope(other._has_long_rope)
        self._rewind(0)
        sizes = self._get_buffer_sizes(round_up(n, PANEL_ROWS), len(self._hidden_layers))
        self._architecture.copy_sequence(self._config, self._weights, sizes, other._buffers, self._buffers)
        self._cached_tokens, self._min_rewind = cached, other._min_rewind
        self._snapshots[:] = other._snapshots
        self._truncate(n)
        self._window_evictor.evict(self._buffers, 0, self._min_rewind)

    def _advance(self, n: int) -> None:
        """Raise `_min_rewind` for a pass over n more tokens, and evict keys and values that no window reaches any more."""
        if n_states := self._architecture.n_rewindable_states:
            self._min_rewind = max(self._min_rewind, len(self._cached_tokens) + n + 1 - n_states)
        elif (min_rewind := self._window_evictor.get_min_rewind(len(self._cached_tokens))) > self._min_rewind:
            before, self._min_rewind = self._min_rewind, min_rewind
            self._window_evictor.evict(self._buffers, before, min_rewind)

    def _check_tokens(self, name: str, tokens: list[int]) -> list[int]:
        """Return tokens as a list of ints; raise ValueError if one of them is not in the vocabulary."""
        tokens, vocab_size = check_ints(name, tokens), self._config.vocab_size
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            invalid = next(token for token in tokens if not 0 <= token < vocab_size)
            raise ValueError(f"{name} hold {shorten(invalid)}; expected 0 to {vocab_size - 1}")
        return tokens

    def _count_reusable_tokens(self, tokens: list[int], limit: int) -> int:
        """Return how many tokens, at most limit, need not run: they and a state to continue from are cached."""
        n = count_common_prefix(self._cached_tokens, tokens, limit)
        return n if n >= self._min_rewind else self._snapshots.find_longest(n)

    def _find_tree_path(self, tokens: list[int]) -> list[int]:
        """Return the indexes of the last tree's nodes that tokens behind the cached sequence follow, as far as they match."""
        path = [-1]
        for token in tokens:
            if (token, path[-1]) not in self._tree_nodes:
                break
            path.append(self._tree_nodes.index((token, path[-1])))
        return path[1:]

    def _commit_path(self, path: list[int]) -> int:
        """Commit a path of the last tree and return the number of cached tokens; while rows move, the cache holds no nodes."""
        for parent, node in zip([-1, *path], path, strict=False):
            if not 0 <= node < len(self._tree_nodes) or self._tree_nodes[node][1] != parent:
                raise ValueError(f"path is {shorten(path)}; expected nodes of the last tree, each the parent of the next")
        tokens = [self._tree_nodes[node][0] for node in path]
        self._tree_nodes.clear()
        if self._architecture.move_path and path != [*range(len(path))]:
            n_cached, nodes = len(self._cached_tokens), np.array(path)
            self._architecture.move_path(self._buffers, nodes, n_cached)
            if self._hidden_layers:
                self._buffers.hidden_states[n_cached : n_cached + len(path)] = self._buffers.hidden_states[n_cached + nodes]
        self._cached_tokens += tokens
        return len(self._cached_tokens)

    def _get_hidden_states(self, tokens: list[int], first: int) -> Float32:
        """Return the states of `get_hidden_states`; commit the path of the last tree that the tokens follow, if any."""
        if not self._hidden_layers:
            return zeros(0, 0)
        n = count_common_prefix(self._cached_tokens, tokens, len(tokens))
        if n == len(self._cached_tokens) and (path := self._find_tree_path(tokens[n:])):
            n = self._commit_path(path)
        states: Float32 = self._buffers.hidden_states[first:n]
        return states

    def _reserve(self, n_slots: int) -> None:
        """Grow the buffers, to twice the capacity or more, if they cannot hold n_slots tokens of a sequence and its tree."""
        if n_slots <= self._capacity:
            return
        capacity = min(
            max(n_slots, 2 * self._capacity), self._n_positions + (MAX_BATCH_TOKENS if n_slots > self._n_positions else 0)
        )
        self._build(round_up(capacity, PANEL_ROWS), self._hidden_layers)

    def _get_buffer_sizes(self, n_slots: int, n_hidden: int) -> BufferSizes:
        return BufferSizes(KV_FORMATS[self.kv], n_slots, self._max_threads, n_hidden)

    def _check_hidden_layers(self, layers: Sequence[int]) -> tuple[int, ...]:
        last = self._config.n_layers + (self._architecture.final_norm is not None)
        layers = (*(check_int(f"hidden_layers[{i}]", layer, 0, last) for i, layer in enumerate(layers)),)
        if len({*layers}) < len(layers):
            raise ValueError(f"hidden_layers are {shorten(layers)}; expected each once")
        return layers

    def _build(self, capacity: int, layers: tuple[int, ...]) -> None:
        """Replace buffers and executors by ones for `capacity` slots; empty the cache if hidden_layers changes to `layers`."""
        config, weights, architecture, shared = self._config, self._weights, self._architecture, self._model_lock.shared_buffers
        sizes, old_buffers = self._get_buffer_sizes(capacity, len(layers)), self._buffers if self._capacity else None
        if layers != self._hidden_layers:
            self._rewind(0)
            old_buffers = None
        buffers, shared = architecture.grow_buffers(config, weights, sizes, old_buffers, shared)
        executors = architecture.make_executors(config, weights, buffers, sizes, shared, layers)
        # One assignment: an interrupt between several would leave a program over buffers that are gone.
        self._executors, self._executor, self._buffers, self._capacity, self._hidden_layers, self._model_lock.shared_buffers = (
            executors, executors[self._has_long_rope], buffers, capacity, layers, shared,
        )  # fmt: skip


def get_token_headroom(n_tokens: int, n_positions: int, longrope_threshold: int) -> int:
    """Return how many tokens can follow a sequence of n_tokens tokens in one pass with logits of all of them.

    The limit is n_positions. With LongRoPE, a sequence within longrope_threshold must not get longer than this in the pass.
    """
    return (longrope_threshold if n_tokens <= longrope_threshold else n_positions) - n_tokens
