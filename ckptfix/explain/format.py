"""Formats an explanation for people and as JSON, and compares it with the report on a file."""

import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.finding import Blocks, Finding, Level, counted
from ckptfix.core.option import REPAIR
from ckptfix.core.options import command_words
from ckptfix.core.report import Report
from ckptfix.core.wording import shell_join
from ckptfix.errors import CkptfixError, Opt, WriteError
from ckptfix.explain.advice import FILE, FOLDER, MODEL, Advice
from ckptfix.explain.explanation import Explanation, KnownMessage
from ckptfix.reading.folders.folders import OF_TRAINING
from ckptfix.report.advice import Presentation, message_with_count, remedies_of, suggested
from ckptfix.report.key_lists import folded_lines
from ckptfix.report.style import Line, Span
from ckptfix.rules import FITTING, OF_FILES, OF_MISFITS, named
from ckptfix.writing.universal import universal_form

# What a plain torch.load reads. With another suffix, the file may be compressed, which the format does not show.
_OF_TORCH, _SUFFIXES = ("torch-zip", "torch-legacy"), (".pth", ".pt", ".ckpt", ".bin", ".pkl", ".pth.tar")


class Verdict(Struct, frozen=True):
    """Whether the file has the problem that the message is about, as a sentence.

    ``confirming`` are the findings that show it, ``others`` those about something else. ``command`` repairs what can be
    repaired, and is empty if nothing can; ``price`` is what it leaves untrained."""

    sentence: str
    confirming: tuple[Finding, ...] = ()
    others: tuple[Finding, ...] = ()
    command: str = ""
    price: str = ""


def judge(explanation: Explanation | None, report: Report, presentation: Presentation) -> Verdict:
    """Compare an explanation, None for an unknown message, with the report on the file."""
    codes = explanation.codes if explanation else ()
    confirming = tuple(finding for finding in report.findings if finding.code.startswith(codes)) if codes else ()
    others = tuple(finding for finding in report.findings if finding not in confirming)
    defects = [finding for finding in others if finding.level > Level.NOTE]
    is_about_file = explanation is not None and explanation.about_file
    merging = merge_command(report, presentation.choices)
    is_spread = merging != "" and (explanation is None or explanation.is_about_loading)
    if is_spread:
        sentence = _what_it_holds(report)
    elif confirming:
        holder = f"{_what_it_holds(report)} It" if is_about_file else report.source
        sentence = f"{holder} has this problem:"
    elif is_about_file:
        sentence = _what_it_holds(report)
    elif codes:
        sentence = f"{report.source} does not have this problem, but others:"
        if not defects:
            sentence = f"{report.source} does not have this problem. {_elsewhere(report, codes)}"
    elif defects and explanation is None:
        sentence = f"{report.source} has {counted(len(defects), 'defect')}, which may be the cause:"
    elif defects:
        sentence = f"The message is not about it; {report.source} has {counted(len(defects), 'defect')} of its own:"
    elif explanation:
        sentence = f"Nothing is wrong in {report.source} itself, so it is not at fault."
    else:
        limits = "" if report.target else " as far as ckptfix can see without your model (--model or --like)"
        sentence = f"{report.source}: nothing is wrong with it{limits}."
    words, price = next(suggested(report, presentation), ((), ""))
    command = shell_join(words)
    if is_spread and not words[3:]:  # a repair without options, which merging is too
        command = merging if explanation is None else ""
    return Verdict(sentence, confirming, others, command, price)


def _what_it_holds(report: Report) -> str:
    """Return what the file is and where its weights are, for messages about what no rule finds wrong."""
    tensors = counted(report.tensors, "tensor")
    kind = "a whole model" if _becomes_state_dict(report) else "a bare state_dict"
    place = f"{kind} of {tensors}" if report.container == "." else f"{tensors} under {report.container!r}"
    is_of_several = report.format in OF_TRAINING or report.format.startswith("sharded")
    if is_of_several and not Path(report.source).is_dir():
        return f"{report.source} is part of a {report.format} checkpoint that holds {place}."
    return f"{report.source} is a {report.format} {'folder' if is_of_several else 'file'} and holds {place}."


def merge_command(report: Report, choices: Mapping[str, Any]) -> str:
    """Return the command that puts the files of a training run together; empty for what is not a folder of them, or
    has files of which no whole can be made."""
    if report.format not in OF_TRAINING or is_refused(report):
        return ""
    parts = [finding for finding in report.findings if finding.name == "shard-of-weights"]
    needed = {
        name: value
        for finding in parts
        if finding.level is Level.ERROR
        for each in finding.remedies[:1]  # the others are other ways
        for name, value in each.options
    }
    return shell_join(command_words(REPAIR, report.source, {**needed, **choices, "output": "model.pth"}))


def salvage_command(error: CkptfixError, source: str) -> str:
    """Return the command that writes the intact part of an unreadable file, empty if the error offers none."""
    if Opt("salvage", True) not in error.args:
        return ""
    return shell_join(command_words(REPAIR, source, {"salvage": True, "output": "salvaged.pth"}))


def is_one_rank(report: Report) -> bool:
    """Return whether a file is one rank's part of the weights, without the other ranks."""
    if report.format in OF_TRAINING:
        return False
    return any(each.name == "shard-of-weights" and each.level is Level.ERROR for each in report.findings)


def is_refused(report: Report) -> bool:
    """Return whether no option makes a repair write a file, because of a defect such as copied ranks."""
    return any(
        Blocks.WRITING in each.blocks and not (each.is_fixable or any(remedy.options for remedy in remedies_of(each)))
        for each in report.findings
    )


def is_resumable(checkpoint: Checkpoint) -> bool:
    """Return whether a universal checkpoint can be written from it."""
    try:
        universal_form(checkpoint)
    except WriteError:
        return False
    return True


def reading_code(report: Report, file: str, choices: Mapping[str, str]) -> str:
    """Return the Python expression that reads the state_dict of the file: a call of its own library if a plain one
    reads these weights, otherwise of ckptfix. ``choices`` select the weights, as ``weights`` and ``member``."""
    path = json.dumps(file, ensure_ascii=False)
    defects = [each for each in report.findings if each.code.startswith(OF_FILES) and each.level > Level.NOTE]
    is_plain = not choices and not defects
    if is_plain and report.format in _OF_TORCH and file.endswith(_SUFFIXES):
        return f'torch.load({path}, map_location="cpu"){"".join(f"[{step!r}]" for step in report.place)}'
    if is_plain and report.format == "safetensors" and file.endswith(".safetensors"):
        return f"safetensors.torch.load_file({path})"
    given = "".join(f", {name}={text!r}" for name, text in choices.items())
    return f"ckptfix.open_checkpoint({path}{given}).state_dict()"


def _becomes_state_dict(report: Report) -> bool:
    """Return whether the file holds a pickled model instead of a dict."""
    texts = [text for finding in report.findings for text in finding.evidence.values() if isinstance(text, str)]
    return any(text.endswith("→ state_dict") for text in texts)


def _elsewhere(report: Report, codes: tuple[str, ...]) -> str:
    if named("several-state-dicts").code in codes and OF_MISFITS not in codes:
        place = "it is a bare state_dict" if report.container == "." else f"its weights are under {report.container}"
        return f"It holds one set of weights: {place}."
    if report.target is None and any(code.startswith(FITTING) for code in codes):
        return "Name your model too (--model or --like): names and shapes can only be compared with something."
    fits = f"It fits {report.target} as it is, so the" if report.target else "The"
    return f"{fits} message came from another file, another model, or another release."


VERSION = 1  # of the JSON form; raised when a field changes its meaning or goes away
_WIDTH = 100


def full_lines(explanation: Explanation, limit: int | None = 12) -> Iterator[Line]:
    """Yield the message, what it means and what to do. ``limit`` is the length of a key list, None for all."""
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
    if explanation.advice:
        yield (Span("what to do:", "strong"),)
    for advice in explanation.advice:
        yield from _advice_lines(advice)
    yield from _placeholder_lines(explanation)
    if explanation.others:
        yield f"also in the text: {', '.join(explanation.others)}"
    yield (Span(f"more: {explanation.source}", "faint"),)


def concise_lines(explanation: Explanation) -> Iterator[Line]:
    """Yield one line for each sentence of the cause, and one for each command or change of code."""
    for sentence, _ in explanation.causes:
        yield f"{explanation.name}: {sentence}"
    for advice in explanation.advice:
        if advice.command or advice.code:
            yield f"{explanation.name}: {'run' if advice.command else 'code'}: {advice.command or advice.code}"


def unknown_lines(close: tuple[KnownMessage, float] | None, is_checked: bool = False) -> Iterator[Line]:
    """Yield the answer to an unknown text. ``is_checked`` is whether a report on the file follows."""
    yield (Span("not recognised: ", "strong"), "the text contains no message that ckptfix knows.")
    if close is not None:
        record, _ = close
        yield from _wrapped(f"The nearest known message is {record.name}: {record.example}", 2)
        yield from _wrapped(
            f"If it is that: {record.cause.partition('. ')[0].replace('{', '').replace('}', '').rstrip('.')}.", 2
        )
    check = "" if is_checked else " To examine the file itself: ckptfix check FILE"
    yield from _wrapped(f"Paste the whole traceback, including its last line.{check}", 2)


def verdict_lines(verdict: Verdict, is_folder: bool = False) -> Iterator[Line]:
    """Yield the verdict on the file or folder, with its findings."""
    yield (Span("this folder: " if is_folder else "this file: ", "strong"), verdict.sentence)
    for finding in (*verdict.confirming, *verdict.others):
        level = finding.level.name.lower()
        yield ("  ", Span(finding.code, level), f" {finding.name} {level}: {message_with_count(finding)}")
    if verdict.command:
        yield ("  run: ", Span(verdict.command, "strong"))
    if verdict.price:
        yield ("       ", Span(verdict.price, "warning"))


def to_json(
    explanation: Explanation | None, close: tuple[KnownMessage, float] | None = None, verdict: Verdict | None = None
) -> dict[str, Any]:
    """Return the explanation as JSON data. An unknown text is not ``recognised``, and may have a ``nearest``."""
    data: dict[str, Any] = {"version": VERSION, "recognised": explanation is not None}
    if explanation is not None:
        data |= {
            "name": explanation.name,
            "message": explanation.said,
            "chain": explanation.chain or None,
            "causes": [{"text": text, "keys": list(keys)} for text, keys in explanation.causes],
            "advice": [
                {"text": advice.text, "command": advice.command or None, "code": advice.code or None}
                for advice in explanation.advice
            ],
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


def _advice_lines(advice: Advice) -> Iterator[Line]:
    if advice.command:
        yield ("  run: ", Span(advice.command, "strong"))
        yield from _wrapped(advice.text, 6)
    elif advice.code:
        yield ("  in your code: ", Span(advice.code, "strong"))
        yield from _wrapped(advice.text, 6)
    else:
        yield from _wrapped(advice.text, 2)


_PLACEHOLDERS = {
    FILE: "your checkpoint",
    FOLDER: "the folder of your checkpoint",
    "BASE": "the model that the adapter was trained on",
    "ADAPTER": "the file or folder of the adapter",
    "REFERENCE": "a checkpoint that loads",
    MODEL: "what builds your model, such as torchvision.models:resnet50",
}


def _placeholder_lines(explanation: Explanation) -> Iterator[Line]:
    words = {word for advice in explanation.advice for word in advice.command.split()}
    places = [f"{name} is {meaning}" for name, meaning in _PLACEHOLDERS.items() if name in words]
    if places:
        yield from _wrapped(f"({'; '.join(places)})", 2)


def _wrapped(text: str, indent: int) -> Iterator[str]:
    margin = " " * indent
    yield from textwrap.wrap(
        text, _WIDTH, initial_indent=margin, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
    )
