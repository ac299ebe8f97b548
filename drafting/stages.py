"""A draft that is drafted for: it runs what its own drafter proposes in one pass, before the target sees anything.

Staged speculation (Spector and Re 2023, arXiv:2308.04623). A draft's token is a function of its logits, of the noise and of the
position, and logits do not depend on what shares a pass. So its proposals are those that it would have made alone, to the bit and
with the same q, whatever was guessed; a guess that is not the draft's own token costs time alone. Knows nothing of verifying.
"""

import time
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Protocol

from ..architectures import Config
from ..decoding import Draft, Drafter, Plan
from ..machine.vectors import Float32
from ..sampling import Sampler
from ..text.vocabulary import Vocabulary
from ..transformer import Transformer, room_behind
from .estimates import Acceptance, Costs
from .model_drafter import ModelDrafter
from .ngrams import NgramDrafter
from .planning import TRIAL_SHARE, AutoLength
from .team import Origin
from .timing import costs_of

MOST_SAVED = 10  # passes of the draft over one token: what may be lost at most where guesses stop to pay


class Guesser(Drafter, Protocol):
    """A drafter that can be asked in the middle of another's proposal."""

    def propose(self, tokens: list[int], plan: Plan, tail: Sequence[int] = ()) -> Draft:
        """Tokens that may follow tokens and the tail, which is proposed and not judged yet."""


@dataclass
class Account:
    """What guesses have saved of a draft's time, over texts: while it is spent nobody guesses.

    costs: of the draft's passes, and of its drafter's tokens; saved: seconds. A share of the time that goes by without guesses is
    credited, to try them again.
    """

    costs: Costs
    acceptance: Acceptance
    saved: float = 0.0

    def __post_init__(self) -> None:
        self.saved = MOST_SAVED * self.costs.of(1)

    def saw(self, n_guessed: int, n_used: int, seconds: float) -> None:
        """A pass over so many guesses, of which some were the draft's own tokens; seconds that guessing took."""
        of = self.costs.of
        gain = n_used * of(1) - (of(n_guessed + 1) - of(1)) - seconds
        self.saved = min(self.saved + gain, MOST_SAVED * of(1))

    def waited(self, n_tokens: int) -> None:
        """So many tokens were drafted without guesses."""
        self.saved += TRIAL_SHARE * n_tokens * self.costs.of(1)


class Lookahead:
    """Stands for a draft's model, and runs guesses along with the text that it is asked for.

    Where the next text goes on as guessed, its logits are there already, those of the model for that text.
    """

    def __init__(self, model: Transformer, guesser: Guesser, account: Account) -> None:
        self._model, self._guesser, self._account = model, guesser, account
        self._plan = AutoLength(account.costs, account.acceptance)
        self._tokens: list[int] = []  # the text that is certain
        self._most = self._first = 0  # how many tokens are wanted behind it, and how many of it the model sees
        self._run: list[int] = []  # what the last pass was over: a text, and guesses at its end
        self._n_guesses, self._n_used = -1, 0  # of the last pass; -1: there is none
        self._number = 0  # of the last pass; a later one of anybody's overwrites its logits
        self._seconds = 0.0, 0.0  # of guessing and of the pass
        self._logits: Float32

    @property
    def lock(self) -> AbstractContextManager[object]:
        return self._model.lock

    @property
    def config(self) -> Config:
        return self._model.config

    @property
    def n_positions(self) -> int:
        return self._model.n_positions

    @property
    def n_short(self) -> int:
        return self._model.n_short

    def begin(self, tokens: list[int], most: int) -> None:
        """Up to so many tokens are going to be asked for behind these."""
        self._tokens, self._most, self._first = tokens, most, 0

    def forward(self, tokens: list[int], n_logits: int = 1) -> Float32:
        """Logits (1, V) behind a text, valid until the next call."""
        n = len(tokens)
        self._first = self._first or n
        used = n - len(self._run) + self._n_guesses  # of the guesses
        if not 0 <= used <= self._n_guesses or self._model.n_passes != self._number or self._run[:n] != tokens:
            self._look(tokens)
            used = 0
        self._n_used = max(self._n_used, used)
        return self._logits[used : used + 1]

    def _look(self, tokens: list[int]) -> None:
        """A pass over a text and what may follow it."""
        begin = time.perf_counter()
        if self._n_guesses >= 0:
            self._account.saw(self._n_guesses, self._n_used, self._seconds[0])
            self._plan.saw(self._n_guesses, self._n_used, self._seconds[1], self._seconds[0])
        tail, guesses = tokens[self._first :], list[int]()
        room = room_behind(len(tokens), self.n_positions, self.n_short)
        if self._plan.begins(min(self._most - len(tail) - 1, room)):
            guesses = self._guesser.propose(self._tokens, self._plan, tail).tokens
            n_rows = self.config.vocab_size  # the text may hold tokens that this model does not know
            guesses = guesses[: next((i for i, token in enumerate(guesses) if token >= n_rows), None)]
        self._run, self._n_guesses, self._n_used = tokens + guesses, -1, 0
        self._number = self._model.n_passes + 1
        looked = time.perf_counter()
        self._logits = self._model.forward(self._run, len(guesses) + 1)
        self._seconds = looked - begin, time.perf_counter() - looked
        self._n_guesses = len(guesses)


class StagedDrafter:
    """`ModelDrafter` of a draft for which another drafter guesses: the same proposals, sooner where that pays.

    guesser: if it draws, with the noise that the draft draws with; models: the draft, and the guesser's where it has one.
    """

    def __init__(
        self,
        models: Sequence[Transformer],
        guesser: Guesser,
        account: Account,
        sampler: Sampler,
        noise: Callable[[int], int],
        end_marks: Container[int],
    ) -> None:
        self._guesser, self._account = guesser, account
        self._ahead = Lookahead(models[0], guesser, account)
        self._alone = ModelDrafter(models[0], sampler, noise, end_marks)
        self._staged = ModelDrafter(self._ahead, sampler, noise, end_marks)
        self._models = sorted(models, key=id)  # locked in one order everywhere, so that no two threads wait for each other

    def get_ready(self, tokens: list[int]) -> None:
        self._alone.get_ready(tokens)
        self._staged.begins(tokens)
        self._guesser.get_ready(tokens)

    def propose(self, tokens: list[int], plan: Plan) -> Draft:
        if self._account.saved <= 0:
            draft = self._alone.propose(tokens, plan)
            self._account.waited(len(draft.tokens))
            return draft
        with ExitStack() as locks:
            for model in self._models:
                locks.enter_context(model.lock)
            self._ahead.begin(tokens, plan.most)
            return self._staged.propose(tokens, plan)


class Stage:
    """What drafts for a draft, and what its guesses have saved, over texts; before `measure` nobody guesses."""

    def __init__(self, draft: Transformer, vocabulary: Vocabulary, stage: Origin, end_marks: Container[int]) -> None:
        self._draft, self._vocabulary, self._stage, self._end_marks = draft, vocabulary, stage, end_marks
        self._account: Account | None = None

    def of(self, draft: Transformer, stage: Origin) -> "Stage":
        """The same of other caches."""
        other = Stage(draft, self._vocabulary, stage, self._end_marks)
        other._account = self._account
        return other

    def measure(self) -> None:
        """vocabulary: that the target and the draft share."""
        costs = costs_of(self._draft, self._stage.model, self._vocabulary)
        self._account = Account(costs, Acceptance(self._stage.rates))

    def drafter(self, sampler: Sampler, noise: Callable[[int], int]) -> Drafter:
        model, marks = self._stage.model, self._end_marks
        if not self._account:
            return ModelDrafter(self._draft, sampler, noise, marks)
        if not model:
            return StagedDrafter([self._draft], NgramDrafter(marks), self._account, sampler, noise, marks)
        own = Sampler(self._vocabulary.n_target, sampler.sampling, self._stage.vocabulary.n_common)
        guesser = ModelDrafter(model, own, noise, marks)
        return StagedDrafter([self._draft, model], guesser, self._account, sampler, noise, marks)
