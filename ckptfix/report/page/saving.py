"""A page on its way to a file: only another page is replaced, and only by a whole one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from ckptfix.errors import UsageError, WriteError
from ckptfix.report.page.rendering import MARK


def check_page_file(file: str | Path) -> None:
    """Raises ``UsageError`` where a page cannot go: one slip of a name must not cost a checkpoint.

    Called before the work begins, so that an hour of checking does not end in a refused name."""
    path = Path(file)
    if not _may_be_replaced(path):
        raise UsageError(f"{file}: is there already and is no report of ckptfix; name another file")
    if not path.resolve().parent.is_dir():
        raise UsageError(f"{file}: the folder {path.parent} does not exist; make it, or name another file")


def save_page(file: str | Path, write: Callable[[TextIO], None]) -> None:
    """Have a page written and put it in place. Raises ``WriteError`` where the disk refuses; nothing is left then."""
    from ckptfix.writing.atomic import atomic_file

    goal = Path(file).resolve()  # a link keeps pointing at its file
    check_page_file(goal)
    try:
        with atomic_file(goal) as out:
            write(out)
    except (OSError, WriteError) as error:
        raise WriteError(
            f"{file}: the report cannot be written ({error.__cause__ or error}); name another place"
        ) from error


def _may_be_replaced(path: Path) -> bool:
    """Whether nothing is lost where a page goes: the place is free or empty, or has a page of ours."""
    if not path.exists():
        return True
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(4096)
    return not head or MARK.encode("ascii") in head
