"""What needs no repair goes to the destination bit for bit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from ckptfix.bytes.copying import CHUNK
from ckptfix.bytes.threads import background
from ckptfix.core.progress import Task
from ckptfix.errors import CkptfixError
from ckptfix.zoo.books.manifest import free_name
from ckptfix.zoo.books.record import Outcome
from ckptfix.zoo.work.hashing import sha256_of_file, sha256_of_files
from ckptfix.zoo.work.job import Done, Job, Others
from ckptfix.zoo.work.staging import Staged, flush
from ckptfix.zoo.work.workplace import Workplace

GROUPED = 64 << 20
"""Files up to so many bytes wait to be flushed with others; of a larger one the flush costs little by itself."""


def mirrored(job: Job, path: Path, workplace: Workplace) -> Done:
    """An item that is no checkpoint, copied under its own name, or one beside it where the migration has a file of that
    name."""
    if job.others is Others.SKIP or job.item.fault is not None:
        remarks = (job.item.fault,) if job.item.fault is not None else ()
        return Done(job.number, job.record(Outcome.OTHER, remarks=remarks))
    name = free_name(job.item.name)
    refuse_taken(job, name)
    with background() as pool:
        digest = pool.submit(sha256_of_file, path)
        staged = () if job.dry_run else copied(job, path, name, workplace)
        sha256 = digest.result()
    written = {} if job.dry_run else {"output_size": job.item.size, "output_sha256": sha256}
    return Done(job.number, job.record(Outcome.OTHER, sha256=sha256, output=name, **written), staged=staged)


def refuse_taken(job: Job, name: str) -> None:
    """Raise where another source has the name of the output: nothing is ever won by the last to come."""
    if name in job.taken:
        raise CkptfixError(
            f"{job.item.name}: another source has the name {name} in the destination too; give it "
            "another one in zoo.toml (output = …), or exclude one of them"
        )


def digest_of(job: Job, path: Path) -> str:
    """The sha256 of an item."""
    if job.item.parts:
        return sha256_of_files(root_of(job, path), [part.name for part in job.item.parts])
    return sha256_of_file(path)


def root_of(job: Job, path: Path) -> Path:
    """The folder that the names of an item's files are relative to."""
    depth = 0 if job.item.name == "." else job.item.name.count("/") + 1
    return path.parents[depth - 1] if depth else path


def copied(job: Job, path: Path, output: str, workplace: Workplace) -> tuple[Staged, ...]:
    """Copies of an item's files in the scratch folder. The files of a folder keep their names."""
    if not job.item.parts:
        return (_copied(path, output, workplace.file("copy"), job),)
    root = root_of(job, path)
    return tuple(
        _copied(root / part.name, part.name, workplace.file(f"copy-{number}"), job)
        for number, part in enumerate(job.item.parts)
    )


def _copied(source: Path, name: str, goal: Path, job: Job) -> Staged:
    size = copy_file(source, goal)
    is_flushed = not (job.is_grouped and size <= GROUPED) and not job.fetches
    if is_flushed:
        flush(goal)
    return Staged(str(goal), name, is_flushed)


def copy_file(source: Path, goal: Path) -> int:
    """Copy a file with its permissions and times, by the kernel alone where it can, which shares the blocks where the
    file system can. Gives the number of bytes.
    """
    with source.open("rb", buffering=0) as old, goal.open("xb", buffering=0) as new:
        size = os.fstat(old.fileno()).st_size
        task = Task(f"copying {source}", size)
        try:
            while moved := os.copy_file_range(old.fileno(), new.fileno(), CHUNK):
                task.advance(moved)
        except (OSError, AttributeError):  # another file system, or a system without the call: from here on by hand
            new.seek(task.done)
            old.seek(task.done)
            shutil.copyfileobj(old, new, 1 << 20)
        written = new.tell()
    if written != size:
        raise CkptfixError(f"{source}: changed while it was read; run the same command again")
    shutil.copystat(source, goal)
    return size


def facts_of(job: Job, sha256: str, output: str) -> dict[str, Any]:
    """The fields of a record that tell of a bit for bit copy."""
    parts = tuple(part.name for part in job.item.parts)
    return {"output": output, "output_size": job.item.size, "output_sha256": sha256, "output_parts": parts}
