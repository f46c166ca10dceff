"""Repairs a checkpoint and loads it into a live model: ``ckptfix.load``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ckptfix.core.dtypes import DTYPES
from ckptfix.core.finding import counted
from ckptfix.core.lazy import nn, torch
from ckptfix.core.option import LOAD
from ckptfix.core.report import Report
from ckptfix.core.target import LOAD_ERRORS
from ckptfix.core.wording import first_names
from ckptfix.engine.validation import checked_settings
from ckptfix.errors import TargetError, UsageError
from ckptfix.reading.opening import Source
from ckptfix.repairing import repair_to_load

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Unpack

    from ckptfix.core.checkpoint import Checkpoint
    from ckptfix.core.settings import LoadSettings


def load(
    model: nn.Module,
    source: Source,
    *,
    map_location: str | torch.device | None = "cpu",
    assign: bool = False,
    mmap: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    **settings: Unpack[LoadSettings],
) -> Report:
    """Repair a checkpoint in memory and load it strictly into ``model``.

    ``map_location`` is the device to which the tensors are moved before they are copied into the model's own; None
    leaves them where they are. Raises ``CkptfixError`` if the checkpoint is damaged or does not fit, naming what
    remains and the setting for it; the model is then unchanged.

    With ``assign``, as in ``load_state_dict``, the checkpoint's tensors replace the model's own, which may be on the
    meta device. They keep the ``requires_grad`` and the ties of the model, and are on ``map_location`` in the dtype of
    the file. Those of a local file are memory-mapped: writing to them never changes the file, which may be removed or
    replaced, but must not be overwritten or truncated in place while the model exists.

    With ``mmap``, as in ``torch.load``, the tensors are copied from a memory-mapped file: in a third of the time,
    without memory for a second copy. If the file is truncated meanwhile, the process ends with SIGBUS, and tensors that
    the model's own hooks keep stay mapped.

    ``optimizer``, made from the model's parameters, loads its state from the same checkpoint, as
    ``repair_optimizer_state`` returns it.

    ``settings`` are those of ``repair``, except for those of the output file and the forward test."""
    checked_settings(settings, model, function=LOAD)
    check_loadable(model, map_location, assign)
    if optimizer is None:
        repaired = repair_to_load(source, model, **settings)
        remarks = load_strictly(model, repaired.checkpoint, map_location, assign, mmap)
        return replace(repaired.report, remarks=(*repaired.report.remarks, *remarks))
    if assign:
        raise UsageError("assign=True gives the model new parameters that the optimizer lacks; omit it")
    from ckptfix.resuming import loaded_state, resume  # most loads do not need the rules for optimizers

    resumed = resume(source, model, optimizer, settings)
    with loaded_state(optimizer, resumed):
        load_strictly(model, resumed.repaired.checkpoint, map_location, mmap=mmap)
    kept = ", ".join(resumed.kept)
    remarks = (
        (f"the optimizer's groups differ from the saved ones: {kept} stay as your script set them",) if kept else ()
    )
    return replace(resumed.repaired.report, remarks=(*resumed.repaired.report.remarks, *remarks))


def check_loadable(model: nn.Module, map_location: str | torch.device | None, assign: bool) -> None:
    """Raise if the model is on the meta device, where torch only warns that it copies nothing, or if the device does
    not work on this machine.

    Raises ``UsageError`` for the arguments, ``TargetError`` for the model."""
    if str(map_location) == "meta":
        raise UsageError("map_location='meta' leaves no values to load; omit it, or name a device that holds data")
    if not hasattr(model, "load_state_dict") or isinstance(model, type):
        raise UsageError(f"model is {model!r:.60}; pass the torch.nn.Module first and the source second")
    _check_device(map_location)
    if not assign and any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise TargetError(
            f"{type(model).__name__} is on the meta device and has no memory to load into; load with assign=True, or "
            "build it on another device"
        )


def _check_device(map_location: object) -> None:
    if map_location is None:
        return
    if not isinstance(map_location, (str, torch.device)):
        kind = type(map_location).__name__
        raise UsageError(f"map_location is of type {kind}, but all tensors go to one device; pass a device like 'cpu'")
    try:
        torch.empty(1, device=map_location)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"map_location={str(map_location)!r} does not work here ({reason}); omit it") from error


def load_strictly(
    model: nn.Module,
    checkpoint: Checkpoint,
    map_location: str | torch.device | None,
    assign: bool = False,
    mmap: bool = False,
) -> tuple[str, ...]:
    """Load a checkpoint via ``map_location``, and return remarks about a model whose tensors are replaced.

    With ``assign`` the tensors stay memory-mapped; with neither ``assign`` nor ``mmap`` they are read, and the model
    shares no memory with the file, whatever its own hooks keep. Raises ``TargetError`` for whatever torch or these
    hooks raise, and ``UnreadableError`` if bytes are damaged, before anything is changed.
    """
    state_dict = checkpoint.state_dict(mmap=mmap or assign)
    # copy_() works across devices, so only tensors that replace the model's have to be moved to the CPU.
    if str(map_location) not in ("None", "" if assign else "cpu"):
        for key, value in state_dict.items():
            state_dict[key] = value.to(map_location) if hasattr(value, "to") else value
    remarks = _prepare(model, state_dict, checkpoint.path) if assign else ()
    try:
        model.load_state_dict(state_dict, strict=True, assign=assign)
    except LOAD_ERRORS as error:
        reason = " ".join(line.strip() for line in str(error).splitlines()[:2])
        raise TargetError(
            f"{checkpoint.path}: torch fails to load it into {type(model).__name__} "
            f"({type(error).__name__}: {reason}); rebuild the model before using it, because some of its values may "
            "have been overwritten"
        ) from error
    return (*remarks, *_left_empty(model)) if assign else ()


def _prepare(model: nn.Module, state_dict: dict[str, Any], source: str) -> tuple[str, ...]:
    """Prepare a state_dict in place for assignment, and return remarks on the model.

    Raises ``TargetError`` if the model would get integers instead of floats, or the like: torch refuses such
    parameters after part of the model has changed."""
    # keep_vars returns the parameters themselves, whose identity shows the ties.
    own = {key: value for key, value in model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}
    pairs: dict[str, None] = {}
    for key, tensor in own.items():
        given = state_dict.get(key)
        if not isinstance(given, torch.Tensor) or given.dtype == tensor.dtype:
            continue
        if _kind(given.dtype) != _kind(tensor.dtype):
            raise TargetError(
                f"{source}: {key} is {_name(given.dtype)}, but {_name(tensor.dtype)} in the model, and assign=True "
                "does not convert it; omit assign"
            )
        pairs[f"{_name(given.dtype)} for {_name(tensor.dtype)}"] = None
    _tie(own, state_dict)
    return (f"assign=True gave the model the dtypes of the file: {', '.join(pairs)}",) if pairs else ()


def _left_empty(model: nn.Module) -> tuple[str, ...]:
    """Return a remark about tensors that are still on the meta device because no state_dict holds them."""
    empty = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if not empty:
        return ()
    return (
        f"{counted(len(empty), 'tensor')} still on the meta device, because no state_dict has values for them: fill "
        f"{first_names(empty)} before use",
    )


def _tie(own: Mapping[str, torch.Tensor], state_dict: dict[str, Any]) -> None:
    """Give the keys of a tied tensor of the model one tensor of the state_dict: the last one, as with copying.

    torch assigns each key separately. Tied parameters would become two, each with its own gradient and its own place
    in the optimizer.
    """
    from torch.nn import Parameter

    keys_of: dict[int, list[str]] = {}
    for key, tensor in own.items():
        if key in state_dict:
            keys_of.setdefault(id(tensor), []).append(key)
    for keys in keys_of.values():
        if len(keys) > 1:
            tensor, given = own[keys[0]], state_dict[keys[-1]]
            shared = Parameter(given.detach(), tensor.requires_grad) if isinstance(tensor, Parameter) else given
            state_dict.update(dict.fromkeys(keys, shared))


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    known = DTYPES.get(_name(dtype))
    return (dtype.is_floating_point, dtype.is_complex, known is not None and known.is_quantized)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
