"""What a text's own tokens, and what was asked of some, do to the logits of the next one. Knows no models.

In vLLM's order: a bias is added; tokens of the prompt and of the text so far have their logits divided by the repetition penalty
where they are positive, else multiplied (Keskar et al. 2019, arXiv:1909.05858); those of the text so far lose the frequency
penalty for each time that they stand there, and the presence penalty once (OpenAI's); then temperature; then tokens go that are
less likely than min_p times the likeliest (Nguyen et al. 2024, arXiv:2407.01082); then top_k and top_p. All but the last two are
functions of the logits and of the text, so a text stays the target's own, whatever drafts: drafts are drawn alike.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from specdec.engine.decoding import Shape, Walk
from specdec.sampling import Sampling
from specdec.verification import Draft

FIRST_ROOM = 1024  # tokens
LEAST = float(np.finfo(np.float32).min)


class Adjusting:
    """Of one text: what it holds so far, and what that does to logits. Its prompt is what it follows first.

    n_ids: how many of the ids are drawn, by default all; what a row holds behind them stays.
    """

    def __init__(self, sampling: Sampling, n_ids: int | None = None) -> None:
        self._sampling, self._n_ids = sampling, n_ids
        self._places: dict[int, int] = {}  # of the tokens of prompt and text, among
        self._ids, self._times = np.zeros(FIRST_ROOM, np.int64), np.zeros(FIRST_ROOM, np.float32)  # how often the text has each
        self._n_read = -1  # tokens of prompt and text that are counted
        self._biased = np.array([token for token, _ in sampling.biases], np.int64)
        self._bias = np.array([bias for _, bias in sampling.biases], np.float32)

    def follow(self, tokens: Sequence[int]) -> None:
        """The text has grown to these, the prompt's among them."""
        times, n_read = (1.0, self._n_read) if self._n_read >= 0 else (0.0, 0)
        for token in tokens[n_read:]:
            self._count(token, times)
        self._n_read = len(tokens)

    def _count(self, token: int, times: float) -> bool:
        """A token stands so many times more often; whether it had not stood there."""
        place = self._places.setdefault(token, n := len(self._places))
        if place == len(self._ids):
            self._ids, self._times = (np.concatenate([array, array]) for array in (self._ids, self._times))
        if place == n:
            self._ids[n], self._times[n] = token, 0.0
        self._times[place] += np.float32(times)
        return place == n

    @contextmanager
    def behind(self, path: Sequence[int]) -> Iterator[None]:
        """As if the text had grown by those."""
        new = [(token, self._count(token, 1.0)) for token in path]
        try:
            yield
        finally:
            for token, is_new in reversed(new):
                if is_new:
                    del self._places[token]
                else:
                    self._times[self._places[token]] -= np.float32(1.0)

    def adjust(self, row: Any) -> None:
        """The logits (V,) of the next token, in place; those that are not finite stay so."""
        s, n, row = self._sampling, len(self._places), row[: self._n_ids]
        if len(self._biased):
            here = self._biased < len(row)
            row[self._biased[here]] += self._bias[here]
        if s.repetition_penalty != 1.0 or s.frequency_penalty or s.presence_penalty:
            here = self._ids[:n] < len(row)
            ids, times = self._ids[:n][here], self._times[:n][here]
            logits = row[ids]
            if s.repetition_penalty != 1.0:
                penalty = np.float32(s.repetition_penalty)
                logits = np.where(logits > 0, logits / penalty, logits * penalty)
            if s.frequency_penalty or s.presence_penalty:
                logits -= times * np.float32(s.frequency_penalty) + (times > 0) * np.float32(s.presence_penalty)
            row[ids] = logits
        if s.least_log is not None and np.isfinite(top := row.max()):
            stay = np.flatnonzero(row >= np.float32(max(float(top) + s.least_log, LEAST)))  # a few: faster than a mask of all
            kept = row[stay]
            row.fill(-np.inf)
            row[stay] = kept

    def adjusted(self, row: Any, path: Sequence[int]) -> Any:
        """A copy of the logits (V,) of the token behind the text and a path, adjusted."""
        row = row.copy()
        with self.behind(path):
            self.adjust(row)
        return row


class AdjustedWalk:
    """A text's walk in its shape, or in none, whose masked logits are adjusted; see `decoding.Walk`."""

    def __init__(self, walk: Walk | None, adjusting: Adjusting, prompt: list[int]) -> None:
        self._walk, self._adjusting, self._tokens = walk, adjusting, [*prompt]
        self._adjusting.follow(prompt)

    @property
    def trouble(self) -> Exception | None:
        return self._walk.trouble if self._walk else None

    @property
    def is_over(self) -> bool:
        return bool(self._walk and self._walk.is_over)

    def forced(self, most: int) -> list[int]:
        return self._walk.forced(most) if self._walk else []

    def n_allowed(self, tokens: list[int]) -> int:
        return self._walk.n_allowed(tokens) if self._walk else len(tokens)

    def find_end(self, tokens: list[int]) -> int | None:
        return self._walk.find_end(tokens) if self._walk else None

    def mask(self, logits: Any, draft: Draft) -> None:
        if self._walk:
            self._walk.mask(logits, draft)
        self._adjust_behind(logits, draft, -1)

    def _adjust_behind(self, logits: Any, draft: Draft, node: int) -> None:
        """The row of a proposed token, or, of -1, that behind the text; then those of what is proposed behind it."""
        self._adjusting.adjust(logits[node + 1])
        for child in draft.children(node):
            if child + 1 < len(logits):
                with self._adjusting.behind(draft.tokens[child : child + 1]):
                    self._adjust_behind(logits, draft, child)

    def takes(self, tokens: list[int]) -> None:
        if self._walk:
            self._walk.takes(tokens)
        self._tokens += tokens
        self._adjusting.follow(self._tokens)


class Adjusted:
    """A shape, or none, whose logits are adjusted as a sampling asks."""

    def __init__(self, shape: Shape | None, sampling: Sampling, n_ids: int | None = None) -> None:
        self._shape, self._sampling, self._n_ids = shape, sampling, n_ids

    def begin(self, prompt: list[int]) -> Walk:
        walk = self._shape.begin(prompt) if self._shape else None
        return AdjustedWalk(walk, Adjusting(self._sampling, self._n_ids), prompt)


def adjusted(shape: Shape | None, sampling: Sampling, n_ids: int | None = None) -> Shape | None:
    """The shape of a text that is drawn so, of the first n_ids: itself where nothing is asked for that the text has a say in."""
    return Adjusted(shape, sampling, n_ids) if sampling.adjusts else shape
