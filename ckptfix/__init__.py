"""ckptfix repairs PyTorch checkpoints that no longer load.

It reads any checkpoint without running its code, says what is wrong, and writes a file that loads; every difference
between the two is an edit of a named rule. Nothing here imports torch until a tensor is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptfix.checkpoint import Checkpoint, TensorSpec
    from ckptfix.comparison import Difference, diff
    from ckptfix.errors import (
        CkptfixError,
        HostileError,
        PlanError,
        TargetError,
        UnreadableError,
        UsageError,
        WriteError,
    )
    from ckptfix.loading import load
    from ckptfix.plan import Plan
    from ckptfix.recalibration import Recalibration, recalibrate
    from ckptfix.repairing import Repair, check, open_checkpoint, repair, repair_state_dict
    from ckptfix.report import Report

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "CkptfixError",
    "Difference",
    "HostileError",
    "Plan",
    "PlanError",
    "Recalibration",
    "Repair",
    "Report",
    "TargetError",
    "TensorSpec",
    "UnreadableError",
    "UsageError",
    "WriteError",
    "check",
    "diff",
    "load",
    "open_checkpoint",
    "recalibrate",
    "repair",
    "repair_state_dict",
]

_HOMES = {
    **{name: "errors" for name in __all__ if name.endswith("Error")},
    "Checkpoint": "checkpoint",
    "Difference": "comparison",
    "TensorSpec": "checkpoint",
    "Plan": "plan",
    "Recalibration": "recalibration",
    "Report": "report",
    "diff": "comparison",
    "load": "loading",
    "recalibrate": "recalibration",
}


def __getattr__(name: str) -> object:
    # The command line answers --version and --help without paying for the parsers.
    if name not in __all__:
        raise AttributeError(f"module 'ckptfix' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"ckptfix.{_HOMES.get(name, 'repairing')}"), name)
    globals()[name] = value
    return value
