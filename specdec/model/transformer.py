"""Tokens to logits: a model's buffers, the cache that knows its tokens, and the pass. Knows no files."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from specdec.config import Config
from specdec.kernels import MAX_TOKENS, trace
from specdec.layers.base import Buffers, Common, Room, Weights
from specdec.layers.kv_formats import KV_CACHES
from specdec.layers.rope import Node, depths, lengths
from specdec.model.registry import architecture_of
from specdec.model.sliding_window import Windows
from specdec.model.state_snapshots import BEFORE_END, Snapshots, snapshot_bytes
from specdec.runtime.cpu_topology import thread_choices
from specdec.runtime.memory import zeros
from specdec.runtime.program import Runner, TextPart
from specdec.runtime.simd import Float32, round_up
from specdec.runtime.threads import available_threads, give_lock, rebuilt
from specdec.runtime.tile import STRIP_ROWS, TILE_TOKENS
from specdec.validation import ids, n_common, one_of, short, whole

READ_SECONDS = 0.3  # that a pass over a part of a long prompt should take: keys are looked at in between
FIRST_READ, LEAST_READ = 2 * TILE_TOKENS, TILE_TOKENS  # tokens of the first such pass, and of one of a slow model
FIRST_POSITIONS = 256  # that a model has room for before its text grows
KV = Literal["auto", "f32", "f16", "q8"]  # what keys and values are kept in
Answer = TypeVar("Answer")
IN_THE_MIDDLE = "this thread is in the middle of a pass of this model; a signal handler cannot use it"


def kv_of(weights: Weights, kv: KV) -> KV:
    """What a model of those weights keeps keys and values in where that is asked for: see `Transformer`."""
    if kv == "auto":
        return "f32" if weights.kind == "fp32" else "f16"
    return kv


class Turn:
    """What models that share passes have in common: one of them runs at a time, in buffers that are no text's own."""

    def __init__(self) -> None:
        self.lock: threading._RLock
        give_lock(self, "lock")
        self.is_taken = False
        self.n_passes = 0
        self.common = Common()


class Transformer:
    """A model on CPU threads, with the KV cache of the text that it ran last.

    weights: packed (`Architecture.pack`); n_threads: all cores by default; n_positions: how far a text may go, by default
    seq_len, and no farther than that where positions are learned. Buffers grow with the text. Beyond its own seq_len a model
    sees a sliding window of that many positions. kv: what keys and values are kept in, "f32", "f16", each rounded to
    the nearest and NaN beyond its range, or "q8", bytes with a scale a head; "auto" is f32 where all weights are, else f16.
    hidden_layers: before which layers the hidden states are kept, beside the cache; see `hidden`.
    beside: a model of the same weights whose passes this one may share; see `seat`.

    Whatever runs, the logits are those of the tokens that were asked for: the cache knows which tokens it holds, those of the
    last tree among them. Threads may share a model; `lock` is for whoever reads logits that another's pass must not overwrite. A
    model can be pickled and copied.

    Raises ValueError for weights of another shape than the config's, for n_threads that the machine does not give, for
    n_positions below 1, for another kv and for hidden_layers that there are not.
    """

    def __init__(
        self,
        config: Config,
        weights: Weights,
        n_threads: int | None = None,
        n_positions: int | None = None,
        kv: KV = "auto",
        hidden_layers: Sequence[int] = (),
        beside: "Transformer | None" = None,
    ) -> None:
        if flaw := config.flaw():
            raise ValueError(flaw)
        self._architecture = architecture_of(config)
        self._architecture.check(config, weights)
        self._config, self._weights = config, beside.weights if beside else weights.aligned()
        self.kv: KV = kv_of(weights, one_of("kv", kv, get_args(KV)))  # f32, f16 or q8
        self.n_short = config.rope.n_short  # tokens of a short text, where long ones are turned otherwise; else 0
        self._most_threads = available_threads()
        self.n_threads = thread_choices()[0] if n_threads is None else n_threads
        self._most_threads = self._most_threads if n_threads is None else self.n_threads
        self._n_positions = config.seq_len if n_positions is None else whole("n_positions", n_positions, 1)
        if self._architecture.learned_positions:
            self._n_positions = min(self._n_positions, config.seq_len)
        self._turn: Turn = beside._turn if beside else Turn()
        self._held: list[int] = []  # the tokens whose keys and values the cache holds, those of a text
        self._nodes: list[Node] = []  # and in the slots behind them, those of a tree
        self._is_long = False  # whether they are turned as those of a long text
        self._shortest = 0  # the length of a text, but for 0, that the cache can still go back to without a snapshot
        self._snapshots = Snapshots()
        self._windows = Windows(self._architecture, config, self._weights, KV_CACHES[self.kv], self._n_positions)
        self.has_state = self._architecture.n_states > 0  # that is of one text, beside keys and values
        self._capacity = 0
        self._buffers: Buffers
        self._runners: list[Runner]  # of short texts, and of long ones where these differ
        self._hidden_layers: tuple[int, ...] = ()
        self._build(round_up(min(self._n_positions, FIRST_POSITIONS), STRIP_ROWS), self._layers(hidden_layers))

    def __repr__(self) -> str:
        c = self._config
        return f"<{c.architecture} of {c.n_layers} layers x {c.dim}, {c.vocab_size} tokens, {self._weights.kind}>"

    def __reduce__(self) -> tuple[Any, ...]:
        named = {
            "n_threads": self._most_threads, "n_positions": self._n_positions, "kv": self.kv, "hidden_layers": self.hidden_layers,
        }  # fmt: skip
        return rebuilt, (Transformer, (self._config, self._weights), named)

    @property
    def config(self) -> Config:
        return self._config

    @property
    def weights(self) -> Weights:
        return self._weights

    @property
    def lock(self) -> "threading._RLock":
        """For whoever reads logits that no other pass must overwrite."""
        return self._turn.lock

    @property
    def n_passes(self) -> int:
        """So that whoever reads logits can tell whether a signal handler ran a pass meanwhile."""
        return self._turn.n_passes

    @property
    def experts_read(self) -> tuple[float, int]:
        """How many experts a layer read in the last pass, the mean of those that have some, and for a token alone; or 0, 0."""
        if not self._config.experts:
            return 0.0, 0
        read = [n for n in self._buffers.experts_read.tolist() if n]
        return sum(read) / max(len(read), 1), self._config.experts.n_chosen

    @property
    def n_positions(self) -> int:
        return self._n_positions

    @property
    def runs_trees(self) -> bool:
        """Whether there is a `forward_tree`."""
        return self._architecture.move is not None

    @property
    def n_threads(self) -> int:
        """How many threads a pass takes: at most as many as the model was made for. Changes the speed alone."""
        return self._n_threads

    @n_threads.setter
    def n_threads(self, n: int) -> None:
        self._n_threads = whole("n_threads", n, 1, self._most_threads)

    @property
    def n_held(self) -> int:
        """How many tokens of the last text the cache holds."""
        return len(self._held)

    @property
    def whole_from(self) -> int:
        """From which position on every layer has the keys and values of the text: those with windows may have given some back."""
        return 0 if self.has_state else self._shortest

    @property
    def is_long(self) -> bool:
        """Whether the last text is one of those that a family turns otherwise from their first token on."""
        return self._is_long

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Before which layers the hidden states are kept, n_layers for behind the last and n_layers + 1 for behind the last norm
        too; none by default, which costs nothing.

        Others empty the cache, which has not kept them. Raises ValueError and TypeError for what are no layers, RuntimeError as
        `forward` does.
        """
        return self._hidden_layers

    @hidden_layers.setter
    def hidden_layers(self, layers: Sequence[int]) -> None:
        self._alone(self._build, self._capacity, self._layers(layers))

    def hidden(self, tokens: list[int], first: int) -> Float32:
        """The residual stream (n, layers D) before each of `hidden_layers`, one behind the other, valid until the next call.

        At positions `first` on of those of a text's tokens that the cache holds now, whoever ran them; maybe at none. What a
        family with a residual_scale holds is the stream divided by it. Raises RuntimeError as `forward` does.
        """
        return self._alone(self._hidden_of, tokens, first)

    def text_bytes(self, n_positions: int, is_another: bool = False) -> int:
        """What a text of so many positions takes beside the weights, and a tree at its end; is_another: beside a first text."""
        room = self._room(round_up(n_positions + MAX_TOKENS, STRIP_ROWS), len(self._hidden_layers))
        buffers = self._architecture.all_buffers(self._config, self._weights, room)
        kept = snapshot_bytes({name: each.shape for name, each in buffers.items()}) - self._windows.saved_bytes(room.n_positions)
        return kept + sum(buffer.n_bytes for buffer in buffers.values() if buffer.is_own or not is_another)

    def positions_within(self, n_bytes: float, most: int) -> int:
        """How many positions a text may have that takes so many bytes (`text_bytes`): 1 to `most`."""
        while most > 1 and self.text_bytes(most) > n_bytes:
            most -= max(1, most // 64)
        return most

    def with_positions(self, n_positions: int) -> "Transformer":
        """The same model, with room for texts of so many positions."""
        model = Transformer(self._config, self._weights, self._most_threads, n_positions, self.kv)
        model.n_threads = self._n_threads
        return model

    def seat(self, hidden_layers: Sequence[int] | None = None) -> "Transformer":
        """The same model with a cache of its own, for another text: the two may share passes (`forward_together`), and take turns
        in all else; logits of one are valid until the next call of either. With other hidden_layers it runs alone.
        """
        layers = self._hidden_layers if hidden_layers is None else hidden_layers
        return Transformer(self._config, self._weights, self._most_threads, self._n_positions, self.kv, layers, beside=self)

    def take_over(self, other: "Transformer", tokens: list[int]) -> None:
        """Let the cache hold what another one's holds of a text whose last token is yet to run: a `seat`'s or `with_positions`'.

        Nobody may run the other one meanwhile. Raises ValueError for another kind of model, MemoryError, and RuntimeError as
        `forward` does.
        """
        self._alone(self._take_over, other, max(len(tokens) - 1, 0) - other.unread(tokens))

    @staticmethod
    def forward_together(
        texts: Sequence[tuple["Transformer", Sequence[int], int] | tuple["Transformer", Sequence[int], int, int]],
    ) -> list[Float32]:
        """`forward` of several texts in one pass: of each (model, tokens, n_logits) the logits (n_logits, V), bit for bit.

        A fourth number is n_total. The models are `seat`s of one, each once. The threads are the first one's. Raises ValueError
        where more than MAX_TOKENS tokens would have to run (see `n_to_run`), else what `forward` raises.
        """
        jobs = [(text[0], *text[0]._job(text[1], text[2]), text[3] if len(text) > 3 else 0) for text in texts]
        if not jobs:
            return []
        lead, models = jobs[0][0], [job[0] for job in jobs]
        if len({*map(id, models)}) < len(models) or any(
            model._turn is not lead._turn or model._hidden_layers != lead._hidden_layers for model in models
        ):
            raise ValueError("texts share a pass whose models are seats of one, each once, that keep the same hidden states")
        logits = lead._alone(lead._forward_together, sorted(jobs, key=lambda job: job[2] > 0))
        return [logits[id(model)] for model in models]

    def n_to_run(self, tokens: Sequence[int], n_logits: int) -> int:
        """How many tokens `forward` would run now."""
        tokens, n_logits = self._job(tokens, n_logits)
        with self.lock:
            is_held = self._is_long == self._are_long(tokens, [], n_logits).any()
            return len(tokens) - self._n_kept(tokens, len(tokens) - n_logits) * bool(is_held)

    def forward(self, tokens: Sequence[int], n_logits: int = 1, n_total: int = 0) -> Float32:
        """Logits (n_logits, V) at the last of the tokens of a text, valid until the next call; runs what the cache does not hold.

        n_total: how many tokens the text is going to have, where it is run piece by piece without logits; by default one more.
        Of a family that turns all of a long text otherwise, a text is run anew as it gets long; a pass with logits of both sorts
        runs all of it twice, which `room_behind` avoids. Raises ValueError for n_logits beyond the tokens or MAX_TOKENS, a token
        out of range or more tokens than n_positions, TypeError for tokens that are no whole numbers, MemoryError where the cache
        cannot grow, RuntimeError in a signal handler that interrupts a pass.
        """
        tokens, n_logits = self._job(tokens, n_logits)
        return self._alone(self._forward, tokens, [], n_logits, n_total)

    def unread(self, tokens: list[int]) -> int:
        """How many of a text's tokens `read` would run."""
        limit = max(len(tokens) - 1, 0)
        return limit - self._n_kept(tokens, limit) * (self._is_long == self._config.is_long(len(tokens)))

    def n_to_stop(self, tokens: list[int]) -> int:
        """Of the `unread`, how many run before a pass is to end: a running state is kept a little before a prompt's end."""
        left = self.unread(tokens)
        return left - BEFORE_END if self.has_state and left > BEFORE_END else left

    def read(self, tokens: list[int]) -> Iterator[int]:
        """Run all but the last of a text's tokens, some at a time; tells after each time how many are left.

        A pass takes no longer than somebody at the keys would wait, as far as it can be cut.
        """
        left, stop, n = self.unread(tokens), self.unread(tokens) - self.n_to_stop(tokens), FIRST_READ
        while left:
            begin, left = time.perf_counter(), max(left - n, stop if left > stop else 0)
            self.forward(tokens[: len(tokens) - 1 - left], n_logits=0, n_total=len(tokens))
            seconds = time.perf_counter() - begin
            yield left
            if seconds > READ_SECONDS:
                n = max(n // 2, LEAST_READ)
            elif seconds < READ_SECONDS / 2:
                n = min(2 * n, MAX_TOKENS)

    def forward_tree(
        self, tokens: Sequence[int], nodes: Sequence[int], parents: Sequence[int], n_logits: int | None = None
    ) -> Float32:
        """Logits (n_logits, V) at the last of: a text's last token, then the nodes of a token tree behind it (SpecInfer,
        arXiv:2305.09781); bit for bit what `forward` gives of the text and a node's path. Valid until the next call.

        nodes: tokens, a path that is likely to be kept best at the front; parents: of each node an earlier one's index, or -1
        where it follows the text; n_logits: by default one more than there are nodes. Runs what the cache does not hold and the
        last n_logits: nodes that are appended to the last call's, and asked for alone, run alone. Raises what `forward` raises,
        ValueError for MAX_TOKENS nodes or more and for a family that runs no trees, too.
        """
        if not self.runs_trees:
            raise ValueError("this model runs no trees: its state is that of one text")
        tokens = tokens if isinstance(tokens, list) else ids("tokens", tokens)
        nodes, parents = ids("nodes", nodes), ids("parents", parents)
        n, most = len(tokens), len(nodes) + 1
        if not n or most > MAX_TOKENS or len(nodes) != len(parents):
            raise ValueError(
                f"{len(nodes)} nodes of {len(parents)} parents behind {n} tokens; "
                f"expected at most {MAX_TOKENS - 1} with a parent each, behind one token or more"
            )
        for node, parent in enumerate(parents):
            if not -1 <= parent < node:
                raise ValueError(f"parents[{node}] is {short(parent)}; expected -1 to {node - 1}")
        if n + (deepest := max(depths(parents), default=0)) > self._n_positions:
            raise ValueError(f"{n} tokens and a tree of depth {deepest} do not fit {self._n_positions} positions")
        n_logits = most if n_logits is None else whole("n_logits", n_logits, 0, most)
        return self._alone(self._forward, tokens, [*zip(nodes, parents, strict=True)], n_logits)

    def keep(self, path: Sequence[int]) -> None:
        """Let the cache's text go on by a path of the last tree, indexes of nodes from one that follows the text on down; the
        other nodes are forgotten.

        A pass over a text that goes on as the tree does keeps its path by itself. Raises ValueError for what is no such path,
        TypeError for what are no whole numbers, RuntimeError as `forward` does.
        """
        self._alone(self._keep, ids("path", path))

    def look(self, work: Callable[[Buffers, list[int], Snapshots], Answer]) -> Answer:
        """What `work` makes of the cache's buffers, the tokens that they hold and the snapshots, all of which it leaves."""
        return self._alone(lambda: work(self._buffers, self._held, self._snapshots))

    def hold(self, tokens: list[int], fill: Callable[[Buffers, int], tuple[int, Snapshots]]) -> None:
        """Let the cache hold so many tokens of a text as `fill` has filled behind those that it holds, if it has, and states."""
        self._alone(self._hold, tokens, fill)

    def _hold(self, tokens: list[int], fill: Callable[[Buffers, int], tuple[int, Snapshots]]) -> None:
        self._reserve(len(tokens))
        self._switch(self._config.is_long(len(tokens)))
        self._forget(n_kept := self._n_kept(tokens, len(tokens) - 1))
        n, snapshots = fill(self._buffers, n_kept)
        if n > n_kept:
            self._held, self._shortest = tokens[:n], n + 1 if self.has_state else self._shortest
            for snapshot in snapshots:
                self._snapshots.add(snapshot)
            self._goes_back(n)

    def _alone(self, work: Callable[..., Answer], *arguments: Any) -> Answer:
        """The work, with the model to itself."""
        turn = self._turn
        with turn.lock:
            if turn.is_taken:
                raise RuntimeError(IN_THE_MIDDLE)
            try:
                turn.is_taken = True
                return work(*arguments)
            finally:
                turn.is_taken = False

    def _job(self, tokens: Sequence[int], n_logits: int) -> tuple[list[int], int]:
        """What `forward` was asked for, checked."""
        tokens = tokens if isinstance(tokens, list) else ids("tokens", tokens)
        n = len(tokens)
        if type(n_logits) is not int or not 0 <= n_logits <= min(n, MAX_TOKENS):
            n_logits = whole("n_logits", n_logits, 0, min(n, MAX_TOKENS))
        if n > self._n_positions:
            raise ValueError(f"{n} tokens do not fit {self._n_positions} positions")
        return tokens, n_logits

    def _forward(self, tokens: list[int], nodes: list[Node], n_logits: int, n_total: int = 0) -> Float32:
        """Logits, of short texts and of long ones as each are turned."""
        self._turn.n_passes += 1
        if not self._config.rope.n_short:
            return self._run(tokens, nodes, n_logits, n_total)
        are_long = self._are_long(tokens, nodes, n_logits, n_total)
        if are_long.any() and not are_long.all():
            self._switch(False)
            short = self._run(tokens, nodes, n_logits).copy()
            self._switch(True)
            logits = self._run(tokens, nodes, n_logits)
            logits[~are_long] = short[~are_long]
            return logits
        self._switch(bool(are_long[0]))
        return self._run(tokens, nodes, n_logits)

    def _are_long(self, tokens: list[int], nodes: list[Node], n_logits: int, n_total: int = 0) -> npt.NDArray[Any]:
        """Of the text that each of the logits is behind, or of that which is begun, whether it is a long one."""
        found = lengths(tokens, nodes, n_logits) if n_logits else [max(n_total, len(tokens) + 1)]
        return np.array([self._config.is_long(n) for n in found], bool)

    def _switch(self, is_long: bool) -> None:
        """Take passes of long texts, or of short ones, from here on; the cache holds none of the others."""
        if is_long != self._is_long:
            self._forget(0)
            self._is_long, self._runner = is_long, self._runners[is_long]

    def _run(self, tokens: list[int], nodes: list[Node], n_logits: int, n_total: int = 0) -> Float32:
        """Logits; runs the tokens and nodes that the cache does not hold, and the last n_logits of both."""
        limit = len(tokens) - max(0, n_logits - len(nodes))
        start, n_nodes = self._n_kept(tokens, limit), 0
        if self._nodes and start == len(self._held):
            if start < limit:
                start = self._keep(self._followed(tokens[start:limit]))
            elif start == len(tokens):
                n_nodes = n_common(self._nodes, nodes, len(nodes) - n_logits)
        new = self._checked("tokens", tokens[start:])
        if nodes:
            new += self._checked("nodes", [token for token, _ in nodes[n_nodes:]])
        self._reserve(len(tokens) + len(nodes))
        if self._nodes:
            del self._nodes[n_nodes:]
        self._goes_back(start)
        if nodes:
            trace(self._buffers.depths, self._buffers.paths, np.array([parent for _, parent in nodes]), len(nodes))
        while new:
            # the last pass is a full one where there are several, so that it holds all n_logits tokens, and all nodes
            block = new[: len(new) % MAX_TOKENS or MAX_TOKENS]
            del new[: len(block)]
            self._weights.take_in(block, self._buffers, 0)
            self._goes_on(len(block))
            self._runner(len(block), len(self._held) + n_nodes, 0 if new else n_logits, self._n_threads, len(tokens))
            self._held += block[: len(tokens) - len(self._held)] if nodes else block
        if nodes:
            self._nodes += nodes[n_nodes:]
        elif not n_logits:
            self._offer(n_total)
        logits: Float32 = self._buffers.logits[:n_logits, : self._config.vocab_size]
        return logits

    def _forward_together(self, jobs: list[tuple["Transformer", list[int], int, int]]) -> dict[int, Float32]:
        """`forward_together`, by the models' ids; texts that want no logits come first, so that those of all others are a pass's
        last ones.
        """
        self._turn.n_passes += 1
        for model, tokens, n_logits, n_total in jobs:
            are_long = model._are_long(tokens, [], n_logits, n_total)
            if are_long.any() and not are_long.all():
                raise ValueError(f"a text gets longer than {self._config.rope.n_short} tokens in a pass that it would share")
            model._switch(bool(are_long[0]))
        starts = [model._n_kept(tokens, len(tokens) - n_logits) for model, tokens, n_logits, _ in jobs]
        new = [model._checked("tokens", tokens[start:]) for (model, tokens, *_), start in zip(jobs, starts, strict=True)]
        if (n := sum(map(len, new))) > MAX_TOKENS:
            raise ValueError(f"{n} tokens of {len(jobs)} texts would have to run; a pass holds {MAX_TOKENS}")
        parts, at, n_rows = [], 0, sum(len(block) for block, job in zip(new, jobs, strict=True) if job[2])
        for (model, tokens, n_logits, _), start, block in zip(jobs, starts, new, strict=True):
            model._reserve(len(tokens))
            model._forget(start)
            model._goes_on(len(block))
            self._weights.take_in(block, self._buffers, at)
            if block:
                parts.append(TextPart(model._runner, len(block), start, n_logits))
            at += len(block)
        self._runner.run_together(parts, n_rows, self._n_threads)
        rows, end, logits = self._buffers.logits[:, : self._config.vocab_size], n_rows - n, dict[int, Float32]()
        for (model, _, n_logits, n_total), block in zip(jobs, new, strict=True):
            model._held += block
            end += len(block)
            logits[id(model)] = rows[end - n_logits : end]
            if not n_logits:
                model._offer(n_total)
        return logits

    def _forget(self, n: int) -> None:
        """All that the cache holds behind so many tokens of its text."""
        self._nodes.clear()
        self._goes_back(n)

    def _goes_back(self, n: int) -> None:
        """Its text is one of n tokens from here on, and the running state that of as many; n: 0, or where it can go back to."""
        del self._held[n:]
        self._snapshots.forget(n)
        if 0 < n < self._shortest:
            self._snapshots.restore(self._buffers, n)
        elif n < self._shortest:
            self._windows.give_all_back(self._buffers)
        self._shortest = min(self._shortest, n)

    def _offer(self, n_total: int) -> None:
        """Behind a pass of a prompt: its running state may be worth a snapshot."""
        if self.has_state:
            self._snapshots.offer(self._buffers, len(self._held), n_total)

    def _take_over(self, other: "Transformer", n: int) -> None:
        """`take_over` of n tokens."""
        mine, theirs = ((m._config, m.kv, m._hidden_layers, m._weights.places) for m in (self, other))
        if mine != theirs:
            raise ValueError("what a cache holds goes over to a model of the same weights that keeps the same alone")
        held = other._held[:n]
        self._reserve(n)
        self._switch(other._is_long)
        self._forget(0)
        room = self._room(round_up(n, STRIP_ROWS), len(self._hidden_layers))
        self._architecture.copy_text(self._config, self._weights, room, other._buffers, self._buffers)
        self._held, self._shortest = held, other._shortest
        self._snapshots[:] = other._snapshots
        self._goes_back(n)
        self._windows.give_back(self._buffers, 0, self._shortest)

    def _goes_on(self, n: int) -> None:
        """Before a pass over so many tokens more: how far back a running state, or layers with windows, can then still go."""
        if n_states := self._architecture.n_states:
            self._shortest = max(self._shortest, len(self._held) + n + 1 - n_states)
        elif (shortest := self._windows.shortest(len(self._held))) > self._shortest:
            before, self._shortest = self._shortest, shortest
            self._windows.give_back(self._buffers, before, shortest)

    def _checked(self, name: str, tokens: list[int]) -> list[int]:
        """Tokens that the model has."""
        tokens, n_rows = ids(name, tokens), self._config.vocab_size
        if tokens and not 0 <= min(tokens) <= max(tokens) < n_rows:
            wrong = next(token for token in tokens if not 0 <= token < n_rows)
            raise ValueError(f"{name} hold {short(wrong)}; expected 0 to {n_rows - 1}")
        return tokens

    def _n_kept(self, tokens: list[int], limit: int) -> int:
        """How many of a text's tokens, at most limit, need not run: the cache holds them, and a state to go on from."""
        n = n_common(self._held, tokens, limit)
        return n if n >= self._shortest else self._snapshots.best(n)

    def _followed(self, tokens: list[int]) -> list[int]:
        """The path of the tree that tokens behind the text follow."""
        path = [-1]
        for token in tokens:
            if (token, path[-1]) not in self._nodes:
                break
            path.append(self._nodes.index((token, path[-1])))
        return path[1:]

    def _keep(self, path: list[int]) -> int:
        """`keep`; how many tokens the cache then holds. While rows move, it holds no nodes."""
        for parent, node in zip([-1, *path], path, strict=False):
            if not 0 <= node < len(self._nodes) or self._nodes[node][1] != parent:
                raise ValueError(f"path is {short(path)}; expected nodes of the last tree, each the parent of the next")
        tokens = [self._nodes[node][0] for node in path]
        self._nodes.clear()
        if self._architecture.move and path != [*range(len(path))]:
            n_text, nodes = len(self._held), np.array(path)
            self._architecture.move(self._buffers, nodes, n_text)
            if self._hidden_layers:
                self._buffers.hidden_states[n_text : n_text + len(path)] = self._buffers.hidden_states[n_text + nodes]
        self._held += tokens
        return len(self._held)

    def _hidden_of(self, tokens: list[int], first: int) -> Float32:
        """`hidden`; a text that goes on as the last tree does keeps its path."""
        if not self._hidden_layers:
            return zeros(0, 0)
        n = n_common(self._held, tokens, len(tokens))
        if n == len(self._held) and (path := self._followed(tokens[n:])):
            n = self._keep(path)
        states: Float32 = self._buffers.hidden_states[first:n]
        return states

    def _reserve(self, n_slots: int) -> None:
        """Room for so many tokens of a text and its tree, twice as much as there was if that is not enough."""
        if n_slots <= self._capacity:
            return
        most = min(max(n_slots, 2 * self._capacity), self._n_positions + (MAX_TOKENS if n_slots > self._n_positions else 0))
        self._build(round_up(most, STRIP_ROWS), self._hidden_layers)

    def _room(self, n_slots: int, n_hidden: int) -> Room:
        return Room(KV_CACHES[self.kv], n_slots, self._most_threads, n_hidden)

    def _layers(self, layers: Sequence[int]) -> tuple[int, ...]:
        most = self._config.n_layers + (self._architecture.outcome is not None)
        layers = (*(whole(f"hidden_layers[{i}]", layer, 0, most) for i, layer in enumerate(layers)),)
        if len({*layers}) < len(layers):
            raise ValueError(f"hidden_layers are {short(layers)}; expected each once")
        return layers

    def _build(self, capacity: int, layers: tuple[int, ...]) -> None:
        """Buffers for so many slots, grown out of those that there are, and the program over them.

        layers: before which it keeps the hidden states.
        """
        config, weights, architecture, common = self._config, self._weights, self._architecture, self._turn.common
        room, old = self._room(capacity, len(layers)), self._buffers if self._capacity else None
        if layers != self._hidden_layers:
            self._forget(0)
            old = None
        buffers, common = architecture.grown(config, weights, room, old, common)
        runners = architecture.runners(config, weights, buffers, room, common, layers)
        # all or nothing: an interrupt between two calls would leave a program of buffers that are gone
        self._runners, self._runner, self._buffers, self._capacity, self._hidden_layers, self._turn.common = (
            runners, runners[self._is_long], buffers, capacity, layers, common,
        )  # fmt: skip


def room_behind(n_tokens: int, n_positions: int, n_short: int) -> int:
    """How many tokens may follow a text in a pass that has logits of all: no short text, of n_short tokens at most, gets long."""
    return (n_short if n_tokens <= n_short else n_positions) - n_tokens
