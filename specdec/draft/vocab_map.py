"""Draft models with a part of the target's vocabulary, or another one, whose caches take the target's token ids.

So the noise of a token depends on its id in the target, as in the target's own draw, and the draft distribution q is one over the
target's ids.

Shapes: T rows of logits, R rows of a draft's vocabulary, V token ids of the target.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from specdec.argument_checks import shorten
from specdec.layers.rope import TreeNode
from specdec.model.kv_cache import KVCache
from specdec.model.model import Model
from specdec.runtime.simd import Float32, Int64

UNKNOWN_TOKEN_ROW = 0  # the row for tokens that the draft does not have, as in `argument_checks.replace_unknown_tokens`


class VocabMapper:
    """A mapper of a draft's logits (T, R) to logits (T, V) over the target's token ids, with -inf for ids the draft lacks.

    Args:
        target_ids: The target's id of each row of the draft's vocabulary, no id twice, or a negative number if the target lacks
            the token. Further rows are left out.
        n_ids: V, the number of token ids of the target.
    """

    def __init__(self, target_ids: Sequence[int] | Int64, n_ids: int) -> None:
        """Find the rows of the draft's logits that have an id in the target's vocabulary."""
        of_rows = np.array(target_ids, np.int64)
        self._rows = np.flatnonzero(of_rows >= 0)
        self._ids = of_rows[self._rows]
        self._has_all_rows = len(self._rows) == len(of_rows)
        self._logits = np.full((1, n_ids), -np.inf, np.float32)

    @property
    def n_shared(self) -> int:
        """The number of tokens that the target and the draft share."""
        return len(self._rows)

    def __call__(self, logits: Float32) -> Float32:
        """Return a draft's logits (T, R) mapped to the target's ids, (T, V), in a buffer that is valid until the next call."""
        out = self.get_buffer(len(logits))
        self.scatter(0, logits)
        return out

    def get_buffer(self, n: int) -> Float32:
        """Return the first n rows of the output buffer, (n, V), which `scatter` fills; the buffer grows if necessary."""
        if n > len(self._logits):
            self._logits = np.full((n, self._logits.shape[1]), -np.inf, np.float32)
        return self._logits[:n]

    def scatter(self, first: int, logits: Float32) -> None:
        """Map a draft's logits (T, R) to the target's ids, and write them to the rows of the output buffer from `first` on."""
        for out, row in zip(self._logits[first:], logits, strict=False):
            out[self._ids] = row[: len(self._ids)] if self._has_all_rows else row[self._rows]


class VocabMappedModel(Model):
    """A draft model for a target with another vocabulary; its caches take token ids and return logits in the target's vocabulary.

    A token that the draft does not have is replaced by UNKNOWN_TOKEN_ROW. Everything else is as in `Model`.

    Args:
        model: The draft model; its weights are shared.
        target_ids: See `VocabMapper`.
        n_ids: The number of rows of the target's vocabulary.
    """

    def __init__(self, model: Model, target_ids: Sequence[int], n_ids: int) -> None:
        """Create a model that shares the weights of the draft model."""
        super().__init__(model.config, model.weights, model.max_threads, model.n_positions, model.kv)
        self.n_threads = model.n_threads
        self.target_ids = tuple(target_ids)
        self._draft_ids = dict.fromkeys(range(n_ids), UNKNOWN_TOKEN_ROW)
        self._draft_ids |= {token: row for row, token in enumerate(target_ids) if token >= 0}
        self.vocab_mapper = VocabMapper(target_ids, n_ids)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle needs to rebuild the model with the same weights and token ids."""
        return VocabMappedModel, (super().with_capacity(self.n_positions), self.target_ids, len(self._draft_ids))

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the target."""
        return len(self._draft_ids)

    @property
    def n_shared_tokens(self) -> int:
        """Number of the target's tokens that the draft has."""
        return self.vocab_mapper.n_shared

    def with_capacity(self, n_positions: int) -> Model:
        """Return a model with the same weights and n_positions positions, and a lock of its own."""
        return VocabMappedModel(super().with_capacity(n_positions), self.target_ids, len(self._draft_ids))

    def new_cache(self, hidden_layers: Sequence[int] = ()) -> KVCache:
        """Return an empty KV cache for a new sequence; see `Model.new_cache`."""
        return VocabMappedCache(self, hidden_layers)

    def to_draft_ids(self, tokens: list[int]) -> list[int]:
        """Convert token ids of the target to rows of the draft's vocabulary, UNKNOWN_TOKEN_ROW for tokens that the draft lacks.

        Raises:
            ValueError: If an id is out of range.
        """
        try:
            return [*map(self._draft_ids.__getitem__, tokens)]
        except KeyError as error:
            raise ValueError(f"tokens hold {shorten(error.args[0])}; expected 0 to {len(self._draft_ids) - 1}") from None


class VocabMappedCache(KVCache):
    """A KV cache of a `VocabMappedModel`, which takes token ids of the target and holds the draft's own."""

    model: VocabMappedModel

    def run(self, tokens: list[int], nodes: list[TreeNode], n_logits: int, n_total: int = 0) -> Float32:
        """Run a pass over this sequence alone, given by the target's ids, and return logits over these ids; see `KVCache.run`.

        Raises:
            ValueError: If an id is out of range, or as in `KVCache.run`.
        """
        draft_nodes = [(self.model.to_draft_ids([token])[0], parent) for token, parent in nodes]
        return self.model.vocab_mapper(super().run(self.model.to_draft_ids(tokens), draft_nodes, n_logits, n_total))

    def count_prefill_tokens(self, tokens: list[int]) -> int:
        """Return how many of a sequence's tokens, given by the target's ids, a prefill would run; others are cached."""
        return super().count_prefill_tokens(self.model.to_draft_ids(tokens))
