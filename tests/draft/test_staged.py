"""Staged drafts: take_proposals do not depend on the second-level draft, which saves passes or is not used."""

import itertools
import pickle
import random
import threading

import numpy as np
import pytest

from specdec import Sampling, SpeculativeDecoder
from specdec.draft.acceptance import LOOKUP_ACCEPTANCE, Acceptance
from specdec.draft.draft_length import CostCurve, CostModel, DraftLengthPolicy, FixedLength
from specdec.draft.lookup import LookupDrafter, SuffixAutomaton
from specdec.draft.model_drafters import ModelDrafter
from specdec.draft.staged import StagedDrafter
from specdec.sampling import Sampler
from specdec.tokenizer import BOS
from specdec.verification import VERIFIERS, Draft
from tests.tools.decode import END_MARKS, SAMPLINGS, FakeCache, generate_tokens, make_model_drafter
from tests.tools.random_models import make_started_policy, tiny_model
from tests.tools.staged_runs import LARGE, get_counts, run_staged, run_unstaged


class RandomDrafter:
    """Proposes random tokens of any length, some of which it proposed last time."""

    def __init__(self, vocab):
        self.guesses, self.n = itertools.cycle(range(3, vocab)), itertools.cycle((3, 0, 1, 7))
        self.n_calls = 0

    def prepare(self, tokens):
        pass

    def propose(self, tokens, policy, tail=()):
        self.n_calls += 1
        return Draft([next(self.guesses) for _ in range(min(policy.max_tokens, next(self.n)))])


@pytest.mark.campaign
@pytest.mark.parametrize("verify", VERIFIERS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_output_and_acceptance_equal_those_without_a_stage(verify, sampling):
    """With lookup, a smaller model and random tokens; a draft with a sliding window and one with fewer tokens; every gamma."""
    prompt, n_drafted, n_tokens = [BOS, *[7, 9, 10, 11] * 3], 0, 0
    for seed, vocab, seq_len in ((0, 105, 128), (1, 105, 32), (2, 60, 128)):
        target, draft = tiny_model(seed, layers=3, scale=0.3), tiny_model(seed, vocab, seq_len, 128, scale=0.3)
        smaller, random_drafter = tiny_model(seed, 50, 24, 128, layers=1, scale=0.3), RandomDrafter(105)

        def small(verifier, cache, sampling=sampling):
            return make_model_drafter(cache, verifier, sampling, 105)

        for gamma in (1, 2, 5, 9):
            expected = run_unstaged(target, draft, sampling, verify, gamma, prompt)
            if verify == "coupled":
                assert expected[0] == generate_tokens(target, None, sampling, prompt=prompt)[0]
            for make_second_level, models in (
                (lambda _: LookupDrafter(END_MARKS), ()),
                (lambda _, random_drafter=random_drafter: random_drafter, ()),
                (small, (smaller,)),
            ):
                result = run_staged(draft, make_second_level, sampling, verify, gamma, target, prompt, models=models)
                assert result == expected
        n_drafted += random_drafter.n_calls
        n_tokens += len(expected[0])
    assert n_drafted > 100
    assert n_tokens > 40


class LoopingModel(FakeCache):
    """A model, and its cache, that repeats 3, 4, ... 9 by position; a pass takes a second, one over several tokens 1.05."""

    vocab_size, n_positions = 12, 9000

    def __init__(self, clock=None):
        self.n_passes, self._clock = 0, clock

    def forward(self, tokens, n_logits=1):
        self.n_passes += 1
        if self._clock:
            self._clock.now += 1.0 if n_logits < 2 else 1.05
        return 9 * np.eye(12, dtype=np.float32)[[3 + n % 7 for n in range(len(tokens) - n_logits, len(tokens))]]


def take_proposals(drafter, n):
    """Return the tokens of a target that accepts all take_proposals."""
    tokens = [1]
    for _ in range(n):
        tokens += drafter.propose(tokens, make_started_policy(5)).tokens
    return tokens[1:]


def test_the_draft_runs_fewer_passes_on_a_repetitive_sequence():
    """One pass per proposal once the loop is known; logits of the last pass are used again."""
    models, sampler = (LoopingModel(), LoopingModel()), Sampler(12, Sampling(0.0))
    alone = ModelDrafter(models[0], sampler, lambda _: 0, {})
    costs = CostModel(CostCurve(LARGE))
    together = StagedDrafter([models[1]], LookupDrafter(()), costs, FixedLength(9), sampler, lambda _: 0, {})
    assert take_proposals(alone, 40) == take_proposals(together, 40) == [3 + n % 7 for n in range(200)]
    assert models[0].n_passes == 200
    assert models[1].n_passes < 60


class SometimesRightDrafter:
    """Takes some time for a proposal, which is right one time in three."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds, self.n_calls = clock, seconds, 0

    def prepare(self, tokens):
        pass

    def propose(self, tokens, policy, tail=()):
        n = len(tokens) + len(tail) - 1
        self.n_calls += 1
        self.clock.now += self.seconds
        return Draft([3 + n % 7, 3 + (n + 1) % 7][: policy.max_tokens] if self.n_calls % 3 == 0 else [])


class Clock:
    now = 0.0


def test_a_second_level_that_is_sometimes_right_saves_passes(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("specdec.draft.staged.time.perf_counter", lambda: clock.now)
    costs, second_level = CostModel(CostCurve(LARGE)), SometimesRightDrafter(clock, 0.01)
    policy = DraftLengthPolicy(costs, Acceptance(LOOKUP_ACCEPTANCE), is_free=True)
    drafter = StagedDrafter([LoopingModel(clock)], second_level, costs, policy, Sampler(12, Sampling(0.0)), lambda _: 0, {})
    assert take_proposals(drafter, 200) == [3 + n % 7 for n in range(1000)]
    assert second_level.n_calls > 500
    assert clock.now < 750


def test_the_automaton_matches_a_tail_without_taking_it_in():
    """Equals a search of all suffixes of sequence and tail in the sequence, for 2,000 random sequences."""
    for case in range(2000):
        rng = random.Random(case)
        n_tokens = rng.randint(1, 4)
        text, tail = ([rng.randrange(n_tokens) for _ in range(rng.randint(a, b))] for a, b in ((1, 24), (1, 6)))
        automaton = SuffixAutomaton()
        for token in text:
            automaton.append(token)
        length, position = automaton.match(tail)
        whole, n = text + tail, 0
        for n in range(len(whole) - 1, 0, -1):
            positions = [end for end in range(n, len(text) + 1) if text[end - n : end] == whole[-n:]]
            if positions:
                break
        assert length == (n if positions else 0)
        assert position in (positions or [0])
        assert automaton.tokens == text


def test_a_proposal_after_a_tail_continues_the_match():
    drafter = LookupDrafter(())
    text = [1, 7, 8, 9, 10, 11, 12, 13, 3, 4]
    assert drafter.propose(text, make_started_policy(2), [7, 8, 9]).tokens == [10, 11]
    assert drafter.propose(text, make_started_policy(1), [5, 19]).tokens == []


@pytest.mark.parametrize("verify", VERIFIERS)
def test_decoder_with_a_stage_generates_plain_output(pair, verify):
    plain = SpeculativeDecoder(pair.target, pair.draft, pair.tokenizer, gamma=4, verify=verify, n_threads=1)
    prompt = "abc abd abc abd abc ab"
    expected = [plain.generate(prompt, 40, temperature=temperature, seed=3) for temperature in (0.0, 1.0)]
    for stage in ("lookup", pair.draft):
        decoder = SpeculativeDecoder(plain.target, pair.draft, plain.tokenizer, stage=stage, gamma=4, verify=verify)
        for decoder_ in (decoder, pickle.loads(pickle.dumps(decoder))):
            for temperature, (text, statistics) in zip((0.0, 1.0), expected, strict=True):
                result = decoder_.generate(prompt, 40, temperature=temperature, seed=3)
                assert result.text == text
                assert get_counts(result.statistics) == get_counts(statistics)


def test_unsupported_stages_are_refused(pair):
    target = SpeculativeDecoder(pair.target, None, pair.tokenizer).target
    for draft, stage, message in (
        (None, "lookup", "a stage needs a draft that is a model"),
        ("lookup", "lookup", "a stage needs a draft that is a model"),
        (pair.draft, "self", "not smaller than the draft"),
        (pair.draft, target, "target and stage are the same object"),
        (pair.draft, tiny_model(0), "the stage has a vocabulary of 105"),
        (pair.draft, pair.tokenizer, "tok300"),
    ):
        with pytest.raises(ValueError, match=message):
            SpeculativeDecoder(target, draft, pair.tokenizer, stage=stage)
    with pytest.raises(TypeError, match="stage is 3; expected a path"):
        SpeculativeDecoder(target, pair.draft, pair.tokenizer, stage=3)


def test_threads_with_models_in_different_order_do_not_deadlock(pair):
    plain = SpeculativeDecoder(pair.target, None, pair.tokenizer, n_threads=1)
    target = plain.target
    one, other = (SpeculativeDecoder(target, pair.draft, plain.tokenizer, n_threads=1).draft for _ in range(2))
    decoders = [SpeculativeDecoder(target, a, plain.tokenizer, stage=b, gamma=4) for a, b in ((one, other), (other, one))]
    greedy = Sampling(temperature=0)
    text, results = plain.generate("One day", 60, greedy).text, []
    threads = [
        threading.Thread(target=lambda d=d: results.append(d.generate("One day", 60, greedy).text), daemon=True)
        for d in decoders * 2
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [text] * 4


def test_a_stage_with_trees_is_refused(pair):
    with pytest.raises(ValueError, match="proposes chains"):
        SpeculativeDecoder(pair.target, pair.draft, pair.tokenizer, stage="lookup", tree="on")
