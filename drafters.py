"""Whatever proposes tokens. Knows nothing of verifying."""

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Protocol

from .machine.vectors import Float32
from .sampling import Sampler, Sampling
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

    noise: the stream that tokens from a position on are drawn with; end_marks: the tokens behind which it proposes none.
    """

    def __init__(self, model: Transformer, sampling: Sampling, noise: Callable[[int], int], end_marks: Container[int]) -> None:
        self._model, self._noise, self._end_marks = model, noise, end_marks
        self._sampler = Sampler(model.config.vocab_size, sampling)
        self._q: list[Float32] = []

    def propose(self, tokens: list[int], n: int) -> Draft:
        text, stream = [*tokens], self._noise(len(tokens))
        while len(self._q) < n:
            self._q.append(self._sampler.new_probs())
        with self._model.lock:
            if n == 0:
                self._model.forward(text[:-1], n_logits=0)
            for q in self._q[:n]:
                logits = self._model.forward(text)
                token = self._sampler.draw(q, logits[0], stream, len(text))
                if token < 0:
                    break
                text.append(token)
                if token in self._end_marks:
                    break
        n_drafted = len(text) - len(tokens)
        return Draft(text[len(tokens) :], self._q[:n_drafted])
