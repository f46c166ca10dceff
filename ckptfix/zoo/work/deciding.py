"""What somebody has to decide, as the command that carries it out."""

from __future__ import annotations

from collections.abc import Sequence

from ckptfix.core.finding import Level
from ckptfix.core.options import option_words
from ckptfix.core.report import Report
from ckptfix.core.shell import no_option, typed
from ckptfix.engine.delivery import refusal
from ckptfix.engine.validation import parsed_settings
from ckptfix.report.advice import next_words
from ckptfix.report.telling import Mode, Telling
from ckptfix.smoke.outcome import ENVIRONMENT
from ckptfix.zoo.manifest import Outcome
from ckptfix.zoo.work.job import Job

_WAYS_ON = {"FIL901": ("--disarm",), "FIL201": ("--salvage",), "FIL104": ("--format", "pth")}
"""The flags that let a file be written which is not written because of a rule."""

_FLAGS_OF_ERRORS = ("--salvage",)
"""Flags without a value that an error may name as the way on."""


def command_for(job: Job, report: Report) -> str:
    """The command that cures what remains; else the one that takes the file as it is."""
    given = job.treatment.command(job.item.name)
    if cure := next_words(report, Telling(Mode.REPAIR, command=given)):
        return _command(job, *cure[len(given) :])
    codes = list(dict.fromkeys(finding.code for finding in report.remaining if finding.level > Level.NOTE))
    if refusal(report, parsed_settings(job.treatment.settings)):
        for code in codes:
            if code in _WAYS_ON:
                return _command(job, *_WAYS_ON[code])
    if report.smoke is not None and report.smoke.passed is False:
        return _command(job, "--no-smoke")
    return _command(job, ignored=codes)


def fault_of_the_machine(job: Job, report: Report) -> str | None:
    """Why the forward test failed, where this machine is to blame and not the file: memory ran out, the GPU is gone.
    That is nothing to decide about; another run, where that is mended, tries again."""
    if report.smoke is None or report.smoke.passed is not False:
        return None
    for finding in report.remaining:
        if finding.evidence.get("blame") == ENVIRONMENT:
            return (
                f"{job.item.name}: {finding.message}; {finding.remedy}, and run the same command again; or take it"
                " without a forward test"
            )
    return None


def command_after_error(job: Job, outcome: Outcome, error: str) -> str | None:
    """The command that an error advises, to be completed where it needs a value."""
    flags = [flag for flag in _FLAGS_OF_ERRORS if flag in error]
    if outcome is Outcome.DECISION and "--member" in error:
        flags = ["--member", "NAME"]
    return _command(job, *flags) if flags else None


def _command(job: Job, *flags: str, ignored: Sequence[str] = ()) -> str:
    """The migration of this file alone, with these flags: a decision that later runs keep to.

    It takes the place of an earlier one, and so says again what that one said."""
    choices = dict(job.decision or {})
    if ignored:
        choices["ignore"] = [*job.treatment.choices.get("ignore", ()), ",".join(ignored)]
    decided = option_words(choices)
    return typed(
        (*job.again, "--only", no_option(job.item.name), *decided, *(flag for flag in flags if flag not in decided))
    )
