"""Work stealing: every chunk of a phase is done exactly once, by any thread, with the bits of one thread."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from numba import types

from specdec.loaders import load_checkpoint
from specdec.loaders.model_loader import load_model
from specdec.model import get_architecture
from specdec.model.model import Model
from specdec.quant import INT8
from specdec.runtime import op_program as programs
from specdec.runtime.op_program import CACHE_LINE_WORDS, Executor, ForwardContext, Ints1, Kernel
from specdec.runtime.simd import atomic_load, emit_at_address, make_intrinsic
from specdec.runtime.work_stealing import NOT_FOUND, find_busiest_thread, get_chunk_range, take_chunk
from tests.tools import hf_folders
from tests.tools.checkpoint_files import ROOT
from tests.tools.hf_folders import FIXTURES, load_expected
from tests.tools.phases import MAX_WORK, split_phases
from tests.tools.random_models import fake_three_threads, run_sequentially, scatter_phases

# (address, n): add to the int64, in one order for all threads
atomic_add = make_intrinsic(
    types.int64, *[types.int64] * 2, emit=emit_at_address(lambda b, word, n: b.atomic_rmw("add", word, n, "seq_cst"))
)
MAX_SPINS = 1 << 31  # a few seconds, after which a waiting thread gives up
UNITS = 500


def start(run: ForwardContext, thread: int, started: Ints1, done: Ints1, waits: int) -> None:
    """started[thread] counts how often it starts the phase; thread 1 can wait there until others have done everything."""
    if run.is_first_chunk == 0:
        return
    started[thread] += 1
    spins = 0
    while thread == 1 and waits == 1 and atomic_load(done.ctypes.data) < UNITS and spins < MAX_SPINS:
        spins += 1


def count(run: ForwardContext, thread: int, units: Ints1, n_done: Ints1, done: Ints1, waits: int) -> None:
    """units[i] counts how often a unit was done, n_done[thread] by whom; thread 1 can wait in its first chunk."""
    first, last = get_chunk_range(units.size, run.chunk, run.n_chunks)
    spins = 0
    while thread == 1 and waits == 2 and atomic_load(done.ctypes.data) < UNITS - (last - first) and spins < MAX_SPINS:
        spins += 1
    for i in range(first, last):
        units[i] += 1
    n_done[thread] += last - first
    atomic_add(done.ctypes.data, last - first)


def take_chunks(run: ForwardContext, thread: int, taken: Ints1, words: Ints1) -> None:
    """Record which chunks of two threads in phases 7 to 9 are taken, in the order of the test."""
    queues, stride = words.ctypes.data, CACHE_LINE_WORDS * 8
    for i in range(7):
        taken[i] = take_chunk(queues, 7, 5, i in (0, 2, 5))
    taken[7] = take_chunk(queues + stride, 7, 3, True)
    taken[8] = find_busiest_thread(queues, stride, 7, 3, 2)
    taken[9] = find_busiest_thread(queues, stride, 8, 3, 2)
    taken[10] = take_chunk(queues + stride, 9, 1, False)
    taken[11] = take_chunk(queues + stride, 9, 1, True)


START, COUNT, TAKE_CHUNKS = (Kernel(function, cache=False) for function in (start, count, take_chunks))


@pytest.mark.parametrize(("work", "waits"), [(0, 0), (1 << 20, 0), (MAX_WORK, 0), (MAX_WORK, 1), (MAX_WORK, 2)])
def test_every_chunk_runs_once_and_each_thread_starts_a_phase_once(work: int, waits: int) -> None:
    """Also if one thread waits before its chunks, or in the first of them, for all others: they do the rest."""
    units, started, n_done, done = (np.zeros(n, np.int64) for n in (UNITS, 2, 2, 1))
    for _ in range(3):
        for array in (units, started, n_done, done):
            array[:] = 0
        Executor([[START(started, done, waits), COUNT(units, n_done, done, waits)._replace(bytes_per_token=work)]])(1, 0, 0, 2)
        assert (units == 1).all()
        assert started.tolist() == (n_done > 0).tolist()
        assert n_done.sum() == UNITS
        assert not waits or n_done[1] <= UNITS // 32


def test_own_chunks_are_taken_from_the_front_and_stolen_from_the_back() -> None:
    taken, words = np.zeros(12, np.int64), np.zeros(2 * CACHE_LINE_WORDS, np.int64)
    Executor([[TAKE_CHUNKS(taken, words)]])(1, 0, 0, 1)
    assert taken[:7].tolist() == [0, 4, 1, 3, 2, NOT_FOUND, NOT_FOUND]
    assert taken[7:9].tolist() == [0, 1]
    assert taken[9] == 0, "a phase that no thread has started"
    assert taken[10:].tolist() == [0, NOT_FOUND]


NAMES = [
    "llama",
    "gpt2",
    "gemma3",
    "qwen35",
    "lfm2",
    "qwen3_moe",
    "qwen35_moe",
    "granitemoe_shared",
    "gpt_oss",
    "lfm2_moe",
    "granite_h",
    "deepseek_v2",
    "deepseek_v3",
]


@pytest.mark.parametrize("name", NAMES)
def test_missing_threads_are_not_waited_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one of three threads runs, or one after another: TBB may run tasks in this way, and limits may leave fewer threads."""
    tokens = load_expected(name).tokens
    checkpoint = load_checkpoint(FIXTURES / name)
    weights = get_architecture(checkpoint.config).plan_weights(checkpoint.config, checkpoint.tensors).pack()
    alone = Model(checkpoint.config, weights, n_threads=1).new_cache()
    fake_three_threads(monkeypatch)
    cache = Model(checkpoint.config, weights, n_threads=3).new_cache()
    for threads in ((0,), (2,), (1, 0, 2)):
        with monkeypatch.context() as context:
            context.setattr(programs, "run_on_threads", run_sequentially(threads))
            cache.forward([], 0)
            for n in (40, 41, 60):
                np.testing.assert_array_equal(cache.forward(tokens[:n], 1), alone.forward(tokens[:n], 1))


@pytest.mark.parametrize("int8", [False, True], ids=["stored format", "int8"])
@pytest.mark.parametrize("name", hf_folders.NAMES)
def test_phases_do_not_depend_on_which_thread_ran_earlier_ones(name: str, int8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread runs each phase, which may not have run before."""
    tokens, checkpoint = load_expected(name).tokens, load_checkpoint(FIXTURES / name)
    weights = (
        get_architecture(checkpoint.config).plan_weights(checkpoint.config, checkpoint.tensors, INT8 if int8 else None).pack()
    )
    fake_three_threads(monkeypatch)
    alone, cache = (Model(checkpoint.config, weights, n_threads).new_cache() for n_threads in (1, 3))
    logits = [alone.forward(tokens[:n], 1).copy() for n in (1, 30, 37, 60)]
    monkeypatch.setattr(programs, "run_on_threads", scatter_phases(len(name)))
    for n, each in zip((1, 30, 37, 60), logits, strict=True):
        np.testing.assert_array_equal(cache.forward(tokens[:n], 1), each)


@pytest.mark.parametrize("int8", [False, True], ids=["stored format", "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_one_thread_for_any_number_of_chunks(name: str, int8: bool) -> None:
    tokens = load_expected(name).tokens
    alone, cache = (load_model(FIXTURES / name, int8, n_threads=n_threads).new_cache() for n_threads in (1, 2))
    cache.forward(tokens[:1])
    for work in (MAX_WORK, 1 << 20):
        for n in (60, 1, 7):
            split_phases(cache, work)
            cache.forward([], 0)
            np.testing.assert_array_equal(cache.forward(tokens[:n], n), alone.forward(tokens[:n], n))
            np.testing.assert_array_equal(cache.forward(tokens[: n + 1]), alone.forward(tokens[: n + 1]))


def test_logits_are_the_same_on_more_threads_than_there_are_cores() -> None:
    program = """
        import tests  # noqa: F401
        from specdec.loaders.model_loader import load_model
        from tests.tools.hf_folders import FIXTURES, load_expected
        from tests.tools.phases import split_phases
        for name in ("llama", "qwen35_moe"):
            tokens = load_expected(name).tokens
            bits = set()
            for n_threads in (1, 3, 5):
                cache = load_model(FIXTURES / name, n_threads=n_threads).new_cache()
                cache.forward(tokens[:1])
                if n_threads > 1:
                    split_phases(cache)
                bits.add(cache.forward(tokens, 60).tobytes() + cache.forward(tokens + tokens[:1]).tobytes())
            print(len(bits))
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=os.environ | {"NUMBA_NUM_THREADS": "5"}, cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert process.stdout.split() == ["1", "1"], process.stderr
