"""What somebody has to decide, as the command that carries it out."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ckptfix.arguments import repair_command
from ckptfix.delivery import refusal
from ckptfix.finding import Level
from ckptfix.repairing import checked_settings
from ckptfix.report import Report
from ckptfix.report.advice import next_command
from ckptfix.report.telling import Mode, Telling
from ckptfix.zoo.job import Job
from ckptfix.zoo.record import Outcome

_WAYS_ON = {"FIL901": ("--disarm",), "FIL201": ("--salvage",), "FIL104": ("--format", "pth")}
"""The flags that let a file be written which is not written because of a rule."""

_FLAGS_OF_ERRORS = ("--salvage",)
"""Flags without a value that an error may name as the way on."""


def command_for(job: Job, report: Report) -> str:
    """The command that cures what remains; else the one that takes the file as it is."""
    given = job.treatment.command(job.item.name)
    if cure := next_command(report, Telling(Mode.REPAIR, command=given)):
        return _command(job, *shlex.split(cure)[len(given) :])
    codes = list(dict.fromkeys(finding.code for finding in report.remaining if finding.level > Level.NOTE))
    if refusal(report, checked_settings(job.treatment.settings)):
        for code in codes:
            if code in _WAYS_ON:
                return _command(job, *_WAYS_ON[code])
    if report.smoke is not None and report.smoke.passed is False:
        return _command(job, "--no-smoke")
    return _command(job, ignored=codes)


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
    _, _, name, *decided = repair_command(job.item.name, choices)
    return shlex.join((*job.again, "--only", name, *decided, *(flag for flag in flags if flag not in decided)))
