"""The words with which results show themselves at a prompt and in a notebook."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.display import Form, Row, show_as
from ckptfix.core.edits import Edit
from ckptfix.core.options import CHECK
from ckptfix.core.plan import Plan
from ckptfix.core.rename_map import RenameMap
from ckptfix.core.report import Call, Report
from ckptfix.report.style import Line, TextFormat

if TYPE_CHECKING:
    from ckptfix.report.advice import Presentation

# What makes the words is imported when somebody wants to see them.


def text_lines(lines: Iterable[Line]) -> list[str]:
    """Return lines as plain text."""
    return TextFormat().write(lines).splitlines()


def report_lines(report: Report) -> list[str]:
    """Return what the terminal shows of a report."""
    from ckptfix.report.terminal import full_lines

    return text_lines(full_lines(report, _presentation_of(report)))


def _presentation_of(report: Report) -> Presentation:
    from ckptfix.report.advice import Mode, Presentation

    call = report.call
    if call is None:
        return Presentation(Mode.REPAIR if report.edits or report.output else Mode.CHECK)
    return Presentation(Mode.CHECK if call.function == CHECK else Mode.REPAIR, choices=call.given, call=call)


def report_rows(report: Report) -> Iterator[Row]:
    """Yield a row for each finding."""
    from ckptfix.report.advice import mark, message_with_count

    for finding in report.findings:
        done = mark(finding, report, _presentation_of(report)).strip("[]")
        yield (finding.code, finding.level.name.lower(), message_with_count(finding), done)


def log_edits(source: str, edits: Sequence[Edit]) -> None:
    """Log what is renamed, filled and otherwise changed: without it, keys change in silence in a training that starts.

    Nobody listens in a process that has not imported ``logging``, so it is not imported for this."""
    logging = sys.modules.get("logging")
    if logging is None or not edits or not (logger := logging.getLogger("ckptfix")).isEnabledFor(logging.INFO):
        return
    from ckptfix.report.edits import edit_lines

    for line in edit_lines(edits):
        if not line.startswith(" "):
            logger.info("%s: %s", source, line)


def _lines(shown: Checkpoint | Plan | RenameMap) -> list[str]:
    if isinstance(shown, Checkpoint):
        from ckptfix.report.advice import Presentation
        from ckptfix.report.inspection import inspection_lines

        return text_lines(inspection_lines(shown, presentation=Presentation(call=Call(CHECK, (shown.path,)))))
    from ckptfix.report.edits import edit_lines, map_lines

    return [repr(shown), *(edit_lines(shown.edits) if isinstance(shown, Plan) else map_lines(shown))]


show_as(Report, Form(report_lines, report_rows))
for kind in (Checkpoint, Plan, RenameMap):
    show_as(kind, Form(_lines))
