"""FIL201: what fails its checksum is named, and replaced or left out only on request."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.core.facts import Kind
from ckptfix.reading.archives.wrapped import BESIDE_LIMIT
from tests.checks import assert_same, bytes_of
from tests.reading.folders.ranks.genuine import tensors_of, unpacked


def _saved(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    flat = torch.arange(1001.0, 1033.0)
    state_dict = {"a.weight": torch.arange(1.0, 65.0).reshape(8, 8), "b.head": flat[:16], "b.tail": flat[16:]}
    torch.save(state_dict, folder / "whole.pth")
    return folder / "whole.pth", state_dict


def _flipped(whole: Path, tensor: torch.Tensor, name: str = "flipped.pth") -> Path:
    data = bytearray(whole.read_bytes())
    data[data.index(bytes_of(tensor)) + 5] ^= 0x10
    file = whole.with_name(name)
    file.write_bytes(data)
    return file


def _codes(report: ckptfix.Report) -> list[str]:
    return [finding.code for finding in report.findings]


def test_noop_a_healthy_file(tmp_path: Path) -> None:
    assert "FIL201" not in _codes(ckptfix.check(_saved(tmp_path)[0]))


def test_noop_a_file_that_was_saved_without_checksums(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        whole, _ = _saved(tmp_path)
    finally:
        torch.serialization.set_crc32_options(before)
    assert "FIL201" not in _codes(ckptfix.check(whole))


def test_noop_where_no_value_is_read(tmp_path: Path) -> None:
    whole, state_dict = _saved(tmp_path)
    assert _codes(ckptfix.check(_flipped(whole, state_dict["a.weight"]), values=False)) == []


def test_all_tensors_of_the_storage_are_named_and_nothing_is_changed(tmp_path: Path) -> None:
    whole, state_dict = _saved(tmp_path)
    repaired = ckptfix.repair(_flipped(whole, state_dict["b.tail"]))
    (finding,) = (finding for finding in repaired.report.remaining if finding.code == "FIL201")
    assert finding.keys == ("b.head", "b.tail")
    assert repaired.report.exit_code == 1
    assert repaired.checkpoint.keys() == list(state_dict)
    with pytest.raises(ckptfix.UnreadableError, match=r"the storage of b\.head and of 1 more fails its checksum"):
        repaired.state_dict()


def test_a_copy_keeps_the_checksum_so_that_the_damage_stays_visible(tmp_path: Path) -> None:
    whole, state_dict = _saved(tmp_path)
    ckptfix.repair(_flipped(whole, state_dict["a.weight"]), output=tmp_path / "copy.pth", values=False)
    assert "FIL201" in _codes(ckptfix.check(tmp_path / "copy.pth"))


def test_nothing_is_written_while_it_is_known(tmp_path: Path) -> None:
    whole, state_dict = _saved(tmp_path)
    for name in ("copy.pth", "copy.safetensors"):
        report = ckptfix.repair(_flipped(whole, state_dict["a.weight"]), output=tmp_path / name).report
        assert (report.output, report.exit_code) == (None, 1)
        assert not (tmp_path / name).exists()


def test_salvage_leaves_them_out_and_says_that_they_are_gone(tmp_path: Path) -> None:
    whole, state_dict = _saved(tmp_path)
    repaired = ckptfix.repair(_flipped(whole, state_dict["a.weight"]), salvage=True)
    assert list(repaired.state_dict()) == ["b.head", "b.tail"]
    assert [finding.keys for finding in repaired.report.remaining if finding.code == "FIL201"] == [("a.weight",)]
    assert repaired.report.exit_code == 1


@pytest.mark.parametrize(("option", "code"), [("ignore", "FIL201"), ("ignore", "FIL"), ("select", "KEY")])
def test_what_salvage_leaves_out_stays_out_where_no_one_wants_to_hear_of_it(
    tmp_path: Path, option: str, code: str
) -> None:
    whole, state_dict = _saved(tmp_path)
    damaged = _flipped(whole, state_dict["a.weight"])
    settings: dict[str, Any] = {option: (code,)}
    report = ckptfix.repair(damaged, salvage=True, output=tmp_path / "out.pth", **settings).report
    assert list(torch.load(tmp_path / "out.pth")) == ["b.head", "b.tail"]
    assert report.exit_code == 0
    assert [finding.message for finding in report.fixed] == ["1 damaged tensor left out"]


def test_noop_to_ignore_it_in_a_file_that_is_whole(tmp_path: Path) -> None:
    assert _codes(ckptfix.check(_saved(tmp_path)[0], salvage=True, ignore=("FIL201",))) == []


def test_salvage_and_a_donor_replace_them(tmp_path: Path) -> None:
    whole, state_dict = _saved(tmp_path)
    damaged = _flipped(whole, state_dict["a.weight"])
    repaired = ckptfix.repair(damaged, salvage=True, fill=str(whole), output=tmp_path / "out.pth")
    assert repaired.report.exit_code == 0
    loaded = torch.load(tmp_path / "out.pth")
    assert_same({key: loaded[key] for key in state_dict}, state_dict)


def test_a_donor_that_is_damaged_itself_does_not_pass(tmp_path: Path) -> None:
    whole, state_dict = _saved(tmp_path)
    damaged, donor = (_flipped(whole, state_dict["a.weight"], name) for name in ("damaged.pth", "donor.pth"))
    with pytest.raises(ckptfix.PlanError, match=r"the donor's own .* fails the checksum"):
        ckptfix.repair(damaged, salvage=True, fill=str(donor))


def test_with_a_target_the_missing_key_is_filled_under_its_name(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 4)
    torch.save(model.state_dict(), tmp_path / "whole.pth")
    damaged = _flipped(tmp_path / "whole.pth", model.weight)
    left_out = ckptfix.repair(damaged, torch.nn.Linear(8, 4), salvage=True)
    assert left_out.report.obstacles == ("weight",)
    filled = ckptfix.repair(damaged, torch.nn.Linear(8, 4), salvage=True, fill=str(tmp_path / "whole.pth"))
    assert not filled.report.is_open
    assert torch.equal(filled.state_dict()["weight"], model.weight)


def test_the_flipped_bit_of_the_corpus(corpus: Path) -> None:
    rows = [json.loads(line) for line in (corpus / "manifest.jsonl").read_text().splitlines()]
    for row in (row for row in rows if row["expect"] == "report_crc"):
        found = [f for f in ckptfix.check(corpus / row["path"]).findings if f.code == "FIL201"]
        assert [sorted(finding.keys) for finding in found] == [sorted(row["bad_keys"])]


@pytest.mark.parametrize("place", ["optimizer", "optimizer_states[0]", "D"])
def test_a_part_next_to_the_weights(tmp_path: Path, place: str) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    other = torch.nn.Linear(8, 4).state_dict()
    state: Any = optimizer.state_dict()
    beside = {"optimizer_states": [state]} if "[" in place else {"optimizer": state}  # as of Lightning
    torch.save({"model": model.state_dict(), **beside, "D": other}, tmp_path / "whole.pth")
    assert "FIL201" not in _codes(ckptfix.check(tmp_path / "whole.pth"))
    file = _flipped(tmp_path / "whole.pth", other["weight"] if place == "D" else state["state"][0]["exp_avg_sq"])
    (finding,) = (each for each in ckptfix.check(file, weights="model").findings if each.code == "FIL201")
    assert (finding.level.name, finding.keys) == ("ERROR", ())
    assert finding.message.startswith(f"1 storage of {place}, outside the weights")
    assert any("drop_optimizer" in dict(each.options) for each in finding.remedies) == (place != "D")
    left = ckptfix.repair(file, weights="model", drop_optimizer=True).report.left
    assert any(each.code == "FIL201" for each in left) == (place == "D")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"])
def test_another_file_of_an_archive(tmp_path: Path, method: int) -> None:
    """stable-baselines3 keeps its optimizer and settings next to the policy, and loads all of them."""
    whole, state_dict = _saved(tmp_path)
    with zipfile.ZipFile(tmp_path / "agent.zip", "w", method) as archive:
        archive.write(whole, "policy.pth")
        archive.writestr("data", json.dumps({"seed": [*range(200)]}))
        place = archive.getinfo("data").header_offset
    assert _codes(ckptfix.check(tmp_path / "agent.zip", select=["FIL2"])) == []
    data = bytearray((tmp_path / "agent.zip").read_bytes())
    data[place + 60] ^= 0x10
    (tmp_path / "agent.zip").write_bytes(data)
    (finding,) = ckptfix.check(tmp_path / "agent.zip", select=["FIL2"]).findings
    assert (finding.code, finding.message) == ("FIL201", "1 other file of the archive with wrong bytes: data")
    assert ckptfix.check(tmp_path / "agent.zip", values=False, select=["FIL2"]).findings == ()
    assert_same(dict(ckptfix.open_checkpoint(tmp_path / "agent.zip").state_dict()), state_dict)


def test_files_much_larger_than_the_checkpoint_are_not_read_for_it(tmp_path: Path) -> None:
    whole, _ = _saved(tmp_path)
    with zipfile.ZipFile(tmp_path / "agent.zip", "w") as archive:
        archive.write(whole, "policy.pth")
        archive.writestr("data", bytes(range(256)) * (BESIDE_LIMIT * whole.stat().st_size // 256 + 1))
        place = archive.getinfo("data").header_offset
    data = bytearray((tmp_path / "agent.zip").read_bytes())
    data[place + 60] ^= 0x10
    (tmp_path / "agent.zip").write_bytes(data)
    assert ckptfix.check(tmp_path / "agent.zip", select=["FIL2"]).findings == ()


def _flipped_in(file: Path, member: str) -> None:
    """Flip a bit in the data of a member of an archive."""
    with zipfile.ZipFile(file) as archive:
        (info,) = (info for info in archive.infolist() if info.filename.endswith(f"/{member}"))
        with archive.open(info) as data:
            content = data.read()
    whole = bytearray(file.read_bytes())
    whole[whole.index(content, info.header_offset) + len(content) // 2] ^= 0x10
    file.write_bytes(whole)


@pytest.mark.parametrize(
    ("sample", "file", "member", "users"),
    [
        ("fsdp2_w4", "model_world_size_4_rank_1.pt", "data/0", 1),
        ("megatron_tp2pp2", "mp_rank_00_001/model_optim_rng.pt", "data/0", 1),
        ("zero3_w3_bf16_g2", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "data/1", 9),
        ("universal_zero2", "zero/l1.weight/exp_avg.pt", "data/0", 1),
    ],
)
def test_in_a_folder_of_ranks_the_damaged_file_is_named(
    tmp_path: Path, sample: str, file: str, member: str, users: int
) -> None:
    saved, _ = unpacked(sample, tmp_path)
    assert "FIL201" not in _codes(ckptfix.check(saved))
    (damaged,) = (found for found in saved.rglob("*.pt") if found.as_posix().endswith(f"/{file}"))
    _flipped_in(damaged, member)
    (finding,) = (each for each in ckptfix.check(saved).findings if each.code == "FIL201")
    assert f" with wrong bytes in {file}" in finding.message
    assert finding.message.startswith("1 ")  # storage or tensor, whatever number of tensors uses it
    assert [len(names) for names in finding.evidence["files"].values()] == [users]
    assert [*finding.evidence["files"]] == [file]
    assert finding.remedies[0].text == f"fetch {file} again"


@pytest.mark.parametrize(
    ("sample", "file", "member", "lost"),
    [
        ("fsdp2_w4", "model_world_size_4_rank_0.pt", "data/38", None),  # a step, which the other ranks have too
        ("moe_zero1_w4_ep2", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "data/5", Kind.STATES_LOST),
        ("pipeline_pp2", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "data/0", Kind.STATES_LOST),
        ("universal_zero2", "zero/l1.weight/exp_avg.pt", "data/0", Kind.STATES_LOST),
        ("zero3_w3_bf16_g2", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "data/1", Kind.EXTRAS_LOST),  # of all
    ],
)
def test_the_state_of_a_parameter_with_a_damaged_moment_is_left_out_of_a_folder(
    tmp_path: Path, sample: str, file: str, member: str, lost: Kind | None
) -> None:
    saved, _ = unpacked(sample, tmp_path)
    ckptfix.repair(saved, output=tmp_path / "whole.pth")
    (damaged,) = (found for found in saved.rglob("*.pt") if found.as_posix().endswith(f"/{file}"))
    _flipped_in(damaged, member)
    with pytest.raises(ckptfix.WriteError, match=rf"\(in {file}\) fails its checksum"):
        ckptfix.repair(saved, output=tmp_path / "out.pth")
    weights = tmp_path / "out.safetensors"
    ckptfix.repair(saved, output=weights)
    assert weights.exists()
    ckptfix.repair(saved, output=tmp_path / "out.pth", drop_optimizer=True)
    assert "FIL201" not in _codes(ckptfix.check(tmp_path / "out.pth"))
    salvaged = ckptfix.repair(saved, output=tmp_path / "rest.pth", salvage=True)
    assert salvaged.report.exit_code == (1 if lost else 0)
    whole, rest = (dict(tensors_of(torch.load(tmp_path / name))) for name in ("whole.pth", "rest.pth"))
    gone = {path[2] if isinstance(path[2], str) else f"parameter {path[2]}" for path in whole.keys() - rest.keys()}
    facts = [fact for fact in ckptfix.open_checkpoint(saved, salvage=True).damage if fact.kind is lost]
    assert [{*fact.data.get("keys", gone)} for fact in facts] == ([gone] if lost else [])
    assert all(bytes_of(rest[path]) == bytes_of(whole[path]) for path in rest)
