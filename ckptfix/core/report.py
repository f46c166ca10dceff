"""The report: what was found, what was done about it, what is left, and so the exit code."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from ckptfix.core.display import Displayed
from ckptfix.core.finding import Blocks, Finding, Fix, Level, Placeholder, Remedy, counted
from ckptfix.errors import UsageError

if TYPE_CHECKING:
    import pandas

    from ckptfix.core.checkpoint import Checkpoint
    from ckptfix.core.coverage import Coverage
    from ckptfix.core.edits import Edit
    from ckptfix.core.likeness import Likeness
    from ckptfix.core.plan import Plan
    from ckptfix.core.settings import Settings
    from ckptfix.core.smoke_result import SmokeResult
    from ckptfix.core.spec import TensorStatistics, TypedShape

REPORT_VERSION = 1  # of the JSON form; incremented when a field changes its meaning or is removed


class Call(Struct, frozen=True):
    """A call of a library function: its positional arguments (``places``) and keyword arguments (``given``). An object
    without a literal, such as a model, is a placeholder with the name of its parameter."""

    function: str
    places: tuple[object, ...]
    given: Mapping[str, Any] = {}

    @classmethod
    def of(cls, function: str, source: object, model: object, given: Mapping[str, Any], settings: Settings) -> Call:
        """Return the call of ``check`` or ``repair``, without arguments that have their defaults. Lists of texts are
        taken from ``settings``, because they may be given as one text."""
        kept = {}
        for name, value in given.items():
            if value not in (None, False, (), []):
                kept[name] = _literal(getattr(settings, name, value) if name != "rename_map" else value, name)
        off = {name: False for name in ("values", "smoke") if given.get(name) is False}
        name = "state_dict" if isinstance(source, Mapping) else "checkpoint"
        return cls(
            function, (_literal(source, name), *(() if model is None else (_literal(model, "model"),))), kept | off
        )


def _literal(value: object, name: str) -> object:
    """Return an argument of a call, or a placeholder if it has no literal."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    is_literal = isinstance(value, (str, int, float, tuple, list)) or (name == "model_args" and isinstance(value, dict))
    return value if is_literal else Placeholder(name)


class Report(Displayed, Struct, frozen=True):
    """What was found in one file, and what was done about it.

    ``findings`` are in the order in which the rules ran; ``fixed`` holds those whose fix was applied; ``edits`` are the
    plan, empty for a check. ``obstacles`` are the keys on which a strict load into the target would still fail after
    them. ``output`` is the file that was written, None if none was. ``remarks`` are lines worth reporting that are not
    findings (which device was used, that a model could not be built on the meta device). ``likeness`` is the known
    architecture that matches or is nearest, if no target was given. ``unexamined`` are the parts of the file
    beside the weights that no rule examines, except for checksums and values that are not finite.

    The following fields are not in the JSON form. ``figures`` are the statistics of the tensors whose values were read,
    by their key after the edits, and ``layout`` gives the dtype and shape of each of these. ``place`` is the path of
    the state_dict in the container of the result, ``written_as`` the form of the output (``pth``, ``safetensors``,
    ``shards``, ``universal``), and ``tied`` are the keys that a plain read of the output lacks, because it has their
    tensors under another key. ``accepted`` are the codes, or prefixes of codes, of rules whose findings the user
    accepts. ``is_refused``: the result must not be written. ``is_dry_run``: nothing was to be written. ``is_rewrite``:
    a file would be written even without edits. ``call`` is how the library was called."""

    source: str
    format: str
    container: str
    tensors: int
    numel: int
    target: str | None = None
    findings: tuple[Finding, ...] = ()
    fixed: tuple[Finding, ...] = ()
    edits: tuple[Edit, ...] = ()
    coverage: Coverage | None = None
    obstacles: tuple[str, ...] = ()
    smoke: SmokeResult | None = None
    output: str | None = None
    remarks: tuple[str, ...] = ()
    likeness: Likeness | None = None
    unexamined: tuple[str, ...] = ()
    figures: Mapping[str, TensorStatistics] = field(default_factory=dict)
    layout: Mapping[str, TypedShape] = field(default_factory=dict)
    place: tuple[str | int, ...] = ()
    written_as: str = ""
    tied: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    is_refused: bool = False
    is_dry_run: bool = False
    is_rewrite: bool = False
    call: Call | None = None

    def __repr__(self) -> str:
        left = sum(finding.level > Level.NOTE for finding in self.remaining)
        written = "" if self.output is None else f", written to {self.output}"
        return f"<Report of {self.source}: {counted(left, 'defect')}, {counted(len(self.edits), 'edit')}{written}>"

    @property
    def remaining(self) -> tuple[Finding, ...]:
        """The findings that no applied fix has cured."""
        return tuple(finding for finding in self.findings if finding not in self.fixed)

    @property
    def applied(self) -> tuple[Finding, ...]:
        """The findings whose fix took effect."""
        return () if self.is_withheld else self.fixed

    @property
    def left(self) -> list[Finding]:
        """The warnings and errors that remain and that the user does not accept."""
        return [each for each in self.remaining if each.level > Level.NOTE and not self.is_accepted(each)]

    @property
    def failed_forward(self) -> bool:
        return self.smoke is not None and self.smoke.passed is False

    @property
    def is_open(self) -> bool:
        """Whether anything is left to decide: a warning or error remains, a strict load would still fail (whichever
        rules were selected), or the forward test failed."""
        return self.failed_forward or bool(self.obstacles or self.left)

    def is_accepted(self, finding: Finding) -> bool:
        """Return whether the user accepts a finding. A finding that blocks writing cannot be accepted."""
        is_accepted = finding.is_accepted or finding.code.startswith(self.accepted)
        return is_accepted and finding.level > Level.NOTE and Blocks.WRITING not in finding.blocks

    @property
    def is_withheld(self) -> bool:
        """Whether the edits did not take effect: a dry run, a refusal, or a result that failed its test."""
        return self.is_dry_run or self.is_refused or (self.output is None and self.failed_forward)

    @property
    def exit_code(self) -> int:
        """0 if clean, or all fixed and verified; 1 if something is left, or a parameter is untrained."""
        return int(self.is_open or (self.coverage is not None and self.coverage.untrained > 0))

    def is_fixable(self, finding: Finding) -> bool:
        """Return whether a repair with the settings of this report fixes a finding."""
        return finding in self.fixed or (finding.is_fixable and not finding.needs_unsafe)

    def to_dataframe(self) -> pandas.DataFrame:
        """Return the findings as a pandas DataFrame, one row each. Raises ``UsageError`` if pandas is not installed."""
        try:
            import pandas
        except ImportError as error:
            raise UsageError("to_dataframe() needs pandas: pip install pandas") from error
        columns = ["code", "name", "level", "message", "keys", "fixable", "fixed"]
        texts = [(each.code, each.name, each.level.name.lower(), each.message) for each in self.findings]
        others = [(list(each.keys), each.is_fixable, each in self.applied) for each in self.findings]
        rows = [(*left, *right) for left, right in zip(texts, others, strict=True)]
        return pandas.DataFrame(rows, columns=columns)

    def to_json(self, *, fixes: bool = True) -> dict[str, Any]:
        """Return the report as plain JSON data, as ``--output-format json`` prints it.

        ``fixes=False`` omits the fix of each finding; the edits of applied fixes are in ``edits`` anyway."""
        fixed, coverage = set(map(id, self.applied)), self.coverage
        return {
            "version": REPORT_VERSION,
            "source": self.source,
            "format": self.format,
            "container": self.container,
            "tensors": self.tensors,
            "numel": self.numel,
            "target": self.target,
            "exit_code": self.exit_code,
            "findings": [
                _finding(self, finding, id(finding) in fixed or finding in self.applied, fixes)
                for finding in self.findings
            ],
            "edits": _edits(self.edits),
            "coverage": coverage and plain(asdict(coverage) | {"share": coverage.share}),
            "obstacles": list(self.obstacles),
            "smoke": self.smoke and plain(self.smoke),
            "output": self.output,
            "dry_run": self.is_dry_run,
            "refused": self.is_withheld and not self.is_dry_run,
            "remarks": list(self.remarks),
            "likeness": self.likeness and self.likeness.to_json(),
            "unexamined": list(self.unexamined),
        }


class Repair(Displayed, Struct, frozen=True):
    """The outcome of a repair: the report, the plan, and the repaired checkpoint as a lazy view.

    ``is_changed`` is whether a file written from it differs from the source."""

    report: Report
    plan: Plan
    checkpoint: Checkpoint
    is_changed: bool

    def __repr__(self) -> str:
        return repr(self.report).replace("<Report", "<Repair", 1)

    def state_dict(self, *, mmap: bool = False) -> dict[str, Any]:
        """Return the repaired state_dict on the CPU, with entries that are not tensors, and torch's ``_metadata``.

        ``mmap`` is as in ``Checkpoint.state_dict``."""
        return self.checkpoint.state_dict(mmap=mmap)

    def called(self, function: str, *, is_model_first: bool = False) -> Repair:
        """Return the outcome with ``function`` as the one that the user called."""
        call = self.report.call
        assert call is not None, "repair() notes how it was called"
        places = call.places[::-1] if is_model_first else call.places
        return replace(self, report=replace(self.report, call=replace(call, function=function, places=places)))


def envelope(reports: Iterable[Mapping[str, Any]], versions: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the JSON document that the command line prints, with a report per path from ``to_json`` or
    ``error_to_json``. ``docs/schemas/report.schema.json`` describes it."""
    return {"version": REPORT_VERSION, "versions": dict(versions), "reports": list(reports)}


def error_to_json(source: str | None, message: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the report on a file that could not be checked; ``data`` is that of an ``UnreadableError``."""
    return {"version": REPORT_VERSION, "source": source, "exit_code": 2, "error": message, **plain(data or {})}


def _finding(report: Report, finding: Finding, fixed: bool, fixes: bool) -> dict[str, Any]:
    fix = {"fix": None if finding.fix is None else _fix(finding.fix)} if fixes else {}
    return {
        "code": finding.code,
        "name": finding.name,
        "level": finding.level.name.lower(),
        "message": finding.message,
        "keys": list(finding.keys),
        "evidence": plain(finding.evidence),
        **fix,
        "fixable": report.is_fixable(finding),
        "fixed": fixed,
        "accepted": finding not in report.fixed and report.is_accepted(finding),
        "remedies": [_remedy(remedy) for remedy in finding.remedies],
    }


def _remedy(remedy: Remedy) -> dict[str, Any]:
    options = {
        name: {"placeholder": value.name} if isinstance(value, Placeholder) else plain(value)
        for name, value in remedy.options
    }
    return {"options": options, "text": remedy.text, "untrained": dict(remedy.untrained)}


def remedy_from_json(data: Mapping[str, Any]) -> Remedy:
    """Return the remedy from its JSON form in ``Report.to_json``."""
    options = tuple(
        (str(name), Placeholder(value["placeholder"]) if isinstance(value, dict) else value)
        for name, value in data["options"].items()
    )
    return Remedy(options, data["text"], tuple(data.get("untrained", {}).items()))


def _fix(fix: Fix) -> dict[str, Any]:
    return {
        "applicability": fix.applicability.name.lower().replace("_", "-"),
        "asked": fix.asked,
        "edits": _edits(fix.edits),
    }


def _edits(edits: Iterable[Edit]) -> list[Any]:
    return [plain(edit.to_json()) for edit in edits]


_PLAIN = (str, bool)
_MAPPINGS = (dict, Mapping)  # dict first, because the check against an abstract class is slow
_LISTS = (list, tuple, set, frozenset, Sequence)


def plain(value: object) -> Any:
    """Return the value as data that any JSON parser reads; anything that JSON lacks becomes text."""
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, int):
        return int(value)  # an IntEnum too
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Struct):
        value = asdict(value)
    if isinstance(value, _MAPPINGS):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, _LISTS) and not isinstance(value, bytes | bytearray | memoryview):
        return [plain(item) for item in value]
    return str(value)
