"""Runs the command line in a test."""

import contextlib
import io
import os
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from ckptfix.cli.program import exit_code
from tests import printed

ROOT = Path(__file__).resolve().parent.parent.parent


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a child process, without variables for colours or buffering."""
    unwanted = ("NO_COLOR", "FORCE_COLOR", "PYTHONUNBUFFERED")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", **changes}


def command(*words: str | Path) -> list[str]:
    """Return the words that run ckptfix with this Python."""
    return [sys.executable, "-m", "ckptfix", *map(str, words)]


def run(*words: str | Path, cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run ckptfix to its end in a process of its own."""
    return subprocess.run(
        command(*words), cwd=cwd, env=environment(**changes), capture_output=True, encoding="utf-8", timeout=300
    )


def run_here(*words: str | Path, cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run ckptfix to its end in this process, which has imported torch already.

    Arguments, folder, environment and streams are the same as in a process of its own; signals, closed streams and what
    Python prints at exit are not covered."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="") for _ in range(2))
    argv = ["ckptfix", *map(str, words)]
    with (
        patch.dict(os.environ, environment(**changes), clear=True),
        patch.object(sys, "argv", argv),
        _in_folder(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        _warnings_on_stderr(),
    ):
        code = exit_code(argv[1:])
    said = []
    for stream in (out, err):
        stream.seek(0)
        said.append(stream.read())
    return subprocess.CompletedProcess(argv, code, *said)


@contextlib.contextmanager
def _in_folder(folder: Path) -> Iterator[None]:
    """Work in a folder, and then forget the modules imported from it: other folders have modules of these names."""
    before, modules = Path.cwd(), {*sys.modules}
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        for name in {*sys.modules} - modules:
            if Path(getattr(sys.modules[name], "__file__", None) or "").parent == folder:
                del sys.modules[name]


@contextlib.contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    """Show warnings as Python does by default, not in the summary of the tests."""

    def show(message, category, filename, lineno, file=None, line=None) -> None:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        warnings.showwarning = show
        yield


def parse(line: str) -> None:
    """Parse a command with the real parser, without running it."""
    printed.parse(shlex.split(line))
