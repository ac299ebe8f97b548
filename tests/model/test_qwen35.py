"""Qwen3.5's delta net: one text, bit for bit, however it is cut into passes, gone back in, interrupted and drafted."""

from functools import cache

import numpy as np
import pytest

from specdec.draft.ngram import NgramDrafter
from specdec.draft.policy import FixedLength
from specdec.engine.decoding import Step, decode
from specdec.layers.recurrent import TIP
from specdec.loaders import load_checkpoint
from specdec.model.registry import architecture_of
from specdec.model.transformer import FIRST_POSITIONS, Transformer
from specdec.quant import INT8
from specdec.runtime import program
from specdec.sampling import Sampling
from specdec.verification import VERIFIERS
from tests.tools import random_models
from tests.tools.hf_folders import FIXTURES
from tests.tools.random_models import THREADS, continuation, run_in_blocks, tokens_for

NAMES = ("qwen35", "qwen35_odd", "qwen35_images")
N_POSITIONS = 700
PROMPT = [1, 7, 9]


@cache
def weights_of(name, kind=None):
    checkpoint = load_checkpoint(FIXTURES / name)
    return checkpoint.config, architecture_of(checkpoint.config).pack(checkpoint.config, checkpoint.tensors, kind)


def model_of(name="qwen35", n_threads=1, kind=None):
    return Transformer(*weights_of(name, kind), n_threads, N_POSITIONS)


@pytest.mark.parametrize("name", NAMES)
def test_bits_do_not_depend_on_the_batch_on_threads_or_on_which_logits_are_asked_for(name):
    tokens = tokens_for(weights_of(name)[0], 150)
    alone = run_in_blocks(model_of(name), tokens, 1)
    for n_threads in THREADS:
        model = model_of(name, n_threads)
        for block in (2, 9, 64):
            np.testing.assert_array_equal(run_in_blocks(model, tokens, block), alone)
            model.forward([], 0)
            for end in range(block, len(tokens) + 1, block):
                np.testing.assert_array_equal(model.forward(tokens[:end], 1)[0], alone[end - 1])


@pytest.mark.parametrize("name", NAMES)
def test_a_text_goes_back_by_a_pass_without_running_again_and_farther_by_running_again(name):
    rng, config = np.random.default_rng(1), weights_of(name)[0]
    model, fresh, tokens = model_of(name), model_of(name), tokens_for(config, 120)
    n_run = []
    model.forward(tokens)
    for back in (0, 1, 5, 64, 3, 65, 1, 63, 110, 2, 64, 30, 1):
        kept = tokens[: len(tokens) - back]
        tokens = [*kept, *rng.integers(0, config.vocab_size, int(rng.integers(1, 70))).tolist()]
        n_run.append(model.unread(tokens) + 1 - (len(tokens) - len(kept)))
        n_logits = int(rng.integers(1, min(len(tokens), 64) + 1))
        logits = model.forward(tokens, n_logits).copy()
        fresh.forward([], 0)
        np.testing.assert_array_equal(logits, fresh.forward(tokens, n_logits))
    assert [n > 0 for n in n_run] == [back > 64 for back in (0, 1, 5, 64, 3, 65, 1, 63, 110, 2, 64, 30, 1)]


def test_a_pass_that_is_broken_off_between_any_two_phases_leaves_no_wrong_state(monkeypatch):
    """Layers that it has reached have moved on, the others have not."""
    tokens, model = tokens_for(weights_of("qwen35")[0], 300), model_of()
    model.forward(tokens)  # and the buffers are large enough
    tokens = tokens[:231]
    expected = model_of().forward(tokens, 60).copy()
    run = program.run_on_threads
    model.forward(tokens[:70])
    n_rows = model._runner._rows[:, program.N_ROWS]
    ends = np.cumsum(n_rows[n_rows > 0])
    for held, end in zip(range(71, 231, 8), np.random.default_rng(2).permutation(ends), strict=False):

        def broken(function, numbers, rows, first, last, n_threads, end=end):
            run(function, numbers, rows, first, int(end), n_threads)
            raise KeyboardInterrupt

        with monkeypatch.context() as context:
            context.setattr(program, "run_on_threads", broken)
            with pytest.raises(KeyboardInterrupt):
                model.forward([*tokens[: held - 8], *tokens[:64]], 1 + held % 40)
        model.forward(tokens[:held], held % 8 + 1)
        assert model.n_held == held
    np.testing.assert_array_equal(model.forward(tokens, 60), expected)


def test_a_text_that_outgrows_its_buffers_keeps_its_state():
    tokens = tokens_for(weights_of("qwen35")[0], FIRST_POSITIONS + 40)
    grown, at_once = model_of(), model_of()
    for end in (FIRST_POSITIONS - 1, FIRST_POSITIONS + 1, len(tokens)):
        logits = grown.forward(tokens[:end])
    np.testing.assert_array_equal(at_once.forward(tokens), logits)


@pytest.mark.parametrize("name", NAMES)
def test_what_drafts_changes_no_token_and_a_tree_is_refused(name, monkeypatch):
    monkeypatch.setattr(random_models, "END_MARKS", {})
    target, sampling = model_of(name), Sampling(0.8, seed=3)
    plain, _ = continuation(target, None, sampling, prompt=PROMPT, max_tokens=90)
    for gamma in (1, 4, 12):
        drafted, statistics = continuation(target, model_of(name, kind=INT8), sampling, gamma, prompt=PROMPT, max_tokens=90)
        assert drafted == plain and 0 < statistics.n_accepted < statistics.n_drafted
    verifier = VERIFIERS["coupled"](target.config.vocab_size, sampling)
    events = decode(target, NgramDrafter(()), verifier, PROMPT, 90, FixedLength(5), {})
    assert [token for event in events if isinstance(event, Step) for token in event.tokens] == plain
    with pytest.raises(ValueError, match=r"^this model runs no trees: its state is that of one text$"):
        target.forward_tree([1, 2], [3], [-1])


def test_texts_that_share_passes_have_states_of_their_own_and_guesses_cost_no_other_way_back():
    config = weights_of("qwen35")[0]
    first, alone = model_of(n_threads=THREADS[-1]), [model_of(), model_of()]
    seats, texts = [first.seat(), first], [tokens_for(config, 160, seed) for seed in (1, 2)]
    for ends, n_logits in (((20, 30), (1, 1)), ((24, 34), (4, 3)), ((22, 38), (1, 5)), ((60, 42), (30, 1)), ((57, 70), (9, 20))):
        jobs = [(text[:end], n) for text, end, n in zip(texts, ends, n_logits, strict=True)]
        together = Transformer.forward_together([(seat, *job) for seat, job in zip(seats, jobs, strict=True)])
        for logits, model, job in zip(together, alone, jobs, strict=True):
            np.testing.assert_array_equal(logits, model.forward(*job))
        for seat, end, n in zip(seats, ends, n_logits, strict=True):
            assert (seat._buffers.lengths[..., TIP] == end - n + 1).all()
