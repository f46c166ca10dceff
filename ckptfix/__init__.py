"""ckptfix repairs PyTorch checkpoints that no longer load.

It reads any checkpoint without running its code, reports what is wrong, and writes a file that loads; every difference
between the two is an edit of a named rule. torch is imported only when a tensor is needed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if sys.platform == "win32":
    raise ImportError("ckptfix does not support Windows, but it runs in WSL (https://learn.microsoft.com/windows/wsl)")

if TYPE_CHECKING:
    from ckptfix.comparison import Difference, diff
    from ckptfix.comparison.mapping import infer_map
    from ckptfix.core.checkpoint import Checkpoint
    from ckptfix.core.plan import Plan
    from ckptfix.core.progress import progress
    from ckptfix.core.rename_map import RenameMap
    from ckptfix.core.report import Repair, Report
    from ckptfix.core.settings import CheckSettings, LoadSettings, RepairSettings, Settings
    from ckptfix.core.spec import TensorSpec
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
    from ckptfix.repairing import check, open_checkpoint, repair, repair_state_dict
    from ckptfix.resuming import repair_optimizer_state
    from ckptfix.smoke.recalibration import Recalibration, recalibrate

__version__ = "0.1.0"

__all__ = [
    "CheckSettings",
    "Checkpoint",
    "CkptfixError",
    "Difference",
    "HostileError",
    "LoadSettings",
    "Plan",
    "PlanError",
    "Recalibration",
    "RenameMap",
    "Repair",
    "RepairSettings",
    "Report",
    "Settings",
    "TargetError",
    "TensorSpec",
    "UnreadableError",
    "UsageError",
    "WriteError",
    "check",
    "diff",
    "infer_map",
    "load",
    "open_checkpoint",
    "progress",
    "recalibrate",
    "repair",
    "repair_optimizer_state",
    "repair_state_dict",
]

_HOMES = {
    **{name: "errors" for name in __all__ if name.endswith("Error")},
    **{name: "core.settings" for name in __all__ if name.endswith("Settings")},
    "Checkpoint": "core.checkpoint",
    "Difference": "comparison",
    "TensorSpec": "core.spec",
    "Plan": "core.plan",
    "Recalibration": "smoke.recalibration",
    "RenameMap": "core.rename_map",
    "Repair": "core.report",
    "Report": "core.report",
    "diff": "comparison",
    "infer_map": "comparison.mapping",
    "load": "loading",
    "progress": "core.progress",
    "recalibrate": "smoke.recalibration",
    "repair_optimizer_state": "resuming",
}


if not TYPE_CHECKING:  # a type checker would accept any attribute

    def __getattr__(name):
        # Imported on first use, so that --version and --help do not import the parsers.
        if name not in __all__:
            raise AttributeError(f"module 'ckptfix' has no attribute {name!r}")
        import importlib

        value = getattr(importlib.import_module(f"ckptfix.{_HOMES.get(name, 'repairing')}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
