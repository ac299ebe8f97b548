"""The prompt cache on disk: sequences continue with the same bits after a restore, and bad files are ignored."""

import errno
import gc
import os
import random
import stat
import time
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specdec.engine import disk_prompt_cache
from specdec.engine.disk_prompt_cache import BLOCK_SUFFIX, BLOCK_TOKENS, TAIL_SUFFIX, PromptCache
from specdec.model import sliding_window_eviction
from specdec.model.model import Model
from specdec.quant import INT8
from specdec.quant.packed_matrix import LazyTable
from specdec.runtime.disk_store import DiskStore
from tests.tools.configs import replace_config
from tests.tools.family_models import load_fixture_weights
from tests.tools.hf_folders import FIXTURES
from tests.tools.prompt_caches import new_cache, prefill
from tests.tools.random_models import random_tokens

NAMES = ("qwen3", "gemma3", "gemma4", "phi3_long", "lfm2", "qwen35", "qwen35_odd", "granite_h", "nemotron_h", "falcon_h1", "gpt2")
THERE = [name for name in NAMES if (FIXTURES / name / "config.json").exists()]


@pytest.fixture
def folder(tmp_path):
    caches, lines = [], []

    def make_cache(n_bytes=10**9, revision=2, path=tmp_path / "prompts"):
        caches.append(PromptCache(path, n_bytes, revision, lines.append))
        caches[-1].lines = lines
        return caches[-1]

    yield make_cache
    for each in caches:
        each.flush()


def save_prompt(folder, cache, tokens):
    prefill(cache, tokens)
    folder.save(cache, tokens)
    folder.flush()


@pytest.mark.parametrize("kv", ["f16", "f32"])
@pytest.mark.parametrize("name", THERE)
def test_a_restored_prompt_continues_with_the_same_bits(folder, name, kv):
    cache = new_cache(name, kv)
    tokens = random_tokens(cache.model.config, min(700, cache.model.n_positions - 40))
    save_prompt(folder(), cache, tokens)
    for n in (len(tokens), len(tokens) - 3, len(tokens) - 70, 300):
        if n < BLOCK_TOKENS + 30 or n > len(tokens):
            continue
        new = [*tokens[:n], 5, 6, 7]
        later, plain = new_cache(name, kv, n_threads=2), new_cache(name, kv)
        restored = folder().restore(later, new)
        if cache.model.has_recurrent_state:
            ends = cache.export_kv(lambda _, held, snapshots: [each.n_tokens for each in snapshots])
            assert restored == max([end for end in ends if BLOCK_TOKENS <= end <= n], default=0)
            assert n < len(tokens) - 16 or restored == len(tokens) - 1 - 16
        else:
            assert n - BLOCK_TOKENS < restored <= n
        assert later.n_tokens == restored
        np.testing.assert_array_equal(later.forward(new, 3), plain.forward(new, 3))


@pytest.mark.parametrize("ends", [(700,), (150, 700), (*range(100, 701, 100),)], ids=["once", "twice", "often"])
def test_kv_blocks_dropped_by_a_window_are_not_written(folder, monkeypatch, ends):
    for name, number in (("MAX_REWIND_BYTES", 0), ("MIN_REWIND_TOKENS", 128), ("EVICTION_STEP_TOKENS", 64)):
        monkeypatch.setattr(sliding_window_eviction, name, number)
    cache = new_cache("gemma3")
    tokens, files = random_tokens(cache.model.config, 700), folder()
    for end in ends:
        cache.forward(tokens[:end], 0)
        files.save(cache, tokens[:end])
        files.flush()
    assert cache.full_kv_start > (3 * BLOCK_TOKENS if sliding_window_eviction.CAN_RELEASE_PAGES else -1)
    later = new_cache("gemma3")
    monkeypatch.setattr(sliding_window_eviction, "MAX_REWIND_BYTES", 1 << 40)
    plain = new_cache("gemma3")
    restored = folder().restore(later, [*tokens, 5])
    if sliding_window_eviction.CAN_RELEASE_PAGES:
        assert restored == {1: 0, 2: 150, 7: 700}[len(ends)]
    for n in (701, 690, 300, 701):
        np.testing.assert_array_equal(later.forward([*tokens, 5][:n], 3), plain.forward([*tokens, 5][:n], 3))


def test_files_of_other_models_settings_or_tokens_are_not_used(folder):
    cache = new_cache("qwen3")
    tokens = random_tokens(cache.model.config, 400)
    save_prompt(folder(), cache, tokens)
    assert folder().restore(new_cache("qwen3"), tokens) >= 384
    assert not folder().restore(new_cache("qwen3", "f32"), tokens)
    assert not folder().restore(new_cache("qwen3", kind=INT8), tokens)
    assert not folder(revision=3).restore(new_cache("qwen3"), tokens)
    assert not folder().restore(new_cache("qwen3"), [tokens[0] + 1, *tokens[1:]])
    assert not folder().restore(new_cache("qwen3"), tokens[:BLOCK_TOKENS])
    assert not folder().restore(new_cache("qwen3"), tokens, "somebody else")
    other = [*tokens[:200], 1, *tokens[201:]]
    assert folder().restore(new_cache("qwen3"), other) == BLOCK_TOKENS
    twin = new_cache("qwen3")
    copies = {name: (replace(each, panels=each.panels.copy()),) for name, each in twin.model.weights.matrices.items()}
    twin.model.weights = replace(twin.model.weights, shards=copies)
    panels = next(iter(twin.model.weights.matrices.values())).panels.reshape(-1).view(np.uint8)
    panels[len(panels) // 2] ^= 1
    assert not folder().restore(twin, tokens), "one bit of the weights is another"
    twin = new_cache("qwen3")
    name, matrix = next(iter(twin.model.weights.matrices.items()))
    other = replace(matrix, weight_format=replace(matrix.weight_format, name="another"))
    twin.model.weights = replace(twin.model.weights, shards=twin.model.weights.shards | {name: (other,)})
    assert not folder().restore(twin, tokens), "the same bytes are other numbers"


def test_table_rows_of_a_prompt_enter_its_file_names(folder):
    cache = new_cache("gemma4")
    rows = cache.model.weights.table.read_rows(range(70))
    first, tail, nowhere = 61, 62, 63
    tokens = [*random_tokens(cache.model.config, 200)]
    tokens = [first if i == 100 else tail if i == 190 else 5 if token in (first, tail, nowhere) else token
              for i, token in enumerate(tokens)]  # fmt: skip
    save_prompt(folder(), cache, tokens)
    for row, n_restored in ((nowhere, 199), (first, 0), (tail, 190)):
        other = rows.copy()
        other[row] += 1
        twin, plain = new_cache("gemma4"), new_cache("gemma4")
        for each in (twin, plain):
            each.model.weights = replace(each.model.weights, table=LazyTable(other))
        assert folder().restore(twin, [*tokens, 6]) == n_restored
        np.testing.assert_array_equal(twin.forward([*tokens, 6], 3), plain.forward([*tokens, 6], 3))


@pytest.mark.parametrize("n_flips", [1, 2, 3])
def test_weights_with_different_signs_have_different_files(folder, n_flips):
    """A sum of words would lose every other change of their upper bits."""
    cache, twin = new_cache("qwen3", "f32"), new_cache("qwen3", "f32")
    tokens = random_tokens(cache.model.config, 200)
    save_prompt(folder(), cache, tokens)
    vectors = {name: vector.copy() for name, vector in twin.model.weights.vectors.items()}
    max(vectors.values(), key=len)[1 : 2 * n_flips : 2] *= -1
    twin.model.weights = replace(twin.model.weights, vectors=vectors)
    assert folder().restore(twin, tokens) == 0


def test_nothing_is_restored_that_the_model_holds_already(folder):
    cache = new_cache("qwen3")
    tokens = random_tokens(cache.model.config, 500)
    save_prompt(folder(), cache, tokens)
    n = len(os.listdir(folder().folder))
    assert folder().restore(cache, tokens) == 0
    save_prompt(folder(), cache, [*tokens, *tokens[:5]])
    assert len(os.listdir(folder().folder)) == n, "the tail alone is another"


def test_prompts_with_a_common_beginning_share_private_files(folder):
    one, cache = folder(), new_cache("qwen3")
    tokens = random_tokens(cache.model.config, 600)
    save_prompt(one, cache, tokens)
    before = {name for name in os.listdir(one.folder) if name.endswith(BLOCK_SUFFIX)}
    save_prompt(one, cache, [*tokens[:520], *tokens[:200]])
    after = {name for name in os.listdir(one.folder) if name.endswith(BLOCK_SUFFIX)}
    assert before < after and len(after - before) == 1
    assert {stat.S_IMODE((one.folder / name).stat().st_mode) for name in os.listdir(one.folder)} == {0o600}
    assert stat.S_IMODE(one.folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("n_damages", [150, pytest.param(1000, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("name", ["qwen3", "qwen35"])
def test_a_damaged_file_is_ignored_and_changes_no_output(folder, name, n_damages):
    """Files are cut off, longer, something else, or have a wrong bit or the content of another file."""
    rng, one, cache = random.Random(name), folder(), new_cache(name)
    tokens = random_tokens(cache.model.config, 450)
    save_prompt(one, cache, tokens)
    expected = new_cache(name).forward(tokens, 2).copy()
    sound = {file: file.read_bytes() for file in one.folder.iterdir()}
    later, n_restored = new_cache(name), set()
    for i in range(n_damages):
        for file, data in sound.items():
            if not file.exists() or file.read_bytes() != data:
                file.write_bytes(data)
        for _ in range(rng.randrange(1, 3)):
            file = rng.choice([*sound])
            data = sound[file]
            at = rng.randrange(len(data))
            file.write_bytes(rng.choice([
                data[:at], data + b"x", rng.randbytes(at % 100), data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :],
                sound[rng.choice([*sound])],
            ]))  # fmt: skip
        later.forward(tokens[:1])
        n_restored.add(one.restore(later, tokens))
        if i % 10:
            n = later.n_tokens
            later.forward(tokens[: n + 2], 1)
        np.testing.assert_array_equal(later.forward(tokens, 2), expected)
    assert len(n_restored) > 1 and len(one.lines) == 1 and "\n" not in one.lines[0]


def test_a_full_disk_is_reported_once_and_leaves_no_partial_file(folder, monkeypatch):
    one, cache = folder(), new_cache("qwen3")
    tokens = random_tokens(cache.model.config, 400)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    save_prompt(one, cache, tokens)
    save_prompt(one, cache, [*tokens, 1])
    assert not os.listdir(one.folder) and len(one.lines) == 1 and "No space left" in one.lines[0]


def test_the_least_recently_used_files_are_evicted(folder):
    cache = new_cache("qwen3")
    prompts = [random_tokens(cache.model.config, 300)[i:] + [i] * i for i in range(4)]
    size = 0
    for i, tokens in enumerate(prompts):
        one = folder(n_bytes=max(int(2.5 * size), 1) if i else 10**9)
        save_prompt(one, cache, tokens)
        size = size or sum(file.stat().st_size for file in one.folder.iterdir())
        for file in one.folder.iterdir():
            if time.time() - file.stat().st_mtime < 100:
                os.utime(file, (time.time() - 1000 + 10 * i, time.time() - 1000 + 10 * i))
    assert sum(file.stat().st_size for file in one.folder.iterdir()) <= 2.6 * size
    assert folder().restore(new_cache("qwen3"), prompts[-1]) and not folder().restore(new_cache("qwen3"), prompts[0])


def test_an_unusable_folder_is_refused(folder, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"cannot keep prompts in .*: it is not a folder"):
        folder(path=tmp_path / "file")
    with pytest.raises(ValueError, match="cannot keep prompts in"):
        folder(path=Path(os.devnull) / "x")


def test_a_model_keeps_its_kv_cache_if_the_files_hold_no_more(folder):
    one, cache = folder(), new_cache("qwen3")
    tokens = random_tokens(cache.model.config, 700)
    save_prompt(one, cache, tokens)
    for file in one.folder.iterdir():
        file.write_bytes(b"x")
    cache.forward(tokens[:300])
    assert one.restore(cache, tokens) == 0 and cache.n_tokens == 300
    np.testing.assert_array_equal(cache.forward(tokens, 2), new_cache("qwen3").forward(tokens, 2))


@pytest.mark.parametrize("name", ["qwen3", "qwen35"])
def test_a_shorter_tail_does_not_overwrite_the_kv_cache(folder, name):
    """The tail of a sequence of 150 tokens lies after the first block, and the second block is damaged."""
    one, cache = folder(), new_cache(name)
    tokens = random_tokens(cache.model.config, 500)
    for n in (500, 151):
        save_prompt(one, cache, tokens[:n])
    second = [*one.get_block_paths(cache, tokens, 256, "")][1]
    second.write_bytes(second.read_bytes()[:-1])
    prefill(cache, tokens[:231])
    assert one.restore(cache, tokens) in (0, 150 - 16)
    np.testing.assert_array_equal(cache.forward(tokens, 2), new_cache(name).forward(tokens, 2))


def test_a_hybrid_model_continues_from_a_state_on_disk_if_the_prompt_changed(folder):
    cache = new_cache("qwen35")
    tokens = random_tokens(cache.model.config, 1500)
    save_prompt(folder(), cache, tokens)
    new, later = [*tokens[:1200], 1, *tokens[1201:]], new_cache("qwen35")
    restored = folder().restore(later, new)
    assert 600 < restored <= 1200
    np.testing.assert_array_equal(later.forward(new, 2), new_cache("qwen35").forward(new, 2))


def test_a_prompt_that_exceeds_the_folder_keeps_its_beginning(folder):
    """Files that are used from memory only also count as used."""
    cache, path = new_cache("qwen3"), folder().folder
    one, two = random_tokens(cache.model.config, 1000), random_tokens(cache.model.config, 1000)[::-1]
    save_prompt(folder(), cache, one[: BLOCK_TOKENS + 1])
    size = max(file.stat().st_size for file in path.iterdir())
    small = folder(n_bytes=6 * size)
    save_prompt(small, cache, one)
    assert 3 * BLOCK_TOKENS <= folder().restore(new_cache("qwen3"), one) <= 6 * BLOCK_TOKENS
    assert sum(file.stat().st_size for file in path.iterdir()) <= 6 * size
    past = time.time() - 1000
    for file in path.iterdir():
        os.utime(file, (past, past))
    small.save(cache, one)
    save_prompt(small, new_cache("qwen3"), two[: 2 * BLOCK_TOKENS + 1])
    assert folder().restore(new_cache("qwen3"), two[: 2 * BLOCK_TOKENS + 2]) >= 2 * BLOCK_TOKENS
    assert folder().restore(new_cache("qwen3"), one) >= BLOCK_TOKENS, "the end went first"


def test_the_folder_keeps_no_model_alive_and_hashes_weights_once(folder, monkeypatch):
    one, cache = folder(), new_cache("qwen3")
    tokens = random_tokens(cache.model.config, 300)
    save_prompt(one, cache, tokens)
    n_sums, sums = [], disk_prompt_cache.checksum
    monkeypatch.setattr(disk_prompt_cache, "checksum", lambda arrays: n_sums.append(1) or sums(arrays))
    twin = cache.model.new_cache()
    assert [*one.get_block_paths(twin, tokens, 256, "")] == [*one.get_block_paths(cache, tokens, 256, "")] and not n_sums
    other = cache.model.new_cache([1])
    assert not {*one.get_block_paths(other, tokens, 256, "")} & {*one.get_block_paths(cache, tokens, 256, "")}
    gone = weakref.ref(cache.model)
    del cache, twin, other
    gc.collect()
    assert gone() is None


def test_a_folder_that_becomes_unusable_is_reported_once_and_harms_no_sequence(folder, monkeypatch):
    one, cache = folder(), new_cache("qwen3")
    tokens = random_tokens(cache.model.config, 400)
    one.folder.rmdir()
    one.folder.touch()
    for _ in range(2):
        save_prompt(one, cache, tokens)
    assert len(one.lines) == 1 and "cannot keep prompts in" in one.lines[0]
    one.folder.unlink()
    save_prompt(one, cache, tokens)
    assert one.restore(new_cache("qwen3"), tokens) >= 384, "it is there again"
    stat_of = os.stat

    def shut(path, *arguments, **named):
        if str(path).startswith(str(one.folder)):
            raise PermissionError(errno.EACCES, "Permission denied")
        return stat_of(path, *arguments, **named)

    monkeypatch.setattr(os, "stat", shut)
    assert one.restore(new_cache("qwen3"), tokens) == 0


def test_the_writer_thread_survives_errors(folder, monkeypatch):
    one, cache = folder(), new_cache("qwen3")
    tokens = random_tokens(cache.model.config, 400)
    monkeypatch.setattr(DiskStore, "write", lambda *_: 1 / 0)
    save_prompt(one, cache, tokens)
    assert len(one.lines) == 1 and "ZeroDivisionError" in one.lines[0]
    monkeypatch.undo()
    save_prompt(one, cache, [*tokens, 1])
    assert one.restore(new_cache("qwen3"), tokens) >= 384


@pytest.mark.parametrize("suffix", [BLOCK_SUFFIX, TAIL_SUFFIX])
def test_a_file_with_the_name_of_another_models_is_not_used(folder, tmp_path, suffix):
    """Both hold the same tokens."""
    one, other = new_cache("qwen3"), new_cache("qwen3")
    vectors = {name: vector + 1 for name, vector in other.model.weights.vectors.items()}
    other.model.weights = replace(other.model.weights, vectors=vectors)
    tokens = random_tokens(one.model.config, 200)
    stores = [folder(path=tmp_path / name) for name in ("one", "other")]
    for store, cache in zip(stores, (one, other), strict=True):
        save_prompt(store, cache, tokens)
    mine, foreign = (next(store.folder.glob(f"*{suffix}")) for store in stores)
    foreign.replace(mine)
    later = new_cache("qwen3")
    stores[0].restore(later, tokens)
    np.testing.assert_array_equal(later.forward(tokens, 2), new_cache("qwen3").forward(tokens, 2))
    assert "damaged" in stores[0].lines[0]


def test_q8_caches_and_hidden_states_are_restored(folder):
    """With kv="q8", and with a target that keeps hidden states for a head."""
    cache = new_cache("qwen3", "q8")
    tokens = random_tokens(cache.model.config, 500)
    save_prompt(folder(), cache, tokens)
    later = new_cache("qwen3", "q8")
    assert folder().restore(later, tokens) == 499 and not folder().restore(new_cache("qwen3"), tokens)
    np.testing.assert_array_equal(later.forward(tokens, 2), new_cache("qwen3", "q8").forward(tokens, 2))
    cache, later = (new_cache("qwen3").model.new_cache((0, 2)) for _ in range(2))
    save_prompt(folder(), cache, tokens)
    assert folder().restore(later, tokens) == 499
    np.testing.assert_array_equal(later.get_hidden_states(tokens, 0), cache.get_hidden_states(tokens, 0))


def test_keys_with_the_rope_factors_of_another_length_are_not_saved(folder):
    config, weights = load_fixture_weights("phi3_long")
    cache = Model(replace_config(config, longrope_threshold=BLOCK_TOKENS + 20), weights, 1, 2000).new_cache()
    tokens, prompts = random_tokens(config, BLOCK_TOKENS + 21), folder()
    cache.forward(tokens[:-1])
    assert not cache.has_long_rope
    prompts.save(cache, tokens)  # as a sequence that has just become too long for its factors
    prompts.flush()
    assert not [*prompts.folder.iterdir()]
    prompts.save(cache, tokens[:-1])
    prompts.flush()
    assert [*prompts.folder.iterdir()]
