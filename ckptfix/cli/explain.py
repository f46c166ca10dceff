"""``ckptfix explain``: say what an error message means."""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ckptfix.cli.console import Console, write_output
from ckptfix.cli.program import Argument, Run
from ckptfix.core.finding import Blocks
from ckptfix.core.option import CHECK
from ckptfix.core.options import flag_text, library_settings, option_words
from ckptfix.errors import CkptfixError, Opt, UsageError

if TYPE_CHECKING:
    from ckptfix.core.report import Report

UNKNOWN = 1  # exit code for an unknown text
_MOST = 16_000_000  # bytes read from the end of a log, where the error is
_NAME_OF_LOG = re.compile(r"[^\s'\"]{1,200}\.(?:log|txt|out|err)")

ARGUMENTS = {
    "explain": (
        Argument(
            "text",
            "TEXT",
            "The message or the whole traceback, in quotes, or log files; without it, stdin is read.",
            required=False,
            many=True,
        ),
    )
}


def explain(run: Run, text: tuple[str, ...]) -> int:
    """Say what an error message means, and what to do.

    It knows messages of torch 0.3 to 2.13, safetensors, CUDA and other libraries about loading and running a
    checkpoint. Give the whole traceback, or a log that contains it. With --file, the checkpoint is checked too.

    Exit codes: 0 recognised; 1 not known; 2 the command is wrong, or the file cannot be read."""
    console, choices, file = run.console, run.choices, run.choices.get("file")
    with console.exiting_on_error(file or ""):
        given, form = _given(text, console), choices.get("output_format", "full")
        # Imported here because --help and --version do not need it.
        from ckptfix.explain import MessageContext, Verdict, judge, nearest
        from ckptfix.explain import explain as explain_text
        from ckptfix.explain.format import (
            concise_lines,
            full_lines,
            is_one_rank,
            is_refused,
            is_resumable,
            merge_command,
            reading_code,
            salvage_command,
            to_json,
            unknown_lines,
            verdict_lines,
        )
        from ckptfix.report.advice import Presentation

        report = _report(file, choices, console) if file is not None else None
        is_folder = file is not None and Path(file).is_dir()
        subject = MessageContext(
            file,
            option_words({name: choices[name] for name in ("model", "model_args", "like") if name in choices}),
            folder=file if file is not None and is_folder else "",
        )
        if isinstance(report, CkptfixError):
            subject = replace(subject, code="", is_unreadable=True, salvaging=salvage_command(report, file or ""))
        elif report is not None and file is not None:
            import ckptfix

            which = {name: choices[name] for name in ("weights", "member") if name in choices}
            merging = merge_command(report, choices)
            checkpoint = ckptfix.open_checkpoint(file, **which)
            subject = replace(
                subject,
                code=reading_code(report, file, which),
                entries=_entries(checkpoint.root),
                merging=merging,
                folder=checkpoint.path if checkpoint.folder and not is_folder else subject.folder,
                is_rank=is_one_rank(report),
                is_refused=is_refused(report),
                is_resumable=merging == "" or is_resumable(checkpoint),
                keeps_weights=any(Blocks.FILLING in finding.blocks for finding in report.findings),
            )
        explanation = explain_text(given, subject)
        close = nearest(given) if explanation is None else None
        verdict: Verdict | None = None
        if isinstance(report, CkptfixError):
            verdict = Verdict(f"it cannot be read: {report.worded(flag_text)}")
        elif report is not None:
            verdict = judge(explanation, report, Presentation(CHECK, console.verbose, choices))
        if form == "json":
            write_output(json.dumps(to_json(explanation, close, verdict), indent=2, allow_nan=False) + "\n")
        elif explanation is None:
            console.write(unknown_lines(close, is_checked=verdict is not None))
        elif form == "concise":
            console.write(concise_lines(explanation), plain=True)
        else:
            console.write(full_lines(explanation, None if console.verbose else 12))
        if verdict is not None and form != "json":
            lines = verdict_lines(verdict, is_folder)
            console.write(["", *lines] if form == "full" else lines)
        return 0 if explanation is not None else UNKNOWN


def _report(file: str, choices: Mapping[str, Any], console: Console) -> Report | CkptfixError:
    """Return the report on the file, or the error if it is unreadable. Raises ``UsageError`` if it is missing."""
    import ckptfix

    if not Path(file).exists():
        raise UsageError(Opt("file", file), ": there is no such file")
    console.progress(f"checking {file}")
    try:
        return ckptfix.check(file, **library_settings(choices, CHECK))
    except (ckptfix.UnreadableError, ckptfix.HostileError) as error:
        return error


def _entries(root: Any) -> frozenset[str]:
    """Return the names of a container's entries that are not None."""
    return frozenset(name for name in root if root[name] is not None) if isinstance(root, dict) else frozenset()


def _given(words: tuple[str, ...], console: Console) -> str:
    """Return the text to explain. Raises ``UsageError`` if it is blank, for a binary file, and for the name of a log
    that does not exist."""
    logs: list[Path] = []
    with suppress(OSError, ValueError):  # a message may be too long for a path, or have a NUL
        logs = [Path(word) for word in words if Path(word).is_file()]
    if len(words) == 1 and not logs and _NAME_OF_LOG.fullmatch(words[0]):
        raise UsageError(f"{words[0]}: there is no such log; give its path, or the message in quotes")
    if words == ("-",) or not words:
        if sys.stdin.isatty():
            console.note("paste the message, then press Ctrl-D (Ctrl-Z and Enter on Windows)")
        given = _decoded(sys.stdin.buffer.read()[-_MOST:])
    elif len(logs) == len(words):
        given = "\n".join(map(_content, logs))
    else:
        given = " ".join(words)
    if not given.strip():
        raise UsageError('no text to explain: ckptfix explain "RuntimeError: …", or a log on stdin')
    return given


def _content(log: Path) -> str:
    """Return the end of a log. Raises ``UsageError`` for a binary file."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _MOST))
        raw = file.read(_MOST)
    if b"\0" in raw[:512] and not _is_wide(raw):
        raise UsageError(f"{log} is not a text file; to examine a checkpoint, run `ckptfix check {log}`")
    return _decoded(raw)


def _decoded(raw: bytes) -> str:
    return raw.decode("utf-16" if _is_wide(raw) else "utf-8", "replace")


def _is_wide(raw: bytes) -> bool:
    return raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # as PowerShell redirects
