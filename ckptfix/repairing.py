"""The story of a repair, from the file that comes in to the file that goes out. Start reading here.

    open      formats    the file is parsed inertly; no tensor is read
    target    target     what the state_dict has to fit: a model, a factory, or a reference file
    diagnose  rules      findings, and the plan of the fixes that are allowed
    apply     plan       a new lazy view of the same bytes
    deliver   delivery   temporary file, comparison, forward test, rename

``check`` stops after the diagnosis; ``repair_state_dict`` hands the view to torch instead of writing it, and
``ckptfix.loading`` loads it into a model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptfix.core.buffers import COUNTED_SINCE
from ckptfix.core.checkpoint import Checkpoint, path_name
from ckptfix.core.report import Report
from ckptfix.core.settings import Settings
from ckptfix.engine.diagnosis import Diagnosis, diagnose
from ckptfix.engine.validation import checked_settings
from ckptfix.errors import UsageError
from ckptfix.reading.opening import open_file

# What only some of these need is imported where they need it: the first answer is to come at once.
if TYPE_CHECKING:
    from torch import nn

    from ckptfix.core.coverage import Coverage
    from ckptfix.core.finding import Finding
    from ckptfix.core.plan import Plan
    from ckptfix.core.target import Target
    from ckptfix.engine.delivery import Delivery, ForwardTest
    from ckptfix.engine.supplies import Measure, Supplies
    from ckptfix.modules.factory import Arguments

Source = str | os.PathLike[str] | Mapping[str, Any]
"""A checkpoint file, or a state_dict in memory."""


@dataclass(frozen=True)
class Repair:
    """The outcome of a repair: the report, the plan, and the repaired checkpoint as a lazy view."""

    report: Report
    plan: Plan
    checkpoint: Checkpoint

    def state_dict(self, *, mmap: bool = False) -> dict[str, Any]:
        """The repaired state_dict on the CPU, with the entries that are no tensors, and torch's ``_metadata``.

        ``mmap`` is that of ``Checkpoint.state_dict``.
        """
        return self.checkpoint.state_dict(mmap=mmap)


def open_checkpoint(
    path: str | os.PathLike[str], *, weights: str | None = None, salvage: bool = False, member: str | None = None
) -> Checkpoint:
    """Open a checkpoint file; no tensor is read and none of its code runs.

    ``weights`` picks a state_dict by its name in the container (``state_dict``, ``model.ema``, ``[0]``), ``member`` a
    file of an archive. ``salvage`` opens a damaged file and gives the tensors that are whole; ``Checkpoint.lost`` has
    the rest. Raises ``UnreadableError`` with the true cause where the file holds no weights."""
    return open_file(os.fspath(path), weights, salvage=salvage, member=member)


def check(
    source: Source,
    model: nn.Module | str | None = None,
    *,
    like: str | os.PathLike[str] | None = None,
    model_args: Arguments = (),
    **settings: Any,
) -> Report:
    """Say what is wrong with a checkpoint and what would be done about it; nothing is written.

    ``settings`` are the fields of ``ckptfix.core.settings.Settings``.
    """
    checked = checked_settings(settings)
    checkpoint = _open(source, checked)
    target = _target(model, like, model_args, checked)
    diagnosis = diagnose(checkpoint, target, checked, _donor(target, checked), _measure(model, model_args, checked))
    return replace(_report(checkpoint, target, diagnosis, checked), fixed=(), edits=())


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
    model_args: Arguments = (),
    **settings: Any,
) -> Repair:
    """Repair a checkpoint, and write it where ``output`` says; without one, nothing is written.

    ``beside`` writes ``<stem>.fixed<suffix>`` if there is anything to repair, ``in_place`` replaces the source in the
    same case (``backup`` keeps it as ``<name>.bak``). With ``only_changes`` an ``output`` is only written where its
    tensors, their names or the container differ from the source's. Without ``flush`` the file is left to the caller to
    be flushed to the disk. ``plan`` applies saved edits instead of proposing any. Where a target is given and a strict
    load would still fail, where the forward test fails, or where the file is built as an attack, nothing is written
    and ``report.exit_code`` is 1."""
    from ckptfix.engine.delivery import Destination, deliver, refuse_inputs, state_of
    from ckptfix.writing.output import output_format

    checked = checked_settings(settings)
    if checked.smoke and not isinstance(model, str):
        raise UsageError("the forward test needs a factory: give --model pkg.mod:factory")
    state = state_of(source) if in_place and isinstance(source, (str, os.PathLike)) else None
    checkpoint = _open(source, checked)
    compared = None
    if checked.smoke_settings.compare is not None:
        from ckptfix.smoke.reference import reference_file  # the whole forward test comes with it

        compared = reference_file(checked, checkpoint, isinstance(model, str))
    if output is not None:
        refuse_inputs(output, {"--like": like, "--fill": checked.fill_file, "--compare": compared})
    destination = Destination.of(checkpoint, output, beside, in_place, backup, checked.format)
    if destination is not None:
        is_whole = not checkpoint.member and not checkpoint.damage
        is_same = is_whole and destination.form == output_format(checkpoint, None)
        destination = replace(
            destination, only_changes=destination.only_changes or (only_changes and is_same), flush=flush, state=state
        )
        checked = replace(checked, format=destination.form)
    target = _target(model, like, model_args, checked)
    donor, measure = _donor(target, checked), _measure(model, model_args, checked)
    if plan is None:
        diagnosis = diagnose(checkpoint, target, checked, donor, measure)
    else:
        from ckptfix.engine.supplies import Supplies

        supplies = Supplies(target.initial if target is not None else None, donor, measure)
        diagnosis = _carry_out(plan, checkpoint, target, checked, supplies)
    report = _report(checkpoint, target, diagnosis, checked)
    if destination is not None and destination.only_changes and not diagnosis.plan and checked.shard_bytes is None:
        destination = None
    if not dry_run:
        delivery = deliver(diagnosis.result, report, destination, checked, _forward_test(model, model_args, checked))
        report = _with_delivery(report, delivery)
    return Repair(report, diagnosis.plan, diagnosis.result)


def repair_state_dict(
    state_dict: Mapping[str, Any], model: nn.Module | str | None = None, **settings: Any
) -> tuple[dict[str, Any], Report]:
    """Repair a state_dict in memory. Tensors that no edit touches are not copied; the argument is not changed."""
    repaired = repair(state_dict, model, **settings)
    return repaired.state_dict(), repaired.report


def _open(source: Source, settings: Settings) -> Checkpoint:
    if not isinstance(source, Mapping):
        if not isinstance(source, (str, os.PathLike)):
            raise UsageError(f"the source is of type {type(source).__name__}; give a path or a state_dict")
        path, weights = os.fspath(source), settings.weights
        return open_file(path, weights, salvage=settings.salvage, member=settings.member, narrow=False)
    from ckptfix.reading.memory import open_state_dict
    from ckptfix.reading.weights.prefixed_sets import with_pick

    checkpoint = open_state_dict(source)
    return checkpoint if settings.weights is None else with_pick(checkpoint, settings.weights)


def _target(
    model: nn.Module | str | None, like: str | os.PathLike[str] | None, model_args: Arguments, settings: Settings
) -> Target | None:
    if model is not None and like is not None:
        raise UsageError("model and like exclude each other: both say what the checkpoint has to fit")
    if model is None and like is None:
        return None
    from ckptfix.core.target import target_from_checkpoint, target_from_module

    if isinstance(model, str):
        from ckptfix.modules.factory import target_from_factory

        return target_from_factory(model, model_args, settings.seed)
    if model is not None:
        if not hasattr(model, "named_modules") or isinstance(model, type):
            raise UsageError(f"model is {model!r:.60}; give a torch.nn.Module or the text pkg.mod:factory")
        return target_from_module(model)
    assert like is not None
    return target_from_checkpoint(open_file(os.fspath(like)))


def _donor(target: Target | None, settings: Settings) -> Checkpoint | None:
    """The checkpoint of ``--fill FILE``, under the names of the target."""
    if settings.fill == "target" and target is None:
        raise UsageError("--fill target takes values from a model or a reference; add --model or --like")
    if settings.fill_file is None:
        return None
    if target is None and settings.salvage:
        return open_file(settings.fill_file)
    if target is None and not settings.replace:
        raise UsageError(
            f"--fill {settings.fill_file}: what is missing shows only against a target; add --model or --like, or say "
            "with --replace which values it replaces"
        )
    return diagnose(open_file(settings.fill_file), target, Settings(select=("KEY", "FIL102"), values=False)).result


def _measure(model: nn.Module | str | None, model_args: Arguments, settings: Settings) -> Measure | None:
    """What measures running statistics for ``--recalibrate``, with the user's model."""
    if model is None:
        if settings.recalibrate is not None:
            raise UsageError("--recalibrate runs data through the model; add --model pkg.mod:factory")
        return None
    if settings.recalibrate is not None and not Path(settings.recalibrate).is_file():
        raise UsageError(f"--recalibrate {settings.recalibrate}: there is no such file; check the path")
    from ckptfix.smoke.measuring import measure_with

    return measure_with(model, model_args, settings.seed)


def _forward_test(model: nn.Module | str | None, model_args: Arguments, settings: Settings) -> ForwardTest:
    if not isinstance(model, str) or settings.smoke is False:
        return lambda file, result: (None, [])
    from ckptfix.smoke.delivery import forward_test

    return forward_test(settings, model, model_args)


def _carry_out(
    plan: Plan, checkpoint: Checkpoint, target: Target | None, settings: Settings, supplies: Supplies
) -> Diagnosis:
    """The result of a saved plan, and what the rules say of it; they change nothing more."""
    from ckptfix.engine.applying import apply_plan

    result = apply_plan(plan, checkpoint, supplies)
    left = diagnose(result, target, replace(settings, unsafe_fixes=False), supplies.donor)
    return Diagnosis(left.findings, (), plan, result, left.figures)


def _report(checkpoint: Checkpoint, target: Target | None, diagnosis: Diagnosis, settings: Settings) -> Report:
    coverage: Coverage | None = None
    left: tuple[str, ...] = ()
    if target is not None:
        from ckptfix.core.coverage import measure_coverage, obstacles

        coverage = measure_coverage(diagnosis.result, target, diagnosis.filled)
        left = tuple(obstacles(diagnosis.result, target, settings.is_for_torch_before(COUNTED_SINCE)))
    return Report(
        source=checkpoint.path,
        format=checkpoint.format,
        container=path_name(checkpoint.container),
        tensors=len(checkpoint.specs),
        numel=sum(spec.numel for spec in checkpoint.specs.values()),
        target=target.label if target is not None else None,
        findings=diagnosis.findings,
        fixed=diagnosis.fixed,
        edits=diagnosis.plan.edits,
        coverage=coverage,
        obstacles=left,
        remarks=target.remarks if target is not None else (),
        figures=diagnosis.figures,
        layout={
            key: (spec.dtype, tuple(spec.shape))
            for key, spec in diagnosis.result.specs.items()
            if key in diagnosis.figures
        },
    )


def _with_delivery(report: Report, delivery: Delivery) -> Report:
    findings: tuple[Finding, ...] = (*report.findings, *delivery.findings)
    return replace(
        report,
        findings=findings,
        smoke=delivery.smoke,
        output=delivery.output,
        remarks=(*report.remarks, *delivery.remarks),
    )
