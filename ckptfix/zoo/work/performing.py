"""One file of a migration, from the source to its place in the destination. The same code runs in a worker of this
machine, and on another node.

    fetch     a source that is not on this machine is copied to it
    repair    repairing.repair: what the treatment asks for, written beside the destination
    copy      what needs no repair is copied bit for bit
    prove     sha256 of the source, beside the rest, and of the output
    deliver   put in place; or left in the scratch folder for the driver, who flushes many files in one go
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from ckptfix.errors import CkptfixError, HostileError, UnreadableError, UsageError
from ckptfix.zoo.books.record import Outcome
from ckptfix.zoo.engines.memory import Peak
from ckptfix.zoo.items.listing import Kind
from ckptfix.zoo.places import Place, open_place
from ckptfix.zoo.work.adopting import adopted
from ckptfix.zoo.work.deciding import command_after_error
from ckptfix.zoo.work.fetching import on_this_machine
from ckptfix.zoo.work.job import Done, Job, failed
from ckptfix.zoo.work.mirroring import digest_of, mirrored
from ckptfix.zoo.work.proving import still_holds
from ckptfix.zoo.work.staging import deliver_staged
from ckptfix.zoo.work.treating import treated
from ckptfix.zoo.work.workplace import SOURCE, Workplace


def perform(job: Job, scratch: Path) -> Done:
    """Do a job, below a folder for temporary files. Whatever the file is, this returns; nothing is left in the folder
    but what is staged.
    """
    began, peak = time.perf_counter(), Peak()
    workplace = Workplace(scratch, job.number)
    try:
        done = _perform(job, workplace)
    except UnreadableError as error:
        done = _refused(job, Outcome.UNREADABLE, error, workplace)
    except UsageError as error:
        done = _refused(job, Outcome.DECISION, error, workplace)
    except CkptfixError as error:
        done = replace(_refused(job, Outcome.FAILED, error, workplace), is_exhausted=_is_of_memory(error))
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
    """Whether it was too little memory, which the code of a model met."""
    while error is not None and not isinstance(error, MemoryError):
        error = error.__cause__
    return error is not None


def _perform(job: Job, workplace: Workplace) -> Done:
    source, destination = open_place(job.source), open_place(job.destination)
    if job.known is not None and still_holds(job.known, job.item, source, destination, workplace):
        return Done(job.number, job.known, is_known=True)
    if job.item.fault is not None and job.item.kind is not Kind.OTHER:
        raise UnreadableError(f"{job.item.name}: {job.item.fault}")
    with on_this_machine(source, job.item, workplace.file(SOURCE)) as path:
        try:
            done = _done(job, path, destination, workplace)
        except UnreadableError as error:
            done = _refused(job, Outcome.UNREADABLE, error, workplace, path)
        except UsageError as error:
            done = _refused(job, Outcome.DECISION, error, workplace, path)
        if job.item.fault is None and source.root is not None:  # what was fetched is proven to be what was listed
            _refuse_changed(job, source)
    if done.staged and not job.is_grouped:
        deliver_staged(done.staged, destination)
        workplace.clear()
        done = replace(done, staged=())
    return done


def _done(job: Job, path: Path, destination: Place, workplace: Workplace) -> Done:
    """What comes of an item that lies at a path of this machine."""
    if job.item.kind is Kind.OTHER:
        return mirrored(job, path, workplace)
    if job.adopts:
        return adopted(job, path, destination, workplace)
    return _treated(job, path, workplace)


def _treated(job: Job, path: Path, workplace: Workplace) -> Done:
    try:
        return treated(job, path, workplace)
    except HostileError:
        raise
    except UnreadableError:
        if job.item.is_doubtful:
            return mirrored(job, path, workplace)
        raise


def _refuse_changed(job: Job, source: Place) -> None:
    """Raise where the source is no longer the file that was listed: its record would tell of another one."""
    for entry in job.item.entries:
        if source.entry(entry.name) != entry:
            raise CkptfixError(f"{entry.name}: changed while it was read; run the same command again")


def _refused(job: Job, outcome: Outcome, error: CkptfixError, workplace: Workplace, path: Path | None = None) -> Done:
    text = job.shown(str(error), workplace)
    sha256 = None if path is None else _sha256_of_bytes(job, path)
    command = command_after_error(job, outcome, text)
    return Done(job.number, job.record(outcome, error=text, sha256=sha256, command=command))


def _sha256_of_bytes(job: Job, path: Path) -> str | None:
    """The digest of what could not be read as a checkpoint; as bytes it perhaps can."""
    try:
        return digest_of(job, path)
    except OSError:
        return None
