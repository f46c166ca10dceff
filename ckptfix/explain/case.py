"""What a check of the very file says about a message."""

from __future__ import annotations

from dataclasses import dataclass

from ckptfix.core.finding import Finding, Level, counted
from ckptfix.core.report import Report
from ckptfix.explain.explanation import Explanation
from ckptfix.report.advice import next_command
from ckptfix.report.telling import Telling, message_with_count

_OF_TORCH = ("torch-zip", "torch-legacy", "torch-tar")

_OF_TARGET = ("KEY", "BUF", "FIT")
"""The families of rules that compare with a model."""


@dataclass(frozen=True)
class Verdict:
    """Whether the file has what the message tells of.

    ``sentence`` says so; ``confirming`` are the findings that do, ``others`` those that are about something else.
    ``command`` mends what can be mended, and is empty where there is none.
    """

    sentence: str
    confirming: tuple[Finding, ...] = ()
    others: tuple[Finding, ...] = ()
    command: str = ""


def judge(explanation: Explanation | None, report: Report, telling: Telling) -> Verdict:
    """Hold an explanation against the report of the file; None for a message that is not known."""
    codes = explanation.codes if explanation else ()
    confirming = tuple(finding for finding in report.findings if finding.code.startswith(codes)) if codes else ()
    others = tuple(finding for finding in report.findings if finding not in confirming)
    defects = [finding for finding in others if finding.level > Level.NOTE]
    if confirming and explanation and explanation.about_file:
        sentence = f"{_what_it_holds(report)} It has what the message tells of:"
    elif confirming:
        sentence = f"{report.source} has what the message tells of:"
    elif codes and not defects and not (explanation and explanation.about_file):
        sentence = f"{report.source} shows nothing of the kind. {_elsewhere(report, codes)}"
    elif codes and not (explanation and explanation.about_file):
        sentence = f"{report.source} shows nothing of the kind, but something else:"
    elif explanation is not None and explanation.about_file:
        sentence = _what_it_holds(report)
    elif defects and explanation is None:
        sentence = f"{report.source} has {counted(len(defects), 'defect')}, which may be the cause:"
    elif defects:
        sentence = (
            f"The message is not about the file; {report.source} has {counted(len(defects), 'defect')} of its own:"
        )
    elif explanation:
        sentence = f"Nothing is wrong in {report.source} itself, which agrees with this: the file is not at fault."
    else:
        sentence = f"{report.source}: nothing is wrong with it{_as_far(report)}."
    return Verdict(sentence, confirming, others, next_command(report, telling))


def _what_it_holds(report: Report) -> str:
    """What the file is and where its weights are: for messages about that, no rule finds anything wrong."""
    tensors = counted(report.tensors, "tensor")
    place = f"a bare state_dict of {tensors}" if report.container == "." else f"{tensors} under {report.container!r}"
    steps = steps_to(report)
    return f"{report.source} is a {report.format} file and holds {place}{f', torch.load(…){steps}' if steps else ''}."


def steps_to(report: Report) -> str:
    """Return the subscripts that lead from what torch.load returns to the state_dict; empty if none do."""
    steps = "".join(f"[{step!r}]" for step in report.place)
    becomes = [text for finding in report.findings for text in finding.evidence.values() if isinstance(text, str)]
    is_state_dict = not any(text.endswith("→ state_dict") for text in becomes)
    return steps if is_state_dict and report.format in _OF_TORCH else ""


def finding_text(finding: Finding) -> str:
    """A finding in one line without its code and name."""
    return message_with_count(finding)


def _elsewhere(report: Report, codes: tuple[str, ...]) -> str:
    if "FIL101" in codes and "FIT" not in codes:
        place = "it is a bare state_dict" if report.container == "." else f"its weights stand under {report.container}"
        return f"It holds one set of weights: {place}."
    if report.target is None and any(code.startswith(_OF_TARGET) for code in codes):
        return "Name your model too (--model or --like): names and shapes can only be compared with something."
    fits = f"It fits {report.target} as it is, so the" if report.target else "The"
    return f"{fits} message came from another file, another model, or another release."


def _as_far(report: Report) -> str:
    return "" if report.target else " as far as it can be seen without your model (--model or --like)"
