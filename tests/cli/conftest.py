"""A working directory with small checkpoints."""

from pathlib import Path

import pytest
import torch

MODEL = """\
import torch


def tiny(width=3):
    return torch.nn.Linear(width, 2)


def broken():
    raise ZeroDivisionError("the user's own fault")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the working directory: ``good.pth`` fits ``zoo:tiny``, ``wrapped.pth`` was saved under DataParallel,
    ``torn.pth`` is truncated.
    """
    state_dict = torch.nn.Linear(3, 2).state_dict()
    torch.save(state_dict, tmp_path / "good.pth")
    torch.save({f"module.{key}": value for key, value in state_dict.items()}, tmp_path / "wrapped.pth")
    content = (tmp_path / "good.pth").read_bytes()
    (tmp_path / "torn.pth").write_bytes(content[: len(content) // 2])
    (tmp_path / "zoo.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path
