"""Ahead-of-time compilation in other processes: a first run takes half as long on two cores.

A process gets jobs, names of kernels and of functions that use the code they compile, and runs them one by one. Its code goes to
the cache, and a process that needs a function which another is compiling waits for it (`code_cache.compile_locks`).
"""

import atexit
import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pkgutil import resolve_name

if __name__ == "__main__":
    gc.disable()  # loaded modules stay
    search_path, jobs = json.loads(sys.argv[1])
    sys.path[:] = search_path  # of the process that started this one
    import_module("specdec.runtime.compile_ahead").run_jobs(jobs)

from specdec.runtime import code_cache
from specdec.runtime.op_program import Kernel
from specdec.runtime.parallel_region import get_available_threads

# Functions that every run needs, in addition to the kernels of its passes
COMMON_FUNCTIONS = (
    "kernels.fill_rope_tables",
    "runtime.memory.touch_words",
    "runtime.op_program.run_ops",
    "runtime.parallel_region.run_parallel_region",
    "runtime.parallel_region.run_single_threaded",
    "sampling.draw",
)
MIN_MISSING_KERNELS = 3  # fewer are compiled before a process has started
MAX_PROCESSES = 2  # in addition to this one: more would find nothing to do


def compile_ahead(kernels: Sequence[Kernel], slow_names: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    """Start up to MAX_PROCESSES processes that compile kernels into the cache, the last kernel first, and return the processes.

    They end with this process or by `stop_processes`. The list is empty if fewer than MIN_MISSING_KERNELS kernels are missing or
    there is no cache.

    Args:
        kernels: In the order in which this process will need them.
        slow_names: Kernels or functions of the package that take longest, as "module.name"; the processes start with them.
    """
    missing = [kernel for kernel in kernels if not kernel.is_compiled]
    code_cache.expect_functions([*COMMON_FUNCTIONS, *(kernel.name for kernel in missing)])
    n = min(get_available_threads() - 1, MAX_PROCESSES)
    if len(missing) < MIN_MISSING_KERNELS or not code_cache.is_kept():
        return []
    names = [kernel.name for kernel in reversed(missing)]
    processes = []
    for i in range(n):
        job_args = json.dumps([sys.path, [*slow_names[i::n], *names]])
        with suppress(OSError):  # without another process, this one compiles everything
            process = subprocess.Popen(
                [sys.executable, "-E", __file__, job_args],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            processes.append(process)
    if processes:
        atexit.register(stop_processes, processes)
    return processes


def stop_processes(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill the processes of `compile_ahead` and wait for their end; code that they have not compiled is not needed any more."""
    for process in processes:
        with process:
            process.kill()


def run_jobs(jobs: Sequence[str]) -> None:
    """Compile the kernels and call the functions named in `jobs`, in a process of `compile_ahead`, then exit the process.

    Skips jobs that another process is compiling, and jobs that raise. The process also exits when its parent ends.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    gc.freeze()
    gc.enable()
    code_cache.compile_locks.is_blocking = False
    for job in jobs:
        with suppress(Exception):  # `BlockingIOError`, or an error that the other process will report
            target = resolve_name(f"specdec.{job}")
            _ = target.address if isinstance(target, Kernel) else target()
    os._exit(0)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)
