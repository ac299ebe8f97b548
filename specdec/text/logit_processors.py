"""Process logits by the tokens so far: biases, penalties and min_p. Independent of models.

The order is vLLM's. A bias is added. Logits of tokens in the prompt or the completion are divided by the repetition penalty if
positive, else multiplied (Keskar et al. 2019, arXiv:1909.05858). Tokens of the completion lose the frequency penalty once per
occurrence and the presence penalty once (OpenAI's). Then temperature; then min_p drops tokens less likely than min_p times the
most likely one (Nguyen et al. 2024, arXiv:2407.01082); then top_k and top_p. All but the last two are functions of the logits
and the tokens, so the output is the target's own with any draft, and drafts are sampled with the same processing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from specdec.sampling import Sampling
from specdec.verification import Draft

INITIAL_CAPACITY = 1024  # tokens
FLOAT32_MIN = float(np.finfo(np.float32).min)


class LogitsProcessor:
    """A processor that applies biases, penalties and min_p to one sequence's logits; the first `update` gives it the prompt.

    Args:
        sampling: The sampling settings.
        n_ids: The number of ids that can be sampled, by default all; the rest of a row stays unchanged.
    """

    def __init__(self, sampling: Sampling, n_ids: int | None = None) -> None:
        """Create a processor that has seen no tokens."""
        self._sampling, self._n_ids = sampling, n_ids
        self._index_by_id: dict[int, int] = {}  # index of each token of prompt and completion in the arrays below
        self._ids = np.zeros(INITIAL_CAPACITY, np.int64)
        self._counts = np.zeros(INITIAL_CAPACITY, np.float32)  # occurrences in the completion
        self._n_counted = -1  # tokens of prompt and completion that are counted
        self._bias_ids = np.array([token for token, _ in sampling.biases], np.int64)
        self._bias = np.array([bias for _, bias in sampling.biases], np.float32)

    def update(self, tokens: Sequence[int]) -> None:
        """Count those tokens of the sequence that earlier calls have not counted; tokens of the first call are the prompt.

        Args:
            tokens: The whole sequence, prompt included.
        """
        times, n_read = (1.0, self._n_counted) if self._n_counted >= 0 else (0.0, 0)
        for token in tokens[n_read:]:
            self._count(token, times)
        self._n_counted = len(tokens)

    def _count(self, token: int, times: float) -> bool:
        """Add `times` to a token's number of occurrences and return whether the token was not in the sequence before."""
        index = self._index_by_id.setdefault(token, n := len(self._index_by_id))
        if index == len(self._ids):
            self._ids, self._counts = (np.concatenate([array, array]) for array in (self._ids, self._counts))
        if index == n:
            self._ids[n], self._counts[n] = token, 0.0
        self._counts[index] += np.float32(times)
        return index == n

    @contextmanager
    def assume(self, path: Sequence[int]) -> Iterator[None]:
        """Return a context inside which logits are processed as if the sequence had grown by the given tokens."""
        new = [(token, self._count(token, 1.0)) for token in path]
        try:
            yield
        finally:
            for token, is_new in reversed(new):
                if is_new:
                    del self._index_by_id[token]
                else:
                    self._counts[self._index_by_id[token]] -= np.float32(1.0)

    def apply(self, row: Any) -> None:
        """Apply biases, penalties and min_p to the next token's logits (V,) in place; values that are not finite stay so."""
        s, n, row = self._sampling, len(self._index_by_id), row[: self._n_ids]
        if len(self._bias_ids):
            in_row = self._bias_ids < len(row)
            row[self._bias_ids[in_row]] += self._bias[in_row]
        if s.repetition_penalty != 1.0 or s.frequency_penalty or s.presence_penalty:
            in_row = self._ids[:n] < len(row)
            ids, counts = self._ids[:n][in_row], self._counts[:n][in_row]
            logits = row[ids]
            if s.repetition_penalty != 1.0:
                penalty = np.float32(s.repetition_penalty)
                logits = np.where(logits > 0, logits / penalty, logits * penalty)
            if s.frequency_penalty or s.presence_penalty:
                logits -= counts * np.float32(s.frequency_penalty) + (counts > 0) * np.float32(s.presence_penalty)
            row[ids] = logits
        if s.min_p_logit_offset is not None and np.isfinite(top := row.max()):
            # Only a few tokens remain: indices are faster than a mask of all.
            remaining = np.flatnonzero(row >= np.float32(max(float(top) + s.min_p_logit_offset, FLOAT32_MIN)))
            logits = row[remaining]
            row.fill(-np.inf)
            row[remaining] = logits

    def apply_to_copy(self, row: Any, path: Sequence[int]) -> Any:
        """Return a processed copy of the logits (V,) of the token that follows the sequence and then the tokens of `path`."""
        row = row.copy()
        with self.assume(path):
            self.apply(row)
        return row

    def apply_to_draft(self, logits: Any, draft: Draft, node: int = -1) -> None:
        """Process, in place, the row of logits after a draft node (-1: after the sequence) and the rows of its descendants."""
        self.apply(logits[node + 1])
        for child in draft.children(node):
            if child + 1 < len(logits):
                with self.assume(draft.tokens[child : child + 1]):
                    self.apply_to_draft(logits, draft, child)
