from pathlib import Path

import pytest
import torch
from torch import nn
from torch.package.package_exporter import PackageExporter

import ckptfix
from ckptfix.errors import UnreadableError
from tests.reading.files import opened
from tests.reading.state_dicts import same

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")


def packed(path: Path, objects: dict[str, object]) -> Path:
    with PackageExporter(str(path)) as exporter:
        exporter.extern("**")
        for name, value in objects.items():
            exporter.save_pickle(name, "model.pkl", value)
        exporter.save_text("notes", "notes.txt", "where it is from")
    return path


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).requires_grad_(False)


def test_the_module_of_a_package_gives_its_state_dict(tmp_path: Path) -> None:
    model = module()
    checkpoint = opened(packed(tmp_path / "model.pt", {"tts": model}))
    assert checkpoint.format == "torch-package"
    assert not checkpoint.damage
    same(dict(checkpoint.state_dict()), dict(model.state_dict()))


def test_a_package_is_repaired_to_a_file_of_torch(tmp_path: Path) -> None:
    model = module()
    path = packed(tmp_path / "model.pt", {"tts": model})
    assert [finding.code for finding in ckptfix.check(path).findings if finding.fix] == ["FIL102"]
    assert ckptfix.repair(path, output=tmp_path / "out.pth").report.exit_code == 0
    same(dict(torch.load(tmp_path / "out.pth")), dict(model.state_dict()))


def test_each_pickle_of_a_package_has_its_name(tmp_path: Path) -> None:
    path = packed(tmp_path / "two.pt", {"a": module().state_dict(), "b": {"state_dict": module().state_dict()}})
    names = {candidate.path for candidate in opened(path).candidates}
    assert names == {("a/model",), ("b/model", "state_dict")}


def test_a_package_without_a_pickle_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="without a pickle"):
        opened(packed(tmp_path / "empty.pt", {}))


def test_what_a_package_makes_by_a_call_is_read_once(tmp_path: Path) -> None:
    """A module of torch.fx is pickled as ``reduce_package``, a function and its arguments."""
    graph = torch.fx.symbolic_trace(module())
    path = packed(tmp_path / "graph.pt", {"tts": {"one": graph, "same": graph}})
    checkpoint = opened(path)
    assert not checkpoint.damage
    assert checkpoint.candidates[0].name == "one"
    assert len(checkpoint.candidates) == 1  # both names are one object
    same(dict(checkpoint.state_dict()), dict(graph.state_dict()))
    assert {finding.code for finding in ckptfix.check(path, values=False).findings} == {"FIL102"}


def test_torchscript_in_a_package_gives_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.package.package_exporter._gate_torchscript_serialization", False)
    model = module()
    first, second = torch.jit.script(model), torch.jit.script(nn.Linear(2, 5))
    whole = opened(packed(tmp_path / "one.pt", {"tts": first}))
    assert whole.format == "torch-package"
    assert not whole.damage
    same(dict(whole.state_dict()), dict(model.state_dict()))
    path = packed(tmp_path / "two.pt", {"tts": {"big": first, "small": second, "again": first, "epoch": 3}})
    assert {candidate.name for candidate in opened(path).candidates} == {"big", "small"}
    same(dict(opened(path, "small").state_dict()), dict(second.state_dict()))
    assert not {finding.code for finding in ckptfix.check(path).findings if finding.code == "FIL901"}
