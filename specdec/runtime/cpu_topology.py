"""The cores of this machine: how many are fast and how many slow, how many threads they run, and where their memory is.

Linux tells by /sys (topology, cpu_capacity on ARM, cpu_core and cpu_atom of Intel's hybrids, node) and limits by cgroups and
affinity; macOS by sysctl (hw.perflevel), Windows by GetLogicalProcessorInformationEx. Where nothing tells, all cores are alike.
"""

import ctypes
import functools
import os
import sys
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from specdec.runtime.threads import available_threads

SYSTEM, CGROUP = Path("/sys/devices/system"), Path("/sys/fs/cgroup/cpu.max")
SLOW_SHARE = 0.7  # of the fastest core's capacity: cores below are slow
MAC_LEVELS = "hw.perflevel{}.physicalcpu"  # 0: the fast ones
PROCESSOR_CORE, HEAD_BYTES, EFFICIENCY_AT, MASK_AT = 0, 8, 9, 32  # of Windows' records (winnt.h)


class Cores(NamedTuple):
    """Cores that this process may use: fast and slow ones, the threads that they run in all, and nodes of memory.

    quota: how many cores' time it may take; 0: there is no limit.
    """

    fast: int
    slow: int
    threads: int
    nodes: int = 1
    quota: int = 0

    def choices(self, most: int) -> list[int]:
        """Numbers of threads that may be best, `most` at most: one for each core, which is the first guess, one for each fast
        core, one for each thread of them, and one."""
        likely = (self.fast + self.slow, self.fast, self.threads, 1)
        return [*dict.fromkeys(min(n, most, self.quota or most) for n in likely)]

    @property
    def words(self) -> str:
        """What there is, for people."""
        n = self.fast + self.slow
        cores = f"{self.fast} fast and {self.slow} slow cores" if self.slow else f"{n} core{'s' * (n > 1)}"
        more = f" of {self.threads} threads" if self.threads > n else ""
        return cores + more + (f", time for {self.quota}" if self.quota else "")


def listed(text: str) -> set[int]:
    """The numbers of a list as Linux writes it, "0-3,8"."""
    spans = [span.split("-") for span in text.strip().split(",") if span]
    return {i for span in spans for i in range(int(span[0]), int(span[-1]) + 1)}


def of_linux(allowed: Collection[int], system: Path = SYSTEM, cgroup: Path = CGROUP) -> Cores:
    """Of the CPUs of those numbers. Raises OSError and ValueError where the system does not tell."""
    siblings, capacity = dict[int, frozenset[int]](), dict[int, int]()
    for cpu in allowed:
        place = system / "cpu" / f"cpu{cpu}"
        siblings[cpu] = frozenset(listed((place / "topology" / "thread_siblings_list").read_text()) & {*allowed})
        with suppress(OSError, ValueError):
            capacity[cpu] = int((place / "cpu_capacity").read_text())
    slow = {cpu for cpu, of in capacity.items() if of < SLOW_SHARE * max(capacity.values())}
    with suppress(OSError):
        slow |= listed((system.parent / "cpu_atom" / "cpus").read_text())
    cores = {*siblings.values()}
    n_slow = sum(bool(core & slow) for core in cores)
    n_slow = n_slow if n_slow < len(cores) else 0  # slow beside none
    nodes = [listed(path.read_text()) & {*allowed} for path in sorted((system / "node").glob("node[0-9]*/cpulist"))]
    return Cores(len(cores) - n_slow, n_slow, len(siblings), max(sum(map(bool, nodes)), 1), _quota(cgroup))


def _quota(cgroup: Path) -> int:
    """How many cores' time a container may take, rounded up; 0: all."""
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = cgroup.read_text().split()
        return max(-(-int(quota) // int(period)), 1)
    return 0


def of_mac(told: Any) -> Cores:
    """told: gives the number of a name of sysctl, or 0."""
    fast, slow = (told(MAC_LEVELS.format(level)) for level in (0, 1))
    fast = fast or told("hw.physicalcpu") or 1
    return Cores(fast, slow, max(told("hw.logicalcpu"), fast + slow))


def of_windows(records: bytes) -> Cores:
    """Of the records of cores: their efficiency class, higher for faster ones, and the threads of each."""
    cores, at = list[tuple[int, int]](), 0
    while at + HEAD_BYTES <= len(records):
        kind, size = (int.from_bytes(records[at + 4 * i : at + 4 * i + 4], "little") for i in range(2))
        if not HEAD_BYTES <= size <= len(records) - at:
            raise ValueError(f"a record of {size} bytes")
        if kind == PROCESSOR_CORE:
            mask = records[at + MASK_AT : at + MASK_AT + 8]
            cores.append((records[at + EFFICIENCY_AT], int.from_bytes(mask, "little").bit_count()))
        at += size
    fastest = max(level for level, _ in cores)
    n_fast = sum(level == fastest for level, _ in cores)
    return Cores(n_fast, len(cores) - n_fast, sum(n for _, n in cores))


def _sysctl(name: str) -> int:
    value, size = ctypes.c_int64(0), ctypes.c_size_t(8)
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return 0 if failed else value.value


def _records() -> bytes:
    """Of all cores, as Windows tells them."""
    ask, size = getattr(ctypes, "windll").kernel32.GetLogicalProcessorInformationEx, ctypes.c_uint32(0)  # noqa: B009
    ask(PROCESSOR_CORE, None, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    return buffer.raw if ask(PROCESSOR_CORE, buffer, ctypes.byref(size)) else b""


def allowed_cpus() -> Iterable[int]:
    """The numbers of the CPUs that this process may run on, where the system tells; else of all."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


@functools.cache
def known() -> Cores:
    """This machine's, or as many alike as there are threads, where it does not tell."""
    allowed = [*allowed_cpus()]
    with suppress(OSError, ValueError, AttributeError, IndexError):
        if sys.platform == "darwin":
            return of_mac(_sysctl)
        return of_windows(_records()) if sys.platform == "win32" else of_linux(allowed)
    return Cores(len(allowed), 0, len(allowed))


def thread_choices() -> list[int]:
    """Numbers of threads that may be best on this machine, the likeliest first."""
    return known().choices(available_threads())


def keep_threads_by_their_memory() -> None:
    """Before threads begin: where memory has several nodes, threads stay on cores of their own, in the order of these."""
    if known().nodes > 1:
        os.environ.setdefault("OMP_PROC_BIND", "close")
        os.environ.setdefault("OMP_PLACES", "cores")
