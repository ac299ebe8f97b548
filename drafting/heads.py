"""A draft's head in two steps: the rows of likely tokens, and the others only where those are not sure of the next one.

After FR-Spec (Zhao et al. 2025, arXiv:2502.14856), which leaves the others out. A tokenizer learns its tokens by how often they
are needed, so those of small ids are likely; to them come those that the text has had. Knows no drafting.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..architectures import Weights
from ..kernels import Buffers
from ..machine.memory import zeros
from ..machine.programs import Program, Row, Runner
from ..machine.tiles import STRIP_ROWS
from ..machine.vectors import Float32
from ..weights import BF16, FP16, FP32, INT8
from ..weights.matrix import Matrix

LEAST_IDS = 8192  # below, a head is a small part of a model, or a model too small to gain
FIRST_SHARE = 4  # one row in so many is always scored: 12,288 of 49,152 hold 92% of a text, and with what it has had 96%
CREDIT, FIRST_PAUSE = 4, 64  # losses that are borne at first; proposals without a head that lost, then twice as many
ROWWISE = {kind.name for kind in (FP32, BF16, FP16, INT8)}
N_HEARD = 1024  # rows for what the text has had


def may_narrow(weights: Weights) -> bool:
    """Whether a model's head is long enough for a narrow one to pay, of a kind whose strips hold a row in words of its own."""
    classifier = weights.matrices["classifier"]
    return classifier.n_rows >= LEAST_IDS and classifier.kind.name in ROWWISE


class NarrowHead:
    """Logits (1, V) of some tokens of a model, bit for bit those of its whole head, and -inf of the others.

    weights: the model's. Those tokens are the first of the vocabulary and the last that were `heard`.
    """

    def __init__(self, weights: Weights) -> None:
        whole = weights.matrices["classifier"]
        n_strips = max(1, len(whole.strips) // FIRST_SHARE)
        self.n_first = n_strips * STRIP_ROWS
        first = Matrix(whole.kind, whole.strips[:n_strips], whole.n, whole.group)
        self._weights = Weights({**weights.matrices, "classifier": first}, weights.vectors)
        self._others = whole.strips[n_strips:]
        self._words = words_of_rows(whole.strips)
        self._heard = zeros(N_HEARD // STRIP_ROWS, *whole.strips.shape[1:])
        self._heard_words = words_of_rows(self._heard)
        self._places: dict[int, int] = {}  # of the tokens that were heard, in the order in which they were
        self._ids = np.zeros(N_HEARD, np.int64)
        self._scores = zeros(1, N_HEARD)
        self._logits = zeros(1, whole.n_rows)
        self._is_whole = True
        self._buffers: Buffers | None = None
        self._first: Runner
        self._rest: Runner

    def holds(self, token: int) -> bool:
        return token < self.n_first or token in self._places

    def hear(self, tokens: Sequence[int]) -> None:
        """Score these tokens from now on, and the oldest of those that were heard no longer where there are too many."""
        for token in tokens:
            if self.holds(token) or token >= self._logits.shape[1]:
                continue
            place = len(self._places)
            if place == N_HEARD:
                oldest = next(iter(self._places))
                place = self._places.pop(oldest)
                self._logits[0, oldest] = -np.inf
            self._places[token], self._ids[place] = place, token
            strip, row = divmod(token, STRIP_ROWS)
            self._heard_words[place // STRIP_ROWS, :, place % STRIP_ROWS] = self._words[strip, :, row]

    def runner(self, program: Callable[[Weights, Buffers], Program], buffers: Buffers) -> Runner:
        """What runs a model's pass with this head, in these buffers of the model's; program: of weights and buffers."""
        if buffers is not self._buffers:
            phases = program(self._weights, buffers._replace(logits=self._logits))
            product = phases[-1][-1]  # of the classifier, the last of any program
            arguments = product.arguments[2:]
            heard = Row(product.operation, (self._scores, self._heard, *arguments))
            others = Row(product.operation, (self._logits[:, self.n_first :], self._others, *arguments))
            self._first, self._rest = Runner([*phases[:-1], [*phases[-1], heard]]), Runner([[others]])
            self._buffers = buffers
        return self._first

    def narrow(self) -> Float32:
        """The logits, once the pass has run."""
        if self._is_whole:
            self._logits[0, self.n_first :] = -np.inf
            self._is_whole = False
        n = len(self._places)
        self._logits[0, self._ids[:n]] = self._scores[0, :n]
        return self._logits

    def widen(self, n_threads: int) -> Float32:
        """The logits of all tokens at that place."""
        self._is_whole = True
        self._rest(1, 0, 1, n_threads)
        return self._logits


class Narrowed(Protocol):
    """What is asked of a model."""

    def forward_narrowly(self, tokens: list[int], head: NarrowHead) -> Float32: ...
    def widen(self, head: NarrowHead) -> Float32: ...


class Thrift:
    """Whether a narrow head pays in a text: tokens that it was enough for, less what its mistakes cost; at a loss, it pauses.

    loss: what it costs, in tokens that it is enough for, where the draft erred because the head did not hold the right one.
    """

    def __init__(self, model: Narrowed, head: NarrowHead, loss: float) -> None:
        self._model, self._head, self._loss = model, head, loss
        self._balance = CREDIT * loss
        self._pause, self._left = FIRST_PAUSE, 0
        self._n_heard = 0  # tokens of the text
        self._drawn: list[tuple[int, bool]] = []  # the proposal behind them, and whether the head was enough

    def begins(self, tokens: Sequence[int]) -> bool:
        """Whether to draft with it behind these tokens of a text, which say what became of the last proposal."""
        judged = zip(self._drawn, tokens[self._n_heard :], strict=False)
        wrong = next(((is_enough, said) for (token, is_enough), said in judged if token != said), None)
        if wrong and wrong[0] and not self._head.holds(wrong[1]):
            self._balance -= self._loss
        self._balance = min(self._balance + sum(is_enough for _, is_enough in self._drawn), 2 * CREDIT * self._loss)
        self._drawn.clear()
        self._head.hear(tokens[self._n_heard :])
        self._n_heard = len(tokens)
        if self._left:
            self._left -= 1
        elif self._balance < 0.0:
            self._left, self._pause, self._balance = self._pause, 2 * self._pause, CREDIT * self._loss
        return not self._left

    def forward(self, tokens: list[int]) -> Float32:
        """Logits (1, V) behind a text, of some tokens."""
        return self._model.forward_narrowly(tokens, self._head)

    def widen(self) -> Float32:
        """The same of all."""
        return self._model.widen(self._head)

    def drew(self, token: int, is_enough: bool) -> None:
        """The next token of the proposal, and whether the head was enough for it."""
        self._drawn.append((token, is_enough))


def words_of_rows(strips: Float32) -> npt.NDArray[Any]:
    """Strips (P, ...) of any kind of weights as (P, words, R): words of two bytes where two rows share a float."""
    words = strips.view(np.uint16) if strips.shape[2] < STRIP_ROWS else strips
    return words.reshape(len(strips), -1, STRIP_ROWS)
