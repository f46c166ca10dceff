"""Models whose making ends the process, or never ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from torch import nn


def crash(number: int) -> nn.Module:
    os.kill(os.getpid(), number)
    raise AssertionError("the process is gone")


def hang() -> nn.Module:
    signal.pause()
    raise AssertionError("no signal comes")


def crash_once(marker: str) -> nn.Module:
    """As if the memory of its neighbours were missing the first time."""
    if not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return linear()


def starved(marker: str) -> nn.Module:
    """As if there were too little memory for the model until the marker is there. On the meta device it takes none."""
    if not torch.empty(0).is_meta and not Path(marker).exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return linear()


def exhausted() -> nn.Module:
    """As if there were too little memory in this process."""
    raise MemoryError


def linear() -> nn.Module:
    return nn.Linear(2, 2)


def greedy() -> nn.Module:
    """As if a model took far more memory than its file is expected to."""
    held = torch.ones(1100 << 20, dtype=torch.uint8, device="cpu")
    signal.pause()
    return nn.Linear(2, len(held))
