"""One file of a migration, from the source to its place in the destination. The same code runs in a worker of this
machine, and on another node.

    fetch     a source that is not on this machine is copied to it
    treat     repaired as the table says, or copied bit for bit, in the scratch folder; hashed
    deliver   put in place; or left in the scratch folder for the driver, which flushes many files in one go
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ckptfix.core.options import flag_text
from ckptfix.errors import CkptfixError, HostileError, UnreadableError, UsageError
from ckptfix.zoo.items.grouping import Item, Kind
from ckptfix.zoo.manifest import Outcome, Record
from ckptfix.zoo.places import Place, open_place
from ckptfix.zoo.resources import Peak
from ckptfix.zoo.work.copying import deliver_staged, sha256_of_file, sha256_of_files
from ckptfix.zoo.work.deciding import decisions_after_error, first_command
from ckptfix.zoo.work.fetching import on_this_machine
from ckptfix.zoo.work.job import SOURCE, Done, Job, Workplace, failed
from ckptfix.zoo.work.treating import adopted, digest_of, mirrored, treated


def perform(job: Job, scratch: Path) -> Done:
    """Do a job, below a folder for temporary files. It returns whatever the file is, and leaves nothing in the folder
    but what is staged.
    """
    began, peak = time.perf_counter(), Peak()
    workplace = Workplace(scratch, job.number)
    try:
        done = _perform(job, workplace)
    except (UnreadableError, HostileError, UsageError) as error:
        done = _refused(job, error, workplace)
    except CkptfixError as error:
        done = replace(_refused(job, error, workplace), is_exhausted=_is_of_memory(error))
    except OSError as error:
        done = failed(job, f"{error.filename or job.item.name}: {error.strerror or error}")
    except MemoryError:
        advice = "run the same command again where there is more, or with fewer --jobs"
        reason = f"{job.item.name}: needs more memory than there is; {advice}"
        done = replace(failed(job, reason), is_exhausted=True)
    except Exception as error:  # noqa: BLE001 - the outermost place of a job: a bug of ours must not stop the others
        done = failed(job, f"this is a bug of ckptfix, please report it: {type(error).__name__}: {error}")
    if done.record.output_size is None:
        workplace.clear()
    seconds = round(time.perf_counter() - began, 4)
    return replace(done, record=replace(done.record, seconds=seconds, peak_memory=peak.nbytes()))


def _is_of_memory(error: BaseException | None) -> bool:
    """Whether a model's code met too little memory."""
    while error is not None and not isinstance(error, MemoryError):
        error = error.__cause__
    return error is not None


def _perform(job: Job, workplace: Workplace) -> Done:
    source, destination = open_place(job.source), open_place(job.destination)
    if job.known is not None and _still_holds(job.known, job.item, source, destination, workplace):
        return Done(job.number, job.known, is_known=True)
    if job.item.fault is not None and job.item.kind is not Kind.OTHER:
        raise UnreadableError(f"{job.item.name}: {job.item.fault}")
    with on_this_machine(source, job.item, workplace.file(SOURCE)) as path:
        try:
            done = _done(job, path, destination, workplace)
        except (UnreadableError, HostileError, UsageError) as error:
            done = _refused(job, error, workplace, path)
        if job.item.fault is None and source.root is not None:  # what was fetched is known to be what was listed
            for entry in job.item.entries:
                if source.entry(entry.name) != entry:
                    raise CkptfixError(f"{entry.name}: changed while it was read; run the same command again")
    if done.staged and not job.is_grouped:
        deliver_staged(done.staged, destination)
        workplace.clear()
        done = replace(done, staged=())
    return done


def _done(job: Job, path: Path, destination: Place, workplace: Workplace) -> Done:
    """What comes of an item that is at a path of this machine."""
    if job.item.kind is Kind.OTHER:
        return mirrored(job, path, workplace)
    if job.adopts:
        return adopted(job, path, destination, workplace)
    try:
        return treated(job, path, workplace)
    except UnreadableError:
        if job.item.is_doubtful:
            return mirrored(job, path, workplace)
        raise


def _refused(job: Job, error: CkptfixError, workplace: Workplace, path: Path | None = None) -> Done:
    outcome = Outcome.DECISION if isinstance(error, UsageError) else Outcome.FAILED
    if isinstance(error, (UnreadableError, HostileError)):
        outcome = Outcome.UNREADABLE
    text, sha256 = job.shown(error.worded(flag_text), workplace), None
    if path is not None:
        try:
            sha256 = digest_of(job, path)  # its bytes can perhaps be read
        except OSError:
            sha256 = None
    decisions = decisions_after_error(job, error)
    command = first_command(decisions)
    record = job.record(outcome, error=text, sha256=sha256, command=command, decisions=tuple(decisions))
    return Done(job.number, record)


def _still_holds(known: Record, item: Item, source: Place, destination: Place, workplace: Workplace) -> bool:
    """Whether the source and the output have the digests that an earlier run wrote down."""
    names = [part.name for part in item.parts] or [item.name]
    if known.sha256 is not None and known.sha256 != _digest(source, names, bool(item.parts), workplace):
        return False
    if known.output is None:
        return True
    written = known.output_parts or (known.output,)
    return known.output_sha256 == _digest(destination, written, bool(known.output_parts), workplace)


def _digest(place: Place, names: Iterable[str], is_folder: bool, workplace: Workplace) -> str | None:
    """The sha256 of files of a place; None if one is missing."""
    names = list(names)
    if any(place.entry(name) is None for name in names):
        return None
    root = place.root
    if root is None:
        root = workplace.folder("proof")
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            place.fetch(name, root / name)
    return sha256_of_files(root, names) if is_folder else sha256_of_file(root / names[0])
