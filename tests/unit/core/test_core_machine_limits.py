"""Cores and memory of a container: from files as cgroups of both versions have them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qforge import machine_limits
from qforge.machine_limits import available_memory, default_threads, free_memory, memory_limit, threads_limited, usable_cores

PHYSICAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True)
def _sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_limits.os, "sched_getaffinity", lambda _: set(range(16)))


def root(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / ("proc/self/cgroup" if name == "cgroup" else f"sys/fs/cgroup/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return folder


CORES: dict[str, tuple[dict[str, str], int]] = {
    "no container": ({}, 16),
    "no quota": ({"cpu.max": "max 100000"}, 16),
    "two cores": ({"cpu.max": "200000 100000"}, 2),
    "one and a half": ({"cpu.max": "150000 100000"}, 2),
    "a tenth": ({"cpu.max": "10000 100000"}, 1),
    "more than there are": ({"cpu.max": "6400000 100000"}, 16),
    "version 1, no quota": ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 16),
    "version 1, three and a bit": ({"cpu/cpu.cfs_quota_us": "310000", "cpu/cpu.cfs_period_us": "100000"}, 4),
    "a group within one that has less": ({"cgroup": "0::/a/b", "a/cpu.max": "300000 100000", "a/b/cpu.max": "500000 100000"}, 3),
    "version 1, a group": ({"cgroup": "2:cpu,cpuacct:/a\n1:name=systemd:/a", "cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"}, 2),
    "another controller's group": ({"cgroup": "2:cpuset:/a", "cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"}, 16),
    "named as the host sees it": ({"cgroup": "0::/../../b", "cpu.max": "200000 100000"}, 2),
    "not what the kernel writes": ({"cpu.max": "200000"}, 16),
    "no groups' names": ({"cgroup": "a", "cpu.max": "200000 100000"}, 2),
    "a period of nothing": ({"cpu.max": "200000 0"}, 16),
}


@pytest.mark.parametrize("case", CORES)
def test_threads_are_no_more_than_a_quota_pays_for(tmp_path: Path, case: str) -> None:
    files, cores = CORES[case]
    assert usable_cores(root(tmp_path, files)) == cores


def test_a_limit_holds_within_and_ends_with_it() -> None:
    with threads_limited(3):
        with threads_limited(None):
            assert default_threads() == usable_cores()
        assert default_threads() == 3
        with pytest.raises(KeyError), threads_limited(1):
            raise KeyError
        assert default_threads() == 3
    assert default_threads() == usable_cores()


def test_affinity_counts_and_without_it_the_cores_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_limits.os, "sched_getaffinity", lambda _: {3})
    assert usable_cores(root(tmp_path, {"cpu.max": "200000 100000"})) == 1
    monkeypatch.delattr(machine_limits.os, "sched_getaffinity")
    monkeypatch.setattr(machine_limits.os, "cpu_count", lambda: 5)
    assert usable_cores(tmp_path / "none") == 5
    monkeypatch.setattr(machine_limits.os, "cpu_count", lambda: None)
    assert usable_cores(tmp_path / "none") == 1


MEMORY: dict[str, tuple[dict[str, str], int | None]] = {
    "no container": ({}, None),
    "no limit": ({"memory.max": "max"}, None),
    "version 2": ({"memory.max": "1048576"}, 1 << 20),
    "version 1": ({"memory/memory.limit_in_bytes": "1048576"}, 1 << 20),
    "version 1, no limit": ({"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
    "a group within one that has less": ({"cgroup": "0::/a/b", "memory.max": "max", "a/memory.max": "1048576", "a/b/memory.max": "2097152"}, 1 << 20),
    "version 1, a group": (
        {"cgroup": "4:memory:/jobs/a\n0::/", "memory/memory.limit_in_bytes": "9223372036854771712", "memory/jobs/a/memory.limit_in_bytes": "1048576"},
        1 << 20,
    ),
    "not what the kernel writes": ({"memory.max": ""}, None),
}


@pytest.mark.parametrize("case", MEMORY)
def test_memory_is_what_a_container_leaves_of_the_machines(tmp_path: Path, case: str) -> None:
    files, limit = MEMORY[case]
    assert memory_limit(root(tmp_path, files)) == limit
    assert available_memory(tmp_path) == (limit or PHYSICAL)


def test_no_more_memory_than_the_machine_has(tmp_path: Path) -> None:
    assert available_memory(root(tmp_path, {"memory.max": str(2 * PHYSICAL)})) == PHYSICAL


GIB = 1 << 30
FREE: dict[str, tuple[dict[str, str], int | None]] = {
    "no container": ({}, None),
    "no limit": ({"memory.max": "max", "memory.current": str(GIB)}, None),
    "a limit": ({"memory.max": str(3 * GIB), "memory.current": str(2 * GIB)}, GIB),
    "files in memory may go": ({"memory.max": str(3 * GIB), "memory.current": str(2 * GIB), "memory.stat": f"anon 5\ninactive_file {GIB // 2}\nactive_file 7"}, GIB + GIB // 2),
    "more than the machine has": ({"memory.max": str(1 << 50), "memory.current": str(GIB)}, None),
    "over its limit": ({"memory.max": str(GIB), "memory.current": str(2 * GIB)}, 0),
    "version 1": (
        {"memory/memory.limit_in_bytes": str(2 * GIB), "memory/memory.usage_in_bytes": str(GIB), "memory/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB // 4}"},
        GIB + GIB // 4,
    ),
    "a group within one that has less": ({"cgroup": "0::/a/b", "a/memory.max": str(GIB), "a/memory.current": str(GIB // 2), "a/b/memory.max": "max"}, GIB // 2),
}


@pytest.mark.parametrize("case", FREE)
def test_what_is_free_is_what_a_container_leaves(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files, free = FREE[case]
    pages = {"SC_AVPHYS_PAGES": 10 * GIB // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(machine_limits.os, "sysconf", pages.__getitem__)
    assert free_memory(root(tmp_path, files)) == (10 * GIB if free is None else free)
    (tmp_path / "proc").mkdir(exist_ok=True)
    (tmp_path / "proc/meminfo").write_text(f"MemFree:   7 kB\nMemAvailable:   {12 * GIB // 1024} kB\nBuffers:  3 kB\n")  # files that the machine can let go count, too
    assert free_memory(tmp_path) == (12 * GIB if free is None else free)
