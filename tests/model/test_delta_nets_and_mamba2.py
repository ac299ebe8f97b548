"""Gated delta nets, Mamba-2 and short convolutions: the same bits for any batch, truncation, interruption and draft."""

import numpy as np
import pytest

from specdec.draft.draft_length import FixedLength
from specdec.draft.lookup import LookupDrafter
from specdec.model.kv_cache import INITIAL_CAPACITY
from specdec.quant import INT8
from specdec.runtime import op_program
from specdec.sampling import Sampling
from specdec.verification import VERIFIERS
from tests.tools.decode import decode, generate_tokens, get_tokens
from tests.tools.family_models import load_fixture_model
from tests.tools.hf_folders import CONFIGS
from tests.tools.random_models import THREAD_COUNTS, random_tokens, run_in_blocks

NAMES = ("lfm2_odd", "qwen35", "qwen35_odd", "qwen35_images", "granite_h", "granite_h_odd", "nemotron_h", "falcon_h1")
ONE_OF_EACH = ("qwen35", "granite_h_odd")
PROMPT = [1, 7, 9]


def make_cache(name, n_threads=1):
    return load_fixture_model(name, n_threads).new_cache()


@pytest.mark.parametrize("name", NAMES)
def test_bits_do_not_depend_on_batch_threads_or_n_logits(name):
    tokens = random_tokens(CONFIGS[name], 150)
    alone = run_in_blocks(load_fixture_model(name), tokens, 1)
    for n_threads in THREAD_COUNTS:
        cache = make_cache(name, n_threads)
        for block in (2, 9, 64):
            np.testing.assert_array_equal(run_in_blocks(cache, tokens, block), alone)
            cache.forward([], 0)
            for end in range(block, len(tokens) + 1, block):
                np.testing.assert_array_equal(cache.forward(tokens[:end], 1)[0], alone[end - 1])


@pytest.mark.parametrize("name", NAMES)
def test_rewind_within_a_pass_is_free_and_beyond_reruns(name):
    rng, config = np.random.default_rng(1), CONFIGS[name]
    cache, fresh, tokens = make_cache(name), make_cache(name), random_tokens(config, 120)
    n_run = []
    cache.forward(tokens)
    for back in (0, 1, 5, 64, 3, 65, 1, 63, 110, 2, 64, 30, 1):
        kept = tokens[: len(tokens) - back]
        tokens = [*kept, *rng.integers(0, config.vocab_size, int(rng.integers(1, 70))).tolist()]
        n_run.append(cache.count_prefill_tokens(tokens) + 1 - (len(tokens) - len(kept)))
        n_logits = int(rng.integers(1, min(len(tokens), 64) + 1))
        logits = cache.forward(tokens, n_logits).copy()
        fresh.forward([], 0)
        np.testing.assert_array_equal(logits, fresh.forward(tokens, n_logits))
    assert [n > 0 for n in n_run] == [back > 64 for back in (0, 1, 5, 64, 3, 65, 1, 63, 110, 2, 64, 30, 1)]


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_pass_interrupted_between_phases_leaves_valid_state(monkeypatch, name):
    """Some layers have advanced their state, others have not."""
    tokens, cache = random_tokens(CONFIGS[name], 300), make_cache(name)
    cache.forward(tokens)  # and the buffers are large enough
    tokens = tokens[:231]
    expected = make_cache(name).forward(tokens, 60).copy()
    run = op_program.run_on_threads
    cache.forward(tokens[:70])
    n_rows = cache.executor.ops[:, op_program.N_OPS_WORD]
    ends = np.cumsum(n_rows[n_rows > 0])
    for n_cached, end in zip(range(71, 231, 8), np.random.default_rng(2).permutation(ends), strict=False):

        def run_and_interrupt(function, context_words, rows, first, last, n_threads, end=end):
            run(function, context_words, rows, first, int(end), n_threads)
            raise KeyboardInterrupt

        with monkeypatch.context() as context:
            context.setattr(op_program, "run_on_threads", run_and_interrupt)
            with pytest.raises(KeyboardInterrupt):
                cache.forward([*tokens[: n_cached - 8], *tokens[:64]], 1 + n_cached % 40)
        cache.forward(tokens[:n_cached], n_cached % 8 + 1)
        assert cache.n_tokens == n_cached
    np.testing.assert_array_equal(cache.forward(tokens, 60), expected)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_state_survives_buffer_growth(name):
    tokens = random_tokens(CONFIGS[name], INITIAL_CAPACITY + 40)
    grown, at_once = make_cache(name), make_cache(name)
    for end in (INITIAL_CAPACITY - 1, INITIAL_CAPACITY + 1, len(tokens)):
        logits = grown.forward(tokens[:end])
    np.testing.assert_array_equal(at_once.forward(tokens), logits)


@pytest.mark.parametrize("name", NAMES)
def test_drafts_change_no_token_and_trees_are_rejected(name):
    target, sampling = load_fixture_model(name), Sampling(0.8, seed=3)
    plain, _ = generate_tokens(target, None, sampling, prompt=PROMPT, max_tokens=90, eos_tokens={})
    for gamma in (1, 4, 12):
        draft = load_fixture_model(name, weight_format=INT8)
        drafted, statistics = generate_tokens(target, draft, sampling, gamma, prompt=PROMPT, max_tokens=90, eos_tokens={})
        assert drafted == plain and 0 < statistics.n_accepted < statistics.n_drafted
    verifier = VERIFIERS["coupled"](target.config.vocab_size, sampling)
    assert get_tokens(decode(target.new_cache(), LookupDrafter(()), verifier, PROMPT, 90, FixedLength(5), {})) == plain
    with pytest.raises(ValueError, match=r"^token trees are not supported by models with a recurrent state$"):
        target.new_cache().forward_tree([1, 2], [3], [-1])
