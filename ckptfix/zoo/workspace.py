"""The journals of a migration, and its folder for temporary files.

With a local destination, the journals and a hidden folder for temporary files are in it, and a rename puts outputs in
place. With a remote destination or in a dry run, both are in a temporary folder of this machine; the journals are
fetched from the destination first, and uploaded from time to time. A SIGKILL leaves such folders behind: the next
migration removes those that no process holds."""

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from msgspec import Struct

from ckptfix.errors import UsageError, WriteError
from ckptfix.writing.atomic import atomic_file, flush_file, remove_leftovers, temporary_folder_beside
from ckptfix.zoo.manifest import MANIFEST, OWN_NAMES, RENAMES, WEIGHTS, Journal
from ckptfix.zoo.places import Place, walk_if_there

# The folder for temporary files in a local destination. The next run removes what a killed one left.
SCRATCH = ".ckptfix-tmp"
_SHARE = 20  # uploading the journals may take one part in this many of the time, however large they are


class Workspace(Struct):
    """The journals of a migration, and a folder for temporary files."""

    destination: Place
    manifest: Journal
    weights: Journal
    scratch: Path
    is_published: bool  # whether the journals have to be uploaded
    _sent: float = 0.0
    _took: float = 1.0

    def publish(self, at_once: bool = False) -> None:
        """Upload the journals to a remote destination, if it is time to."""
        if not self.is_published or (not at_once and time.monotonic() - self._sent < _SHARE * self._took):
            return
        began = time.monotonic()
        for name in OWN_NAMES:
            if (file := self.manifest.path.with_name(name)).exists():
                self.destination.put(file, name)
        self._sent = time.monotonic()
        self._took = max(self._sent - began, 0.5)

    def close_journals(self, outputs: Mapping[str, str | None]) -> None:
        """Tidy the journals to one line for each source, and write renames.json. ``outputs`` has the output of each
        source in the manifest."""
        self.manifest.tidy(self.scratch)
        self.weights.tidy(self.scratch)
        renames = {source: name for source, name in sorted(outputs.items()) if name is not None and name != source}
        text, path = json.dumps(renames, indent=2) + "\n", self.manifest.path.with_name(RENAMES)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            with atomic_file(path) as file:
                file.write(text)
        self.publish(at_once=True)


@contextmanager
def opened(destination: Place, dry_run: bool) -> Iterator[Workspace]:
    """Open the workspace of a migration to this destination. At the end, remove its temporary files and close its
    journals.

    Raises ``UsageError`` if the destination has other files than those of a migration, or another one is using it."""
    with ExitStack() as stack:
        folder = destination.root
        is_away = folder is None or dry_run
        if folder is None or dry_run:
            _check_kind(destination)
            folder = stack.enter_context(temporary_folder())
            for name in (MANIFEST, WEIGHTS):
                if destination.entry(name) is not None:
                    destination.fetch(name, folder / name)
        else:
            _make(folder)
            stack.enter_context(_held(folder))
            _check_kind(destination)
            shutil.rmtree(folder / SCRATCH, ignore_errors=True)
            remove_leftovers(folder)
        scratch = folder / SCRATCH / str(os.getpid())
        _make(scratch)
        stack.callback(shutil.rmtree, folder / SCRATCH, ignore_errors=True)
        manifest = stack.enter_context(Journal(folder / MANIFEST))
        weights = stack.enter_context(Journal(folder / WEIGHTS))
        if not is_away:
            flush_file(folder)
        workspace = Workspace(destination, manifest, weights, scratch, is_away and not dry_run)
        workspace.publish(at_once=True)
        yield workspace


def temporary_folder() -> AbstractContextManager[Path]:
    """Create a temporary folder that is removed at the end, and remove those of killed migrations."""
    return temporary_folder_beside(Path(tempfile.gettempdir(), "zoo"))


def _check_kind(destination: Place) -> None:
    root = destination.root
    if (root is not None and not root.exists()) or destination.entry(MANIFEST) is not None:
        return
    if root is not None:
        other = min((file.name for file in root.iterdir() if file.name != SCRATCH), default=None)
    else:
        entry = next(walk_if_there(destination), None)
        other = None if entry is None else entry.name
    if other is not None:
        raise UsageError(
            f"{destination.name}: is not empty (it has {other}) and is not the result of a migration; name a new folder"
        )


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(f"{folder}: cannot be created: {error.strerror}; name another destination") from error


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Lock the folder against other migrations. The system releases the lock however this process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"{folder}: another ckptfix is migrating into it; wait for it, or stop it") from error
        yield
    finally:
        os.close(descriptor)
