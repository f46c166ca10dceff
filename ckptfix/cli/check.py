"""``ckptfix check``: say what is wrong with checkpoints and change nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ckptfix.cli.output import ReportWriter, page_writer
from ckptfix.cli.program import Argument, Run
from ckptfix.core.options import CHECK, library_settings
from ckptfix.core.report import Report
from ckptfix.report.telling import Mode, Telling

ARGUMENTS = (Argument("paths", "PATH", "The checkpoints.", many=True),)


def check(run: Run, paths: Sequence[str]) -> int:
    """Report what is wrong with checkpoints, and change nothing.

    Without --model or --like, only defects of the file itself are found.
    """
    console, choices = run.console, run.choices
    with console.guarding():
        arguments = library_settings(choices, CHECK)
        page = page_writer(choices)
        writer = ReportWriter(console, choices.get("output_format", "full"), page)
        for number, path in enumerate(paths, 1):
            console.progress(f"checking {path}{f' ({number} of {len(paths)})' if len(paths) > 1 else ''}")
            telling = Telling(Mode.CHECK, console.verbose, choices)
            writer.account(path, telling, partial(_check, path, arguments))
            if console.is_hopeless:
                break
        writer.close()
    return writer.exit_code


def _check(path: str, arguments: Mapping[str, Any]) -> Report:
    # Here and not above: --help and --version need nothing of the library.
    import ckptfix

    return ckptfix.check(path, **arguments)
