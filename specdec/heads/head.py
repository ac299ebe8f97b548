"""Heads that draft: a layer that goes on from its target's hidden states, with a cache of its own. Knows no drafter.

Shapes: H width of the target's hidden states, N of which make a feature; h the head's own; R rows of its classifier.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from specdec.config import Config
from specdec.draft.vocab_map import ByTargetIds
from specdec.heads.eagle3 import head_of, taps
from specdec.heads.mtp import TARGET_NORM
from specdec.kernels import MAX_TOKENS
from specdec.layers.base import Buffers, Weights
from specdec.layers.rope import Node
from specdec.model.registry import architecture_of
from specdec.model.transformer import KV, Transformer
from specdec.runtime.program import Runner
from specdec.runtime.simd import Float32, Int64
from specdec.runtime.threads import rebuilt
from specdec.validation import n_common


class Head(Transformer):
    """A head: logits of what follows a text, by its target's ids, from the hidden states that the target holds of it.

    config, weights: the head's own; embedding and classifier that it has not are the target's. target: keeps the hidden states
    that the head takes, beside its cache. target_ids: of each row of the classifier, the target's id, (R,); by default row i is
    id i. The rest is a `Transformer`'s. Whoever holds both locks takes the head's first.

    A text of n tokens is n - 1 pairs: of position i the target's hidden states, and the token of position i + 1. A pair whose
    states the target holds runs with them, the truth; one behind these is a guess, which runs with the head's own output and once
    more as soon as the target holds the truth.

    Raises ValueError for what is no head, or the head of another target; else as `Transformer`.
    """

    def __init__(
        self,
        config: Config,
        weights: Weights,
        target: Transformer,
        target_ids: Int64 | None = None,
        n_threads: int | None = None,
        n_positions: int | None = None,
        kv: KV = "auto",
    ) -> None:
        if flaw := config.flaw() or _misfit(config, target.config):
            raise ValueError(flaw)
        (architecture := architecture_of(config)).check(config, weights)
        self._own, self.target, self.target_ids = (config, weights.aligned()), target, target_ids
        head = replace(head_of(config), layers=head_of(config).layers_of(target.config.n_layers))
        if target.hidden_layers not in ((), head.layers):
            raise ValueError(f"the target keeps the hidden states before layers {target.hidden_layers}, not {head.layers}")
        if target_ids is not None and (
            target_ids.shape != (head.n_rows,)
            or len(np.unique(target_ids)) < head.n_rows
            or not 0 <= target_ids.min() <= target_ids.max() < config.vocab_size
        ):
            raise ValueError(f"target_ids are not {head.n_rows} different ids of 0 to {config.vocab_size - 1}")
        self._taken = head.layers
        self.by_target = ByTargetIds(np.arange(head.n_rows) if target_ids is None else target_ids, config.vocab_size)
        self._is_of_long = False  # whether the pairs that the cache holds are of a long text (`Transformer.is_long`)
        self._n_true = 0  # pairs, from the first on, that ran with the truth, as far as the cache holds them
        self._features: tuple[Buffers, Runner] | None = None  # the program of features, over those buffers
        own = (("embedding", head.own_embedding), ("classifier", head.own_classifier))
        borrowed = {name: target.weights.matrices[name] for name, is_own in own if not is_own}
        vectors = dict(self._own[1].vectors)
        if config.architecture == "mtp":
            vectors[TARGET_NORM] = target.weights.vectors["rms_final"]
        whole = replace(config, head=replace(head, own_embedding=True, own_classifier=True))
        kv = kv if architecture.features else target.kv  # of a head without features, which reads the target's caches
        super().__init__(whole, Weights(self._own[1].matrices | borrowed, vectors), n_threads, n_positions, kv)
        if target.hidden_layers != head.layers:
            target.hidden_layers = head.layers

    def __reduce__(self) -> tuple[Any, ...]:
        named = {"n_threads": self._most_threads, "n_positions": self._n_positions, "kv": self.kv}
        return rebuilt, (type(self), (*self._own, self.target, self.target_ids), named)

    def with_positions(self, n_positions: int) -> "Head":
        return self.of(self.target, n_positions)

    def of(self, target: Transformer, n_positions: int | None = None) -> "Head":
        """The same head on a seat of its target."""
        n_positions = self._n_positions if n_positions is None else n_positions
        head = type(self)(*self._own, target, self.target_ids, self._most_threads, n_positions, self.kv)
        head.n_threads = self.n_threads
        return head

    def take_over(self, other: Transformer, tokens: list[int]) -> None:
        """Nothing: it reads by itself, which costs little."""

    def drafts_for(self, tokens: list[int]) -> bool:
        """Whether `forward` gives logits behind a text without a guess: the target holds the truth of the last pair, and of those
        before it that did not run with it.
        """
        n_pairs = len(tokens) - 1
        with self.lock, self.target.lock:
            n = max(self._n_kept(tokens, n_pairs) - 1, 0)
            return 0 < n_pairs <= n + len(self._states(tokens, n))

    def _states(self, tokens: list[int], first: int) -> Float32:
        """The hidden states (n, N H) of a text that the target holds, from position `first` on."""
        if self.target.hidden_layers != self._taken:
            return np.zeros((0, 0), np.float32)
        return self.target.hidden(tokens, first)

    def _n_kept(self, tokens: list[int], limit: int) -> int:
        """How many of a text's tokens need not run again, whatever the target holds; the first is in no pair."""
        return min(max(n_common(self._held, tokens, limit), 1), self._n_true + 1, limit)

    def _forward(self, tokens: list[int], nodes: list[Node], n_logits: int, n_total: int = 0) -> Float32:
        """Logits; runs all pairs that have the truth and did not run with it, then, for logits alone, guesses."""
        self._turn.n_passes += 1
        if self._is_of_long != self.target.is_long:  # other hidden states
            self._is_of_long, self._n_true = self.target.is_long, 0
            self._held.clear()
        n_pairs = max(len(tokens) - 1, 0)
        if n_logits > n_pairs:
            raise ValueError(f"n_logits is {n_logits}; a head has 0 to {n_pairs} for {len(tokens)} tokens")
        logits = self.by_target.room(n_logits)
        self._reserve(n_pairs)
        limit = n_pairs - n_logits
        n_held = min(max(n_common(self._held, tokens, len(tokens)) - 1, 0), limit)
        at = min(self._n_true, n_held)
        n_true = self._take(tokens, at, n_pairs)
        at = at if n_true else n_held
        self._checked("tokens", tokens[at + 1 :])
        self._n_true = min(self._n_true, at)
        del self._held[at + 1 if at else 0 :]
        while at < n_pairs and (n_true or n_logits):
            n = n_true or self._go_on(at, n_pairs)
            self._buffers.tokens[:n] = tokens[at + 1 : at + 1 + n]
            n_rows = max(min(n, at + n - limit), 0)
            self._runner(n, at, n_rows, self._n_threads)
            at += n
            self._held += tokens[len(self._held) : at + 1]
            if n_rows:
                self.by_target.put(at - n_rows - limit, self._buffers.logits[:n_rows])
            if n_true:
                self._n_true = at
                n_true = self._take(tokens, at, n_pairs)
        return logits

    def _take(self, tokens: list[int], first: int, end: int) -> int:
        """Make features of the target's hidden states, for a pass over pairs `first` to `end`; how many there are."""
        n_taps, width = taps(self._config)
        with self.target.lock:
            n_passes = -1
            while n_passes != self.target.n_passes:  # as long as a signal handler runs another
                n_passes = self.target.n_passes
                states = self._states(tokens, first)[: min(end - first, MAX_TOKENS)]
                if n := len(states):
                    rows = states.reshape(n, n_taps, width).swapaxes(0, 1)
                    np.multiply(rows, self.target.config.residual_scale, out=self._buffers.taps[:, :n, :width])
        if n:
            if self._features is None or self._features[0] is not self._buffers:
                assert self._architecture.features
                program = self._architecture.features(self._config, self._weights, self._buffers)
                self._features = self._buffers, Runner(program)
            self._features[1](n, first, 0, self._n_threads)
        return n

    def _go_on(self, at: int, end: int) -> int:
        """Let a pass over that pair go on from the output before it; how many pairs that is: one."""
        if at == 0 or end - at > MAX_TOKENS:
            raise ValueError(f"the target holds no hidden states of the text; {end - at} of {end} pairs would be guesses")
        x = self._buffers.x[0, 0]
        x[:] = 0.0  # what an earlier pass left behind the row may be NaN
        x[: self._config.dim] = self._buffers.outputs[at - 1]
        return 1


def _misfit(config: Config, target: Config) -> str:
    """What keeps a head from being one of that target; empty where nothing does."""
    head = config.head
    if head is None:
        return f"a {config.architecture} model is no head"
    if (head.target_dim, config.vocab_size) != (target.dim, target.vocab_size):
        return (
            f"a head for a target of width {head.target_dim} and {config.vocab_size} tokens does not fit one of {target.dim} "
            f"and {target.vocab_size}"
        )
    return ""
