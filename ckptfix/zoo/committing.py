"""Puts outputs in place and records them, in groups, so that ten thousand small files need few flushes.

    flush     the outputs of the workers, before they get their names
    rename    each output to its name, so that it appears complete or not at all
    flush     the folders, for the names
    append    lines to the manifest and the weights, flushed

A kill at any point may leave outputs without a line, which the next run makes again, but never a line without its
output. Meanwhile the workers continue, and what they finish is the next group."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from ckptfix.bytes.checksums import sha256_of_file
from ckptfix.bytes.copying import CHUNK
from ckptfix.errors import CkptfixError, WriteError
from ckptfix.writing.atomic import flush_file
from ckptfix.zoo.job import Done, JobFiles, Staged
from ckptfix.zoo.manifest import Journal, Outcome, Record
from ckptfix.zoo.places import Place


def sha256_of_files(files: Iterable[tuple[str, Path]]) -> str:
    """Return one SHA-256 for several files: that of the lines ``DIGEST  NAME`` that sha256sum prints for them."""
    whole = hashlib.sha256()
    for name, path in files:
        whole.update(f"{sha256_of_file(path)}  {name}\n".encode("utf-8", "surrogateescape"))
    return whole.hexdigest()


def copy_file(source: Path, goal: Path) -> int:
    """Copy a file with its permissions and times, inside the kernel if possible, which shares blocks on file systems
    that support it. Return the number of bytes."""
    with source.open("rb", buffering=0) as old, goal.open("xb", buffering=0) as new:
        size = os.fstat(old.fileno()).st_size
        try:
            while os.copy_file_range(old.fileno(), new.fileno(), CHUNK):
                pass
        except (OSError, AttributeError):  # another file system, or no such call: copy the rest in user space
            shutil.copyfileobj(old, new, 1 << 20)
        written = new.tell()
    if written != size:
        raise CkptfixError(f"{source}: changed while it was read; run the same command again")
    shutil.copystat(source, goal)
    return size


def deliver_staged(staged: Sequence[Staged], destination: Place) -> None:
    """Put files in place in order, each flushed before it gets its name."""
    if destination.root is None:
        for each in staged:
            destination.put(Path(each.path), each.name)
        return
    for each in staged:
        if not each.is_flushed:
            flush_file(Path(each.path))
    folders: set[Path] = set()
    for each in staged:
        folders |= put_in_place(each, destination.root)
    for folder in folders:
        flush_file(folder)


def put_in_place(staged: Staged, root: Path) -> set[Path]:
    """Rename one file to its name below a local root. Return the folders to flush.

    Raises ``WriteError`` if that fails."""
    goal = root / staged.name
    try:
        made = [folder for folder in goal.parents if folder.is_relative_to(root) and not folder.exists()]
        goal.parent.mkdir(parents=True, exist_ok=True)
        Path(staged.path).replace(goal)
    except OSError as error:
        raise WriteError(f"{staged.name}: cannot be put in place: {error.strerror}; make room for it") from error
    return {goal.parent, *(folder.parent for folder in made)}


def forget(path: Path) -> None:
    """Drop the cached pages of a flushed file, which is not read again soon and would displace files that are. The next
    file reuses these pages, at a third of the cost of new ones."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError), path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


_MOST = 512  # finished jobs after which a group is recorded at once
_LARGE = 1 << 20  # bytes of an output from which dropping its pages is worth a call


class Committer:
    """Records the results of jobs in the order of arrival: in groups, and at the end, also after Ctrl-C.

    ``on_written`` gets each result once it is durable. ``left_over`` returns the outputs of an earlier run that a
    record makes stale."""

    def __init__(
        self,
        destination: Place,
        scratch: Path,
        manifest: Journal,
        weights: Journal,
        on_written: Callable[[Done], None] = lambda done: None,
        left_over: Callable[[Record], Sequence[str]] = lambda record: (),
    ) -> None:
        self._destination, self._left_over = destination, left_over
        self._root, self._scratch = destination.root, scratch
        self._manifest, self._weights, self._on_written = manifest, weights, on_written
        self._waiting: list[Done] = []
        self._safe: set[Path] = set()

    def __enter__(self) -> Committer:
        return self

    def __exit__(self, *_: object) -> None:
        self.commit()

    def add(self, done: Done) -> None:
        """Take the result of a job, to record it with others."""
        self._waiting.append(done)
        if len(self._waiting) >= _MOST:
            self.commit()

    def commit(self) -> None:
        group, self._waiting = self._waiting, []
        for done in self._written(group) if group else ():
            self._on_written(done)

    def _written(self, group: Sequence[Done]) -> list[Done]:
        new = [done for done in group if not done.is_known]
        if self._root is not None and any(done.staged for done in new):
            self._flush([Path(each.path) for done in new for each in done.staged if not each.is_flushed])
            for done in new:
                if (done.record.output_size or 0) >= _LARGE:
                    for each in done.staged:
                        forget(Path(each.path))
            folders: set[Path] = set()
            new = [self._placed(done, self._root, folders) for done in new]
            self._flush(sorted(folders))
        for done in new:
            for name in self._left_over(done.record):
                self._destination.remove(name)  # before the line, or a kill in between would leave it for ever
        self._weights.append([(done.record.source, done.weights) for done in new if done.weights])
        for done in new:
            if done.weights is None:
                self._weights.drop(done.record.source)
        self._manifest.append([(done.record.source, done.record.line()) for done in new])
        return [*new, *(done for done in group if done.is_known)]

    def _flush(self, files: Sequence[Path]) -> None:
        if files and self._root is not None and not flush_file_system(self._root):
            for file in files:
                flush_file(file)

    def _placed(self, done: Done, root: Path, folders: set[Path]) -> Done:
        """Put the outputs of a job in place; if that fails, the job failed."""
        try:
            for each in done.staged:
                self._check_folder((root / each.name).parent, root)
                folders |= put_in_place(each, root)
        except WriteError as error:
            nothing = replace(done.record, output=None, output_size=None, output_sha256=None, output_parts=())
            record = replace(nothing, outcome=Outcome.FAILED, error=str(error))
            done = replace(done, record=record, weights=None, staged=())
        if len(done.staged) != 1:
            JobFiles(self._scratch, done.number).clear()  # the folder of shards is still there
        return done

    def _check_folder(self, folder: Path, root: Path) -> None:
        """Raise ``WriteError`` if a link in the destination leads out of it, perhaps to a source."""
        if folder not in self._safe and not folder.resolve().is_relative_to(root.resolve()):
            raise WriteError(f"{folder}: is a link that leads outside the destination; remove it")
        self._safe.add(folder)


def flush_file_system(folder: Path) -> bool:
    """Flush the whole file system of a folder. Return False if there is no such call, or if it failed."""
    if sys.platform != "linux":
        return False
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # Since Linux 5.8 it also reports writeback errors (https://man7.org/linux/man-pages/man2/sync.2.html).
        return bool(ctypes.CDLL(None).syncfs(descriptor) == 0)
    finally:
        os.close(descriptor)
