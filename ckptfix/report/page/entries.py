"""A record of the manifest as the page needs it: a row of the table, and the account of the file behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from ckptfix.core.plan import Plan
from ckptfix.core.report import plain, remedy_from_json
from ckptfix.errors import PlanError
from ckptfix.report.commands import remedies_text
from ckptfix.report.edits import edit_lines
from ckptfix.report.evidence import cut, evidence_items
from ckptfix.report.folding import folded_lines
from ckptfix.report.page.embedding import Budget, digest, script_json

COLUMNS = "name outcome codes format tensors numel size share smoke seconds output error".split()
"""What a row of the table holds, in this order."""

LISTS_LIMIT = 2_500_000
"""Characters for complete lists of renamed keys; a file beyond it has them folded alone."""

_LINES = 24
_EVIDENCE_LENGTH = 300
_ERROR_LENGTH = 160
_WORTH_SHARING, _MOST_SHARED = 40, 100_000
_TOLD = (
    *("error", "command", "target", "container", "versions", "sha256", "output_size", "output_sha256", "output_parts"),
    *("peak_memory", "attempts", "finished"),
)


class Entries:
    """Turns records into rows and accounts."""

    def __init__(self, lists_limit: int = LISTS_LIMIT) -> None:
        self._lists = Budget(lists_limit)
        self._seen: dict[tuple[str, bytes], int] = {}

    def row(self, record: Mapping[str, Any]) -> list[Any]:
        """The row of the table: the values of ``COLUMNS``."""
        coverage, smoke, error = record.get("coverage"), record.get("smoke"), record.get("error")
        codes: list[str] = []
        for finding in record.get("findings") or ():
            code = f"{finding['code']} {finding['name']}"
            if code not in codes:
                codes.append(code)
        return [
            record["source"],
            record["outcome"],
            codes,
            record.get("format"),
            record.get("tensors"),
            record.get("numel"),
            record.get("size"),
            None if coverage is None else round(float(coverage["share"]), 6),
            None if smoke is None else _verdict(smoke["passed"]),
            round(float(record.get("seconds") or 0), 3),
            record.get("output"),
            cut(error.removeprefix(f"{record['source']}: "), _ERROR_LENGTH) if error else None,
        ]

    def account(self, number: int, record: Mapping[str, Any]) -> dict[str, Any]:
        """What the own page of the file of this number shows; what is empty is left out.

        What is word for word as in a file before it is not written again: ``same`` gives the number of that file.
        """
        edits = list(record.get("edits") or ())
        account = {name: record[name] for name in _TOLD if record.get(name)} | {
            "findings": [_finding(finding) for finding in record.get("findings") or ()],
            "edits": _edit_lines(edits),
            "renames": [[edit["key"], edit["to"]] for edit in edits if edit.get("edit") == "rename"],
            "coverage": plain(record.get("coverage")),
            "smoke": plain(record.get("smoke")),
            "remarks": [*(record.get("remarks") or ())],
            "obstacles": folded_lines(record.get("obstacles") or (), _LINES),
        }
        told, same = {}, {}
        for name, value in account.items():
            if not value:
                continue
            text = script_json(value)
            known = name, digest(text)
            if known in self._seen:
                same[name] = self._seen[known]
            elif name != "renames" or self._lists.take(text):
                told[name] = value
                if len(text) > _WORTH_SHARING and len(self._seen) < _MOST_SHARED:
                    self._seen[known] = number
        return {**told, "same": same} if same else told


def _verdict(passed: bool | None) -> str:
    return "no verdict" if passed is None else "passed" if passed else "failed"


def _finding(finding: Mapping[str, Any]) -> dict[str, Any]:
    keys = tuple(finding.get("keys") or ())
    told: dict[str, Any] = {name: finding[name] for name in ("code", "name", "level", "message")}
    told |= {
        "fixed": finding.get("fixed"),
        "fixable": finding.get("fixable"),
        "remedy": remedies_text(map(remedy_from_json, finding.get("remedies") or ())),
        "count": len(keys),
        "keys": _folded(keys),
        "evidence": list(evidence_items(plain(finding.get("evidence") or {}), _EVIDENCE_LENGTH)),
    }
    return {name: value for name, value in told.items() if value}


@lru_cache(maxsize=512)
def _folded(keys: tuple[str, ...]) -> list[str]:
    """Fine-tunes of one backbone have the same defect under the same names."""
    return folded_lines(keys, _LINES)


def _edit_lines(edits: Sequence[Mapping[str, Any]]) -> list[str]:
    """The edits in few lines, as the terminal shows them; by their number where another version wrote them."""
    step = {"rule": "", "edits": list(edits)}
    try:
        return edit_lines(Plan.from_json({"ckptfix-plan": 1, "steps": [step]}).edits, _LINES)
    except PlanError:
        counts: dict[str, int] = {}
        for edit in edits:
            counts[str(edit.get("edit"))] = counts.get(str(edit.get("edit")), 0) + 1
        return [f"{kind} ({count})" for kind, count in counts.items()]
