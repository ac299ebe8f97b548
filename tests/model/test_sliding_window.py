"""What layers with windows give back: a text has the bits that it has without, and its memory falls."""

import gc
import mmap
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.config import Config
from specdec.kernels import MAX_TOKENS
from specdec.model import sliding_window
from specdec.model.registry import architecture_of
from specdec.model.sliding_window import Windows
from specdec.model.transformer import KV, Transformer
from specdec.runtime.memory import GIVES_BACK, copy_written, give_back, lazy_zeros
from tests.model.test_architectures import FAMILIES, random_tensors
from tests.tools.configs import changed
from tests.tools.random_models import THREADS, broken_off, run_in_blocks, tokens_for

NAMES = ("gemma", "gpt-oss", "mistral", "gemma 4", "gemma 4, experts", "gemma 4, values that are keys")
SLACK, STEP = 128, 64
pytestmark = pytest.mark.skipif(not GIVES_BACK, reason="nothing is given back here")


def model_of(name: str, n_threads: int = 1, kv: KV = "auto", **numbers: Any) -> Transformer:
    config = changed(FAMILIES[name], seq_len=3000, **numbers)
    return Transformer(config, architecture_of(config).pack(config, random_tensors(config)), n_threads, kv=kv)


def like(model: Transformer) -> Transformer:
    return Transformer(model.config, model.weights, 1, kv=model.kv)


def spoil(runs: np.ndarray, first: int, last: int) -> None:
    """What nobody may read any more is no number, or a large one."""
    runs[:, first:last] = {"f": np.nan, "u": 0x7E00, "i": 127}[runs.dtype.kind]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept beyond what a proposal goes back by."""
    for name, number in (("MOST_BYTES", 0), ("LEAST", SLACK), ("STEP", STEP)):
        monkeypatch.setattr(sliding_window, name, number)


@pytest.fixture(params=[spoil, give_back], ids=["spoilt", "given back"])
def dropping(request: pytest.FixtureRequest, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the position, and as far as pages go."""
    monkeypatch.setattr(sliding_window, "give_back", request.param)


def plain_logits(name: str, tokens: list[int], **settings: Any) -> np.ndarray:
    """Of a model that has given nothing back."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sliding_window, "MOST_BYTES", 1 << 40)
        model = model_of(name, **settings)
        logits = run_in_blocks(model, tokens, 64)
        assert model.whole_from == 0
        return logits


@pytest.mark.parametrize("kv", ["f32", "f16", "q8"])
@pytest.mark.parametrize("name", NAMES)
def test_a_long_text_has_the_bits_that_it_has_without(dropping: None, name: str, kv: KV) -> None:
    n = 500
    config = replace(FAMILIES[name], seq_len=3000)
    tokens = tokens_for(config, n)
    expected = plain_logits(name, tokens, kv=kv)
    for n_threads in THREADS:
        model = model_of(name, n_threads, kv)
        for block in (64, 1, 3, 9)[: 4 if kv == "f16" else 1]:
            np.testing.assert_array_equal(run_in_blocks(model, tokens, block), expected)
            assert n - SLACK - STEP - MAX_TOKENS <= model.whole_from <= n - SLACK


@pytest.mark.parametrize("name", NAMES)
def test_a_text_goes_back_as_far_as_it_may_and_is_read_anew_beyond(dropping: None, name: str) -> None:
    config = replace(FAMILIES[name], seq_len=3000)
    tokens = tokens_for(config, 600)
    expected, model = plain_logits(name, tokens), model_of(name)
    for end in (300, 470, 600):
        model.forward(tokens[:end], 0)
        shortest = model.whole_from
        assert shortest > 0
        for n, is_there in ((end - 63, True), (shortest + 1, True), (shortest + 1, True), (shortest - 40, False), (end, True)):
            assert (model.n_to_run(tokens[:n], 1) < n) == is_there
            np.testing.assert_array_equal(model.forward(tokens[:n], 1), expected[n - 1 : n])
        model.forward(tokens[:end], 0)
    model.forward(tokens, 0)
    assert model.unread(tokens[: model.whole_from]) == model.whole_from - 1
    other = [*tokens[:10], *tokens_for(config, 500, seed=7)]
    np.testing.assert_array_equal(run_in_blocks(model, other, 64), plain_logits(name, other))


@pytest.mark.parametrize("name", NAMES)
def test_trees_behind_long_texts_see_what_chains_see(dropping: None, name: str) -> None:
    config = replace(FAMILIES[name], seq_len=3000)
    tokens, model, rng = tokens_for(config, 500), model_of(name), np.random.default_rng(3)
    chain = plain_logits(name, tokens)
    model.forward(tokens[:400], 0)
    at = 400
    while at < 470:
        n_path = int(rng.integers(1, 20))
        path = tokens[at : at + n_path]
        nodes, parents = [5, *path, 7], [-1, -1, *range(1, n_path), n_path - 1]  # the text's own path between two that stray
        logits = model.forward_tree(tokens[:at], nodes, parents)
        np.testing.assert_array_equal(logits[0], chain[at - 1])
        np.testing.assert_array_equal(logits[2 : 2 + n_path], chain[at : at + n_path])
        at += n_path
    np.testing.assert_array_equal(model.forward(tokens[:480], 5), chain[475:480])
    assert model.whole_from > 0


def test_a_pass_that_was_broken_off_has_spoiled_nothing(dropping: None) -> None:
    for name in NAMES:
        config = replace(FAMILIES[name], seq_len=3000)
        tokens, model = tokens_for(config, 500), model_of(name)
        expected = plain_logits(name, tokens)
        model.forward(tokens[:400], 0)
        with broken_off(model):
            model.forward([*tokens[:400], *tokens[100:160]], 3)
        np.testing.assert_array_equal(model.forward(tokens, 64), expected[-64:])
        with broken_off(model, "_windows.give_back"):
            model.forward([*tokens, *tokens[:200]], 1)
        with broken_off(model):
            model.forward([*tokens, *tokens[:64]], 1)
        np.testing.assert_array_equal(model.forward(tokens[:490], 9), expected[481:490])


def test_texts_that_share_passes_give_back_each_its_own(dropping: None) -> None:
    for name in NAMES:
        config = replace(FAMILIES[name], seq_len=3000)
        model = model_of(name)
        seats, texts = [model, model.seat(), model.seat()], [tokens_for(config, n, seed=n) for n in (400, 500, 90)]
        expected = [plain_logits(name, text) for text in texts]
        for at in range(20, 501, 20):
            jobs = [(seat, text[:at], 2) for seat, text in zip(seats, texts, strict=True) if at <= len(text)]
            for got, job in zip(Transformer.forward_together(jobs), jobs, strict=True):
                np.testing.assert_array_equal(got, expected[seats.index(job[0])][at - 2 : at])
        assert seats[0].whole_from and seats[1].whole_from and not seats[2].whole_from


def test_what_another_one_takes_over_goes_on_and_goes_back_as_it_does(dropping: None) -> None:
    for name in NAMES:
        config = replace(FAMILIES[name], seq_len=3000)
        tokens, model = tokens_for(config, 600), model_of(name)
        expected, other = plain_logits(name, tokens), model.seat()
        other.forward(tokens_for(config, 300, seed=9), 0)
        model.forward(tokens[:500], 0)
        other.take_over(model, tokens[:501])
        assert (other.n_held, other.whole_from) == (500, model.whole_from)
        np.testing.assert_array_equal(other.forward(tokens[:490], 20), expected[470:490])
        np.testing.assert_array_equal(other.forward(tokens, 30), expected[570:])
        other.take_over(model, tokens[:50])
        assert (other.n_held, other.whole_from) == (0, 0)
        twin = pickle.loads(pickle.dumps(model))
        np.testing.assert_array_equal(twin.forward(tokens, 3), expected[-3:])


def lazy_bytes() -> int:
    """What caches hold of memory, as Linux tells it: of mappings that asked for small pages."""
    gc.collect()
    total, maps = 0, re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    for each in maps:
        if re.search(r"^VmFlags:.* nh\b", each, re.M) and (found := re.search(r"^Anonymous: +(\d+) kB", each, re.M)):
            total += 1024 * int(found[1])
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="asks Linux")
def test_memory_falls_and_stays_low_as_buffers_grow_and_texts_move(small: None) -> None:
    config = replace(FAMILIES["mistral"], seq_len=20000, head_dim=64)
    tokens, weights = tokens_for(config, 4100), architecture_of(config).pack(config, random_tensors(config))
    before, per_position = lazy_bytes(), 2 * 2 * 2 * 64 * 4
    model = Transformer(config, weights, 1, 9000)
    model.forward(tokens[:300], 0)
    if lazy_bytes() == before:
        pytest.skip("the system has no large pages to ask for small ones")
    model.forward(tokens, 0)
    held, n_kept = lazy_bytes() - before, config.attention.window + SLACK + STEP + 3 * MAX_TOKENS
    most = n_kept * per_position + 24 * 2 * mmap.PAGESIZE
    assert model._capacity > 4096 and model.whole_from > 3800
    assert held < most < 0.25 * len(tokens) * per_position
    model._reserve(8000)
    assert lazy_bytes() - before < most
    seat = model.seat()
    seat.take_over(model, tokens)
    assert seat.n_held == 4099 and lazy_bytes() - before < 2 * most
    del seat
    model.forward(tokens[:9], 0)
    assert lazy_bytes() - before < 24 * 3 * mmap.PAGESIZE, "a text that begins anew leaves nothing of the one before"


def test_what_is_told_of_memory_counts_what_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("mistral", window=16)
    n = 2900
    before = model.text_bytes(n)
    monkeypatch.setattr(sliding_window, "MOST_BYTES", 0)
    monkeypatch.setattr(sliding_window, "LEAST", SLACK)
    monkeypatch.setattr(sliding_window, "STEP", STEP)
    small = like(model)
    saved = before - small.text_bytes(n)
    per_position = 2 * 2 * (8 + 32) * 4
    assert (n - 16 - SLACK - STEP - 4 * MAX_TOKENS) * per_position - 20 * 4096 * 2 < saved < (n - SLACK) * per_position
    assert small.positions_within(before - saved, 2999) >= n


def test_nothing_is_given_back_of_small_texts_and_of_other_architectures() -> None:
    model = model_of("mistral")
    model.forward(tokens_for(model.config, 2000), 0)
    assert model.whole_from == 0
    for name in ("gpt2", "lfm2", "qwen3"):
        config = replace(FAMILIES[name], seq_len=400)
        architecture = architecture_of(config)
        own = Windows(architecture, config, architecture.pack(config, random_tensors(config)), model._buffers.kv, 400)
        assert own.shortest(10**9) == 0 and own.saved_bytes(10**6) == 0


def test_all_of_a_layer_is_no_other_layers(small: None) -> None:
    """Also of a text with less room than another one that shares its passes."""
    model = model_of("gemma")
    model.forward(tokens_for(model.config, 1500), 0)
    seat = model.seat()
    arrays = {name: array for name, array in vars(seat._buffers).items() if name.startswith(("keys", "values"))}
    for array in arrays.values():
        array[...] = 1.0
    seat._windows.give_all_back(seat._buffers)
    for array in arrays.values():
        assert (array[2] == 1).all() and [(array[i] == 0).any() for i in (0, 1, 3)] == [True] * 3


def test_pages_that_hold_anything_else_stay() -> None:
    array = lazy_zeros(np.float32, 3, 5000)
    array[...] = 1.0
    give_back(array, 0, 3200)
    assert (array[:, 3200:] == 1).all() and 3 * 1024 <= (array == 0).sum() <= 3 * 3200
    array[...] = 1.0
    give_back(array, 2100, 3200)
    assert (array[:, 3200:] == 1).all() and (array[:, :1024] == 1).all() and (array == 0).any(axis=1).all()
    other = lazy_zeros(np.float32, 3, 9000)
    copy_written(other[:, :5000], array)
    np.testing.assert_array_equal(other[:, :5000], array)
    array[1, 7] = -0.0
    other[0, 4999] = np.nan
    copy_written(other[:, :5000], array)
    np.testing.assert_array_equal(other[:, :5000].view(np.uint32), array.view(np.uint32))


def test_every_config_of_a_family_with_windows_is_looked_at() -> None:
    def has_window(config: Config) -> bool:
        return any(config.of_layer(i).attention.window for i in range(config.n_layers))

    assert {name for name, config in FAMILIES.items() if has_window(config)} - {"everything"} == {*NAMES}
