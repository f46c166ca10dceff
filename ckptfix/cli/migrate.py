"""``ckptfix migrate``: a whole zoo of checkpoints becomes one that loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptfix.cli.console import Console
from ckptfix.cli.program import Argument, Run
from ckptfix.cli.zoo_table import draft, of_a_repair, table_name, tables
from ckptfix.core.options import option_words
from ckptfix.core.settings import parse_size
from ckptfix.core.shell import no_option, typed
from ckptfix.errors import Opt, UsageError

if TYPE_CHECKING:
    from ckptfix.zoo.migrating import MakeEngine

ARGUMENTS = (
    Argument(
        "source",
        "SRC",
        "The old zoo: a folder, a file, a glob ('old/**/*.pth'), or a URL (s3://bucket/zoo). It is never written.",
    ),
    Argument("destination", "DST", "The new zoo: a folder or a URL. Its tree mirrors the old one.", required=False),
)

_LIST_LIMIT = 10


def migrate(run: Run, source: str, destination: str | None) -> int:
    """Repair a whole zoo of checkpoints into a new one, and say what became of each file.

    The same command again goes on where it was stopped, however that was. Exit code: 0 all are fine or repaired, 1
    some need a decision, 2 some could not be read or failed.
    """
    console, choices = run.console, run.choices
    with console.guarding():
        if choices.get("init"):
            return draft(console, source, destination, Path(choices.get("table") or table_name()), choices)
        if destination is None:
            raise UsageError("name the folder or URL that the new zoo goes to: ckptfix migrate SRC DST")
        return _migrate(console, source, destination, choices, of_a_repair(run.given))


def _migrate(
    console: Console, source: str, destination: str, choices: Mapping[str, Any], given: Mapping[str, Any]
) -> int:
    from ckptfix.cli.migration import MigrationMeter, PageOfZoo, closing_lines, write_json
    from ckptfix.zoo.job import Others
    from ckptfix.zoo.listing import read_list
    from ckptfix.zoo.migrating import migrate as run
    from ckptfix.zoo.places import split_source

    place, pattern = split_source(source)
    table, decided = tables(console, choices, given)
    page = PageOfZoo(choices["report"]) if "report" in choices else None
    listed: Sequence[str] | None = choices.get("only")
    if "listed" in choices:
        listed = [*(listed or ()), *read_list(_read(choices["listed"]))]
    is_dry = bool(choices.get("dry_run"))
    if is_dry and any(each.model for each in (*table.treatments, table.rest)):
        console.note("a dry run makes no forward test: what it calls repaired or fine may still fail one")
    meter = MigrationMeter(console, is_dry)
    console.progress(f"listing {place}")
    again = [
        "ckptfix",
        "migrate",
        no_option(place),
        no_option(destination),
        *(("--table", str(choices["table"])) if "table" in choices else ()),
        *(option_words(given) if decided is None else ()),
    ]
    try:
        with run(
            place,
            destination,
            table,
            patterns=() if pattern is None else (pattern,),
            listed=listed,
            decided=decided,
            again=again,
            others=Others(choices.get("others", "copy")),
            dry_run=is_dry,
            resume=choices.get("resume", True),
            verify=choices.get("verify", False),
            jobs=choices.get("jobs"),
            memory=_size("memory", choices.get("memory")),
            temporary=_size("temporary", choices.get("temporary")),
            engine=_engine(choices),
            watch=meter.show,
        ) as migration:
            console.end_progress()
            for remark in migration.remarks if migration.chosen is None else ():
                console.note(remark)
            if page is not None:
                page.save(migration, typed(again), is_dry)
            if choices.get("output_format") == "json":
                write_json(migration)
            else:
                console.write(closing_lines(migration, None if console.verbose else _LIST_LIMIT, is_dry))
            return migration.summary.exit_code
    except KeyboardInterrupt:
        console.end_progress()
        console.note(meter.how_to_go_on())
        raise


def _engine(choices: Mapping[str, Any]) -> MakeEngine | None:
    """What makes the engine that was asked for; None for that of this machine."""
    if choices.get("engine") != "ray":
        if "address" in choices:
            raise UsageError(Opt("address"), " names a Ray cluster; add ", Opt("engine", "ray"))
        return None
    for name in ("memory", "temporary"):
        if name in choices:
            raise UsageError(Opt(name), " is a budget of one machine; a Ray cluster knows what its nodes have")
    from ckptfix.zoo.cluster import RayEngine

    return lambda scratch: RayEngine(scratch, choices.get("address"), choices.get("jobs"))


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise UsageError(Opt("listed", file), f": cannot be read: {error.strerror}") from error


def _size(option: str, text: str | None) -> int | None:
    return None if text is None else parse_size(option, text)
