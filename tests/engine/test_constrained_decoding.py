"""The loop under a shape: the text is the masked target's own, of its distribution, with any draft. The shape is by hand."""

import functools
import itertools

import numpy as np
import pytest

from specdec.draft.model import ModelDrafter
from specdec.draft.ngram import NgramDrafter
from specdec.draft.policy import FixedLength
from specdec.draft.tree import TreeDrafter
from specdec.engine.decoding import Statistics, Step, Text, decode
from specdec.sampling import TARGET_NOISE, Sampler, Sampling
from specdec.verification import VERIFIERS, CoupledVerifier, Draft
from tests.tools import reference
from tests.tools.checkpoint_files import random_tensors
from tests.tools.random_models import END_MARKS, tiny_model
from tests.tools.regular_languages import (
    EMPTY,
    LanguageShape,
    after,
    allowed,
    any_number,
    either,
    is_complete,
    one_of,
    text,
    then,
)

# ids 0 to 2 say nothing, nor do rows from 100 on; some tokens say the same, some hold others
WORDS = ["", "", "", "a", "b", "c", "ab", "bc", "abc", "aa", "b", "cab", "x", "xy", "y", "xyz", "z", " ", "a ", "", "c", "abcabc"]
VOCABULARY = [*(word.encode() for word in WORDS), *(bytes([65 + i % 26]) * (i % 3) for i in range(78)), *[b""] * 20]
FREE = then(any_number(either(text("ab"), text("c"), then(one_of("xyz"), text(" ")))), either(text("abc"), text("x")))
FORCING = then(text("abxyc"), then(any_number(then(one_of("abc"), text("xyz a"))), text("yy")))
LANGUAGES = {"free": FREE, "forcing": FORCING, "any": any_number(one_of("abcxyz "))}
PROMPT = [1, 7, 9]
SAMPLINGS = [Sampling(0.0, seed=1), Sampling(1.0, 0, 0.9, 2), Sampling(1.3, 6, 1.0, 3)]


def shape_of(language, vocabulary=VOCABULARY, end_marks=END_MARKS):
    return LanguageShape(language, vocabulary, end_marks)


def times(n, language):
    return functools.reduce(then, [language] * n)


def plain(target, language, sampling, max_tokens, end_marks=END_MARKS):
    """The masked target's own text, one pass a token, and why it ended."""
    sampler, tokens = Sampler(target.config.vocab_size, sampling), [*PROMPT]
    probs = sampler.new_probs()
    for _ in range(max_tokens):
        if language == EMPTY:
            break
        logits = target.forward(tokens)[0].copy()
        logits[
            [i for i in range(len(logits)) if i >= len(VOCABULARY) or not allowed(language, VOCABULARY, end_marks)[i]]
        ] = -np.inf
        token = sampler.draw(probs, logits, TARGET_NOISE, len(tokens))
        if token in end_marks:
            return tokens[len(PROMPT) :], end_marks[token]
        tokens.append(token)
        language = after(language, VOCABULARY[token])
    return tokens[len(PROMPT) :], next(iter(end_marks.values()), "eos") if language == EMPTY else "max_tokens"


class Everything:
    """Proposes whatever comes next in a list of all tokens: allowed ones and others, of a length that depends on the text."""

    def get_ready(self, tokens):
        pass

    def propose(self, tokens, policy):
        n = 1 + sum(tokens) % policy.max_tokens
        return Draft([(3 + sum(tokens) + i * len(tokens)) % 105 for i in range(n)])


def drafters(target, draft, sampling, verify="coupled"):
    noise = VERIFIERS[verify](105, sampling).draft_noise
    models = {"model": draft, "self": tiny_model(0, layers=3)}
    made = {name: ModelDrafter(model, Sampler(105, sampling), noise, END_MARKS) for name, model in models.items()}
    return {"none": None, "n-grams": NgramDrafter(END_MARKS), "everything": Everything(), **made}


def generated(events):
    statistics, tokens = Statistics(), []
    for event in events:
        statistics.add(event)
        tokens += event.tokens if isinstance(event, Step) else []
    return tokens, statistics


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("language", LANGUAGES)
def test_the_text_is_the_masked_targets_own_for_every_draft_and_gamma(language, sampling):
    target, draft = tiny_model(0, layers=3), tiny_model(1)
    shape = shape_of(LANGUAGES[language])
    expected, reason = plain(target, LANGUAGES[language], sampling, 40)
    for name, drafter in drafters(target, draft, sampling).items():
        for gamma in (1, 2, 3, 5, 8):
            verifier = CoupledVerifier(105, sampling)
            events = decode(target, drafter, verifier, PROMPT, 40, FixedLength(gamma), END_MARKS, shape)
            tokens, statistics = generated(events)
            assert (tokens, statistics.stop_reason) == (expected, reason), (name, gamma)
            said = b"".join([VOCABULARY[token] for token in tokens])
            assert is_complete(after(LANGUAGES[language], said)) or reason == "max_tokens"


ENDING = {
    "forced": text("abxyc"),
    "drawn and forced": then(one_of("abc"), text("xyz a")),
    "proposed": times(7, one_of("abc")),
    "either": either(text("ab"), text("c"), then(one_of("xyz"), one_of("abc"))),
}


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("language", ENDING)
def test_a_complete_shape_ends_a_text_of_a_model_without_end_marks(language, sampling):
    """It may be completed by what it forces, within a proposal and along the path of a tree."""
    target, draft, shape = tiny_model(0, layers=3), tiny_model(1), shape_of(ENDING[language], end_marks={})
    expected, reason = plain(target, ENDING[language], sampling, 40, {})
    assert reason == "eos"
    for verify, make in VERIFIERS.items():
        noise = make(105, sampling).draft_noise
        tree = TreeDrafter(tiny_model(0, layers=3), Sampler(105, sampling), noise, {})
        made = drafters(target, draft, sampling, verify) | ({"tree": tree} if verify != "block" else {})
        for (name, drafter), gamma in itertools.product(made.items(), (1, 3, 8)):
            events = decode(target, drafter, make(105, sampling), PROMPT, 40, FixedLength(gamma), {}, shape)
            tokens, statistics = generated(events)
            assert statistics.stop_reason == "eos", (verify, name, gamma)
            assert after(ENDING[language], b"".join([VOCABULARY[token] for token in tokens])) == EMPTY
            assert tokens == expected or verify != "coupled", (name, gamma)


@pytest.mark.parametrize("end_marks", [{}, END_MARKS], ids=["no end marks", "end marks"])
def test_logits_behind_a_complete_shape_are_not_looked_at(end_marks):
    """A draft must not have a text refused that a plain run, which never computes them, writes."""
    logits = np.zeros((5, 105), np.float32)
    logits[3:] = np.nan
    for language, proposed in ((text("abc"), [3, 4, 5, 6]), (times(3, one_of("abc")), [3, 3, 3, 6])):
        for make in VERIFIERS.values():
            grown = Text([*PROMPT], 9, 99, None, make(105, Sampling(0)), FixedLength(4), end_marks, shape_of(language))
            grown.draft = Draft(proposed)
            assert grown.judge(logits.copy()) == (proposed[:3], 3)


def test_no_token_comes_from_a_row_that_is_none():
    target = tiny_model(0, vocab=120)
    for seed in range(20):
        verifier = CoupledVerifier(120, Sampling(5.0, 0, 1.0, seed))
        tokens, _ = generated(decode(target, None, verifier, PROMPT, 20, FixedLength(1), END_MARKS, shape_of(LANGUAGES["any"])))
        assert all(VOCABULARY[token] for token in tokens)


@pytest.mark.parametrize("verify", VERIFIERS)
def test_tokens_that_the_shape_forces_stand_and_cost_no_draft(verify):
    """The last step draws one of two end marks behind what is forced, which is no part of the text and not told."""
    vocabulary = [b"", b"", b"", b"<", b"p", b"q", b"rs", b">", *[b""] * 97]
    language = then(text("<pqrs"), then(any_number(then(one_of("pq"), text("rs>"))), text("<<<")))
    for seed in range(5):
        sampling = Sampling(1.0, 0, 1.0, seed)
        verifier = VERIFIERS[verify](105, sampling)
        events = decode(tiny_model(0), None, verifier, PROMPT, 30, FixedLength(4), END_MARKS, shape_of(language, vocabulary))
        steps = [event for event in events if isinstance(event, Step)]
        assert steps[0].draft_tokens == [3, 4, 5, 6] and steps[0].n_accepted == 4
        assert all(step.n_accepted == len(step.draft_tokens) for step in steps)
        assert sum(step.n_accepted for step in steps) >= 6
        said = b"".join([vocabulary[token] for step in steps for token in step.tokens])
        assert (after(language, said) == EMPTY) == (steps[-1].stop_reason == "bos")


def test_a_complete_shape_ends_a_text_in_the_step_that_completes_it():
    shape = shape_of(text("abc"))
    for max_tokens in (3, 9):
        tokens, statistics = generated(
            decode(
                tiny_model(0), None, CoupledVerifier(105, Sampling(seed=3)), PROMPT, max_tokens, FixedLength(1), END_MARKS, shape
            )
        )
        assert b"".join([VOCABULARY[token] for token in tokens]) == b"abc"
        assert statistics.stop_reason == "bos" and statistics.n_generated == len(tokens)


def test_a_text_may_not_end_before_its_shape_is_complete():
    """The target's favourite is an end mark, wherever it may be one."""
    target = tiny_model(0)

    class Ending:
        lock, n_positions, n_short = target.lock, target.n_positions, 0
        experts_read = 0.0, 0

        @property
        def n_passes(self):
            return target.n_passes

        def forward(self, tokens, n_logits=1):
            logits = target.forward(tokens, n_logits)
            if n_logits:
                logits[:, 2] = 99.0
            return logits

    tokens, statistics = generated(
        decode(Ending(), None, CoupledVerifier(105, Sampling(0)), PROMPT, 60, FixedLength(1), END_MARKS, shape_of(FREE))
    )
    assert is_complete(after(FREE, b"".join([VOCABULARY[token] for token in tokens])))
    assert statistics.stop_reason == "eos"


@pytest.mark.parametrize("verify", ["rejection", "block"])
@pytest.mark.parametrize("drafting", ["model", "favourites"])
def test_texts_follow_the_masked_targets_distribution(verify, drafting):
    """All texts of up to 3 tokens of a shape over 8, by the oracle's probabilities, an end mark ending one early.

    Chi-square over 3,000 seeds, cells expected below 8 pooled; false alarm below 1e-6 a case, and the seeds are fixed.
    """
    vocabulary = [b"", b"", b"", b"a", b"b", b"ab", b"c", b"bb"]
    language = any_number(either(text("ab"), text("c"), text("abb")))
    target, draft = (tiny_model(seed, vocab=8, seq_len=64, scale=0.05) for seed in (3, 4))
    tensors, prompt, expected = random_tensors(target.config, 3, 0.05), [1, 3], {}

    def enumerate_from(tokens, at, mass):
        if len(tokens) == 5 or at == EMPTY:
            expected[tuple(tokens[2:])] = mass
            return
        logits = reference.forward(target.config, tensors, tokens)[-1]
        logits = np.where(allowed(at, vocabulary, END_MARKS), logits, -np.inf)
        for token, p in enumerate(reference.probabilities(logits, 1.0, 0, 1.0)):
            if p > 0 and token in END_MARKS:
                expected[tuple(tokens[2:])] = expected.get(tuple(tokens[2:]), 0) + mass * p
            elif p > 0:
                enumerate_from([*tokens, token], after(at, vocabulary[token]), mass * p)

    enumerate_from(prompt, language, 1.0)
    counts, n_runs, shape, n_refused = {}, 3000, LanguageShape(language, vocabulary, END_MARKS), 0
    for seed in range(n_runs):
        sampling = Sampling(1.0, 0, 1.0, seed)
        verifier = VERIFIERS[verify](8, sampling)
        drafter = ModelDrafter(draft, Sampler(8, sampling), verifier.draft_noise, END_MARKS)
        events = decode(
            target, drafter if drafting == "model" else Favourites(), verifier, prompt, 3, FixedLength(2), END_MARKS, shape
        )
        tokens, statistics = generated(events)
        counts[tuple(tokens)] = counts.get(tuple(tokens), 0) + 1
        n_refused += statistics.n_drafted - statistics.n_accepted
    assert n_refused > n_runs / 4
    assert set(counts) <= set(expected)
    big = {cell: n_runs * p for cell, p in expected.items() if n_runs * p >= 8}
    rest = n_runs - sum(big.values())
    chi = sum((counts.get(cell, 0) - e) ** 2 / e for cell, e in big.items())
    if rest >= 8:
        chi += (sum(n for cell, n in counts.items() if cell not in big) - rest) ** 2 / rest
    assert len(big) >= 8
    assert chi < reference.chi_square_limit(len(big), 4.8)


class Favourites:
    """Proposes tokens that often may not follow."""

    def get_ready(self, tokens):
        pass

    def propose(self, tokens, policy):
        return Draft([4 if tokens[-1] == 3 else 3, 6][: policy.max_tokens])


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_a_tree_is_masked_along_its_paths(verify):
    sampling = Sampling(1.0, 0, 1.0, 5)
    target, draft = tiny_model(0, layers=3), tiny_model(1)
    verifier = VERIFIERS[verify](105, sampling)
    n_trees = 0
    for language in LANGUAGES.values():
        drafter = TreeDrafter(draft, Sampler(105, sampling), verifier.draft_noise, END_MARKS)
        events = list(decode(target, drafter, verifier, PROMPT, 40, FixedLength(6), END_MARKS, shape_of(language)))
        tokens, _ = generated(events)
        n_trees += sum(event.n_nodes > len(event.draft_tokens) for event in events if isinstance(event, Step))
        said = b"".join([VOCABULARY[token] for token in tokens])
        assert after(language, said) != ("nothing",)
        if verify == "coupled":
            assert tokens == plain(target, language, sampling, 40)[0]
    assert n_trees > 3
