"""What somebody has to decide, as the command that carries it out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptfix.core.finding import Level, Remedy
from ckptfix.core.options import option_words
from ckptfix.core.report import Report
from ckptfix.core.shell import no_option, typed
from ckptfix.engine.delivery import refusal
from ckptfix.engine.validation import parsed_settings
from ckptfix.errors import CkptfixError
from ckptfix.report.advice import recommended
from ckptfix.report.commands import with_remedies
from ckptfix.smoke.outcome import ENVIRONMENT
from ckptfix.zoo.manifest import Outcome
from ckptfix.zoo.work.job import Job


def command_for(job: Job, report: Report) -> str:
    """Return the command that cures what remains; else the one that takes the file as it is."""
    given = job.treatment.choices
    if added := _added(given, recommended(report)):
        return _command(job, added)
    left = [finding for finding in report.remaining if finding.level > Level.NOTE]
    if refusal(report, parsed_settings(job.treatment.settings)):
        last = [remedy for finding in left if finding.blocks for remedy in finding.remedies if remedy.is_complete]
        if added := _added(given, last[:1]):
            return _command(job, added)
    if report.smoke is not None and report.smoke.passed is False:
        return _command(job, {"smoke": False})
    codes = dict.fromkeys(finding.code for finding in left)
    return _command(job, {"ignore": [*given.get("ignore", ()), *codes]})


def _added(given: Mapping[str, Any], remedies: Iterable[Remedy]) -> dict[str, Any]:
    """Return the options of the remedies that were not given yet."""
    merged = with_remedies(given, remedies)
    return {name: value for name, value in merged.items() if name not in given or given[name] != value}


def fault_of_the_machine(job: Job, report: Report) -> str | None:
    """Why the forward test failed, where this machine is to blame and not the file: memory ran out, the GPU is gone.
    That is nothing to decide about; another run, where that is mended, tries again."""
    if report.smoke is None or report.smoke.passed is not False:
        return None
    for finding in report.remaining:
        if finding.evidence.get("blame") == ENVIRONMENT:
            return f"{job.item.name}: {finding.message}; fix that and run the same command again"
    return None


def command_after_error(job: Job, outcome: Outcome, error: CkptfixError) -> str | None:
    """Return the command that an error advises, to be completed if it needs a value."""
    named = {option.name for option in error.options}
    if outcome is Outcome.DECISION and "member" in named:
        return _command(job, {"member": "NAME"})
    return _command(job, {"salvage": True}) if "salvage" in named else None


def _command(job: Job, options: Mapping[str, Any]) -> str:
    """Return the migration of only this file with these options: a decision that later runs keep to.

    It takes the place of an earlier one, and so repeats what that one said."""
    words = option_words({**(job.decision or {}), **options})
    return typed((*job.again, "--only", no_option(job.item.name), *words))
