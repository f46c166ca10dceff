"""Files that are not whole yet, under names by which they are known."""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptfix.zoo.places.errors import NoSpaceError

SUFFIX = ".ckptfix-tmp"
TEMPORARY = re.compile(r"\.[^/]*\.ckptfix-tmp", re.DOTALL)
"""What the last part of such a name looks like. Listings leave them out."""

RESERVE = 1 << 20
"""Bytes that a disk keeps free: a full one fails whoever writes next, and in ways that are hard to read."""


def temporary_name() -> str:
    """A new name. That of the file is not in it: it may already be as long as a name may be."""
    return f".{secrets.token_hex(6)}{SUFFIX}"


@contextmanager
def temporary_beside(goal: Path) -> Iterator[Path]:
    """A path in the folder of the goal, whose file is gone at the end unless it was renamed."""
    temporary = goal.with_name(temporary_name())
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def require_space(goal: Path, size: int, what: str) -> None:
    """Raise ``NoSpaceError`` where the disk of a path has no room for so many bytes."""
    free = shutil.disk_usage(goal.parent).free
    if size + RESERVE > free:
        raise NoSpaceError(
            f"{what}: takes {size} bytes, and {goal.parent} has {free} free; make room there, or choose another disk"
        )
