"""KVCache: the keys, values and recurrent states of one sequence, and the tokens that they belong to.

A cache finds out by itself which tokens of a sequence have to run: callers always give the whole sequence. So truncating it after
a rejected draft, following a path of a token tree and starting another sequence need no further calls.

Shapes: N logits of a pass, L hidden layers that are kept, D dim, V vocab.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from specdec.argument_checks import check_int, check_ints, count_common_prefix, shorten
from specdec.kernels import MAX_BATCH_TOKENS, build_tree_paths
from specdec.layers.block import N_REWINDABLE_STATES
from specdec.layers.buffers import Buffers
from specdec.layers.rope import TreeNode, compute_depths, compute_lengths
from specdec.model.state_snapshots import PROMPT_END_OFFSET_TOKENS, Snapshots
from specdec.runtime.memory import zeros
from specdec.runtime.op_program import Executor
from specdec.runtime.simd import PANEL_ROWS, Float32, round_up

if TYPE_CHECKING:
    from specdec.model.model import Model
    from specdec.model.trimmed_classifier import TrimmedClassifier

INITIAL_CAPACITY = 256  # positions in the cache before the sequence grows
MIN_TRIMMED_ROWS = 65_000  # of a draft's classifier; a smaller one takes too little time to trim it
ReturnT = TypeVar("ReturnT")


class KVCache:
    """The keys, values and recurrent states of one sequence of a model, and the tokens that they belong to.

    Buffers grow with the sequence. The cache also knows the nodes of the last token tree, which lie behind the sequence.

    Args:
        model: The model.
        hidden_layers: Layers before which the hidden states are kept; see `Model.new_cache`.

    Attributes:
        model: The model.
        hidden_layers: Layers before which the hidden states are kept.
        trimmed_classifier: Computes a draft's logits of candidate tokens only, if there is one.
        executor: Runs the forward program over the cache's buffers.
        has_long_rope: Whether the sequence uses long RoPE factors, from its first token on.

    Raises:
        ValueError: If one of the hidden_layers does not exist or is given twice.
        TypeError: If hidden_layers are not integers.
    """

    can_slide = True  # whether a draft may run a sequence from a later token on, when it exceeds the positions

    def __init__(self, model: "Model", hidden_layers: Sequence[int] = ()) -> None:
        """Create an empty cache with memory for the first positions."""
        self.model, self.hidden_layers = model, _check_hidden_layers(model, hidden_layers)
        self._tokens: list[int] = []  # of the sequence, with keys and values in the cache
        self._tree_nodes: list[TreeNode] = []  # of the tree in the slots behind them
        self.has_long_rope = False
        self._min_rewind = 0  # shortest length, except 0, that the cache can be truncated to without a snapshot
        self._snapshots = Snapshots()
        self._capacity = 0
        self.trimmed_classifier: TrimmedClassifier | None = None
        self._buffers: Buffers
        self._executors: list[Executor]  # of normal sequences, and of those with long RoPE factors if there are any
        with model.exclusive():
            self._allocate(round_up(min(model.n_positions, INITIAL_CAPACITY), PANEL_ROWS))

    @property
    def n_tokens(self) -> int:
        """Number of tokens of the sequence that the cache holds."""
        return len(self._tokens)

    @property
    def full_kv_start(self) -> int:
        """First position for which every layer still holds keys and values; layers with a window release older ones."""
        return 0 if self.model.has_recurrent_state else self._min_rewind

    def forward(self, tokens: Sequence[int], n_logits: int = 1, n_total: int = 0) -> Float32:
        """Run the tokens of a sequence that the cache does not hold, and the last n_logits; return the logits at the latter.

        Args:
            tokens: All tokens of the sequence. If the cache holds another sequence, only the common prefix of both is kept.
            n_logits: Number of logits; 0 to prefill without any.
            n_total: Final length of a sequence that is prefilled in chunks; 0 stands for one token more.

        Returns:
            Logits (n_logits, V) at the last tokens, valid until the model's next pass.

        Raises:
            ValueError, TypeError, MemoryError, RuntimeError: As in `Model.forward` with a single sequence.
        """
        tokens, n_logits = self.check_input(tokens, n_logits)
        with self.model.exclusive():
            return self.run(tokens, n_logits, n_total)

    def forward_tree(
        self, tokens: Sequence[int], nodes: Sequence[int], parents: Sequence[int], n_logits: int | None = None
    ) -> Float32:
        """Return logits of a sequence and a token tree behind it (SpecInfer, arXiv:2305.09781), valid until the next pass.

        The logits of a node are bit-identical to those of `forward` with the sequence and the node's path. The pass runs what the
        cache does not hold, and the last n_logits. So a tree can be extended level by level: if the nodes begin with those of the
        last call and logits of the others are requested, only these others run.

        Args:
            tokens: All tokens of the sequence.
            nodes: Tokens of the tree; a path that will probably be accepted is best placed first.
            parents: Index of each node's parent, an earlier node, or -1 if it follows the sequence.
            n_logits: Number of logits, counted from the last node back; by default one more than there are nodes.

        Returns:
            Logits (n_logits, V), at the last token and then at each node.

        Raises:
            ValueError: If there are MAX_BATCH_TOKENS nodes or more, the family does not support trees, or as in `Model.forward`.
            TypeError, MemoryError, RuntimeError: As in `Model.forward`.
        """
        if not self.model.can_run_trees:
            raise ValueError("token trees are not supported by models with a recurrent state")
        tokens = tokens if isinstance(tokens, list) else check_ints("tokens", tokens)
        nodes, parents = check_ints("nodes", nodes), check_ints("parents", parents)
        n, n_rows, n_positions = len(tokens), len(nodes) + 1, self.model.n_positions
        if not n or n_rows > MAX_BATCH_TOKENS or len(nodes) != len(parents):
            counts = f"{len(nodes)} nodes with {len(parents)} parents behind {n} tokens"
            raise ValueError(
                f"{counts}; expected at most {MAX_BATCH_TOKENS - 1} nodes with a parent each, behind one token or more"
            )
        for node, parent in enumerate(parents):
            if not -1 <= parent < node:
                raise ValueError(f"parents[{node}] is {shorten(parent)}; expected -1 to {node - 1}")
        if n + (deepest := max(compute_depths(parents), default=0)) > n_positions:
            raise ValueError(f"{n} tokens and a tree of depth {deepest} do not fit {n_positions} positions")
        n_logits = n_rows if n_logits is None else check_int("n_logits", n_logits, 0, n_rows)
        with self.model.exclusive():
            return self.run_tree(tokens, [*zip(nodes, parents, strict=True)], n_logits)

    def can_draft(self, tokens: list[int]) -> bool:
        """Return whether a draft model can predict the token that follows the given ones."""
        return True

    def trim_classifier(self, eos_tokens: Iterable[int]) -> "TrimmedClassifier | None":
        """Compute the logits of a new sequence's candidates only, if the vocabulary is large, and return what holds these.

        Args:
            eos_tokens: Tokens that are always candidates.
        """
        n_rows = self.model.weights.matrices["classifier"].n_rows
        if n_rows >= MIN_TRIMMED_ROWS and not self.model.config.classifier_bias:
            from specdec.model.trimmed_classifier import TrimmedClassifier

            self.trimmed_classifier = TrimmedClassifier(self.model, self._buffers, eos_tokens)
        return self.trimmed_classifier

    @property
    def active_classifier(self) -> "TrimmedClassifier | None":
        """The trimmed classifier, if there is one and its candidates suffice for the sequence."""
        return self.trimmed_classifier if self.trimmed_classifier and self.trimmed_classifier.is_active else None

    def get_hidden_states(self, tokens: list[int], first: int) -> Float32:
        """Return the cached residual stream before each of `hidden_layers`, side by side, valid until the next call.

        A family with a residual_scale holds the stream divided by it. If the tokens follow a path of the last tree, the path is
        committed.

        Args:
            tokens: Tokens of a sequence; only those that the cache holds have hidden states.
            first: First position.

        Returns:
            (n, L D); n may be 0.

        Raises:
            RuntimeError: As in `Model.forward`.
        """
        if not self.hidden_layers:
            return zeros(0, 0)
        with self.model.exclusive():
            n = count_common_prefix(self._tokens, tokens, len(tokens))
            if n == len(self._tokens) and (path := self._find_tree_path(tokens[n:])):
                n = self._commit_path(path)
            assert self._buffers.hidden_states is not None
            return self._buffers.hidden_states[first:n]

    def copy_from(self, other: "KVCache", tokens: list[int]) -> None:
        """Replace the contents by what another cache holds of a sequence, except its last token, which is yet to run.

        Args:
            other: A cache of the same model.
            tokens: Tokens of the sequence.

        Raises:
            ValueError: If other belongs to another model or has other hidden layers.
            MemoryError: If the cache cannot grow.
            RuntimeError: As in `Model.forward`.
        """
        model = self.model
        if other.model is not model or other.hidden_layers != self.hidden_layers:
            raise ValueError("a KV cache can be copied only to another one of the same model with the same hidden_layers")
        with model.exclusive():
            n = max(len(tokens) - 1, 0) - other.count_prefill_tokens(tokens)
            cached = other._tokens[:n]
            self.reserve(n)
            self.switch_rope(other.has_long_rope)
            self._rewind(0)
            self._buffers.copy_sequence(other._buffers, round_up(n, PANEL_ROWS))
            self._tokens, self._min_rewind = cached, other._min_rewind
            self._snapshots[:] = other._snapshots
            self._truncate(n)
            model.window_evictor.evict(self._buffers, 0, self._min_rewind)

    def commit_path(self, path: Sequence[int]) -> None:
        """Append the tokens of a path of the last tree to the cached sequence, and drop all other nodes of the tree.

        Without this call, a later pass over a sequence that follows a path of the tree commits that path by itself.

        Args:
            path: Indexes of nodes, from one that follows the sequence on down.

        Raises:
            ValueError: If there is no such path.
            TypeError, RuntimeError: As in `Model.forward`.
        """
        path = check_ints("path", path)
        with self.model.exclusive():
            self._commit_path(path)

    def export_kv(self, work: Callable[[Buffers, list[int], Snapshots], ReturnT]) -> ReturnT:
        """Call `work` with the buffers, the cached tokens and the snapshots, under the model's lock, and return its result."""
        with self.model.exclusive():
            return work(self._buffers, self._tokens, self._snapshots)

    def import_kv(self, tokens: list[int], fill: Callable[[Buffers, int], tuple[int, Snapshots]]) -> None:
        """Truncate the cache to its common prefix with a sequence, and let a function load keys, values and states behind it.

        Args:
            tokens: Tokens of the sequence. The prefix that is kept ends before the last one.
            fill: Function that fills buffers, given them and the number of tokens kept. It returns the number of tokens that the
                buffers hold afterwards, and snapshots. Both are ignored if the number has not grown.

        Raises:
            MemoryError: If the cache cannot grow.
            RuntimeError: As in `Model.forward`.
        """
        with self.model.exclusive():
            self.reserve(len(tokens))
            self.switch_rope(self.model.config.has_long_rope(len(tokens)))
            self._rewind(n_kept := self.count_reusable_tokens(tokens, len(tokens) - 1))
            n, snapshots = fill(self._buffers, n_kept)
            if n > n_kept:
                self._tokens, self._min_rewind = tokens[:n], n + 1 if self.model.has_recurrent_state else self._min_rewind
                for snapshot in snapshots:
                    self._snapshots.add(snapshot)
                self._truncate(n)

    def count_prefill_tokens(self, tokens: list[int]) -> int:
        """Return the number of tokens that a prefill would run: all but the last, without those that the cache holds."""
        limit = max(len(tokens) - 1, 0)
        is_reusable = self.has_long_rope == self.model.config.has_long_rope(len(tokens))
        return limit - self.count_reusable_tokens(tokens, limit) * is_reusable

    def count_tokens_to_snapshot(self, tokens: list[int]) -> int:
        """Return the number of tokens that the next prefill chunk may run: all, or with a recurrent state those up to a snapshot.

        This snapshot is the one that is taken PROMPT_END_OFFSET_TOKENS before the prompt's end. Behind it, all tokens count.
        """
        n_left = self.count_prefill_tokens(tokens)
        has_snapshot = self.model.has_recurrent_state and n_left > PROMPT_END_OFFSET_TOKENS
        return n_left - PROMPT_END_OFFSET_TOKENS if has_snapshot else n_left

    def count_uncached_tokens(self, tokens: Sequence[int], n_logits: int) -> int:
        """Return the number of tokens that `forward` would run now: those not cached, and the last n_logits.

        Raises:
            ValueError, TypeError: If the arguments do not fit `forward`.
        """
        tokens, n_logits = self.check_input(tokens, n_logits)
        with self.model.lock:
            is_reusable = self.has_long_rope == self._find_long_rope_rows(tokens, [], n_logits).any()
            return len(tokens) - self.count_reusable_tokens(tokens, len(tokens) - n_logits) * bool(is_reusable)

    def count_reusable_tokens(self, tokens: list[int], limit: int) -> int:
        """Return how many tokens, at most limit, need not run: they and a state to continue from are cached."""
        n = count_common_prefix(self._tokens, tokens, limit)
        return n if n >= self._min_rewind else self._snapshots.find_longest(n)

    def check_input(self, tokens: Sequence[int], n_logits: int) -> tuple[list[int], int]:
        """Return tokens as a list of ints, and n_logits; raise ValueError or TypeError if they do not fit `forward`."""
        tokens = tokens if isinstance(tokens, list) else check_ints("tokens", tokens)
        n_logits = check_int("n_logits", n_logits, 0, min(len(tokens), MAX_BATCH_TOKENS))
        if len(tokens) > self.model.n_positions:
            raise ValueError(f"{len(tokens)} tokens do not fit {self.model.n_positions} positions")
        return tokens, n_logits

    # Parts of a pass, which `Model` runs under its lock

    def run(self, tokens: list[int], n_logits: int, n_total: int = 0) -> Float32:
        """Run a pass over this sequence alone, and return its last n_logits logits; see `forward` for the arguments."""
        return self.run_tree(tokens, [], n_logits, n_total)

    def run_tree(self, tokens: list[int], nodes: list[TreeNode], n_logits: int, n_total: int = 0) -> Float32:
        """Run a pass over this sequence alone; return its logits, each computed with the RoPE factors for its sequence's length.

        Args:
            tokens: All tokens of the sequence.
            nodes: Nodes of a token tree behind it, or none.
            n_logits: Number of logits, at the last tokens and nodes.
            n_total: Final length of a sequence that is prefilled in chunks; 0 stands for one token more.
        """
        self.model.n_passes += 1
        if not self.model.longrope_threshold:
            return self._run(tokens, nodes, n_logits, n_total)
        are_long = self._find_long_rope_rows(tokens, nodes, n_logits, n_total)
        if are_long.any() and not are_long.all():
            self.switch_rope(False)
            short_logits = self._run(tokens, nodes, n_logits).copy()
            self.switch_rope(True)
            logits = self._run(tokens, nodes, n_logits)
            logits[~are_long] = short_logits[~are_long]
            return logits
        self.switch_rope(bool(are_long[0]))
        return self._run(tokens, nodes, n_logits)

    def select_uncached(self, tokens: list[int], n_logits: int, n_total: int) -> list[int]:
        """Select the RoPE factors for a sequence's length, and return the tokens that it has to run in a pass over several.

        The cache is cleared if it holds keys with other factors.

        Raises:
            ValueError: If the sequence gets longer than LongRoPE's threshold within the pass, or a token is out of range.
        """
        are_long = self._find_long_rope_rows(tokens, [], n_logits, n_total)
        if are_long.any() and not are_long.all():
            limit = f"{self.model.longrope_threshold} tokens, where its RoPE factors change"
            raise ValueError(f"a sequence of a batch gets longer than {limit}; run it alone")
        self.switch_rope(bool(are_long[0]))
        return self._check_tokens("tokens", tokens[self.count_reusable_tokens(tokens, len(tokens) - n_logits) :])

    def begin_batch(self, tokens: list[int], new: list[int], row: int) -> None:
        """Grow and truncate the cache for a pass over several sequences, which runs the last tokens of this one.

        Args:
            tokens: All tokens of the sequence.
            new: Those that the pass runs.
            row: The row of the first of them in the pass.
        """
        self.reserve(len(tokens))
        self._rewind(len(tokens) - len(new))
        self._advance(len(new))
        self._buffers.load_tokens(new, self.model.weights.table, row)

    def end_batch(self, new: list[int], n_logits: int, n_total: int, end: int) -> Float32:
        """Add the tokens that a pass over several sequences has run for this one, and return its logits, those before row `end`.

        A snapshot is taken if it is due in a prefill.
        """
        self._tokens += new
        if not n_logits:
            self._snapshots.maybe_take(self._buffers, len(self._tokens), n_total)
        return self._buffers.logits[end - n_logits : end, : self.model.config.vocab_size]

    def _find_long_rope_rows(
        self, tokens: list[int], nodes: list[TreeNode], n_logits: int, n_total: int = 0
    ) -> npt.NDArray[np.bool_]:
        """Return a bool for each row of logits, or one for the sequence if n_logits is 0: whether it uses long RoPE factors."""
        lengths = compute_lengths(tokens, nodes, n_logits) if n_logits else [max(n_total, len(tokens) + 1)]
        return np.array([self.model.config.has_long_rope(n) for n in lengths], bool)

    def switch_rope(self, is_long: bool) -> None:
        """Select the long or short RoPE factors; clear the cache if the selection changes."""
        if is_long != self.has_long_rope:
            self._rewind(0)
            self.has_long_rope, self.executor = is_long, self._executors[is_long]

    def _run(self, tokens: list[int], nodes: list[TreeNode], n_logits: int, n_total: int = 0) -> Float32:
        """Run the tokens and tree nodes that the cache does not hold, and the last n_logits of both; return the logits."""
        limit = len(tokens) - max(0, n_logits - len(nodes))
        start, n_nodes = self.count_reusable_tokens(tokens, limit), 0
        if self._tree_nodes and start == len(self._tokens):
            if start < limit:
                start = self._commit_path(self._find_tree_path(tokens[start:limit]))
            elif start == len(tokens):
                n_nodes = count_common_prefix(self._tree_nodes, nodes, len(nodes) - n_logits)
        new = self._check_tokens("tokens", tokens[start:]) + self._check_tokens("nodes", [token for token, _ in nodes[n_nodes:]])
        self.reserve(len(tokens) + len(nodes))
        del self._tree_nodes[n_nodes:]
        self._truncate(start)
        if nodes:
            build_tree_paths(self._buffers.depths, self._buffers.paths, np.array([parent for _, parent in nodes]), len(nodes))
        n_threads, trimmed = self.model.n_threads, self.active_classifier
        while new:
            # Of several passes, the last is full, so that it holds all n_logits tokens and all nodes.
            batch = new[: len(new) % MAX_BATCH_TOKENS or MAX_BATCH_TOKENS]
            del new[: len(batch)]
            self._buffers.load_tokens(batch, self.model.weights.table, 0)
            self._advance(len(batch))
            self.executor(len(batch), len(self._tokens) + n_nodes, 0 if new or trimmed else n_logits, n_threads, len(tokens))
            self._tokens += batch[: len(tokens) - len(self._tokens)]
        self._tree_nodes += nodes[n_nodes:]
        if not n_logits:
            self._snapshots.maybe_take(self._buffers, len(self._tokens), n_total)
        logits = trimmed.compute_logits(len(batch), n_logits) if trimmed and n_logits else self._buffers.logits[:n_logits]
        return logits[:, : self.model.config.vocab_size]

    def _rewind(self, n: int) -> None:
        """Drop the nodes of the last tree and truncate the cached sequence to n tokens."""
        self._tree_nodes.clear()
        self._truncate(n)

    def _truncate(self, n: int) -> None:
        """Truncate the cached sequence, and the recurrent state, to n tokens.

        n is 0, at least `_min_rewind`, or the length of a snapshot.
        """
        del self._tokens[n:]
        self._snapshots.drop_after(n)
        if 0 < n < self._min_rewind:
            self._snapshots.restore(self._buffers, n)
        elif n < self._min_rewind:
            self.model.window_evictor.evict(self._buffers, 0, sys.maxsize)
        self._min_rewind = min(self._min_rewind, n)

    def _advance(self, n: int) -> None:
        """Raise `_min_rewind` for a pass over n more tokens, and evict keys and values that no window reaches any more."""
        evictor = self.model.window_evictor
        if self.model.has_recurrent_state:
            self._min_rewind = max(self._min_rewind, len(self._tokens) + n + 1 - N_REWINDABLE_STATES)
        elif (min_rewind := evictor.get_min_rewind(len(self._tokens))) > self._min_rewind:
            before, self._min_rewind = self._min_rewind, min_rewind
            evictor.evict(self._buffers, before, min_rewind)

    def _check_tokens(self, name: str, tokens: list[int]) -> list[int]:
        """Return tokens as a list of ints; raise ValueError if one of them is not in the vocabulary."""
        tokens, vocab_size = check_ints(name, tokens), self.model.config.vocab_size
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            invalid = next(token for token in tokens if not 0 <= token < vocab_size)
            raise ValueError(f"{name} hold {shorten(invalid)}; expected 0 to {vocab_size - 1}")
        return tokens

    def _find_tree_path(self, tokens: list[int]) -> list[int]:
        """Return the indexes of the last tree's nodes that tokens behind the cached sequence follow, as far as they match."""
        path = [-1]
        for token in tokens:
            if (token, path[-1]) not in self._tree_nodes:
                break
            path.append(self._tree_nodes.index((token, path[-1])))
        return path[1:]

    def _commit_path(self, path: list[int]) -> int:
        """Move a path of the last tree to the end of the cached sequence, drop the tree, and return the number of cached tokens.

        Raises:
            ValueError: If there is no such path.
        """
        for parent, node in zip([-1, *path], path, strict=False):
            if not 0 <= node < len(self._tree_nodes) or self._tree_nodes[node][1] != parent:
                raise ValueError(f"path is {shorten(path)}; expected nodes of the last tree, each the parent of the next")
        tokens = [self._tree_nodes[node][0] for node in path]
        self._tree_nodes.clear()
        if path != [*range(len(path))]:
            self._buffers.move_path(np.array(path), len(self._tokens))
        self._tokens += tokens
        return len(self._tokens)

    def reserve(self, n_slots: int) -> None:
        """Grow the buffers, to twice the capacity or more, if they cannot hold n_slots tokens of a sequence and its tree."""
        if n_slots <= self._capacity:
            return
        n_positions = self.model.n_positions
        capacity = min(max(n_slots, 2 * self._capacity), n_positions + (MAX_BATCH_TOKENS if n_slots > n_positions else 0))
        self._allocate(round_up(capacity, PANEL_ROWS))

    def _allocate(self, capacity: int) -> None:
        """Replace buffers and executors by ones for `capacity` slots, with the same contents."""
        model = self.model
        buffers = model.grow_buffers(capacity, len(self.hidden_layers), self._buffers if self._capacity else None)
        executors = model.architecture.make_executors(model.config, model.weights, buffers, self.hidden_layers)
        # One assignment: an interrupt between several would leave a program over buffers that are gone.
        self._executors, self.executor, self._buffers, self._capacity = (
            executors, executors[self.has_long_rope], buffers, capacity,
        )  # fmt: skip


def _check_hidden_layers(model: "Model", layers: Sequence[int]) -> tuple[int, ...]:
    """Return `hidden_layers` as a tuple of ints; raise ValueError or TypeError if they are not different layers of the model."""
    last = model.config.n_layers + model.architecture.keeps_final_norm
    layers = tuple(check_int(f"hidden_layers[{i}]", n, 0, last) for i, n in enumerate(check_ints("hidden_layers", layers)))
    if len({*layers}) < len(layers):
        raise ValueError(f"hidden_layers are {shorten(layers)}; expected each once")
    return layers
