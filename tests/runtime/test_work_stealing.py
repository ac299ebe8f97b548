"""Work stealing: every chunk of a phase is done exactly once, by any thread, with the bits of one thread."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from specdec.loaders import load_checkpoint
from specdec.loaders.loader import load_model
from specdec.model.registry import architecture_of
from specdec.model.transformer import Transformer
from specdec.quant import INT8
from specdec.runtime import program as programs
from specdec.runtime.program import LINE, N_ROWS, WORK, Ints1, Operation, Pass, Runner
from specdec.runtime.simd import atomic_add, atomic_load
from specdec.runtime.work_stealing import NOBODY, farthest_behind, share, take_part, victim
from tests.tools import hf_folders
from tests.tools.checkpoint_files import ROOT
from tests.tools.hf_folders import FIXTURES, expected
from tests.tools.random_models import in_turn, scattered, three_threads

MUCH = 1 << 40  # work that is cut in as many parts as there may be
SPINS = 1 << 31  # some seconds, after which nobody comes any more
UNITS = 500


def begin(run: Pass, thread: int, begun: Ints1, done: Ints1, waits: int) -> None:
    """begun[thread] counts how often it begins; one of them waits there until others have done all there is."""
    if run.begins == 0:
        return
    begun[thread] += 1
    spins = 0
    while thread == 1 and waits == 1 and atomic_load(done.ctypes.data) < UNITS and spins < SPINS:
        spins += 1


def count(run: Pass, thread: int, units: Ints1, took: Ints1, done: Ints1, waits: int) -> None:
    """units[i] counts how often a unit was done, took[thread] by whom; one thread's first part waits for all others."""
    first, last = share(units.size, run.part, run.n_parts)
    spins = 0
    while thread == 1 and waits == 2 and atomic_load(done.ctypes.data) < UNITS - (last - first) and spins < SPINS:
        spins += 1
    for i in range(first, last):
        units[i] += 1
    took[thread] += last - first
    atomic_add(done.ctypes.data, last - first)


def take(run: Pass, thread: int, taken: Ints1, words: Ints1) -> None:
    """What two threads' parts of phases 7 to 9 come to, taken as the test says."""
    lines, stride = words.ctypes.data, LINE * 8
    for i in range(7):
        taken[i] = take_part(lines, 7, 5, i in (0, 2, 5))
    taken[7] = take_part(lines + stride, 7, 3, True)
    taken[8] = farthest_behind(lines, stride, 7, 3, 0, 2)
    taken[9] = farthest_behind(lines, stride, 8, 3, 0, 2)
    taken[10] = take_part(lines + stride, 9, 1, False)
    taken[11] = take_part(lines + stride, 9, 1, True)


def rob(run: Pass, thread: int, victims: Ints1, words: Ints1) -> None:
    """Of whom each of five threads on two nodes takes, before anybody has taken a part, and when their own node has none."""
    lines, stride = words.ctypes.data, LINE * 8
    for phase in range(1, 4):
        for i in range(min(phase, 3)):  # the first three threads are on the first node
            take_part(lines + i * stride, phase, 1, True)
        victims[phase - 1] = victim(lines, stride, phase, 1, 0, 5, 2)
    for i in range(3, 5):
        take_part(lines + i * stride, 6, 1, True)
    victims[3] = victim(lines, stride, 6, 1, 4, 5, 2)
    for i in range(3):
        take_part(lines + i * stride, 6, 1, True)
    victims[4] = victim(lines, stride, 6, 1, 4, 5, 2)


BEGIN, COUNT, TAKE, ROB = (Operation(function, kept=False) for function in (begin, count, take, rob))


@pytest.mark.parametrize(("work", "waits"), [(0, 0), (1 << 20, 0), (MUCH, 0), (MUCH, 1), (MUCH, 2)])
def test_every_part_is_done_once_and_threads_that_do_any_begin_once(work: int, waits: int) -> None:
    """Where one thread waits, in front of its parts or in the first of them, for those of all others: others do the rest."""
    units, begun, took, done = (np.zeros(n, np.int64) for n in (UNITS, 2, 2, 1))
    for _ in range(3):
        for array in (units, begun, took, done):
            array[:] = 0
        Runner([[BEGIN(begun, done, waits), COUNT(units, took, done, waits)._replace(work=work)]])(1, 0, 0, 2)
        assert (units == 1).all()
        assert begun.tolist() == (took > 0).tolist()
        assert took.sum() == UNITS
        assert not waits or took[1] <= UNITS // 32


def test_a_threads_parts_go_from_the_front_and_to_others_from_the_back() -> None:
    taken, words = np.zeros(12, np.int64), np.zeros(2 * LINE, np.int64)
    Runner([[TAKE(taken, words)]])(1, 0, 0, 1)
    assert taken[:7].tolist() == [0, 4, 1, 3, 2, NOBODY, NOBODY]
    assert taken[7:9].tolist() == [0, 1]
    assert taken[9] == 0, "of a phase in which nobody has begun"
    assert taken[10:].tolist() == [0, NOBODY]


def test_parts_are_taken_within_a_node_of_memory_while_there_are_any() -> None:
    victims, words = np.zeros(5, np.int64), np.zeros(5 * LINE, np.int64)
    Runner([[ROB(victims, words)]])(1, 0, 0, 1)
    assert victims.tolist() == [1, 2, 3, 0, NOBODY]


NAMES = ["llama", "gpt2", "gemma3", "qwen35", "lfm2", "qwen3_moe", "qwen35_moe", "granitemoe_shared", "gpt_oss", "lfm2_moe"]


def cut(model: object, work: int = MUCH) -> None:
    """Every phase of a model's program in as many parts as there may be."""
    rows = model._runner._rows  # type: ignore[attr-defined]
    rows[rows[:, N_ROWS] > 0, WORK] = work


@pytest.mark.parametrize("name", NAMES)
def test_threads_that_never_come_are_not_waited_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of three runs, or one behind the other: TBB may run its tasks so, and limits from outside may leave fewer threads."""
    tokens = expected(name).tokens
    checkpoint = load_checkpoint(FIXTURES / name)
    weights = architecture_of(checkpoint.config).pack(checkpoint.config, checkpoint.tensors)
    alone = Transformer(checkpoint.config, weights, n_threads=1)
    three_threads(monkeypatch)
    model = Transformer(checkpoint.config, weights, n_threads=3)
    for which in ((0,), (2,), (1, 0, 2)):
        with monkeypatch.context() as context:
            context.setattr(programs, "run_on_threads", in_turn(which))
            model.forward([], 0)
            for n in (40, 41, 60):
                np.testing.assert_array_equal(model.forward(tokens[:n], 1), alone.forward(tokens[:n], 1))


@pytest.mark.parametrize("int8", [False, True], ids=["as they are", "int8"])
@pytest.mark.parametrize("name", hf_folders.NAMES)
def test_no_phase_needs_what_its_thread_made_in_another_one(name: str, int8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each phase is another thread's, which may not have been there before."""
    tokens, checkpoint = expected(name).tokens, load_checkpoint(FIXTURES / name)
    weights = architecture_of(checkpoint.config).pack(checkpoint.config, checkpoint.tensors, INT8 if int8 else None)
    three_threads(monkeypatch)
    alone, model = (Transformer(checkpoint.config, weights, n_threads) for n_threads in (1, 3))
    logits = [alone.forward(tokens[:n], 1).copy() for n in (1, 30, 37, 60)]
    monkeypatch.setattr(programs, "run_on_threads", scattered(len(name)))
    for n, each in zip((1, 30, 37, 60), logits, strict=True):
        np.testing.assert_array_equal(model.forward(tokens[:n], 1), each)


@pytest.mark.parametrize("int8", [False, True], ids=["as they are", "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_one_thread_however_phases_are_cut(name: str, int8: bool) -> None:
    tokens = expected(name).tokens
    alone = load_model(FIXTURES / name, int8, n_threads=1)
    model = load_model(FIXTURES / name, int8, n_threads=2)
    model.forward(tokens[:1])
    for work in (MUCH, 1 << 20):
        for n in (60, 1, 7):
            cut(model, work)
            model.forward([], 0)
            np.testing.assert_array_equal(model.forward(tokens[:n], n), alone.forward(tokens[:n], n))
            np.testing.assert_array_equal(model.forward(tokens[: n + 1]), alone.forward(tokens[: n + 1]))


def test_logits_are_the_same_on_more_threads_than_there_are_cores() -> None:
    program = """
        import tests  # noqa: F401
        from specdec.loaders.loader import load_model
        from tests.runtime.test_work_stealing import FIXTURES, cut, expected
        for name in ("llama", "qwen35_moe"):
            tokens = expected(name).tokens
            bits = set()
            for n_threads in (1, 3, 5):
                model = load_model(FIXTURES / name, n_threads=n_threads)
                model.forward(tokens[:1])
                if n_threads > 1:
                    cut(model)
                bits.add(model.forward(tokens, 60).tobytes() + model.forward(tokens + tokens[:1]).tobytes())
            print(len(bits))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=os.environ | {"NUMBA_NUM_THREADS": "5"}, cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.split() == ["1", "1"], done.stderr
