"""The story of a repair, from the file that comes in to the file that goes out. Start reading here.

    open      reading           the file is parsed inertly; no tensor is read
    target    modules           what the state_dict has to fit: a model, a factory, or a reference file
    diagnose  rules, engine     findings, and the plan of the fixes that are allowed
    apply     engine.applying   a new lazy view of the same bytes
    deliver   engine.delivery   temporary file, comparison, forward test, rename

Before the story begins, ``engine.validation`` checks the settings and ``engine.destination`` where the result goes;
``goal`` holds what the file has to fit. ``check`` stops after the diagnosis. ``repair_state_dict`` returns the view as
a state_dict instead of writing it, ``ckptfix.loading`` loads it into a model, and ``ckptfix.resuming`` loads its
optimizer's state into an optimizer."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.facts import DOUBTS, clause
from ckptfix.core.lazy import nn
from ckptfix.core.option import CHECK, REPAIR
from ckptfix.core.plan import Plan
from ckptfix.core.report import Call, Repair, Report
from ckptfix.engine.diagnosis import carry_out, diagnose, report_on, with_fitting_set
from ckptfix.engine.validation import checked_settings
from ckptfix.errors import DamageWarning, UsageError, one_line
from ckptfix.goal import Goal
from ckptfix.reading.opening import Source, is_remote, open_file, open_source
from ckptfix.report.display import log_doubts, log_edits, refuse_misfit

# Only repair() imports what a repair needs, to keep the start-up time of a check short.
if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckptfix.core.settings import CheckSettings, LoadSettings, RepairSettings
    from ckptfix.modules.factory import ModelArguments


def open_checkpoint(
    path: str | os.PathLike[str], *, weights: str | None = None, salvage: bool = False, member: str | None = None
) -> Checkpoint:
    """Open a checkpoint file without reading a tensor or running any of its code.

    ``weights`` selects a state_dict by its name in the container (``state_dict``, ``model.ema``, ``[0]``), ``member`` a
    file in an archive. ``salvage`` opens a damaged file for the tensors that are intact; ``Checkpoint.lost`` has the
    rest. Warns with ``DamageWarning`` about tensors that may be damaged. Raises ``UnreadableError``, which states the
    cause, if the file has no weights."""
    if weights is not None and not isinstance(weights, str):
        raise UsageError(f"weights is of type {type(weights).__name__}; give the name of a state_dict, such as '[0]'")
    checkpoint = open_file(os.fspath(path), weights, salvage=salvage, member=member)
    if doubts := dict.fromkeys(map(clause, checkpoint.remarked(*DOUBTS))):
        text = f"{checkpoint.path}: tensors may differ from what was saved: {'; '.join(doubts)}"
        warnings.warn(one_line(text), DamageWarning, stacklevel=2)
    return checkpoint


def check(
    source: Source,
    model: nn.Module | str | None = None,
    *,
    like: str | os.PathLike[str] | None = None,
    model_args: ModelArguments = (),
    **settings: Unpack[CheckSettings],
) -> Report:
    """Report what is wrong with a checkpoint and what a repair would do about it; write nothing.

    For a URL, only the ranges that are needed are fetched, and values only with ``values=True``. ``ckptfix.Settings``
    describes the settings."""
    is_unread = is_remote(source) and settings.setdefault("values", False) is False
    checked = checked_settings(settings, model, like, CHECK)
    given = {"like": like, "model_args": model_args, **settings, **({"values": None} if is_unread else {})}
    checkpoint = open_source(source, checked)
    goal = Goal(checked, model, like, model_args).for_file(checkpoint)
    checkpoint = with_fitting_set(source, checkpoint, goal.target, checked)
    diagnosis = diagnose(checkpoint, goal.target, checked, goal.donor, goal.measure, source_model=goal.source_model)
    report = report_on(checkpoint, goal.target, diagnosis, checked, Call.of(CHECK, source, model, given, checked))
    unread = ("the values were not read: for a URL, --values (values=True) fetches the whole file",)
    return replace(report, fixed=(), edits=(), remarks=(*report.remarks, *(unread if is_unread else ())))


def repair(
    source: Source,
    model: nn.Module | str | None = None,
    *,
    output: str | os.PathLike[str] | None = None,
    beside: bool = False,
    in_place: bool = False,
    backup: bool = False,
    only_changes: bool = False,
    flush: bool = True,
    dry_run: bool = False,
    plan: Plan | None = None,
    like: str | os.PathLike[str] | None = None,
    model_args: ModelArguments = (),
    **settings: Unpack[RepairSettings],
) -> Repair:
    """Repair a checkpoint, and write it to ``output`` if that is given; it must not exist unless ``force`` is set.

    ``beside`` writes ``<stem>.fixed<suffix>`` if there is anything to repair, ``in_place`` replaces the source in the
    same case (``backup`` keeps it as ``<name>.bak``). With ``only_changes``, ``output`` is only written if its tensors,
    their names or the container differ from the source's. Without ``flush``, flushing the file to disk is left to the
    caller. ``plan`` applies saved edits instead of proposing any. If a strict load into the target would still fail,
    the forward test fails, or the file is an attack, nothing is written and ``report.exit_code`` is 1."""
    from ckptfix.engine.delivery import Drafts, deliver, with_blocking_warnings
    from ckptfix.engine.destination import Destination, differs, state_of

    if is_remote(source) and (output is not None or beside or in_place):
        if not dry_run:
            from ckptfix.bytes.remote import download_advice

            raise UsageError(f"{source}: only a file on this machine can be repaired; {download_advice(str(source))}")
        output, beside, in_place = None, False, False
    if plan is not None and not isinstance(plan, Plan):
        raise UsageError(
            f"plan is of type {type(plan).__name__}; give a Plan, for example Plan.from_json(json.load(file))"
        )
    before = state_of(source) if in_place else None
    checked = checked_settings(settings, model, like)
    places = {"output": output, "beside": beside, "in_place": in_place, "backup": backup}
    given = {**places, "plan": plan, "like": like, "model_args": model_args, **settings}
    checkpoint = open_source(source, checked)
    destination = Destination.of(checkpoint, checked, output, beside, in_place, backup)
    if destination is not None:
        destination.refuse(checked, like, dry_run)
        destination = replace(destination, flush=flush, before=before)
    shaped = checked if destination is None else replace(checked, format=destination.form)
    goal = Goal(shaped, model, like, model_args).for_file(checkpoint)
    checkpoint = with_fitting_set(source, checkpoint, goal.target, shaped)
    with Drafts(None if dry_run else destination, shaped) as drafts:
        if plan is None:
            diagnosis = diagnose(
                checkpoint,
                goal.target,
                shaped,
                goal.donor,
                goal.measure,
                source_model=goal.source_model,
                draft=drafts.attempt,
            )
        else:
            diagnosis = carry_out(plan, checkpoint, goal.target, shaped, goal.donor, goal.measure, drafts.attempt)
        report = report_on(checkpoint, goal.target, diagnosis, shaped, Call.of(REPAIR, source, model, given, checked))
        is_changed = differs(checkpoint, diagnosis.plan, shaped, checked.format is not None)
        if not is_changed and (only_changes or output is None):
            destination = None
        if is_changed or destination is not None:
            report = with_blocking_warnings(report)
        if dry_run:
            report = replace(report, is_dry_run=True, is_rewrite=is_changed or destination is not None)
        else:
            report = deliver(diagnosis.result, report, destination, shaped, goal.forward_test, drafts)
    log_edits(report.source, report.edits)
    return Repair(report, diagnosis.plan, diagnosis.result, is_changed)


def repair_state_dict(
    state_dict: Mapping[str, Any],
    model: nn.Module | str | None = None,
    *,
    like: str | os.PathLike[str] | None = None,
    model_args: ModelArguments = (),
    **settings: Unpack[RepairSettings],
) -> tuple[dict[str, Any], Report]:
    """Repair a state_dict in memory, or one in a container such as ``torch.load`` returns. Tensors that no edit touches
    are not copied; the argument is not changed."""
    repaired = repair(state_dict, model, like=like, model_args=model_args, **settings)
    return repaired.state_dict(), repaired.called("repair_state_dict").report


def repair_to_load(source: Source, model: nn.Module, **settings: Unpack[LoadSettings]) -> Repair:
    """Repair a checkpoint in memory for a strict load into a model, and log doubts about it.

    Raises ``TargetError`` if the load would fail, ``UnreadableError`` if the weights are wrong, and ``HostileError`` if
    the file would run code."""
    repaired = repair(source, model, **settings)
    refuse_misfit(repaired.report)
    log_doubts(repaired.report)
    return repaired.called("load", is_model_first=True)
