"""N-gram drafts: the suffix automaton finds what a search finds, and the output equals the plain output."""

import itertools
import math
import pickle
import random
from collections import Counter

import pytest

from specdec import SpeculativeDecoder
from specdec.draft.cost_curves import CostCurve
from specdec.draft.draft_length import FixedLength
from specdec.draft.ngram import NgramDrafter, SuffixAutomaton
from specdec.sampling import Sampling
from specdec.tokenizer import BOS, EOS
from specdec.verification import VERIFIERS
from tests.test_block_verification import Table
from tests.tools import reference
from tests.tools.decode import END_MARKS, collect, decode, generate_tokens, get_steps, get_tokens
from tests.tools.random_models import make_started_policy, tiny_model


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
        assert len(automaton._transitions) <= 2 * len(tokens)


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
        assert len(automaton._transitions) <= 2 * n
        assert sum(map(len, automaton._transitions)) <= 3 * n


def test_proposal_continues_the_longest_match():
    tokens = [1, 7, 8, 9, 10, 11, 12, 13, 3, 8, 9, 20, 21, 4, 7, 8, 9]
    assert NgramDrafter(()).propose(tokens, make_started_policy(2)).tokens == [10, 11]  # after 7 8 9, not after the later 8 9
    assert NgramDrafter(()).propose(tokens, make_started_policy(0)).tokens == []
    assert NgramDrafter(()).propose([1, 2, 3], make_started_policy(4)).tokens == []


def test_proposal_continues_a_loop_beyond_the_end_of_the_sequence():
    assert NgramDrafter(()).propose([1, *[4, 5, 6] * 8], make_started_policy(7)).tokens == [4, 5, 6, 4, 5, 6, 4]
    assert NgramDrafter(()).propose([1, *[4] * 40], make_started_policy(5)).tokens == [4] * 5


def test_nothing_is_proposed_after_an_eos_token():
    tokens = [1, *[4, 5, EOS, 6] * 6, 4]
    assert NgramDrafter(END_MARKS).propose(tokens, make_started_policy(6)).tokens == [5, EOS]


def test_an_incremental_drafter_proposes_the_same_as_a_new_one():
    rng, drafter = random.Random(3), NgramDrafter(())
    for _ in range(30):
        tokens = [rng.randrange(3) for _ in range(rng.randint(1, 40))]
        for _ in range(20):
            assert drafter.propose(tokens, make_started_policy(6)) == NgramDrafter(()).propose(tokens, make_started_policy(6))
            tokens += [rng.randrange(3) for _ in range(rng.randint(0, 3))]


def test_draft_length_follows_the_hit_rate_of_matches():
    """Random tokens: a match predicts nothing, and after 400 of them hardly anything is proposed."""
    rng, drafter = random.Random(5), NgramDrafter(())
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


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_output_equals_plain_output(temperature):
    drafted = accepted = 0
    for seed in range(6):
        target, sampling = tiny_model(seed % 3, 12, layers=3, scale=0.3), Sampling(temperature, 0, 0.5, seed)
        prompt = [BOS, *[7, 9, 10, 11] * (seed % 3)]
        plain, _ = generate_tokens(target, None, sampling, prompt=prompt, max_tokens=100)
        for gamma in (1, 4, 9):
            drafter, verifier = NgramDrafter(END_MARKS), VERIFIERS["coupled"](12, sampling)
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
        steps = get_steps(decode(target, NgramDrafter({}), verifier, prompt, 4, FixedLength(3), {}))
        counts[tuple(get_tokens(steps))] += 1
        drafted += sum(len(step.draft_tokens) for step in steps)
    assert drafted > 20_000
    chi = 0.0
    for tokens in itertools.product(range(2), repeat=4):
        expected = 20_000 * math.prod(target.probs[a][b] for a, b in itertools.pairwise((0, *tokens)))
        chi += (counts[tokens] - expected) ** 2 / expected
    assert chi < reference.chi_square_limit(15, 4.8)


@pytest.mark.parametrize("verify", VERIFIERS)
def test_decoder_drafts_without_a_model(pair, verify):
    decoder = SpeculativeDecoder(pair.target, "ngram", verify=verify, gamma=4)
    assert decoder.draft is None
    plain = SpeculativeDecoder(decoder.target, None, decoder.tokenizer, verify=verify)
    prompt = "abc abd abc abd abc ab"
    text, statistics = decoder.generate(prompt, 40, temperature=0.0)
    assert text == plain.generate(prompt, 40, temperature=0.0).text
    assert statistics.n_drafted > 0
    assert pickle.loads(pickle.dumps(decoder)).generate(prompt, 40, temperature=0.0).text == text


def test_ngrams_are_not_searched_if_a_pass_is_as_fast_as_the_search(pair, monkeypatch):
    """The time of a pass is set here."""
    prompt, drafted = "abc abd abc abd abc ab", []
    for seconds in (1e-6, 1e-2):
        decoder = SpeculativeDecoder(pair.target, "ngram")
        curve = CostCurve({1: seconds, 8: seconds})
        monkeypatch.setattr("specdec.engine.autotuner.measure", lambda *_, curve=curve: curve)
        drafted.append(decoder.generate(prompt, 40, temperature=0.0).statistics.n_drafted)
    assert drafted[0] == 0 < drafted[1]
