"""Lookup drafts: the suffix automaton finds what a search finds, and the output equals the plain output."""

import pickle
import random
from collections import Counter

import numpy as np
import pytest

from specdec import SpeculativeDecoder
from specdec.draft.draft_length import CostCurve, FixedLength
from specdec.draft.lookup import LookupDrafter, SuffixAutomaton
from specdec.draft.lookup_tables import LookupMemory
from specdec.sampling import TARGET_NOISE, Sampler, Sampling
from specdec.tokenizer import BOS, EOS
from specdec.verification import VERIFIERS
from tests.tools import reference
from tests.tools.decode import END_MARKS, collect, decode, generate_tokens, get_steps, get_tokens
from tests.tools.random_models import make_started_policy, tiny_model
from tests.tools.verification_tables import Table


def find_longest_suffix(tokens):
    """Return the length of the longest suffix that also ends earlier, and all such positions."""
    for length in range(len(tokens) - 1, 0, -1):
        positions = [end for end in range(length, len(tokens)) if tokens[end - length : end] == tokens[-length:]]
        if positions:
            return length, positions
    return 0, [0]


def test_automaton_equals_a_search_of_all_suffixes():
    """At every length of 3,000 random sequences, over 1 to 5 tokens and with repetitions."""
    for case in range(3000):
        rng = random.Random(case)
        n_tokens = rng.randint(1, 5)
        tokens = [rng.randrange(n_tokens) for _ in range(rng.randint(1, 24))]
        while rng.random() < 0.5:
            start = rng.randrange(len(tokens))
            tokens += tokens[start : start + rng.randint(1, 9)]
        automaton = SuffixAutomaton()
        for n, token in enumerate(tokens, 1):
            automaton.append(token)
            length, positions = find_longest_suffix(tokens[:n])
            match = automaton.match()
            assert match[0] == length
            assert match[1] in positions
        assert automaton.tokens == tokens
        assert len(automaton.transitions) <= 2 * len(tokens)


def test_automaton_has_at_most_2n_states_and_3n_edges():
    """The bounds of Blumer et al. 1985, for sequences with and without repetitions."""
    rng, n = random.Random(1), 20_000
    a, b = [1], [1, 2]
    while len(b) < n:
        a, b = b, b + a
    sequences = [
        [5] * n,
        [i % 7 for i in range(n)],
        b[:n],
        [rng.randrange(4) for _ in range(n)],
        [rng.randrange(49152) for _ in range(n)],
    ]
    for tokens in sequences:
        automaton = SuffixAutomaton()
        for token in tokens:
            automaton.append(token)
        assert len(automaton.transitions) <= 2 * n
        assert sum(map(len, automaton.transitions)) <= 3 * n


def test_proposal_continues_the_longest_match():
    tokens = [1, 7, 8, 9, 10, 11, 12, 13, 3, 8, 9, 20, 21, 4, 7, 8, 9]
    assert LookupDrafter(()).propose(tokens, make_started_policy(2)).tokens == [10, 11]  # after 7 8 9, not after the later 8 9
    assert LookupDrafter(()).propose(tokens, make_started_policy(0)).tokens == []
    assert LookupDrafter(()).propose([1, 2, 3], make_started_policy(4)).tokens == []


def test_proposal_continues_a_loop_beyond_the_end_of_the_sequence():
    assert LookupDrafter(()).propose([1, *[4, 5, 6] * 8], make_started_policy(7)).tokens == [4, 5, 6, 4, 5, 6, 4]
    assert LookupDrafter(()).propose([1, *[4] * 40], make_started_policy(5)).tokens == [4] * 5


def test_nothing_is_proposed_after_an_eos_token():
    tokens = [1, *[4, 5, EOS, 6] * 6, 4]
    assert LookupDrafter(END_MARKS).propose(tokens, make_started_policy(6)).tokens == [5, EOS]


def test_an_incremental_drafter_proposes_the_same_as_a_new_one():
    rng, drafter = random.Random(3), LookupDrafter(())
    for _ in range(30):
        tokens = [rng.randrange(3) for _ in range(rng.randint(1, 40))]
        for _ in range(20):
            assert drafter.propose(tokens, make_started_policy(6)) == LookupDrafter(()).propose(tokens, make_started_policy(6))
            tokens += [rng.randrange(3) for _ in range(rng.randint(0, 3))]


def test_draft_length_follows_the_hit_rate_of_matches():
    """Random tokens: a match predicts nothing, and after 400 of them hardly anything is proposed."""
    rng, drafter = random.Random(5), LookupDrafter(())
    tokens = [rng.randrange(20) for _ in range(400)]
    drafter.prepare(tokens)
    lengths = []
    for _ in range(200):
        draft = drafter.propose(tokens, make_started_policy(8))
        lengths.append(len(draft.tokens))
        tokens.append(rng.randrange(20))
    assert sum(lengths) < 20
    # the same tokens once more: every match is right, and grows with each token
    drafter.prepare(tokens + tokens[:200])
    draft = drafter.propose(tokens + tokens[:201], make_started_policy(8))
    assert draft.tokens == tokens[201:209]


def make_drafter(sampling=None, eos_tokens=(), n_ids=None):
    """Return a drafter that looks up runner-ups too."""
    return LookupDrafter(eos_tokens, sampling, LookupMemory(), n_ids)


def test_runner_ups_are_proposed_where_nothing_matches():
    """After 5 comes 9 in this sequence, but the target found 7 and then 8 likelier where a pass read 5."""
    drafter, tokens = make_drafter(), [1, 5, 9, 3, 6]
    drafter.prepare(tokens[:2])
    for n in range(2, 5):
        logits = np.zeros((1, 20), np.float32)
        logits[0, [7, 8]] = 8.0, 4.0
        drafter.observe(logits, [0], n)
        drafter.prepare(tokens[: n + 1])
    assert drafter.propose([*tokens, 9], make_started_policy(1)).tokens == [7]
    assert LookupDrafter(()).propose([*tokens, 4], make_started_policy(1)).tokens == []


def test_runner_ups_are_looked_up_by_two_tokens_before_one():
    drafter, tokens = make_drafter(), [1, 2, 3, 4, 2, 5, 6]
    for n, best in ((2, 7), (5, 8)):  # after 1 2, and after 4 2
        drafter.prepare(tokens[:n])
        logits = np.zeros((1, 20), np.float32)
        logits[0, best] = 9.0
        drafter.observe(logits, [0], n)
    drafter.prepare(tokens)
    assert drafter.propose([*tokens, 1, 2], make_started_policy(1)).tokens == [7]
    drafter.prepare(tokens)
    assert drafter.propose([*tokens, 9, 2], make_started_policy(1)).tokens == [8]  # the last pass that read a 2


def test_a_runner_up_is_the_token_that_would_be_drawn_at_its_position():
    """From the stored logits, with the noise of the position: at 200 positions, with and without top_p."""
    n_hits = Counter()
    for case in range(200):
        rng = np.random.default_rng(case)
        sampling = Sampling(0.7, 0, (0.0, 0.9)[case % 2], case)
        drafter = make_drafter(sampling)
        logits = np.full(30, -40, np.float32)
        logits[rng.permutation(30)[:6]] = rng.normal(0, 2, 6)
        prompt = rng.permutation(30).tolist()
        drafter.prepare(prompt)
        drafter.observe(logits[None], [0], len(prompt))
        drafter.prepare([*prompt, 40])
        tokens = [*prompt, 40, *rng.permutation(range(50, 90)).tolist(), *prompt[-2:]]
        drafted = drafter.propose(tokens, make_started_policy(1)).tokens
        sampler = Sampler(30, sampling)
        drawn = sampler.draw(sampler.new_probs(), logits, TARGET_NOISE, len(tokens))
        n_hits[drafted == [drawn] if drafted else None] += 1
    assert n_hits[False] == 0 and n_hits[True] > 100


def test_a_drafter_for_another_sequence_forgets_the_passes_of_the_last():
    drafter = make_drafter()
    drafter.prepare([1, 2])
    drafter.observe(np.eye(1, 20, 7, dtype=np.float32), [0], 2)
    drafter.prepare([3, 2])
    assert drafter._index.row_tokens.max() == -1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_not_proposed(bad):
    drafter = make_drafter(Sampling(0.8))
    drafter.prepare([1, 2])
    drafter.observe(np.full((1, 20), bad, np.float32), [0], 2)
    drafter.prepare([1, 2, 3])
    draft = drafter.propose([1, 2, 3, 1, 2], make_started_policy(4))
    assert all(0 <= token < 20 for token in draft.tokens)


def test_runner_ups_need_a_verifier_that_keeps_the_output():
    """With others the output would depend on what earlier requests have left in the table."""
    target = tiny_model(1, 12, layers=3, scale=0.3)
    for verify in VERIFIERS:
        sampling, outputs = Sampling(0.8, 0, 0.0, 5), set()
        for drafter in (LookupDrafter(()), LookupDrafter((), sampling)):
            verifier = VERIFIERS[verify](12, sampling)
            outputs.add(tuple(get_tokens(decode(target.new_cache(), drafter, verifier, [BOS], 60, FixedLength(4), {}))))
        assert len(outputs) == 1


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_output_equals_plain_output(temperature):
    drafted = accepted = 0
    for seed in range(6):
        target, sampling = tiny_model(seed % 3, 12, layers=3, scale=0.3), Sampling(temperature, 0, 0.5, seed)
        prompt = [BOS, *[7, 9, 10, 11] * (seed % 3)]
        plain, _ = generate_tokens(target, None, sampling, prompt=prompt, max_tokens=100)
        for gamma in (1, 4, 9):
            drafter, verifier = make_drafter(sampling, END_MARKS, 12), VERIFIERS["coupled"](12, sampling)
            events = decode(target.new_cache(), drafter, verifier, prompt, 100, FixedLength(gamma))
            tokens, statistics = collect(events)
            assert tokens == plain
            drafted += statistics.n_drafted
            accepted += statistics.n_accepted
    assert drafted > 20
    assert accepted > 0


@pytest.mark.campaign
@pytest.mark.parametrize("verify", VERIFIERS)
def test_distribution_equals_the_targets(verify):
    """Sequences of 4 tokens over 2 after a repetitive prompt: chi-square over 20,000 seeds, false alarm below 1e-6 per case."""
    target, prompt = Table([[0.5, 0.5], [0.4, 0.6]]), [0, 1, 0, 1, 0, 1, 0]
    counts, drafted = Counter(), 0
    for seed in range(20_000):
        verifier = VERIFIERS[verify](2, Sampling(1.0, 0, 0.0, seed))
        steps = get_steps(decode(target, LookupDrafter({}), verifier, prompt, 4, FixedLength(3), {}))
        counts[tuple(get_tokens(steps))] += 1
        drafted += sum(len(step.draft_tokens) for step in steps)
    assert drafted > 20_000
    reference.check_counts(counts, target.expect(4))


@pytest.mark.parametrize("verify", VERIFIERS)
def test_decoder_drafts_without_a_model(pair, verify):
    decoder = SpeculativeDecoder(pair.target, "lookup", verify=verify, gamma=4)
    assert decoder.draft is None
    plain = SpeculativeDecoder(decoder.target, None, decoder.tokenizer, verify=verify)
    prompt = "abc abd abc abd abc ab"
    text, statistics = decoder.generate(prompt, 40, temperature=0.0)
    assert text == plain.generate(prompt, 40, temperature=0.0).text
    assert statistics.n_drafted > 0
    assert pickle.loads(pickle.dumps(decoder)).generate(prompt, 40, temperature=0.0).text == text


def test_nothing_is_looked_up_if_a_pass_is_as_fast_as_the_search(pair, monkeypatch):
    """The time of a pass is set here."""
    prompt, drafted = "abc abd abc abd abc ab", []
    for seconds in (1e-6, 1e-2):
        decoder = SpeculativeDecoder(pair.target, "lookup")
        curve = CostCurve({1: seconds, 8: seconds})
        monkeypatch.setattr("specdec.engine.autotuner.measure", lambda *_, curve=curve: curve)
        drafted.append(decoder.generate(prompt, 40, temperature=0.0).statistics.n_drafted)
    assert drafted[0] == 0 < drafted[1]
