"""Restores the saved state of an optimizer in a live one: ``ckptfix.repair_optimizer_state``, and ``ckptfix.load``.

The weights are repaired for the model first; the state then follows them into the parameter groups of the live
optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.core.checkpoint import Checkpoint, path_name
from ckptfix.core.lazy import nn
from ckptfix.core.objects import Opaque
from ckptfix.core.option import LOAD
from ckptfix.core.report import Repair
from ckptfix.core.target import LOAD_ERRORS, target_from_module
from ckptfix.engine.diagnosis import with_fitting_set
from ckptfix.engine.optimizers import regrouped
from ckptfix.engine.validation import checked_settings
from ckptfix.errors import CkptfixError, Opt, TargetError, UsageError
from ckptfix.maps.optimizer_states import Optimizer, optimizers_of
from ckptfix.reading.opening import Source, open_source
from ckptfix.reading.tensors import revive_tree
from ckptfix.repairing import repair_to_load
from ckptfix.rules import named
from ckptfix.rules.following import Followed, ways
from ckptfix.rules.origins import Change
from ckptfix.rules.position_names import with_owners

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from ckptfix.core.settings import LoadSettings


class Resumed(Struct, frozen=True):
    """A repaired checkpoint, the state for a live optimizer, and the options that keep their live values (``kept``)."""

    repaired: Repair
    state: dict[str, Any]
    kept: tuple[str, ...]


def repair_optimizer_state(
    source: Source, model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Unpack[LoadSettings]
) -> dict[str, Any]:
    """Return the state of a checkpoint's optimizer for ``optimizer``, which is made from the parameters of ``model``.

    Each parameter gets its saved state, whatever its name, position and group were; new parameters, and those whose
    values are not from the file, get none. A group takes the hyperparameters of the saved group that most of its
    parameters were in; if the groups differ from the saved ones, those that distinguish groups keep their live values.

    ``settings`` are those of ``repair``. If anything has to be moved and only the order of the parameters identifies
    them, ``unsafe_fixes=True`` is required. Raises ``TargetError`` if the file has no optimizer, or nothing identifies
    the parameters of its positions."""
    return resume(source, model, optimizer, settings).state


def resume(source: Source, model: nn.Module, optimizer: torch.optim.Optimizer, settings: LoadSettings) -> Resumed:
    """Repair a checkpoint for a model and its optimizer's state for ``optimizer``, without loading either. Settings and
    errors are those of ``repair_optimizer_state``."""
    checked = checked_settings(settings, model, function=LOAD)
    if not isinstance(getattr(optimizer, "param_groups", None), list) or not hasattr(optimizer, "zero_grad"):
        raise UsageError(f"optimizer is {optimizer!r:.60}; pass the torch.optim.Optimizer itself")
    if checked.drop_optimizer:
        raise UsageError(Opt("drop_optimizer", True), " drops the state that the given optimizer should load")
    settings["keep_optimizer"] = True  # the state goes to the live optimizer, not into a file
    repaired = repair_to_load(source, model, **settings)
    findings = tuple(each for each in repaired.report.findings if each.code != named("stale-optimizer").code)
    repaired = replace(repaired, report=replace(repaired.report, findings=findings))
    target = target_from_module(model)
    before = with_fitting_set(source, open_source(source, checked), target, checked)
    change = Change.of(before, repaired.checkpoint, repaired.plan, target, checked.rename_layers)
    followed = _followed(repaired.checkpoint, replace(change, live=_names_of_groups(model, optimizer)), before.path)
    saved, naming = followed.optimizer, followed.naming
    _refuse_other_method(before.path, saved, optimizer)
    if not (followed.is_unchanged or naming.is_certain or checked.unsafe_fixes):
        raise TargetError(
            f"{before.path}: the state of {saved.name} has to be moved, and only the order of {naming.source} "
            "identifies its parameters; if that is right, load with ",
            Opt("unsafe_fixes", True),
        )
    made = regrouped(repaired.checkpoint, saved, followed.edits(), saved.name)
    if any(isinstance(value, Opaque) for row in made["state"].values() for value in row.values()):
        raise TargetError(
            f"{before.path}: {saved.name} has moments of a class that only torch.load can build; repair the file, and "
            "load the optimizer from the result"
        )
    state = dict(revive_tree(made, repaired.checkpoint))
    return Resumed(repaired, state, _take_options(state["param_groups"], followed, optimizer.param_groups))


@contextmanager
def loaded_state(optimizer: torch.optim.Optimizer, resumed: Resumed) -> Iterator[None]:
    """Load the state into the optimizer before the block, and undo that if the block fails. Raises ``TargetError`` if
    torch refuses the state."""
    before = dict(vars(optimizer))
    try:
        optimizer.load_state_dict(resumed.state)
        yield
    except CkptfixError:
        vars(optimizer).update(before)
        raise
    except LOAD_ERRORS as error:
        vars(optimizer).update(before)
        raise TargetError(
            f"{resumed.repaired.checkpoint.path}: {type(optimizer).__name__} fails to load its state "
            f"({type(error).__name__}: {error}); omit the optimizer to start with new moments"
        ) from error


def _names_of_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the parameters in each group of a live optimizer."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]
    if not all(all(group) for group in groups):
        raise UsageError("the optimizer has parameters from outside the model; create it from model.parameters()")
    return groups


def _followed(after: Checkpoint, change: Change, path: str) -> Followed:
    """Return how the one optimizer in the checkpoint that fits the live groups follows the change. Raises
    ``TargetError`` if no optimizer fits, or several ways do and differ."""
    place = path_name(after.container)
    own = [one for one, sets in with_owners(after, optimizers_of(after)) if not sets or place in sets]
    found = [way for one in own for way in ways(one, change)]
    found = [way for way in found if any(step.source is not None for group in way.groups for step in group)]
    if len(found) == 1:
        return found[0]
    places = dict.fromkeys(way.optimizer.name for way in found)
    what = f"{len(found)} ways to identify the parameters of {', '.join(places)} fit, and they differ"
    if not found:
        alike = [one.name for one in own if one.state and len(one.ids) == len(change.result)]
        what = "has no optimizer with the model's parameters"
        if alike:
            what = f"has as many parameters as the model in {', '.join(alike)}, but in no known order"
    elif len(places) > 1:
        what = f"{len(places)} optimizers fit, {', '.join(places)}, and none is named like the weights"
    raise TargetError(f"{path}: {what}; omit the optimizer to start with new moments")


def _take_options(groups: Iterable[dict[str, Any]], followed: Followed, live: list[dict[str, Any]]) -> tuple[str, ...]:
    """Set the options that keep their live values in ``groups``, and return the names of those that distinguish the
    live groups or the saved groups that were merged."""
    saved = followed.optimizer.groups
    known = [
        n for n, steps in enumerate(followed.groups) if any(step.source is not None or step.parts for step in steps)
    ]
    is_regrouped = [followed.like[n] for n in known] != list(range(len(saved)))
    options = dict.fromkeys(name for group in live for name in group if not name.startswith("param"))
    both: tuple[Sequence[Mapping[str, Any]], ...] = ([live[n] for n in known], saved) if is_regrouped else ()
    kept = [name for name in options if any(group.get(name) != side[0].get(name) for side in both for group in side)]
    for number, group in enumerate(groups):
        chosen = kept if number in known else options
        group.update({name: live[number][name] for name in chosen if name in live[number]})
    return tuple(kept)


# Options that later releases of torch added to every optimizer; torch supplies them for old files.
_ADDED = frozenset(("foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"))


def _refuse_other_method(path: str, saved: Optimizer, optimizer: torch.optim.Optimizer) -> None:
    """Raise ``TargetError`` if the state is from another class of optimizer: torch would load it and fail or train
    wrongly later."""
    has = {name for group in saved.groups for name in group}
    wants = {name for group in optimizer.param_groups for name in group}
    lacks = sorted(optimizer.defaults.keys() - has - _ADDED)
    if lacks and has - wants - {"initial_lr", "param_names"}:
        raise TargetError(
            f"{path}: {saved.name} is not that of {type(optimizer).__name__}: its groups have no {', '.join(lacks)} "
            f"but {', '.join(sorted(has - wants))}; create the optimizer that was saved, or omit it"
        )
