"""Draft heads, which continue from the hidden states of their target and have their own KV cache.

Shapes: H width of the target's hidden states, N hidden states per feature, R rows of the head's classifier, n tokens.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec.argument_checks import count_common_prefix
from specdec.heads.eagle3 import HeadArchitecture, HeadBuffers, get_feature_shape, get_head_config
from specdec.heads.mtp import TARGET_NORM
from specdec.heads.vocab_mapper import VocabMapper
from specdec.kernels import MAX_BATCH_TOKENS
from specdec.layers.weights import Weights
from specdec.model import get_architecture
from specdec.model.kv_cache import KVCache
from specdec.model.model import KVFormatName, Model
from specdec.model_config import ModelConfig
from specdec.runtime.op_program import Executor
from specdec.runtime.simd import Float32, Int64

if TYPE_CHECKING:
    from specdec.model.trimmed_classifier import TrimmedClassifier


class Head(Model):
    """A draft head, a small model that predicts tokens from its target's hidden states of a sequence, with logits over all ids.

    Args:
        config: The head's configuration.
        weights: The head's weights; embedding and classifier are the target's if the head has none.
        target: The target, whose caches keep the hidden states that the head reads (`target_layers`).
        target_ids: The target's id of each row of the classifier, (R,); by default row i is id i.
        n_threads: See `Model`.
        n_positions: See `Model`.
        kv: See `Model`.

    Attributes:
        target: The target.
        target_ids: The target's id of each row of the classifier, or None.
        target_layers: The layers before which the target's caches must keep hidden states.
        vocab_mapper: Maps the head's logits to the target's ids.

    Raises:
        ValueError: If the model is not a draft head or the head of another target, or target_ids are not valid; else as in
            `Model`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        target: Model,
        target_ids: Int64 | None = None,
        n_threads: int | None = None,
        n_positions: int | None = None,
        kv: KVFormatName = "auto",
    ) -> None:
        """Check the head against its target, and take the matrices that the head lacks from there."""
        if error := config.find_error() or _find_incompatibility(config, target.config):
            raise ValueError(error)
        (architecture := get_architecture(config)).plan_weights(config, {}).check(weights)
        self._own_config_and_weights, self.target, self.target_ids = (config, weights.align()), target, target_ids
        head = get_head_config(config)
        if target_ids is not None and (
            target_ids.shape != (head.draft_vocab_size,)
            or len(np.unique(target_ids)) < head.draft_vocab_size
            or not 0 <= target_ids.min() <= target_ids.max() < config.vocab_size
        ):
            raise ValueError(f"target_ids must be {head.draft_vocab_size} different ids from 0 to {config.vocab_size - 1}")
        self.target_layers = head.get_target_layers(target.config.n_layers)
        self.vocab_mapper = VocabMapper(np.arange(head.draft_vocab_size) if target_ids is None else target_ids, config.vocab_size)
        self.n_shared_tokens = self.vocab_mapper.n_shared
        parts = (("embedding", head.own_embedding), ("classifier", head.own_classifier))
        borrowed = {name: target.weights.shards[name] for name, is_own in parts if not is_own}
        vectors = dict(self._own_config_and_weights[1].vectors)
        if config.architecture == "mtp":
            vectors[TARGET_NORM] = target.weights.vectors["rms_final"]
        full = replace(config, head=replace(head, target_layers=self.target_layers, own_embedding=True, own_classifier=True))
        kv = kv if isinstance(architecture, HeadArchitecture) else target.kv  # others read the target's KV cache
        super().__init__(full, Weights(self._own_config_and_weights[1].shards | borrowed, vectors), n_threads, n_positions, kv)

    def _get_parts(self) -> tuple[Any, ...]:
        """Return the arguments of the constructor other than options."""
        return *self._own_config_and_weights, self.target, self.target_ids

    def can_draft_for(self, target: Model) -> bool:
        """Return whether the model is the head's own target."""
        return target is self.target

    def new_draft_cache(self, target_cache: KVCache) -> "HeadCache":
        """Return an empty cache for the sequence that target_cache holds, a cache of the target with `target_layers`."""
        return HeadCache(self, target_cache)


class HeadCache(KVCache):
    """The keys and values of a draft head for one sequence, which the head computes from its target's hidden states.

    A sequence of n tokens has n - 1 pairs: the target's hidden states of position i, and the token of position i + 1. A pair for
    which the target holds the states runs with them. A later pair runs with the head's own output, and once more as soon as the
    target holds its states. To take both locks, take the head's first.

    Args:
        head: The head.
        target_cache: The target's cache of the sequence, which keeps the hidden states.

    Attributes:
        head: The head.
        target_cache: The target's cache of the sequence.

    Raises:
        ValueError: If the cache belongs to another target or keeps the hidden states of other layers.
    """

    can_slide = False
    _buffers: HeadBuffers

    def __init__(self, head: Head, target_cache: KVCache) -> None:
        """Check the target's cache and create an empty cache for the head."""
        if target_cache.model is not head.target or target_cache.hidden_layers != head.target_layers:
            raise ValueError(f"the head needs a cache of its target with the hidden states before layers {head.target_layers}")
        self.head, self.target_cache = head, target_cache
        self._has_long_rope_pairs = False  # whether the cached pairs are of a long sequence (`KVCache.has_long_rope`)
        self._n_true_pairs = 0  # cached pairs, from the first on, that ran with hidden states of the target
        self._feature_program: tuple[HeadBuffers, Executor] | None = None  # computes features, in those buffers
        super().__init__(head)

    def copy_from(self, other: KVCache, tokens: list[int]) -> None:
        """Do nothing instead of copying keys and values from another cache, since a prefill of a draft head costs little."""

    def can_draft(self, tokens: list[int]) -> bool:
        """Return whether the draft head can predict the next token from the target's hidden states, without its own output.

        The target must hold the states of the last pair, and of earlier pairs that have not run with hidden states.
        """
        n_pairs = len(tokens) - 1
        with self.model.lock, self.target_cache.model.lock:
            n = max(self.count_reusable_tokens(tokens, n_pairs) - 1, 0)
            return 0 < n_pairs <= n + len(self.target_cache.get_hidden_states(tokens, n))

    def trim_classifier(self, eos_tokens: Iterable[int]) -> "TrimmedClassifier | None":
        """Compute the logits of candidates only; see `KVCache`. Rows with other ids than the target's are few already."""
        return super().trim_classifier(eos_tokens) if self.head.target_ids is None else None

    def count_reusable_tokens(self, tokens: list[int], limit: int) -> int:
        """Return how many tokens, at most `limit`, are cached and need not run again; the first (it has no pair) counts too."""
        return min(max(count_common_prefix(self._tokens, tokens, limit), 1), self._n_true_pairs + 1, limit)

    def run(self, tokens: list[int], n_logits: int, n_total: int = 0) -> Float32:
        """Return logits (n_logits, V) at the last tokens, after running the pairs that are not cached.

        Pairs for which the target holds hidden states run with these, once. Other pairs run only as far as logits need them. The
        arguments are those of `KVCache.run`; without snapshots, the final length does not matter.

        Raises:
            ValueError: If n_logits exceeds the number of pairs, or pairs would have to run without hidden states.
        """
        self.model.n_passes += 1
        if self._has_long_rope_pairs != self.target_cache.has_long_rope:  # other hidden states
            self._has_long_rope_pairs, self._n_true_pairs = self.target_cache.has_long_rope, 0
            self._tokens.clear()
        n_pairs, trimmed = max(len(tokens) - 1, 0), self.active_classifier
        if n_logits > n_pairs:
            raise ValueError(f"n_logits is {n_logits}; expected 0 to {n_pairs} for {len(tokens)} tokens of a head")
        mapper = self.head.vocab_mapper
        logits = mapper.get_buffer(n_logits)
        self.reserve(n_pairs)
        limit = n_pairs - n_logits
        n_held = min(max(count_common_prefix(self._tokens, tokens, len(tokens)) - 1, 0), limit)
        at = min(self._n_true_pairs, n_held)
        n_true = self.compute_features(tokens, at, n_pairs)
        at = at if n_true else n_held
        self._check_tokens("tokens", tokens[at + 1 :])
        self._n_true_pairs = min(self._n_true_pairs, at)
        del self._tokens[at + 1 if at else 0 :]
        while at < n_pairs and (n_true or n_logits):
            n = n_true or self._feed_back_output(at, n_pairs)
            self._buffers.tokens[:n] = tokens[at + 1 : at + 1 + n]
            n_rows = max(min(n, at + n - limit), 0)
            self.executor(n, at, 0 if trimmed else n_rows, self.model.n_threads)
            at += n
            self._tokens += tokens[len(self._tokens) : at + 1]
            if n_rows:
                rows = trimmed.compute_logits(n, n_rows) if trimmed else self._buffers.logits[:n_rows]
                mapper.scatter(at - n_rows - limit, rows)
            if n_true:
                self._n_true_pairs = at
                n_true = self.compute_features(tokens, at, n_pairs)
        return logits

    def compute_features(self, tokens: list[int], first: int, end: int) -> int:
        """Compute features from the target's hidden states into the buffer x, for pairs from `first` to `end`.

        Returns:
            The number of pairs with a feature, as far as the target holds their states; 0 if it holds none.
        """
        config, target = self.model.config, self.target_cache.model
        n_taps, width = get_feature_shape(config)
        with target.lock:
            n_passes = -1
            while n_passes != target.n_passes:  # repeat if a signal handler ran another pass
                n_passes = target.n_passes
                states = self.target_cache.get_hidden_states(tokens, first)[: min(end - first, MAX_BATCH_TOKENS)]
                if n := len(states):
                    rows = states.reshape(n, n_taps, width).swapaxes(0, 1)
                    np.multiply(rows, target.config.residual_scale, out=self._buffers.taps[:, :n, :width])
        if n:
            if self._feature_program is None or self._feature_program[0] is not self._buffers:
                architecture = self.model.architecture
                assert isinstance(architecture, HeadArchitecture)
                program = architecture.make_features(config, self.model.weights, self._buffers)
                self._feature_program = self._buffers, Executor(program)
            self._feature_program[1](n, first, 0, self.model.n_threads)
        return n

    def _feed_back_output(self, at: int, end: int) -> int:
        """Copy the head's output at the previous pair to the input of a pass over pair `at`, and return the number of pairs, 1.

        Args:
            at: The index of the pair.
            end: The number of pairs in the sequence.

        Raises:
            ValueError: If there is no previous pair, or more pairs are left than a pass takes.
        """
        if at == 0 or end - at > MAX_BATCH_TOKENS:
            raise ValueError(f"the target holds no hidden states of the sequence; {end - at} of {end} pairs would run without")
        x = self._buffers.x[0, 0]
        x[:] = 0.0  # the padding may hold NaN from an earlier pass
        x[: self.model.config.dim] = self._buffers.outputs[at - 1]
        return 1


def _find_incompatibility(config: ModelConfig, target: ModelConfig) -> str:
    """Return the reason why a draft head does not fit a target, as an error message, or an empty string if it fits."""
    head = config.head
    if head is None:
        return f"a {config.architecture} model is not a head"
    if (head.target_dim, config.vocab_size) != (target.dim, target.vocab_size):
        return (
            f"a head for a target of width {head.target_dim} and {config.vocab_size} tokens does not fit one of {target.dim} "
            f"and {target.vocab_size}"
        )
    return ""
