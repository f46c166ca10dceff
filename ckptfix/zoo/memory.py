"""How much memory a piece of work took, and how much there is."""

from __future__ import annotations

import contextlib
import resource
import shutil
import sys
from pathlib import Path

_RESET_PEAK = b"5"
"""What ``clear_refs`` takes to begin a new peak (https://docs.kernel.org/filesystems/proc.html)."""

_SAFE_SHARE = 0.8


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
    the container if that is less.
    """
    free = [_meminfo("MemAvailable")]
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if limit is not None:
        free.append(limit - (used or 0))
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


def _number(file: str) -> int | None:
    try:
        text = Path(file).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def room_at(folder: Path) -> int:
    """Bytes of temporary files that a folder may hold, so that its disk does not run full."""
    return int(_SAFE_SHARE * shutil.disk_usage(folder).free)
