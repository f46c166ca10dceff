"""Damaged TorchScript archives: every weight that has its bytes and its name, and the true cause where none has."""

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.facts import Fact, Kind, clause
from ckptfix.errors import CkptfixError, UnreadableError
from tests.checks import assert_same, bytes_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 40)
        self.norm = nn.BatchNorm1d(40)
        self.last = nn.Linear(40, 30, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.norm(self.first(x)))
        return out


@pytest.fixture
def saved() -> tuple[bytes, dict[str, torch.Tensor]]:
    """The bytes of an archive, and the state_dict in it."""
    torch.manual_seed(0)
    module = torch.jit.script(Net().eval())
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    return buffer.getvalue(), dict(module.state_dict())


def as_json(state_dict: dict[str, torch.Tensor]) -> bytes:
    """A module as torch 1.0 saved it: the tensors, and after them the list of them."""
    names = {"torch.float32": "FLOAT", "torch.int64": "INT64"}
    records = [
        {"dims": [*map(str, tensor.shape)], "dataType": names[str(tensor.dtype)], "data": {"key": f"tensors/{number}"}}
        for number, tensor in enumerate(state_dict.values())
    ]
    entries = [{"name": key.replace(".", "_"), "tensorId": str(number)} for number, key in enumerate(state_dict)]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("m/version", "1")
        archive.writestr("m/code/m.py", "op_version_set = 0")
        for number, tensor in enumerate(state_dict.values()):
            archive.writestr(f"m/tensors/{number}", bytes_of(tensor))
        archive.writestr("m/model.json", json.dumps({"mainModule": {"parameters": entries}, "tensors": records}))
    return buffer.getvalue()


def place(data: bytes, member: str) -> tuple[int, int]:
    """Where the local header of a member and its data begin."""
    archive = zipfile.ZipFile(io.BytesIO(data))
    info = next(info for info in archive.infolist() if info.filename.partition("/")[2].startswith(member))
    header = info.header_offset
    lengths = [int.from_bytes(data[at : at + 2], "little") for at in (header + 26, header + 28)]
    return header, header + 30 + sum(lengths)


def salvaged(path: Path, data: bytes) -> Checkpoint:
    """What is whole of a file that is refused without salvage."""
    path.write_bytes(data)
    with pytest.raises(UnreadableError):
        ckptfix.open_checkpoint(path)
    return ckptfix.open_checkpoint(path, salvage=True)


@pytest.mark.parametrize("zeros", [False, True], ids=["cut short", "zero tail"])
@pytest.mark.parametrize("member", ["code/", "constants.pkl", "version"])
def test_after_the_pickle_every_weight_is_whole(member: str, zeros: bool, saved: Any, tmp_path: Path) -> None:
    data, state_dict = saved
    stop = place(data, member)[0] + 10
    checkpoint = salvaged(tmp_path / "cut.pt", data[:stop] + bytes((len(data) - stop) * zeros))
    assert checkpoint.format == "torchscript"
    assert_same(dict(checkpoint.state_dict()), state_dict)
    assert checkpoint.lost == {}


def test_the_lost_sources_are_reported(saved: Any, tmp_path: Path) -> None:
    data, _ = saved
    said = Fact(Kind.SOURCES_LOST)
    assert said in salvaged(tmp_path / "cut.pt", data[: place(data, "code/")[0]]).damage
    assert said not in salvaged(tmp_path / "cut.pt", data[: place(data, "version")[0]]).damage


@pytest.mark.parametrize("member", ["data.pkl", "data/5"])
def test_without_its_pickle_no_storage_has_a_name(member: str, saved: Any, tmp_path: Path) -> None:
    data, _ = saved
    path = tmp_path / "cut.pt"
    path.write_bytes(data[: place(data, member)[1] + 3])
    for salvage in (False, True):
        with pytest.raises(
            UnreadableError, match=r"data\.pkl: \d+ storages before it can be read, but nothing says which"
        ):
            ckptfix.open_checkpoint(path, salvage=salvage)


@pytest.mark.parametrize(
    ("member", "offset", "said"),
    [
        ("data.pkl", 0, "fails its checksum"),
        ("code/", 20, "(fails its checksum|cannot be unpacked)"),
        ("constants.pkl", 1, "fails its checksum"),
    ],
)
def test_a_member_that_says_what_the_tensors_are_is_proved(
    member: str, offset: int, said: str, saved: Any, tmp_path: Path
) -> None:
    data, _ = saved
    spoilt = bytearray(data)
    start = place(data, member)[1]
    spoilt[data.index(b"running_mean", start) if member == "data.pkl" else start + offset] ^= 1
    (tmp_path / "rot.pt").write_bytes(spoilt)
    with pytest.raises(UnreadableError, match=rf"has a {member}.* that {said}.*salvage=True"):
        ckptfix.open_checkpoint(tmp_path / "rot.pt")


def test_a_member_without_its_header_costs_no_other(saved: Any, tmp_path: Path) -> None:
    data, state_dict = saved
    spoilt = bytearray(data)
    spoilt[data.rindex(b"PK\x03\x04", 0, data.index(bytes_of(state_dict["last.weight"])))] ^= 1
    checkpoint = salvaged(tmp_path / "header.pt", bytes(spoilt))
    whole = dict(checkpoint.state_dict())
    assert_same(whole, {key: state_dict[key] for key in whole})
    assert [*whole, *checkpoint.lost] == list(state_dict)


def test_a_storage_of_which_the_archive_has_a_part(saved: Any, tmp_path: Path) -> None:
    data, state_dict = saved
    archive = zipfile.ZipFile(io.BytesIO(data))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as shorter:
        for info in archive.infolist():
            content = archive.read(info)
            is_last = content == bytes_of(state_dict["last.weight"])
            shorter.writestr(info.filename, content[:100] if is_last else content)
    checkpoint = salvaged(tmp_path / "torn.pt", out.getvalue())
    assert list(checkpoint.lost) == ["last.weight"]
    assert any("has 100 of the 4800 bytes of its storage data/" in clause(fact) for fact in checkpoint.damage)
    report = ckptfix.check(tmp_path / "torn.pt", salvage=True)
    (lost,) = (finding for finding in report.findings if finding.code == "FIL203" and finding.keys)
    assert lost.message == "1 of 8 tensors lost, 78.9 % of the numbers"


def test_the_json_form_is_whole_where_only_its_directory_is_gone(saved: Any, tmp_path: Path) -> None:
    _, state_dict = saved
    data = as_json(state_dict)
    named = {key.replace(".", "_"): tensor for key, tensor in state_dict.items()}
    directory = data.index(b"PK\x01\x02")
    for end in (b"", bytes(len(data) - directory)):
        assert_same(dict(salvaged(tmp_path / "cut.pt", data[:directory] + end).state_dict()), named)
    (tmp_path / "cut.pt").write_bytes(data[: data.index(b"m/model.json") - 30])
    with pytest.raises(UnreadableError, match=r"before its model\.json: 8 storages before it can be read"):
        ckptfix.open_checkpoint(tmp_path / "cut.pt", salvage=True)


def test_the_json_form_without_a_storage(saved: Any, tmp_path: Path) -> None:
    _, state_dict = saved
    archive, out = zipfile.ZipFile(io.BytesIO(as_json(state_dict))), io.BytesIO()
    with zipfile.ZipFile(out, "w") as poorer:
        for info in archive.infolist():
            if not info.filename.endswith("/0"):
                poorer.writestr(info.filename, archive.read(info))
    checkpoint = salvaged(tmp_path / "poorer.pt", out.getvalue())
    assert list(checkpoint.lost) == [next(iter(state_dict)).replace(".", "_")]
    assert checkpoint.damage == (Fact(Kind.STORAGE_LACKING, "tensors/0"),)


def test_the_json_list_is_proved(saved: Any, tmp_path: Path) -> None:
    _, state_dict = saved
    data = bytearray(as_json(state_dict))
    data[data.index(b"first_weight")] ^= 1
    checkpoint = salvaged(tmp_path / "rot.pt", bytes(data))
    assert checkpoint.damage == (Fact(Kind.MEMBER_CHECKSUM, "model.json"),)


def test_every_cut_gives_whole_tensors_or_a_typed_error(saved: Any, tmp_path: Path) -> None:
    data, state_dict = saved
    path = tmp_path / "cut.pt"
    named = place(data, "code/")[0]
    for stop in range(1, len(data) - 22, 397):
        path.write_bytes(data[:stop])
        with pytest.raises(CkptfixError):
            ckptfix.open_checkpoint(path)
        if stop >= named:
            assert_same(dict(ckptfix.open_checkpoint(path, salvage=True).state_dict()), state_dict)


def test_a_cut_file_of_torch_save_is_not_torchscript(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3), "b": torch.ones(400)}, tmp_path / "whole.pth")
    checkpoint = salvaged(tmp_path / "cut.pth", (tmp_path / "whole.pth").read_bytes()[:-900])
    assert (checkpoint.format, checkpoint.keys()) == ("torch-zip", ["a"])


def test_bytes_in_front_are_passed_over(tmp_path: Path, saved: tuple[bytes, dict[str, torch.Tensor]]) -> None:
    data, state_dict = saved
    path = tmp_path / "junk.pt"
    path.write_bytes(b"HTTP/1.1 200 OK\r\n\r\n" + data)
    with pytest.raises(UnreadableError, match="begins with 19 bytes"):
        ckptfix.open_checkpoint(path)
    checkpoint = ckptfix.open_checkpoint(path, salvage=True)
    assert {key: bytes_of(checkpoint.read(key)) for key in checkpoint.specs} == {
        key: bytes_of(tensor) for key, tensor in state_dict.items()
    }
