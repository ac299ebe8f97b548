"""Threads: one parallel region for a whole pass, and how they wait in it."""

import ctypes
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from numba import prange, types

from specdec.runtime.code_cache import compiled, inlined, inner, parallel
from specdec.runtime.simd import call

# Who waits spins for some 0.05 ms, then sleeps in turns: a thread that wakes up is scheduled at once, one that spins or yields
# on a busy machine waits for its time slice. Two busy loops beside stories3M + 260K: 3300 tok/s, sched_yield 11 to 76.
SPINS = 20_000
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # likewise between regions, before libgomp starts: 2200 tok/s, else 75

_sleep: Any = getattr(ctypes, "windll").kernel32.Sleep if sys.platform == "win32" else ctypes.CDLL(None).usleep  # noqa: B009
llvmlite.binding.add_symbol("specdec_sleep", ctypes.cast(_sleep, ctypes.c_void_p).value)
sleep = types.ExternalFunction("specdec_sleep", types.int32(types.uint32))  # the shortest there is, for 1


@inner
def pause(n):
    """Wait a little, for the n-th time: spinning at first, then asleep."""
    if n > SPINS:
        sleep(1)


# numba's own, by the names that its regions call them by: from Python they take 2 us, and its compiled face cannot be kept
get_num_threads = types.ExternalFunction("get_num_threads", types.intp())
set_num_threads = types.ExternalFunction("set_num_threads", types.void(types.intp))


@inlined
def use_threads(n):
    """How many threads this thread's regions took so far; n from now on."""
    before = get_num_threads()
    set_num_threads(n)
    return before


@parallel
def run_region(function, a, b, first, last, n_threads):
    """function(a, b, first, last, thread) on every thread."""
    before = use_threads(n_threads)
    for i in prange(n_threads):
        call(function, (a, b, first, last, np.int64(i)))
    set_num_threads(before)


@compiled
def run_alone(function, a, b, first, last):
    """function(a, b, first, last, 0) on this thread, which needs no threading layer."""
    call(function, (a, b, first, last, np.int64(0)))


_one_region_at_a_time = threading.RLock()  # two would fight for the cores, and without OpenMP numba aborts the process
_threads_are_gone = False  # in the child of a fork
_locks: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # whose, and the attribute's name


def give_lock(owner: Any, name: str) -> None:
    """owner.name becomes a lock, and another one in the child of a fork: who holds it there may be a thread that is gone."""
    setattr(owner, name, threading.RLock())
    _locks[owner] = name


def _after_fork() -> None:
    global _threads_are_gone, _one_region_at_a_time
    _threads_are_gone = _threads_have_run
    _one_region_at_a_time = threading.RLock()
    for owner, name in [*_locks.items()]:
        give_lock(owner, name)


_threads_have_run = False
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def run_on_threads(function: int, a: int, b: int, first: int, last: int, n_threads: int) -> None:
    """function(a, b, first, last, thread), by its address, on so many threads, this one among them.

    Raises RuntimeError for several threads in a forked process.
    """
    global _threads_have_run
    if n_threads == 1:
        run_alone(function, a, b, first, last)
        return
    if _threads_are_gone:
        raise RuntimeError(
            "this process was forked from one that has run a model, and its threads are gone: "
            "start processes with multiprocessing.get_context('spawn')"
        )
    with _one_region_at_a_time:
        _threads_have_run = True
        run_region(function, a, b, first, last, n_threads)


def available_threads() -> int:
    """How many threads the machine gives this process."""
    return int(numba.config.NUMBA_NUM_THREADS)


def rebuilt(kind: Callable[..., Any], parts: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """An object from its pickled or copied parts, maybe on a machine of fewer cores than its n_threads."""
    fewer = {"n_threads": min(named["n_threads"], available_threads())} if "n_threads" in named else {}
    return kind(*parts, **{**named, **fewer})
