"""Put outputs in place and write them down: in groups, so that ten thousand small files need few flushes.

    flush     what the workers wrote is on the disk before it gets its name
    rename    each output appears complete, or not at all
    flush     and so do the names
    append    the lines of the manifest and of the weights, flushed

A kill at any point leaves at most outputs without a line, which the next run makes again, and never a line without its
output. All of it happens in a thread of its own: the workers go on meanwhile, and what they finish is the next
group."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import TracebackType

from ckptfix.errors import WriteError
from ckptfix.writing.atomic import flush_file
from ckptfix.zoo.journal import Journal
from ckptfix.zoo.manifest import Outcome, Record
from ckptfix.zoo.places import Place
from ckptfix.zoo.work.copying import forget, put_in_place
from ckptfix.zoo.work.job import Done, Workplace

_MOST = 512
"""Jobs that may wait to be written down; then the driver waits too."""

_LARGE = 1 << 20
"""Bytes of an output whose pages are worth a call."""


class Committer:
    """Takes what came of jobs and writes it down, in the order of arrival. ``on_written`` gets each of them, in the
    thread of the committer, when nothing can undo it any more. ``left_over`` returns the outputs of an earlier run that
    a record makes stale.
    """

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
        self._waiting: deque[Done] = deque()
        self._change = threading.Condition()
        self._is_closing = False
        self._error: BaseException | None = None
        self._safe: set[Path] = set()
        self._thread = threading.Thread(target=self._work, name="ckptfix-committer", daemon=True)

    def __enter__(self) -> Committer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Also after Ctrl-C: what is finished is written down, and not done again next time.
        with self._change:
            self._is_closing = True
            self._change.notify_all()
        self._thread.join()
        if kind is None:
            self._raise()

    def add(self, done: Done) -> None:
        """Take what came of a job. Waits if too many are waiting. Raises what went wrong with those before."""
        with self._change:
            self._change.wait_for(lambda: len(self._waiting) < _MOST or self._error is not None)
            self._raise()
            self._waiting.append(done)
            self._change.notify_all()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: bool(self._waiting) or self._is_closing)
                group = list(self._waiting)
                self._waiting.clear()
                self._change.notify_all()
            if not group:
                return
            try:
                for done in self._written(group):
                    self._on_written(done)
            except Exception as error:  # noqa: BLE001 - the driver raises it: a dead thread would lose what it is given
                with self._change:
                    self._error = error
                    self._waiting.clear()
                    self._change.notify_all()
                return

    def _written(self, group: Sequence[Done]) -> list[Done]:
        new = [done for done in group if not done.is_known]
        if self._root is not None and any(done.staged for done in new):
            self._flush([Path(each.path) for done in new for each in done.staged if not each.is_flushed])
            for done in new:
                if (done.record.output_size or 0) >= _LARGE:
                    for each in done.staged:
                        forget(Path(each.path))
            new = [self._placed(done, self._root) for done in new]
            self._flush(list({(self._root / each.name).parent for done in new for each in done.staged}))
        for done in new:
            for name in self._left_over(done.record):
                self._destination.remove(name)  # before the line, or a kill between the two would leave it for ever
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

    def _placed(self, done: Done, root: Path) -> Done:
        """Put the outputs of a job in place; if that fails, the job has."""
        try:
            for each in done.staged:
                self._check_folder((root / each.name).parent, root)
                put_in_place(each, root)
        except WriteError as error:
            nothing = replace(done.record, output=None, output_size=None, output_sha256=None, output_parts=())
            record = replace(nothing, outcome=Outcome.FAILED, error=str(error))
            done = replace(done, record=record, weights=None, staged=())
        if len(done.staged) != 1:
            Workplace(self._scratch, done.number).clear()  # of shards, the folder is left
        return done

    def _check_folder(self, folder: Path, root: Path) -> None:
        """Raise if a link in the destination leads out of it: a source could be there."""
        if folder not in self._safe and not folder.resolve().is_relative_to(root.resolve()):
            raise WriteError(f"{folder}: is a link that leads out of the destination; remove it")
        self._safe.add(folder)


def flush_file_system(folder: Path) -> bool:
    """Flush the file system of a folder in one go. Returns False if the system has no such call, or it failed."""
    if sys.platform != "linux":
        return False
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # Since Linux 5.8 it also reports errors that came up meanwhile (https://man7.org/linux/man-pages/man2/sync.2.html).
        return bool(_libc().syncfs(descriptor) == 0)
    finally:
        os.close(descriptor)


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
