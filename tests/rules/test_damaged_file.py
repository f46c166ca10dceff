"""FIL203: what is lost of a damaged file is said, and filled only from a donor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptfix
from ckptfix.finding import Level
from tests.checks import assert_same, bytes_of, check_noop


def _cut(folder: Path, state_dict: dict[str, torch.Tensor], before: str) -> Path:
    """The file of a state_dict, and beside it the same cut short in the tensor of a key."""
    torch.save(state_dict, folder / "whole.pth")
    data = (folder / "whole.pth").read_bytes()
    (folder / "cut.pth").write_bytes(data[: data.index(bytes_of(state_dict[before])) + 4])
    return folder / "cut.pth"


STATE_DICT = {"a.weight": torch.arange(1.0, 61.0).reshape(6, 10), "b.weight": torch.arange(101.0, 121.0)}
LAST = "b.weight"


def _lost_after(file: Path) -> list[str]:
    return list(ckptfix.open_checkpoint(file, salvage=True).lost)


def test_noop_in_memory() -> None:
    check_noop(STATE_DICT, "FIL203", salvage=True)


def test_noop_a_whole_file_opened_with_salvage(tmp_path: Path) -> None:
    _cut(tmp_path, STATE_DICT, LAST)
    report = ckptfix.check(tmp_path / "whole.pth", salvage=True)
    assert [finding.code for finding in report.findings] == []


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    return _cut(tmp_path, STATE_DICT, LAST)


def test_what_is_lost_is_named_with_its_share(cut: Path) -> None:
    report = ckptfix.check(cut, salvage=True)
    cause, lost = (finding for finding in report.findings if finding.code == "FIL203")
    assert "is cut short" in cause.message
    assert lost.keys == tuple(_lost_after(cut))
    numel = sum(STATE_DICT[key].numel() for key in lost.keys)
    assert lost.message == f"{len(lost.keys)} of 2 tensors lost, {100 * numel / 80:.3g} % of the numbers"
    assert report.exit_code == 1


def test_a_repair_writes_what_is_whole_and_still_fails(cut: Path) -> None:
    repaired = ckptfix.repair(cut, salvage=True, beside=True)
    assert repaired.report.exit_code == 1
    assert repaired.report.output is not None
    loaded = torch.load(repaired.report.output)
    assert_same(loaded, {key: value for key, value in STATE_DICT.items() if key not in _lost_after(cut)})
    assert ckptfix.check(repaired.report.output).findings == ()


def test_a_donor_completes_it(cut: Path) -> None:
    repaired = ckptfix.repair(cut, salvage=True, beside=True, fill=str(cut.with_name("whole.pth")))
    assert repaired.report.exit_code == 0
    assert repaired.report.output is not None
    loaded = torch.load(repaired.report.output)
    assert_same({key: loaded[key] for key in STATE_DICT}, STATE_DICT)


def test_a_donor_of_another_shape_does_not(cut: Path) -> None:
    donor = cut.with_name("donor.pth")
    torch.save({key: torch.zeros(3) for key in STATE_DICT}, donor)
    report = ckptfix.repair(cut, salvage=True, fill=str(donor)).report
    assert [finding.keys for finding in report.remaining if finding.keys] == [tuple(_lost_after(cut))]
    assert report.exit_code == 1


def test_a_target_fills_what_it_misses(tmp_path: Path) -> None:
    model = torch.nn.Linear(10, 6)
    cut = _cut(tmp_path, dict(model.state_dict()), "bias")
    for fill, code in (("target", 0), (None, 1)):
        report = ckptfix.repair(cut, torch.nn.Linear(10, 6), salvage=True, fill=fill).report
        assert report.exit_code == code
        assert [f.level for f in report.findings if f.code == "FIL203" and f.keys] == [Level.NOTE]


def test_a_lost_counter_is_not_taken_for_zero(tmp_path: Path) -> None:
    model = torch.nn.BatchNorm1d(4)
    torch.nn.init.constant_(model.get_buffer("num_batches_tracked"), 7_654_321)
    torch.save(model.state_dict(), tmp_path / "whole.pth")
    data = (tmp_path / "whole.pth").read_bytes()
    (tmp_path / "cut.pth").write_bytes(data[: data.index((7_654_321).to_bytes(8, "little")) + 4])
    repaired = ckptfix.repair(tmp_path / "cut.pth", salvage=True)
    assert "num_batches_tracked" not in repaired.state_dict()


def test_bytes_behind_a_legacy_file_are_a_note(tmp_path: Path) -> None:
    whole = tmp_path / "whole.pth"
    torch.save(STATE_DICT, whole, _use_new_zipfile_serialization=False)
    whole.write_bytes(whole.read_bytes() + b"tail")
    report = ckptfix.check(whole)
    assert [(f.code, f.level) for f in report.findings] == [("FIL203", Level.NOTE)]
    assert report.exit_code == 0
