"""The drafter that proposes the tokens of a smaller model or of a head, one after the other."""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from specdec.argument_checks import replace_unknown_tokens
from specdec.model.kv_cache import KVCache
from specdec.model.model import Model, get_token_headroom
from specdec.protocols import LengthPolicy
from specdec.runtime.simd import Float32, ceil_div
from specdec.sampling import Sampler, Sampling, find_top_k
from specdec.verification import Draft

if TYPE_CHECKING:
    from specdec.model.trimmed_classifier import TrimmedClassifier
    from specdec.text.logit_processors import LogitsProcessor

N_RUNNER_UPS = 4  # likeliest tokens at each position of the target's passes that become candidates of a trimmed classifier


class DraftCache(Protocol):
    """The interface of a draft model with the KV cache of one sequence; `KVCache` is an implementation.

    Attributes:
        can_slide: Whether the model may see only the last part of a sequence that exceeds its positions.
    """

    can_slide: bool

    @property
    def model(self) -> Model:
        """The draft model."""

    def can_draft(self, tokens: list[int]) -> bool:
        """Return whether the model can predict the token that follows the given ones."""

    def forward(self, tokens: list[int], n_logits: int = 1) -> Float32:
        """Run a sequence's tokens that the cache does not hold; return logits (n_logits, V) at the sequence's last tokens."""


class ModelDrafter:
    """A drafter that generates draft tokens one by one with a smaller model, which sees a window of a longer sequence.

    A head drafts from the hidden states of its target's passes, and proposes nothing where these are missing.

    Args:
        cache: The draft model's cache of the sequence.
        sampler: Samples the draft tokens.
        noise: Returns the random number stream for a proposal that starts at a position (`Verifier.get_draft_stream`).
        eos_tokens: End-of-sequence tokens; a proposal ends with the first one.
        can_trim: Whether proposals may be drawn from a part of a large vocabulary (see `TrimmedClassifier`).
    """

    has_variable_length = True

    def __init__(
        self,
        cache: DraftCache,
        sampler: Sampler,
        noise: Callable[[int], int],
        eos_tokens: Collection[int],
        can_trim: bool = True,
    ) -> None:
        """Create a drafter without a proposal."""
        self._cache, self._model = cache, cache.model
        self._sampler, self._get_stream, self._eos_tokens = sampler, noise, eos_tokens
        self._vocab_size = self._model.vocab_size  # the target may know more tokens
        self._probs_buffers: list[Float32] = []
        self._logits_processor = make_logits_processor(sampler.sampling, sampler.n_ids)
        self._classifier: TrimmedClassifier | None = None
        if isinstance(cache, KVCache):  # which an earlier sequence may have used
            cache.trimmed_classifier = None
            self._classifier = cache.trim_classifier(eos_tokens) if can_trim else None
        self._runner_ups = np.zeros(N_RUNNER_UPS, np.int64), np.zeros(N_RUNNER_UPS)  # of one position: tokens and logits

    def prepare(self, tokens: list[int]) -> None:
        """Prefill the draft model with all tokens of a sequence but the last, or as many as it can see."""
        self._follow(tokens)
        visible = self._get_visible_tokens(tokens, self._find_window_start(len(tokens)))[: self._model.n_positions]
        with self._model.lock:
            self._cache.forward(visible[:-1], n_logits=0)

    def propose(self, tokens: list[int], policy: LengthPolicy, tail: Sequence[int] = ()) -> Draft:
        """Generate draft tokens after a sequence, and return them with their distributions, valid until the next proposal.

        Args:
            tokens: The sequence.
            policy: Decides how many tokens to draft.
            tail: Unverified tokens after the sequence, which a second-level drafter continues (see `staged`); else empty.
        """
        if not self._cache.can_draft(tokens):
            return Draft([])
        start = self._find_window_start(len(tokens) + len(tail) + min(policy.max_tokens, self._model.n_positions // 2))
        stream, seen, n = self._get_stream(len(tokens)), self._get_visible_tokens([*tokens, *tail] if tail else tokens, start), 0
        max_length = len(seen) + get_token_headroom(len(seen), self._model.n_positions, self._model.longrope_threshold)
        n_verified = len(seen) - len(tail)
        self._follow(tokens)
        with self._model.lock:
            while len(seen) <= max_length:
                q, logits = self._get_probs_buffers(n + 1)[n], self._cache.forward(seen)[0]
                if self._logits_processor:
                    logits = self._logits_processor.apply_to_copy(logits, seen[n_verified:])
                token, margin = self._sampler.draw_with_margin(q, logits, stream, start + len(seen))
                if token < 0:
                    break
                seen.append(token)
                n += 1
                if not policy.should_continue(margin) or token in self._eos_tokens:
                    break
        coverage = self._classifier.coverage if self._classifier else None
        return Draft(seen[len(seen) - n :], self._probs_buffers[:n], coverage=coverage)

    def observe(self, logits: Float32, rows: list[int], n_tokens: int) -> None:
        """Make the target's runner-ups candidates of a trimmed classifier; otherwise a model does not learn from the target."""
        if self._classifier:
            for row in rows:
                find_top_k(logits[row, : self._sampler.n_ids], *self._runner_ups)
                self._classifier.add(self._runner_ups[0].tolist())

    def _follow(self, tokens: list[int]) -> None:
        """Update what depends on the tokens of the sequence."""
        if self._logits_processor:
            self._logits_processor.update(tokens)
        if self._classifier:
            self._classifier.update(tokens)

    def _get_probs_buffers(self, n: int) -> list[Float32]:
        """Return a list of at least n buffers for probabilities, which the next proposal overwrites; allocate missing ones."""
        while len(self._probs_buffers) < n:
            self._probs_buffers.append(self._sampler.new_probs())
        return self._probs_buffers

    def _get_visible_tokens(self, tokens: list[int], start: int) -> list[int]:
        """Return the tokens from index `start` on, with tokens that the draft model does not have replaced."""
        seen = tokens[start:]
        return seen if self._sampler.vocab_size <= self._vocab_size else replace_unknown_tokens(seen, self._vocab_size)

    def _find_window_start(self, n_tokens: int) -> int:
        """Return the index of the first of n_tokens tokens that the draft model sees, 0 while all fit into its context.

        The start moves by half of the model's positions at a time. A head always sees the whole sequence.
        """
        if not self._cache.can_slide:
            return 0
        step = max(self._model.n_positions // 2, 1)
        return int(ceil_div(max(n_tokens - self._model.n_positions, 0), step)) * step


def make_logits_processor(sampling: Sampling, n_ids: int) -> "LogitsProcessor | None":
    """Return a processor of one sequence's logits if the sampling settings have penalties, biases or min_p, else None.

    Args:
        sampling: The sampling settings.
        n_ids: The number of ids that can be sampled.
    """
    if not sampling.has_logit_adjustments:
        return None
    from specdec.text.logit_processors import LogitsProcessor  # imported here, since most sequences need none

    return LogitsProcessor(sampling, n_ids)
