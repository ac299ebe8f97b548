"""Sliding window eviction: outputs keep their bits, and memory falls."""

import gc
import mmap
import pickle
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.kernels import MAX_BATCH_TOKENS
from specdec.model import get_architecture, sliding_window_eviction
from specdec.model.kv_cache import KVCache
from specdec.model.model import KVFormatName, Model
from specdec.model.sliding_window_eviction import SlidingWindowEvictor
from specdec.model_config import ModelConfig
from specdec.runtime.memory import CAN_RELEASE_PAGES, LazyMemory, copy_nonzero_pages, release_pages
from tests.tools.cache_contents import get_buffers
from tests.tools.configs import replace_config
from tests.tools.family_models import FAMILIES, random_tensors
from tests.tools.random_models import THREAD_COUNTS, interrupt_after, random_tokens, run_in_blocks

NAMES = ("gemma", "gemma 2", "exaone 4", "gpt-oss", "mistral", "gemma 4", "gemma 4, experts", "gemma 4, values that are keys")
SLACK, STEP = 128, 64
pytestmark = pytest.mark.skipif(not CAN_RELEASE_PAGES, reason="the system cannot release pages")


def make_model(name: str, n_threads: int = 1, kv: KVFormatName = "auto", **changes: Any) -> Model:
    config = replace_config(FAMILIES[name], seq_len=3000, **changes)
    return Model(config, get_architecture(config).plan_weights(config, random_tensors(config)).pack(), n_threads, kv=kv)


def make_cache(name: str, n_threads: int = 1, kv: KVFormatName = "auto") -> KVCache:
    return make_model(name, n_threads, kv).new_cache()


def overwrite(runs: np.ndarray, first: int, last: int) -> None:
    """Overwrite positions that must not be read any more by NaNs or large numbers."""
    runs[:, first:last] = {"f": np.nan, "u": 0x7E00, "i": 127}[runs.dtype.kind]


@pytest.fixture
def no_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep nothing beyond what a proposal can be truncated by."""
    for name, number in (("MAX_REWIND_BYTES", 0), ("MIN_REWIND_TOKENS", SLACK), ("EVICTION_STEP_TOKENS", STEP)):
        monkeypatch.setattr(sliding_window_eviction, name, number)


@pytest.fixture(params=[overwrite, release_pages], ids=["overwritten", "released"])
def eviction(request: pytest.FixtureRequest, no_slack: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evict exact positions, and whole pages."""
    monkeypatch.setattr(sliding_window_eviction, "release_pages", request.param)


def plain_logits(name: str, tokens: list[int], **settings: Any) -> np.ndarray:
    """Return the logits of a model without eviction."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sliding_window_eviction, "MAX_REWIND_BYTES", 1 << 40)
        cache = make_cache(name, **settings)
        logits = run_in_blocks(cache, tokens, 64)
        assert cache.full_kv_start == 0
        return logits


@pytest.mark.parametrize("kv", ["f32", "f16", "q8"])
@pytest.mark.parametrize("name", NAMES)
def test_long_sequence_has_same_bits_without_eviction(eviction: None, name: str, kv: KVFormatName) -> None:
    n = 500
    config = replace(FAMILIES[name], seq_len=3000)
    tokens = random_tokens(config, n)
    expected = plain_logits(name, tokens, kv=kv)
    for n_threads in THREAD_COUNTS:
        cache = make_cache(name, n_threads, kv)
        for block in (64, 1, 3, 9)[: 4 if kv == "f16" else 1]:
            np.testing.assert_array_equal(run_in_blocks(cache, tokens, block), expected)
            assert n - SLACK - STEP - MAX_BATCH_TOKENS <= cache.full_kv_start <= n - SLACK


@pytest.mark.parametrize("name", NAMES)
def test_rewind_within_limit_is_free_and_beyond_reruns(eviction: None, name: str) -> None:
    config = replace(FAMILIES[name], seq_len=3000)
    tokens = random_tokens(config, 600)
    expected, cache = plain_logits(name, tokens), make_cache(name)
    for end in (300, 470, 600):
        cache.forward(tokens[:end], 0)
        shortest = cache.full_kv_start
        assert shortest > 0
        for n, is_there in ((end - 63, True), (shortest + 1, True), (shortest + 1, True), (shortest - 40, False), (end, True)):
            assert (cache.count_uncached_tokens(tokens[:n], 1) < n) == is_there
            np.testing.assert_array_equal(cache.forward(tokens[:n], 1), expected[n - 1 : n])
        cache.forward(tokens[:end], 0)
    cache.forward(tokens, 0)
    assert cache.count_prefill_tokens(tokens[: cache.full_kv_start]) == cache.full_kv_start - 1
    other = [*tokens[:10], *random_tokens(config, 500, seed=7)]
    np.testing.assert_array_equal(run_in_blocks(cache, other, 64), plain_logits(name, other))


@pytest.mark.parametrize("name", NAMES)
def test_trees_behind_long_sequences_match_chains(eviction: None, name: str) -> None:
    config = replace(FAMILIES[name], seq_len=3000)
    tokens, cache, rng = random_tokens(config, 500), make_cache(name), np.random.default_rng(3)
    chain = plain_logits(name, tokens)
    cache.forward(tokens[:400], 0)
    at = 400
    while at < 470:
        n_path = int(rng.integers(1, 20))
        path = tokens[at : at + n_path]
        nodes, parents = [5, *path, 7], [-1, -1, *range(1, n_path), n_path - 1]  # the sequence's own path between two others
        logits = cache.forward_tree(tokens[:at], nodes, parents)
        np.testing.assert_array_equal(logits[0], chain[at - 1])
        np.testing.assert_array_equal(logits[2 : 2 + n_path], chain[at : at + n_path])
        at += n_path
    np.testing.assert_array_equal(cache.forward(tokens[:480], 5), chain[475:480])
    assert cache.full_kv_start > 0


def test_interrupted_pass_keeps_cache_valid(eviction: None) -> None:
    for name in NAMES:
        config = replace(FAMILIES[name], seq_len=3000)
        tokens, cache = random_tokens(config, 500), make_cache(name)
        expected = plain_logits(name, tokens)
        cache.forward(tokens[:400], 0)
        with interrupt_after(cache):
            cache.forward([*tokens[:400], *tokens[100:160]], 3)
        np.testing.assert_array_equal(cache.forward(tokens, 64), expected[-64:])
        with interrupt_after(cache, "model.window_evictor.evict"):
            cache.forward([*tokens, *tokens[:200]], 1)
        with interrupt_after(cache):
            cache.forward([*tokens, *tokens[:64]], 1)
        np.testing.assert_array_equal(cache.forward(tokens[:490], 9), expected[481:490])


def test_batched_sequences_evict_separately(eviction: None) -> None:
    for name in NAMES:
        config = replace(FAMILIES[name], seq_len=3000)
        model = make_model(name)
        caches, sequences = [model.new_cache() for _ in range(3)], [random_tokens(config, n, seed=n) for n in (400, 500, 90)]
        expected = [plain_logits(name, sequence) for sequence in sequences]
        for at in range(20, 501, 20):
            jobs = [(cache, sequence[:at], 2) for cache, sequence in zip(caches, sequences, strict=True) if at <= len(sequence)]
            for got, job in zip(model.forward(jobs), jobs, strict=True):
                np.testing.assert_array_equal(got, expected[caches.index(job[0])][at - 2 : at])
        assert [cache.full_kv_start > 0 for cache in caches] == [True, True, False]


def test_copied_cache_continues_and_rewinds_like_the_original(eviction: None) -> None:
    for name in NAMES:
        config = replace(FAMILIES[name], seq_len=3000)
        tokens, cache = random_tokens(config, 600), make_cache(name)
        expected, other = plain_logits(name, tokens), cache.model.new_cache()
        other.forward(random_tokens(config, 300, seed=9), 0)
        cache.forward(tokens[:500], 0)
        other.copy_from(cache, tokens[:501])
        assert (other.n_tokens, other.full_kv_start) == (500, cache.full_kv_start)
        np.testing.assert_array_equal(other.forward(tokens[:490], 20), expected[470:490])
        np.testing.assert_array_equal(other.forward(tokens, 30), expected[570:])
        other.copy_from(cache, tokens[:50])
        assert (other.n_tokens, other.full_kv_start) == (0, 0)
        twin = pickle.loads(pickle.dumps(cache.model))
        np.testing.assert_array_equal(twin.new_cache().forward(tokens, 3), expected[-3:])


def read_lazy_bytes() -> int:
    """Return the resident bytes of caches: of mappings with small pages, as Linux reports them."""
    gc.collect()
    total, maps = 0, re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    for each in maps:
        if re.search(r"^VmFlags:.* nh\b", each, re.M) and (found := re.search(r"^Anonymous: +(\d+) kB", each, re.M)):
            total += 1024 * int(found[1])
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="asks Linux")
def test_memory_stays_low_after_growth_and_copies(no_slack: None) -> None:
    config = replace(FAMILIES["mistral"], seq_len=20000, head_dim=64)
    tokens, weights = random_tokens(config, 4100), get_architecture(config).plan_weights(config, random_tensors(config)).pack()
    before, per_position = read_lazy_bytes(), 2 * 2 * 2 * 64 * 4
    cache = Model(config, weights, 1, 9000).new_cache()
    cache.forward(tokens[:300], 0)
    if read_lazy_bytes() == before:
        pytest.skip("the system has no large pages to ask for small ones")
    cache.forward(tokens, 0)
    held, n_kept = read_lazy_bytes() - before, config.attention.window + SLACK + STEP + 3 * MAX_BATCH_TOKENS
    limit = n_kept * per_position + 24 * 2 * mmap.PAGESIZE
    assert get_buffers(cache).layers[0].kv.values.shape[2] > 4096 and cache.full_kv_start > 3800
    assert held < limit < 0.25 * len(tokens) * per_position
    cache.reserve(8000)
    assert read_lazy_bytes() - before < limit
    other = cache.model.new_cache()
    other.copy_from(cache, tokens)
    assert other.n_tokens == 4099 and read_lazy_bytes() - before < 2 * limit
    del other
    cache.forward(tokens[:9], 0)
    assert read_lazy_bytes() - before < 24 * 3 * mmap.PAGESIZE, "a new sequence must release the memory of the old one"


def test_memory_estimates_include_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("mistral", window=16)
    n = 2900
    before = model.get_sequence_bytes(n)
    monkeypatch.setattr(sliding_window_eviction, "MAX_REWIND_BYTES", 0)
    monkeypatch.setattr(sliding_window_eviction, "MIN_REWIND_TOKENS", SLACK)
    monkeypatch.setattr(sliding_window_eviction, "EVICTION_STEP_TOKENS", STEP)
    small = model.with_capacity(model.n_positions)
    saved = before - small.get_sequence_bytes(n)
    per_position = 2 * 2 * (8 + 32) * 4
    assert (n - 16 - SLACK - STEP - 4 * MAX_BATCH_TOKENS) * per_position - 20 * 4096 * 2 < saved < (n - SLACK) * per_position
    assert small.find_max_positions(before - saved, 2999) >= n


def test_nothing_is_evicted_for_small_sequences_or_other_architectures() -> None:
    cache = make_cache("mistral")
    cache.forward(random_tokens(cache.model.config, 2000), 0)
    assert cache.full_kv_start == 0
    for name in ("gpt2", "lfm2", "qwen3"):
        config = replace(FAMILIES[name], seq_len=400)
        architecture = get_architecture(config)
        own = SlidingWindowEvictor(architecture, config, get_buffers(cache).sizes.kv, 400)
        assert own.get_min_rewind(10**9) == 0 and own.saved_bytes(get_buffers(cache)) == 0


def test_evicting_a_layer_keeps_other_layers(no_slack: None) -> None:
    """Also for a sequence with less capacity than another one of its batch."""
    model = make_model("gemma")
    model.new_cache().forward(random_tokens(model.config, 1500), 0)
    buffers = get_buffers(model.new_cache())
    for layer in buffers.layers:
        layer.kv.keys[...] = layer.kv.values[...] = 1.0
    model.window_evictor.evict(buffers, 0, sys.maxsize)
    for arrays in ([layer.kv.keys for layer in buffers.layers], [layer.kv.values for layer in buffers.layers]):
        assert (arrays[2] == 1).all() and [(arrays[i] == 0).any() for i in (0, 1, 3)] == [True] * 3


def test_shared_pages_are_not_released() -> None:
    array = LazyMemory().zeros((3, 5000))
    array[...] = 1.0
    release_pages(array, 0, 3200)
    assert (array[:, 3200:] == 1).all() and 3 * 1024 <= (array == 0).sum() <= 3 * 3200
    array[...] = 1.0
    release_pages(array, 2100, 3200)
    assert (array[:, 3200:] == 1).all() and (array[:, :1024] == 1).all() and (array == 0).any(axis=1).all()
    other = LazyMemory().zeros((3, 9000))
    copy_nonzero_pages(other[:, :5000], array)
    np.testing.assert_array_equal(other[:, :5000], array)
    array[1, 7] = -0.0
    other[0, 4999] = np.nan
    copy_nonzero_pages(other[:, :5000], array)
    np.testing.assert_array_equal(other[:, :5000].view(np.uint32), array.view(np.uint32))


def test_every_windowed_family_is_covered() -> None:
    def has_window(config: ModelConfig) -> bool:
        return any(config.layer_config(i).attention.window for i in range(config.n_layers))

    assert {name for name, config in FAMILIES.items() if has_window(config)} - {"everything"} == {*NAMES}
