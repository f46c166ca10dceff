"""The report for people: what is wrong in one line, each finding, what was done, and what is left to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ckptfix.core.edits import Adapt, Cast, Drop, Edit, Fill, MergeAdapter, Moments, Plain, Rename, Replace
from ckptfix.core.finding import Finding, counted
from ckptfix.core.option import CHECK, REPAIR
from ckptfix.core.report import Report, plain
from ckptfix.core.settings import Settings
from ckptfix.core.wording import first_names
from ckptfix.report.advice import Presentation, advice_lines, comparison_command, mark, message_with_count
from ckptfix.report.edits import edit_lines
from ckptfix.report.key_lists import folded_lines
from ckptfix.report.likeness import likeness_lines
from ckptfix.report.style import Line, Span, cut, elements, evidence_items, percent, quantity

if TYPE_CHECKING:
    from ckptfix.core.coverage import Coverage
    from ckptfix.core.smoke_result import SmokeResult

_FEW = 2  # the headline has the messages of up to this many defects; more are counted by kind
_NAMES = 3
_FIGURES = 12
_LENGTH = 100
_KEY_WIDTH = 60


def full_lines(report: Report, presentation: Presentation) -> Iterator[Line]:
    yield headline(report, presentation)
    place = "" if report.container == "." else f", state_dict at {report.container}"
    target = f"target {report.target}" if report.target else f"no target to compare with ({presentation.target})"
    size = f"{counted(report.tensors, 'tensor')}, {elements(report.numel)}"
    yield (Span(f"  {report.format}{place}: {size}; {target}", "faint"),)
    for finding in report.findings:
        yield ""
        yield from _finding_lines(finding, report, presentation)
    if result := list(_result_lines(report, presentation)):
        yield from ("", *result)


def _result_lines(report: Report, presentation: Presentation) -> Iterator[Line]:
    """Yield what was done and written, and what is left."""
    if report.edits:
        yield (Span("would do:" if report.is_withheld else "done:", "strong"),)
        yield from (f"  {line}" for line in edit_lines(report.edits, presentation.limit))
    if report.coverage is not None:
        yield _coverage_line(report.coverage, presentation.mode == REPAIR and not report.is_withheld)
    if report.smoke is not None:
        yield _smoke_line(report.smoke)
        yield from (f"  {check}" for check in report.smoke.checks)
    if report.output is not None:
        yield ("written: ", Span(report.output, "strong"))
    elif report.is_dry_run:
        yield "written: nothing (dry run)"
    elif presentation.mode == REPAIR and (presentation.call is None or presentation.call.function == REPAIR):
        is_clean = report.exit_code == 0 and not report.edits and not report.is_refused
        way = "-o FILE" if presentation.call is None else "output=FILE"
        reason = f", because there is nothing to repair; {way} writes it anyway" if is_clean else ""
        yield f"written: nothing{reason}"
    yield from (f"note: {remark}" for remark in report.remarks)
    if report.likeness is not None:
        yield from likeness_lines(report.likeness, *comparison_command(report, presentation))
    yield from advice_lines(report, presentation)
    if report.output is not None and report.written_as:
        yield ("load it with: ", Span(loading_code(report, presentation.choices), "strong"))
        yield from _after_loading(report)


def _after_loading(report: Report) -> Iterator[Line]:
    """Yield how the new file differs for code that read the old one."""
    if report.written_as == "pth":
        yield from (
            f"  after: import {found.evidence['import']}" for found in report.findings if "import" in found.evidence
        )
    made = {edit.where: edit.after for edit in report.edits if isinstance(edit, Plain)}
    dicts = [where for where, after in made.items() if after == "dict"]
    if dicts:
        yield f'  dicts now, so use ["name"] instead of .name: {first_names(dicts)}'
    left_out = [name for finding in report.findings for name in finding.evidence.get("left_out", ())]
    if left_out:
        yield f"  left out: {first_names(left_out)} (attributes of the module)"
    for finding in report.applied:
        if sizes := finding.evidence.get("parameters of each group"):
            groups = f"{counted(len(sizes), 'group')} of {first_names(sizes)} parameters"
            yield (
                f"  its optimizer: {groups}, identified by {finding.evidence['named by']}; if your script uses other "
                f"groups: ckptfix.load(model, {report.source!r}, optimizer=optimizer)"
            )


WEIGHTS_ONLY_SINCE = "1.13"  # the first release of torch whose torch.load has weights_only


def loading_code(report: Report, choices: Mapping[str, Any]) -> str:
    """Return the Python expression that reads the state_dict of the written file, or loads it into ``model`` if a plain
    read would lack tied keys."""
    if report.written_as == "pth":
        steps = "".join(f"[{step!r}]" for step in report.place)
        is_old = Settings(for_torch=choices.get("for_torch")).is_for_torch_before(WEIGHTS_ONLY_SINCE)
        return f"torch.load({report.output!r}{'' if is_old else ', weights_only=True'}){steps}"
    if report.written_as == "safetensors":
        if report.tied:
            return f"safetensors.torch.load_model(model, {report.output!r})"
        return f"safetensors.torch.load_file({report.output!r})"
    if report.written_as == "universal":
        return f'engine.load_checkpoint({report.output!r}), with "checkpoint": {{"load_universal": true}} in ds_config'
    return f"ckptfix.open_checkpoint({report.output!r}).state_dict()"


def concise_lines(report: Report, presentation: Presentation) -> Iterator[Line]:
    """Yield one line for each finding: ``path: CODE name: message (n keys) [fixable]``."""
    for finding in report.findings:
        yield (
            f"{report.source}: ",
            Span(finding.code, finding.level.name.lower()),
            f" {finding.name}: {message_with_count(finding)}",
            *_marked(finding, report, presentation),
        )


def headline(report: Report, presentation: Presentation | None = None) -> Line:
    """Return in one line what is wrong, worst first; after a repair, what was done and how it was proved."""
    presentation = presentation or Presentation()
    source = Span(f"{report.source}: ", "strong")
    left = report.left
    written = f" → {report.output}" if report.output is not None else ""
    if presentation.mode == CHECK or (left and not report.edits):
        return (source, *(_defects(left) if left else _sound(report, presentation)))
    done = _done_text(report)
    if report.exit_code == 0 and report.edits:
        if report.is_dry_run:
            return (source, Span("would be repaired", "good"), f" ({done})")
        return (source, Span("repaired", "good"), f" ({done}){written}; {_proof(report)}")
    if report.exit_code == 0 and report.output is not None:
        return (source, Span("written", "good"), f"{written}; {_proof(report)}")
    if not left:
        ready = (Span("written", "warning"), f"{written}; ") if report.output is not None else ()
        return (source, *ready, *_sound(report, presentation))
    if report.is_dry_run:
        return (source, Span(f"{len(report.fixed)} would be fixed", "warning"), "; left: ", *_defects(left))
    fixed = f"{len(report.fixed)} fixed{written}" if report.output is not None else "not repaired"
    return (source, Span(fixed, "warning" if report.output is not None else "error"), "; left: ", *_defects(left))


def _sound(report: Report, presentation: Presentation) -> tuple[str | Span, ...]:
    """Return the headline of a file without remaining defects."""
    notes = f", {counted(len(report.remaining), 'note')}" if report.remaining else ""
    if report.exit_code:
        share = percent(report.coverage.untrained, report.coverage.parameters) if report.coverage else "some"
        verb = "would be" if report.is_dry_run else "are"
        forward = "the forward test failed" if report.failed_forward else f"{share} of the parameters {verb} untrained"
        reason = "a strict load would fail" if report.obstacles else forward
        return (Span(reason, "error"), notes)
    if report.target is not None:
        return (Span(f"fits {report.target}", "good"), notes)
    are_read = presentation.choices.get("values", True)
    limits = [] if are_read else ["values not read"]
    what = "file itself"
    if report.unexamined:
        what = f"weights under {report.container}" if report.container != "." else "weights"
        exception = ", except for checksums and NaN" if are_read else ""
        limits += [f"{first_names(list(report.unexamined), _NAMES)} not examined{exception}"]
    limits += [f"not compared with a model: add {presentation.target}"]
    return (Span(f"nothing wrong in the {what}", "good"), f" ({'; '.join(limits)}){notes}")


def _defects(findings: list[Finding]) -> tuple[str | Span, ...]:
    """Return the defects in words, worst first: each with its message if they are few, otherwise counted by kind."""
    ranked = sorted(findings, key=lambda finding: (-finding.level, _kind(finding)))
    worst = Span(counted(len(findings), "defect"), ranked[0].level.name.lower())
    if len(ranked) <= _FEW:
        # The first clause says what is wrong; the rest of the message is below.
        clauses = (message_with_count(finding).partition("; ")[0].rstrip(".") for finding in ranked)
        return (worst, f": {'; '.join(cut(clause, _LENGTH) for clause in clauses)}")
    kinds: dict[int, list[Finding]] = {}
    for finding in ranked:
        kinds.setdefault(_kind(finding), []).append(finding)
    return (worst, f": {', '.join(_kind_text(kind, some) for kind, some in kinds.items())}")


def _kind(finding: Finding) -> int:
    if finding.subject.is_of_values:
        return 0
    return 2 if finding.is_fixable and not finding.needs_unsafe else 1


def _kind_text(kind: int, findings: list[Finding]) -> str:
    what = ("in the values", "need a choice" if len(findings) > 1 else "needs a choice", "fixable")[kind]
    names = list(dict.fromkeys(finding.name for finding in findings))
    return f"{len(findings)} {what} ({first_names(names, _NAMES)})"


_DONE: Mapping[type[Edit], str] = {
    Rename: "renamed",
    Fill: "filled",
    Replace: "replaced",
    Drop: "dropped",
    MergeAdapter: "merged",
    Adapt: "adapted",
    Cast: "cast",
}
_UNDONE = "unmerged"


def _done_text(report: Report) -> str:
    """Return what the edits did, counted: ``74 keys renamed, 3 keys filled``."""
    counts: Counter[str] = Counter()
    renamed: set[str] = set()
    # The edits of one fix are made at once, as in a swap; a saved plan has no fixes.
    fixes = [finding.fix.edits for finding in report.fixed if finding.fix is not None]
    for edits in fixes if sum(map(len, fixes)) == len(report.edits) else [report.edits]:
        for edit in edits:
            is_again = isinstance(edit, Rename) and edit.key in renamed  # renamed by two rules
            if not (is_again or isinstance(edit, Moments)):  # one edit for each parameter of an optimizer
                is_undone = isinstance(edit, MergeAdapter) and edit.undo
                counts[_UNDONE if is_undone else _DONE.get(type(edit), "")] += 1
        renamed |= {edit.to for edit in edits if isinstance(edit, Rename)}
    parts = [f"{counted(counts[verb], 'key')} {verb}" for verb in (*_DONE.values(), _UNDONE) if counts[verb]]
    others = counts[""]
    return ", ".join([*parts, *([f"{counted(others, 'other edit' if parts else 'edit')}"] if others else [])])


def _proof(report: Report) -> str:
    """Return how the written file was proved."""
    if report.smoke is not None and report.smoke.passed:
        return "loads strictly, forward test passed"
    if report.target is not None:
        return f"fits {report.target}"
    return "in memory" if report.output is None else "read back and compared"


def _finding_lines(finding: Finding, report: Report, presentation: Presentation) -> Iterator[Line]:
    level = finding.level.name.lower()
    yield (
        Span(finding.code, level),
        " ",
        Span(finding.name, "strong"),
        " ",
        Span(level, level),
        *_marked(finding, report, presentation),
    )
    yield f"  {finding.message}"
    evidence = plain(finding.evidence)
    lines = folded_lines(finding.keys, presentation.limit, _spec(evidence), _KEY_WIDTH)
    yield from (f"    {line}" for line in lines)
    if presentation.verbose and evidence:
        yield (Span(f"  evidence: {'; '.join(evidence_items(evidence))}", "faint"),)
    elif shown := _figures_text(evidence):
        yield (Span(f"  {shown}", "faint"),)


def _spec(evidence: dict[str, Any]) -> Callable[[str], str] | None:
    """Return a function from a key to the text beside it; None if the evidence has no figures by key."""
    for name, text in (("positions", _position_text), ("shapes", _shapes_text), ("tensors", _figures_text)):
        if isinstance(figures := evidence.get(name), dict):
            return lambda key: text(figures.get(key) or {})
    return None


def _position_text(position: Mapping[str, Any]) -> str:
    """Return the group of a parameter in its optimizer, and its state: ``group 0: exp_avg [8, 3]``."""
    if not position:
        return ""
    kept = ", ".join(f"{name} {shape}" for name, shape in position["state"].items() if shape)
    return f"group {position['group']}: {kept or 'no moments'}"


def _shapes_text(shapes: Mapping[str, Any]) -> str:
    if not shapes:
        return ""
    file, target = ("not a tensor" if (at := shapes.get(side)) is None else str(at) for side in ("file", "target"))
    return f"file {file:<18}  model {target}"


def _figures_text(figures: Mapping[str, Any]) -> str:
    """Return plain figures in words; nested ones are shown beside the keys, or with ``-v``."""
    words = list(_words(figures))
    more = [f"… ({len(words)})"] if len(words) > _FIGURES + 1 else []
    return ", ".join([*words[: _FIGURES + (not more)], *more]).replace(", of ", " of ")  # `dead 3, of 64` is one figure


# Figures that count some of a tensor's values.
_COUNTS = {
    "nan": "NaN",
    "pos_inf": "+Inf",
    "neg_inf": "-Inf",
    "zeros": "zero",
    "subnormals": "subnormal",
    "overflow": "overflow",
    "become_zero": "become zero",
}


def _words(figures: Mapping[str, Any]) -> Iterator[str]:
    rest = dict(figures)
    if numel := rest.pop("numel", None):
        counts = ", ".join(f"{count} {word}" for name, word in _COUNTS.items() if (count := rest.pop(name, 0)))
        yield f"{counts} of {numel} values" if counts else f"{numel} values"
    if place := rest.pop("first_index", None):
        yield f"first at {place}"
    if channels := rest.pop("channels", None):
        found = rest.pop("affected", None) or f"{rest.pop('dead')} dead"
        more = ", …" if len(channels) > _NAMES else ""
        yield f"{found} of {rest.pop('of')} channels: {_figure(channels[:_NAMES])}{more}"
    for name, value in rest.items():
        # Counts of zero are left out.
        if value is not None and not isinstance(value, dict) and (value != 0 or isinstance(value, float)):
            is_place = isinstance(value, str) and " → " in value  # what a key becomes: its name stays as it is
            yield cut(f"{name if is_place else name.replace('_', ' ')} {_figure(value)}", _LENGTH)


def _figure(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, list):
        more = [f"… ({len(value)})"] if len(value) > _NAMES + 1 else []
        return ", ".join([*map(_figure, value[: _NAMES + (not more)]), *more])
    return str(value)


def _marked(finding: Finding, report: Report, presentation: Presentation) -> tuple[str | Span, ...]:
    text = mark(finding, report, presentation)
    return (" ", Span(text, "good")) if text else ()


def _coverage_line(coverage: Coverage, is_done: bool) -> Line:
    share = percent(coverage.parameters_from_file, coverage.parameters)
    buffers = percent(coverage.buffers_from_file, coverage.buffers) if coverage.buffers else "none"
    parameters = f"{quantity(coverage.parameters)} parameters (by number of elements)"
    verb = "came" if is_done else "would come"
    filled = "".join(f"; {elements(numel)} filled from {origin}" for origin, numel in coverage.filled.items())
    parts = (f"{elements(numel)} adapted by {recipe}" for recipe, numel in coverage.adapted.items())
    adapted = f" ({', '.join(parts)})" if coverage.adapted else ""
    return (
        "coverage: ",
        Span(share, "good" if coverage.parameters_from_file >= coverage.parameters else "warning"),
        f" of {parameters} {verb} from the file{adapted}; buffers {buffers}",
        Span(filled, "warning"),
    )


def _smoke_line(smoke: SmokeResult) -> Line:
    if smoke.passed is None:
        return f"forward test: no verdict{f': {smoke.note}' if smoke.note else ''}"
    verdict = Span("passed", "good") if smoke.passed else Span("failed", "error")
    note = f" ({smoke.note})" if smoke.note else ""
    tensors = " → ".join(", ".join(side) for side in (smoke.inputs, smoke.outputs) if side)
    seconds = f", {smoke.seconds:.2g} s" if smoke.seconds else ""
    place = f" on {smoke.device}" if smoke.device else ""
    return ("forward test: ", verdict, f"{place}{note}{f': {tensors}' if tensors else ''}{seconds}")
