"""specdec/runtime/cpu_topology.py: what systems tell of their cores, as files, numbers and records that are made here."""

from pathlib import Path

import pytest

from specdec.runtime import cpu_topology
from specdec.runtime.cpu_topology import Cores, listed, of_linux, of_mac, of_windows


def system(folder: Path, siblings: list[str], nodes: tuple[str, ...] = ("0-999",), **files: str) -> Path:
    """A folder like /sys/devices/system: the CPUs that share a core with each, and those of nodes; files: what else there is."""
    root = folder / "devices" / "system"
    for cpu, of in enumerate(siblings):
        (root / "cpu" / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (root / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(of + "\n")
    for i, of in enumerate(nodes):
        (root / "node" / f"node{i}").mkdir(parents=True)
        (root / "node" / f"node{i}" / "cpulist").write_text(of + "\n")
    for name, text in files.items():
        path = folder / "devices" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


PAIRS = [f"{i // 2 * 2}-{i // 2 * 2 + 1}" for i in range(4)]  # two cores of two threads
LAPTOP = PAIRS + [str(i) for i in range(4, 12)]  # and eight slow ones
DESKTOP = [f"{i % 16},{i % 16 + 16}" for i in range(32)]
ALONE = [str(i) for i in range(12)]
ARM = {f"system__cpu__cpu{i}__cpu_capacity": str(1024 if i < 4 else 446) for i in range(12)}


@pytest.mark.parametrize(
    ("siblings", "files", "allowed", "expected", "choices", "words"),
    [
        (LAPTOP, {"cpu_atom__cpus": "4-11"}, 12, Cores(2, 8, 12), [10, 2, 12, 1], "2 fast and 8 slow cores of 12 threads"),
        (DESKTOP, {}, 32, Cores(16, 0, 32), [16, 32, 1], "16 cores of 32 threads"),
        (ALONE, ARM, 12, Cores(4, 8, 12), [12, 4, 1], "4 fast and 8 slow cores"),
        (ALONE[:1], {}, 1, Cores(1, 0, 1), [1], "1 core"),
        (LAPTOP, {"cpu_atom__cpus": "4-11"}, 3, Cores(2, 0, 3), [2, 3, 1], "2 cores of 3 threads"),
    ],
)  # fmt: skip
def test_linux_tells_fast_and_slow_cores_and_their_threads(
    tmp_path: Path, siblings: list[str], files: dict[str, str], allowed: int, expected: Cores, choices: list[int], words: str
) -> None:
    """Of the CPUs that the process may run on."""
    found = of_linux(range(allowed), system(tmp_path, siblings, **files), tmp_path / "no")
    assert found == expected
    assert (found.choices(99), found.words) == (choices, words)


def test_all_cores_that_are_allowed_may_be_slow_ones(tmp_path: Path) -> None:
    assert of_linux(range(4, 12), system(tmp_path, LAPTOP, cpu_atom__cpus="4-11"), tmp_path / "no") == Cores(8, 0, 8)


def test_two_sockets_are_two_nodes_where_both_are_allowed(tmp_path: Path) -> None:
    root = system(tmp_path, ALONE, ("0-5", "6-11", ""))
    assert of_linux(range(12), root, tmp_path / "no") == Cores(12, 0, 12, nodes=2)
    assert of_linux(range(6), root, tmp_path / "no") == Cores(6, 0, 6, nodes=1)


@pytest.mark.parametrize(
    ("told", "quota"), [("max 100000", 0), ("250000 100000", 3), ("50000 100000", 1), ("", 0), ("x y", 0), ("1 0", 0)]
)
def test_a_container_has_the_time_of_so_many_cores(tmp_path: Path, told: str, quota: int) -> None:
    (tmp_path / "cpu.max").write_text(told)
    found = of_linux(range(12), system(tmp_path, ALONE), tmp_path / "cpu.max")
    assert found.quota == quota
    assert found.choices(99) == ([12, 1] if not quota else [quota, 1] if quota > 1 else [1])


def test_choices_are_no_more_than_there_may_be() -> None:
    assert Cores(2, 8, 12).choices(4) == [4, 2, 1]
    assert Cores(2, 8, 12).choices(1) == [1]


def test_macos_tells_levels_or_one_number() -> None:
    levels = {"hw.perflevel0.physicalcpu": 6, "hw.perflevel1.physicalcpu": 4, "hw.logicalcpu": 10}
    assert of_mac(lambda name: levels.get(name, 0)) == Cores(6, 4, 10)
    intel = {"hw.physicalcpu": 4, "hw.logicalcpu": 8}
    assert of_mac(lambda name: intel.get(name, 0)) == Cores(4, 0, 8)
    assert of_mac(lambda name: 0) == Cores(1, 0, 1)


def record(level: int, mask: int, kind: int = 0, size: int = 48) -> bytes:
    """One of Windows: relationship, size, flags, efficiency class, 20 bytes, number of groups, a mask of threads, its group."""
    body = bytes([mask.bit_count() > 1, level]) + bytes(20) + (1).to_bytes(2, "little") + mask.to_bytes(8, "little") + bytes(8)
    return kind.to_bytes(4, "little") + size.to_bytes(4, "little") + body


def test_windows_tells_the_class_of_each_core_and_its_threads() -> None:
    fast, slow = record(1, 0b11), record(0, 0b100)
    assert of_windows(fast * 2 + slow * 8) == Cores(2, 8, 12)
    assert of_windows(record(0, 0b11) * 4) == Cores(4, 0, 8)
    assert of_windows(record(7, 1, kind=3) + fast) == Cores(1, 0, 2), "a record of another kind"
    for damaged in (b"", record(0, 1, size=4), record(0, 1, size=400)):
        with pytest.raises(ValueError, match=r"record|empty|arg"):
            of_windows(damaged)


def test_a_system_that_tells_nothing_has_cores_that_are_alike(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu_topology, "allowed_cpus", lambda: range(6))
    for platform in ("linux", "darwin", "win32", "freebsd14"):
        cpu_topology.known.cache_clear()
        monkeypatch.setattr(cpu_topology.sys, "platform", platform)
        monkeypatch.setattr(cpu_topology, "of_linux", lambda allowed: of_linux(allowed, tmp_path, tmp_path))
        assert cpu_topology.known() == Cores(6, 0, 6)
    cpu_topology.known.cache_clear()


@pytest.mark.parametrize(("text", "numbers"), [("0-3,8", {0, 1, 2, 3, 8}), ("", set()), ("5\n", {5})])
def test_a_list_of_linux_is_read(text: str, numbers: set[int]) -> None:
    assert listed(text) == numbers
