"""Draft models with a part of the target's vocabulary, or another one, whose caches take the target's token ids.

So the noise of a token depends on its id in the target, as in the target's own draw, and the draft distribution q is one over the
target's ids.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from specdec.argument_checks import shorten
from specdec.heads.vocab_mapper import VocabMapper
from specdec.layers.rope import TreeNode
from specdec.model.kv_cache import KVCache
from specdec.model.model import Model
from specdec.runtime.simd import Float32

UNKNOWN_TOKEN_ROW = 0  # the row for tokens that the draft does not have, as in `argument_checks.replace_unknown_tokens`


class VocabMappedModel(Model):
    """A draft model for a target with another vocabulary; its caches take token ids and return logits in the target's vocabulary.

    A token that the draft does not have is replaced by UNKNOWN_TOKEN_ROW. Everything else is as in `Model`.

    Args:
        model: The draft model; its weights are shared.
        target_ids: See `VocabMapper`.
        n_ids: The number of rows of the target's vocabulary.
        **options: Other options than the draft model's; see `Model`.
    """

    def __init__(self, model: Model, target_ids: Sequence[int], n_ids: int, **options: Any) -> None:
        """Create a model that shares the weights of the draft model."""
        options = {"n_threads": model.max_threads, "n_positions": model.n_positions, "kv": model.kv} | options
        super().__init__(model.config, model.weights, **options)
        self.n_threads = model.n_threads
        self._draft = model
        self.target_ids = tuple(target_ids)
        self._draft_ids = dict.fromkeys(range(n_ids), UNKNOWN_TOKEN_ROW)
        self._draft_ids |= {token: row for row, token in enumerate(target_ids) if token >= 0}
        self.vocab_mapper = VocabMapper(target_ids, n_ids)
        self.n_shared_tokens = self.vocab_mapper.n_shared

    def _get_parts(self) -> tuple[Any, ...]:
        """Return the arguments of the constructor other than options."""
        return self._draft, self.target_ids, len(self._draft_ids)

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the target."""
        return len(self._draft_ids)

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

    def trim_classifier(self, eos_tokens: Iterable[int]) -> None:
        """Do nothing: candidates are given by the target's ids."""

    def run_tree(self, tokens: list[int], nodes: list[TreeNode], n_logits: int, n_total: int = 0) -> Float32:
        """Run a pass over this sequence alone, given by the target's ids, and return logits over these ids; see `KVCache`.

        Raises:
            ValueError: If an id is out of range, or as in `KVCache.run_tree`.
        """
        draft_nodes = [(self.model.to_draft_ids([token])[0], parent) for token, parent in nodes]
        return self.model.vocab_mapper(super().run_tree(self.model.to_draft_ids(tokens), draft_nodes, n_logits, n_total))

    def count_prefill_tokens(self, tokens: list[int]) -> int:
        """Return how many of a sequence's tokens, given by the target's ids, a prefill would run; others are cached."""
        return super().count_prefill_tokens(self.model.to_draft_ids(tokens))
