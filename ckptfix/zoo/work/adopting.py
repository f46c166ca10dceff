"""A file that was put in the destination by hand, after a decision was asked for: it is looked at, and kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ckptfix.core.options import CHECK, settings_of
from ckptfix.repairing import check
from ckptfix.zoo.books.record import Outcome
from ckptfix.zoo.places import Place
from ckptfix.zoo.work.hashing import sha256_of_file
from ckptfix.zoo.work.job import Done, Job
from ckptfix.zoo.work.mirroring import digest_of
from ckptfix.zoo.work.treating import account
from ckptfix.zoo.work.workplace import Workplace

_OF_THE_SOURCE = {"weights", "member", "salvage", "format"}
"""Settings that the output has gone through already: the part of the source, and the format."""


def adopted(job: Job, path: Path, destination: Place, workplace: Workplace) -> Done:
    """The record of an output that somebody else wrote."""
    assert destination.root is not None, "a decision about files of another machine is carried out by migrate"
    goal = destination.root / job.written_name
    known = {"model", "model_args", "like", *settings_of(CHECK)} - _OF_THE_SOURCE
    arguments = {name: value for name, value in job.treatment.arguments.items() if name in known}
    report = replace(check(str(goal), **arguments), source=job.item.name)
    record = job.record(
        Outcome.REPAIRED,
        sha256=digest_of(job, path),
        output=job.written_name,
        output_size=goal.stat().st_size,
        output_sha256=sha256_of_file(goal),
        **account(job, report, workplace),
    )
    by_hand = "the output was put there by hand after a decision was asked for: it is kept"
    return Done(job.number, replace(record, remarks=(*record.remarks, by_hand)))
