"""Checks checkpoints in the background of a training: each in its own process with the lowest priority, one at a time.

Each check runs in a new Python that imports nothing of the training, so scripts need no ``__main__`` guard, and a
failing check cannot affect the training."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptfix.core.option import CHECK
from ckptfix.core.wording import first_names
from ckptfix.engine.validation import checked_settings
from ckptfix.rules import VALUES

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckptfix.core.settings import CheckSettings

_CHECK = """
import json, sys
from ckptfix.repairing import check
path, settings = json.load(sys.stdin)
json.dump(check(path, **settings).to_json(fixes=False), sys.stdout)
"""

_log = logging.getLogger("ckptfix")


class Watch:
    """Checks checkpoints, and logs a warning for each defect. ``defects`` holds them by the path of the checkpoint.

    ``settings`` are those of ``ckptfix.check``; by default, only the rules about values run. A checkpoint that is
    replaced or removed before its check ends is not reported. Raises ``UsageError`` for a setting that is not valid."""

    def __init__(self, **settings: Unpack[CheckSettings]) -> None:
        self.defects: dict[str, list[Mapping[str, Any]]] = {}
        self._settings: dict[str, Any] = {"select": VALUES, **settings}
        checked_settings(self._settings, function=CHECK)  # raises now, and not after hours of training
        self._thread = ThreadPoolExecutor(1, "ckptfix")
        self._checks: list[Future[None]] = []

    def check(self, path: str | os.PathLike[str]) -> None:
        """Check a checkpoint, file or folder, in the background."""
        self._checks.append(self._thread.submit(self._check, os.fspath(path)))

    def wait(self) -> None:
        """Wait for unfinished checks."""
        checks, self._checks = self._checks, []
        for check in checks:
            check.result()

    def _check(self, path: str) -> None:
        if not (before := _files(path)):
            return
        process = subprocess.Popen(
            [sys.executable, "-c", _CHECK],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        os.setpriority(os.PRIO_PROCESS, process.pid, 19)
        out, errors = process.communicate(json.dumps([path, self._settings]))
        if not before <= _files(path):
            return
        if process.returncode:
            _log.warning(
                "%s: the checkpoint cannot be checked: %s", path, (errors.strip().splitlines() or ["killed"])[-1]
            )
            return
        found = [each for each in json.loads(out)["findings"] if each["level"] != "note"]
        if found:
            self.defects[path] = found
        for each in found:
            keys = first_names(each["keys"], 3)
            _log.warning("%s: %s %s: %s%s", path, each["code"], each["name"], each["message"], keys and f" ({keys})")


def _files(path: str) -> set[tuple[str | int, ...]]:
    """Return what identifies the files of a checkpoint, to notice that they were replaced; empty if they are gone.

    A folder may still grow: the other ranks of a training add their random states after the first one is done."""
    place = Path(path)
    try:
        if place.is_dir():
            return {(entry.name, entry.stat().st_ino) for entry in place.iterdir()}
        found = place.stat()
    except OSError:
        return set()
    return {(found.st_ino, found.st_size, found.st_mtime_ns)}
