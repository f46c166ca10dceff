"""A repaired state_dict goes into a live model: ``ckptfix.load``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ckptfix.core.dtypes import DTYPES
from ckptfix.core.finding import counted
from ckptfix.core.lazy import nn, torch
from ckptfix.core.report import Report
from ckptfix.core.target import LOAD_ERRORS
from ckptfix.engine.validation import checked_settings
from ckptfix.errors import TargetError, UsageError
from ckptfix.reading.opening import Source
from ckptfix.repairing import repair_to_load

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Unpack

    from ckptfix.core.checkpoint import Checkpoint
    from ckptfix.core.settings import RepairSettings

SHOWN = 3  # how many names a remark gives


def load(
    model: nn.Module,
    source: Source,
    *,
    map_location: str | torch.device | None = "cpu",
    assign: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    **settings: Unpack[RepairSettings],
) -> Report:
    """Repair a checkpoint in memory and load it strictly into ``model``.

    ``map_location`` is the device on which the tensors are put before they are copied into the model's own; None
    leaves them where they are. Raises ``CkptfixError`` if the checkpoint does not fit, naming what is left and the
    setting for it, or is damaged; the model is as it was then.

    With ``assign``, as in ``load_state_dict``, the checkpoint's tensors replace the model's own, which may be on the
    meta device. They keep the ``requires_grad`` and the ties of the model, and are on ``map_location`` and
    in the dtype of the file. Those of a local file are mapped from it: what is written to them never reaches it, and
    it may be removed or replaced; but it must not be written in place or cut short as long as the model lives.

    ``optimizer``, made of the model's parameters, loads its state from the same checkpoint, as
    ``repair_optimizer_state`` gives it.

    ``settings`` are those of ``repair``, except for those that write a file."""
    checked_settings(settings, model, function="load")
    check_loadable(model, map_location, assign)
    if optimizer is None:
        repaired = repair_to_load(source, model, **settings)
        remarks = load_strictly(model, repaired.checkpoint, map_location, assign)
        return replace(repaired.report, remarks=(*repaired.report.remarks, *remarks))
    if assign:
        raise UsageError("assign=True gives the model new parameters that the optimizer lacks; omit it")
    from ckptfix.resuming import load_state, resume  # the optimizer's half of the rules, which most loads do not need

    resumed = resume(source, model, optimizer, settings)
    load_state(optimizer, resumed)
    load_strictly(model, resumed.repaired.checkpoint, map_location)
    kept = ", ".join(resumed.kept)
    remarks = (
        (f"the optimizer's groups differ from the saved ones: {kept} stay as your script set them",) if kept else ()
    )
    return replace(resumed.repaired.report, remarks=(*resumed.repaired.report.remarks, *remarks))


def check_loadable(model: nn.Module, map_location: str | torch.device | None, assign: bool) -> None:
    """Refuse a model on the meta device, into which torch would copy nothing with no more than a warning, and a device
    that does not work here."""
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
    model: nn.Module, checkpoint: Checkpoint, map_location: str | torch.device | None, assign: bool = False
) -> tuple[str, ...]:
    """Load by way of the device, and return what the user should know of a model whose tensors are replaced.

    With ``assign`` the tensors are mapped from the file, and stay so; otherwise they are read, and nothing of the model
    shares memory with the file, whatever its own hooks keep. Raises ``TargetError`` for whatever torch or these hooks
    raise, and ``UnreadableError``, before anything is changed, if bytes are damaged.
    """
    state_dict = checkpoint.state_dict(mmap=assign)
    # A copy into the model crosses from any device; only tensors that stay have to be brought to the CPU.
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
    """Make a state_dict fit to be assigned, and return remarks on the model.

    Raises ``TargetError`` if the model would get integers in the place of floats, or the like: torch refuses such
    parameters, with a part of the model already changed."""
    # With keep_vars the parameters themselves are in it, so that those which are one can be told.
    own = {key: value for key, value in model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}
    pairs: dict[str, None] = {}
    for key, tensor in own.items():
        given = state_dict.get(key)
        if not isinstance(given, torch.Tensor) or given.dtype == tensor.dtype:
            continue
        if _kind(given.dtype) != _kind(tensor.dtype):
            raise TargetError(
                f"{source}: {key} is of {_name(given.dtype)} and the model of {_name(tensor.dtype)} there, and "
                "assign=True does not convert; omit it"
            )
        pairs[f"{_name(given.dtype)} for {_name(tensor.dtype)}"] = None
    _tie(own, state_dict)
    return (f"assign=True gave the model the dtypes of the file: {', '.join(pairs)}",) if pairs else ()


def _left_empty(model: nn.Module) -> tuple[str, ...]:
    """Return a remark on what no state_dict holds and the meta device has left without values."""
    empty = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if not empty:
        return ()
    names = ", ".join(empty[:SHOWN]) + (" …" if len(empty) > SHOWN else "")
    return (
        f"{counted(len(empty), 'tensor')} still on the meta device, because no state_dict has values for them: fill "
        f"{names} "
        "before use",
    )


def _tie(own: Mapping[str, torch.Tensor], state_dict: dict[str, Any]) -> None:
    """Give the keys that are one tensor of the model one tensor of the state_dict: the last, as copies into it would.

    torch assigns to each place by itself. Tied parameters would become two, which share memory for the time being and
    have a gradient and a place in the optimizer each.
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
