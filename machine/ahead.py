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
from importlib.util import module_from_spec, spec_from_file_location
from pkgutil import resolve_name

if __name__ == "__main__":
    path, package, file, jobs = json.loads(sys.argv[1])
    sys.path[:] = path  # of the process that began this one
    spec = spec_from_file_location(package, file, submodule_search_locations=[os.path.dirname(file)])
    assert spec and spec.loader
    sys.modules[package] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[package])
    import_module(f"{package}.machine.ahead").work(jobs)

from . import cache
from .programs import Operation
from .threads import available_threads

LEAST_MISSING = 3  # operations: fewer are compiled sooner than a process begins
MOST_PROCESSES = 2  # beside this one: more would find nothing to do


def compile_ahead(operations: Sequence[Operation], dear: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    """Begin to compile operations, in the order in which this process will need them, from the last one on.

    dear: names of what takes longest, operations or functions of the package, as "room.name", that the processes begin with.
    They end with this one, or by `end`.
    """
    missing = [operation for operation in operations if not operation.is_compiled]
    n = min(available_threads() - 1, MOST_PROCESSES)
    if len(missing) < LEAST_MISSING or not cache.folder():
        return []
    names = [operation.name for operation in reversed(missing)]
    package = __name__.rpartition(".machine")[0]
    processes = []
    for i in range(n):
        told = json.dumps([sys.path, package, sys.modules[package].__file__, [*dear[i::n], *names]])
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
    cache.claims.waits = False
    package = __name__.rpartition(".machine")[0]
    for job in jobs:
        with suppress(Exception):  # `Taken`, or what the other process will tell
            thing = resolve_name(f"{package}.{job}")
            _ = thing.address if isinstance(thing, Operation) else thing()
    os._exit(0)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)
