"""Programs of torch.export: the weights in them are those of the exported module."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.errors import CkptfixError, UnreadableError
from tests.checks import bytes_of


class Net(nn.Module):
    """A model with a tie, a buffer that is not saved, a transposed half and a constant."""

    scratch: torch.Tensor
    turned: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 3), nn.Linear(4, 3, bias=False)
        self.other.weight = self.one.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.arange(3.0), persistent=False)
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).bfloat16().t())
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.constant = torch.tensor(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.one(x) + self.other(x) + self.scratch) * self.mask
        return y + self.turned.float().sum() + self.constant


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    path = tmp_path_factory.mktemp("exported") / "net.pt2"
    model = Net().eval()
    torch.export.save(torch.export.export(model, (torch.ones(2, 4),)), path)
    return path, model.state_dict()


def test_the_weights_are_those_of_the_module(exported: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    path, truth = exported
    ckptfix.repair(path, Net(), output=tmp_path / "net.pth")
    written = torch.load(tmp_path / "net.pth")
    assert written.keys() == truth.keys()
    for key, value in truth.items():
        assert written[key].dtype == value.dtype
        assert written[key].stride() == value.stride()
        assert bytes_of(written[key]) == bytes_of(value), key
    assert written["one.weight"].data_ptr() == written["other.weight"].data_ptr()
    assert Net().load_state_dict(written, strict=True)


class Views(nn.Module):
    """A model whose buffers share storages: one is part of the next, and two do not cover theirs."""

    def __init__(self) -> None:
        super().__init__()
        whole, other = torch.arange(12.0).reshape(3, 4), torch.arange(100.0)
        views = {"part": whole[:1], "whole": whole, "one": other[10:20], "two": other[30:40].view(2, 5)}
        for name, view in views.items():
            self.register_buffer(name, view)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(buffer.sum() for buffer in self.buffers())


@pytest.mark.filterwarnings("ignore:No complete tensor found")
def test_views_share_the_storage_of_all(tmp_path: Path) -> None:
    model = Views().eval()
    torch.export.save(torch.export.export(model, (torch.ones(2),)), tmp_path / "net.pt2")
    ckptfix.repair(tmp_path / "net.pt2", output=tmp_path / "net.pth")
    written = torch.load(tmp_path / "net.pth")
    assert {key: bytes_of(value) for key, value in written.items()} == {
        key: bytes_of(value) for key, value in model.state_dict().items()
    }


def test_a_weight_without_a_name_is_named(exported: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    with zipfile.ZipFile(exported[0]) as archive:
        name = next(name for name in archive.namelist() if name.endswith("_weights_config.json"))
        place = json.loads(archive.read(name))["config"]["one.bias"]["path_name"]
    changed = rewritten(exported[0], tmp_path / "a.pt2", {"path_name": "weight_0"})
    with pytest.raises(UnreadableError, match=f"data/weights/{place}, which its list of weights does not name"):
        ckptfix.open_checkpoint(changed)


def test_reading_only_the_weights_is_reported(exported: tuple[Path, dict[str, torch.Tensor]]) -> None:
    (finding,) = [found for found in ckptfix.check(exported[0]).findings if found.code == "FIL102"]
    assert "a torch.export program (only its weights)" in finding.message


def rewritten(path: Path, to: Path, change: dict[str, Any]) -> Path:
    """Copy an archive with another entry for a key in its list of weights."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(to, "w") as new:
        for info in old.infolist():
            data = old.read(info)
            if info.filename.endswith("_weights_config.json"):
                config = json.loads(data)
                entry = config["config"]["one.bias"]
                entry.update({key: value for key, value in change.items() if key in entry})
                entry["tensor_meta"].update({key: value for key, value in change.items() if key not in entry})
                data = json.dumps(config).encode()
            new.writestr(zipfile.ZipInfo(info.filename), data)
    return to


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"use_pickle": True}, "quantised weight or another subclass", id="subclass"),
        pytest.param({"dtype": 99}, "dtype 99 in the layout 7", id="unknown dtype"),
        pytest.param({"layout": 1}, "dtype 7 in the layout 1", id="sparse"),
        pytest.param({"sizes": [{"as_int": -3}]}, "is not a shape", id="negative"),
        pytest.param({"sizes": [{"as_int": 1 << 40}]}, "declares|claims|bytes", id="more than there is"),
        pytest.param({"storage_offset": {"as_int": 9}}, "claims|bytes", id="behind its storage"),
        pytest.param({"path_name": "weight_77"}, "weight_77", id="no such member"),
        pytest.param({"path_name": "../../x"}, "x", id="outside"),
        pytest.param({"strides": [{"as_expr": "s0"}]}, "KeyError", id="symbolic"),
    ],
)
def test_inconsistent_descriptions_are_refused(
    exported: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CkptfixError, match=message):
        ckptfix.repair(rewritten(exported[0], tmp_path / "a.pt2", change), output=tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        pytest.param("_config.json", b"\x00\x00\x00{\x00\xff\xff\xff", "list of weights", id="a list of no text"),
        pytest.param("_config.json", b"[" * 100_000, "list of weights", id="a nested list"),
        pytest.param("byteorder", b"big", "big-endian machine; export it again", id="big-endian"),
    ],
)
def test_a_program_with_another_member_is_refused(
    exported: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, name: str, changed: bytes, message: str
) -> None:
    with zipfile.ZipFile(exported[0]) as old, zipfile.ZipFile(tmp_path / "a.pt2", "w") as new:
        for info in old.infolist():
            data = changed if info.filename.endswith(name) else old.read(info)
            new.writestr(zipfile.ZipInfo(info.filename), data)
    with pytest.raises(CkptfixError, match=message):
        ckptfix.check(tmp_path / "a.pt2")


def test_a_program_without_weights_is_named(tmp_path: Path) -> None:
    class Plain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    torch.export.save(torch.export.export(Plain(), (torch.ones(1),)), tmp_path / "a.pt2")
    with pytest.raises(UnreadableError, match="no weights found in it"):
        ckptfix.open_checkpoint(tmp_path / "a.pt2")
