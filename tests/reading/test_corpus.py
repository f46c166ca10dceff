"""Every genuine file of the corpus is read bit for bit, or refused with its true cause."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

import ckptfix
from ckptfix.errors import CkptfixError, UnreadableError
from tests.checks import bytes_of
from tests.conftest import ROOT

FOLDER = Path(os.environ.get("CKPTFIX_CORPUS") or ROOT.parent / "shared" / "corpus")
DAMAGED = ("salvage_partial", "load_ok_or_salvage")
HOSTILE = ("refuse_malicious", "refuse_resource")


def rows(*expectations: str, others: bool = False) -> list[Any]:
    """The rows of the manifest that expect one of these, or, with ``others``, none of these."""
    manifest = FOLDER / "manifest.jsonl"
    if not manifest.is_file():
        return [pytest.param(None, id="no corpus")]  # the fixture `corpus` says why it is skipped
    every = [json.loads(line) for line in manifest.read_text().splitlines()]
    chosen = [row for row in every if (row["expect"] in expectations) != others and "|" not in row["container"]]
    return [pytest.param(row, id=row["path"]) for row in chosen]


def opened(corpus: Path, row: dict[str, Any], **options: Any) -> ckptfix.Checkpoint:
    if row["container"]:
        options["weights"] = row["container"]
    return ckptfix.open_checkpoint(corpus / row["path"], **options)


def is_true(row: dict[str, Any], key: str, checkpoint: ckptfix.Checkpoint) -> bool:
    truth, tensor = row["truth"][key], checkpoint.read(key)
    if truth.get("sha256") is None:
        return True
    tensor = tensor.float() if truth.get("sha256_is_of_float32") else tensor
    return (
        bool(list(tensor.shape) == truth["shape"]) and hashlib.sha256(bytes_of(tensor)).hexdigest() == truth["sha256"]
    )


@pytest.mark.filterwarnings("ignore")  # torch warns of sparse and quantised tensors
@pytest.mark.parametrize("row", rows("diagnose", *DAMAGED, *HOSTILE, others=True))
def test_a_whole_file_is_read_bit_for_bit(row, corpus):
    checkpoint = opened(corpus, row)
    changed = set(row.get("bad_keys") or ()) if row["expect"] in ("report_crc", "warn_suspicious_zeros") else set()
    assert set(checkpoint.specs) == set(row["truth"])
    assert [key for key in checkpoint.specs if key not in changed and not is_true(row, key, checkpoint)] == []
    if not changed:
        mapped = checkpoint.state_dict(mmap=True)
        assert all(bytes_of(mapped[key]) == bytes_of(checkpoint.read(key)) for key in checkpoint.specs)


@pytest.mark.parametrize("row", rows("diagnose"))
def test_a_file_of_another_kind_is_refused_with_its_true_cause(row, corpus):
    with pytest.raises(CkptfixError) as caught:
        opened(corpus, row)
    assert row["path"].split("/")[-1] in str(caught.value)


@pytest.mark.parametrize("row", rows(*DAMAGED))
def test_complete_tensors_of_damaged_files_are_correct(row, corpus):
    try:
        checkpoint = opened(corpus, row, salvage=True)
    except UnreadableError:
        assert not row.get("recoverable_keys")
        return
    whole = row["truth"] if row["expect"] == "load_ok_or_salvage" else row.get("recoverable_keys") or ()
    assert set(checkpoint.specs) == set(whole)
    assert [key for key in checkpoint.specs if not is_true(row, key, checkpoint)] == []


@pytest.mark.parametrize("row", rows(*HOSTILE))
def test_nothing_of_a_hostile_file_runs_and_nothing_is_written(row, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = corpus / row["path"]
    for run in (ckptfix.check, lambda path: ckptfix.repair(path, output=tmp_path / "out.pth").report):
        try:
            report = run(path)
        except CkptfixError as error:
            said = str(error)
        else:
            said = report.source
            assert report.exit_code != 0
            assert report.output is None
        assert path.name in said
    assert list(tmp_path.iterdir()) == []
