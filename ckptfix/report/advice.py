"""What is left after a check or a repair, and the command for it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckptfix.core.edits import Rename, RenameModule
from ckptfix.core.finding import Finding, Fix, Level
from ckptfix.core.report import Report
from ckptfix.core.shell import no_option, typed
from ckptfix.report.style import Line, Span
from ckptfix.report.telling import Mode, Telling, is_fixable, needs_unsafe

_WEIGHTS = "--weights"
_NAMED = re.compile(rf"{_WEIGHTS} ([^\s,;]+)")
_WITH_VALUE = ("--fill", "--weights", "--for-torch", "--replace", "--dtype")


def advice_lines(report: Report, telling: Telling) -> Iterator[Line]:
    """What the user can do about each finding that remains, and one command for all that a command can do."""
    remaining = _remaining(report)
    if not remaining:
        if report.exit_code == 0 and telling.mode is not Mode.CHECK:
            yield (Span("left: nothing", "good"),)
        return
    yield (Span("left:", "strong"),)
    for finding in remaining:
        if text := _text(finding):
            yield ("  ", Span(finding.code, finding.level.name.lower()), f" {finding.name}: {text}")
    if command := next_command(report, telling):
        yield ("  run: ", Span(command, "strong"))
        yield from (("   or: ", Span(other, "strong")) for other in _other_commands(report, telling))


def next_command(report: Report, telling: Telling) -> str:
    """The repair that cures what remains, as far as one can; empty where there is none."""
    return typed(next_words(report, telling))


def next_words(report: Report, telling: Telling) -> tuple[str, ...]:
    """The same, word by word."""
    given = telling.command or ("ckptfix", "repair", no_option(report.source))
    remaining = _remaining(report)
    # Where names cannot be told before a set is picked, what else is amiss shows after that.
    remaining = [f for f in remaining if f.code.startswith("KEY") and _WEIGHTS in remedy_flags(f.remedy)] or remaining
    flags: dict[str, list[str]] = {}
    for finding in remaining:
        own = remedy_flags(finding.remedy)
        flags.update(own)
        if not own and needs_unsafe(finding):
            flags["--unsafe-fixes"] = []
    added = [word for flag, values in flags.items() if flag not in given for word in (flag, *values)]
    # The same command again would do the same again, except that a check has not done it yet.
    if not added and not (telling.mode is Mode.CHECK and any(map(is_fixable, remaining))):
        return ()
    return (*given, *added)


def _other_commands(report: Report, telling: Telling) -> Iterator[str]:
    """The same command for each other set of weights that a finding names."""
    words = next_words(report, telling)
    if _WEIGHTS not in words[len(telling.command) :]:
        return
    at = words.index(_WEIGHTS, len(telling.command)) + 1
    named = [name for finding in _remaining(report) for name in _NAMED.findall(finding.remedy)]
    for name in dict.fromkeys(named):
        if name not in (words[at], "NAME"):
            yield typed((*words[:at], name, *words[at + 1 :]))


def remedy_flags(remedy: str) -> dict[str, list[str]]:
    """The flags that a remedy begins with: ``--fill target takes …`` gives ``--fill`` and its value."""
    flags: dict[str, list[str]] = {}
    words = remedy.split()
    while words and words[0].startswith("--"):
        flag = words.pop(0)
        flags[flag] = [words.pop(0).partition("|")[0]] if flag in _WITH_VALUE and words else []
    return flags


def _remaining(report: Report) -> list[Finding]:
    return [finding for finding in report.remaining if finding.level > Level.NOTE]


def _text(finding: Finding) -> str:
    if finding.remedy:
        return finding.remedy
    if finding.fix is not None and needs_unsafe(finding):
        return f"--unsafe-fixes applies the fix, which {_risk(finding.fix)}"
    return "" if is_fixable(finding) else f"no automatic repair; see ckptfix rule {finding.code}"


def _risk(fix: Fix) -> str:
    """Why a fix is unsafe."""
    if fix.edits and all(isinstance(edit, (Rename, RenameModule)) for edit in fix.edits):
        return "gives keys other names, and nothing confirms that these are the right ones"
    return "invents, drops or changes values"
