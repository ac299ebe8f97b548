"""Snapshots of recurrent states: a truncated sequence continues from the nearest one with unchanged bits."""

import numpy as np
import pytest

from specdec.model import state_snapshots
from specdec.model.state_snapshots import MAX_SNAPSHOTS, MIN_SNAPSHOTS, PROMPT_END_OFFSET_TOKENS, Snapshot, Snapshots
from specdec.quant import INT8
from tests.tools.cache_contents import get_snapshots
from tests.tools.family_models import load_fixture_model
from tests.tools.hf_folders import CONFIGS
from tests.tools.prompt_caches import prefill
from tests.tools.random_models import CONFIGS as PLAIN_CONFIGS
from tests.tools.random_models import THREAD_COUNTS, interrupt_after, random_cache, random_tokens

NAMES = ("lfm2", "lfm2_odd", "qwen35", "qwen35_odd", "granite_h", "granite_h_odd", "falcon_h1")


@pytest.fixture(params=NAMES)
def model(request):
    return load_fixture_model(request.param)


def test_chat_without_old_reasoning_prefills_little_more_than_new_tokens(model):
    """Run twenty turns in which each prompt differs from where the reasoning began, or a few tokens before."""
    rng, cache, fresh = np.random.default_rng(1), model.new_cache(), model.new_cache()
    draw = lambda n: rng.integers(0, model.config.vocab_size, n).tolist()  # noqa: E731
    prompt, n_read, n_new = draw(90), 0, 0
    n_read += prefill(cache, prompt)
    n_new += len(prompt) - 1
    for turn in range(20):
        logits = cache.forward(prompt, 1)
        if turn % 5 == 0:
            logits = logits.copy()
            fresh.forward([], 0)
            np.testing.assert_array_equal(logits, fresh.forward(prompt, 1))
        thought = [*prompt, *draw(120)]
        for n in range(len(prompt) + 1, len(thought), 7):
            cache.forward(thought[:n], 1)
        new = draw(130)  # the answer without its reasoning, and a question
        prompt = [*prompt[: len(prompt) - int(rng.integers(0, 8))], *new]
        n_read += prefill(cache, prompt)
        n_new += len(new)
    assert n_read < 1.2 * n_new, (n_read, n_new)


@pytest.mark.parametrize("weight_format", [None, INT8], ids=["bf16", "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_after_restore_match_fresh_model(name, weight_format):
    rng, config = np.random.default_rng(2), CONFIGS[name]
    caches = [load_fixture_model(name, n_threads, weight_format).new_cache() for n_threads in THREAD_COUNTS]
    sequence, n_saved = random_tokens(config, 1500), 0
    for cache in caches:
        prefill(cache, sequence)
    for n in (1400, 1100, 1490, 700, 30, 1300, 513, 1480):
        other = [*sequence[:n], *rng.integers(0, config.vocab_size, 120).tolist()]
        expected = load_fixture_model(name, 1, weight_format).new_cache().forward(other, 30)
        for cache in caches:
            unread = cache.count_prefill_tokens(other)
            n_saved += len(other) - 1 - unread > 0
            with interrupt_after(cache):
                cache.forward(other)
            prefill(cache, other)
            np.testing.assert_array_equal(cache.forward(other, 30), expected)
            prefill(cache, sequence)
    assert n_saved > 3 * len(caches)


def test_copied_cache_has_snapshots(model):
    tokens, cache = random_tokens(model.config, 900), model.new_cache()
    prefill(cache, tokens)
    cache.forward([*tokens, 5, 6, 7], 3)
    for n in (880, 700, 600):
        other = [*tokens[:n], *tokens[::-1]][: n + 200]
        copy = model.new_cache()
        copy.copy_from(cache, other)
        assert 512 <= copy.n_tokens <= n and cache.count_prefill_tokens(other) == len(other) - 1 - copy.n_tokens
        logits = copy.forward(other, 20).copy()
        np.testing.assert_array_equal(logits, model.new_cache().forward(other, 20))
        again = [*other[: len(other) - 150], 1, 2, 3]
        np.testing.assert_array_equal(copy.forward(again, 2).copy(), model.new_cache().forward(again, 2))


def test_batched_prompts_take_snapshots(model):
    one, two = random_tokens(model.config, 700), random_tokens(model.config, 690)[::-1]
    caches = [model.new_cache(), model.new_cache()]
    for n in range(20, 640, 20):
        model.forward([(caches[0], one[:n], 0, 700), (caches[1], two[:n], 0, 690)])
    for cache, tokens in zip(caches, (one, two), strict=True):
        other = [*tokens[:600], 9, 9, 9]
        assert cache.count_prefill_tokens(other) <= 95
        np.testing.assert_array_equal(cache.forward(other, 2).copy(), model.new_cache().forward(other, 2))


def test_model_without_recurrent_state_takes_no_snapshots():
    config = PLAIN_CONFIGS["gqa"]
    cache, tokens = random_cache(config), random_tokens(config, 90)
    assert prefill(cache, tokens) == 89 and cache.count_tokens_to_snapshot([*tokens, 1]) == 1 and not get_snapshots(cache)


def test_snapshot_limit_keeps_newest_and_most_spread(monkeypatch):
    rows, kept = np.zeros((1, 2, 16), np.float32), Snapshots()
    for n in range(1, 1000):
        kept.add(Snapshot(n * 10, [rows]))
    lengths = [each.n_tokens for each in kept]
    assert len(lengths) == MAX_SNAPSHOTS and lengths[-1] == 9990 and lengths == sorted(lengths)
    gaps = np.diff([0, *lengths])
    assert gaps.max() < 4 * 9990 / MAX_SNAPSHOTS
    monkeypatch.setattr(state_snapshots, "MAX_SNAPSHOT_BYTES", 1)
    kept.add(Snapshot(10_000, [rows]))
    assert len([*kept]) == MIN_SNAPSHOTS and kept.find_longest(10_000) == 10_000 and kept.find_longest(5) == 0
    kept.drop_after(9_999)
    assert 10_000 not in [each.n_tokens for each in kept]


def test_sequence_bytes_include_snapshots(model):
    plain = sum(each.array.nbytes for each in model.grow_buffers(1024, 0, None).new.own)
    cache = model.new_cache()
    prefill(cache, random_tokens(model.config, 2900))
    held = sum(each.n_bytes for each in get_snapshots(cache))
    assert 0 < held <= model.get_sequence_bytes(1024 - 64, True) - plain
    assert PROMPT_END_OFFSET_TOKENS < 64
