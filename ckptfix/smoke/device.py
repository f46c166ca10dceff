"""Where the model runs, and in which dtype. A device must first do a trivial sum, so that a broken one is never blamed
on the checkpoint.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ckptfix.errors import CkptfixError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn


class DeviceError(CkptfixError):
    """The device that was asked for does not work here."""


def check_device_name(name: str) -> None:
    """Raise ``UsageError`` for a text that names no device; needs no torch."""
    if not re.fullmatch(r"auto|cpu|mps|(cuda|xpu)(:\d+)?", name):
        raise UsageError(f"--device {name!r} is no device: give auto, cpu, cuda, cuda:1, mps or xpu")


def choose_device(name: str) -> tuple[torch.device, tuple[str, ...]]:
    """The device of this name, and what to say about it. ``auto`` is CUDA where it works, otherwise the CPU.

    Raises ``DeviceError`` where another one was asked for by name and does not work.
    """
    import torch

    if name != "auto":
        device = torch.device(name)
        fault = _fault(device)
        if fault:
            raise DeviceError(f"the device {name} does not work here: {fault}")
        return device, ()
    if not torch.cuda.is_available():
        return torch.device("cpu"), ("there is no CUDA device",)
    device = torch.device("cuda", torch.cuda.current_device())
    fault = _fault(device)
    if fault:
        return torch.device("cpu"), (f"the CUDA environment is broken: {fault}",)
    return device, ()


def _fault(device: torch.device) -> str:
    """Why the device cannot multiply two small matrices; empty where it can."""
    import torch

    try:
        ones = torch.ones(8, 8, device=device)
        total = float((ones @ ones).sum())
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return "" if total == 512 else f"8x8 ones multiplied sum to {total:g}, not to 512"


def place(model: nn.Module, device: torch.device) -> tuple[torch.dtype, tuple[str, ...]]:
    """Move the model; returns the dtype that its floating inputs need (that of its first floating parameter), and what
    to say.

    On the CPU half precision becomes float32, since many operators have no half version there.
    """
    import torch

    model.to(device)
    dtype = compute_dtype(model)
    if device.type == "cpu" and dtype == torch.float16:
        model.float()
        return torch.float32, ("float16 weights and input were converted to float32 for the CPU",)
    return dtype, ()


def compute_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the first floating parameter, float32 for a model that has none."""
    import torch

    ordinary = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    return next((parameter.dtype for parameter in model.parameters() if parameter.dtype in ordinary), torch.float32)
