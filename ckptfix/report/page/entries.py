"""Turns a record of the manifest into what the page shows: a row of the table, and the details of the file.

The report of a check or a repair becomes a record of the same form first."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from ckptfix.core.finding import Level
from ckptfix.core.option import REPAIR
from ckptfix.core.options import option_words
from ckptfix.core.plan import Plan
from ckptfix.core.report import Report, plain, remedy_from_json
from ckptfix.core.wording import shell_join
from ckptfix.errors import PlanError
from ckptfix.report.advice import Presentation, comparison_command, remedies_text, suggested
from ckptfix.report.edits import edit_lines
from ckptfix.report.inspection import size_on_disk
from ckptfix.report.key_lists import folded_lines
from ckptfix.report.likeness import likeness_commands, likeness_text
from ckptfix.report.page.data import CharacterBudget, digest, script_json
from ckptfix.report.style import cut, evidence_items

# The columns of the table, in order.
COLUMNS = "name outcome codes format tensors numel size share smoke seconds output error".split()
LISTS_LIMIT = 2_500_000  # characters for complete lists of renamed keys; later files only have folded ones
LEVELS = ("note", "warning", "error")
MOST_COMMANDS = 1000
_LINES = 24
_EVIDENCE_LENGTH = 300
_ERROR_LENGTH = 160
_WORTH_SHARING, _MOST_SHARED = 40, 100_000
_SHOWN = (
    *("error", "command", "target", "container", "versions", "sha256", "output_size", "output_sha256", "output_parts"),
    *("peak_memory", "attempts", "finished", "dry_run", "refused", "looks_like"),
)


class Entries:
    """Turns records into rows and details. A dry run shows repaired files as ones that can be repaired."""

    def __init__(self, lists_limit: int = LISTS_LIMIT, *, dry_run: bool = False) -> None:
        self._lists = CharacterBudget(lists_limit)
        self._seen: dict[tuple[str, bytes], int] = {}
        self._dry_run = dry_run
        self.levels: dict[str, str] = {}  # the worst level of each code in the files so far
        # The command of the recommended decision on each file that needs one, up to `MOST_COMMANDS`. A file whose
        # recommended decision needs a value from the user has none: its other command only accepts the file. Nor has
        # one that would leave weights untrained or do without lost ones: the page of the file shows its commands.
        self.commands: dict[str, str] = {}

    def row(self, record: Mapping[str, Any]) -> list[Any]:
        """Return a row of the table, in the order of ``COLUMNS``."""
        coverage, smoke, error = record.get("coverage"), record.get("smoke"), record.get("error")
        codes: list[str] = []
        for finding in record.get("findings") or ():
            code = f"{finding['code']} {finding['name']}"
            if code not in codes:
                codes.append(code)
            levels = (finding["level"], self.levels.get(finding["code"], LEVELS[0]))
            self.levels[finding["code"]] = max(levels, key=LEVELS.index)
        ways = record.get("decisions") or [{"command": record.get("command")}]
        command, outcome = ways[0]["command"], record["outcome"]
        is_costly = bool(ways[0].get("price")) or "salvage" in (ways[0].get("options") or {})
        if command and not is_costly and len(self.commands) < MOST_COMMANDS:
            self.commands[record["source"]] = command
        return [
            record["source"],
            "can be repaired" if self._dry_run and outcome == "repaired" else outcome,
            codes,
            record.get("format"),
            record.get("tensors"),
            record.get("numel"),
            record.get("size"),
            None if coverage is None else round(float(coverage["share"]), 6),
            None if smoke is None else _VERDICTS[smoke["passed"]],
            round(float(record.get("seconds") or 0), 3),
            record.get("output"),
            cut(error.removeprefix(f"{record['source']}: "), _ERROR_LENGTH) if error else None,
        ]

    def details(self, number: int, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the details of the file with this number, without empty fields.

        A field that equals an earlier file's is not repeated: ``same`` maps it to the number of that file."""
        edits = list(record.get("edits") or ())
        details = {name: record[name] for name in _SHOWN if record.get(name)} | {
            "findings": [_finding(finding) for finding in record.get("findings") or ()],
            "edits": _edit_lines(edits),
            "renames": [[edit["key"], edit["to"]] for edit in edits if edit.get("edit") == "rename"],
            "coverage": plain(record.get("coverage")),
            "smoke": plain(record.get("smoke")),
            "remarks": [*(record.get("remarks") or ())],
            "decisions": [_decision(way) for way in record.get("decisions") or ()],
            "obstacles": folded_lines(record.get("obstacles") or (), _LINES),
        }
        shown, same = {}, {}
        for name, value in details.items():
            if not value:
                continue
            text = script_json(value)
            known = name, digest(text)
            if known in self._seen:
                same[name] = self._seen[known]
            elif name != "renames" or self._lists.take(text):
                shown[name] = value
                if len(text) > _WORTH_SHARING and len(self._seen) < _MOST_SHARED:
                    self._seen[known] = number
        return {**shown, "same": same} if same else shown


_VERDICTS = {None: "no verdict", True: "passed", False: "failed"}


def _finding(finding: Mapping[str, Any]) -> dict[str, Any]:
    keys = tuple(finding.get("keys") or ())
    shown: dict[str, Any] = {name: finding[name] for name in ("code", "name", "level", "message")}
    shown |= {
        "fixed": finding.get("fixed"),
        "accepted": finding.get("accepted"),
        "fixable": finding.get("fixable"),
        "remedy": remedies_text(map(remedy_from_json, finding.get("remedies") or ())),
        "count": len(keys),
        "keys": _folded(keys),
        "evidence": list(evidence_items(plain(finding.get("evidence") or {}), _EVIDENCE_LENGTH)),
    }
    return {name: value for name, value in shown.items() if value}


def _decision(way: Mapping[str, Any]) -> dict[str, Any]:
    """Return a possible decision. Without a command, as the user has to give a value, its text starts with options."""
    options = "" if way["command"] else shell_join(option_words(way.get("options") or {}))
    text = ": ".join(filter(None, (options, way["text"])))
    return {"text": text, "command": way["command"], "price": way.get("price")}


@lru_cache(maxsize=512)
def _folded(keys: tuple[str, ...]) -> list[str]:
    """Return keys folded, from a cache: fine-tunes of one backbone have the same defects in the same keys."""
    return folded_lines(keys, _LINES)


def _edit_lines(edits: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the edits as the terminal shows them; only counted by kind if another version of ckptfix wrote them."""
    step = {"rule": "", "edits": list(edits)}
    try:
        return edit_lines(Plan.from_json({"ckptfix-plan": 1, "steps": [step]}).edits, _LINES)
    except PlanError:
        counts = Counter(str(edit.get("edit")) for edit in edits)
        return [f"{kind} ({count})" for kind, count in counts.items()]


def record_of(report: Report, presentation: Presentation, seconds: float = 0.0) -> dict[str, Any]:
    """Return the record of one report, in the form of a line of ``manifest.jsonl``."""
    ways = [
        {"text": "", "command": shell_join(words), "price": price} for words, price in suggested(report, presentation)
    ]
    likeness = report.likeness and {
        "text": likeness_text(report.likeness),
        "commands": list(likeness_commands(report.likeness, *comparison_command(report, presentation))),
    }
    return {
        **report.to_json(fixes=False),
        "size": size_on_disk(report.source),
        "outcome": _outcome(report, presentation),
        "command": ways[0]["command"] if ways else None,
        "decisions": ways,
        "looks_like": likeness,
        "error": None,
        "seconds": seconds,
    }


def record_of_error(source: str, message: str) -> dict[str, Any]:
    """Return the record of a file that could not be checked."""
    return {"source": source, "outcome": "unreadable", "error": message, "size": size_on_disk(source)}


def _outcome(report: Report, presentation: Presentation) -> str:
    if presentation.mode == REPAIR and not report.is_dry_run:
        if report.exit_code and not report.is_open and report.output is not None:
            return "partly untrained"
        return "needs a decision" if report.exit_code else "repaired" if report.edits else "already fine"
    if report.exit_code == 0:
        return "can be repaired" if report.edits else "already fine"
    left = [finding for finding in report.remaining if finding.level > Level.NOTE]
    is_repairable = left and all(finding.is_fixable and not finding.needs_unsafe for finding in left)
    return (
        "can be repaired"
        if is_repairable and not report.obstacles and not report.failed_forward
        else "needs a decision"
    )
