"""Memory and temporary space: how much is free, how much a job may take, and the peak of a job."""

import contextlib
import math
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from msgspec import Struct, field

MEBI = 1 << 20
_PROCESS = 64 * MEBI  # Python, ckptfix, and its buffers
_PARSING, _MOST_PARSING = 4, 64 * MEBI  # parsing may take so many times the size of a file, up to a limit
_TORCH = 450 * MEBI  # a process that imports torch
_SAFE_SHARE = 0.8
_RESET_PEAK = b"5"  # resets the peak when written to `clear_refs` (https://docs.kernel.org/filesystems/proc.html)

# The files of a control group (https://docs.kernel.org/admin-guide/cgroup-v2.html#memory).
_FIRST_VERSION, _SECOND_VERSION = (("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current"))

# In the first version, only those with `total_` include child groups; in the second, all do.
_CACHED = ("active_file", "inactive_file", "total_active_file", "total_inactive_file")


class Cost(Struct, frozen=True):
    """The bytes of memory and of temporary space that a job may take."""

    memory: int
    temporary: int = 0


def cost_of(size: int, runs_model: bool, fetches: bool) -> Cost:
    """Return the most that a file of this size is expected to take.

    Files are copied and scanned in blocks, so their size hardly counts. If a model is built, both the worker and the
    forward test import torch, and the test holds model and weights. A remote file is downloaded to a temporary file,
    and its output is another one."""
    memory = _PROCESS + min(_PARSING * size, _MOST_PARSING)
    if runs_model:
        memory += 2 * _TORCH + 3 * size
    return Cost(memory, 2 * size if fetches else 0)


class Budget(Struct):
    """The memory and temporary space of all jobs. A job that exceeds it runs when no other does."""

    memory: int
    temporary: float = math.inf
    _taken: list[Cost] = field(default_factory=list)

    def fits(self, cost: Cost) -> bool:
        """Return whether a job may start beside the running ones."""
        if not self._taken:
            return True
        memory = sum(taken.memory for taken in self._taken) + cost.memory
        temporary = sum(taken.temporary for taken in self._taken) + cost.temporary
        return memory <= self.memory and temporary <= self.temporary

    def take(self, cost: Cost) -> None:
        """Reserve the cost of a job that starts."""
        self._taken.append(cost)

    def give_back(self, cost: Cost) -> None:
        """Release the cost of a job that has ended."""
        self._taken.remove(cost)


class Peak:
    """The peak memory of this process, or of one of its children that have ended, since this object was created.

    If the system cannot reset the peak, it is that since the process started."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):  # not Linux, or a kernel without it
            Path("/proc/self/clear_refs").write_bytes(_RESET_PEAK)
        self._children = _maxrss(resource.RUSAGE_CHILDREN)

    def nbytes(self) -> int:
        """Return the peak so far, in bytes."""
        own = _kilobytes("/proc/self/status", "VmHWM") or _maxrss(resource.RUSAGE_SELF)
        children = _maxrss(resource.RUSAGE_CHILDREN)
        return max(own, children) if children > self._children else own


def memory_at_hand() -> int:
    """Return the bytes of memory that all jobs together may take: a share of what is free, or of what the limits of the
    container or cluster job leave."""
    free = [_kilobytes("/proc/meminfo", "MemAvailable"), *_left_by_limits()]
    known = [nbytes for nbytes in free if nbytes is not None]
    return max(int(_SAFE_SHARE * min(known)), 1 << 28) if known else 2 << 30


def room_at(folder: Path) -> int:
    """Return the bytes of temporary files that a folder may hold without filling its disk."""
    return int(_SAFE_SHARE * shutil.disk_usage(folder).free)


def _maxrss(who: int) -> int:
    nbytes = resource.getrusage(who).ru_maxrss
    return nbytes if sys.platform == "darwin" else nbytes << 10


def _kilobytes(file: str, name: str) -> int | None:
    try:
        text = Path(file).read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    line = next((line for line in text.splitlines() if line.startswith(f"{name}:")), None)
    return None if line is None else int(line.split()[1]) << 10


def _left_by_limits(root: Path = Path("/")) -> Iterator[int]:
    """Yield the bytes left below the limit of each control group of this process: its own, and all its ancestors."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        limit, usage = _FIRST_VERSION if controllers else _SECOND_VERSION
        own = PurePosixPath(path.lstrip("/"))
        for folder in (own, *own.parents):  # in a container, the path may be the host's, and only the root exists
            most, used = _number(mount / folder / limit), _number(mount / folder / usage)
            if most is not None and used is not None:
                yield max(most - used + _cached(mount / folder / "memory.stat"), 0)


def _cached(statistics: Path) -> int:
    """Return the bytes of the page cache, which the kernel frees when memory is needed."""
    try:
        lines = statistics.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    found = {name: int(count) for name, count in (line.split() for line in lines) if name in _CACHED}
    totals = [count for name, count in found.items() if name.startswith("total_")]
    return sum(totals or found.values())


def _number(file: Path) -> int | None:
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def memory_of(pid: int) -> int:
    """Return the bytes of anonymous memory and swap of a process and its descendants; 0 if not available."""
    pids, total = [pid], 0
    while pids:
        each = pids.pop()
        total += (_kilobytes(f"/proc/{each}/status", "RssAnon") or 0) + (
            _kilobytes(f"/proc/{each}/status", "VmSwap") or 0
        )
        with contextlib.suppress(OSError):
            pids += map(int, Path(f"/proc/{each}/task/{each}/children").read_text(encoding="ascii").split())
    return total
