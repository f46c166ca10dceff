"""Where the model runs, and in which dtype. A device must first do a trivial sum, so that a broken one is never blamed
on the checkpoint.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from ckptfix.errors import CkptfixError, Opt, UsageError
from ckptfix.smoke.outputs import dtype_name

if TYPE_CHECKING:
    import torch
    from torch import nn


class DeviceError(CkptfixError):
    """The device that was asked for does not work here."""


def check_device_name(name: str) -> None:
    """Raise ``UsageError`` for a text that names no device; needs no torch."""
    if not re.fullmatch(r"auto|cpu|mps|(cuda|xpu)(:\d+)?", name):
        raise UsageError(Opt("device", name), ": not a device; give auto, cpu, cuda, cuda:1, mps or xpu")


def choose_device(name: str) -> tuple[torch.device, tuple[str, ...]]:
    """The device of this name, and what to say about it. ``auto`` is CUDA where it works, otherwise the CPU.

    ``CUDA_VISIBLE_DEVICES`` counts as torch counts it: ``cuda:0`` is the first that it shows. Raises ``DeviceError``
    where another device was asked for by name and does not work.
    """
    import torch

    if name != "auto":
        device = torch.device(name)
        fault = _fault(device)
        if fault:
            shown = _visible() if device.type == "cuda" else ""
            raise DeviceError(f"the device {name} does not work here: {fault}{f' ({shown})' if shown else ''}")
        return device, ()
    if not torch.cuda.is_available():
        return torch.device("cpu"), (" as ".join(filter(None, ("there is no CUDA device", _visible()))),)
    device = torch.device("cuda", torch.cuda.current_device())
    fault = _fault(device)
    if fault:
        return torch.device("cpu"), (f"the CUDA environment is broken: {fault}",)
    return device, ()


def _visible() -> str:
    """What the user's own restriction lets torch see, in words; empty without one."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return ""
    return f"CUDA_VISIBLE_DEVICES is {chosen}" if chosen.strip() else "CUDA_VISIBLE_DEVICES is empty"


def _fault(device: torch.device) -> str:
    """Why the device cannot multiply two small matrices; empty where it can."""
    import torch

    try:
        ones = torch.ones(8, 8, device=device)
        total = float((ones @ ones).sum())
    except (RuntimeError, AssertionError, NotImplementedError, ImportError, AttributeError) as error:
        # Only the first sentence is about the device; a list of all backends may follow.
        return (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0].rstrip(".")
    return "" if total == 512 else f"8x8 ones multiplied sum to {total:g}, not to 512"


def place(model: nn.Module, device: torch.device) -> tuple[torch.dtype, tuple[str, ...]]:
    """Move the model; returns the dtype that its floating inputs need (that of its first floating parameter), and what
    to say.

    On the CPU half precision becomes float32, since many operators have no half version there; where only a part of the
    model is half, its code minds the dtypes itself. A model that does not fit into the device's memory is moved in
    reduced precision.
    """
    import torch

    dtype = compute_dtype(model)
    try:
        model.to(device)
    except torch.cuda.OutOfMemoryError:
        reduced = reduced_dtype(dtype, device)
        if reduced is None:
            raise
        model.to("cpu").to(reduced)
        torch.cuda.empty_cache()
        model.to(device)
        note = f"the weights did not fit into the memory of {device}, so {dtype_name(dtype)} was reduced to"
        return reduced, (f"{note} {dtype_name(reduced)}",)
    held = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if device.type == "cpu" and dtype == torch.float16 and held == {dtype}:
        model.float()
        return torch.float32, ("float16 weights and input were converted to float32 for the CPU",)
    return dtype, ()


def compute_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the first floating parameter, float32 for a model that has none."""
    import torch

    ordinary = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    return next((parameter.dtype for parameter in model.parameters() if parameter.dtype in ordinary), torch.float32)


def reduced_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype | None:
    """The dtype that takes half the memory; None for one that cannot be reduced."""
    import torch

    if dtype == torch.float64:
        return torch.float32
    if dtype != torch.float32:
        return None
    has_bfloat16 = device.type != "cuda" or torch.cuda.is_bf16_supported()
    return torch.bfloat16 if has_bfloat16 else torch.float16  # the range of bfloat16 is that of float32
