"""Stages: what a draft proposes hangs on nothing that was guessed for it, and guesses save passes or are left out."""

import itertools
import pickle
import random
import threading

import numpy as np
import pytest

from specdec import Sampling, SpeculativeDecoder
from specdec.draft.acceptance import ODDS_RATES, Acceptance
from specdec.draft.costs import CostCurve
from specdec.draft.model import ModelDrafter
from specdec.draft.ngram import NgramDrafter, SuffixAutomaton
from specdec.draft.policy import FIRST_BUDGET, MAX_TRIAL, N_TRIALS, TRIAL_SHARE, CostModel, DraftLengthPolicy, FixedLength
from specdec.draft.staged import StagedDrafter
from specdec.engine.decoding import Statistics, Step, decode
from specdec.sampling import Sampler
from specdec.tokenizer import BOS
from specdec.verification import VERIFIERS, Draft
from tests.tools.random_models import END_MARKS, begun, continuation, tiny_model

SAMPLINGS = [Sampling(0.0, seed=1), Sampling(1.0, seed=2), Sampling(0.7, 20, 0.95, 3), Sampling(1.5, 0, 1.0, 4)]
LARGE = {1: 1.0, 8: 1.05, 16: 1.5, 64: 3.0}  # a pass over eight tokens is nearly that over one


class Liar:
    """Guesses whatever it likes, of every length; some are what the last one said."""

    def __init__(self, vocab):
        self.guesses, self.n = itertools.cycle(range(3, vocab)), itertools.cycle((3, 0, 1, 7))
        self.asked = 0

    def get_ready(self, tokens):
        pass

    def propose(self, tokens, policy, tail=()):
        self.asked += 1
        return Draft([next(self.guesses) for _ in range(min(policy.max_tokens, next(self.n)))])


def staged(draft, guesser, sampling, verify="coupled", gamma=4, target=None, prompt=(BOS, 7, 9), n=60, models=(), guesses=9):
    """The text and the statistics of a target whose draft has a stage; guesser: what makes it of a noise."""
    verifier = VERIFIERS[verify](target.config.vocab_size, sampling)
    sampler = Sampler(target.config.vocab_size, sampling, draft.config.vocab_size)
    noise = verifier.draft_noise
    drafter = StagedDrafter([draft, *models], guesser(noise), FixedLength(guesses), sampler, noise, END_MARKS)
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


@pytest.mark.campaign
@pytest.mark.parametrize("verify", VERIFIERS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_texts_and_acceptance_are_those_without_a_stage(verify, sampling):
    """Of n-grams, a smaller model and a liar; of a draft whose window slides and of one of fewer tokens; for every gamma."""
    prompt, guessed, n_tokens = [BOS, *[7, 9, 10, 11] * 3], 0, 0
    for seed, vocab, seq_len in ((0, 105, 128), (1, 105, 32), (2, 60, 128)):
        target, draft = tiny_model(seed, layers=3, scale=0.3), tiny_model(seed, vocab, seq_len, 128, scale=0.3)
        smaller, liar = tiny_model(seed, 50, 24, 128, layers=1, scale=0.3), Liar(105)

        def small(noise, smaller=smaller, sampling=sampling):
            return ModelDrafter(smaller, Sampler(105, sampling, 50), noise, END_MARKS)

        for gamma in (1, 2, 5, 9):
            expected = unstaged(target, draft, sampling, verify, gamma, prompt)
            if verify == "coupled":
                assert expected[0] == continuation(target, None, sampling, prompt=prompt)[0]
            for guesser, models in (
                (lambda _: NgramDrafter(END_MARKS), ()),
                (lambda _, liar=liar: liar, ()),
                (small, (smaller,)),
            ):
                got = staged(draft, guesser, sampling, verify, gamma, target, prompt, models=models)
                assert got == expected
        guessed += liar.asked
        n_tokens += len(expected[0])
    assert guessed > 100
    assert n_tokens > 40


class Circles:
    """A model that says 3, 4, ... 9, 3, ... by the position; a pass takes a second on that clock, one of several tokens 1.05."""

    config, n_positions, n_short, lock = tiny_model(0, 12).config, 9000, 0, threading.RLock()

    def __init__(self, clock=None):
        self.n_passes, self._clock = 0, clock

    def forward(self, tokens, n_logits=1):
        self.n_passes += 1
        if self._clock:
            self._clock.now += 1.0 if n_logits < 2 else 1.05
        return 9 * np.eye(12, dtype=np.float32)[[3 + n % 7 for n in range(len(tokens) - n_logits, len(tokens))]]


def proposals(drafter, n):
    """What a target takes that is always of the draft's mind."""
    tokens = [1]
    for _ in range(n):
        tokens += drafter.propose(tokens, begun(5)).tokens
    return tokens[1:]


def test_the_draft_runs_fewer_passes_on_a_text_that_repeats():
    """One a proposal, once the text's circle is known; and what the last pass knew already is not run again."""
    models, sampler = (Circles(), Circles()), Sampler(12, Sampling(0.0))
    alone = ModelDrafter(models[0], sampler, lambda _: 0, {})
    together = StagedDrafter([models[1]], NgramDrafter(()), FixedLength(9), sampler, lambda _: 0, {})
    assert proposals(alone, 40) == proposals(together, 40) == [3 + n % 7 for n in range(200)]
    assert models[0].n_passes == 200
    assert models[1].n_passes < 60


class Sometimes:
    """Asked for guesses it takes its time, and has right ones one time in three."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds, self.asked = clock, seconds, 0

    def get_ready(self, tokens):
        pass

    def propose(self, tokens, policy, tail=()):
        n = len(tokens) + len(tail) - 1
        self.asked += 1
        self.clock.now += self.seconds
        return Draft([3 + n % 7, 3 + (n + 1) % 7][: policy.max_tokens] if self.asked % 3 == 0 else [])


class Clock:
    now = 0.0


@pytest.mark.parametrize(("seconds", "pays"), [(0.01, True), (0.9, False)])
def test_guesses_that_do_not_pay_are_left_out_and_tried_again(monkeypatch, seconds, pays):
    clock = Clock()
    monkeypatch.setattr("specdec.draft.staged.time.perf_counter", lambda: clock.now)
    policy, guesser = (
        DraftLengthPolicy(CostModel(CostCurve(LARGE)), Acceptance(ODDS_RATES), is_free=True),
        Sometimes(clock, seconds),
    )
    drafter = StagedDrafter([Circles(clock)], guesser, policy, Sampler(12, Sampling(0.0)), lambda _: 0, {})
    assert proposals(drafter, 200) == [3 + n % 7 for n in range(1000)]
    if pays:
        assert guesser.asked > 500
        assert clock.now < 750
    else:
        assert 10 < guesser.asked < 100
        assert clock.now < 1000 * (1 + TRIAL_SHARE) + FIRST_BUDGET + N_TRIALS * MAX_TRIAL


def test_the_automaton_follows_a_tail_that_it_does_not_take_in():
    """As a search of all suffixes of text and tail in the text finds it, in 2,000 random texts."""
    for case in range(2000):
        rng = random.Random(case)
        letters = rng.randint(1, 4)
        text, tail = ([rng.randrange(letters) for _ in range(rng.randint(a, b))] for a, b in ((1, 24), (1, 6)))
        automaton = SuffixAutomaton()
        for token in text:
            automaton.append(token)
        length, place = automaton.match(tail)
        whole, n = text + tail, 0
        for n in range(len(whole) - 1, 0, -1):
            places = [end for end in range(n, len(text) + 1) if text[end - n : end] == whole[-n:]]
            if places:
                break
        assert length == (n if places else 0)
        assert place in (places or [0])
        assert automaton.text == text


def test_a_guess_behind_a_tail_is_what_followed_there():
    drafter = NgramDrafter(())
    text = [1, 7, 8, 9, 10, 11, 12, 13, 3, 4]
    assert drafter.propose(text, begun(2), [7, 8, 9]).tokens == [10, 11]
    assert drafter.propose(text, begun(1), [5, 19]).tokens == []


@pytest.mark.parametrize("verify", VERIFIERS)
def test_the_library_has_stages(pair, verify):
    plain = SpeculativeDecoder(pair.target, pair.draft, pair.tokenizer, gamma=4, verify=verify, n_threads=1)
    prompt = "abc abd abc abd abc ab"
    expected = [plain.generate(prompt, 40, temperature=temperature, seed=3) for temperature in (0.0, 1.0)]
    for stage in ("ngram", pair.draft):
        decoder = SpeculativeDecoder(plain.target, pair.draft, plain.tokenizer, stage=stage, gamma=4, verify=verify)
        for decoder_ in (decoder, pickle.loads(pickle.dumps(decoder))):
            for temperature, (text, statistics) in zip((0.0, 1.0), expected, strict=True):
                got = decoder_.generate(prompt, 40, temperature=temperature, seed=3)
                assert got.text == text
                assert counts(got.statistics) == counts(statistics)


def test_bad_stages(pair):
    target = SpeculativeDecoder(pair.target, None, pair.tokenizer).target
    for draft, stage, words in (
        (None, "ngram", "a stage drafts for a draft that is a model"),
        ("ngram", "ngram", "a stage drafts for a draft that is a model"),
        (pair.draft, "self", "no smaller than the draft"),
        (pair.draft, target, "target and stage are one object"),
        (pair.draft, tiny_model(0), "the stage has a vocabulary of 105"),
        (pair.draft, pair.tokenizer, "tok300"),
    ):
        with pytest.raises(ValueError, match=words):
            SpeculativeDecoder(target, draft, pair.tokenizer, stage=stage)
    with pytest.raises(TypeError, match="stage is 3; expected a path"):
        SpeculativeDecoder(target, pair.draft, pair.tokenizer, stage=3)


def test_two_threads_with_their_models_in_another_order_do_not_wait_for_each_other(pair):
    plain = SpeculativeDecoder(pair.target, None, pair.tokenizer, n_threads=1)
    target = plain.target
    one, other = (SpeculativeDecoder(target, pair.draft, plain.tokenizer, n_threads=1).draft for _ in range(2))
    decoders = [SpeculativeDecoder(target, a, plain.tokenizer, stage=b, gamma=4) for a, b in ((one, other), (other, one))]
    greedy = Sampling(temperature=0)
    text, said = plain.generate("One day", 60, greedy).text, []
    threads = [
        threading.Thread(target=lambda d=d: said.append(d.generate("One day", 60, greedy).text), daemon=True)
        for d in decoders * 2
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert said == [text] * 4


def test_a_stage_and_trees_do_not_go_together(pair):
    with pytest.raises(ValueError, match="proposes chains"):
        SpeculativeDecoder(pair.target, pair.draft, pair.tokenizer, stage="ngram", tree="on")
