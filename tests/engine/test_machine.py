"""Memory and cores of machines and containers, on copies of the kernel's files."""

import os
from pathlib import Path

import pytest

import engine.machine
from engine.device.devices import num_threads
from engine.machine import available_memory, cpu_hints, num_cores

GIB = 2**30
MIB = 2**20
V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "33 32 0:29 {root} /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory\n"
    "34 32 0:30 {root} /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct\n"
)
V1_OWN = "9:memory:{path}\n4:cpu,cpuacct:{path}\n1:name=systemd:{path}\n"


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)


def machine(root: Path, files: dict[str, str]) -> Path:
    """Write files below `root`; 32 of 64 GiB are available, and 1 GiB free."""
    meminfo = f"MemTotal: {64 * 2**20} kB\nMemFree: {2**20} kB\nMemAvailable: {32 * 2**20} kB\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_whole_machine(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT.format(root="/")}
    root = machine(tmp_path, files)
    assert available_memory(root) == 32 * GIB, "available and not only free memory"
    assert num_cores(root) == 16


def test_version_2_with_a_namespace(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": "22 1 0:20 / /proc rw - proc proc rw\n" + V2_MOUNT.format(root="/"),
        "sys/fs/cgroup/memory.max": f"{256 * MIB}\n",
        "sys/fs/cgroup/memory.high": "max\n",
        "sys/fs/cgroup/memory.current": f"{100 * MIB}\n",
        "sys/fs/cgroup/memory.stat": f"anon {60 * MIB}\ninactive_file {40 * MIB}\nactive_file 0\n",
        "sys/fs/cgroup/cpu.max": "250000 100000\n",
    }
    root = machine(tmp_path, files)
    assert available_memory(root) == (256 - 100 + 40) * MIB, "cached files are given back"
    assert num_cores(root) == 2


def test_version_2_nested_takes_the_tightest(tmp_path: Path) -> None:
    unit = "sys/fs/cgroup/system.slice/pod.slice/box.scope"
    files = {
        "proc/self/cgroup": "0::/system.slice/pod.slice/box.scope\n",
        "proc/self/mountinfo": V2_MOUNT.format(root="/"),
        f"{unit}/memory.max": "max\n",
        f"{unit}/memory.high": f"{3 * GIB}\n",
        f"{unit}/memory.current": f"{GIB}\n",
        f"{unit}/cpu.max": "max 100000\n",
        "sys/fs/cgroup/system.slice/pod.slice/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/system.slice/pod.slice/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/system.slice/pod.slice/cpu.max": "50000 100000\n",
        "sys/fs/cgroup/system.slice/memory.max": "max\n",
        "sys/fs/cgroup/system.slice/memory.current": f"{5 * GIB}\n",
    }
    root = machine(tmp_path, files)
    assert available_memory(root) == GIB, "the pod is nearer to its limit than the container"
    assert num_cores(root) == 1, "half a core is one thread"


@pytest.mark.parametrize("mounted", ["/", "/docker/abc"])
def test_version_1(tmp_path: Path, mounted: str) -> None:
    """A container sees the whole tree of the host, or its own part of it at the same place."""
    below = "docker/abc/" if mounted == "/" else ""
    memory, cpu = f"sys/fs/cgroup/memory/{below}", f"sys/fs/cgroup/cpu,cpuacct/{below}"
    files = {
        "proc/self/cgroup": V1_OWN.format(path="/docker/abc"),
        "proc/self/mountinfo": V1_MOUNTS.format(root=mounted),
        f"{memory}memory.limit_in_bytes": f"{2 * GIB}\n",
        f"{memory}memory.usage_in_bytes": f"{GIB}\n",
        f"{memory}memory.stat": f"inactive_file 5\ntotal_inactive_file {512 * MIB}\n",
        f"{cpu}cpu.cfs_quota_us": "400000\n",
        f"{cpu}cpu.cfs_period_us": "100000\n",
    }
    root = machine(tmp_path, files)
    assert available_memory(root) == GIB + 512 * MIB
    assert num_cores(root) == 4


def test_version_1_without_limits(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": V1_OWN.format(path="/"),
        "proc/self/mountinfo": V1_MOUNTS.format(root="/"),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }
    root = machine(tmp_path, files)
    assert available_memory(root) == 32 * GIB
    assert num_cores(root) == 16


def test_a_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": V2_MOUNT.format(root="/"),
        "sys/fs/cgroup/memory.high": f"{GIB}\n",
        "sys/fs/cgroup/memory.current": f"{2 * GIB}\n",
    }
    assert available_memory(machine(tmp_path, files)) == 0


def test_cores_follow_the_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    files = {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": V2_MOUNT.format(root="/"),
        "sys/fs/cgroup/cpu.max": "800000 100000\n",
    }
    assert num_cores(machine(tmp_path, files)) == 2


def test_machine_without_proc(tmp_path: Path) -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert available_memory(tmp_path) == total // 2
    assert num_cores(tmp_path) == 16


def test_lines_that_are_not_understood_are_no_limits(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "garbage\n\n0::/gone\n",
        "proc/self/mountinfo": "garbage\n" + V2_MOUNT.format(root="/other"),
        "sys/fs/cgroup/memory.max": "soon\n",
        "sys/fs/cgroup/memory.current": "\n",
        "sys/fs/cgroup/cpu.max": "1\n",
    }
    root = machine(tmp_path, files)
    assert available_memory(root) == 32 * GIB
    assert num_cores(root) == 16


def test_threads_are_at_most_the_cores(caplog: pytest.LogCaptureFixture) -> None:
    assert num_threads(None) == num_cores()
    assert num_threads(16) == 16
    assert not caplog.records
    assert num_threads(100_000) == num_threads(100_000) == 16
    (line,) = caplog.messages
    assert line == "threads: 100000 is more than the cores of this process; 16 are used"


AVX2 = "model name : some\nflags\t\t: fpu sse4_2 avx avx2 fma\n"
V2_FILES = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT.format(root="/")}


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        ({"sys/fs/cgroup/cpu.max": "50000 100000\n"}, "0.5 of a core"),
        ({"proc/cpuinfo": "flags\t\t: fpu sse4_2 avx\n"}, "no AVX2"),
        (
            {
                "sys/devices/system/node/node0/cpulist": "0-3,16-19\n",
                "sys/devices/system/node/node1/cpulist": "4-15\n",
            },
            "on 2 NUMA nodes",
        ),
    ],
)
def test_what_makes_a_machine_slow_is_said(tmp_path: Path, files: dict[str, str], hint: str) -> None:
    root = machine(tmp_path, {**V2_FILES, "proc/cpuinfo": AVX2, **files})
    [found] = cpu_hints(root)
    assert hint in found
    assert num_cores(root) >= 1


@pytest.mark.parametrize(
    "files",
    [
        {"sys/fs/cgroup/cpu.max": "100000 100000\n"},
        {"proc/cpuinfo": "Features : fp asimd\n"},  # ARM
        {
            "sys/devices/system/node/node0/cpulist": "0-15\n",
            "sys/devices/system/node/node1/cpulist": "16-31\n",  # none of ours
            "sys/devices/system/node/node2/cpulist": "\n",  # memory without cores
            "sys/devices/system/node/online": "0-2\n",
        },
    ],
)
def test_others_get_no_hint(tmp_path: Path, files: dict[str, str]) -> None:
    assert cpu_hints(machine(tmp_path, {**V2_FILES, "proc/cpuinfo": AVX2, **files})) == []


def test_freed_memory_can_be_kept_with_any_c_library(monkeypatch):
    """Other C libraries than glibc have no mallopt."""
    engine.machine.keep_freed_memory()
    monkeypatch.setattr(engine.machine.ctypes, "CDLL", lambda _name: object())
    engine.machine.keep_freed_memory()


@pytest.mark.parametrize(("name", "field"), [("address space", "VmSize"), ("data size    ", "VmData")])
def test_a_limit_of_the_process_is_kept(tmp_path: Path, name: str, field: str) -> None:
    limits = "Limit                     Soft Limit           Hard Limit           Units\n"
    files = {
        "proc/self/status": f"Name:\tmonoloop\n{field}:\t {2**20} kB\nThreads:\t9\n",
        "proc/self/limits": f"{limits}Max {name}         {3 * GIB}           unlimited            bytes\n",
    }
    assert available_memory(machine(tmp_path, files)) == 2 * GIB
    unlimited = {
        "proc/self/limits": f"{limits}Max {name}         unlimited           unlimited            bytes\n"
    }
    assert available_memory(machine(tmp_path, {**files, **unlimited})) == 32 * GIB
