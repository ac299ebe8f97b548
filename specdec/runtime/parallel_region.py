"""Threads: one parallel region for a whole forward pass, and how threads wait in it."""

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

from specdec.runtime.code_cache import compiled, inlined, jitable, parallel
from specdec.runtime.simd import call_address

# A waiting thread spins for about 0.05 ms, then sleeps repeatedly: a thread that wakes up is scheduled at once, while one that
# spins or yields on a busy machine waits for its time slice. stories3M + 260K next to two busy loops: 3300 tok/s, with
# sched_yield 11 to 76.
MAX_SPINS = 20_000
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # the same between regions, set before libgomp starts: 2200 tok/s, else 75

_sleep: Any = getattr(ctypes, "windll").kernel32.Sleep if sys.platform == "win32" else ctypes.CDLL(None).usleep  # noqa: B009
llvmlite.binding.add_symbol("specdec_sleep", ctypes.cast(_sleep, ctypes.c_void_p).value)
sleep = types.ExternalFunction("specdec_sleep", types.int32(types.uint32))  # sleep(1) is the shortest possible


@jitable
def pause(n):
    """Wait a little, as the n-th wait in a row: return at once up to MAX_SPINS, then sleep for the shortest time."""
    if n > MAX_SPINS:
        sleep(1)


# numba's functions under the names that its regions call: from Python they take 2 us, and numba's compiled versions cannot be
# cached.
get_num_threads = types.ExternalFunction("get_num_threads", types.intp())
set_num_threads = types.ExternalFunction("set_num_threads", types.void(types.intp))


@inlined
def swap_num_threads(n):
    """Set how many threads the parallel regions of the calling thread use, and return the previous number."""
    before = get_num_threads()
    set_num_threads(n)
    return before


@parallel
def run_parallel_region(function, a, b, first, last, n_threads):
    """Call function(a, b, first, last, thread), given by its address, for each thread number below n_threads, in parallel."""
    before = swap_num_threads(n_threads)
    for i in prange(n_threads):
        call_address(function, (a, b, first, last, np.int64(i)))
    set_num_threads(before)


@compiled
def run_single_threaded(function, a, b, first, last):
    """Call function(a, b, first, last, 0), given by its address, on the calling thread, without numba's threading layer.

    That saves 1.4 us, 7% of a pass of stories260K.
    """
    call_address(function, (a, b, first, last, np.int64(0)))


_region_lock = threading.RLock()  # two regions would compete for the cores, and without OpenMP numba aborts the process
_has_lost_threads = False  # in the child of a fork
_locks: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()  # owner -> attribute name


def create_fork_safe_lock(owner: object, name: str) -> None:
    """Set the attribute `name` of owner to a new reentrant lock, which is replaced by an unlocked one in the child of a fork.

    The thread that holds the lock may not exist in the child.
    """
    setattr(owner, name, threading.RLock())
    _locks[owner] = name


def _after_fork() -> None:
    global _has_lost_threads, _region_lock
    _has_lost_threads = _has_run_threads
    _region_lock = threading.RLock()
    for owner, name in [*_locks.items()]:
        create_fork_safe_lock(owner, name)


_has_run_threads = False
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def run_on_threads(function: int, a: int, b: int, first: int, last: int, n_threads: int) -> None:
    """Call function(a, b, first, last, thread), given by its address, on n_threads threads, and return when all are done.

    The calling thread is one of them. Only one call with several threads runs at a time.

    Raises:
        RuntimeError: The process was forked from one that used threads, and n_threads is more than 1.
    """
    global _has_run_threads
    if n_threads == 1:
        run_single_threaded(function, a, b, first, last)
        return
    if _has_lost_threads:
        raise RuntimeError(
            "this process was forked from one that has run a model, and its threads are gone: "
            "start processes with multiprocessing.get_context('spawn')"
        )
    with _region_lock:
        _has_run_threads = True
        run_parallel_region(function, a, b, first, last, n_threads)


def get_available_threads() -> int:
    """Return the maximum number of threads that this process may use (NUMBA_NUM_THREADS)."""
    return int(numba.config.NUMBA_NUM_THREADS)


def rebuild(factory: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, Any]) -> object:
    """Return factory(*args, **kwargs) to rebuild a pickled or copied object, with n_threads limited to this machine's threads."""
    fewer = {"n_threads": min(kwargs["n_threads"], get_available_threads())} if "n_threads" in kwargs else {}
    return factory(*args, **{**kwargs, **fewer})
