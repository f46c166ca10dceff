"""Atomic writes: a crash leaves either the old file or the complete new one.

The bytes go to a temporary file beside the output, which is renamed over the output once it is complete and flushed to
disk. A rename within a folder is atomic (POSIX), and durable once the folder is flushed too. Everything that ckptfix
writes goes through here: checkpoints, shards, plans, reports, and the journals of a migration.

    with atomic_file(path) as file:          # a text file
        file.write(…)

    with temporary_beside(output) as temporary:
        …                                    # write it, verify it
        deliver_file(temporary, output)

A temporary file is locked (flock) as long as its process lives. If it can be locked, its process was killed, and the
next run that writes into the folder removes it. A process number in the name would not do: numbers are reused, and mean
nothing in another container or on another machine."""

import contextlib
import math
import os
import re
import shutil
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import NamedTuple, TextIO

from ckptfix.errors import Opt, UsageError, WriteError

_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_TEMPORARY = re.compile(r"\..*\.[0-9a-f]{16}\.ckptfix-tmp", re.DOTALL)

# A file in a temporary folder: the names of the files being moved into place, the one that the others depend on last.
_PLACING = "placing"

# The extended attributes that a file keeps when its content is replaced, including ACLs.
_ACL = "system.posix_acl_access"
_ATTRIBUTES = ("user.", "system.posix_acl_", "security.selinux")

# Seconds before a folder is searched for leftovers again: a zoo may have a hundred thousand files in one.
_AGAIN = 60.0

_searched: dict[Path, float] = {}

_placed: deque[tuple[float, Path]] = deque(maxlen=16)


def placed(since: float) -> list[Path]:
    """Return the files put in place since a time (of ``time.monotonic``), for the message after an interruption."""
    return [path for moment, path in _placed if moment >= since]


@contextlib.contextmanager
def temporary_beside(output: Path, like: Path | None = None) -> Iterator[Path]:
    """Provide an empty, locked temporary file in the folder of the output; it is removed at the end unless renamed.

    It gets the owner, permissions and extended attributes of the output if that exists, else the permissions of
    ``like``, else those of any new file. Raises ``WriteError`` if the folder is not writable."""
    remove_leftovers(output.parent)
    model = output if output.exists() else like if like is not None and like.exists() else None
    mode = 0o666 if model is None else 0o600
    with _temporary(output, lambda path: os.open(path, _NEW_FILE, mode)) as (temporary, handle):
        if model is not None:
            _take_after(model, handle, is_replaced=model == output)
        yield temporary


@contextlib.contextmanager
def temporary_folder_beside(output: Path) -> Iterator[Path]:
    """Provide a locked temporary folder beside the output; it is removed with its content at the end."""
    remove_leftovers(output.parent)
    with _temporary(output, _create_folder) as (folder, _):
        yield folder


@contextlib.contextmanager
def atomic_file(goal: Path) -> Iterator[TextIO]:
    """Open a text file that replaces ``goal`` when the body ends without an error.

    Raises ``WriteError`` if writing fails; the old content is kept then."""
    goal = goal.resolve()  # a link keeps pointing at its file
    with temporary_beside(goal) as temporary:
        try:
            with temporary.open("w", encoding="utf-8", newline="\n") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise unwritten(goal, error) from error
        deliver_file(temporary, goal)


class OwnFile(NamedTuple):
    """A plan or a report, which may replace only an older one (with ``mark`` among its first bytes): a mistyped name
    must not overwrite a checkpoint."""

    path: Path
    what: str
    mark: bytes

    def refuse(self) -> None:
        """Raise ``UsageError`` if it cannot be written there; called before the work begins."""
        path, what, _ = self
        if path.exists() and not (path.is_file() and self._is_own()):
            raise UsageError(f"{path}: already exists and is not a ckptfix {what}; name another file")
        if not path.resolve().parent.is_dir():
            raise UsageError(f"{path}: the folder {path.parent} does not exist; create it, or name another file")
        if not os.access(path.resolve().parent, os.W_OK):
            raise UsageError(f"{path}: the folder {path.parent} is not writable; name another file")

    @contextlib.contextmanager
    def writing(self) -> Iterator[TextIO]:
        """Open the file like ``atomic_file``. Raises ``WriteError`` if writing fails; nothing is left behind."""
        self.refuse()
        try:
            with atomic_file(self.path) as file:
                yield file
        except (OSError, WriteError) as error:
            cause = error.__cause__ or error
            reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else cause
            raise WriteError(f"{self.path}: the {self.what} cannot be written: {reason}; name another place") from error

    def _is_own(self) -> bool:
        with self.path.open("rb") as file:
            head = file.read(4096)
        return not head or self.mark in head


def deliver_file(temporary: Path, output: Path, backup_of: Path | None = None, flush: bool = True) -> None:
    """Rename a temporary file to the output, and flush the folder if ``flush``. The old content of ``backup_of`` is
    kept as ``<name>.bak``."""
    with _placing([output], flush):
        backup = _back_up(backup_of) if backup_of is not None and not has_backup(backup_of) else None
        try:
            temporary.replace(output)
        except OSError:
            if backup is not None:
                backup.unlink(missing_ok=True)
            raise


def deliver_files(folder: Path, goals: Sequence[Path]) -> None:
    """Move files of a temporary folder to ``goals`` of the same names, the one that the others depend on last.

    Raises ``WriteError`` if a move fails; none of them is in place then."""
    with _placing(goals):
        try:
            (folder / _PLACING).write_text("\n".join(goal.name for goal in goals), encoding="utf-8")
            flush_file(folder / _PLACING)
            for goal in goals[:-1]:
                (folder / goal.name).replace(goal)
            flush_file(goals[-1].parent)
            (folder / goals[-1].name).replace(goals[-1])
        finally:
            _undo(folder)


def deliver_folder(folder: Path, output: Path) -> None:
    """Rename a folder to the output, which does not exist. The files in it were flushed before."""
    with _placing([output]):
        for path in (*folder.rglob("*"), folder):
            if path.is_dir():
                flush_file(path)
        folder.rename(output)


@contextlib.contextmanager
def _placing(goals: Sequence[Path], flush: bool = True) -> Iterator[None]:
    """Report errors of the body as ``WriteError``; record that it put the goals in place, and flush their folder."""
    output = goals[-1]
    try:
        yield
    except OSError as error:
        raise WriteError(f"{output}: cannot be put in place: {error.strerror}; the source is unchanged") from error
    _placed.extend((time.monotonic(), goal) for goal in goals)
    try:
        if flush:
            flush_file(output.parent)
    except OSError as error:
        raise WriteError(
            f"{output}: is written and in place, but the disk does not confirm its name ({error.strerror}): a power "
            "cut could undo it; check the disk"
        ) from error


def has_backup(source: Path) -> bool:
    """Return whether a killed run already made the backup: a hard link to the source, or a copy.

    Raises ``WriteError`` if another file has its name."""
    backup = backup_of(source)
    if not os.path.lexists(backup):
        return False
    before, found = source.stat(), backup.lstat()
    if (before.st_size, before.st_mtime_ns) == (found.st_size, found.st_mtime_ns) and stat.S_ISREG(found.st_mode):
        return True
    raise WriteError(f"{backup}: a backup already exists; move it away, or omit ", Opt("backup"))


def backup_of(source: Path) -> Path:
    return source.with_name(source.name + ".bak")


def refuse_output(output: Path, force: bool = False) -> None:
    """Raise ``UsageError`` if the output exists and must not be replaced."""
    if output.is_dir():
        raise UsageError(f"{output}: already exists, and folders are never replaced; remove it, or name another output")
    if output.exists() and not output.is_file():
        raise UsageError(
            f"{output}: is a device, pipe or socket; name a file, or write nothing with ", Opt("dry_run", True)
        )
    if output.exists() and not force:
        raise UsageError(f"{output}: already exists; replace it with ", Opt("force", True), ", or name another output")


def sibling(source: Path, stem: str, ending: str) -> Path:
    """Return the path of a file beside ``source``, with the stem cut to what the file system takes."""
    while stem and _longest_name(source.parent) < len(os.fsencode(stem + ending)):
        stem = stem[:-1]
    return source.with_name(stem + ending)


def _longest_name(folder: Path) -> float:
    """Return how many bytes a name in the folder may have."""
    try:
        limit = os.pathconf(folder, "PC_NAME_MAX")
    except (OSError, ValueError):  # the folder does not exist, or the system does not know
        return math.inf
    return limit if limit > 0 else math.inf


def refuse_name(output: Path) -> None:
    """Raise ``UsageError`` if the name is too long for the file system."""
    limit = _longest_name(output.parent)
    if limit < (length := len(os.fsencode(output.name))):
        raise UsageError(
            f"{output}: the name has {length} bytes, and this file system takes {limit}; give ", Opt("output")
        )


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files in a folder whose processes are gone; at most once a minute."""
    if time.monotonic() - _searched.get(folder, -math.inf) < _AGAIN:
        return
    _searched[folder] = time.monotonic()
    try:
        with os.scandir(folder) as entries:
            left = [Path(entry.path) for entry in entries if _TEMPORARY.fullmatch(entry.name)]
    except OSError:  # writing to the folder reports the error
        return
    for path in left:
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                flock(handle, LOCK_EX | LOCK_NB)
                if os.fstat(handle).st_uid == os.geteuid():  # in /tmp, anyone can create files of any name
                    _remove(path)
            finally:
                os.close(handle)


def flush_file(path: Path) -> None:
    """Flush a file or folder to disk. Raises ``OSError`` if that fails.

    Write errors that were not reported yet are reported to whoever opens and flushes the file next
    (https://docs.kernel.org/filesystems/vfs.html#handling-errors-during-writeback)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unwritten(output: Path, error: OSError) -> WriteError:
    return WriteError(f"{output}: cannot be written: {error.strerror}; nothing was left over")


@contextlib.contextmanager
def _temporary(output: Path, create: Callable[[Path], int]) -> Iterator[tuple[Path, int]]:
    """Provide a locked temporary file or folder and its descriptor, and remove it at the end."""
    handle = None
    # The name is chosen first, so that the file is removed even if a signal comes while it is created.
    temporary = _new_name(output)
    try:
        try:
            while True:
                handle = create(temporary)
                with contextlib.suppress(OSError):  # a file system without locks
                    flock(handle, LOCK_EX | LOCK_NB)
                if temporary.exists():
                    break
                os.close(handle)  # another process removed it as a leftover before it was locked
                handle, temporary = None, _new_name(output)
        except OSError as error:
            raise WriteError(
                f"{output}: cannot write in {output.parent}: {error.strerror}; choose another place"
            ) from error
        yield temporary, handle
    finally:
        if os.path.lexists(temporary):
            _remove(temporary)
        if handle is not None:
            os.close(handle)


def _new_name(output: Path) -> Path:
    return output.parent / f".{output.name[:50]}.{os.urandom(8).hex()}.ckptfix-tmp"


def _create_folder(path: Path) -> int:
    path.mkdir(0o700)
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        _undo(path)
        shutil.rmtree(path)
    else:
        path.unlink()


def _undo(folder: Path) -> None:
    """Remove the files that were moved out of a temporary folder, unless the last one is in place too."""
    try:
        names = (folder / _PLACING).read_text(encoding="utf-8").split("\n")
    except OSError:
        return
    if any(os.path.basename(name) != name for name in names) or (folder.parent / names[-1]).exists():  # noqa: PTH119
        return
    for name in names:
        if not (folder / name).exists():
            (folder.parent / name).unlink(missing_ok=True)


def _take_after(model: Path, handle: int, is_replaced: bool) -> None:
    """Give a new file the permissions of another one, and if ``is_replaced``, its owner and extended attributes.

    ACLs belong to the permissions: without them, the mask of the ACL would become the permissions of the group."""
    found = model.stat()
    if is_replaced:
        with contextlib.suppress(OSError):  # only the superuser may change the owner
            os.fchown(handle, -1, found.st_gid)
            os.fchown(handle, found.st_uid, -1)
    os.fchmod(handle, stat.S_IMODE(found.st_mode) | stat.S_IRUSR)
    for name in _attributes(model) if hasattr(os, "listxattr") else ():
        if is_replaced or name == _ACL:
            with contextlib.suppress(OSError):  # an attribute that only the system may set
                os.setxattr(handle, name, os.getxattr(model, name))


def _attributes(file: Path) -> list[str]:
    try:
        return [name for name in os.listxattr(file) if name.startswith(_ATTRIBUTES)]
    except OSError:  # a file system without them
        return []


def _back_up(source: Path) -> Path:
    """Make the backup of a file, as a hard link if the file system has them, else as a copy."""
    backup = backup_of(source)
    try:
        os.link(source, backup)
    except FileExistsError:
        raise
    except OSError:
        with temporary_beside(backup, source) as temporary:
            shutil.copyfile(source, temporary)
            os.utime(temporary, ns=(source.stat().st_atime_ns, source.stat().st_mtime_ns))  # `has_backup` compares it
            flush_file(temporary)
            temporary.replace(backup)
    return backup
