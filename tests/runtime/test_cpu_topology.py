"""CPU topology: parsing of what the systems report, from files, numbers and records that the tests create."""

from pathlib import Path

import pytest

from specdec.runtime import cpu_topology
from specdec.runtime.cpu_topology import (
    CpuTopology,
    parse_cpu_list,
    parse_windows_topology,
    read_linux_topology,
    read_macos_topology,
)


def make_sysfs(folder: Path, siblings: list[str], **files: str) -> Path:
    """Create a folder like / with /sys/devices: the CPUs that share a core with each CPU, and other files."""
    devices = folder / "sys" / "devices"
    for cpu, cpus in enumerate(siblings):
        topology = devices / "system" / "cpu" / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(cpus + "\n")
    for name, content in files.items():
        write_file(devices / name.replace("__", "/"), content + "\n")
    return folder


def write_file(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


TWO_CORES = [f"{i // 2 * 2}-{i // 2 * 2 + 1}" for i in range(4)]  # two cores with two threads
LAPTOP = TWO_CORES + [str(i) for i in range(4, 12)]  # and eight slow cores
DESKTOP = [f"{i % 16},{i % 16 + 16}" for i in range(32)]
ONE_THREAD_CORES = [str(i) for i in range(12)]
ARM = {f"system__cpu__cpu{i}__cpu_capacity": str(1024 if i < 4 else 446) for i in range(12)}


@pytest.mark.parametrize(
    ("siblings", "files", "allowed", "expected", "choices", "description"),
    [
        (LAPTOP, {"cpu_atom__cpus": "4-11"}, 12, CpuTopology(2, 8, 12), [10, 2, 12, 1],
         "2 fast and 8 slow cores with 12 threads"),
        (DESKTOP, {}, 32, CpuTopology(16, 0, 32), [16, 32, 1], "16 cores with 32 threads"),
        (ONE_THREAD_CORES, ARM, 12, CpuTopology(4, 8, 12), [12, 4, 1], "4 fast and 8 slow cores"),
        (ONE_THREAD_CORES[:1], {}, 1, CpuTopology(1, 0, 1), [1], "1 core"),
        (LAPTOP, {"cpu_atom__cpus": "4-11"}, 3, CpuTopology(2, 0, 3), [2, 3, 1], "2 cores with 3 threads"),
    ],
)  # fmt: skip
def test_linux_reports_fast_and_slow_cores_and_their_threads(
    tmp_path: Path,
    siblings: list[str],
    files: dict[str, str],
    allowed: int,
    expected: CpuTopology,
    choices: list[int],
    description: str,
) -> None:
    """Only for the CPUs that the process may run on."""
    found = read_linux_topology(range(allowed), make_sysfs(tmp_path, siblings, **files))
    assert found == expected
    assert (found.get_thread_choices(99), found.description) == (choices, description)


def test_slow_cores_count_as_fast_if_only_they_are_allowed(tmp_path: Path) -> None:
    assert read_linux_topology(range(4, 12), make_sysfs(tmp_path, LAPTOP, cpu_atom__cpus="4-11")) == CpuTopology(8, 0, 8)


@pytest.mark.parametrize(
    ("content", "quota"),
    [("max 100000", 0), ("250000 100000", 2), ("765000 100000", 7), ("50000 100000", 1), ("", 0), ("x y", 0), ("1 0", 0)],
)
def test_cgroup_quota_limits_the_threads(tmp_path: Path, content: str, quota: int) -> None:
    write_file(tmp_path / "sys" / "fs" / "cgroup" / "cpu.max", content)
    found = read_linux_topology(range(12), make_sysfs(tmp_path, ONE_THREAD_CORES))
    assert found.quota == quota
    assert found.get_thread_choices(99) == ([12, 1] if not quota else [quota, 1] if quota > 1 else [1])


@pytest.mark.parametrize(
    ("files", "own_cgroups", "quota"),
    [
        ({"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, "", 2),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "", 0),
        ({"cpu/a/b/cpu.cfs_quota_us": "300000", "cpu/a/b/cpu.cfs_period_us": "100000"}, "4:cpu,cpuacct:/a/b\n2:memory:/c", 3),
        ({"cpu/c/cpu.cfs_quota_us": "300000", "cpu/c/cpu.cfs_period_us": "100000"}, "4:cpu,cpuacct:/a/b\n2:memory:/c", 0),
        ({"a.slice/b.scope/cpu.max": "200000 100000"}, "0::/a.slice/b.scope", 2),
        ({"a.slice/b.scope/cpu.max": "max 100000", "a.slice/cpu.max": "400000 100000"}, "0::/a.slice/b.scope", 4),
        ({"a.slice/b.scope/cpu.max": "500000 100000", "a.slice/cpu.max": "400000 100000"}, "0::/a.slice/b.scope", 4),
        ({"cpu.max": "300000 100000"}, "0::/not/visible/in/a/container", 3),
        ({"cpu.max": "300000 100000"}, "damaged", 3),
    ],
)
def test_quotas_of_both_cgroup_versions_and_of_outer_groups_count(
    tmp_path: Path, files: dict[str, str], own_cgroups: str, quota: int
) -> None:
    for name, content in files.items():
        write_file(tmp_path / "sys" / "fs" / "cgroup" / name, content + "\n")
    write_file(tmp_path / "proc" / "self" / "cgroup", own_cgroups)
    assert read_linux_topology(range(12), make_sysfs(tmp_path, ONE_THREAD_CORES)).quota == quota


def test_thread_choices_do_not_exceed_the_maximum() -> None:
    assert CpuTopology(2, 8, 12).get_thread_choices(4) == [4, 2, 1]
    assert CpuTopology(2, 8, 12).get_thread_choices(1) == [1]


def test_macos_reports_performance_levels_or_one_number() -> None:
    levels = {"hw.perflevel0.physicalcpu": 6, "hw.perflevel1.physicalcpu": 4, "hw.logicalcpu": 10}
    assert read_macos_topology(lambda name: levels.get(name, 0)) == CpuTopology(6, 4, 10)
    intel = {"hw.physicalcpu": 4, "hw.logicalcpu": 8}
    assert read_macos_topology(lambda name: intel.get(name, 0)) == CpuTopology(4, 0, 8)
    assert read_macos_topology(lambda name: 0) == CpuTopology(1, 0, 1)


def make_windows_record(level: int, mask: int, relation: int = 0, size: int = 48) -> bytes:
    """Return a record: relationship, size, flags, efficiency class, 20 bytes, number of groups, a mask of threads, its group."""
    body = bytes([mask.bit_count() > 1, level]) + bytes(20) + (1).to_bytes(2, "little") + mask.to_bytes(8, "little") + bytes(8)
    return relation.to_bytes(4, "little") + size.to_bytes(4, "little") + body


def test_windows_reports_the_efficiency_class_of_each_core_and_its_threads() -> None:
    fast, slow = make_windows_record(1, 0b11), make_windows_record(0, 0b100)
    assert parse_windows_topology(fast * 2 + slow * 8) == CpuTopology(2, 8, 12)
    assert parse_windows_topology(make_windows_record(0, 0b11) * 4) == CpuTopology(4, 0, 8)
    assert parse_windows_topology(make_windows_record(7, 1, relation=3) + fast) == CpuTopology(1, 0, 2), (
        "a record of another relation"
    )
    for damaged in (b"", make_windows_record(0, 1, size=4), make_windows_record(0, 1, size=400)):
        with pytest.raises(ValueError, match=r"record|empty|arg"):
            parse_windows_topology(damaged)


def test_without_a_report_all_cores_are_alike(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu_topology, "get_allowed_cpus", lambda: range(6))
    for platform in ("linux", "darwin", "win32", "freebsd14"):
        cpu_topology.get_topology.cache_clear()
        monkeypatch.setattr(cpu_topology.sys, "platform", platform)
        monkeypatch.setattr(cpu_topology, "read_linux_topology", lambda allowed: read_linux_topology(allowed, tmp_path))
        assert cpu_topology.get_topology() == CpuTopology(6, 0, 6)
    cpu_topology.get_topology.cache_clear()


@pytest.mark.parametrize(("text", "numbers"), [("0-3,8", {0, 1, 2, 3, 8}), ("", set()), ("5\n", {5})])
def test_linux_cpu_list_is_parsed(text: str, numbers: set[int]) -> None:
    assert parse_cpu_list(text) == numbers
