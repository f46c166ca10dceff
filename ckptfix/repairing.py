"""The story of a repair, from the file that comes in to the file that goes out. Start reading here.

    open      reading           the file is parsed inertly; no tensor is read
    target    modules           what the state_dict has to fit: a model, a factory, or a reference file
    diagnose  rules, engine     findings, and the plan of the fixes that are allowed
    apply     engine.applying   a new lazy view of the same bytes
    deliver   engine.delivery   temporary file, comparison, forward test, rename

What has to be checked first (settings, destinations) is checked in ``engine.validation`` and ``engine.destination``.
``check`` stops after the diagnosis; ``repair_state_dict`` hands the view to torch instead of writing it, and
``ckptfix.loading`` loads it into a model, ``ckptfix.resuming`` its optimizer's state into an optimizer."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.bytes.files import is_url
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.display import Displayed, Form, show_as
from ckptfix.core.facts import DOUBTS
from ckptfix.core.finding import Blocks, Level, Placeholder, Subject, counted
from ckptfix.core.lazy import nn
from ckptfix.core.options import CHECK, REPAIR
from ckptfix.core.report import Call, Report
from ckptfix.core.wording import clause
from ckptfix.engine.diagnosis import carry_out, diagnose, donor_of, report_on, with_fitting_set
from ckptfix.engine.validation import checked_settings
from ckptfix.errors import DamageWarning, HostileError, Opt, TargetError, UsageError, one_line
from ckptfix.reading.opening import Source, open_file, open_source
from ckptfix.report.display import log_edits, report_lines, report_rows

# What only some of these need is imported where they need it: the first answer is to come at once.
if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckptfix.core.likeness import Likeness
    from ckptfix.core.plan import Plan
    from ckptfix.core.settings import CheckSettings, RepairSettings, Settings
    from ckptfix.core.target import Target
    from ckptfix.engine.changes import Measure
    from ckptfix.engine.delivery import ForwardTest
    from ckptfix.modules.factory import Arguments
    from ckptfix.rules.rule import Twin


class Repair(Displayed, Struct, frozen=True):
    """The outcome of a repair: the report, the plan, and the repaired checkpoint as a lazy view.

    ``is_changed`` says whether a file written from it differs from the source."""

    report: Report
    plan: Plan
    checkpoint: Checkpoint
    is_changed: bool

    def __repr__(self) -> str:
        return repr(self.report).replace("<Report", "<Repair", 1)

    def state_dict(self, *, mmap: bool = False) -> dict[str, Any]:
        """Return the repaired state_dict on the CPU, with the entries that are not tensors, and torch's ``_metadata``.

        ``mmap`` is that of ``Checkpoint.state_dict``."""
        return self.checkpoint.state_dict(mmap=mmap)


show_as(Repair, Form(lambda repair: report_lines(repair.report), lambda repair: report_rows(repair.report)))


def open_checkpoint(
    path: str | os.PathLike[str], *, weights: str | None = None, salvage: bool = False, member: str | None = None
) -> Checkpoint:
    """Open a checkpoint file; no tensor is read and none of its code runs.

    ``weights`` picks a state_dict by its name in the container (``state_dict``, ``model.ema``, ``[0]``), ``member`` a
    file of an archive. ``salvage`` opens a damaged file and gives the tensors that are whole; ``Checkpoint.lost`` has
    the rest. Warns with ``DamageWarning`` if tensors may be others than were saved. Raises ``UnreadableError`` with the
    true cause if the file holds no weights."""
    checkpoint = open_file(os.fspath(path), weights, salvage=salvage, member=member)
    doubts = dict.fromkeys(map(clause, checkpoint.remarked(*DOUBTS)))
    if doubts:
        text = f"{checkpoint.path}: tensors may be others than were saved: {'; '.join(doubts)}"
        warnings.warn(one_line(text), DamageWarning, stacklevel=2)
    return checkpoint


def check(
    source: Source,
    model: nn.Module | str | None = None,
    *,
    like: str | os.PathLike[str] | None = None,
    model_args: Arguments = (),
    **settings: Unpack[CheckSettings],
) -> Report:
    """Report what is wrong with a checkpoint and what a repair would do about it; write nothing.

    Of a URL only the ranges that are looked at are fetched, and the values only with ``values=True``.
    ``ckptfix.Settings`` describes the settings."""
    unread = _is_remote(source) and settings.setdefault("values", False) is False
    checked = checked_settings(settings, model, like, "check")
    checkpoint = open_source(source, checked)
    model_args = _arguments(model, model_args, checkpoint)
    target = _target(model, like, model_args, checked)
    checkpoint = with_fitting_set(source, checkpoint, target, checked)
    donor, measure = donor_of(target, checked), _measure(model, model_args, checked)
    diagnosis = diagnose(checkpoint, target, checked, donor, measure, twin=_twin(model, model_args, checked))
    report = report_on(checkpoint, target, diagnosis, checked)
    given = {"like": like, "model_args": model_args, **settings, **({"values": None} if unread else {})}
    call = _call(CHECK, source, model, given, checked)
    remarks = ("the values behind a URL are read only with --values, which fetches the whole file",) if unread else ()
    likeness = _likeness(checkpoint, target)
    return replace(report, fixed=(), edits=(), remarks=(*report.remarks, *remarks), likeness=likeness, call=call)


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
    **settings: Unpack[RepairSettings],
) -> Repair:
    """Repair a checkpoint, and write it to ``output``, which must not exist unless ``force`` is set; without one, write
    nothing.

    ``beside`` writes ``<stem>.fixed<suffix>`` if there is anything to repair, ``in_place`` replaces the source in the
    same case (``backup`` keeps it as ``<name>.bak``). With ``only_changes`` an ``output`` is only written if its
    tensors, their names or the container differ from the source's. Without ``flush`` the file is left to the caller to
    be flushed to the disk. ``plan`` applies saved edits instead of proposing any. If a target is given and a strict
    load would still fail, if the forward test fails, or if the file is built as an attack, nothing is written
    and ``report.exit_code`` is 1."""
    from ckptfix.engine.delivery import Drafts, deliver, weighed
    from ckptfix.engine.destination import Destination, Inputs, differs, refuse_inputs, state_of
    from ckptfix.reading.adapters import adapter_paths

    if _is_remote(source) and (output is not None or beside or in_place):
        if not dry_run:
            from ckptfix.bytes.remote import download_advice

            raise UsageError(f"{source}: only a file on this machine can be repaired; {download_advice(str(source))}")
        output, beside, in_place = None, False, False
    checked = checked_settings(settings, model, like)
    places = {"output": output, "beside": beside, "in_place": in_place, "backup": backup, "plan": plan}
    call = _call(REPAIR, source, model, {**places, "like": like, "model_args": model_args, **settings}, checked)
    before, is_form_asked = state_of(source) if in_place else None, checked.format is not None
    checkpoint = open_source(source, checked)
    destination = Destination.of(checkpoint, checked, output, beside, in_place, backup)
    if destination is not None:
        others: Inputs = {Opt("like"): like, Opt("fill"): checked.fill_file, Opt("compare"): checked.compare_file}
        adapters: Inputs = {Opt("adapter", path): path for path in adapter_paths(checked.adapter)}
        refuse_inputs(destination.output, {**others, **adapters})
        if not dry_run:
            destination.refuse(checked)
        destination = replace(destination, flush=flush, before=before)
        checked = replace(checked, format=destination.form)
    model_args = _arguments(model, model_args, checkpoint)
    target = _target(model, like, model_args, checked)
    checkpoint = with_fitting_set(source, checkpoint, target, checked)
    donor, measure = donor_of(target, checked), _measure(model, model_args, checked)
    with Drafts(None if dry_run else destination, checked) as drafts:
        if plan is None:
            twin = _twin(model, model_args, checked)
            diagnosis = diagnose(checkpoint, target, checked, donor, measure, twin=twin, draft=drafts.attempt)
        else:
            diagnosis = carry_out(plan, checkpoint, target, checked, donor, measure, drafts.attempt)
        report = report_on(checkpoint, target, diagnosis, checked)
        report = replace(report, likeness=_likeness(checkpoint, target), call=call)
        is_changed = differs(checkpoint, diagnosis.plan, checked, is_form_asked)
        if not is_changed and (only_changes or output is None):
            destination = None
        if is_changed or destination is not None:
            report = weighed(report)
        if dry_run:
            report = replace(report, is_dry_run=True)
        else:
            if destination is not None:
                destination.refuse_backup()
            test = _forward_test(model, model_args, checked)
            report = deliver(diagnosis.result, report, destination, checked, test, drafts)
    log_edits(report.source, report.edits)
    return Repair(report, diagnosis.plan, diagnosis.result, is_changed)


def repair_state_dict(
    state_dict: Mapping[str, Any],
    model: nn.Module | str | None = None,
    *,
    like: str | os.PathLike[str] | None = None,
    model_args: Arguments = (),
    **settings: Unpack[RepairSettings],
) -> tuple[dict[str, Any], Report]:
    """Repair a state_dict in memory, or that of a container such as ``torch.load`` returns. Tensors that no edit
    touches are not copied; the argument is not changed."""
    repaired = repair(state_dict, model, like=like, model_args=model_args, **settings)
    call = repaired.report.call
    report = replace(repaired.report, call=call and replace(call, function="repair_state_dict"))
    return repaired.state_dict(), report


def repair_to_load(source: Source, model: nn.Module, **settings: Unpack[RepairSettings]) -> Repair:
    """Repair in memory what is to be loaded strictly into a model, and log which of several sets of weights it is.

    Raises ``TargetError`` if the load would fail, and ``HostileError`` for a file that would run code."""
    repaired = repair(source, model, **settings)
    _refuse_misfit(repaired.report)
    _log_choice(repaired.report)
    call = repaired.report.call
    loading = call and replace(call, function="load", places=tuple(reversed(call.places)))
    return replace(repaired, report=replace(repaired.report, call=loading))


def _call(
    function: str, source: Source, model: nn.Module | str | None, given: Mapping[str, Any], settings: Settings
) -> Call:
    """Return the call of a function. What was not asked for is left out, and a list of texts has one form: it may have
    been given as one text."""
    kept = {}
    for name, value in given.items():
        if value not in (None, False, (), []):
            kept[name] = _literal(getattr(settings, name, value) if name != "rename_map" else value, name)
    off = {name: False for name in ("values", "smoke") if given.get(name) is False}
    name = "state_dict" if isinstance(source, Mapping) else "checkpoint"
    return Call(function, (_literal(source, name), *(() if model is None else (_literal(model, "model"),))), kept | off)


def _literal(value: object, name: str) -> object:
    """Return an argument of a call, or a placeholder for what has no literal."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    is_literal = isinstance(value, (str, int, float, tuple, list)) or (name == "model_args" and isinstance(value, dict))
    return value if is_literal else Placeholder(name)


def _arguments(model: nn.Module | str | None, given: Arguments, checkpoint: Checkpoint) -> Arguments:
    """Return the arguments of the model; a Lightning module finds those of its class in the file."""
    if not (isinstance(model, str) and model.startswith("lightning:")):
        return given
    from ckptfix.modules.lightning import with_saved_arguments

    return with_saved_arguments(given, checkpoint)


def _is_remote(source: Source) -> bool:
    return isinstance(source, str) and is_url(source)


def _target(
    model: nn.Module | str | None, like: str | os.PathLike[str] | None, model_args: Arguments, settings: Settings
) -> Target | None:
    if model is None and like is None:
        return None
    from ckptfix.modules.factory import target_of

    return target_of(model, like, model_args, settings.seed)


def _likeness(checkpoint: Checkpoint, target: Target | None) -> Likeness | None:
    """Return the known architecture that a checkpoint is like, if there is nothing that it has to fit."""
    if target is not None:
        return None
    from ckptfix.known.recognition import likeness_of

    return likeness_of(checkpoint)


def _measure(model: nn.Module | str | None, model_args: Arguments, settings: Settings) -> Measure | None:
    """Return what measures running statistics for ``--recalibrate``, with the user's model."""
    if model is None:
        return None
    from ckptfix.smoke.measuring import measure_with

    return measure_with(model, model_args, settings.seed)


def _twin(model: nn.Module | str | None, model_args: Arguments, settings: Settings) -> Twin | None:
    """Return the model of ``--source-model``, which proves a map by running beside the target."""
    if settings.source_model is None:
        return None
    from ckptfix.smoke.equivalence import twin_of

    return twin_of(settings.source_model, model, model_args, settings)


def _forward_test(model: nn.Module | str | None, model_args: Arguments, settings: Settings) -> ForwardTest | None:
    if not isinstance(model, str) or settings.smoke is False:
        return None
    from ckptfix.smoke.run import forward_test

    return forward_test(settings, model, model_args)


def _refuse_misfit(report: Report) -> None:
    if any(Blocks.LOADING in finding.blocks for finding in report.remaining):
        raise HostileError(
            f"{report.source}: the file is built to run code; look at it with `ckptfix check` and do not use it"
        )
    if left := report.obstacles:
        from ckptfix.report.advice import remedies_text

        found = [finding for finding in report.remaining if finding.subject in (Subject.NAMES, Subject.FIT)]
        reasons = "; ".join(f"{finding.code} {finding.message}" for finding in found)
        remedies = (finding.remedies for finding in found if finding.remedies and finding.subject is Subject.FIT)
        hint = next((remedies_text(each, as_arguments=True) for each in remedies), "see ckptfix.check")
        raise TargetError(
            f"{report.source}: does not fit {report.target} ({counted(len(left), 'key')}, {left[0]} among them): "
            f"{reasons or 'the rules that say more were not selected'}; {hint}"
        )


def _log_choice(report: Report) -> None:
    """Log which of several sets of weights is loaded: a script that does not print the report shows it nowhere."""
    import logging

    from ckptfix.rules import named

    for finding in report.findings:
        if finding.code == named("several-state-dicts").code:
            level = logging.INFO if finding.level is Level.NOTE else logging.WARNING
            logging.getLogger("ckptfix").log(level, "%s: %s", report.source, finding.message)
