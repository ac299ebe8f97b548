"""The decoding loop under a constraint: output and distribution are the masked target's own, with any draft."""

import functools
import itertools

import numpy as np
import pytest

from specdec.draft.draft_length import FixedLength
from specdec.draft.lookup import LookupDrafter
from specdec.draft.tree import TreeDrafter
from specdec.model.kv_cache import KVCache
from specdec.sampling import TARGET_NOISE, Sampler, Sampling
from specdec.speculative import DecodingState
from specdec.verification import VERIFIERS, CoupledVerifier, Draft
from tests.tools import reference
from tests.tools.checkpoint_files import random_tensors
from tests.tools.constraints import FREE, PROMPT, VOCABULARY, make_arbitrary_drafter
from tests.tools.decode import END_MARKS, FakeDrafter, collect, decode, get_steps, get_tokens, make_model_drafter
from tests.tools.random_models import tiny_model
from tests.tools.regular_languages import (
    EMPTY_STRING,
    LanguageConstraint,
    byte_class,
    concatenate,
    derive_all,
    get_allowed,
    is_nullable,
    literal,
    repeat,
    union,
)

FORCING = concatenate(literal("abxyc"), concatenate(repeat(concatenate(byte_class("abc"), literal("xyz a"))), literal("yy")))
LANGUAGES = {"free": FREE, "forcing": FORCING, "any": repeat(byte_class("abcxyz "))}
SAMPLINGS = [Sampling(0.0, seed=1), Sampling(1.0, 0, 0.9, 2), Sampling(1.3, 6, 1.0, 3)]


def make_constraint(language, vocabulary=VOCABULARY, eos_tokens=END_MARKS):
    return LanguageConstraint(language, vocabulary, eos_tokens)


def repeat_exactly(n, language):
    return functools.reduce(concatenate, [language] * n)


def generate_masked(target, language, sampling, max_tokens, eos_tokens=END_MARKS):
    """Return the masked target's own tokens, one pass per token, and the stop reason."""
    cache, sampler, tokens = target.new_cache(), Sampler(target.vocab_size, sampling), [*PROMPT]
    probs = sampler.new_probs()
    for _ in range(max_tokens):
        if language == EMPTY_STRING:
            break
        logits = cache.forward(tokens)[0].copy()
        logits[
            [i for i in range(len(logits)) if i >= len(VOCABULARY) or not get_allowed(language, VOCABULARY, eos_tokens)[i]]
        ] = -np.inf
        token = sampler.draw(probs, logits, TARGET_NOISE, len(tokens))
        if token in eos_tokens:
            return tokens[len(PROMPT) :], eos_tokens[token]
        tokens.append(token)
        language = derive_all(language, VOCABULARY[token])
    return tokens[len(PROMPT) :], next(iter(eos_tokens.values()), "eos") if language == EMPTY_STRING else "max_tokens"


def make_drafters(target, draft, sampling, verify="coupled"):
    verifier = VERIFIERS[verify](105, sampling)
    drafters_by_name = {
        name: make_model_drafter(model, verifier, sampling) for name, model in (("model", draft), ("self", target))
    }
    return {"none": None, "lookup": LookupDrafter(END_MARKS), "everything": make_arbitrary_drafter(), **drafters_by_name}


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("language", LANGUAGES)
def test_output_equals_the_masked_targets_for_every_draft_and_gamma(language, sampling):
    target, draft = tiny_model(0, layers=3), tiny_model(1)
    constraint = make_constraint(LANGUAGES[language])
    expected, reason = generate_masked(target, LANGUAGES[language], sampling, 40)
    for name, drafter in make_drafters(target, draft, sampling).items():
        for gamma in (1, 2, 3, 5, 8):
            verifier = CoupledVerifier(105, sampling)
            events = decode(target.new_cache(), drafter, verifier, PROMPT, 40, FixedLength(gamma), constraint=constraint)
            tokens, statistics = collect(events)
            assert (tokens, statistics.stop_reason) == (expected, reason), (name, gamma)
            generated = b"".join([VOCABULARY[token] for token in tokens])
            assert is_nullable(derive_all(LANGUAGES[language], generated)) or reason == "max_tokens"


ENDING = {
    "forced": literal("abxyc"),
    "drawn and forced": concatenate(byte_class("abc"), literal("xyz a")),
    "proposed": repeat_exactly(7, byte_class("abc")),
    "either": union(literal("ab"), literal("c"), concatenate(byte_class("xyz"), byte_class("abc"))),
}


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("language", ENDING)
def test_a_complete_constraint_ends_the_output_of_a_model_without_eos_tokens(language, sampling):
    """It may be completed by forced tokens, within a proposal, and along the path of a tree."""
    target, draft, constraint = tiny_model(0, layers=3), tiny_model(1), make_constraint(ENDING[language], eos_tokens={})
    expected, reason = generate_masked(target, ENDING[language], sampling, 40, {})
    assert reason == "eos"
    for verify, make_verifier in VERIFIERS.items():
        noise = make_verifier(105, sampling).get_draft_stream
        tree = TreeDrafter(target.new_cache(), Sampler(105, sampling), noise, {})
        drafters_by_name = make_drafters(target, draft, sampling, verify) | ({"tree": tree} if verify != "block" else {})
        for (name, drafter), gamma in itertools.product(drafters_by_name.items(), (1, 3, 8)):
            events = decode(
                target.new_cache(), drafter, make_verifier(105, sampling), PROMPT, 40, FixedLength(gamma), {}, constraint
            )
            tokens, statistics = collect(events)
            assert statistics.stop_reason == "eos", (verify, name, gamma)
            assert derive_all(ENDING[language], b"".join([VOCABULARY[token] for token in tokens])) == EMPTY_STRING
            assert tokens == expected or verify != "coupled", (name, gamma)


@pytest.mark.parametrize("eos_tokens", [{}, END_MARKS], ids=["no eos tokens", "eos tokens"])
def test_logits_after_a_complete_constraint_are_not_checked(eos_tokens):
    """A draft must not cause an error on logits that a plain run never computes."""
    logits = np.zeros((5, 105), np.float32)
    logits[3:] = np.nan
    for language, proposed in ((literal("abc"), [3, 4, 5, 6]), (repeat_exactly(3, byte_class("abc")), [3, 3, 3, 6])):
        for make_verifier in VERIFIERS.values():
            grown = DecodingState(
                [*PROMPT], 9, 99, None, make_verifier(105, Sampling(0)), FixedLength(4), eos_tokens, make_constraint(language)
            )
            grown.draft = Draft(proposed)
            assert grown.verify(logits.copy())[:2] == (proposed[:3], 3)


def test_padding_rows_are_never_sampled():
    target = tiny_model(0, vocab=120)
    for seed in range(20):
        verifier, constraint = CoupledVerifier(120, Sampling(5.0, 0, 1.0, seed)), make_constraint(LANGUAGES["any"])
        tokens = get_tokens(decode(target.new_cache(), None, verifier, PROMPT, 20, FixedLength(1), constraint=constraint))
        assert all(VOCABULARY[token] for token in tokens)


@pytest.mark.parametrize("verify", VERIFIERS)
def test_forced_tokens_are_accepted_without_a_draft(verify):
    """The last step draws one of two end-of-sequence tokens after the forced tokens; it is not part of the output."""
    vocabulary = [b"", b"", b"", b"<", b"p", b"q", b"rs", b">", *[b""] * 97]
    language = concatenate(literal("<pqrs"), concatenate(repeat(concatenate(byte_class("pq"), literal("rs>"))), literal("<<<")))
    for seed in range(5):
        sampling = Sampling(1.0, 0, 1.0, seed)
        verifier = VERIFIERS[verify](105, sampling)
        constraint = make_constraint(language, vocabulary)
        steps = get_steps(decode(tiny_model(0).new_cache(), None, verifier, PROMPT, 30, FixedLength(4), constraint=constraint))
        assert steps[0].draft_tokens == [3, 4, 5, 6] and steps[0].n_accepted == 4
        assert all(step.n_accepted == len(step.draft_tokens) for step in steps)
        assert sum(step.n_accepted for step in steps) >= 6
        generated = b"".join([vocabulary[token] for step in steps for token in step.tokens])
        assert (derive_all(language, generated) == EMPTY_STRING) == (steps[-1].stop_reason == "bos")


def test_a_complete_constraint_ends_the_sequence_in_the_same_step():
    constraint = make_constraint(literal("abc"))
    for max_tokens in (3, 9):
        cache, verifier = tiny_model(0).new_cache(), CoupledVerifier(105, Sampling(seed=3))
        tokens, statistics = collect(decode(cache, None, verifier, PROMPT, max_tokens, FixedLength(1), constraint=constraint))
        assert b"".join([VOCABULARY[token] for token in tokens]) == b"abc"
        assert statistics.stop_reason == "bos" and statistics.n_generated == len(tokens)


def test_output_does_not_end_before_its_constraint_is_complete():
    """The target prefers an end-of-sequence token wherever one is allowed."""

    class EosCache(KVCache):
        def forward(self, tokens, n_logits=1):
            logits = super().forward(tokens, n_logits)
            logits[:, 2] = 99.0
            return logits

    cache, verifier = EosCache(tiny_model(0)), CoupledVerifier(105, Sampling(0))
    tokens, statistics = collect(decode(cache, None, verifier, PROMPT, 60, FixedLength(1), constraint=make_constraint(FREE)))
    assert is_nullable(derive_all(FREE, b"".join([VOCABULARY[token] for token in tokens])))
    assert statistics.stop_reason == "eos"


@pytest.mark.parametrize("verify", ["rejection", "block"])
@pytest.mark.parametrize("draft_kind", ["model", "unlikely"])
def test_output_follows_the_masked_targets_distribution(verify, draft_kind):
    """All outputs of up to 3 tokens of a constraint over 8, with the probabilities of the oracle; an eos token ends one early.

    Chi-square over 3,000 seeds, cells expected below 8 pooled; false alarm below 1e-6 per case, and the seeds are fixed.
    """
    vocabulary = [b"", b"", b"", b"a", b"b", b"ab", b"c", b"bb"]
    language = repeat(union(literal("ab"), literal("c"), literal("abb")))
    target, draft = (tiny_model(seed, vocab=8, seq_len=64, scale=0.05) for seed in (3, 4))
    tensors, prompt, expected = random_tensors(target.config, 3, 0.05), [1, 3], {}

    def enumerate_from(tokens, at, mass):
        if len(tokens) == 5 or at == EMPTY_STRING:
            expected[tuple(tokens[2:])] = mass
            return
        logits = reference.forward(target.config, tensors, tokens)[-1]
        logits = np.where(get_allowed(at, vocabulary, END_MARKS), logits, -np.inf)
        for token, p in enumerate(reference.probabilities(logits, 1.0, 0, 1.0)):
            if p > 0 and token in END_MARKS:
                expected[tuple(tokens[2:])] = expected.get(tuple(tokens[2:]), 0) + mass * p
            elif p > 0:
                enumerate_from([*tokens, token], derive_all(at, vocabulary[token]), mass * p)

    enumerate_from(prompt, language, 1.0)
    counts, n_runs, constraint, n_refused = {}, 3000, LanguageConstraint(language, vocabulary, END_MARKS), 0
    for seed in range(n_runs):
        sampling = Sampling(1.0, 0, 1.0, seed)
        verifier = VERIFIERS[verify](8, sampling)
        unlikely = FakeDrafter(lambda tokens, _: [4 if tokens[-1] == 3 else 3, 6])  # often not allowed
        drafter = make_model_drafter(draft, verifier, sampling) if draft_kind == "model" else unlikely
        tokens, statistics = collect(
            decode(target.new_cache(), drafter, verifier, prompt, 3, FixedLength(2), constraint=constraint)
        )
        counts[tuple(tokens)] = counts.get(tuple(tokens), 0) + 1
        n_refused += statistics.n_drafted - statistics.n_accepted
    assert n_refused > n_runs / 4
    reference.check_counts(counts, expected, 8)


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_trees_are_masked_along_their_paths(verify):
    sampling = Sampling(1.0, 0, 1.0, 5)
    target, draft = tiny_model(0, layers=3), tiny_model(1)
    verifier = VERIFIERS[verify](105, sampling)
    n_trees = 0
    for language in LANGUAGES.values():
        drafter = TreeDrafter(draft.new_cache(), Sampler(105, sampling), verifier.get_draft_stream, END_MARKS)
        constraint = make_constraint(language)
        steps = get_steps(decode(target.new_cache(), drafter, verifier, PROMPT, 40, FixedLength(6), constraint=constraint))
        tokens = get_tokens(steps)
        n_trees += sum(step.n_nodes > len(step.draft_tokens) for step in steps)
        generated = b"".join([VOCABULARY[token] for token in tokens])
        assert derive_all(language, generated) != ("nothing",)
        if verify == "coupled":
            assert tokens == generate_masked(target, language, sampling, 40)[0]
    assert n_trees > 3
