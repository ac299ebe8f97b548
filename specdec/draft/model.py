"""A model that proposes tokens, one after the other. Knows nothing of verifying."""

from collections.abc import Callable, Container, Sequence
from typing import Protocol

from specdec.config import Config
from specdec.engine.decoding import LengthPolicy, Model
from specdec.heads.head import Head
from specdec.model.transformer import room_behind
from specdec.runtime.simd import Float32, ceil_div
from specdec.sampling import Sampler
from specdec.text.logit_processors import Adjusting
from specdec.validation import known
from specdec.verification import Draft


class DraftModel(Model, Protocol):
    """What a drafter asks of a model."""

    @property
    def config(self) -> Config: ...


class ModelDrafter:
    """A smaller model that decodes one token after the other. Beyond its own seq_len it sees a sliding window.

    sampler: draws its tokens; noise: the stream of those from a position on; end_marks: the tokens behind which it
    proposes none.
    """

    def __init__(self, model: DraftModel, sampler: Sampler, noise: Callable[[int], int], end_marks: Container[int]) -> None:
        self._model, self._sampler, self._noise, self._end_marks = model, sampler, noise, end_marks
        self._n_rows = model.config.vocab_size  # the target may know more tokens
        self._q: list[Float32] = []
        self._adjusting = Adjusting(sampler.sampling, sampler.n_ids) if sampler.sampling.adjusts else None

    def get_ready(self, tokens: list[int]) -> None:
        if self._adjusting:
            self._adjusting.follow(tokens)
        with self._model.lock:
            self._model.forward(self._seen(tokens, self._start(len(tokens)))[:-1], n_logits=0)

    def propose(self, tokens: list[int], policy: LengthPolicy, tail: Sequence[int] = ()) -> Draft:
        """tail: what may follow tokens: a proposal for that draft whose round it is (see `stages`)."""
        start = self._start(len(tokens) + len(tail) + min(policy.max_tokens, self._model.n_positions // 2))
        stream, text, n = self._noise(len(tokens)), self._seen([*tokens, *tail] if tail else tokens, start), 0
        most, first = len(text) + room_behind(len(text), self._model.n_positions, self._model.n_short), len(text) - len(tail)
        if self._adjusting:
            self._adjusting.follow(tokens)
        with self._model.lock:
            while len(text) <= most:
                q, logits = self._draw_room(n + 1)[n], self._model.forward(text)[0]
                if self._adjusting:
                    logits = self._adjusting.adjusted(logits, text[first:])
                token, margin = self._sampler.draw_surely(q, logits, stream, start + len(text))
                if token < 0:
                    break
                text.append(token)
                n += 1
                if not policy.should_continue(margin) or token in self._end_marks:
                    break
        return Draft(text[len(text) - n :], self._q[:n])

    def _draw_room(self, n: int) -> list[Float32]:
        """n rows of probabilities, valid until the next proposal."""
        while len(self._q) < n:
            self._q.append(self._sampler.new_probs())
        return self._q

    def _seen(self, tokens: list[int], start: int) -> list[int]:
        """What the draft sees of a text."""
        seen = tokens[start:]
        return seen if self._sampler.vocab_size <= self._n_rows else known(seen, self._n_rows)

    def _start(self, n_tokens: int) -> int:
        """Where the text begins that the draft sees: later, by half of its positions, where those cannot go on."""
        step = max(self._model.n_positions // 2, 1)
        return int(ceil_div(max(n_tokens - self._model.n_positions, 0), step)) * step


class HeadDrafter(ModelDrafter):
    """A head, which drafts from the hidden states of its target's passes: behind two tokens or more.

    Where the target holds another text, whose turn it was, it runs this one anew, as the next step would have to: so a proposal
    depends on the text alone.
    """

    _model: Head

    def get_ready(self, tokens: list[int]) -> None:
        with self._model.lock, self._model.target.lock:
            self._model.target.forward(tokens[:-1], n_logits=0)
            super().get_ready(tokens[: self._model.n_positions])

    def propose(self, tokens: list[int], policy: LengthPolicy, tail: Sequence[int] = ()) -> Draft:
        with self._model.lock, self._model.target.lock:
            self._model.target.forward(tokens[:-1], n_logits=0)
            return super().propose(tokens, policy, tail) if self._model.drafts_for(tokens) else Draft([])

    def _start(self, n_tokens: int) -> int:
        """0: its positions are the target's, and its window slides within a pass."""
        return 0
