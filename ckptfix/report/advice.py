"""What is left to do after a check or a repair, and the commands for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.bytes.files import is_url
from ckptfix.core.edits import Assemble, Dequantise, Drop, Fill, Fold, Rename, RenameModule, Replace
from ckptfix.core.finding import Blocks, Finding, Level, Placeholder, Remedy, Subject, counted
from ckptfix.core.option import CHECK, REPAIR
from ckptfix.core.options import command_words, flag_text, option_words
from ckptfix.core.report import Call, Report
from ckptfix.core.settings import PTH, SAFETENSORS
from ckptfix.core.wording import first_names, shell_join
from ckptfix.errors import Opt
from ckptfix.report.style import Line, Span, percent

if TYPE_CHECKING:
    from ckptfix.writing.atomic import OwnFile


class Presentation(Struct, frozen=True):
    """How to show a report.

    ``mode`` is the command, ``check`` or ``repair``. ``verbose`` shows every key and all evidence. ``choices`` are the
    options that the user gave, by their Python names, which suggested commands repeat. ``call`` is the user's call in
    Python: then calls are suggested, since the model may be an object."""

    mode: str = CHECK
    verbose: bool = False
    choices: Mapping[str, Any] = field(default_factory=dict)
    call: Call | None = None

    @property
    def limit(self) -> int | None:
        """The maximum number of lines of a key list, None for all."""
        return None if self.verbose else 12

    def option(self, name: str, value: object = None) -> str:
        """Return an option as a flag, or as an argument in Python."""
        return flag_text(Opt(name, value)) if self.call is None else str(Opt(name, value))

    @property
    def target(self) -> str:
        """The options that name what a file has to fit."""
        return f"{self.option('model')} or {self.option('like')}"

    def command(self, command: str, source: str, choices: Mapping[str, Any]) -> str:
        """Return a command with these choices, or the call that does the same."""
        if self.call is None:
            return shell_join(command_words(command, source, choices))
        return call_text(self.call, command, choices)


class ReportFormat:
    """An output format of reports: lines for each file, written at once, or a text at the end.

    The text goes to ``file`` if there is one, otherwise to stdout."""

    is_for_programs = True
    file: OwnFile | None = None

    def add(self, report: Report, presentation: Presentation) -> Iterable[Line]:
        """Take the report of a file, and return the lines to write now."""
        return ()

    def add_error(
        self, source: str, message: str, runs_code: bool = False, data: Mapping[str, Any] | None = None
    ) -> Iterable[Line]:
        """Take a file that could not be checked, whether it is built to run code, and the data of its error; return the
        lines to write now."""
        return ()

    def pieces(self) -> Iterator[str]:
        """Yield the text that is written at the end."""
        yield from ()


def message_with_count(finding: Finding) -> str:
    """Return the message and the number of keys, unless the message contains that number."""
    number = len(finding.keys)
    if not number or str(number) in finding.message.replace("`", " ").split():
        return finding.message
    return f"{finding.message} ({counted(number, 'key')})"


def mark(finding: Finding, report: Report, presentation: Presentation) -> str:
    """Return the mark of a finding: ``[fixed]``, ``[fixable]``, … or an empty text."""
    if finding in report.fixed:
        return "[would be fixed]" if report.is_withheld else "[fixed]"
    if report.is_accepted(finding):
        return "[accepted]"
    if finding.needs_unsafe:
        switches = [name for remedy in finding.remedies for name, value in remedy.options if value is True]
        return f"[fixable with {presentation.option((switches or ['unsafe_fixes'])[0], True)}]"
    return "[fixable]" if finding.is_fixable else ""


# Options that act on all findings, so may drop or fill keys that another finding locates in the file.
_DESTRUCTIVE = {"unsafe_fixes", "drop_mismatched"}
_NAMED = 3  # modules that a price lists


def advice_lines(report: Report, presentation: Presentation) -> Iterator[Line]:
    """Yield what the user can do about each finding that remains, and one command for all that a command can do."""
    remaining = report.left
    if not remaining:
        if accepted := dict.fromkeys(finding.code for finding in report.remaining if report.is_accepted(finding)):
            yield (Span(f"accepted, as you asked: {', '.join(accepted)}", "warning"),)
        elif report.exit_code == 0 and presentation.mode != CHECK:
            command = next_command(report, presentation)
            yield ("run: ", Span(command, "command")) if command else (Span("nothing left to do", "good"),)
        elif not report.is_open and report.coverage is not None and report.exit_code:
            share = percent(report.coverage.untrained, report.coverage.parameters)
            yield (Span(f"left: {share} of the parameters are untrained", "warning"),)
            if report.is_refused:
                flag = presentation.option("allow_untrained", True)
                yield f"  name the model that the file belongs to; {flag} writes this one anyway"
        return
    yield (Span("left:", "strong"),)
    explained = _explained(remaining)
    by_text: dict[str, list[Finding]] = {}  # missing and unexpected keys often have the same advice
    for finding in remaining:
        by = _covering(finding, explained)
        share = "" if by.total() == len(finding.keys) else f"{by.total()} of "
        text = f"the fix of {', '.join(by)} covers {share}these keys" if by else _text(finding, presentation)
        by_text.setdefault(text, []).append(finding)
    by_text.pop("", None)
    for text, findings in by_text.items():
        names: list[str | Span] = []
        for each in findings:
            names += [", " if names else "  ", Span(each.code, each.level.name.lower()), f" {each.name}"]
        yield (*names, f": {text}")
    for number, (choices, price) in enumerate(_ways(report, presentation)):
        if not number and (download := _download(report.source)):
            yield ("first: ", Span(download, "command"))
        command = presentation.command(REPAIR, _here(report.source), choices)
        yield ("   or: " if number else "  run: ", Span(command, "command"))
        if price:
            yield ("       ", Span(price, "warning"))


def _effective(report: Report, choices: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the choices, without ``fill="twin"`` and its ``replace`` if no twin was found."""
    edits = (edit for finding in report.findings if finding.fix is not None for edit in finding.fix.edits)
    if choices.get("fill") != "twin" or any(isinstance(edit, (Fill, Replace)) for edit in edits):
        return choices
    return {name: value for name, value in choices.items() if name not in ("fill", "replace")}


def _written_again(report: Report, choices: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the choices for another run, whose output exists by now if this one has written it."""
    if report.output is None or report.is_dry_run:
        return choices
    if choices.get("in_place"):
        return {name: value for name, value in choices.items() if name != "backup"}  # the original has a backup already
    if report.written_as in (PTH, SAFETENSORS):
        return {**choices, "force": True}
    written = Path(report.output.removesuffix(".index.json"))  # several files are never replaced
    return {**choices, "output": str(written.with_name(f"{written.stem}-2{written.suffix}"))}


def next_command(report: Report, presentation: Presentation) -> str:
    """Return the repair command that fixes what remains, as far as one can; an empty text if there is none."""
    found = next(_ways(report, presentation), None)
    return "" if found is None else presentation.command(REPAIR, _here(report.source), found[0])


def suggested(report: Report, presentation: Presentation) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the commands that fix what remains, as words, each with its price: the recommended one, then those with
    another choice."""
    for choices, price in _ways(report, presentation):
        yield command_words(REPAIR, _here(report.source), choices), price


def _ways(report: Report, presentation: Presentation) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield the options of each repair that fixes what remains, with its price."""
    found, choices = remedy_choices(report), _effective(report, presentation.choices)
    remedies = found[0]
    # Repeating the command is only useful after a check or a dry run, and only if its result could be loaded strictly.
    is_new = option_words(with_remedies(choices, remedies)) != option_words(choices)
    remaining = report.left
    # Nothing is written while a key does not fit, whatever is done about warnings.
    firsts = _first_remedies(report)
    is_new = is_new and (not report.obstacles or any(remedy in remedies for remedy in firsts))
    blocking = blocking_findings(report, remedies)
    # If no option fixes an error, such as that other ranks are missing, no command is of use.
    is_new = is_new and all(any(remedy.options for remedy in remedies_of(finding)) for finding in blocking)
    is_blocked = bool(blocking) or any(Blocks.WRITING in finding.blocks for finding in report.remaining)
    is_undone = report.is_dry_run and (bool(report.edits) or report.is_rewrite)
    if presentation.mode == CHECK:
        is_undone = any(finding.is_fixable for finding in remaining)
    if is_new or (is_undone and not (is_blocked or report.obstacles)):
        again = _written_again(report, choices)
        yield from ((with_remedies(again, chosen), price_text(report, chosen)) for chosen in found)


def _first_remedies(report: Report) -> list[Remedy]:
    return [each for finding in report.left if finding.level is Level.ERROR for each in remedies_of(finding)[:1]]


def blocking_findings(report: Report, remedies: Collection[Remedy]) -> list[Finding]:
    """Return the errors that keep a repair with these remedies from writing a file, unless one of them is for them."""
    remaining = report.left
    # A finding that the repair fixes does not block it; with --unsafe-fixes, the repair drops what it leaves over.
    explained = _explained(remaining)
    is_last = any(each in remedies and ("unsafe_fixes", True) in each.options for each in _first_remedies(report))

    def is_cured(finding: Finding) -> bool:
        covered = _covering(finding, explained).total()
        return covered > 0 and (is_last or covered == len(finding.keys))

    open_ones = [finding for finding in remaining if not (report.is_fixable(finding) or is_cured(finding))]
    errors = [each for each in open_ones if each.level is Level.ERROR or Blocks.WRITING in each.blocks]
    blocking = [each for each in errors if each.blocks or (report.obstacles and each.subject is Subject.FIT)]
    if any(finding.subject is Subject.NAMES and _offers_sets(finding) for finding in remaining):
        # Each of the offered sets has names that fit, but what was examined is all of them together.
        blocking = [finding for finding in blocking if finding.subject is not Subject.FIT]
    return blocking


def _offers_sets(finding: Finding) -> bool:
    return any(name == "weights" for remedy in remedies_of(finding)[:1] for name, _ in remedy.options)


def remedy_choices(report: Report) -> list[tuple[Remedy, ...]]:
    """Return the remedies that one command can carry out: the recommended ones, then the same with each other value of
    an option that a finding lets the user choose.

    Remedies that make weights untrained were computed for the examined set of weights, and are left out for another."""
    remedies = recommended(report)
    found = [tuple(remedies)]
    for finding in report.left:
        first, *others = remedies_of(finding) or (Remedy(),)
        if first in remedies:
            if any(name == "weights" for name, _ in first.options):
                remedies = [remedy for remedy in remedies if not remedy.untrained]
            for other in others:
                names = [name for name, _ in other.options]
                if other.is_complete and names == ["weights"] == [name for name, _ in first.options]:
                    found.append((other,))  # the other remedies are for the set that was examined
                elif other.is_complete and names == [name for name, _ in first.options]:
                    found.append(tuple(other if remedy is first else remedy for remedy in remedies))
    return list(dict.fromkeys(found))


def recommended(report: Report) -> list[Remedy]:
    """Return the remedies that one command can carry out together: the first one of each finding that needs nothing
    more from the user. None of them makes a weight untrained that the file has in another form."""
    remaining = report.left
    is_hidden = any(Blocks.FILLING in finding.blocks for finding in remaining if not report.is_fixable(finding))
    return [
        remedy
        for finding in remaining
        for remedy in _first_complete(remedies_of(finding))
        if not is_hidden
        or Blocks.FILLING in finding.blocks
        or not (remedy.untrained or any(name in _DESTRUCTIVE for name, _ in remedy.options))
    ]


def _first_complete(remedies: Sequence[Remedy]) -> list[Remedy]:
    """Return the first remedy that makes a complete command; none if the recommended one is not an option at all."""
    offered = [remedy for remedy in remedies if remedy.options] if remedies and remedies[0].options else []
    return [remedy for remedy in offered if remedy.is_complete][:1]


def remedies_of(finding: Finding) -> tuple[Remedy, ...]:
    """Return the remedies of a finding, or the option that applies its unsafe fix if it names none."""
    if not finding.remedies and finding.fix is not None and finding.needs_unsafe:
        risk = "invents, drops or changes values"
        if finding.fix.edits and all(isinstance(edit, (Rename, RenameModule)) for edit in finding.fix.edits):
            risk = "renames keys, and nothing confirms the new names"
        return (Remedy.of(f"applies the fix, which {risk}", unsafe_fixes=True),)
    return finding.remedies


def price_text(report: Report, remedies: Sequence[Remedy]) -> str:
    """Return the share of the model that these remedies make untrained, in words; an empty text for nothing."""
    untrained = {key: numel for remedy in remedies for key, numel in remedy.untrained}
    if not untrained or report.coverage is None:
        return ""
    modules = list(dict.fromkeys(key.rpartition(".")[0] or key for key in untrained))
    named = first_names([f"`{module}`" for module in modules], _NAMED)
    verb = "becomes" if len(modules) == 1 else "become"
    return f"{named} {verb} untrained: {percent(sum(untrained.values()), report.coverage.parameters)} of the model"


def comparison_command(
    report: Report, presentation: Presentation
) -> tuple[Callable[[Mapping[str, Any]], str], Mapping[str, Any]]:
    """Return the function that words the command comparing the file, or the written one, with a known model, and the
    options of that command."""
    if report.output is None:
        return partial(presentation.command, presentation.mode, report.source), presentation.choices
    is_kept = report.written_as == "pth" and presentation.choices.get("weights") == report.container
    after = replace(presentation, call=presentation.call and Call(CHECK, (report.output,)))
    return partial(after.command, CHECK, report.output), {"weights": report.container} if is_kept else {}


def _download(source: str) -> str:
    """Return the command that downloads a checkpoint from a URL; an empty text for a local one."""
    if not is_url(source):
        return ""
    from ckptfix.bytes.remote import download_words

    return shell_join(download_words(source))


def _here(source: str) -> str:
    """Return the local path of a checkpoint; for a URL, that of the downloaded file."""
    if not is_url(source):
        return source
    from ckptfix.bytes.remote import local_name

    return local_name(source)


def _explained(remaining: Iterable[Finding]) -> dict[str, str]:
    """Return the keys whose name or layout an available fix changes, with the code of its rule."""
    explained: dict[str, str] = {}
    for finding in remaining:
        for edit in (
            finding.fix.edits if Blocks.FILLING in finding.blocks and finding.fix and finding.is_fixable else ()
        ):
            if isinstance(edit, Rename):
                names: tuple[str, ...] = (edit.key, edit.to)
            elif isinstance(edit, Assemble):
                names = (edit.key, *(part.source for part in edit.parts))
            elif isinstance(edit, Dequantise | Drop):  # codes and scales, and tensors of no use without them
                names = (edit.key,) if isinstance(edit, Drop) else (edit.key, edit.source)
            else:
                names = edit.sources if isinstance(edit, Fold) else ()
            explained |= dict.fromkeys(names, finding.code)
    return explained


def _covering(finding: Finding, explained: Mapping[str, str]) -> Counter[str]:
    """Count the keys of a finding whose name or layout another rule's fix changes, by the code of that rule."""
    keys = () if "shapes" in finding.evidence else finding.keys  # a rename does not change a shape
    return Counter(explained[key] for key in keys if explained.get(key, finding.code) != finding.code)


def _text(finding: Finding, presentation: Presentation) -> str:
    if remedies := remedies_of(finding):
        return remedies_text(remedies, as_arguments=presentation.call is not None)
    if finding.is_fixable:
        return "not in the plan" if "apply" in presentation.choices else ""
    return f"no automatic repair; see ckptfix rule {finding.code}"


def call_text(call: Call, command: str, choices: Mapping[str, Any]) -> str:
    """Return the library call that does what a command would, to replace the user's earlier call."""
    # A check is followed by a repair, which in Python writes a file only if it is told to.
    function = command if call.function == CHECK else call.function
    beside = {"beside": True} if function == REPAIR != call.function else {}
    given = {name: value for name, value in {**beside, **choices}.items() if value is not None}
    words = [*map(_literal, call.places), *(f"{name}={_literal(value)}" for name, value in given.items())]
    return f"ckptfix.{function}({', '.join(words)})"


def _literal(value: object) -> str:
    if isinstance(value, tuple) and len(value) == 1:
        return _literal(value[0])
    if isinstance(value, Placeholder) and "=" not in value.name:  # with `=`, the user fills in part of a text
        return value.name
    return repr(str(value) if isinstance(value, Placeholder) else list(value) if isinstance(value, tuple) else value)


def with_remedies(choices: Mapping[str, Any], remedies: Iterable[Remedy]) -> dict[str, Any]:
    """Return the choices together with the options of the remedies. What the user chose stays, except the format: a
    remedy that names one means that the chosen format cannot store the weights."""
    merged = dict(choices)
    for name, value in (option for remedy in remedies for option in remedy.options):
        if isinstance(value, tuple):
            merged[name] = list(dict.fromkeys((*merged.get(name, ()), *value)))
        elif name == "format" and merged.get(name) != value:
            merged[name] = value
            merged.pop("output", None)  # its suffix is that of the other format
        elif isinstance(value, Placeholder) and merged.get(name) in ("target", "twin"):
            merged[name] = value  # the values of a file, and not those that were chosen for missing keys
        else:
            merged.setdefault(name, value)
    return merged


def remedy_text(remedy: Remedy, *, as_arguments: bool = False) -> str:
    """Return a remedy in words, its options as flags of the command line or as arguments of the library."""
    if not remedy.options:
        return remedy.text
    if not as_arguments:
        return f"{' '.join(flag_text(Opt(name, value)) for name, value in remedy.options)} {remedy.text}"
    return f"{', '.join(f'{name}={_literal(value)}' for name, value in remedy.options)} {remedy.text}"


def remedies_text(remedies: Iterable[Remedy], *, as_arguments: bool = False) -> str:
    """Return all remedies of a finding in one line, the recommended one first."""
    return "; or ".join(remedy_text(remedy, as_arguments=as_arguments) for remedy in remedies)
