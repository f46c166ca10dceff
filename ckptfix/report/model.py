"""The report: what was found, what was done about it, what is left. The exit code is a property of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptfix.finding import Edit, Finding
    from ckptfix.smoke.result import SmokeResult
    from ckptfix.values import TensorStatistics

REPORT_VERSION = 1
"""The version of the JSON form; it grows when a field changes its meaning or goes away."""


@dataclass(frozen=True)
class Coverage:
    """How much of the target came from the file, by number of elements; tied tensors count once.

    ``filled`` gives the elements of parameters that came from elsewhere, by origin (``target``, a donor's path).
    """

    parameters: int
    parameters_from_file: int
    buffers: int
    buffers_from_file: int
    filled: Mapping[str, int] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Share of the target's parameters that came from the file, 1.0 for a target without parameters."""
        return self.parameters_from_file / self.parameters if self.parameters else 1.0


@dataclass(frozen=True)
class Report:
    """The account of one file.

    ``findings`` are in the order in which the rules ran; ``fixed`` holds those whose fix was applied; ``edits`` are the
    plan, empty for a check. ``obstacles`` are the keys on which a strict load into the target would still fail after
    them. ``output`` is the file that was written, None where none was. ``remarks`` are lines worth saying that are no
    findings (which device was used, that a model could not be built on the meta device). ``figures`` are the statistics
    of the tensors whose values were read, by their key after the edits, and ``layout`` gives the dtype and shape of
    each of these; they are no part of the JSON form.
    """

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
    figures: Mapping[str, TensorStatistics] = field(default_factory=dict, repr=False)
    layout: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict, repr=False)

    @property
    def remaining(self) -> tuple[Finding, ...]:
        """The findings that no applied fix has cured."""
        return tuple(finding for finding in self.findings if finding not in self.fixed)

    @property
    def exit_code(self) -> int:
        """0: clean, or all fixed and verified.

        1: warnings or errors remain, a strict load would still fail whatever rules were selected, or the forward test
        failed.
        """
        from ckptfix.finding import Level

        failed = self.smoke is not None and self.smoke.passed is False
        return int(failed or bool(self.obstacles) or any(finding.level > Level.NOTE for finding in self.remaining))

    def to_json(self, *, fixes: bool = True) -> dict[str, Any]:
        """The report as plain JSON data, the same that ``--output-format json`` prints.

        Without ``fixes`` the findings are told without theirs, which the edits repeat where they are applied."""
        from ckptfix.report.json import report_to_json

        return report_to_json(self, fixes=fixes)
