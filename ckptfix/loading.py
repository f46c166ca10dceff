"""A repaired state_dict goes into a live model: ``ckptfix.load``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptfix.bytes.mapping import kept_mapped
from ckptfix.core.finding import counted
from ckptfix.core.report import Report
from ckptfix.errors import HostileError, TargetError, UsageError
from ckptfix.modules.assigning import left_empty, prepare
from ckptfix.modules.transfer import Transfer, is_loaded_by_torch
from ckptfix.reading.opening import Source
from ckptfix.repairing import repair

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ckptfix.core.checkpoint import Checkpoint


_WRITING = {"output", "beside", "in_place", "backup", "only_changes", "flush", "dry_run"}


def load(
    model: nn.Module,
    source: Source,
    *,
    map_location: str | torch.device | None = "cpu",
    assign: bool = False,
    **settings: Any,
) -> Report:
    """Repair a checkpoint in memory and load it strictly into ``model``.

    ``map_location`` is the device on which the tensors are put before they are copied into the model's own; None
    leaves them where they are. Raises ``CkptfixError`` where the checkpoint does not fit, naming what is left and the
    setting for it, or is damaged; the model is as it was then.

    With ``assign``, as in ``load_state_dict``, the checkpoint's tensors take the places of the model's own, which may
    lie on the meta device. They keep the ``requires_grad`` and the ties of the model, and are on ``map_location`` and
    in the dtype of the file. Those of a local file are mapped from it: what is written to them never reaches it, and
    it may be removed or replaced; but it must not be written in place or cut short as long as the model lives.

    ``settings`` are those of ``repair``, but for those that write a file."""
    if writes := _WRITING & settings.keys():
        raise UsageError(f"{min(writes)} writes a file, and a load writes none; see ckptfix.repair")
    check_loadable(model, map_location, assign)
    stays = assign or not is_loaded_by_torch(model)
    with kept_mapped(stays):  # its values are looked at, and then copied
        repaired = repair(source, model, **settings)
        refuse_misfit(repaired.report)
        remarks = load_strictly(model, repaired.checkpoint, map_location, assign)
    return replace(repaired.report, remarks=(*repaired.report.remarks, *remarks))


def check_loadable(model: nn.Module, map_location: str | torch.device | None, assign: bool) -> None:
    """Raises where torch would copy values into the void, which it does with no more than a warning, and for a device
    that does not work here.
    """
    if str(map_location) == "meta":
        raise UsageError("map_location='meta' leaves no values to load; leave it out, or name a device that holds data")
    if not hasattr(model, "load_state_dict") or isinstance(model, type):
        raise UsageError(f"model is {model!r:.60}; give the torch.nn.Module first and the source second")
    _check_device(map_location)
    if not assign and any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise TargetError(
            f"{type(model).__name__} lies on the meta device and has no memory to load into; load with assign=True, or "
            "build it elsewhere"
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
    model: nn.Module, checkpoint: Checkpoint, map_location: str | torch.device | None, assign: bool = False
) -> tuple[str, ...]:
    """Load by way of the device; what somebody should know of the model afterwards, where its tensors are others now.

    The bytes go from the file into the model without a copy in between: they are mapped. With ``assign`` the tensors
    stay so; otherwise nothing of the model shares memory with the file. Raises ``TargetError`` for whatever torch or
    the model's own hooks raise, and ``UnreadableError``, before anything is changed, where bytes are damaged.
    """
    from ckptfix.reading.tensors import build_state_dict

    # A copy into the model crosses from any device; only tensors that stay have to be brought to the CPU.
    moves = str(map_location) not in ("None", "" if assign else "cpu")
    mapped = list(checkpoint.specs) if assign else _only_copied(model, checkpoint.specs)
    transfer = Transfer(model, checkpoint, () if assign or moves else mapped)
    state_dict = build_state_dict(checkpoint, mapped, transfer.own)
    if moves:
        for key, value in state_dict.items():
            state_dict[key] = value.to(map_location) if hasattr(value, "to") else value
    remarks = prepare(model, state_dict, checkpoint.path) if assign else ()
    transfer.run()
    try:
        model.load_state_dict(state_dict, strict=True, assign=assign)
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
        reason = " ".join(line.strip() for line in str(error).splitlines()[:2])
        raise TargetError(
            f"{checkpoint.path}: torch fails to load it into {type(model).__name__} "
            f"({type(error).__name__}: {reason}); "
            "build the model anew before you use it, since it may hold a part of the values"
        ) from error
    return (*remarks, *left_empty(model)) if assign else ()


def _only_copied(model: nn.Module, keys: Iterable[str]) -> list[str]:
    """The keys whose tensors torch itself copies into the model. A module that loads in its own way may keep them."""
    from torch.nn import Module

    own_way = {
        path
        for path, module in model.named_modules(remove_duplicate=False)
        if type(module)._load_from_state_dict is not Module._load_from_state_dict or module._load_state_dict_pre_hooks
    }
    found = []
    for key in keys:
        *path, name = key.split(".")
        if name != "_extra_state" and not any(".".join(path[:end]) in own_way for end in range(len(path) + 1)):
            found.append(key)
    return found
