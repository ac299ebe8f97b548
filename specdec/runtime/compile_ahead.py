"""Compiling in other processes what this one is about to need: a first run takes half as long on two cores. Knows no models.

A process is told jobs, names of operations and of functions that use what they compile, and runs them one by one; what it has
compiled lies where machine code is kept, and whoever needs something that it is at waits for that (`cache.claims`).
"""

import atexit
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
    search_path, jobs = json.loads(sys.argv[1])
    sys.path[:] = search_path  # that of the process that started this one
    import_module("specdec.runtime.compile_ahead").work(jobs)

from specdec.runtime import code_cache
from specdec.runtime.program import Operation
from specdec.runtime.threads import available_threads

LEAST_MISSING = 3  # operations: fewer are compiled sooner than a process begins
MOST_PROCESSES = 2  # beside this one: more would find nothing to do


def compile_ahead(operations: Sequence[Operation], dear: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    """Begin to compile operations, in the order in which this process will need them, from the last one on.

    dear: names of what takes longest, operations or functions of the package, as "room.name", that the processes begin with.
    They end with this one, or by `end`.
    """
    missing = [operation for operation in operations if not operation.is_compiled]
    n = min(available_threads() - 1, MOST_PROCESSES)
    if len(missing) < LEAST_MISSING or not code_cache.folder():
        return []
    names = [operation.name for operation in reversed(missing)]
    processes = []
    for i in range(n):
        told = json.dumps([sys.path, [*dear[i::n], *names]])
        with suppress(OSError):  # no process to be had: this one compiles everything
            process = subprocess.Popen(
                [sys.executable, "-E", __file__, told],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            processes.append(process)
    if processes:
        atexit.register(end, processes)
    return processes


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """What they have not compiled is not needed any more."""
    for process in processes:
        with process:
            process.kill()


def work(jobs: Sequence[str]) -> None:
    """As such a process: run the jobs, but for what others are at."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    code_cache.claims.waits = False
    for job in jobs:
        with suppress(Exception):  # `Taken`, or what the other process will tell
            thing = resolve_name(f"specdec.{job}")
            _ = thing.address if isinstance(thing, Operation) else thing()
    os._exit(0)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)
