"""Where the tests find their files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Two workers of pytest on two cores: with more threads, torch waits for itself. Said before it is imported, and to the
# programs that are started.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def corpus() -> Path:
    """Folder of genuine old checkpoints: $CKPTFIX_CORPUS, or ../shared/corpus beside the project."""
    folder = Path(os.environ.get("CKPTFIX_CORPUS") or ROOT.parent / "shared" / "corpus")
    if not (folder / "manifest.jsonl").is_file():
        pytest.skip(f"no corpus in {folder}: set CKPTFIX_CORPUS to the folder that holds manifest.jsonl")
    return folder


@pytest.fixture(scope="session")
def samples() -> Path:
    """The `sample_checkpoints` folder."""
    return ROOT / "sample_checkpoints"
