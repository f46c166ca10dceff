"""FIL203: what a damaged file has lost is reported, and filled only from a donor."""

import gzip
import io
import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open

import ckptfix
from ckptfix.core.edits import Fill
from ckptfix.core.finding import Level
from ckptfix.core.spec import TensorSpec
from ckptfix.rules.fil203_damaged_file import donor_fill
from tests.attacks.crafted import STORAGE, safetensors
from tests.attacks.test_hostile_files import GOOD
from tests.checks import assert_same, bytes_of, check_noop
from tests.reading.folders.test_dcp import ONES, write_ranks
from tests.rules.proposals import context


def _cut(folder: Path, state_dict: dict[str, torch.Tensor], before: str) -> Path:
    """The file of a state_dict, and a copy that is cut short in the tensor of a key."""
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
    for fill, is_open in (("target", False), (None, True)):
        report = ckptfix.repair(cut, torch.nn.Linear(10, 6), salvage=True, fill=fill).report
        assert (report.is_open, report.exit_code) == (is_open, 1)
        assert [f.level for f in report.findings if f.code == "FIL203" and f.keys] == [Level.NOTE]


def test_a_lost_counter_is_not_taken_for_zero(tmp_path: Path) -> None:
    model = torch.nn.BatchNorm1d(4)
    torch.nn.init.constant_(model.get_buffer("num_batches_tracked"), 7_654_321)
    torch.save(model.state_dict(), tmp_path / "whole.pth")
    data = (tmp_path / "whole.pth").read_bytes()
    (tmp_path / "cut.pth").write_bytes(data[: data.index((7_654_321).to_bytes(8, "little")) + 4])
    repaired = ckptfix.repair(tmp_path / "cut.pth", salvage=True)
    assert "num_batches_tracked" not in repaired.state_dict()


def test_bytes_after_a_legacy_file_are_a_note(tmp_path: Path) -> None:
    whole = tmp_path / "whole.pth"
    torch.save(STATE_DICT, whole, _use_new_zipfile_serialization=False)
    whole.write_bytes(whole.read_bytes() + b"tail")
    report = ckptfix.check(whole)
    assert [(f.code, f.level) for f in report.findings] == [("FIL203", Level.NOTE)]
    assert report.exit_code == 0


def misnamed(folder: Path) -> Path:
    """A file of which a bit of a name has flipped: the counter of its norm is there under another name."""
    norm = torch.nn.BatchNorm1d(3)
    norm(torch.ones(2, 3))
    path = folder / "rot.pth"
    torch.save(dict(norm.state_dict()), path)
    path.write_bytes(path.read_bytes().replace(b"num_batches_tracked", b"num_batchds_tracked"))
    return path


def test_a_damaged_list_of_names_stays_a_warning_and_nothing_is_made_up(tmp_path: Path) -> None:
    done = ckptfix.repair(misnamed(tmp_path), salvage=True, output=tmp_path / "out.pth")
    left = [finding for finding in done.report.remaining if finding.code in ("FIL203", "BUF101")]
    assert [(finding.code, finding.level) for finding in left] == [("FIL203", Level.WARNING), ("BUF101", Level.WARNING)]
    assert "data.pkl that fails its checksum: its names, shapes and offsets" in left[0].message
    assert done.report.exit_code == 1
    written = torch.load(tmp_path / "out.pth")
    assert list(written) == ["weight", "bias", "running_mean", "running_var", "num_batchds_tracked"]
    assert written["num_batchds_tracked"] == 1


def test_a_damaged_list_of_names_fits_no_model_unless_asked(tmp_path: Path) -> None:
    path, norm = misnamed(tmp_path), torch.nn.BatchNorm1d(3)
    report = ckptfix.repair(path, norm, salvage=True, output=tmp_path / "out.pth").report
    assert (report.exit_code, report.output) == (1, None)
    with pytest.raises(ckptfix.CkptfixError, match="does not fit"):
        ckptfix.load(norm, path, salvage=True)
    ckptfix.load(norm, path, salvage=True, unsafe_fixes=True)
    assert norm.num_batches_tracked == 0


@pytest.mark.parametrize(("form", "is_doubted"), [("zip", False), ("legacy", True)])
def test_what_was_packed_and_fails_its_checksum_is_doubted_where_nothing_else_vouches(
    form: str, is_doubted: bool, tmp_path: Path
) -> None:
    file = io.BytesIO()
    torch.save(STATE_DICT, file, _use_new_zipfile_serialization=form == "zip")
    packed = bytearray(gzip.compress(file.getvalue()))
    packed[-6] ^= 1
    (tmp_path / "model.pth.gz").write_bytes(packed)
    report = ckptfix.repair(tmp_path / "model.pth.gz", salvage=True, output=tmp_path / "out.pth").report
    doubts = [finding for finding in report.remaining if finding.level > Level.NOTE]
    assert [(finding.code, finding.keys) for finding in doubts] == [("FIL203", tuple(STATE_DICT))] * is_doubted
    assert report.exit_code == int(is_doubted)
    assert all("wrong checksum" in finding.message for finding in doubts)


DONOR = {"weight": torch.ones(3, 4), "bias": torch.ones(3)}
SPEC = TensorSpec("float32", (3, 4))


@pytest.mark.parametrize(
    ("key", "spec", "donor", "model"),
    [
        pytest.param("weight", SPEC, None, None, id="there_is_no_donor"),
        pytest.param("other", SPEC, DONOR, None, id="the_donor_does_not_have_it"),
        pytest.param("bias", SPEC, DONOR, None, id="it_has_another_shape_there"),
        pytest.param("weight", SPEC, DONOR, torch.nn.Linear(4, 3), id="the_rule_on_missing_keys_fills_for_a_target"),
    ],
)
def test_noop(key: str, spec: TensorSpec, donor: dict[str, torch.Tensor] | None, model: torch.nn.Module | None) -> None:
    assert donor_fill(key, spec, context({}, model, donor)) is None


@pytest.mark.parametrize("spec", [SPEC, pytest.param(None, id="nobody_knows_the_shape")])
def test_the_same_key_in_the_same_shape_is_taken(spec: TensorSpec | None) -> None:
    fill = donor_fill("weight", spec, context({}, None, DONOR))
    assert fill == Fill("weight", "float32", (3, 4), "donor", donor_key="weight")


@pytest.mark.parametrize("is_shard", [False, True])
def test_notes_that_are_not_texts_become_texts(tmp_path: Path, is_shard: bool) -> None:
    """Scripts that write the header themselves put numbers there, and safetensors opens no such file."""
    source, output = tmp_path / "model-00001-of-00001.safetensors", tmp_path / "out.safetensors"
    source.write_bytes(safetensors({"__metadata__": {"epoch": 3, "by": "me", "ss": {"x": [1]}}, **GOOD}, STORAGE))
    with pytest.raises(SafetensorError, match=r"InvalidHeaderDeserialization|expected a string"):
        safe_open(source, "pt")
    if is_shard:
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(GOOD, source.name)}))
    report = ckptfix.repair(index if is_shard else source, output=output).report
    assert [(one.code, one.level) for one in report.fixed] == [("FIL203", Level.WARNING)]
    with safe_open(output, "pt") as written:
        assert written.metadata().items() >= {"epoch": "3", "by": "me", "ss": '{"x": [1]}'}.items()
        assert {key: bytes_of(written.get_tensor(key)) for key in written.keys()} == dict.fromkeys(GOOD, STORAGE)  # noqa: SIM118
    assert not ckptfix.check(output).findings


def test_copies_of_ranks_that_differ_stay_a_warning(tmp_path: Path) -> None:
    other = (torch.ones(2), [((0,), torch.zeros(2))])
    write_ranks(tmp_path, [{"a": ONES, "b": ONES}, {"a": other, "b": ONES}])
    report = ckptfix.repair(tmp_path, salvage=True, output=tmp_path / "out.pth").report
    assert [(finding.keys, finding.fix is None) for finding in report.findings if finding.level] == [
        ((), False),
        (("a",), True),
    ]
    assert report.exit_code == 1
