"""Prompts that are kept on disk: restored, a text has the bits that it has without; a file that is wrong counts as none."""

import errno
import gc
import os
import random
import stat
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from specdec.engine import prefix_cache
from specdec.engine.prefix_cache import BLOCK, ENDING, TAIL, PromptCache
from specdec.layers.base import Table
from specdec.loaders import load_checkpoint
from specdec.model import sliding_window
from specdec.model.registry import architecture_of
from specdec.model.transformer import Transformer
from specdec.quant import INT8
from tests.tools.hf_folders import FIXTURES
from tests.tools.random_models import tokens_for

NAMES = ("qwen3", "gemma3", "gemma4", "phi3_long", "lfm2", "qwen35", "qwen35_odd", "gpt2")
THERE = [name for name in NAMES if (FIXTURES / name / "config.json").exists()]


@cache
def weights_of(name, kind=None):
    checkpoint = load_checkpoint(FIXTURES / name)
    n = checkpoint.config.seq_len if architecture_of(checkpoint.config).learned_positions else 2000
    config = replace(checkpoint.config, seq_len=n)
    return config, architecture_of(config).pack(config, checkpoint.tensors, kind)


def model_of(name, kv="f16", kind=None, n_threads=1):
    return Transformer(*weights_of(name, kind), n_threads, kv=kv)


@pytest.fixture
def folder(tmp_path):
    caches, lines = [], []

    def made(n_bytes=10**9, revision=2, path=tmp_path / "prompts"):
        caches.append(PromptCache(path, n_bytes, revision, lines.append))
        caches[-1].lines = lines
        return caches[-1]

    yield made
    for each in caches:
        each.flush()


def read(model, tokens):
    assert [*model.read(tokens)][-1:] in ([], [0])


def kept(folder, model, tokens):
    read(model, tokens)
    folder.keep(model, tokens)
    folder.flush()


@pytest.mark.parametrize("kv", ["f16", "f32"])
@pytest.mark.parametrize("name", THERE)
def test_a_prompt_that_is_restored_goes_on_with_the_same_bits(folder, name, kv):
    model = model_of(name, kv)
    tokens = tokens_for(model.config, min(700, model.n_positions - 40))
    kept(folder(), model, tokens)
    for n in (len(tokens), len(tokens) - 3, len(tokens) - 70, 300):
        if n < BLOCK + 30 or n > len(tokens):
            continue
        new = [*tokens[:n], 5, 6, 7]
        later, plain = model_of(name, kv, n_threads=2), model_of(name, kv)
        restored = folder().restore(later, new)
        if model.has_state:
            ends = model.look(lambda _, held, snapshots: [each.n for each in snapshots])
            assert restored == max([end for end in ends if BLOCK <= end <= n], default=0)
            assert n < len(tokens) - 16 or restored == len(tokens) - 1 - 16
        else:
            assert n - BLOCK < restored <= n
        assert later.n_held == restored
        np.testing.assert_array_equal(later.forward(new, 3), plain.forward(new, 3))


@pytest.mark.parametrize("ends", [(700,), (150, 700), (*range(100, 701, 100),)], ids=["once", "twice", "often"])
def test_what_windows_have_given_back_is_never_written(folder, monkeypatch, ends):
    for name, number in (("MOST_BYTES", 0), ("LEAST", 128), ("STEP", 64)):
        monkeypatch.setattr(sliding_window, name, number)
    model = model_of("gemma3")
    tokens, files = tokens_for(model.config, 700), folder()
    for end in ends:
        model.forward(tokens[:end], 0)
        files.keep(model, tokens[:end])
        files.flush()
    assert model.whole_from > (3 * BLOCK if sliding_window.GIVES_BACK else -1)
    later = model_of("gemma3")
    monkeypatch.setattr(sliding_window, "MOST_BYTES", 1 << 40)
    plain = model_of("gemma3")
    restored = folder().restore(later, [*tokens, 5])
    if sliding_window.GIVES_BACK:
        assert restored == {1: 0, 2: 150, 7: 700}[len(ends)]
    for n in (701, 690, 300, 701):
        np.testing.assert_array_equal(later.forward([*tokens, 5][:n], 3), plain.forward([*tokens, 5][:n], 3))


def test_what_is_not_the_same_is_not_taken(folder):
    model = model_of("qwen3")
    tokens = tokens_for(model.config, 400)
    kept(folder(), model, tokens)
    assert folder().restore(model_of("qwen3"), tokens) >= 384
    assert not folder().restore(model_of("qwen3", "f32"), tokens)
    assert not folder().restore(model_of("qwen3", kind=INT8), tokens)
    assert not folder(revision=3).restore(model_of("qwen3"), tokens)
    assert not folder().restore(model_of("qwen3"), [tokens[0] + 1, *tokens[1:]])
    assert not folder().restore(model_of("qwen3"), tokens[:BLOCK])
    assert not folder().restore(model_of("qwen3"), tokens, "somebody else")
    other = [*tokens[:200], 1, *tokens[201:]]
    assert folder().restore(model_of("qwen3"), other) == BLOCK
    twin = model_of("qwen3")
    twin._weights = replace(twin.weights, matrices={**twin.weights.matrices, **{
        name: replace(matrix, strips=matrix.strips.copy()) for name, matrix in twin.weights.matrices.items()}})  # fmt: skip
    strips = next(iter(twin.weights.matrices.values())).strips.reshape(-1).view(np.uint8)
    strips[len(strips) // 2] ^= 1
    assert not folder().restore(twin, tokens), "one bit of the weights is another"
    twin = model_of("qwen3")
    name, matrix = next(iter(twin.weights.matrices.items()))
    other = replace(matrix, kind=replace(matrix.kind, name="another"))
    twin._weights = replace(twin.weights, matrices={**twin.weights.matrices, name: other})
    assert not folder().restore(twin, tokens), "the same bytes are other numbers"


def test_a_table_that_stays_in_its_file_tells_models_apart_by_the_rows_that_a_prompt_reads(folder):
    model = model_of("gemma4")
    rows, name = model.weights.tables["input_rows"].rows(range(70)), next(iter(model.weights.tables))
    first, tail, nowhere = 61, 62, 63
    tokens = [*tokens_for(model.config, 200)]
    tokens = [first if i == 100 else tail if i == 190 else 5 if token in (first, tail, nowhere) else token
              for i, token in enumerate(tokens)]  # fmt: skip
    kept(folder(), model, tokens)
    for row, n_restored in ((nowhere, 199), (first, 0), (tail, 190)):
        other = rows.copy()
        other[row] += 1
        twin, plain = model_of("gemma4"), model_of("gemma4")
        for each in (twin, plain):
            each._weights = replace(each.weights, tables={name: Table(other)})
        assert folder().restore(twin, [*tokens, 6]) == n_restored
        np.testing.assert_array_equal(twin.forward([*tokens, 6], 3), plain.forward([*tokens, 6], 3))


@pytest.mark.parametrize("n_flips", [1, 2, 3])
def test_weights_whose_signs_differ_are_told_apart(folder, n_flips):
    """The upper bits of words, of which a sum of words loses every other one."""
    model, twin = model_of("qwen3", "f32"), model_of("qwen3", "f32")
    tokens = tokens_for(model.config, 200)
    kept(folder(), model, tokens)
    vectors = {name: vector.copy() for name, vector in twin.weights.vectors.items()}
    max(vectors.values(), key=len)[1 : 2 * n_flips : 2] *= -1
    twin._weights = replace(twin.weights, vectors=vectors)
    assert folder().restore(twin, tokens) == 0


def test_what_a_model_holds_already_is_not_read_again(folder):
    model = model_of("qwen3")
    tokens = tokens_for(model.config, 500)
    kept(folder(), model, tokens)
    n = len(os.listdir(folder().folder))
    assert folder().restore(model, tokens) == 0
    kept(folder(), model, [*tokens, *tokens[:5]])
    assert len(os.listdir(folder().folder)) == n, "the tail alone is another"


def test_prompts_that_begin_alike_share_files_and_nobody_else_reads_them(folder):
    one, model = folder(), model_of("qwen3")
    tokens = tokens_for(model.config, 600)
    kept(one, model, tokens)
    before = {name for name in os.listdir(one.folder) if name.endswith(ENDING)}
    kept(one, model, [*tokens[:520], *tokens[:200]])
    after = {name for name in os.listdir(one.folder) if name.endswith(ENDING)}
    assert before < after and len(after - before) == 1
    assert {stat.S_IMODE((one.folder / name).stat().st_mode) for name in os.listdir(one.folder)} == {0o600}
    assert stat.S_IMODE(one.folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("n_damages", [150, pytest.param(1000, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("name", ["qwen3", "qwen35"])
def test_a_damaged_file_counts_as_none_and_gives_no_other_text(folder, name, n_damages):
    """Many damages each: bits, cuts, more at the end, files in each other's place, files of others."""
    rng, one, model = random.Random(name), folder(), model_of(name)
    tokens = tokens_for(model.config, 450)
    kept(one, model, tokens)
    expected = model_of(name).forward(tokens, 2).copy()
    sound = {file: file.read_bytes() for file in one.folder.iterdir()}
    later, n_restored = model_of(name), set()
    for i in range(n_damages):
        for file, data in sound.items():
            if not file.exists() or file.read_bytes() != data:
                file.write_bytes(data)
        for _ in range(rng.randrange(1, 3)):
            file = rng.choice([*sound])
            data = bytearray(sound[file])
            match rng.randrange(6):
                case 0:
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                case 1:
                    del data[rng.randrange(len(data)) :]
                case 2:
                    data += rng.randbytes(rng.randrange(1, 40))
                case 3:
                    data = bytearray(sound[rng.choice([*sound])])
                case 4:
                    at = rng.randrange(len(data))
                    data[at : at + 64] = rng.randbytes(len(data[at : at + 64]))
                case _:
                    data = bytearray(rng.randbytes(rng.randrange(100)))
            file.write_bytes(data)
        later.forward(tokens[:1])
        n_restored.add(one.restore(later, tokens))
        if i % 10:
            n = later.n_held
            later.forward(tokens[: n + 2], 1)
        np.testing.assert_array_equal(later.forward(tokens, 2), expected)
    assert len(n_restored) > 1 and len(one.lines) == 1 and "\n" not in one.lines[0]


def test_a_disk_that_is_full_is_told_once_and_leaves_nothing_half(folder, monkeypatch):
    one, model = folder(), model_of("qwen3")
    tokens = tokens_for(model.config, 400)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(prefix_cache.Path, "replace", full)
    kept(one, model, tokens)
    kept(one, model, [*tokens, 1])
    assert not os.listdir(one.folder) and len(one.lines) == 1 and "No space left" in one.lines[0]


def test_what_has_not_been_used_for_longest_goes(folder):
    model = model_of("qwen3")
    texts = [tokens_for(model.config, 300)[i:] + [i] * i for i in range(4)]
    size = 0
    for i, tokens in enumerate(texts):
        one = folder(n_bytes=max(int(2.5 * size), 1) if i else 10**9)
        kept(one, model, tokens)
        size = size or sum(file.stat().st_size for file in one.folder.iterdir())
        for file in one.folder.iterdir():
            if time.time() - file.stat().st_mtime < 100:
                os.utime(file, (time.time() - 1000 + 10 * i, time.time() - 1000 + 10 * i))
    assert sum(file.stat().st_size for file in one.folder.iterdir()) <= 2.6 * size
    assert folder().restore(model_of("qwen3"), texts[-1]) and not folder().restore(model_of("qwen3"), texts[0])


PROCESS = """
import sys
from tests.engine.test_prefix_cache import model_of, read, tokens_for
from specdec.engine.prefix_cache import PromptCache
model, folder = model_of("qwen3"), PromptCache(sys.argv[1], 10**9, 2, print)
for i in range(12):
    tokens = tokens_for(model.config, 300 + 20 * i)
    folder.restore(model, tokens)
    read(model, tokens)
    folder.keep(model, tokens)
folder.flush()
"""


def test_two_processes_share_a_folder(folder):
    one = folder()
    runs = [subprocess.Popen([sys.executable, "-c", PROCESS, str(one.folder)], stdout=subprocess.PIPE) for _ in range(2)]
    assert [run.communicate(timeout=300)[0] for run in runs] == [b"", b""] and [run.returncode for run in runs] == [0, 0]
    assert not [name for name in os.listdir(one.folder) if not name.endswith((ENDING, TAIL))]
    tokens = tokens_for(model_of("qwen3").config, 520)
    later = model_of("qwen3")
    assert one.restore(later, tokens) == 519 and not one.lines
    np.testing.assert_array_equal(later.forward(tokens, 2), model_of("qwen3").forward(tokens, 2))


def test_a_folder_that_cannot_be_had_is_refused(folder, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"cannot keep prompts in .*: it is no folder"):
        folder(path=tmp_path / "file")
    with pytest.raises(ValueError, match="cannot keep prompts in"):
        folder(path=Path(os.devnull) / "x")


def test_what_a_model_holds_stays_where_the_files_are_no_better(folder):
    one, model = folder(), model_of("qwen3")
    tokens = tokens_for(model.config, 700)
    kept(one, model, tokens)
    for file in one.folder.iterdir():
        file.write_bytes(b"x")
    model.forward(tokens[:300])
    assert one.restore(model, tokens) == 0 and model.n_held == 300
    np.testing.assert_array_equal(model.forward(tokens, 2), model_of("qwen3").forward(tokens, 2))


@pytest.mark.parametrize("name", ["qwen3", "qwen35"])
def test_a_shorter_tail_overwrites_nothing_that_is_held(folder, name):
    """The tail of a text of 150 tokens lies behind the first block, and the second block is damaged."""
    one, model = folder(), model_of(name)
    tokens = tokens_for(model.config, 500)
    for n in (500, 151):
        kept(one, model, tokens[:n])
    second = [*one._paths(model, tokens, 256, "")][1]
    second.write_bytes(second.read_bytes()[:-1])
    read(model, tokens[:231])
    assert one.restore(model, tokens) in (0, 150 - 16)
    np.testing.assert_array_equal(model.forward(tokens, 2), model_of(name).forward(tokens, 2))


def test_a_hybrid_whose_prompt_changed_in_the_middle_goes_on_from_a_state_on_disk(folder):
    model = model_of("qwen35")
    tokens = tokens_for(model.config, 1500)
    kept(folder(), model, tokens)
    new, later = [*tokens[:1200], 1, *tokens[1201:]], model_of("qwen35")
    restored = folder().restore(later, new)
    assert 600 < restored <= 1200
    np.testing.assert_array_equal(later.forward(new, 2), model_of("qwen35").forward(new, 2))


def test_a_prompt_that_is_too_long_keeps_its_beginning(folder):
    """And what is used in memory alone counts as used."""
    model, path = model_of("qwen3"), folder().folder
    one, two = tokens_for(model.config, 1000), tokens_for(model.config, 1000)[::-1]
    kept(folder(), model, one[: BLOCK + 1])
    size = max(file.stat().st_size for file in path.iterdir())
    small = folder(n_bytes=6 * size)
    kept(small, model, one)
    assert 3 * BLOCK <= folder().restore(model_of("qwen3"), one) <= 6 * BLOCK
    assert sum(file.stat().st_size for file in path.iterdir()) <= 6 * size
    past = time.time() - 1000
    for file in path.iterdir():
        os.utime(file, (past, past))
    small.keep(model, one)
    kept(small, model_of("qwen3"), two[: 2 * BLOCK + 1])
    assert folder().restore(model_of("qwen3"), two[: 2 * BLOCK + 2]) >= 2 * BLOCK
    assert folder().restore(model_of("qwen3"), one) >= BLOCK, "the end went first"


def test_room_is_made_of_our_own_files_alone_and_a_clock_that_was_set_back_costs_old_ones(folder):
    model = model_of("qwen3")
    tokens = tokens_for(model.config, 400)
    kept(folder(), model, tokens)
    path = folder().folder
    size = sum(file.stat().st_size for file in path.iterdir())
    theirs = [path / name for name in ("a.prompt", "long.tail.jpg", f"{'g' * 40}.prompt", "notes.promptly")]
    for file in theirs:
        file.write_bytes(b"x" * size)
        os.utime(file, (1, 1))
    half = path / f"{'0' * 40}{ENDING}.1.2"
    half.write_bytes(b"x" * size)
    for file in path.iterdir():
        if file not in theirs:
            os.utime(file, (time.time() + 10**7, time.time() + 10**7))
    new = tokens[::-1]
    kept(folder(n_bytes=int(1.2 * size)), model, new)
    assert all(map(os.path.exists, theirs)) and not half.exists()
    assert folder().restore(model_of("qwen3"), new) >= 3 * BLOCK and not folder().restore(model_of("qwen3"), tokens)


def test_a_cache_keeps_no_model_alive_and_knows_seats_by_what_they_keep(folder, monkeypatch):
    one, model = folder(), model_of("qwen3")
    tokens = tokens_for(model.config, 300)
    kept(one, model, tokens)
    n_sums, sums = [], prefix_cache.checksum
    monkeypatch.setattr(prefix_cache, "checksum", lambda arrays: n_sums.append(1) or sums(arrays))
    seat = model.seat()
    assert [*one._paths(seat, tokens, 256, "")] == [*one._paths(model, tokens, 256, "")] and not n_sums
    other = model.seat(hidden_layers=[1])
    assert not {*one._paths(other, tokens, 256, "")} & {*one._paths(model, tokens, 256, "")}
    gone = weakref.ref(model)
    del model, seat, other
    gc.collect()
    assert gone() is None


def test_a_folder_that_vanishes_or_shuts_is_told_once_and_harms_no_text(folder, monkeypatch):
    one, model = folder(), model_of("qwen3")
    tokens = tokens_for(model.config, 400)
    one.folder.rmdir()
    for _ in range(2):
        kept(one, model, tokens)
    assert len(one.lines) == 1 and "cannot keep prompts in" in one.lines[0]
    one.folder.mkdir()
    kept(one, model, tokens)
    assert one.restore(model_of("qwen3"), tokens) >= 384, "it is there again"
    stat_of = os.stat

    def shut(path, *arguments, **named):
        if str(path).startswith(str(one.folder)):
            raise PermissionError(errno.EACCES, "Permission denied")
        return stat_of(path, *arguments, **named)

    monkeypatch.setattr(os, "stat", shut)
    assert one.restore(model_of("qwen3"), tokens) == 0


def test_whatever_fails_while_a_file_is_written_the_thread_goes_on(folder, monkeypatch):
    one, model = folder(), model_of("qwen3")
    tokens = tokens_for(model.config, 400)
    monkeypatch.setattr(PromptCache, "_write", lambda *_: 1 / 0)
    kept(one, model, tokens)
    assert len(one.lines) == 1 and "ZeroDivisionError" in one.lines[0]
    monkeypatch.undo()
    kept(one, model, [*tokens, 1])
    assert one.restore(model_of("qwen3"), tokens) >= 384


FULL = """
import resource, sys
from tests.engine.test_prefix_cache import model_of, read, tokens_for
from specdec.engine.prefix_cache import PromptCache
model, folder = model_of("qwen3"), PromptCache(sys.argv[1], 10**9, 2, print)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
for n in (400, 500):
    read(model, tokens_for(model.config, n))
    folder.keep(model, tokens_for(model.config, n))
    folder.flush()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limits there")
def test_a_file_that_the_system_cuts_short_leaves_nothing(folder):
    """As a disk does that is full in the middle of a file."""
    one = folder()
    ran = subprocess.run([sys.executable, "-c", FULL, str(one.folder)], capture_output=True, text=True, timeout=300, check=True)
    assert len(ran.stdout.splitlines()) == 1 and "cannot keep prompts in" in ran.stdout
    assert not os.listdir(one.folder)


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.engine.test_prefix_cache import model_of, read, tokens_for
from specdec.engine.prefix_cache import PromptCache
model, folder = model_of("qwen3"), PromptCache(sys.argv[1], 10**9, 2, print)
n_left = int(sys.argv[2])

class Dies(Path(".").__class__):
    def replace(self, other):
        global n_left
        n_left -= 1
        if n_left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().replace(other)

folder.folder = Dies(folder.folder)
read(model, tokens_for(model.config, 700))
folder.keep(model, tokens_for(model.config, 700))
folder.flush()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no such signal there")
@pytest.mark.parametrize("n_whole", [0, 2])
def test_what_was_killed_while_it_wrote_leaves_what_was_whole(folder, n_whole):
    one, tokens = folder(), tokens_for(model_of("qwen3").config, 700)
    ran = subprocess.run([sys.executable, "-c", KILLED, str(one.folder), str(n_whole)], timeout=300, check=False)
    assert ran.returncode < 0
    later = model_of("qwen3")
    assert one.restore(later, tokens) == n_whole * BLOCK and not one.lines
    np.testing.assert_array_equal(later.forward(tokens, 2), model_of("qwen3").forward(tokens, 2))
    kept(one, later, tokens)
    assert folder().restore(model_of("qwen3"), tokens) == 699


def test_bytes_and_a_head_find_their_own(folder):
    """--kv q8, and a target whose hidden states a head reads: they are restored with keys and values."""
    model = model_of("qwen3", "q8")
    tokens = tokens_for(model.config, 500)
    kept(folder(), model, tokens)
    later = model_of("qwen3", "q8")
    assert folder().restore(later, tokens) == 499 and not folder().restore(model_of("qwen3"), tokens)
    np.testing.assert_array_equal(later.forward(tokens, 2), model_of("qwen3", "q8").forward(tokens, 2))
    model, later = model_of("qwen3"), model_of("qwen3")
    model.hidden_layers = later.hidden_layers = (0, 2)
    kept(folder(), model, tokens)
    assert folder().restore(later, tokens) == 499
    np.testing.assert_array_equal(later.hidden(tokens, 0), model.hidden(tokens, 0))
