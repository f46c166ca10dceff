"""A repaired state_dict goes into a live model: ``ckptfix.load``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ckptfix.core.checkpoint import path_name
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.finding import Blocks, Level, counted
from ckptfix.core.lazy import nn, torch
from ckptfix.core.objects import Opaque
from ckptfix.core.report import Report
from ckptfix.core.target import target_from_module
from ckptfix.engine.diagnosis import with_fitting_set
from ckptfix.engine.validation import checked_settings
from ckptfix.errors import HostileError, Opt, TargetError, UsageError
from ckptfix.maps.positions import optimizers_of
from ckptfix.reading.opening import Source, open_source
from ckptfix.reading.tensors import revive_tree
from ckptfix.repairing import Repair, repair
from ckptfix.report.advice import remedies_text
from ckptfix.rules.fil101_several_state_dicts import several_state_dicts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Unpack

    from ckptfix.core.checkpoint import Checkpoint
    from ckptfix.core.settings import RepairSettings
    from ckptfix.maps.positions import Optimizer

SHOWN = 3
"""How many names a remark gives."""


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
        repaired = repair(source, model, **settings)
        refuse_misfit(repaired.report)
        _log_choice(repaired.report)
        remarks = load_strictly(model, repaired.checkpoint, map_location, assign)
        return replace(repaired.report, remarks=(*repaired.report.remarks, *remarks))
    if assign:
        raise UsageError("assign=True gives the model new parameters, which the optimizer does not have; leave it out")
    repaired, state, own = _with_state(source, model, optimizer, settings)
    load_strictly(model, repaired.checkpoint, map_location)
    optimizer.load_state_dict(state)
    remarks = (f"the optimizer has other groups than the saved one: {', '.join(own)} stay as they were",) if own else ()
    return replace(repaired.report, remarks=(*repaired.report.remarks, *remarks))


def repair_optimizer_state(
    source: Source, model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Unpack[RepairSettings]
) -> dict[str, Any]:
    """Return the state of a checkpoint's optimizer for ``optimizer``, which is made of the parameters of ``model``.

    Each parameter gets the state that was saved of it, whatever its name, its place and its group were; one that is
    new, or whose values are not those of the file, gets none. A group has the hyperparameters of that which most of its
    parameters were in; in other groups than the saved ones, those that tell groups apart are the script's.

    ``settings`` are those of ``repair``; names that only follow from the order of the parameters take
    ``unsafe_fixes=True`` if anything has to be moved. Raises ``TargetError`` if the file has no optimizer, or nothing
    tells which of its positions is which parameter."""
    checked_settings(settings, model, function="load")
    return _with_state(source, model, optimizer, settings)[1]


def _with_state(
    source: Source, model: nn.Module, optimizer: torch.optim.Optimizer, settings: RepairSettings
) -> tuple[Repair, dict[str, Any], list[str]]:
    """Return the repaired checkpoint, the state for an optimizer, and the options of its groups that stay its own."""
    from ckptfix.engine.optimizers import regrouped
    from ckptfix.rules.following import ways
    from ckptfix.rules.opt101_stale_optimizer import stale_optimizer, with_owners
    from ckptfix.rules.origins import Change

    checked = checked_settings(settings, model, function="load")
    if not isinstance(getattr(optimizer, "param_groups", None), list) or not hasattr(optimizer, "zero_grad"):
        raise UsageError(f"optimizer is {optimizer!r:.60}; give the torch.optim.Optimizer itself")
    if checked.drop_optimizer:
        raise UsageError(Opt("drop_optimizer", True), " leaves out the state that the given optimizer is to load")
    settings["keep_optimizer"] = True  # it goes to the script's own optimizer, and not into a file
    repaired = repair(source, model, **settings)
    refuse_misfit(repaired.report)
    _log_choice(repaired.report)
    findings = tuple(each for each in repaired.report.findings if each.code != stale_optimizer.code)
    repaired = replace(repaired, report=replace(repaired.report, findings=findings))
    target = target_from_module(model)
    before, after = with_fitting_set(source, open_source(source, checked), target, checked), repaired.checkpoint
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    live = [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]
    if not all(all(group) for group in live):
        raise UsageError("the optimizer has parameters that are not the model's; make it of model.parameters()")
    change = replace(Change.of(before, after, repaired.plan, target, checked.rename_layers), live=live)
    place = path_name(after.container)
    own = (one for one, sets in with_owners(after, optimizers_of(after)) if not sets or place in sets)
    found = [(one, way) for one in own for way in ways(one, change)]
    found = [(one, way) for one, way in found if any(step.source is not None for group in way.groups for step in group)]
    if len(found) != 1:
        places = dict.fromkeys(one.name for one, _ in found)
        what = f"{len(found)} ways to name the parameters of {', '.join(places)}, which fit and differ"
        if not found:
            what = "no optimizer whose parameters are the model's"
        elif len(places) > 1:
            what = f"{len(places)} optimizers that fit, {', '.join(places)}, and none has the name of the weights"
        raise TargetError(f"{before.path}: has {what}; leave the optimizer out, and training starts with new moments")
    saved, way = found[0]
    _refuse_other_method(before.path, saved, optimizer)
    if not (way.is_unchanged or way.naming.is_certain or checked.unsafe_fixes):
        raise TargetError(
            f"{before.path}: the state of {saved.name} has to be moved, and only the order of {way.naming.source} "
            "tells its parameters apart; if that is right, load with ",
            Opt("unsafe_fixes", True),
        )
    made = regrouped(after, saved, way.edits(), saved.name)
    if any(isinstance(value, Opaque) for row in made["state"].values() for value in row.values()):
        raise TargetError(
            f"{before.path}: {saved.name} has moments of a class that only torch.load can make; repair the file, and "
            "load the optimizer from what is written"
        )
    state = revive_tree(made, after)
    given = optimizer.param_groups
    known = [n for n, steps in enumerate(way.groups) if any(step.source is not None or step.parts for step in steps)]
    is_regrouped = [way.like[n] for n in known] != list(range(len(saved.groups)))
    options = dict.fromkeys(name for group in given for name in group if not name.startswith("param"))
    # What tells the groups of the script apart, or the saved ones that are put together, is the script's.
    both = ([given[n] for n in known], saved.groups) if is_regrouped else ()
    differ = [name for name in options if any(group.get(name) != one[0].get(name) for one in both for group in one)]
    for number, group in enumerate(state["param_groups"]):
        chosen = differ if number in known else options
        group.update({name: given[number][name] for name in chosen if name in given[number]})
    return repaired, dict(state), differ


# Options that releases of torch added to all methods alike, and gives to old files itself.
_ADDED = frozenset(("foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"))


def _refuse_other_method(path: str, saved: Optimizer, optimizer: torch.optim.Optimizer) -> None:
    """Raise ``TargetError`` if the state is that of another method: torch takes it, and fails or goes astray later."""
    has = {name for group in saved.groups for name in group}
    wants = {name for group in optimizer.param_groups for name in group}
    lacks = sorted(optimizer.defaults.keys() - has - _ADDED)
    if lacks and has - wants - {"initial_lr", "param_names"}:
        raise TargetError(
            f"{path}: {saved.name} is not that of {type(optimizer).__name__}: its groups have no {', '.join(lacks)} "
            f"but {', '.join(sorted(has - wants))}; make the optimizer that was saved, or leave it out"
        )


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
            f"{type(model).__name__} is on the meta device and has no memory to load into; load with assign=True, or "
            "build it elsewhere"
        )


def _check_device(map_location: object) -> None:
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
    """Raises ``TargetError`` if a strict load would fail, and ``HostileError`` for a file that would run code."""
    if any(Blocks.LOADING in finding.blocks for finding in report.remaining):
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
            (
                remedies_text(finding.remedies, as_arguments=True)
                for finding in report.remaining
                if finding.remedies and finding.code.startswith("FIT")
            ),
            "see ckptfix.check",
        )
        raise TargetError(
            f"{report.source}: does not fit {report.target} ({counted(len(left), 'key')}, {left[0]} among them): "
            f"{reasons or 'the rules that say more were not selected'}; {hint}"
        )


def _log_choice(report: Report) -> None:
    """Log which of several sets of weights is loaded: a script that does not print the report shows it nowhere."""
    for finding in report.findings:
        if finding.code == several_state_dicts.code:
            level = logging.INFO if finding.level is Level.NOTE else logging.WARNING
            logging.getLogger("ckptfix").log(level, "%s: %s", report.source, finding.message)


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
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
        reason = " ".join(line.strip() for line in str(error).splitlines()[:2])
        raise TargetError(
            f"{checkpoint.path}: torch fails to load it into {type(model).__name__} "
            f"({type(error).__name__}: {reason}); "
            "build the model anew before you use it, since it may hold a part of the values"
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
                f"{source}: {key} is of {_name(given.dtype)} and the model of {_name(tensor.dtype)} there, which "
                "assign=True does not convert; leave it out"
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
        f"the model has {counted(len(empty), 'tensor')} on the meta device still, which no state_dict holds: fill "
        f"{names} before use",
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
