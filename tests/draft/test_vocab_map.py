"""Drafts with another vocabulary: proposals, output and distributions use the target's ids."""

import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specdec import SpeculativeDecoder
from specdec.draft.model_bundle import DraftSource
from specdec.draft.vocab_map import VocabMappedModel, VocabMapper
from specdec.events import Proposal
from specdec.loaders.model_loader import load_model
from specdec.model.llama import LLAMA
from specdec.model.model import Model
from specdec.model_config import ModelConfig
from specdec.sampling import Sampling
from specdec.text.tokenizer_lookup import SharedVocabulary
from tests.conftest import Pair
from tests.tools import reference
from tests.tools.checkpoint_files import random_tensors
from tests.tools.decode import SAMPLINGS, generate_tokens, get_tokens, make_model_drafter
from tests.tools.model_folders import make_folder
from tests.tools.random_models import tiny_model
from tests.tools.staged_runs import events_of, run_staged, run_unstaged
from tests.tools.verification_tables import Table, generate_with_seeds


def make_partial(model, n_rows, n_ids, seed=0):
    """Return the model with n_rows of its rows in another order, some of them unknown to a target of n_ids."""
    order = np.random.default_rng(seed).permutation(n_rows)
    return VocabMappedModel(model, [int(token) if token < n_ids else -1 for token in order], n_ids)


def make_reordered(seed=0, kept=105):
    """Return a model, and the same one with only its first `kept` tokens, in another order."""
    model, tensors = tiny_model(seed), random_tensors(ModelConfig(40, 50, 2, 5, 1, 105, 128), seed)
    order = np.random.default_rng(seed).permutation(105)[:kept]
    config, tensors["tok_emb"] = replace(model.config, vocab_size=kept), tensors["tok_emb"][order]
    other = Model(config, LLAMA.plan_weights(config, tensors).pack(), 1)
    return model, VocabMappedModel(other, order.tolist(), 105), order


def test_a_model_with_reordered_tokens_has_the_same_logits():
    caches, tokens = [model.new_cache() for model in make_reordered()[:2]], [1, 7, 104, 0, 9]
    model, other = caches
    assert np.array_equal(model.forward(tokens, 5), other.forward(tokens, 5))
    assert np.array_equal(model.forward_tree(tokens, [8, 9, 4], [-1, -1, 0]), other.forward_tree(tokens, [8, 9, 4], [-1, -1, 0]))
    assert other.model.vocab_size == 105 and other.model.vocab_mapper.n_shared == 105
    assert other.count_prefill_tokens([*tokens, 8, 3]) == model.count_prefill_tokens([*tokens, 8, 3]) > 0


def test_a_draft_never_proposes_a_token_without_a_row():
    model, other, order = make_reordered(kept=60)
    model, other = model.new_cache(), other.new_cache()
    known = [int(token) for token in order if token != order[0]][:4]
    logits, full = other.forward(known)[0], model.forward(known)[0]
    assert np.array_equal(logits[order], full[order])
    assert {*np.flatnonzero(np.isneginf(logits))} == {*range(105)} - {*order.tolist()}
    unknown = next(token for token in range(105) if token not in order)
    assert np.array_equal(other.forward([*known, unknown]), other.forward([*known, int(order[0])]))
    for missing in (105, -1):
        with pytest.raises(ValueError, match=rf"^tokens hold {missing}; expected 0 to 104"):
            other.forward([1, missing])


def test_rows_without_a_target_id_are_left_out():
    by_target = VocabMapper([3, -1, 0], 5)
    one = by_target(np.array([[1.0, 2.0, 3.0, 9.0]], np.float32))
    assert one.tolist() == [[3.0, -np.inf, -np.inf, 1.0, -np.inf]] and by_target.n_shared == 2
    assert by_target(np.arange(8, dtype=np.float32).reshape(2, 4))[:, [0, 3]].tolist() == [[2.0, 0.0], [6.0, 4.0]]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_noise_depends_on_the_targets_ids(sampling):
    """All tokens that the same model proposes in another order are accepted, for chains and trees."""
    model, other, _ = make_reordered()
    n_drafted = n_missed = 0
    for prompt in ([1, token, 9] for token in range(3, 9)):
        plain, _ = generate_tokens(model, None, sampling, prompt=prompt)
        sequence, statistics = generate_tokens(model, other, sampling, prompt=prompt)
        assert sequence == plain
        n_drafted, n_missed = n_drafted + statistics.n_drafted, n_missed + statistics.n_drafted - statistics.n_accepted
        grown = [events_of(model, draft, sampling, 4, prompt=prompt) for draft in (tiny_model(0), other)]
        assert get_tokens(grown[0]) == get_tokens(grown[1]) == plain
        trees = [[event.tree for event in events if isinstance(event, Proposal)] for events in grown]
        assert trees[0] == trees[1]
    assert n_drafted > 40 and n_missed < 6 * 4  # proposed after an end-of-sequence token


@pytest.mark.parametrize(("n_pairs", "min_tokens"), [(12, 400), pytest.param(450, 20_000, marks=pytest.mark.campaign)])
def test_a_draft_with_a_part_of_the_vocabulary_changes_no_output(n_pairs, min_tokens):
    n = 0
    for case in range(n_pairs):
        rng = np.random.default_rng(case)
        n_rows = int(rng.choice([20, 105, 131]))
        draft = make_partial(tiny_model(case + 1, n_rows, 128, int(rng.choice([24, 128]))), n_rows, 105, case)
        target, gamma = tiny_model(case, layers=3), int(rng.choice([1, 4, 63]))
        sampling = Sampling(*[(0.0, 0, 0.0), (1.0, 0, 0.9), (0.7, 20, 0.95), (1.5, 0, 1.0)][case % 4], case)
        prompt = rng.integers(3, 105, int(rng.choice([1, 5, 60]))).tolist()
        plain, _ = generate_tokens(target, None, sampling, prompt=prompt, max_tokens=128)
        assert generate_tokens(target, draft, sampling, gamma, prompt=prompt, max_tokens=128)[0] == plain
        n += len(plain)
    assert n > min_tokens


class PartialTable(Table):
    """A table of some of the target's tokens, in another order."""

    def __init__(self, probs, target_ids, n_ids):
        super().__init__(probs)
        self.vocab_size, self.vocab_mapper = n_ids, VocabMapper(target_ids, n_ids)
        self.rows = {token: row for row, token in enumerate(target_ids)}

    def forward(self, tokens, n_logits=1):
        return self.vocab_mapper(super().forward([self.rows.get(token, 0) for token in tokens], n_logits))


@pytest.mark.parametrize("verify", ["rejection", "block"])
@pytest.mark.parametrize("n_runs", [1_500, pytest.param(20_000, marks=pytest.mark.campaign)])
def test_a_draft_with_two_of_three_tokens_keeps_the_targets_distribution(verify, n_runs):
    """Chi-square of 9 sequences of two tokens, false alarm below 1e-6 per case; the seeds are fixed."""
    target = Table([[0.5, 0.2, 0.3], [0.3, 0.3, 0.4], [0.2, 0.6, 0.2]])
    draft = PartialTable([[0.7, 0.3], [0.4, 0.6]], [2, 0], 3)
    counts = Counter(generate_with_seeds(target, draft, verify, n_runs, 2, 3, [0]))
    reference.check_counts(counts, target.expect(2))


@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
def test_a_stage_with_another_vocabulary_changes_no_proposal(sampling):
    """Check a draft with the target's vocabulary, one with a part of it, and a stage with another part."""
    target, one, other = tiny_model(3), make_partial(tiny_model(4, 70), 70, 105), make_partial(tiny_model(5, 40), 40, 105)
    for draft, stage in ((one, other), (tiny_model(4), other), (one, tiny_model(5))):

        def make_second_level(verifier, cache):
            return make_model_drafter(cache, verifier, sampling)

        for n in (1, 5, 30):
            prompt = [7] * n
            expected = run_unstaged(target, draft, sampling, "coupled", 4, prompt)
            assert (
                run_staged(draft, make_second_level, sampling, target=target, prompt=prompt, models=[stage], max_guesses=3)
                == expected
            )


def test_a_pickled_draft_makes_the_same_proposals():
    _, draft, _ = make_reordered(kept=60)
    copy = pickle.loads(pickle.dumps(draft))
    assert isinstance(copy, VocabMappedModel) and copy.vocab_mapper.n_shared == 60
    expected = draft.new_cache().forward([1, 2, 3])
    assert np.array_equal(copy.new_cache().forward([1, 2, 3]), expected)
    longer = draft.with_capacity(60)
    assert isinstance(longer, VocabMappedModel) and longer.n_positions == 60
    assert np.array_equal(longer.new_cache().forward([1, 2, 3]), expected)


def test_a_pickled_decoder_keeps_the_meaning_of_draft_ids(pair: Pair, tmp_path: Path) -> None:
    """Also if the draft has fewer rows, or as many but other ones."""
    source = make_folder(tmp_path / "target")
    for name in ("smollm2", "gpt2"):
        other = make_folder(tmp_path / name, tokenizer=name, seed=1)
        decoder = SpeculativeDecoder(source, other, gamma=3, n_threads=1)
        copy = pickle.loads(pickle.dumps(decoder))
        assert copy.bundle.draft.vocabulary == decoder.bundle.draft.vocabulary and copy.shared == decoder.shared
        one, two = (each.generate("the robin", 30, temperature=0) for each in (decoder, copy))
        assert (one.tokens, one.statistics.n_accepted) == (two.tokens, two.statistics.n_accepted)
    target, draft = load_model(pair.target), load_model(pair.draft)
    fewer = DraftSource(draft, SharedVocabulary(300, 60))  # ids from 60 on differ
    decoder = SpeculativeDecoder(target, fewer, pair.tokenizer, gamma=3)  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(decoder)).bundle.draft.vocabulary == fewer.vocabulary
