"""How much memory a piece of work took, and how much there is."""

from __future__ import annotations

import contextlib
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_RESET_PEAK = b"5"
"""What ``clear_refs`` takes to begin a new peak (https://docs.kernel.org/filesystems/proc.html)."""

_SAFE_SHARE = 0.8

_FIRST_VERSION, _SECOND_VERSION = (
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ("memory.max", "memory.current"),
)
"""The files of a control group (https://docs.kernel.org/admin-guide/cgroup-v2.html#memory)."""

_CACHED = ("active_file", "inactive_file", "total_active_file", "total_inactive_file")
"""Those with ``total_`` include the groups below; of the second version, all do."""


class Peak:
    """The most memory that this process held since it was made, or one of its children that ended meanwhile.

    Where the system cannot begin a new peak, it is that of the whole life of the process."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):  # no Linux, or a kernel without it: ru_maxrss says what it can
            Path("/proc/self/clear_refs").write_bytes(_RESET_PEAK)
        self._children = _maxrss(resource.RUSAGE_CHILDREN)

    def nbytes(self) -> int:
        """The peak so far."""
        own = _status("VmHWM") or _maxrss(resource.RUSAGE_SELF)
        children = _maxrss(resource.RUSAGE_CHILDREN)
        return max(own, children) if children > self._children else own


def memory_at_hand() -> int:
    """Bytes that jobs may take together without driving the machine into swap: of what is free, and of the limit of
    the container, or of the job of a cluster, if that is less.
    """
    free = [_meminfo("MemAvailable"), *_left_by_limits()]
    known = [nbytes for nbytes in free if nbytes is not None]
    return max(int(_SAFE_SHARE * min(known)), 1 << 28) if known else 2 << 30


def _maxrss(who: int) -> int:
    nbytes = resource.getrusage(who).ru_maxrss
    return nbytes if sys.platform == "darwin" else nbytes << 10


def _status(name: str) -> int | None:
    return _kilobytes("/proc/self/status", name)


def _meminfo(name: str) -> int | None:
    return _kilobytes("/proc/meminfo", name)


def _kilobytes(file: str, name: str) -> int | None:
    try:
        text = Path(file).read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    line = next((line for line in text.splitlines() if line.startswith(f"{name}:")), None)
    return None if line is None else int(line.split()[1]) << 10


def _left_by_limits(root: Path = Path("/")) -> Iterator[int]:
    """Bytes below the limit of each control group that this process is in: its own, and all around that."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        limit, usage = _FIRST_VERSION if controllers else _SECOND_VERSION
        own = PurePosixPath(path.lstrip("/"))
        for folder in (own, *own.parents):  # in a container the path may be that outside, and only the root is there
            most, used = _number(mount / folder / limit), _number(mount / folder / usage)
            if most is not None and used is not None:
                yield max(most - used + _cached(mount / folder / "memory.stat"), 0)


def _cached(statistics: Path) -> int:
    """Bytes of files in the cache, which go when memory is needed."""
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


def room_at(folder: Path) -> int:
    """Bytes of temporary files that a folder may hold, so that its disk does not run full."""
    return int(_SAFE_SHARE * shutil.disk_usage(folder).free)
