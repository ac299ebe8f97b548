"""A draft that is drafted for: it runs what its own drafter proposes in one pass, before the target sees anything.

Staged speculation (Spector and Re 2023, arXiv:2308.04623). A draft's token is a function of its logits, of the noise and of the
position, and logits do not depend on what shares a pass. So its proposals are those that it would have made alone, to the bit and
with the same q, whatever was guessed; a guess that is not the draft's own token costs time alone. Knows nothing of verifying.
"""

import time
from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack

from specdec.draft.model import ModelDrafter
from specdec.draft.ngram import NgramDrafter
from specdec.draft.resolver import Team
from specdec.engine.decoding import LengthPolicy
from specdec.model.transformer import Transformer, room_behind
from specdec.runtime.simd import Float32
from specdec.sampling import Sampler
from specdec.verification import Draft

Guesser = ModelDrafter | NgramDrafter  # which can be asked in the middle of another's proposal, behind what is not judged yet


class Lookahead:
    """Stands for a draft's model, and runs guesses along with the text that it is asked for.

    Where the next text goes on as guessed, its logits are there already, those of the model for that text. plan: how many guesses
    a pass gets, of whose passes it is told as of steps.
    """

    def __init__(self, model: Transformer, guesser: Guesser, policy: LengthPolicy) -> None:
        self._model, self._guesser, self._policy = model, guesser, policy
        self.lock, self.config, self.n_positions, self.n_short = model.lock, model.config, model.n_positions, model.n_short
        self._tokens: list[int] = []  # the text that is certain
        self._most = self._first = 0  # how many tokens are wanted behind it, and how many of it the model sees
        self._run: list[int] = []  # what the last pass was over: a text, and guesses at its end
        self._n_guesses, self._n_used = -1, 0  # of the last pass; -1: there is none
        self._number = 0  # of the last pass; a later one of anybody's overwrites its logits
        self._seconds = 0.0, 0.0  # of the pass and of guessing
        self._logits: Float32

    def begin(self, tokens: list[int], most: int) -> None:
        """Up to so many tokens are going to be asked for behind these."""
        self._tokens, self._most, self._first = tokens, most, 0

    def forward(self, tokens: list[int], n_logits: int = 1) -> Float32:
        """Logits (1, V) behind a text, or (0, V), valid until the next call."""
        if not n_logits:
            return self._model.forward(tokens, 0)
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
            self._policy.update(self._n_guesses, self._n_used, *self._seconds)
        tail, guesses = tokens[self._first :], list[int]()
        room = room_behind(len(tokens), self.n_positions, self.n_short)
        if self._policy.start(min(self._most - len(tail) - 1, room)):
            guesses = self._guesser.propose(self._tokens, self._policy, tail).tokens
            n_rows = self.config.vocab_size  # the text may hold tokens that this model does not know
            guesses = guesses[: next((i for i, token in enumerate(guesses) if token >= n_rows), None)]
        self._run, self._n_guesses, self._n_used = tokens + guesses, -1, 0
        self._number = self._model.n_passes + 1
        looked = time.perf_counter()
        self._logits = self._model.forward(self._run, len(guesses) + 1)
        self._seconds = time.perf_counter() - looked, looked - begin
        self._n_guesses = len(guesses)


class StagedDrafter(ModelDrafter):
    """A draft for which another drafter guesses: the same proposals, sooner where that pays.

    guesser: if it draws, with the noise that the draft draws with; models: the draft, and the guesser's where it has one.
    """

    def __init__(
        self,
        models: Sequence[Transformer],
        guesser: Guesser,
        policy: LengthPolicy,
        sampler: Sampler,
        noise: Callable[[int], int],
        end_marks: Container[int],
    ) -> None:
        self._guesser, self._ahead = guesser, Lookahead(models[0], guesser, policy)
        super().__init__(self._ahead, sampler, noise, end_marks)
        self._models = sorted(models, key=id)  # locked in one order everywhere, so that no two threads wait for each other

    def get_ready(self, tokens: list[int]) -> None:
        super().get_ready(tokens)
        self._guesser.get_ready(tokens)

    def propose(self, tokens: list[int], policy: LengthPolicy, tail: Sequence[int] = ()) -> Draft:
        with ExitStack() as locks:
            for model in self._models:
                locks.enter_context(model.lock)
            self._ahead.begin(tokens, policy.max_tokens)
            return super().propose(tokens, policy, tail)


def staged(
    team: Team, policy: LengthPolicy, sampler: Sampler, noise: Callable[[int], int], end_marks: Container[int]
) -> StagedDrafter:
    """The draft of a team that has a stage. plan: how many guesses pay."""
    draft, stage = team.draft, team.stage
    own = Sampler(draft.vocabulary.n_target, sampler.sampling, stage.vocabulary.n_common)
    guesser, models = stage.drafter(own, noise, end_marks), [model for model in (draft.model, stage.model) if model]
    assert guesser
    return StagedDrafter(models, guesser, policy, sampler, noise, end_marks)
