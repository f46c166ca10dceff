"""What the user has to decide about a file, as data and as the commands that carry it out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptfix.core.finding import Finding, Level, Placeholder, Remedy
from ckptfix.core.options import Scope, option_words, scope_of
from ckptfix.core.report import Report
from ckptfix.core.shell import no_option, typed
from ckptfix.engine.delivery import refusal
from ckptfix.engine.validation import parsed_settings
from ckptfix.errors import CkptfixError
from ckptfix.report.advice import recommended, remedies_of, with_remedies
from ckptfix.smoke.outcome import ENVIRONMENT
from ckptfix.zoo.job import Job

KEEP = "keeps it as it is, and the findings in the manifest"


def accepted(job: Job, report: Report) -> list[Finding]:
    """Return the findings that the user accepts: they stay in the report, and stop nothing."""
    return list(filter(report.is_accepted, report.remaining))


def is_smoke_refused(job: Job, report: Report) -> bool:
    """Return whether the forward test failed, and the user did not accept what it found."""
    found = [finding for finding in report.remaining if finding.code.startswith("RUN") and finding.level > Level.NOTE]
    is_accepted = bool(found) and not [finding for finding in found if finding not in accepted(job, report)]
    return report.smoke is not None and report.smoke.passed is False and not is_accepted


def is_refused(job: Job, report: Report) -> bool:
    """Return whether no file may be written, for a reason that the report has."""
    return is_smoke_refused(job, report) or bool(refusal(report, parsed_settings(job.treatment.settings)))


def is_open(job: Job, report: Report) -> bool:
    """Return whether something is left to decide."""
    return is_refused(job, report) or bool(_left(job, report))


def _left(job: Job, report: Report) -> list[Finding]:
    settled = accepted(job, report)
    return [finding for finding in report.remaining if finding.level > Level.NOTE and finding not in settled]


def decisions_for(job: Job, report: Report) -> list[dict[str, Any]]:
    """Return the ways to settle a file, the recommended one first: repairs, and then to accept it as it is."""
    given, left = job.treatment.choices, _left(job, report)
    best = recommended(report)
    ways = [_way(job, best, "; ".join(remedy.text for remedy in best))]
    ways += [_way(job, [remedy], remedy.text) for finding in left for remedy in remedies_of(finding)]
    if not refusal(report, parsed_settings(job.treatment.settings)):
        codes = dict.fromkeys((*given.get("accept", ()), *(finding.code for finding in left)))
        is_of_machine = fault_of_the_machine(job, report) is not None
        options = {"smoke": False} if is_of_machine or not codes else {"accept": list(codes)}
        ways.append({"options": options, "text": KEEP, "command": command_with(job, options)})
    found: dict[str, dict[str, Any]] = {}
    for way in ways:
        if way["options"] or way["text"]:
            found.setdefault(repr(way["options"] or way["text"]), way)
    return sorted(found.values(), key=lambda way: way["command"] is None)


def _way(job: Job, remedies: Iterable[Remedy], text: str) -> dict[str, Any]:
    """Remedies as options that were not given yet, and their command if it is complete."""
    remedies, given = list(remedies), job.treatment.choices
    merged = with_remedies(given, remedies)
    added = {name: value for name, value in merged.items() if name not in given or given[name] != value}
    is_complete = bool(added) and all(remedy.is_complete for remedy in remedies)
    shown = {name: str(value) if isinstance(value, Placeholder) else value for name, value in added.items()}
    return {"options": shown, "text": text, "command": command_with(job, added) if is_complete else None}


def first_command(decisions: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the command of the recommended decision that has one."""
    return next((decision["command"] for decision in decisions if decision["command"]), None)


def decisions_after_error(job: Job, error: CkptfixError) -> list[dict[str, Any]]:
    """Return what an error advises for a single file: all options together, or one way for each value of an option."""
    named = [option for option in error.options if scope_of(option.name) is Scope.ONE_FILE and option.value is not None]
    names = dict.fromkeys(option.name for option in named)
    if len(names) < len(named):
        ways: list[dict[str, Any]] = [{option.name: option.value} for option in named]
    else:
        ways = [{option.name: option.value for option in named}] if named else []
    return [{"options": options, "text": "", "command": command_with(job, options)} for options in ways]


def fault_of_the_machine(job: Job, report: Report) -> str | None:
    """Return why the forward test failed, if this machine is to blame and not the file: memory ran out, or the GPU is
    gone. That is not a decision: the next run tries again."""
    if report.smoke is None or report.smoke.passed is not False:
        return None
    for finding in report.remaining:
        if finding.evidence.get("blame") == ENVIRONMENT:
            return f"{job.item.name}: {finding.message}; fix that and run the same command again"
    return None


def command_with(job: Job, options: Mapping[str, Any]) -> str:
    """Return the migration of only this file with these options: a decision that later runs keep to.

    It takes the place of an earlier one, and so repeats what that one said."""
    words = option_words({**(job.decision or {}), **options})
    return typed((*job.again, "--only", no_option(job.item.name), *words))
