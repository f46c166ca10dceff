"""The table of a zoo on the command line: the file, the flags over it, and its first draft."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptfix.cli.console import Console, write_output
from ckptfix.core.options import Scope, scope_of
from ckptfix.core.settings import parse_size
from ckptfix.core.shell import no_option, typed
from ckptfix.errors import Opt, UsageError

if TYPE_CHECKING:
    from ckptfix.zoo.table import Table


def of_a_repair(choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that say how files are repaired, which a table may have too."""
    return {name: value for name, value in choices.items() if scope_of(name) in (Scope.REPAIR, Scope.ONE_FILE)}


def table_name() -> str:
    """What the table is called where nobody names it."""
    from ckptfix.zoo.table import FILE_NAME

    return FILE_NAME


def _table_file(choices: Mapping[str, Any]) -> Path | None:
    if choices.get("table") is not None:
        return Path(choices["table"])
    usual = Path(table_name())
    return usual if usual.is_file() else None


def tables(console: Console, choices: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[Table, Table | None]:
    """The table, and the same with what is decided for single files."""
    from ckptfix.zoo.table import plain_table, read_table

    file, everything = _table_file(choices), of_a_repair(choices)
    if file is not None and choices.get("table") is None:
        console.note(f"the table of the zoo is {file}")

    def made(flags: Mapping[str, Any]) -> Table:
        table = plain_table(flags) if file is None else read_table(file, flags)
        if file is not None and "table" not in choices and any(each.model for each in (*table.treatments, table.rest)):
            # Whoever runs ckptfix in a folder that somebody else made should know that its code runs.
            console.note(f"{file} names models; their code runs")
        return table

    if not choices.get("only") or not given:
        for name in given:
            if scope_of(name) is Scope.ONE_FILE:
                raise UsageError(Opt(name), " is a decision about single files; name them with ", Opt("only"))
        return made(everything), None
    common = {name: value for name, value in everything.items() if name not in given}
    return made(common), made(everything)


def draft(console: Console, source: str, destination: str | None, goal: Path, choices: Mapping[str, Any]) -> int:
    """Look at a zoo and write the table that says what belongs to what, as far as its files tell."""
    from ckptfix.zoo.drafting import draft_table
    from ckptfix.zoo.listing import list_zoo
    from ckptfix.zoo.places import open_place, split_source

    if goal.exists():
        raise UsageError(f"{goal}: exists already; move it away, or name another file with ", Opt("table"))
    place_name, pattern = split_source(source)
    console.progress(f"looking at {place_name}")
    place = open_place(place_name)
    items = list_zoo(place, () if pattern is None else (pattern,), choices.get("only"))
    room = parse_size("temporary", choices["temporary"]) if "temporary" in choices else None
    text = draft_table(place, items, room)
    with goal.open("x", encoding="utf-8") as file:
        file.write(text)
    console.end_progress()
    write_output(f"written: {goal}\n")
    named = () if goal == Path(table_name()) else ("--table", str(goal))
    again = typed((no_option(source), no_option(destination or "NEW_ZOO"), *named))
    console.note(f"read it, correct it, and run: ckptfix migrate {again}")
    return 0
