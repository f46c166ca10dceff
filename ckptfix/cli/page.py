"""``--report FILE``: what a command found, as one HTML page."""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from ckptfix.core.report import Report
from ckptfix.core.wording import typed
from ckptfix.errors import UsageError
from ckptfix.report.telling import Telling


class PageWriter:
    """Gathers the reports of a command for a page; what a file comes to waits on the disk, not in memory."""

    def __init__(self, file: str, taken: Mapping[str, str | None]) -> None:
        """``taken`` are other files of the command by the option that names them; the page is none of them."""
        from ckptfix.report.page import check_page_file

        check_page_file(file)
        for option, other in taken.items():
            if other is not None and Path(other).resolve() == Path(file).resolve():
                raise UsageError(f"{file}: is the file of {option}; name another file for the report")
        self.file = file
        self._title = ""
        self._count = 0
        self._records = _spool()
        self._weights = _spool()

    def add(self, report: Report, telling: Telling, seconds: float) -> None:
        """Take in the report of one file."""
        from ckptfix.report.page import record_of
        from ckptfix.report.page.data import weights_to_json

        self._add(report.source, record_of(report, telling, seconds))
        _put(self._weights, weights_to_json(report))

    def add_error(self, source: str, message: str) -> None:
        """Take in what hindered the work on a file."""
        from ckptfix.report.page import record_of_error

        self._add(source, record_of_error(source, message))

    def save(self) -> None:
        """Write the page. Raises ``CkptfixError`` if that cannot be."""
        from ckptfix.report.page import save_page, write_page

        title = self._title if self._count == 1 else f"{self._count} checkpoints"
        save_page(
            self.file,
            lambda out: write_page(out, title, _lines(self._records), _lines(self._weights), facts=facts_of_run()),
        )

    def _add(self, source: str, record: Mapping[str, Any]) -> None:
        self._title = Path(source).name or source
        self._count += 1
        _put(self._records, record)


def _spool() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="ascii", prefix="ckptfix-")


def _put(spool: IO[str], data: Mapping[str, Any]) -> None:
    spool.write(json.dumps(data, allow_nan=False) + "\n")


def _lines(spool: IO[str]) -> Iterator[dict[str, Any]]:
    spool.seek(0)
    return map(json.loads, spool)


NOT_INSTALLED = "not installed"


def facts_of_run() -> dict[str, str]:
    """Return how, when and with what the page was made."""
    return {
        "Made": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "Command": typed(["ckptfix", *sys.argv[1:]]),
        **environment(),
    }


def environment() -> dict[str, str]:
    """Return the versions of what ckptfix runs with."""
    from importlib.metadata import PackageNotFoundError, version

    from ckptfix import __version__
    from ckptfix.known.table import table
    from ckptfix.values.scan import kernel

    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = NOT_INSTALLED
    return {
        "ckptfix": __version__,
        "torch": torch,
        "Kernel": "compiled" if kernel() is not None else "none: pure Python, slower",
        "Known models": ", ".join(f"{library} {release}" for library, release in table().versions.items()),
        "Python": platform.python_version(),
        "Platform": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
