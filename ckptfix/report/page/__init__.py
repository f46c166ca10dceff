"""The report as a page: one HTML file that holds everything it shows, and loads nothing from the network.

A page is built from manifest records and lines of weights.jsonl as plain mappings, so it can be built again from the
files of a migration, and shows one checked file in the same way as ten thousand migrated ones. It is generated in
pieces; of each file, only its number and name stay in memory."""

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import resources
from itertools import count, islice
from pathlib import Path
from typing import Any

from ckptfix.errors import printable
from ckptfix.report.page.data import Layers, data_element, script_json
from ckptfix.report.page.entries import COLUMNS, Entries, record_of, record_of_error
from ckptfix.rules import RULES
from ckptfix.writing.atomic import OwnFile

__all__ = ["page_file", "page_pieces", "record_of", "record_of_error"]


PAGE_VERSION = 1
# Characters of a page for files and their weights. Files are never left out; weights are, those of healthy files first.
PAGE_LIMIT, LEAST_FOR_WEIGHTS = 12_000_000, 2_000_000
MARK = '<meta name="generator" content="ckptfix'  # among the first characters of every page that ckptfix writes
_ROWS_IN_ONE = 500
_STYLES = ("vendor/tabulator.min.css", "vendor/uplot.min.css", "page.css")
_SCRIPTS = ("vendor/tabulator.min.js", "vendor/uplot.min.js")
_OWN_SCRIPTS = ("text.js", "data.js", "chart.js", "layers.js", "file.js", "overview.js", "main.js")
_LICENCES = {"Tabulator": "vendor/tabulator.LICENSE", "uPlot": "vendor/uplot.LICENSE"}


def page_pieces(
    title: str,
    records: Iterable[Mapping[str, Any]],
    weights: Iterable[Mapping[str, Any]] = (),
    *,
    facts: Mapping[str, Any] | None = None,
    renames: Mapping[str, str] | None = None,
    dry_run: bool = False,
) -> Iterator[str]:
    """Yield the text of a self-contained page.

    ``records`` are lines of a manifest (``Record.to_json``), ``weights`` lines of ``weights.jsonl`` in any order, one
    for a file; those of files that no record names are ignored. Records and weights are read once and not kept, so that
    a page of many files takes little memory. ``facts`` describe the run by title: versions, date, command. ``renames``
    maps old names of files to new ones. ``dry_run`` says that nothing was written."""
    run = {
        "title": printable(title),
        "facts": [[str(name), str(value)] for name, value in (facts or {}).items()],
        "renames": dict(renames or {}),
        "dry_run": dry_run,
    }
    scripts = [*map(_asset, _SCRIPTS), "\n".join(map(_asset, _OWN_SCRIPTS))]
    yield from _template().generate(
        title=printable(title),
        version=PAGE_VERSION,
        styles=[_asset(name) for name in _STYLES],
        scripts=scripts,
        hashes=[_digest(script) for script in scripts],
        licences={name: _asset(path) for name, path in _LICENCES.items()},
        elements=_elements(run, records, weights),
    )


def _elements(
    run: Mapping[str, Any], records: Iterable[Mapping[str, Any]], weights: Iterable[Mapping[str, Any]]
) -> Iterator[str]:
    entries = Entries(dry_run=bool(run["dry_run"]))
    written = len(script_json(run))
    numbers: dict[str, int] = {}
    numbered = enumerate(records)
    for chunk in count():
        if not (some := list(islice(numbered, _ROWS_IN_ONE))):
            break
        for number, record in some:
            numbers[record["source"]] = number
            element = data_element(f"file-{number}", script_json(entries.details(number, record)))
            written += len(element)
            yield element
        yield data_element(f"rows-{chunk}", script_json([entries.row(record) for _, record in some]))
    layers = Layers(max(PAGE_LIMIT - written, LEAST_FOR_WEIGHTS))
    for line in weights:
        if line["source"] in numbers:
            yield from layers.elements(numbers.pop(line["source"]), line)
    manuals = {rule.code: rule.manual for rule in RULES if rule.code in entries.levels}
    found = {"levels": entries.levels, "commands": entries.commands, "manuals": manuals}
    yield data_element("run", script_json({**run, **found, "columns": COLUMNS, "left_out": layers.left_out}))


@cache
def _asset(name: str) -> str:
    text = (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")
    return re.sub(r"(?://|/\*)# sourceMappingURL=\S+(?: \*/)?\s*$", "", text)  # source maps are not shipped


@cache
def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_asset("page.html.jinja"))


def _digest(script: str) -> str:
    """Return the hash of a script for the page's Content-Security-Policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")


def page_file(file: str | Path) -> OwnFile:
    """Return the output file of a page; its ``refuse`` checks it before the work begins."""
    return OwnFile(Path(file), "report", MARK.encode("ascii"))
