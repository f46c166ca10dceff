"""How a result is displayed: one line at the prompt, the terminal's text when printed, a table in a notebook.

The text is made in ``report``, which ``core`` cannot import, so ``report`` registers it here."""

from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct

Row = tuple[str, ...]

_MOST_ROWS = 30


class Form(Struct, frozen=True):
    """How to display an object: ``lines`` when printed, ``rows`` as a table; None makes the rows from the lines."""

    lines: Callable[[Any], Iterable[str]]
    rows: Callable[[Any], Iterable[Row]] | None = None


_FORMS: dict[type, Form] = {}


def show_as(kind: type, form: Form) -> None:
    """Register how to display the objects of a class."""
    _FORMS[kind] = form


class Displayed:
    """Base class of results with a registered display; the ``repr`` of a subclass is one line."""

    def __str__(self) -> str:
        form = _FORMS.get(type(self))
        return repr(self) if form is None else "\n".join(form.lines(self))

    def _repr_html_(self) -> str:
        from html import escape

        title, *lines = str(self).splitlines() or [""]
        form = _FORMS.get(type(self))
        rows = list(form.rows(self)) if form is not None and form.rows is not None else _rows(lines)
        more = f"<tr><td>… and {len(rows) - _MOST_ROWS} more</td></tr>" if len(rows) > _MOST_ROWS else ""
        cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows[:_MOST_ROWS])
        table = "".join(f"<tr>{row}</tr>" for row in cells)
        return f'<table style="white-space: pre-line"><caption>{escape(title)}</caption>{table}{more}</table>'


def _rows(lines: Iterable[str]) -> list[Row]:
    """Return a row for each line ``name: text``; the indented lines below it go into its second cell."""
    rows: list[list[str]] = []
    for line in filter(None, lines):
        if line.startswith(" ") and rows:
            rows[-1][1:] = ["\n".join([*rows[-1][1:], line.strip()])]
        else:
            rows.append(line.rstrip(":").split(": ", 1))
    return [tuple(row) for row in rows]
