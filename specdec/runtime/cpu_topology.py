"""The CPU topology of this machine: its fast and slow cores, and the threads that they run.

Linux reports it in /sys (topology, cpu_capacity on ARM, cpu_core and cpu_atom of Intel's hybrids), and limits by cgroups and
affinity. macOS reports it by sysctl (hw.perflevel), Windows by GetLogicalProcessorInformationEx. Without a report, all cores
count as alike.
"""

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from specdec.runtime.parallel_region import get_available_threads

MAX_SLOW_CORE_RATIO = 0.7  # cores below this fraction of the fastest core's capacity are slow
MACOS_CORES_SYSCTL = "hw.perflevel{}.physicalcpu"  # 0: the fast cores
RELATION_PROCESSOR_CORE, RECORD_HEADER_BYTES, EFFICIENCY_OFFSET, MASK_OFFSET = 0, 8, 9, 32  # Windows records (winnt.h)


class CpuTopology(NamedTuple):
    """The CPU cores and hardware threads that this process may use.

    Attributes:
        n_fast: Fast cores.
        n_slow: Slow cores.
        n_threads: Hardware threads of all these cores.
        quota: Whole cores' worth of CPU time that the process may use; 0: no limit. One thread more would be throttled.
    """

    n_fast: int
    n_slow: int
    n_threads: int
    quota: int = 0

    def get_thread_choices(self, max_threads: int) -> list[int]:
        """Return the thread counts that may be fastest, at most max_threads, the likeliest first.

        They are one per core, one per fast core, one per hardware thread, and one. None exceeds the CPU quota.
        """
        likely = (self.n_fast + self.n_slow, self.n_fast, self.n_threads, 1)
        return [*dict.fromkeys(min(n, max_threads, self.quota or max_threads) for n in likely)]

    @property
    def description(self) -> str:
        """The numbers of cores and threads as a phrase for users, for example "4 fast and 8 slow cores"."""
        n = self.n_fast + self.n_slow
        cores = f"{self.n_fast} fast and {self.n_slow} slow cores" if self.n_slow else f"{n} core{'s' * (n > 1)}"
        suffix = f" with {self.n_threads} threads" if self.n_threads > n else ""
        return cores + suffix + (f", limited to {self.quota}" if self.quota else "")


def parse_cpu_list(text: str) -> set[int]:
    """Return the set of CPU numbers in a list as Linux writes it: "0-3,8" gives {0, 1, 2, 3, 8}."""
    spans = [span.split("-") for span in text.strip().split(",") if span]
    return {i for span in spans for i in range(int(span[0]), int(span[-1]) + 1)}


def read_linux_topology(allowed: Collection[int], root: Path = Path("/")) -> CpuTopology:
    """Return the topology of the CPUs numbered in `allowed`, read from Linux's files.

    Args:
        allowed: Numbers of the CPUs that this process may use.
        root: Folder with Linux's folders sys and proc.

    Raises:
        OSError: The system does not report the topology.
        ValueError: A file of the system is malformed.
    """
    devices = root / "sys" / "devices"
    siblings, capacity = dict[int, frozenset[int]](), dict[int, int]()
    for cpu in allowed:
        cpu_dir = devices / "system" / "cpu" / f"cpu{cpu}"
        siblings[cpu] = frozenset(parse_cpu_list((cpu_dir / "topology" / "thread_siblings_list").read_text()) & {*allowed})
        with suppress(OSError, ValueError):
            capacity[cpu] = int((cpu_dir / "cpu_capacity").read_text())
    slow = {cpu for cpu, value in capacity.items() if value < MAX_SLOW_CORE_RATIO * max(capacity.values())}
    with suppress(OSError):
        slow |= parse_cpu_list((devices / "cpu_atom" / "cpus").read_text())
    cores = {*siblings.values()}
    n_slow = sum(bool(core & slow) for core in cores)
    n_slow = n_slow if n_slow < len(cores) else 0  # without fast cores none is slow
    return CpuTopology(len(cores) - n_slow, n_slow, len(siblings), _find_quota(root))


def _find_quota(root: Path) -> int:
    """Return the lowest CPU time limit of this process's cgroups and those above them, in whole cores; 0: no limit.

    In a container, the root cgroup may be the container's own, and the cgroups in /proc may not exist. Version 1 has a folder
    for the CPU.
    """
    v2_root = root / "sys" / "fs" / "cgroup"
    v1_root = v2_root / "cpu"
    folders = {v2_root, v1_root}
    with suppress(OSError, ValueError):
        for line in (root / "proc" / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "cpu" in controllers.split(","):
                folder = (v1_root if controllers else v2_root) / path.lstrip("/")
                folders |= {folder, *folder.parents}
    quotas = [quota for folder in folders if (quota := _read_cgroup_quota(folder)) > 0]
    return max(int(min(quotas)), 1) if quotas else 0


def _read_cgroup_quota(folder: Path) -> float:
    """Return the CPU time limit of the cgroup in a folder, of version 2 or 1, in cores; 0 or less: no limit."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = " ".join((folder / name).read_text() for name in names).split()
            return int(quota) / int(period)
    return 0


def read_macos_topology(sysctl: Callable[..., int]) -> CpuTopology:
    """Return the CPU topology of a Mac; `sysctl` is a function that returns the number of a sysctl name, or 0."""
    fast, slow = (sysctl(MACOS_CORES_SYSCTL.format(level)) for level in (0, 1))
    fast = fast or sysctl("hw.physicalcpu") or 1
    return CpuTopology(fast, slow, max(sysctl("hw.logicalcpu"), fast + slow))


def parse_windows_topology(records: bytes) -> CpuTopology:
    """Return the CPU topology from the bytes of Windows's records, one for each core.

    A record has the core's efficiency class, which is higher for faster cores, and its hardware threads.

    Raises:
        ValueError: A record has an invalid size, or there is no core.
    """
    cores, at = list[tuple[int, int]](), 0
    while at + RECORD_HEADER_BYTES <= len(records):
        relation, size = (int.from_bytes(records[at + 4 * i : at + 4 * i + 4], "little") for i in range(2))
        if not RECORD_HEADER_BYTES <= size <= len(records) - at:
            raise ValueError(f"invalid record of {size} bytes")
        if relation == RELATION_PROCESSOR_CORE:
            mask = records[at + MASK_OFFSET : at + MASK_OFFSET + 8]
            cores.append((records[at + EFFICIENCY_OFFSET], int.from_bytes(mask, "little").bit_count()))
        at += size
    fastest = max(level for level, _ in cores)
    n_fast = sum(level == fastest for level, _ in cores)
    return CpuTopology(n_fast, len(cores) - n_fast, sum(n for _, n in cores))


def _read_sysctl(name: str) -> int:
    value, size = ctypes.c_int64(0), ctypes.c_size_t(8)
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return 0 if failed else value.value


def _read_windows_records() -> bytes:
    """Return the bytes of Windows's records of all CPU cores, or b"" if the system call fails."""
    query, size = getattr(ctypes, "windll").kernel32.GetLogicalProcessorInformationEx, ctypes.c_uint32(0)  # noqa: B009
    query(RELATION_PROCESSOR_CORE, None, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    return buffer.raw if query(RELATION_PROCESSOR_CORE, buffer, ctypes.byref(size)) else b""


def get_allowed_cpus() -> Iterable[int]:
    """Return the numbers of the CPUs that this process may run on, or of all CPUs if the system does not report it."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


@functools.cache
def get_topology() -> CpuTopology:
    """Return the CPU topology that is available to this process, read once; if the system reports none, one core per CPU.

    On Linux it has only the CPUs that this process may run on, and the cgroup's quota. On macOS and Windows it is the machine's.
    """
    allowed = [*get_allowed_cpus()]
    with suppress(OSError, ValueError, AttributeError, IndexError):
        if sys.platform == "darwin":
            return read_macos_topology(_read_sysctl)
        return parse_windows_topology(_read_windows_records()) if sys.platform == "win32" else read_linux_topology(allowed)
    return CpuTopology(len(allowed), 0, len(allowed))


def get_thread_choices() -> list[int]:
    """Return the thread counts that may be fastest on this machine, the likeliest first."""
    return get_topology().get_thread_choices(get_available_threads())
