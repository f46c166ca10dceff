"""Performs one job of a migration, from the source to its place in the destination. The same code runs in a worker of
this machine and on another node.

    fetch     copy a remote source to this machine
    treat     repair as the table says, or copy bit for bit, into the scratch folder; compute digests
    deliver   put in place, or leave in the scratch folder for the driver, which flushes many files at once"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from posixpath import basename, dirname, join, splitext
from typing import Any, TypeVar

from msgspec.structs import replace

from ckptfix.bytes.checksums import sha256_of_file
from ckptfix.bytes.threads import background, without_threads
from ckptfix.core.edits import Disarm
from ckptfix.core.finding import Finding, Level, Placeholder, Remedy, Subject
from ckptfix.core.option import CHECK, Scope
from ckptfix.core.options import BY_NAME, flag_text, option_words, settings_of
from ckptfix.core.report import Report
from ckptfix.core.settings import UNIVERSAL
from ckptfix.core.wording import no_option, shell_join
from ckptfix.engine.delivery import refusal
from ckptfix.engine.validation import parsed_settings
from ckptfix.errors import (
    CkptfixError,
    HostileError,
    IdleRecipeError,
    TakenNameError,
    UnreadableError,
    UsageError,
    WriteError,
)
from ckptfix.repairing import check, repair
from ckptfix.report.advice import blocking_findings, price_text, remedies_of, remedy_choices, with_remedies
from ckptfix.report.page.data import weights_to_json
from ckptfix.smoke.outcome import ENVIRONMENT
from ckptfix.writing.atomic import flush_file
from ckptfix.zoo.committing import copy_file, deliver_staged, sha256_of_files
from ckptfix.zoo.items import Item, ItemKind, on_this_machine
from ckptfix.zoo.job import DRAFT, SOURCE, Done, Job, JobFiles, Others, Staged, failed
from ckptfix.zoo.manifest import Outcome, Record, free_name, line_of
from ckptfix.zoo.naming import name_with_hash, wrong_hash
from ckptfix.zoo.places import Place, open_place
from ckptfix.zoo.resources import Peak

T = TypeVar("T")

# Up to this size a job uses no threads, since other jobs keep the processors busy, and its output is flushed together
# with others.
SMALL = 64 << 20

# Settings that only apply to a source: which part of it, and the format to write.
_OF_THE_SOURCE = {"weights", "member", "salvage", "format"}


def repair_item(job: Job, path: Path, area: JobFiles) -> Done:
    """Repair a checkpoint into the scratch folder, or copy it there if there is nothing to repair."""
    goal = job.written_name
    settings = job.treatment.settings
    are_several = settings.get("shard_size") or settings.get("format") == UNIVERSAL or bool(job.item.beside)
    # The suffix selects the format; several files need their final names, so a folder.
    draft = area.folder(f"{DRAFT}s") / basename(goal) if are_several else area.file(f"{DRAFT}{splitext(goal)[1]}")
    written: dict[str, Any] = {"output": draft, "only_changes": True, "flush": not _is_flushed_later(job)}
    with without_threads() if job.item.size <= SMALL else nullcontext():
        done = _with_fitting_recipes(repair, path, {**written, "dry_run": job.dry_run, **job.treatment.arguments})
        if done.is_changed and done.report.output is None and not job.dry_run and not is_refused(job, done.report):
            # The forward test failed and the user accepts that: keep its findings, and write the file without it.
            repair(str(path), **written, **{**job.treatment.arguments, "smoke": False})
        # A large file takes minutes to hash, so hash source and output at the same time.
        with background() as pool:
            hashed = pool.submit(sha256_of_file, draft) if draft.is_file() and not are_several else None
            sha256 = digest_of(job, path)
            written_sha256 = hashed.result() if hashed is not None else ""
    report = replace(done.report, source=job.item.name)
    name_hash = None if job.item.parts else wrong_hash(job.item.name, sha256)
    if name_hash is not None and parsed_settings(job.treatment.settings).selects(name_hash.code):
        report = replace(report, findings=(*report.findings, name_hash))
    staged: tuple[Staged, ...] = ()
    facts: dict[str, Any] = {}
    if not is_refused(job, report):
        goal = goal if done.is_changed else name_with_hash(job.output, sha256, sha256)
        refuse_taken(job, goal)
        if job.dry_run:
            facts = {"output": goal}
        elif not done.is_changed and (job.item.kind is ItemKind.FOLDER or not job.item.beside):
            parts = tuple(part.name for part in job.item.parts)
            facts = {"output": goal, "output_size": job.item.size, "output_sha256": sha256, "output_parts": parts}
            staged = _copied(job, path, goal, area)
        elif are_several:
            if not done.is_changed:
                copy_file(path, draft.with_name(basename(goal)))
            if not any(isinstance(edit, Disarm) for edit in done.report.edits):
                _copy_beside(job, path, draft.parent)
            staged, facts = _several(job, draft.parent, goal)
        else:
            goal = name_with_hash(goal, written_sha256, sha256)
            facts = {"output": goal, "output_size": draft.stat().st_size, "output_sha256": written_sha256}
            staged = (Staged(str(draft), goal, not _is_flushed_later(job)),)
    settled = any(map(report.is_accepted, report.remaining))
    outcome = Outcome.ACCEPTED if settled else Outcome.REPAIRED if done.is_changed else Outcome.FINE
    decisions: list[dict[str, Any]] = []
    if is_refused(job, report) or report.left:
        outcome, decisions = Outcome.DECISION, decisions_for(job, report)
    if (fault := fault_of_the_machine(job, report)) is not None:
        outcome = Outcome.FAILED
    ways = {"command": first_command(decisions), "decisions": tuple(decisions)}
    record = job.record(outcome, sha256=sha256, error=fault, **ways, **facts, **_reported(job, report, area))
    weights = line_of(weights_to_json(report)) if report.figures else None
    return Done(job.number, record, weights, staged)


def _with_fitting_recipes(work: Callable[..., T], path: Path, arguments: Mapping[str, Any]) -> T:
    """Call ``check`` or ``repair`` without the ``adapt`` recipes that apply to nothing in this file: a table is for
    files of several shapes, and the report explains what is left better than the error does."""
    while True:
        try:
            return work(str(path), **arguments)
        except IdleRecipeError as error:
            kept = tuple(text for text in arguments["adapt"] if text != error.options[0].value)
            if len(kept) == len(arguments["adapt"]):
                raise  # the recipe is spelled differently in the table; the same call would fail again
            arguments = {**arguments, "adapt": kept}


def adopt_output(job: Job, path: Path, destination: Place, area: JobFiles) -> Done:
    """Check an output that was added by hand after a decision was asked for, and keep it."""
    assert destination.root is not None, "use migrate to decide about files on another machine"
    goal = destination.root / job.written_name
    known = {"model", "model_args", "like", *settings_of(CHECK)} - _OF_THE_SOURCE
    arguments = {name: value for name, value in job.treatment.arguments.items() if name in known}
    report = replace(_with_fitting_recipes(check, goal, arguments), source=job.item.name)
    record = job.record(
        Outcome.REPAIRED,
        sha256=digest_of(job, path),
        output=job.written_name,
        output_size=goal.stat().st_size,
        output_sha256=sha256_of_file(goal),
        **_reported(job, report, area),
    )
    by_hand = "the output was added by hand while a decision was pending: it is kept"
    return Done(job.number, replace(record, remarks=(*record.remarks, by_hand)))


def copy_other(job: Job, path: Path, area: JobFiles) -> Done:
    """Copy a file that is not a checkpoint, under its own name unless the migration itself writes that name."""
    if job.others is Others.SKIP or job.item.fault is not None:
        remarks = (job.item.fault,) if job.item.fault is not None else ()
        return Done(job.number, job.record(Outcome.OTHER, remarks=remarks))
    name = job.output if job.item.names is not None else free_name(job.item.name)
    refuse_taken(job, name)
    sha256 = sha256_of_file(path)
    staged = () if job.dry_run else _copied(job, path, name, area)
    written = {} if job.dry_run else {"output_size": job.item.size, "output_sha256": sha256}
    return Done(job.number, job.record(Outcome.OTHER, sha256=sha256, output=name, **written), staged=staged)


def refuse_taken(job: Job, name: str) -> None:
    """Raise ``TakenNameError`` if another source has the same output: the last one never wins."""
    if name in job.taken:
        raise TakenNameError(f"{job.item.name}: another source would also be written as {name}")


def digest_of(job: Job, path: Path) -> str:
    """Return the SHA-256 of an item, as hex digits."""
    if job.item.parts:
        return sha256_of_files((part.name, _root_of(job, path) / part.name) for part in job.item.parts)
    return sha256_of_file(path)


def _root_of(job: Job, path: Path) -> Path:
    depth = 0 if job.item.name == "." else job.item.name.count("/") + 1
    return path.parents[depth - 1] if depth else path


def _copied(job: Job, path: Path, output: str, area: JobFiles) -> tuple[Staged, ...]:
    """Copy an item's files to the scratch folder. The files of a folder keep their names in the destination."""
    root = _root_of(job, path)
    files = [(root / part.name, part.name) for part in job.item.parts] or [(path, output)]
    staged = []
    for number, (source, name) in enumerate(files):
        goal = area.file(f"copy-{number}")
        size = copy_file(source, goal)
        is_flushed = not (job.is_grouped and size <= SMALL) and not job.fetches
        if is_flushed:
            flush_file(goal)
        staged.append(Staged(str(goal), name, is_flushed))
    return tuple(staged)


def _copy_beside(job: Job, path: Path, folder: Path) -> None:
    """Copy the trainer's files next to the model that no edit has changed."""
    for part in job.item.beside:
        if not (goal := folder / basename(part.name)).exists():
            copy_file(_root_of(job, path) / part.name, goal)


def _several(job: Job, folder: Path, goal: str) -> tuple[tuple[Staged, ...], dict[str, Any]]:
    """Return the written files as staged, and their fields of the record: shards, a model with its optimizer, or the
    files of a universal checkpoint."""
    found = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
    own = basename(goal)
    if job.item.kind is ItemKind.FOLDER and (folder / own / own).is_dir():
        # The source is the folder of a tag, and so is the output: the file that names the tag belongs next to it.
        within = f"{own}/{own}/"
        found = {name.removeprefix(f"{own}/"): file for name, file in found.items() if name.startswith(within)}
    # The model, the index or the file that names the tag comes last: readers find the others through it.
    names = sorted(found, key=lambda name: (name.startswith(own), -name.count("/"), name))
    files = [found[name] for name in names]
    is_flushed = not _is_flushed_later(job) and not job.item.beside
    staged = tuple(
        Staged(str(file), join(dirname(goal), name), is_flushed) for name, file in zip(names, files, strict=True)
    )
    parts = tuple(each.name for each in staged)
    size = sum(file.stat().st_size for file in files)
    digest = sha256_of_files(zip(parts, files, strict=True))
    is_folder = (folder / own).is_dir()
    output = goal if is_folder else parts[-1]
    return staged, {"output": output, "output_size": size, "output_parts": parts, "output_sha256": digest}


def _is_flushed_later(job: Job) -> bool:
    """Return whether the driver flushes the output together with others, or it is uploaded."""
    return job.fetches or (job.is_grouped and job.item.size <= SMALL)


def _reported(job: Job, report: Report, area: JobFiles) -> Mapping[str, Any]:
    """Return the fields of a record that come from a report."""
    data = report.to_json(fixes=False)
    fields = {name: data[name] for name in ("format", "tensors", "numel", "target", "coverage", "smoke")}
    remarks = tuple(job.shown(remark, area) for remark in report.remarks)
    return {**fields, "findings": tuple(data["findings"]), "edits": tuple(data["edits"]), "remarks": remarks}


def perform(job: Job, scratch: Path) -> Done:
    """Do a job; never raises because of the file. Leaves only staged files in ``scratch``."""
    began, peak = time.perf_counter(), Peak()
    area = JobFiles(scratch, job.number)
    try:
        done = _perform(job, area)
    except (UnreadableError, HostileError, UsageError) as error:
        done = _refused(job, error, area)
    except CkptfixError as error:
        done = replace(_refused(job, error, area), is_exhausted=_is_of_memory(error))
    except OSError as error:
        done = failed(job, job.shown(f"{error.filename or job.item.name}: {error.strerror or error}", area))
    except MemoryError:
        advice = "run the same command again with fewer --jobs, or on a machine with more"
        reason = f"{job.item.name}: not enough memory; {advice}"
        done = replace(failed(job, reason), is_exhausted=True)
    except Exception as error:  # noqa: BLE001 - the outermost frame of a job: a bug of ours must not stop the others
        done = failed(job, f"this is a bug of ckptfix, please report it: {type(error).__name__}: {error}")
    if not done.staged:
        area.clear()
    seconds = round(time.perf_counter() - began, 4)
    return replace(done, record=replace(done.record, seconds=seconds, peak_memory=peak.nbytes()))


def _is_of_memory(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, MemoryError):
        error = error.__cause__
    return error is not None


def _perform(job: Job, area: JobFiles) -> Done:
    source, destination = open_place(job.source), open_place(job.destination)
    if job.known is not None and _still_holds(job.known, job.item, source, destination, area):
        return Done(job.number, job.known, is_known=True)
    if job.item.fault is not None and job.item.kind is not ItemKind.OTHER:
        raise UnreadableError(f"{job.item.name}: {job.item.fault}")
    with on_this_machine(source, job.item, area.file(SOURCE)) as path:
        try:
            done = _done(job, path, destination, area)
        except (UnreadableError, HostileError, UsageError) as error:
            done = _refused(job, error, area, path)
        if job.item.fault is None and source.root is not None:  # fetching has compared it with the listing already
            for entry in job.item.entries:
                if source.entry(entry.name) != entry:
                    raise CkptfixError(f"{entry.name}: changed while it was read; run the same command again")
    if done.staged and not job.is_grouped:
        deliver_staged(done.staged, destination)
        done = replace(done, staged=())
    return done


def _done(job: Job, path: Path, destination: Place, area: JobFiles) -> Done:
    """Return the result for an item at a local path."""
    if job.item.kind is ItemKind.OTHER:
        return copy_other(job, path, area)
    if job.adopts:
        return adopt_output(job, path, destination, area)
    try:
        return repair_item(job, path, area)
    except UnreadableError as error:
        if job.item.tolerates and isinstance(error, job.item.tolerates):
            return copy_other(job, path, area)
        raise


def _refused(job: Job, error: CkptfixError, area: JobFiles, path: Path | None = None) -> Done:
    outcome = Outcome.DECISION if isinstance(error, UsageError) else Outcome.FAILED
    if isinstance(error, (UnreadableError, HostileError)):
        outcome = Outcome.UNREADABLE
    text, sha256 = job.shown(error.worded(flag_text), area), None
    if path is not None:
        try:
            sha256 = digest_of(job, path)  # the bytes may be readable nevertheless
        except OSError:
            sha256 = None
    decisions = decisions_after_error(job, error)
    command = first_command(decisions)
    record = job.record(outcome, error=text, sha256=sha256, command=command, decisions=tuple(decisions))
    if isinstance(error, TakenNameError):  # depends on the other sources too, so the next run tries again
        record = replace(record, settings="")
    return Done(job.number, record)


def _still_holds(known: Record, item: Item, source: Place, destination: Place, area: JobFiles) -> bool:
    """Return whether the source and the output still have the digests recorded by an earlier run."""
    names = [part.name for part in item.parts] or [item.name]
    if known.sha256 is not None and known.sha256 != _digest(source, names, bool(item.parts), area):
        return False
    if known.output is None:
        return True
    written = known.output_parts or (known.output,)
    return known.output_sha256 == _digest(destination, written, bool(known.output_parts), area)


def _digest(place: Place, names: Iterable[str], is_folder: bool, area: JobFiles) -> str | None:
    """Return the SHA-256 of files in a place as hex digits; None if one is missing."""
    names = list(names)
    if any(place.entry(name) is None for name in names):
        return None
    root = place.root
    if root is None:
        root = area.folder("proof")
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            place.fetch(name, root / name)
    return sha256_of_files((name, root / name) for name in names) if is_folder else sha256_of_file(root / names[0])


KEEP = "keeps it unchanged, with its findings in the manifest"


def is_refused(job: Job, report: Report) -> bool:
    """Return whether no file may be written: the forward test failed and the user did not accept its findings, or the
    report has another reason."""
    if report.failed_forward:
        found = [each for each in report.remaining if each.subject is Subject.FORWARD and each.level > Level.NOTE]
        if not found or not all(map(report.is_accepted, found)):
            return True
    return bool(refusal(report, parsed_settings(job.treatment.settings)))


def decisions_for(job: Job, report: Report) -> list[dict[str, Any]]:
    """Return the possible decisions about a file, the recommended one first: repairs, those with a complete command
    before the others, and then accepting it as it is."""
    given, left = job.treatment.choices, report.left
    together = remedy_choices(report)
    by_itself = [(each,) for finding in left for each in remedies_of(finding)]
    if stopping := [finding for finding in blocking_findings(report, together[0]) if not _is_for(together[0], finding)]:
        together = [(each,) for finding in stopping for each in remedies_of(finding)]
    ways = [_way(job, report, remedies) for remedies in (*together, *by_itself)]
    ways.sort(key=lambda way: way["command"] is None)
    if not refusal(report, parsed_settings(job.treatment.settings)):
        codes = dict.fromkeys((*given.get("accept", ()), *(finding.code for finding in left)))
        is_of_machine = fault_of_the_machine(job, report) is not None
        options = {"smoke": False} if is_of_machine or not codes else {"accept": list(codes)}
        ways.append({"options": options, "text": KEEP, "command": command_with(job, options)})
    found: dict[str, dict[str, Any]] = {}
    texts = [way["text"] for way in ways if not way["options"]]
    for way in ways:
        is_repeated = not way["options"] and any(text.startswith(f"{way['text']}, or ") for text in texts)
        if not is_repeated and (way["options"] or way["text"]):
            found.setdefault(repr(way["options"] or way["text"]), way)
    return list(found.values())


def _way(job: Job, report: Report, remedies: Sequence[Remedy]) -> dict[str, Any]:
    """Return the decision for remedies: the options not given yet, their price, and their command if it is complete."""
    given = job.treatment.choices
    merged = with_remedies(given, remedies)
    added = {name: value for name, value in merged.items() if name not in given or given[name] != value}
    # A command is printed only if it can end in a file: no other finding may keep it from being written.
    is_open = all(_is_for(remedies, finding) for finding in blocking_findings(report, remedies))
    is_complete = bool(added) and is_open and all(remedy.is_complete for remedy in remedies)
    shown = {name: str(value) if isinstance(value, Placeholder) else value for name, value in added.items()}
    text, price = "; ".join(remedy.text for remedy in remedies), price_text(report, remedies)
    way = {"options": shown, "text": text, "command": command_with(job, added) if is_complete else None}
    return {**way, "price": price} if price else way


def _is_for(remedies: Sequence[Remedy], finding: Finding) -> bool:
    return any(remedy in remedies for remedy in remedies_of(finding))


def first_command(decisions: Iterable[Mapping[str, Any]]) -> str | None:
    return next((decision["command"] for decision in decisions if decision["command"]), None)


def decisions_after_error(job: Job, error: CkptfixError) -> list[dict[str, Any]]:
    """Return the decisions that an error suggests for a file: all its options together, or each value of one option."""
    if isinstance(error, TakenNameError):
        name = json.dumps(job.item.name, ensure_ascii=False)
        renaming = 'output = "{folder}/{name}{suffix}"'
        text = f"in zoo.toml, exclude = [{name}] leaves it out, and {renaming} below [[files]] gives it another name"
        return [{"options": {}, "text": text, "command": None}]
    # An error about the output names options that work; others may name an option that is wrong.
    scopes = (Scope.REPAIR, Scope.ONE_FILE) if isinstance(error, WriteError) else (Scope.ONE_FILE,)
    of_repairs = (option for option in error.options if BY_NAME[option.name].scope in scopes)
    named = [option for option in of_repairs if option.value is not None]
    names = dict.fromkeys(option.name for option in named)
    if len(names) < len(named):
        ways: list[dict[str, Any]] = [{option.name: option.value} for option in named]
    else:
        ways = [{option.name: option.value for option in named}] if named else []
    return [{"options": options, "text": "", "command": command_with(job, options)} for options in ways]


def fault_of_the_machine(job: Job, report: Report) -> str | None:
    """Return why the forward test failed if the machine is at fault and not the file, as when memory ran out or the GPU
    is gone. No decision is needed then: the next run tries again."""
    for finding in report.remaining if report.failed_forward else ():
        if finding.evidence.get("blame") == ENVIRONMENT:
            return f"{job.item.name}: {finding.message}; fix that and run the same command again"
    return None


def command_with(job: Job, options: Mapping[str, Any]) -> str:
    """Return the command that migrates only this file with these options, as a decision that later runs keep.

    It replaces an earlier decision, so it repeats that one's options."""
    words = option_words({**(job.decision or {}), **options})
    return shell_join((*job.again, "--only", no_option(job.item.name), *words))
