"""How much memory and how many cores this process may use, on a whole machine and in a container, and which.

A container sees all cores and all memory of its host. Its limits are in the files of its control group
(cgroup, version 1 or 2) and of every group around that one.
"""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
NO_LIMIT = 2**60  # bytes; version 1 writes about 2**63 for none


def available_memory(root: Path = ROOT) -> int:
    """Return how many bytes can still be allocated: of the machine's, and below every limit.

    Limits are those of the cgroups and of the process (ulimit -v and -d).
    Memory that caches files counts as available, since the kernel gives it back. `root` holds proc and sys.
    """
    return max(0, min([_system_memory(root), *_cgroup_memory(root), *_process_memory(root)]))


def num_cores(root: Path = ROOT) -> int:
    """Return how many cores this process may keep busy: by its affinity, and by every cgroup's CPU quota.

    A quota is rounded down: one thread too many lets all of a parallel product wait while it is throttled.
    """
    return max(1, min([num_visible_cores(), *(int(quota) for quota in _cgroup_quotas(root))]))


def cpu_hints(root: Path = ROOT) -> list[str]:
    """Return what makes computing on the CPUs of this process slow, and what to do about it."""
    hints = []
    quota = min(_cgroup_quotas(root), default=1.0)
    if quota < 1:
        hints.append(
            f"the CPU quota of this container is {quota:g} of a core: every step is halted until there is "
            "time again; raise it to 1 or more"
        )
    if (num_nodes := _num_numa_nodes(root)) > 1:
        hints.append(
            f"the cores of this process are on {num_nodes} NUMA nodes, and the weights in the memory of one: "
            "start it on a single node (numactl --cpunodebind=0 --membind=0 monoloop serve ...)"
        )
    flags = next((line.split() for line in _lines(root / "proc/cpuinfo") if line.startswith("flags")), None)
    if flags is not None and "avx2" not in flags:
        hints.append("this CPU has no AVX2: everything works, but is several times slower than with it")
    return hints


def trim_heap() -> None:
    """Return memory that has been freed to the system, where the C library is glibc.

    It keeps what threads free for later, for each thread apart: 45 MB after the load of a small model.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
_KEPT_BYTES = 64 << 20  # at the end of a heap; more than the results of a step take
_MAPPED_BYTES = 32 << 20  # larger blocks are mapped, and given back when they are freed; glibc takes no more


def keep_freed_memory() -> None:
    """Keep some freed memory in the process, where the C library is glibc.

    By default the results of each op are mapped anew: with 16 tokens of a small model 4,000 page faults, 4.5
    of the 18.7 ms that its products take.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES)


def num_visible_cores() -> int:
    """Return how many cores the threads of this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _num_numa_nodes(root: Path) -> int:
    """Return the number of NUMA nodes that the cores of this process belong to."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    lists = [_lines(node / "cpulist") for node in (root / "sys/devices/system/node").glob("node[0-9]*")]
    return sum(not cores.isdisjoint(_numbers("".join(lines))) for lines in lists)


def _numbers(ranges: str) -> Iterator[int]:
    """Yield the numbers of a list such as `0-3,8`."""
    for part in filter(None, ranges.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _system_memory(root: Path) -> int:
    """Return the machine's available bytes; where there is no /proc (macOS), half of all memory."""
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroup_memory(root: Path) -> Iterator[int]:
    """Yield what is left below each memory limit around this process, in bytes."""
    for folder in _cgroups(root, "memory"):
        if (folder / "memory.current").exists():
            limits = [_number(folder / "memory.max"), _number(folder / "memory.high")]
            used, cached = _number(folder / "memory.current"), _stat(folder, "inactive_file")
        else:
            limits = [_number(folder / "memory.limit_in_bytes")]
            used, cached = _number(folder / "memory.usage_in_bytes"), _stat(folder, "total_inactive_file")
        for limit in limits:
            if limit is not None and limit < NO_LIMIT:
                yield int(limit - (used or 0) + cached)


def _process_memory(root: Path) -> Iterator[int]:
    """Yield what is left below each memory limit of this process, in bytes."""
    used = dict(line.partition(":")[::2] for line in _lines(root / "proc/self/status"))
    for line in _lines(root / "proc/self/limits"):
        for name, field in (("Max address space", "VmSize"), ("Max data size", "VmData")):
            limit = line.removeprefix(name).split()[0] if line.startswith(name) else ""
            if limit.isdecimal() and field in used:
                yield int(limit) - 1024 * int(used[field].split()[0])


def _cgroup_quotas(root: Path) -> Iterator[float]:
    """Yield each CPU quota around this process, in cores."""
    for folder in _cgroups(root, "cpu"):
        words = " ".join(_lines(folder / "cpu.max")).split()
        if not words:
            words = [*_lines(folder / "cpu.cfs_quota_us"), *_lines(folder / "cpu.cfs_period_us")]
        if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]):
            yield int(words[0]) / int(words[1])


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folder of this process's cgroup for a controller, then those around it, in each version."""
    own = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" or controller in controllers.split(","):
            own["cgroup2" if number == "0" else "cgroup"] = path
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, kind = line.partition(" - ")
        fields, (filesystem, *_, options) = mount.split(), kind.split() or ("", "")
        if filesystem not in own or (filesystem == "cgroup" and controller not in options.split(",")):
            continue
        top = root / fields[4].lstrip("/")
        inside = Path(own[filesystem])
        # A container without a cgroup namespace is given its path on the host, and sees a part of that tree.
        below = inside.relative_to(fields[3]) if inside.is_relative_to(fields[3]) else Path()
        folder = top / below
        yield folder
        while folder != top:
            folder = folder.parent
            yield folder


def _lines(path: Path) -> list[str]:
    """Return the lines of a file; none if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """Return the number in a file; None if there is none."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _stat(folder: Path, name: str) -> int:
    """Return a value of a cgroup's memory.stat; 0 if it has none."""
    for line in _lines(folder / "memory.stat"):
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return 0
