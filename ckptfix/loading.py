"""A repaired state_dict goes into a live model: ``ckptfix.load``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptfix.errors import HostileError, TargetError, UsageError
from ckptfix.finding import counted
from ckptfix.report import Report

if TYPE_CHECKING:
    import torch
    from torch import nn


def check_loadable(model: nn.Module, map_location: str | torch.device | None) -> None:
    """Raises where torch would copy values into the void, which it does with no more than a warning, and for a device
    that does not work here.
    """
    if str(map_location) == "meta":
        raise UsageError("map_location='meta' leaves no values to load; leave it out, or name a device that holds data")
    if not hasattr(model, "load_state_dict") or isinstance(model, type):
        raise UsageError(f"model is {model!r:.60}; give the torch.nn.Module first and the source second")
    _check_device(map_location)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise TargetError(
            f"{type(model).__name__} lies on the meta device and has no memory to load into; build it elsewhere, or "
            "pass ckptfix.repair(source, model).state_dict() to its load_state_dict with assign=True"
        )


def _check_device(map_location: object) -> None:
    import torch

    if map_location is None:
        return
    if not isinstance(map_location, (str, torch.device)):
        kind = type(map_location).__name__
        raise UsageError(f"map_location is of type {kind}, but all tensors go to one device; give it, such as 'cpu'")
    try:
        torch.empty(1, device=map_location)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"map_location={str(map_location)!r} does not work here ({reason}); leave it out") from error


def refuse_misfit(report: Report) -> None:
    """Raises ``TargetError`` where a strict load would fail, and ``HostileError`` for a file that would run code."""
    if any(finding.code == "FIL901" for finding in report.remaining):
        raise HostileError(
            f"{report.source}: the file is built to run code; look at it with `ckptfix check` and do not use it"
        )
    if left := report.obstacles:
        reasons = "; ".join(
            f"{finding.code} {finding.message}"
            for finding in report.remaining
            if finding.code[:3] in ("KEY", "FIT", "BUF")
        )
        hint = next(
            (finding.remedy for finding in report.remaining if finding.remedy and finding.code.startswith("FIT")),
            "see ckptfix.check",
        )
        raise TargetError(
            f"{report.source}: does not fit {report.target} ({counted(len(left), 'key')}, {left[0]} among them): "
            f"{reasons or 'the rules that say more were not selected'}; {hint}"
        )


def load_strictly(
    model: nn.Module, state_dict: dict[str, Any], map_location: str | torch.device | None, source: str
) -> None:
    """Load by way of the device; raises ``TargetError`` for whatever torch or the model's own hooks raise."""
    for key, value in state_dict.items():
        if hasattr(value, "to") and str(map_location) not in ("None", "cpu"):
            state_dict[key] = value.to(map_location)
    try:
        model.load_state_dict(state_dict, strict=True)
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
        reason = " ".join(line.strip() for line in str(error).splitlines()[:2])
        raise TargetError(
            f"{source}: torch fails to load it into {type(model).__name__} ({type(error).__name__}: {reason}); "
            "build the model anew before you use it, since it may hold a part of the values"
        ) from error
