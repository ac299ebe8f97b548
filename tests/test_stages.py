"""Stages: what a draft proposes hangs on nothing that was guessed for it, and guesses save passes or are left out."""

import itertools

import pytest

from specdec import Sampling
from specdec.decoding import VERIFIERS, Statistics, Step, decode
from specdec.drafters import Draft, ModelDrafter
from specdec.ngrams import NgramDrafter
from specdec.planning import MARGIN_RATES, ODDS_RATES, Acceptance, Costs, FixedLength
from specdec.sampling import Sampler
from specdec.stages import Account, StagedDrafter
from specdec.tokenizer import BOS
from tests.models import END_MARKS, continuation, tiny_model

SAMPLINGS = [Sampling(0.0, seed=1), Sampling(1.0, seed=2), Sampling(0.7, 20, 0.95, 3), Sampling(1.5, 0, 1.0, 4)]
LARGE = {1: 1.0, 8: 1.05, 16: 1.5, 64: 3.0}  # a pass over eight tokens is nearly that over one


class Liar:
    """Guesses whatever it likes, of every length; some are what the last one said."""

    def __init__(self, vocab):
        self.guesses, self.n = itertools.cycle(range(3, vocab)), itertools.cycle((3, 0, 1, 7))
        self.asked = 0

    def get_ready(self, tokens):
        pass

    def propose(self, tokens, plan, tail=()):
        self.asked += 1
        return Draft([next(self.guesses) for _ in range(min(plan.most, next(self.n)))])


def an_account(costs=LARGE, draft=0.0, rates=ODDS_RATES, saved=1e9):
    account = Account(Costs(costs, draft), Acceptance(rates))
    account.saw = lambda *_: None  # that never spends what it has
    account.saved = saved
    return account


def staged(draft, guesser, sampling, verify="coupled", gamma=4, target=None, prompt=(BOS, 7, 9), n=60, models=(), account=None):
    """The text and the statistics of a target whose draft has a stage; guesser: what makes it of a noise."""
    verifier = VERIFIERS[verify](target.config.vocab_size, sampling)
    sampler = Sampler(target.config.vocab_size, sampling, draft.config.vocab_size)
    noise = verifier.draft_noise
    drafter = StagedDrafter([draft, *models], guesser(noise), account or an_account(), sampler, noise, END_MARKS)
    statistics, tokens = Statistics(len(prompt)), []
    for event in decode(target, drafter, verifier, list(prompt), n, FixedLength(gamma), END_MARKS):
        statistics.add(event)
        tokens += event.tokens if isinstance(event, Step) else []
    return tokens, counts(statistics)


def counts(statistics):
    return statistics.accepted_histogram, statistics.drafted_histogram, statistics.stop_reason


def unstaged(target, draft, sampling, verify, gamma, prompt=(BOS, 7, 9), n=60):
    verifier = VERIFIERS[verify](target.config.vocab_size, sampling)
    sampler = Sampler(target.config.vocab_size, sampling, draft.config.vocab_size)
    drafter = ModelDrafter(draft, sampler, verifier.draft_noise, END_MARKS)
    statistics, tokens = Statistics(len(prompt)), []
    for event in decode(target, drafter, verifier, list(prompt), n, FixedLength(gamma), END_MARKS):
        statistics.add(event)
        tokens += event.tokens if isinstance(event, Step) else []
    return tokens, counts(statistics)


@pytest.mark.parametrize("verify", VERIFIERS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_texts_and_acceptance_are_those_without_a_stage(verify, sampling):
    """Of n-grams, a smaller model and a liar; of a draft whose window slides and of one of fewer tokens; for every gamma."""
    prompt, guessed = [BOS, *[7, 9, 10, 11] * 3], 0
    for seed, vocab, seq_len in ((0, 105, 128), (1, 105, 32), (2, 60, 128)):
        target, draft = tiny_model(seed, layers=3, scale=0.3), tiny_model(seed, vocab, seq_len, 128, scale=0.3)
        smaller, liar = tiny_model(seed, 50, 24, 128, layers=1, scale=0.3), Liar(105)

        def small(noise, smaller=smaller, sampling=sampling):
            return ModelDrafter(smaller, Sampler(105, sampling, 50), noise, END_MARKS)

        for gamma in (1, 2, 5, 9):
            expected = unstaged(target, draft, sampling, verify, gamma, prompt)
            if verify == "coupled":
                assert expected[0] == continuation(target, None, sampling, prompt=prompt)[0]
            for guesser, models, account in (
                (lambda _: NgramDrafter(END_MARKS), (), an_account()),
                (lambda _, liar=liar: liar, (), an_account()),
                (small, (smaller,), an_account(draft=1e-9, rates=MARGIN_RATES)),
            ):
                got = staged(draft, guesser, sampling, verify, gamma, target, prompt, models=models, account=account)
                assert got == expected
        guessed += liar.asked
    assert guessed > 100
