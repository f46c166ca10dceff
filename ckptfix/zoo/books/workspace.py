"""Where a migration keeps its books and its temporary files.

With a local destination, the manifest lies in it and grows there, and temporary files are in a hidden folder of it,
from which a rename puts them in place. With one far away, or in a dry run, all of that is in a temporary folder of this
machine; the books are then fetched from the destination, and sent there from time to time. Nobody can tidy up after a
SIGKILL, so that the next migration removes such a folder that nobody holds any more."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from filecmp import cmp
from pathlib import Path

from ckptfix.errors import UsageError, WriteError
from ckptfix.zoo.books.journal import Journal
from ckptfix.zoo.books.manifest import MANIFEST, OWN_NAMES, RENAMES, WEIGHTS
from ckptfix.zoo.places import Place, walk_if_there
from ckptfix.zoo.work.staging import flush

SCRATCH = ".ckptfix-tmp"
"""The folder for temporary files in a local destination. What a killed run left in it is removed by the next."""

AWAY = "ckptfix-zoo-"
"""What the name of a temporary folder of this machine begins with."""

_YOUNG = 60.0
"""Seconds for which a folder without a holder may be one that is just being made."""

_SHARE = 20
"""Sending the books may take one part in so many of the time, however large they become."""


@dataclass
class Workspace:
    """The books of a migration, and a folder for temporary files."""

    destination: Place
    manifest: Journal
    weights: Journal
    scratch: Path
    is_published: bool
    """Whether the books have to be sent to the destination."""
    _sent: float = 0.0
    _took: float = 1.0

    def publish(self, at_once: bool = False) -> None:
        """Send the books to a destination that is far away, if it is time."""
        if not self.is_published or (not at_once and time.monotonic() - self._sent < _SHARE * self._took):
            return
        began = time.monotonic()
        for name in OWN_NAMES:
            if (file := self.manifest.path.with_name(name)).exists():
                self.destination.put(file, name)
        self._sent = time.monotonic()
        self._took = max(self._sent - began, 0.5)

    def close_books(self) -> None:
        """Put the books in order: one line for each source, and the names that changed."""
        self.manifest.tidy()
        self.weights.tidy()
        renames = self.manifest.path.with_name(RENAMES)
        _write_renames(self.manifest, renames, self.scratch)
        self.publish(at_once=True)


@contextmanager
def opened(destination: Place, dry_run: bool) -> Iterator[Workspace]:
    """The workspace of a migration to this destination; its temporary files are gone at the end, its books closed.

    Raises ``UsageError`` where the destination holds something else than a migration, or is in use by another one.
    """
    with ExitStack() as stack:
        folder = destination.root
        is_away = folder is None or dry_run
        if folder is None or dry_run:
            _check_kind(destination)
            folder = stack.enter_context(_away())
            for name in (MANIFEST, WEIGHTS):
                if destination.entry(name) is not None:
                    destination.fetch(name, folder / name)
        else:
            _make(folder)
            stack.enter_context(_held(folder))
            _check_kind(destination)
            shutil.rmtree(folder / SCRATCH, ignore_errors=True)
        scratch = folder / SCRATCH / str(os.getpid())
        _make(scratch)
        stack.callback(shutil.rmtree, folder / SCRATCH, ignore_errors=True)
        manifest = stack.enter_context(Journal(folder / MANIFEST))
        weights = stack.enter_context(Journal(folder / WEIGHTS))
        if not is_away:
            flush(folder)
        workspace = Workspace(destination, manifest, weights, scratch, is_away and not dry_run)
        workspace.publish(at_once=True)
        yield workspace


@contextmanager
def _away() -> Iterator[Path]:
    """A temporary folder of this machine, gone at the end; with it go those of migrations that were killed."""
    for other in Path(tempfile.gettempdir()).glob(f"{AWAY}*"):
        with suppress(OSError, UsageError):  # it is somebody else's, in use, or gone meanwhile
            if time.time() - other.stat().st_mtime > _YOUNG:
                with _held(other):
                    shutil.rmtree(other)
    folder = Path(tempfile.mkdtemp(prefix=AWAY))
    with _held(folder):
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _check_kind(destination: Place) -> None:
    if destination.root is not None and not destination.root.exists():
        return
    if destination.entry(MANIFEST) is not None:
        return
    if destination.root is not None:
        stranger = min((file.name for file in destination.root.iterdir() if file.name != SCRATCH), default=None)
    else:
        entry = next(walk_if_there(destination), None)
        stranger = None if entry is None else entry.name
    if stranger is not None:
        raise UsageError(
            f"{destination.name}: is not empty (it has {stranger}) and is no result of a migration; name a new folder"
        )


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(f"{folder}: cannot be made: {error.strerror}; name another destination") from error


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Keep other migrations out of the folder. The system lets it go however this process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"{folder}: another ckptfix migrates into it; wait for it, or stop it") from error
        yield
    finally:
        os.close(descriptor)


def _write_renames(manifest: Journal, path: Path, scratch: Path) -> None:
    """``renames.json``: the sources whose output has another name, and that name."""
    new = scratch / path.name
    with new.open("w", encoding="utf-8") as file:
        before = "{"
        for source, output in _renames(manifest):
            file.write(f"{before}\n  {json.dumps(source)}: {json.dumps(output)}")
            before = ","
        file.write("{}\n" if before == "{" else "\n}\n")
    if not (path.exists() and cmp(new, path, shallow=False)):
        flush(new)
        new.replace(path)


def _renames(manifest: Journal) -> Iterator[tuple[str, str]]:
    for raw in manifest.raw_lines():
        # Most keep their name, and their lines need not be parsed: both are written in the same way.
        own = raw.removeprefix(b'{"source":').partition(b',"version":')[0]
        if not raw.partition(b',"output":')[2].startswith(own + b","):
            line = json.loads(raw)
            if line["output"] not in (None, line["source"]):
                yield line["source"], line["output"]
