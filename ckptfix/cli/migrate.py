"""``ckptfix migrate``: repair a whole zoo of checkpoints into a new one, or draft its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptfix.cli.console import Console, write_output
from ckptfix.cli.program import Argument, Run
from ckptfix.core.option import Scope
from ckptfix.core.options import BY_NAME, option_words
from ckptfix.core.settings import parse_size
from ckptfix.core.wording import no_option, shell_join
from ckptfix.errors import Opt, UsageError

if TYPE_CHECKING:
    from ckptfix.zoo.migrating import MakeEngine
    from ckptfix.zoo.zoo_toml import Table


ARGUMENTS = {
    "migrate": (
        Argument(
            "source",
            "SRC",
            "The old zoo: a folder, a file, a glob ('old/**/*.pth'), or a URL (s3://bucket/zoo). It is never modified.",
        ),
        Argument("destination", "DST", "The new zoo: a folder or a URL, laid out like the old one.", required=False),
    )
}

_LIST_LIMIT = 10


def migrate(run: Run, source: str, destination: str | None) -> int:
    """Repair a whole zoo of checkpoints into a new one, and say what became of each file.

    Run the same command again to continue where it was stopped.

    Exit codes: 0 all files are fine or repaired; 1 some need a decision; 2 some could not be read, or failed."""
    console, choices = run.console, run.choices
    with console.exiting_on_error():
        if choices.get("init"):
            return draft(console, source, destination, choices)
        if destination is None:
            raise UsageError("name the folder or URL for the new zoo: ckptfix migrate SRC DST")
        return _migrate(console, source, destination, choices, repair_options(run.given))


def _migrate(
    console: Console, source: str, destination: str, choices: Mapping[str, Any], given: Mapping[str, Any]
) -> int:
    from ckptfix.cli.zoo_output import MigrationMeter, closing_lines, save_page, write_json
    from ckptfix.report.page import page_file
    from ckptfix.zoo.items import read_list
    from ckptfix.zoo.job import Others
    from ckptfix.zoo.migrating import migrate as run
    from ckptfix.zoo.places import split_source

    place, pattern = split_source(source)
    table, decided = tables(console, place, choices, given)
    page = page_file(choices["report"]) if "report" in choices else None
    if page is not None:
        page.refuse()  # before hours of work, not after
    listed: Sequence[str] | None = choices.get("only")
    if "listed" in choices:
        listed = [*(listed or ()), *read_list(_read(choices["listed"]))]
    is_dry = bool(choices.get("dry_run"))
    if is_dry and any(each.model for each in (*table.treatments, table.rest)):
        console.note("a dry run skips the forward tests: files reported as repaired or fine may still fail them")
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
            memory=parse_size("memory", choices.get("memory")),
            temporary=parse_size("temporary", choices.get("temporary")),
            engine=_engine(choices),
            watch=meter.show,
        ) as migration:
            console.end_progress()
            for remark in migration.remarks:
                console.note(remark)
            if page is not None:
                save_page(page, migration, shell_join(again), is_dry)
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
    """Return a factory of the Ray engine if it was asked for; None for this machine's own."""
    if choices.get("engine") != "ray":
        if "address" in choices:
            raise UsageError(Opt("address"), " names a Ray cluster; add ", Opt("engine", "ray"))
        return None
    for name in ("memory", "temporary"):
        if name in choices:
            raise UsageError(Opt(name), " is a limit for one machine; a Ray cluster knows its nodes' memory")
    from ckptfix.zoo.cluster import RayEngine

    return lambda scratch: RayEngine(scratch, address=choices.get("address"), workers=choices.get("jobs"))


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise UsageError(Opt("listed", file), f": cannot be read: {error.strerror}") from error


def repair_options(choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that say how files are repaired, which zoo.toml may contain too."""
    return {name: value for name, value in choices.items() if BY_NAME[name].scope in (Scope.REPAIR, Scope.ONE_FILE)}


def tables(
    console: Console, place: str, choices: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[Table, Table | None]:
    """Return the table of a zoo, and one with the decisions about the files of ``--only``; None without decisions."""
    from ckptfix.zoo.zoo_toml import FILE_NAME, plain_table, read_table

    usual = Path(FILE_NAME)
    file = Path(choices["table"]) if choices.get("table") is not None else usual if usual.is_file() else None
    everything = repair_options(choices)
    if file is not None and choices.get("table") is None:
        console.note(f"using {file}")
    elif file is None and (unused := Path(place, FILE_NAME)).is_file():
        console.note(f"{unused} is not used; give it with --table {shell_join([str(unused)])}")

    def made(flags: Mapping[str, Any]) -> Table:
        table = plain_table(flags) if file is None else read_table(file, flags)
        if file is not None and "table" not in choices and any(each.model for each in (*table.treatments, table.rest)):
            # The table may be someone else's, so say that code runs.
            console.note(f"{file} names models; their code runs")
        return table

    if not choices.get("only") or not given:
        for name in given:
            if BY_NAME[name].scope is Scope.ONE_FILE:
                raise UsageError(Opt(name), " decides about single files; name them with ", Opt("only"))
        return made(everything), None
    common = {name: value for name, value in everything.items() if name not in given}
    return made(common), made(everything)


def draft(console: Console, source: str, destination: str | None, choices: Mapping[str, Any]) -> int:
    """Write a draft of zoo.toml: which files belong to which model, as far as the files show. Return the exit code."""
    from ckptfix.zoo.drafting import draft_table
    from ckptfix.zoo.items import list_zoo
    from ckptfix.zoo.places import open_place, split_source
    from ckptfix.zoo.zoo_toml import FILE_NAME

    goal = Path(choices.get("table") or FILE_NAME)
    if goal.exists():
        raise UsageError(f"{goal}: already exists; move it away, or name another file with ", Opt("table"))
    place_name, pattern = split_source(source)
    console.progress(f"examining {place_name}")
    place = open_place(place_name)
    items = list_zoo(place, () if pattern is None else (pattern,), choices.get("only"))
    text = draft_table(place, items, parse_size("temporary", choices.get("temporary")))
    with goal.open("x", encoding="utf-8") as file:
        file.write(text)
    console.end_progress()
    write_output(f"written: {goal}\n")
    named = () if goal == Path(FILE_NAME) else ("--table", str(goal))
    again = shell_join((no_option(source), no_option(destination or "NEW_ZOO"), *named))
    console.note(f"read it, correct it, and run: ckptfix migrate {again}")
    return 0
