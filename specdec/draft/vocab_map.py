"""Drafts whose rows are other ids than the target's: a part of its vocabulary, or another one. All is asked by the target's ids.

So the noise of a token is keyed by its id in the target, as the target's own draw is, and what a proposal was drawn from, q, is a
distribution over the target's ids.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specdec.config import Config
from specdec.layers.rope import Node
from specdec.model.transformer import Transformer
from specdec.runtime.simd import Float32, Int64
from specdec.validation import short

OTHER_TOKEN = 0  # the row that stands for a token which a draft does not have, as in `known`


class ByTargetIds:
    """Lays out a draft's logits (T, rows) by the target's ids: (T, n_ids), -inf where the draft has no row.

    target_ids: of each row the target's id, no id twice, or below 0 for what the target does not have; further rows are left
    out. What a call gives is valid until the next one.
    """

    def __init__(self, target_ids: Sequence[int] | Int64, n_ids: int) -> None:
        of_rows = np.asarray(target_ids, np.int64)
        self._rows = np.flatnonzero(of_rows >= 0)
        self._ids = of_rows[self._rows]
        self._is_whole = len(self._rows) == len(of_rows)
        self._logits = np.full((1, n_ids), -np.inf, np.float32)

    @property
    def n_shared(self) -> int:
        """How many of the target's ids have a row."""
        return len(self._rows)

    def __call__(self, logits: Float32) -> Float32:
        out = self.room(len(logits))
        self.put(0, logits)
        return out

    def room(self, n: int) -> Float32:
        """(n, n_ids), which `put` fills."""
        if n > len(self._logits):
            self._logits = np.full((n, self._logits.shape[1]), -np.inf, np.float32)
        return self._logits[:n]

    def put(self, first: int, logits: Float32) -> None:
        """Fill what there is room for, from that row on."""
        for out, row in zip(self._logits[first:], logits, strict=False):
            out[self._ids] = row[: len(self._ids)] if self._is_whole else row[self._rows]


class Translated(Transformer):
    """A draft with another vocabulary than its target's: its texts and its logits are by the target's ids.

    model: the draft, whose weights it takes; target_ids: as `ByTargetIds` has them; n_ids: rows of the target's vocabulary. A
    token that the draft does not have is OTHER_TOKEN's to it. All else as `Transformer`.
    """

    def __init__(self, model: Transformer, target_ids: Sequence[int], n_ids: int) -> None:
        super().__init__(model.config, model.weights, model._most_threads, model.n_positions, model.kv)
        self.n_threads = model.n_threads
        self.target_ids = tuple(target_ids)
        self._rows = dict.fromkeys(range(n_ids), OTHER_TOKEN)
        self._rows |= {token: row for row, token in enumerate(target_ids) if token >= 0}
        self.by_target = ByTargetIds(target_ids, n_ids)

    def __reduce__(self) -> tuple[Any, ...]:
        return Translated, (super().with_positions(self._n_positions), self.target_ids, len(self._rows))

    @functools.cached_property
    def config(self) -> Config:
        return replace(self._config, vocab_size=len(self._rows))

    def with_positions(self, n_positions: int) -> Transformer:
        return Translated(super().with_positions(n_positions), self.target_ids, len(self._rows))

    def _forward(self, tokens: list[int], nodes: list[Node], n_logits: int, n_total: int = 0) -> Float32:
        own_nodes = [(self._own([token])[0], parent) for token, parent in nodes]
        return self.by_target(super()._forward(self._own(tokens), own_nodes, n_logits, n_total))

    def unread(self, tokens: list[int]) -> int:
        return super().unread(self._own(tokens))

    def _own(self, tokens: list[int]) -> list[int]:
        """The rows of a text's tokens."""
        try:
            return [*map(self._rows.__getitem__, tokens)]
        except KeyError as error:
            raise ValueError(f"tokens hold {short(error.args[0])}; expected 0 to {len(self._rows) - 1}") from None
