"""Factories that kill the process or never return, and some that work."""

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
    """Die the first time, as if other jobs had taken the memory."""
    if not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return linear()


def starved(marker: str) -> nn.Module:
    """Die until the marker exists, as if memory were too small, except on the meta device."""
    if not torch.empty(0).is_meta and not Path(marker).exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return linear()


def exhausted() -> nn.Module:
    """Fail as if this process had too little memory."""
    raise MemoryError


def linear() -> nn.Module:
    return nn.Linear(2, 2)


def greedy() -> nn.Module:
    """Take far more memory than expected for the file, and hang."""
    held = torch.ones(1100 << 20, dtype=torch.uint8, device="cpu")
    signal.pause()
    return nn.Linear(2, len(held))
