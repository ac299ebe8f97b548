"""Drafting from the text itself: the longest suffix that stands before, as a search finds it; and the text is the plain one."""

import itertools
import math
import pickle
import random
from collections import Counter

import pytest

from specdec import SpeculativeDecoder
from specdec.draft.costs import CostCurve
from specdec.draft.ngram import NgramDrafter, SuffixAutomaton
from specdec.draft.policy import FixedLength
from specdec.engine.decoding import Statistics, Step, decode
from specdec.sampling import Sampling
from specdec.tokenizer import BOS, EOS
from specdec.verification import VERIFIERS
from tests.test_block_verification import Table
from tests.tools import reference
from tests.tools.random_models import END_MARKS, begun, continuation, tiny_model


def longest_suffix_before(text):
    """The length of the longest suffix that ends at an earlier place too, and all such places."""
    for length in range(len(text) - 1, 0, -1):
        places = [end for end in range(length, len(text)) if text[end - length : end] == text[-length:]]
        if places:
            return length, places
    return 0, [0]


def test_the_automaton_finds_what_a_search_of_all_suffixes_finds():
    """At every length of 3,000 random texts, over 1 to 5 letters and of repeated parts."""
    for case in range(3000):
        rng = random.Random(case)
        letters = rng.randint(1, 5)
        text = [rng.randrange(letters) for _ in range(rng.randint(1, 24))]
        while rng.random() < 0.5:
            at = rng.randrange(len(text))
            text += text[at : at + rng.randint(1, 9)]
        automaton = SuffixAutomaton()
        for n, token in enumerate(text, 1):
            automaton.append(token)
            length, places = longest_suffix_before(text[:n])
            match = automaton.match()
            assert match[0] == length
            assert match[1] in places
        assert automaton.text == text
        assert len(automaton._next) <= 2 * len(text)


def test_the_automaton_of_a_long_text_has_few_states_and_edges():
    """At most 2n states and 3n edges (Blumer et al. 1985), of texts that repeat and of texts that do not."""
    rng, n = random.Random(1), 20_000
    a, b = [1], [1, 2]
    while len(b) < n:
        a, b = b, b + a
    texts = [
        [5] * n,
        [i % 7 for i in range(n)],
        b[:n],
        [rng.randrange(4) for _ in range(n)],
        [rng.randrange(49152) for _ in range(n)],
    ]
    for text in texts:
        automaton = SuffixAutomaton()
        for token in text:
            automaton.append(token)
        assert len(automaton._next) <= 2 * n
        assert sum(map(len, automaton._next)) <= 3 * n


def test_a_proposal_is_what_followed_the_longest_match():
    text = [1, 7, 8, 9, 10, 11, 12, 13, 3, 8, 9, 20, 21, 4, 7, 8, 9]
    assert NgramDrafter(()).propose(text, begun(2)).tokens == [10, 11]  # behind 7 8 9, not behind the later 8 9
    assert NgramDrafter(()).propose(text, begun(0)).tokens == []
    assert NgramDrafter(()).propose([1, 2, 3], begun(4)).tokens == []


def test_a_text_that_goes_in_circles_is_proposed_beyond_its_end():
    assert NgramDrafter(()).propose([1, *[4, 5, 6] * 8], begun(7)).tokens == [4, 5, 6, 4, 5, 6, 4]
    assert NgramDrafter(()).propose([1, *[4] * 40], begun(5)).tokens == [4] * 5


def test_nothing_is_proposed_behind_an_end_mark():
    text = [1, *[4, 5, EOS, 6] * 6, 4]
    assert NgramDrafter(END_MARKS).propose(text, begun(6)).tokens == [5, EOS]


def test_a_drafter_that_follows_a_text_proposes_what_a_new_one_does_and_begins_anew_with_another():
    rng, drafter = random.Random(3), NgramDrafter(())
    for _ in range(30):
        text = [rng.randrange(3) for _ in range(rng.randint(1, 40))]
        for _ in range(20):
            assert drafter.propose(text, begun(6)) == NgramDrafter(()).propose(text, begun(6))
            text += [rng.randrange(3) for _ in range(rng.randint(0, 3))]


def test_a_proposal_goes_as_far_as_its_matches_have_been_right():
    """Random letters: a match says nothing about the next one, and after 400 of them hardly anything is proposed."""
    rng, drafter = random.Random(5), NgramDrafter(())
    text = [rng.randrange(20) for _ in range(400)]
    drafter.get_ready(text)
    lengths = []
    for _ in range(200):
        draft = drafter.propose(text, begun(8))
        lengths.append(len(draft.tokens))
        text.append(rng.randrange(20))
    assert sum(lengths) < 20
    # the same letters once more: every match is right, and longer by the token
    drafter.get_ready(text + text[:200])
    draft = drafter.propose(text + text[:201], begun(8))
    assert draft.tokens == text[201:209]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_the_text_is_the_plain_text(temperature):
    drafted = accepted = 0
    for seed in range(6):
        target, sampling = tiny_model(seed % 3, 12, layers=3, scale=0.3), Sampling(temperature, 0, 0.5, seed)
        prompt = [BOS, *[7, 9, 10, 11] * (seed % 3)]
        plain, _ = continuation(target, None, sampling, prompt=prompt, max_tokens=100)
        for gamma in (1, 4, 9):
            statistics, tokens = Statistics(len(prompt)), []
            verifier = VERIFIERS["coupled"](12, sampling)
            for event in decode(target, NgramDrafter(END_MARKS), verifier, prompt, 100, FixedLength(gamma), END_MARKS):
                statistics.add(event)
                tokens += event.tokens if isinstance(event, Step) else []
            assert tokens == plain
            drafted += statistics.n_drafted
            accepted += statistics.n_accepted
    assert drafted > 20
    assert accepted > 0


@pytest.mark.campaign
@pytest.mark.parametrize("verify", VERIFIERS)
def test_the_distribution_is_the_targets_own(verify):
    """Texts of 4 tokens over 2 behind a prompt that repeats: chi-square over 20,000 seeds, false alarm below 1e-6 a case."""
    target, prompt = Table([[0.5, 0.5], [0.4, 0.6]]), [0, 1, 0, 1, 0, 1, 0]
    counts, drafted = Counter(), 0
    for seed in range(20_000):
        verifier = VERIFIERS[verify](2, Sampling(1.0, 0, 0.0, seed))
        steps = [
            step for step in decode(target, NgramDrafter({}), verifier, prompt, 4, FixedLength(3), {}) if isinstance(step, Step)
        ]
        counts[tuple(token for step in steps for token in step.tokens)] += 1
        drafted += sum(len(step.draft_tokens) for step in steps)
    assert drafted > 20_000
    chi = 0.0
    for text in itertools.product(range(2), repeat=4):
        expected = 20_000 * math.prod(target.probs[a][b] for a, b in itertools.pairwise((0, *text)))
        chi += (counts[text] - expected) ** 2 / expected
    assert chi < reference.chi_square_limit(15, 4.8)


@pytest.mark.parametrize("verify", VERIFIERS)
def test_the_library_drafts_without_a_model(pair, verify):
    decoder = SpeculativeDecoder(pair.target, "ngram", verify=verify, gamma=4)
    assert decoder.draft is None
    plain = SpeculativeDecoder(decoder.target, None, decoder.tokenizer, verify=verify)
    prompt = "abc abd abc abd abc ab"
    text, statistics = decoder.generate(prompt, 40, temperature=0.0)
    assert text == plain.generate(prompt, 40, temperature=0.0).text
    assert statistics.n_drafted > 0
    assert pickle.loads(pickle.dumps(decoder)).generate(prompt, 40, temperature=0.0).text == text


def test_ngrams_are_not_looked_for_where_a_pass_is_as_quick_as_looking(pair, monkeypatch):
    """By the clock of the machine, set here."""
    prompt, drafted = "abc abd abc abd abc ab", []
    for seconds in (1e-6, 1e-2):
        decoder = SpeculativeDecoder(pair.target, "ngram")
        curve = CostCurve({1: seconds, 8: seconds})
        monkeypatch.setattr("specdec.draft.autotuner.measure", lambda *_, curve=curve: curve)
        drafted.append(decoder.generate(prompt, 40, temperature=0.0).statistics.n_drafted)
    assert drafted[0] == 0 < drafted[1]
