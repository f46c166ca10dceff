"""A checkpoint gets its treatment: it is repaired or copied, and every digest is taken."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from posixpath import basename, dirname, join, splitext
from typing import Any

from ckptfix.bytes.threads import background, without_threads
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.report import Report
from ckptfix.engine.delivery import refusal
from ckptfix.engine.validation import parsed_settings
from ckptfix.repairing import repair
from ckptfix.report.weights import weights_to_json
from ckptfix.zoo.books.journal import line_of
from ckptfix.zoo.books.record import Outcome
from ckptfix.zoo.items.renames import name_with_hash, wrong_hash
from ckptfix.zoo.work.deciding import command_for, fault_of_the_machine
from ckptfix.zoo.work.fingerprint import fingerprints
from ckptfix.zoo.work.hashing import sha256_of_file, sha256_of_files
from ckptfix.zoo.work.job import Done, Job
from ckptfix.zoo.work.mirroring import GROUPED, copied, digest_of, facts_of, refuse_taken
from ckptfix.zoo.work.staging import Staged
from ckptfix.zoo.work.workplace import Workplace

ALONE = 64 << 20
"""Up to this size a job has no threads of its own: other files keep the other processors busy meanwhile, and handing
work over would take time from them."""


def treated(job: Job, path: Path, workplace: Workplace) -> Done:
    """Repair a checkpoint below the scratch folder, or copy it there where there is nothing to repair."""
    goal = job.written_name
    draft = _draft(job, goal, workplace)
    with _threads(job):
        done = repair(
            str(path),
            output=draft,
            only_changes=True,
            flush=not _waits(job),
            dry_run=job.dry_run,
            **job.treatment.arguments,
        )
    sha256, written_sha256 = _digests(job, path, draft)
    report = _with_name(job, replace(done.report, source=job.item.name), sha256)
    is_rewritten = done.is_changed
    staged: tuple[Staged, ...] = ()
    facts: dict[str, Any] = {}
    if not is_refused(job, report):
        goal = goal if is_rewritten else name_with_hash(job.output, sha256, sha256)
        refuse_taken(job, goal)
        if job.dry_run:
            facts = {"output": goal}
        elif is_rewritten:
            staged, facts = _rewritten(job, draft, goal, sha256, written_sha256)
        else:
            staged, facts = copied(job, path, goal, workplace), facts_of(job, sha256, goal)
    outcome = Outcome.DECISION if report.exit_code else Outcome.REPAIRED if is_rewritten else Outcome.FINE
    command = command_for(job, report) if outcome is Outcome.DECISION else None
    if (fault := fault_of_the_machine(job, report)) is not None:
        outcome = Outcome.FAILED
    told = account(job, report, workplace)
    return Done(
        job.number,
        job.record(outcome, sha256=sha256, error=fault, command=command, **facts, **told),
        _weights(report, done.checkpoint),
        staged,
    )


def _draft(job: Job, goal: str, workplace: Workplace) -> Path:
    """Where the output is written first. Its suffix says in which format; shards need their names in a folder."""
    if _in_shards(job):
        return workplace.folder("shards") / basename(goal)
    return workplace.file(f"draft{splitext(goal)[1]}")


def _in_shards(job: Job) -> bool:
    return job.treatment.settings.get("shard_size") is not None


def is_refused(job: Job, report: Report) -> bool:
    """Whether no file may be written, for a reason that the report tells."""
    failed = report.smoke is not None and report.smoke.passed is False
    return failed or bool(refusal(report, parsed_settings(job.treatment.settings)))


def account(job: Job, report: Report, workplace: Workplace) -> dict[str, Any]:
    """The fields of a record that a report fills."""
    data = report.to_json(fixes=False)
    fields = {name: data[name] for name in ("format", "tensors", "numel", "target", "coverage", "smoke")}
    remarks = tuple(job.shown(remark, workplace) for remark in report.remarks)
    return {**fields, "findings": tuple(data["findings"]), "edits": tuple(data["edits"]), "remarks": remarks}


def _threads(job: Job) -> AbstractContextManager[None]:
    return without_threads() if job.item.size <= ALONE else nullcontext()


def _waits(job: Job) -> bool:
    """Whether the output need not be flushed now: the driver does that for many, or it goes to another machine."""
    return job.fetches or (job.is_grouped and job.item.size <= GROUPED)


def _digests(job: Job, path: Path, draft: Path) -> tuple[str, str]:
    """The sha256 of the source and, where it is one file, of what was written from it; else an empty text."""
    if _in_shards(job) or not draft.is_file():
        return digest_of(job, path), ""
    if job.item.parts:
        return digest_of(job, path), sha256_of_file(draft)
    with _threads(job), background() as pool:
        of_source = pool.submit(sha256_of_file, path)
        of_draft = sha256_of_file(draft)
        return of_source.result(), of_draft


def _rewritten(
    job: Job, draft: Path, goal: str, source_sha256: str, sha256: str
) -> tuple[tuple[Staged, ...], dict[str, Any]]:
    """What ``repair`` wrote, to be put in place, and its fields of the record. ``sha256`` is that of a single file."""
    is_flushed = not _waits(job)
    if not _in_shards(job):
        goal = name_with_hash(goal, sha256, source_sha256)
        facts = {"output": goal, "output_size": draft.stat().st_size, "output_sha256": sha256}
        return (Staged(str(draft), goal, is_flushed),), facts
    folder = draft.parent
    # The index last: as long as it is not there, no reader finds the shards.
    files = sorted((path.name for path in folder.iterdir()), key=lambda name: (name.endswith(".index.json"), name))
    staged = tuple(Staged(str(folder / name), join(dirname(goal), name), is_flushed) for name in files)
    parts = tuple(each.name for each in staged)
    size = sum((folder / name).stat().st_size for name in files)
    facts = {"output": parts[-1], "output_size": size, "output_parts": parts}
    return staged, {**facts, "output_sha256": sha256_of_files(folder, sorted(files))}


def _with_name(job: Job, report: Report, sha256: str) -> Report:
    """The report, with the finding that the hash in the source's name is none of its content."""
    finding = None if job.item.parts else wrong_hash(job.item.name, sha256)
    if finding is None or not parsed_settings(job.treatment.settings).selects(finding.code):
        return report
    return replace(report, findings=(*report.findings, finding))


def _weights(report: Report, repaired: Checkpoint) -> bytes | None:
    return line_of(weights_to_json(report, fingerprints(repaired))) if report.figures else None
