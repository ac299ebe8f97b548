"""Whatever proposes tokens. Knows nothing of verifying."""

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Protocol

from .machine.vectors import Float32, ceil_div
from .sampling import Sampler
from .transformer import Transformer


@dataclass(frozen=True)
class Draft:
    """Proposed tokens; where a proposal ends may hang on its tokens and their q, on none that was drawn and left out.

    q: what each was drawn from, (1, V padded) a token; None where they were not drawn. confidence: how sure the drafter is that
    each stands if those before it do, in a measure of its own that rises with the odds; None where it has none.
    """

    tokens: list[int]
    q: list[Float32] | None = None
    confidence: list[float] | None = None


class Drafter(Protocol):
    """A proposal may be shorter than asked for, and empty."""

    def propose(self, tokens: list[int], n: int) -> Draft:
        """Up to n tokens that may follow tokens; none for n = 0, which only gets ready."""


class ModelDrafter:
    """A smaller model that decodes n tokens one by one. Beyond its own seq_len it sees a sliding window.

    sampler: draws its tokens; noise: the stream of those from a position on; end_marks: the tokens behind which it
    proposes none.
    """

    def __init__(self, model: Transformer, sampler: Sampler, noise: Callable[[int], int], end_marks: Container[int]) -> None:
        self._model, self._sampler, self._noise, self._end_marks = model, sampler, noise, end_marks
        self._n_rows = model.config.vocab_size  # the target may know more tokens
        self._q: list[Float32] = []

    def propose(self, tokens: list[int], n: int) -> Draft:
        if len(tokens) + n > self._model.n_positions:
            n = min(n, self._model.n_positions // 2)
        start, stream = self._start(len(tokens) + n), self._noise(len(tokens))
        text = [token if token < self._n_rows else 0 for token in tokens[start:]]
        while len(self._q) < n:
            self._q.append(self._sampler.new_probs())
        with self._model.lock:
            if n == 0:
                self._model.forward(text[:-1], n_logits=0)
            for q in self._q[:n]:
                logits = self._model.forward(text)
                token = self._sampler.draw(q, logits[0], stream, start + len(text))
                if token < 0:
                    break
                text.append(token)
                if token in self._end_marks:
                    break
        new = text[len(tokens) - start :]
        return Draft(new, self._q[: len(new)])

    def _start(self, n_tokens: int) -> int:
        """Where the text begins that the draft sees: later, by half of its positions, where those cannot go on."""
        step = max(self._model.n_positions // 2, 1)
        return int(ceil_div(max(n_tokens - self._model.n_positions, 0), step)) * step
