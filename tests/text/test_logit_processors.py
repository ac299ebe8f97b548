"""Samplers that the text so far has a say in: by their formulas, and the text the target's own whatever drafts."""

import math
import random

import numpy as np
import pytest

from specdec import SpeculativeDecoder
from specdec.sampling import Sampler, Sampling
from specdec.text.logit_processors import Adjusted, Adjusting, adjusted
from specdec.verification import Draft

V = 50


def oracle(logits, prompt, text, s):
    """As vLLM has it, in float64, token by token."""
    out = [float(x) for x in logits]
    for token, bias in s.logit_bias:
        out[token] += bias
    for token in {*prompt, *text}:
        out[token] = out[token] / s.repetition_penalty if out[token] > 0 else out[token] * s.repetition_penalty
        n = text.count(token)
        out[token] -= s.frequency_penalty * n + s.presence_penalty * (n > 0)
    if s.min_p and s.temperature:
        most = max(out)
        out = [x if math.exp((x - most) / s.temperature) >= s.min_p else -math.inf for x in out]
    return np.array(out)


ASKED = {
    "min p": {"min_p": 0.1},
    "the likeliest alone": {"min_p": 1.0},
    "repetition": {"repetition_penalty": 3.0},
    "less than one": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.6},
    "below nothing": {"presence_penalty": -0.5, "frequency_penalty": -0.2},
    "a bias": {"logit_bias": {3: 5.0, 7: -100.0, 49: 0.5}},
    "all": {
        "min_p": 0.05, "repetition_penalty": 1.1, "presence_penalty": 0.4, "frequency_penalty": 0.3, "logit_bias": [(1, 2.0)],
    },
}  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 0.7, 2.0])
@pytest.mark.parametrize("name", ASKED)
def test_logits_are_those_of_the_formulas(name, temperature):
    """Of chains and of trees: each row by the path that leads to it, and what was there before is there again."""
    rng = random.Random(name)
    sampling = Sampling(temperature, **ASKED[name])
    for _ in range(10):
        prompt, text = ([rng.randrange(V) for _ in range(rng.randint(1, 30))] for _ in range(2))
        walk = Adjusted(None, sampling).begin(prompt)
        walk.takes(text[:5])
        walk.takes(text[5:])
        draft = Draft([rng.randrange(V) for _ in range(5)], None, rng.choice([None, [-1, -1, 0, 0, 2]]))
        paths = [[], *([draft.tokens[i] for i in path] for path in (PATHS if draft.parents else CHAIN))]
        for _ in range(2):
            logits = np.array([[rng.gauss(0, 3) for _ in range(V)] for _ in range(6)], np.float32)
            expected = [oracle(row, prompt, text + path, sampling) for row, path in zip(logits, paths, strict=True)]
            walk.mask(logits, draft)
            np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


CHAIN = [[*range(i + 1)] for i in range(5)]
PATHS = [[0], [1], [0, 2], [0, 3], [0, 2, 4]]


def test_nothing_that_is_asked_for_costs_nothing():
    shape = object()
    assert adjusted(shape, Sampling()) is shape and adjusted(None, Sampling(logit_bias={}, repetition_penalty=1)) is None
    assert adjusted(None, Sampling(0.0, min_p=0.5)) is None  # greedy is the likeliest anyway
    assert isinstance(adjusted(None, Sampling(min_p=0.5)), Adjusted)
    assert isinstance(adjusted(None, Sampling(min_p=1.0)), Adjusted)  # the likeliest alone


def test_min_p_is_of_the_ids_that_are_drawn_at_any_temperature():
    """Not of rows behind them; and a temperature beyond all floats leaves out nothing, without a warning."""
    row = np.arange(V, dtype=np.float32)
    Adjusting(Sampling(1.0, min_p=0.5), V - 10).adjust(row)
    assert np.flatnonzero(np.isfinite(row)).tolist() == [*range(V - 11, V)]
    row = np.arange(V, dtype=np.float32)
    Adjusting(Sampling(1e308, min_p=0.5)).adjust(row)
    assert np.isfinite(row).all()


def test_logits_that_are_not_finite_stay_so():
    for wrong in (np.nan, np.inf):
        row = np.full(V, 1.0, np.float32)
        row[3] = wrong
        adjusting = Adjusting(Sampling(**ASKED["all"]))
        adjusting.follow([1, 3, 3])
        adjusting.adjust(row)
        assert not np.isfinite(row.max())
        sampler = Sampler(V, Sampling())
        assert sampler.draw(sampler.new_probs(), row, 0, 0) == -1


def test_a_row_of_fewer_tokens_than_the_text_has_is_adjusted_as_far_as_it_goes():
    adjusting = Adjusting(Sampling(repetition_penalty=2.0, logit_bias={40: 1.0, 2: 1.0}))
    adjusting.follow([45, 5, 2])
    row = np.full(10, 4.0, np.float32)
    assert adjusting.adjusted(row, [9]).tolist() == [4, 4, 2.5, 4, 4, 2, 4, 4, 4, 2]
    assert (row == 4).all()


def test_a_text_of_a_hundred_thousand_tokens_is_counted_once():
    rng = random.Random(1)
    tokens = [rng.randrange(30_000) for _ in range(100_000)]
    sampling = Sampling(repetition_penalty=1.2, frequency_penalty=0.01)
    once, bit_by_bit = Adjusting(sampling), Adjusting(sampling)
    once.follow(tokens[:10])
    once.follow(tokens)
    for n in (10, 11, 500, 70_000, 100_000):
        bit_by_bit.follow(tokens[:n])
    row = np.linspace(-5, 5, 32_000, dtype=np.float32)
    assert np.array_equal(once.adjusted(row, [1, 2]), bit_by_bit.adjusted(row, [1, 2]))
    assert np.array_equal(once.adjusted(row, []), bit_by_bit.adjusted(row, []))


@pytest.fixture(scope="module")
def drafted(pair):
    """The target alone, and with drafts of every kind."""
    kinds = (
        (4, "off", pair.draft, None), (5, "on", pair.draft, None), (4, "off", "ngram", None), ("auto", "off", "self", None),
        (3, "off", pair.draft, "ngram"),
    )  # fmt: skip
    decoders = [
        SpeculativeDecoder(pair.target, draft, pair.tokenizer, gamma=gamma, tree=tree, stage=stage)
        for gamma, tree, draft, stage in kinds
    ]
    return SpeculativeDecoder(pair.target, None, pair.tokenizer), dict(zip(kinds, decoders, strict=True))


def text_of(decoder, sampling, **more):
    return decoder.generate("abc abd abc abd abc ab", 60, sampling, **more).tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ASKED)
def test_the_text_is_the_targets_own_whatever_drafts(drafted, name, temperature):
    bias = ASKED[name].get("logit_bias")
    asked = ASKED[name] | ({"logit_bias": {270: 3.0, 265: -100.0}} if bias else {})
    sampling = Sampling(temperature, seed=3, **asked)
    plain, decoders = drafted
    expected = text_of(plain, sampling)
    is_other = expected != text_of(plain, Sampling(temperature, seed=3))
    assert is_other or name in ("min p", "less than one", "the likeliest alone")
    for kind, decoder in decoders.items():
        assert text_of(decoder, sampling) == expected, kind


def test_drafts_are_drawn_alike(pair):
    """A copy of the target guesses right as often with every penalty as without."""
    sampling = Sampling(1.0, seed=5, top_p=1.0, repetition_penalty=1.3, presence_penalty=1.0, frequency_penalty=0.5, min_p=0.01)
    copy = SpeculativeDecoder(SpeculativeDecoder(pair.target, None, pair.tokenizer).target, pair.target, pair.tokenizer, gamma=4)
    for tree in ("off", "on"):
        copy.tree = tree
        statistics = copy.generate("abc abd abc", 100, sampling).statistics
        assert statistics.acceptance_rate > 0.9 if tree == "off" else statistics.tokens_per_pass > 4


@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_verification_that_draws_anew_judges_adjusted_drafts(pair, verify):
    """A token that a bias rules out is never written, and one that it forces always."""
    decoder = SpeculativeDecoder(pair.target, pair.draft, pair.tokenizer, gamma=3, verify=verify)
    banned = dict.fromkeys(range(260, 300, 2), -100.0)
    tokens = text_of(decoder, Sampling(2.0, 0, 1.0, 1, logit_bias=banned))
    assert tokens and not {*tokens} & {*banned}
    assert {*text_of(decoder, Sampling(1.0, seed=1, logit_bias={271: 100.0}))} == {271}


@pytest.mark.parametrize(
    ("name", "wrong", "error"),
    [
        ("min_p", 1.5, ValueError), ("min_p", -0.1, ValueError), ("min_p", "a", TypeError), ("min_p", True, TypeError),
        ("repetition_penalty", 0, ValueError), ("repetition_penalty", math.nan, ValueError),
        ("repetition_penalty", 101, ValueError), ("presence_penalty", math.inf, ValueError),
        ("presence_penalty", -101, ValueError), ("frequency_penalty", None, TypeError), ("logit_bias", {-1: 1.0}, ValueError),
        ("logit_bias", {1: 101.0}, ValueError), ("logit_bias", {"a": 1.0}, TypeError), ("logit_bias", 5, TypeError),
        ("logit_bias", [(1, 2, 3)], TypeError), ("logit_bias", {1: "x"}, TypeError),
    ],
)  # fmt: skip
def test_what_is_no_number_of_its_kind_is_refused(name, wrong, error):
    with pytest.raises(error, match=name):
        Sampling(**{name: wrong})


def test_a_bias_of_a_token_that_there_is_not_is_refused(pair):
    decoder = SpeculativeDecoder(pair.target, None, pair.tokenizer)
    with pytest.raises(ValueError, match=f"logit_bias holds the id 100000; expected ids from 0 to {decoder.n_ids - 1}"):
        decoder.generate("abc", 5, Sampling(logit_bias={100_000: 1.0}))
