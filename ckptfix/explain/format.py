"""An explanation for people and for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from ckptfix.explain.case import Verdict, finding_text
from ckptfix.explain.explanation import MODEL, Explanation
from ckptfix.explain.records import Advice, Record
from ckptfix.report.folding import folded_lines
from ckptfix.report.style import Line, Span

VERSION = 1
"""The version of the JSON form; it grows when a field changes its meaning or goes away."""

_WIDTH = 100


def full_lines(explanation: Explanation, limit: int | None = 12) -> Iterator[Line]:
    """The explanation: the message, what it means, what to do. ``limit`` is the most lines of a key list."""
    yield (Span(f"{explanation.name}: ", "strong"), Span(explanation.said, "faint"))
    if explanation.chain:
        yield f"  ({explanation.chain})"
    yield ""
    yield (Span("what it means:", "strong"),)
    for sentence, keys in explanation.causes:
        yield from _wrapped(sentence, 2)
        lines = list(keys[:limit]) if any(" " in key for key in keys) else folded_lines(keys, limit)
        yield from (f"    {line}" for line in lines)
        if any(" " in key for key in keys) and limit is not None and len(keys) > limit:
            yield f"    … and {len(keys) - limit} more"
    yield ""
    yield (Span("what to do:", "strong"),)
    for advice in explanation.advice:
        yield from _advice_lines(advice)
    yield from _placeholder_lines(explanation)
    if explanation.others:
        yield f"also in the text: {', '.join(explanation.others)}"
    yield (Span(f"more: {explanation.source}", "faint"),)


def concise_lines(explanation: Explanation) -> Iterator[Line]:
    """One line for each sentence of the cause, and one for each command or change of code."""
    for sentence, _ in explanation.causes:
        yield f"{explanation.name}: {sentence}"
    for advice in explanation.advice:
        if advice.command or advice.code:
            yield f"{explanation.name}: {'run' if advice.command else 'code'}: {advice.command or advice.code}"


def unknown_lines(close: tuple[Record, float] | None) -> Iterator[Line]:
    """What is said of a text that is not known."""
    yield (Span("not recognised: ", "strong"), "no message that ckptfix knows is in this text.")
    if close is not None:
        record, _ = close
        yield from _wrapped(f"The nearest one that it knows is {record.name}: {record.example}", 2)
        yield from _wrapped(
            f"If it is that: {record.cause.partition('. ')[0].replace('{', '').replace('}', '').rstrip('.')}.", 2
        )
    yield from _wrapped(
        "Paste the whole traceback, including its last line. To examine the file itself: ckptfix check FILE",
        2,
    )


def verdict_lines(verdict: Verdict) -> Iterator[Line]:
    """What the check of the file says."""
    yield (Span("this file: ", "strong"), verdict.sentence)
    for finding in (*verdict.confirming, *verdict.others):
        level = finding.level.name.lower()
        yield ("  ", Span(finding.code, level), f" {finding.name} {level}: {finding_text(finding)}")
    if verdict.command:
        yield ("  run: ", Span(verdict.command, "strong"))


def to_json(
    explanation: Explanation | None, close: tuple[Record, float] | None = None, verdict: Verdict | None = None
) -> dict[str, Any]:
    """The explanation as plain data. ``recognised`` is false for an unknown text, which may have a ``nearest``."""
    data: dict[str, Any] = {"version": VERSION, "recognised": explanation is not None}
    if explanation is not None:
        data |= {
            "name": explanation.name,
            "message": explanation.said,
            "chain": explanation.chain or None,
            "causes": [{"text": text, "keys": list(keys)} for text, keys in explanation.causes],
            "advice": [_advice_json(advice) for advice in explanation.advice],
            "codes": list(explanation.codes),
            "others": list(explanation.others),
            "file": explanation.file,
            "source": explanation.source,
        }
    data["nearest"] = None
    if close is not None:
        record, likeness = close
        data["nearest"] = {"name": record.name, "message": record.example, "likeness": round(likeness, 3)}
    if verdict is not None:
        data["verdict"] = {
            "text": verdict.sentence,
            "confirming": [finding.code for finding in verdict.confirming],
            "others": [finding.code for finding in verdict.others],
            "command": verdict.command or None,
        }
    return data


def _advice_json(advice: Advice) -> Mapping[str, str | None]:
    return {"text": advice.text, "command": advice.command or None, "code": advice.code or None}


def _advice_lines(advice: Advice) -> Iterator[Line]:
    if advice.command:
        yield ("  run: ", Span(advice.command, "strong"))
        yield from _wrapped(advice.text, 6)
    elif advice.code:
        yield ("  in your code: ", Span(advice.code, "strong"))
        yield from _wrapped(advice.text, 6)
    else:
        yield from _wrapped(advice.text, 2)


def _placeholder_lines(explanation: Explanation) -> Iterator[Line]:
    commands = " ".join(advice.command for advice in explanation.advice)
    places = []
    if " FILE" in commands:
        places.append("FILE is your checkpoint")
    if MODEL in commands:
        places.append(f"{MODEL} is what builds your model, such as torchvision.models:resnet50")
    if places:
        yield from _wrapped(f"({'; '.join(places)})", 2)


def _wrapped(text: str, indent: int) -> Iterator[str]:
    margin = " " * indent
    yield from textwrap.wrap(
        text, _WIDTH, initial_indent=margin, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
    )
