"""Ways to run the command line in a test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def environment(**changes: str) -> dict[str, str]:
    """The environment of a test's process, without what would change its colours or the buffers of its streams."""
    unwanted = ("NO_COLOR", "FORCE_COLOR", "PYTHONUNBUFFERED")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", **changes}


def command(*words: str | Path) -> list[str]:
    """The words that run ckptfix with this Python."""
    return [sys.executable, "-m", "ckptfix", *map(str, words)]


def run(*words: str | Path, cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run ckptfix to its end in a process of its own."""
    return subprocess.run(
        command(*words), cwd=cwd, env=environment(**changes), capture_output=True, encoding="utf-8", timeout=300
    )
