"""Trimmed classifiers of drafts: their logits, their candidates, and that the output does not depend on them."""

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from specdec import SpeculativeDecoder
from specdec.draft.draft_length import FixedLength
from specdec.draft.model_bundle import DraftSource, ModelBundle
from specdec.draft.model_drafters import ModelDrafter
from specdec.draft.tree import TreeDrafter
from specdec.events import Statistics
from specdec.heads.head import Head
from specdec.heads.mtp import MTP
from specdec.model import kv_cache, trimmed_classifier
from specdec.model.llama import LLAMA
from specdec.model.model import Model
from specdec.model.trimmed_classifier import MAX_RECENT_PANELS, N_FREQUENT_TOKENS
from specdec.model_config import ModelConfig
from specdec.quant import DRAFT_INT4, FP32, INT8
from specdec.runtime.simd import PANEL_ROWS
from specdec.sampling import Sampler, Sampling
from specdec.text.tokenizer_lookup import SharedVocabulary
from specdec.tokenizer import BOS
from specdec.ui.plain_views import print_summary
from specdec.verification import VERIFIERS
from tests.tools.checkpoint_files import random_tensors
from tests.tools.decode import collect, decode
from tests.tools.random_heads import random_head

VOCAB_SIZE, EOS_TOKEN, RARE_TOKEN = 66_000, 65_990, 50_000
END_MARKS = {EOS_TOKEN: "eos"}
TOKENS = [1, RARE_TOKEN, 9, 40_000, *range(100, 140)]


def make_model(weight_format=FP32, seed=0, n_positions=512):
    """Return a model that seldom generates tokens above N_FREQUENT_TOKENS."""
    config = ModelConfig(64, 64, 1, 4, 2, VOCAB_SIZE, n_positions)
    tensors = random_tensors(config, seed)
    tensors["tok_emb"][N_FREQUENT_TOKENS:] *= 0.85
    return Model(config, LLAMA.plan_weights(config, tensors, weight_format).pack(), 1)


def find_panel(token):
    """Return the tokens of a panel of the classifier."""
    return slice(token // PANEL_ROWS * PANEL_ROWS, (token // PANEL_ROWS + 1) * PANEL_ROWS)


def check_candidates(logits, full, tokens):
    """Assert that logits are those of the model for frequent tokens and the panels of the given ones, and -inf for others."""
    expected = np.full_like(full, -np.inf)
    for part in (slice(N_FREQUENT_TOKENS), *map(find_panel, tokens)):
        expected[:, part] = full[:, part]
    assert np.array_equal(logits, expected)


@pytest.mark.parametrize("weight_format", [FP32, INT8, DRAFT_INT4])
def test_candidates_have_the_logits_of_the_model_and_others_none(weight_format):
    model = make_model(weight_format)
    full, cache = model.new_cache(), model.new_cache()
    classifier = cache.trim_classifier([EOS_TOKEN])
    classifier.update(TOKENS)
    candidates = [EOS_TOKEN, RARE_TOKEN, 40_000]
    check_candidates(cache.forward(TOKENS, 3).copy(), full.forward(TOKENS, 3), candidates)
    arguments = TOKENS, [5, 6, 7], [-1, -1, 0]
    check_candidates(cache.forward_tree(*arguments).copy(), full.forward_tree(*arguments), candidates)
    longer = [*TOKENS, *range(200)]  # longer than the buffers of a new cache
    check_candidates(cache.forward(longer).copy(), full.forward(longer), candidates)


def test_a_head_has_the_logits_of_candidates():
    target = make_model()
    config, tensors, _ = random_head(target.config, architecture="mtp", target_layers=(1,))
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape).astype(np.float32) * 0.3 for name, shape in MTP.shapes(config).items()}
    head = Head(config, MTP.plan_weights(config, tensors).pack(), target, None, 1, 512)
    caches = []
    for _ in range(2):
        target_cache = target.new_cache(head.target_layers)
        target_cache.forward(TOKENS[:-1])
        caches.append(head.new_draft_cache(target_cache))
    full, cache = caches
    cache.trim_classifier([EOS_TOKEN]).update(TOKENS)
    for n in range(3):  # from the target's hidden states, then from the head's own output
        tokens = [*TOKENS, *range(n)]
        check_candidates(cache.forward(tokens).copy(), full.forward(tokens), [EOS_TOKEN, RARE_TOKEN, 40_000])


def test_candidates_that_were_not_used_for_longest_make_room_except_the_end_of_sequence():
    cache = make_model().new_cache()
    classifier = cache.trim_classifier([EOS_TOKEN])
    rare = [N_FREQUENT_TOKENS + PANEL_ROWS * i for i in range(MAX_RECENT_PANELS)]
    classifier.update([1] * 900)
    classifier.add(rare)
    classifier.add(rare[1:2])
    classifier.update([1] * 900 + [RARE_TOKEN, VOCAB_SIZE + 100, 3])
    allowed = np.flatnonzero(np.isfinite(cache.forward([1, 2])[0]))
    panels = {*(allowed[allowed >= N_FREQUENT_TOKENS] // PANEL_ROWS).tolist()}
    assert panels == {token // PANEL_ROWS for token in [rare[1], *rare[3:], EOS_TOKEN, RARE_TOKEN]}


def test_all_tokens_have_logits_while_too_few_of_the_sequence_were_candidates():
    cache = make_model().new_cache()
    classifier = cache.trim_classifier([EOS_TOKEN])
    tokens, results = [], []
    for new in ([7] * 90 + [35_000] * 10, [*range(40_000, 60_000, 1000)], [*range(300)]):
        tokens += new
        classifier.update(tokens)
        results.append((classifier.is_active, bool(np.isfinite(cache.forward([1, 2])).all())))
    assert results == [(True, False), (False, True), (True, False)]


def test_small_vocabularies_and_classifiers_with_biases_are_not_trimmed():
    config = ModelConfig(64, 64, 1, 4, 2, 64_000, 64)
    small = Model(config, LLAMA.plan_weights(config, random_tensors(config, 0)).pack(), 1)
    config = replace(config, vocab_size=VOCAB_SIZE, classifier_bias=True)
    biased = Model(config, LLAMA.plan_weights(config, random_tensors(config, 0)).pack(), 1)
    for model in (small, biased):
        assert model.new_cache().trim_classifier([]) is None


def test_a_sequence_needs_memory_for_the_copied_panels(pair):
    target, draft, vocabulary = make_model(), make_model(INT8), SharedVocabulary(VOCAB_SIZE, VOCAB_SIZE)
    bundle = ModelBundle(target, DraftSource(draft, vocabulary), DraftSource(None, vocabulary), pair.tokenizer)
    in_caches = sum(model.get_sequence_bytes(100, True) for model in (target, draft))
    assert bundle.get_sequence_bytes(100) - in_caches == draft.new_cache().trim_classifier([])._recent_panels.nbytes > 0


def decode_tokens(target, draft_cache, sampling, gamma, drafter_class=ModelDrafter, verify="coupled", can_trim=True):
    """Return the tokens that a target generates with a draft, or alone."""
    verifier = VERIFIERS[verify](VOCAB_SIZE, sampling)
    drafter = None
    if draft_cache:
        sampler = Sampler(VOCAB_SIZE, sampling)
        drafter = drafter_class(draft_cache, sampler, verifier.get_draft_stream, [*END_MARKS], can_trim)
    events = decode(target.new_cache(), drafter, verifier, [*TOKENS, *range(200)], 60, FixedLength(gamma), END_MARKS)
    return collect(events)[0]


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.2])
def test_the_output_is_the_targets_own_with_a_trimmed_draft(temperature):
    """The draft is a copy of the target in fewer bits; a part of the output is no candidate."""
    target = make_model()
    cache = Model(target.config, target.weights.convert(INT8), 1).new_cache()
    sampling = Sampling(temperature, 0, 1.0, seed=3)
    alone = decode_tokens(target, None, sampling, 1)
    assert max(alone) > N_FREQUENT_TOKENS
    for gamma, drafter_class in ((1, ModelDrafter), (7, ModelDrafter), (3, TreeDrafter)):
        assert decode_tokens(target, cache, sampling, gamma, drafter_class) == alone
        assert cache.active_classifier


def test_runner_ups_of_the_target_become_candidates():
    model = make_model()
    cache = model.new_cache()
    drafter = ModelDrafter(cache, Sampler(VOCAB_SIZE, Sampling()), lambda _: 0, [])
    logits = np.zeros((2, VOCAB_SIZE), np.float32)
    logits[:, [5, 6, 7, RARE_TOKEN]], logits[1, 40_000] = 1.0, 2.0
    drafter.observe(logits, [0], 1)
    assert np.isfinite(cache.forward([1, 2])[0, [RARE_TOKEN, 40_000]]).tolist() == [True, False]
    drafter.observe(logits, [0, 1], 1)
    assert np.isfinite(cache.forward([1, 2])[0, [RARE_TOKEN, 40_000]]).all()


def test_a_later_drafter_of_the_same_cache_may_use_all_tokens_again():
    cache = make_model().new_cache()
    arguments = cache, Sampler(VOCAB_SIZE, Sampling()), lambda _: 0, []
    ModelDrafter(*arguments)
    assert not np.isfinite(cache.forward([1, 2])).all()
    ModelDrafter(*arguments, can_trim=False)
    assert np.isfinite(cache.forward([1, 2])).all()


@pytest.mark.parametrize(("verify", "is_trimmed"), [("coupled", True), ("rejection", False), ("block", False)])
def test_only_coupled_drafts_are_trimmed_and_report_their_candidates(pair, monkeypatch, verify, is_trimmed):
    """Other verifiers' outputs depend on the distribution from which a draft is drawn."""
    monkeypatch.setattr(kv_cache, "MIN_TRIMMED_ROWS", 0)
    monkeypatch.setattr(trimmed_classifier, "N_FREQUENT_TOKENS", PANEL_ROWS)
    monkeypatch.setattr(trimmed_classifier, "MIN_COVERAGE", 0)
    decoder = SpeculativeDecoder(pair.endless, pair.draft, pair.tokenizer, n_threads=1, gamma=3, verify=verify)
    statistics = Statistics()
    for event in decoder.stream([BOS, 5, 6], 30, temperature=1.0):
        statistics.add(event)
    assert (statistics.coverage is not None) == is_trimmed
    console = Console(file=io.StringIO(), width=80)
    print_summary(console, statistics)
    assert ("candidates of the draft" in console.file.getvalue()) == is_trimmed
