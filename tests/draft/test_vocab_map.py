"""Drafts whose rows are other ids than the target's: proposals, texts and distributions are by the target's ids."""

import itertools
import math
import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specdec import SpeculativeDecoder
from specdec.config import Config
from specdec.draft.model import ModelDrafter
from specdec.draft.resolver import Origin
from specdec.draft.vocab_map import ByTargetIds, Translated
from specdec.engine.decoding import Proposal
from specdec.loaders.loader import load_model
from specdec.model.llama import LLAMA
from specdec.model.transformer import Transformer
from specdec.sampling import Sampler, Sampling
from specdec.text.vocabulary import Vocabulary
from tests.conftest import Pair
from tests.draft.test_staged import staged, unstaged
from tests.draft.test_tree import events_of, tokens_of
from tests.test_block_verification import Table, rounds_of
from tests.test_end_to_end import folder
from tests.tools import reference
from tests.tools.checkpoint_files import random_tensors
from tests.tools.random_models import END_MARKS, continuation, tiny_model

SAMPLINGS = [Sampling(0.0, seed=1), Sampling(1.0, seed=2), Sampling(0.7, 20, 0.95, 3), Sampling(1.5, 0, 1.0, 4)]


def partial(model, n_rows, n_ids, seed=0):
    """That model with so many of its rows, in another order, some of which the target does not have, of a target of n_ids."""
    order = np.random.default_rng(seed).permutation(n_rows)
    return Translated(model, [int(token) if token < n_ids else -1 for token in order], n_ids)


def reordered(seed=0, kept=105):
    """A model, and the same one with its first `kept` tokens alone, in another order."""
    model, tensors = tiny_model(seed), random_tensors(Config(40, 50, 2, 5, 1, 105, 128), seed)
    order = np.random.default_rng(seed).permutation(105)[:kept]
    config, tensors["tok_emb"] = replace(model.config, vocab_size=kept), tensors["tok_emb"][order]
    other = Transformer(config, LLAMA.pack(config, tensors), 1)
    return model, Translated(other, order.tolist(), 105), order


def test_a_model_whose_tokens_are_in_another_order_says_the_same_to_the_bit():
    model, other, _ = reordered()
    tokens = [1, 7, 104, 0, 9]
    assert np.array_equal(model.forward(tokens, 5), other.forward(tokens, 5))
    assert np.array_equal(model.forward_tree(tokens, [8, 9, 4], [-1, -1, 0]), other.forward_tree(tokens, [8, 9, 4], [-1, -1, 0]))
    assert other.config.vocab_size == 105 and other.by_target.n_shared == 105
    assert other.unread([*tokens, 8, 3]) == model.unread([*tokens, 8, 3])
    assert list(other.read([1, 2, 3, 4])) == list(model.read([1, 2, 3, 4]))


def test_what_a_draft_has_no_row_for_it_never_says():
    model, other, order = reordered(kept=60)
    known = [int(token) for token in order if token != order[0]][:4]
    logits, whole = other.forward(known)[0], model.forward(known)[0]
    assert np.array_equal(logits[order], whole[order])
    assert {*np.flatnonzero(np.isneginf(logits))} == {*range(105)} - {*order.tolist()}
    unknown = next(token for token in range(105) if token not in order)
    assert np.array_equal(other.forward([*known, unknown]), other.forward([*known, int(order[0])]))
    for wrong in (105, -1):
        with pytest.raises(ValueError, match=rf"^tokens hold {wrong}; expected 0 to 104"):
            other.forward([1, wrong])


def test_rows_that_the_target_lacks_are_left_out():
    by_target = ByTargetIds([3, -1, 0], 5)
    one = by_target(np.array([[1.0, 2.0, 3.0, 9.0]], np.float32))
    assert one.tolist() == [[3.0, -np.inf, -np.inf, 1.0, -np.inf]] and by_target.n_shared == 2
    assert by_target(np.arange(8, dtype=np.float32).reshape(2, 4))[:, [0, 3]].tolist() == [[2.0, 0.0], [6.0, 4.0]]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_noise_is_keyed_by_the_targets_ids(sampling):
    """All that the same model proposes in another order stands; of chains and of trees."""
    model, other, _ = reordered()
    n_drafted = n_missed = 0
    for prompt in ([1, token, 9] for token in range(3, 9)):
        plain, _ = continuation(model, None, sampling, prompt=prompt)
        text, statistics = continuation(model, other, sampling, prompt=prompt)
        assert text == plain
        n_drafted, n_missed = n_drafted + statistics.n_drafted, n_missed + statistics.n_drafted - statistics.n_accepted
        grown = [events_of(model, draft, sampling, 4, prompt=prompt) for draft in (tiny_model(0), other)]
        assert tokens_of(grown[0]) == tokens_of(grown[1]) == plain
        trees = [[event.tree for event in events if isinstance(event, Proposal)] for events in grown]
        assert trees[0] == trees[1]
    assert n_drafted > 40 and n_missed < 6 * 4  # what is proposed behind an end mark


def texts_of_random_pairs(n_pairs, n_tokens, first=0):
    """That none of them is changed by a draft of a part of the vocabulary; how many tokens were compared."""
    n = 0
    for case in range(first, first + n_pairs):
        rng = np.random.default_rng(case)
        n_rows = int(rng.choice([20, 105, 131]))
        draft = partial(tiny_model(case + 1, n_rows, 128, int(rng.choice([24, 128]))), n_rows, 105, case)
        target, gamma = tiny_model(case, layers=3), int(rng.choice([1, 4, 63]))
        sampling = Sampling(*[(0.0, 0, 0.0), (1.0, 0, 0.9), (0.7, 20, 0.95), (1.5, 0, 1.0)][case % 4], case)
        prompt = rng.integers(3, 105, int(rng.choice([1, 5, 60]))).tolist()
        plain, _ = continuation(target, None, sampling, prompt=prompt, max_tokens=n_tokens)
        assert continuation(target, draft, sampling, gamma, prompt=prompt, max_tokens=n_tokens)[0] == plain
        n += len(plain)
    return n


def test_a_draft_of_a_part_of_the_vocabulary_changes_no_text():
    assert texts_of_random_pairs(12, 128) > 400


@pytest.mark.campaign
def test_nor_of_20_000_tokens():
    n, case = 0, 100
    while n < 20_000:
        n += texts_of_random_pairs(50, 128, case)
        case += 50


class PartialTable(Table):
    """A table of some of the target's tokens, in another order."""

    def __init__(self, probs, target_ids, n_ids):
        super().__init__(probs)
        self.config.vocab_size, self.by_target = n_ids, ByTargetIds(target_ids, n_ids)
        self.rows = {token: row for row, token in enumerate(target_ids)}

    def forward(self, tokens, n_logits=1):
        return self.by_target(super().forward([self.rows.get(token, 0) for token in tokens], n_logits))


@pytest.mark.parametrize("verify", ["rejection", "block"])
@pytest.mark.parametrize("n_runs", [1_500, pytest.param(20_000, marks=pytest.mark.campaign)])
def test_texts_of_a_draft_of_two_of_three_tokens_have_the_targets_distribution(verify, n_runs):
    """Chi-square of 9 texts of two tokens, false alarm below 1e-6 a case; the seeds are fixed."""
    target = Table([[0.5, 0.2, 0.3], [0.3, 0.3, 0.4], [0.2, 0.6, 0.2]])
    draft = PartialTable([[0.7, 0.3], [0.4, 0.6]], [2, 0], 3)
    counts = Counter(rounds_of(target, draft, verify, n_runs, 2, 3, [0]))
    chi = 0.0
    for text in itertools.product(range(3), repeat=2):
        expected = n_runs * math.prod(target.probs[a][b] for a, b in itertools.pairwise((0, *text)))
        chi += (counts[text] - expected) ** 2 / expected
    assert sum(counts.values()) == n_runs and chi < reference.chi_square_limit(8, 4.8)


@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
def test_a_stage_of_another_vocabulary_changes_no_proposal(sampling):
    """Of a draft of the target's vocabulary, of one of a part of it, and of a stage of another part."""
    target, one, other = tiny_model(3), partial(tiny_model(4, 70), 70, 105), partial(tiny_model(5, 40), 40, 105)
    for draft, stage in ((one, other), (tiny_model(4), other), (one, tiny_model(5))):

        def guesser(noise, stage=stage):
            return ModelDrafter(stage, Sampler(105, sampling), noise, END_MARKS)

        for n in (1, 5, 30):
            prompt = [7] * n
            expected = unstaged(target, draft, sampling, "coupled", 4, prompt)
            assert staged(draft, guesser, sampling, target=target, prompt=prompt, models=[stage], guesses=3) == expected


def test_the_proposals_of_a_pickled_draft_are_the_same():
    _, draft, _ = reordered(kept=60)
    again = pickle.loads(pickle.dumps(draft))
    assert isinstance(again, Translated) and again.by_target.n_shared == 60
    assert np.array_equal(again.forward([1, 2, 3]), draft.forward([1, 2, 3]))
    longer = draft.with_positions(60)
    assert isinstance(longer, Translated) and longer.n_positions == 60
    assert np.array_equal(longer.forward([1, 2, 3]), draft.forward([1, 2, 3]))


def test_a_pickled_decoder_knows_what_its_drafts_ids_mean(pair: Pair, tmp_path: Path) -> None:
    """Also where the draft's rows are fewer, or as many and others."""
    source = folder(tmp_path / "target")
    for name in ("smollm2", "gpt2"):
        other = folder(tmp_path / name, tokenizer=name, seed=1)
        decoder = SpeculativeDecoder(source, other, gamma=3, n_threads=1)
        again = pickle.loads(pickle.dumps(decoder))
        assert again.team.draft.vocabulary == decoder.team.draft.vocabulary and again.shared == decoder.shared
        one, two = (each.generate("the robin", 30, temperature=0) for each in (decoder, again))
        assert (one.tokens, one.statistics.n_accepted) == (two.tokens, two.statistics.n_accepted)
    target, draft = load_model(pair.target), load_model(pair.draft)
    fewer = Origin(draft, Vocabulary(300, 60))  # ids from 60 on are others
    decoder = SpeculativeDecoder(target, fewer, pair.tokenizer, gamma=3)  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(decoder)).team.draft.vocabulary == fewer.vocabulary
