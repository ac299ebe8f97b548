"""Tests of logit processors: against their formulas, and that the output does not depend on the draft."""

import math
import random

import numpy as np
import pytest

from specdec import SpeculativeDecoder
from specdec.sampling import Sampler, Sampling
from specdec.text.logit_processors import LogitsProcessor
from specdec.verification import Draft

V = 50


def process_naively(logits, prompt, completion, s):
    """Process logits like vLLM, in float64, token by token."""
    out = [float(x) for x in logits]
    for token, bias in s.logit_bias:
        out[token] += bias
    for token in {*prompt, *completion}:
        out[token] = out[token] / s.repetition_penalty if out[token] > 0 else out[token] * s.repetition_penalty
        n = completion.count(token)
        out[token] -= s.frequency_penalty * n + s.presence_penalty * (n > 0)
    if s.min_p and s.temperature:
        max_logit = max(out)
        out = [x if math.exp((x - max_logit) / s.temperature) >= s.min_p else -math.inf for x in out]
    return np.array(out)


SETTINGS = {
    "min p": {"min_p": 0.1},
    "only the most likely": {"min_p": 1.0},
    "repetition": {"repetition_penalty": 3.0},
    "repetition below one": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.6},
    "negative penalties": {"presence_penalty": -0.5, "frequency_penalty": -0.2},
    "bias": {"logit_bias": {3: 5.0, 7: -100.0, 49: 0.5}},
    "all": {
        "min_p": 0.05, "repetition_penalty": 1.1, "presence_penalty": 0.4, "frequency_penalty": 0.3, "logit_bias": [(1, 2.0)],
    },
}  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 0.7, 2.0])
@pytest.mark.parametrize("name", SETTINGS)
def test_processed_logits_equal_the_formulas(name, temperature):
    """Covers chains and trees, each row by its path, and checks that the state is restored."""
    rng = random.Random(name)
    sampling = Sampling(temperature, **SETTINGS[name])
    for _ in range(10):
        prompt, completion = ([rng.randrange(V) for _ in range(rng.randint(1, 30))] for _ in range(2))
        processor = LogitsProcessor(sampling)
        for n in (0, 5, len(completion)):
            processor.update(prompt + completion[:n])
        draft = Draft([rng.randrange(V) for _ in range(5)], None, rng.choice([None, [-1, -1, 0, 0, 2]]))
        paths = [[], *([draft.tokens[i] for i in path] for path in (PATHS if draft.parents else CHAIN))]
        for _ in range(2):
            logits = np.array([[rng.gauss(0, 3) for _ in range(V)] for _ in range(6)], np.float32)
            expected = [
                process_naively(row, prompt, completion + path, sampling) for row, path in zip(logits, paths, strict=True)
            ]
            processor.apply_to_draft(logits, draft)
            np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


CHAIN = [[*range(i + 1)] for i in range(5)]
PATHS = [[0], [1], [0, 2], [0, 3], [0, 2, 4]]


def test_neutral_settings_need_no_processing():
    assert not Sampling().has_logit_adjustments
    assert not Sampling(logit_bias={}, repetition_penalty=1).has_logit_adjustments
    assert not Sampling(0.0, min_p=0.5).has_logit_adjustments  # greedy takes the most likely token anyway
    assert Sampling(min_p=0.5).has_logit_adjustments
    assert Sampling(min_p=1.0).has_logit_adjustments  # only the most likely token


def test_min_p_covers_only_ids_that_can_be_sampled():
    """A huge temperature drops nothing and raises no warning."""
    row = np.arange(V, dtype=np.float32)
    LogitsProcessor(Sampling(1.0, min_p=0.5), V - 10).apply(row)
    assert np.flatnonzero(np.isfinite(row)).tolist() == [*range(V - 11, V)]
    row = np.arange(V, dtype=np.float32)
    LogitsProcessor(Sampling(1e308, min_p=0.5)).apply(row)
    assert np.isfinite(row).all()


def test_non_finite_logits_stay_non_finite():
    for wrong in (np.nan, np.inf):
        row = np.full(V, 1.0, np.float32)
        row[3] = wrong
        processor = LogitsProcessor(Sampling(**SETTINGS["all"]))
        processor.update([1, 3, 3])
        processor.apply(row)
        assert not np.isfinite(row.max())
        sampler = Sampler(V, Sampling())
        assert sampler.draw(sampler.new_probs(), row, 0, 0) == -1


def test_tokens_beyond_a_short_row_are_ignored():
    processor = LogitsProcessor(Sampling(repetition_penalty=2.0, logit_bias={40: 1.0, 2: 1.0}))
    processor.update([45, 5, 2])
    row = np.full(10, 4.0, np.float32)
    assert processor.apply_to_copy(row, [9]).tolist() == [4, 4, 2.5, 4, 4, 2, 4, 4, 4, 2]
    assert (row == 4).all()


def test_incremental_counting_equals_counting_at_once():
    rng = random.Random(1)
    tokens = [rng.randrange(30_000) for _ in range(100_000)]
    sampling = Sampling(repetition_penalty=1.2, frequency_penalty=0.01)
    once, incremental = LogitsProcessor(sampling), LogitsProcessor(sampling)
    once.update(tokens[:10])
    once.update(tokens)
    for n in (10, 11, 500, 70_000, 100_000):
        incremental.update(tokens[:n])
    row = np.linspace(-5, 5, 32_000, dtype=np.float32)
    assert np.array_equal(once.apply_to_copy(row, [1, 2]), incremental.apply_to_copy(row, [1, 2]))
    assert np.array_equal(once.apply_to_copy(row, []), incremental.apply_to_copy(row, []))


@pytest.fixture(scope="module")
def decoders_by_draft(pair):
    """Return the target without a draft, and decoders with every kind of draft."""
    kinds = (
        (4, "off", pair.draft, None), (5, "on", pair.draft, None), (4, "off", "lookup", None), ("auto", "off", "self", None),
        (3, "off", pair.draft, "lookup"),
    )  # fmt: skip
    decoders = [
        SpeculativeDecoder(pair.target, draft, pair.tokenizer, gamma=gamma, tree=tree, stage=stage)
        for gamma, tree, draft, stage in kinds
    ]
    return SpeculativeDecoder(pair.target, None, pair.tokenizer), dict(zip(kinds, decoders, strict=True))


def generate_tokens(decoder, sampling, **options):
    return decoder.generate("abc abd abc abd abc ab", 60, sampling, **options).tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", SETTINGS)
def test_output_is_the_same_with_any_draft(decoders_by_draft, name, temperature):
    bias = SETTINGS[name].get("logit_bias")
    settings = SETTINGS[name] | ({"logit_bias": {270: 3.0, 265: -100.0}} if bias else {})
    sampling = Sampling(temperature, seed=3, **settings)
    plain, decoders = decoders_by_draft
    expected = generate_tokens(plain, sampling)
    differs = expected != generate_tokens(plain, Sampling(temperature, seed=3))
    assert differs or name in ("min p", "repetition below one", "only the most likely")
    for kind, decoder in decoders.items():
        assert generate_tokens(decoder, sampling) == expected, kind


def test_drafts_use_the_same_processing(pair):
    """A copy of the target is accepted as often with every penalty as without."""
    sampling = Sampling(1.0, seed=5, top_p=1.0, repetition_penalty=1.3, presence_penalty=1.0, frequency_penalty=0.5, min_p=0.01)
    copy = SpeculativeDecoder(SpeculativeDecoder(pair.target, None, pair.tokenizer).target, pair.target, pair.tokenizer, gamma=4)
    for tree in ("off", "on"):
        copy.tree = tree
        statistics = copy.generate("abc abd abc", 100, sampling).statistics
        assert statistics.acceptance_rate > 0.9 if tree == "off" else statistics.tokens_per_pass > 4


@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_other_verifiers_use_processed_logits(pair, verify):
    """A token that a bias excludes is never sampled, one that it forces always."""
    decoder = SpeculativeDecoder(pair.target, pair.draft, pair.tokenizer, gamma=3, verify=verify)
    banned = dict.fromkeys(range(260, 300, 2), -100.0)
    tokens = generate_tokens(decoder, Sampling(2.0, 0, 1.0, 1, logit_bias=banned))
    assert tokens and not {*tokens} & {*banned}
    assert {*generate_tokens(decoder, Sampling(1.0, seed=1, logit_bias={271: 100.0}))} == {271}


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
def test_a_wrong_setting_is_rejected_by_name(name, wrong, error):
    with pytest.raises(error, match=name):
        Sampling(**{name: wrong})


def test_a_bias_for_an_unknown_token_is_rejected(pair):
    decoder = SpeculativeDecoder(pair.target, None, pair.tokenizer)
    with pytest.raises(ValueError, match=f"logit_bias holds the id 100000; expected ids from 0 to {decoder.n_ids - 1}"):
        decoder.generate("abc", 5, Sampling(logit_bias={100_000: 1.0}))
