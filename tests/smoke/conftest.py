"""Writes files for the models of tests/smoke/models.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

Save = Callable[..., str]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Return a function that saves a state_dict with changed entries (None removes one) and returns the path."""

    def write(model: nn.Module, changes: dict[str, Any] | None = None) -> str:
        state = model.state_dict()
        for key, value in (changes or {}).items():
            if value is None:
                del state[key]
            else:
                state[key] = value
        path = tmp_path / "weights.pth"
        torch.save(state, path)
        return str(path)

    return write
