"""FIL901: nothing is written from a file that is built to run code, unless its weights alone are asked for."""

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptfix
from tests.checks import assert_same, check_noop


class _Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch PWNED",)


WEIGHTS = {"fc.weight": torch.arange(1.0, 13.0).reshape(3, 4), "fc.bias": torch.ones(3)}


def _armed(file: Path, **beside: Any) -> Path:
    torch.save({"state_dict": WEIGHTS, **beside}, file)
    return file


def test_noop_a_plain_state_dict() -> None:
    check_noop(WEIGHTS, "FIL901")
    check_noop(WEIGHTS, "FIL901", disarm=True)


def test_nothing_is_written_unless_asked(tmp_path: Path) -> None:
    armed = _armed(tmp_path / "armed.pth", hook=_Payload())
    report = ckptfix.repair(armed, output=tmp_path / "out.pth").report
    assert [finding.code for finding in report.remaining][:1] == ["FIL901"]
    assert (report.exit_code, report.output) == (1, None)
    assert not (tmp_path / "out.pth").exists()


@pytest.mark.parametrize("place", ["beside", "inside", "in_metadata"])
def test_disarm_writes_the_tensors_and_nothing_else(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    state_dict: Any = torch.nn.Linear(4, 3).state_dict()
    state_dict.update({"weight": WEIGHTS["fc.weight"]})
    content = {"state_dict": state_dict, "epoch": 3}
    if place == "beside":
        content["hook"] = _Payload()
    elif place == "inside":
        state_dict["hook"] = _Payload()
    else:
        state_dict._metadata["evil"] = {"version": _Payload()}
    torch.save(content, tmp_path / "armed.pth")
    report = ckptfix.repair("armed.pth", output="out.pth", disarm=True).report
    assert report.exit_code == 0
    loaded = torch.load("out.pth")
    assert list(loaded) == ["weight", "bias"]
    assert_same({"weight": loaded["weight"]}, {"weight": WEIGHTS["fc.weight"]})
    assert not (tmp_path / "PWNED").exists()
    assert ckptfix.check("out.pth").findings == ()


def test_disarm_leaves_hidden_pickles_behind(tmp_path: Path) -> None:
    armed = _armed(tmp_path / "armed.pth")
    with zipfile.ZipFile(armed, "a") as archive:
        archive.writestr("armed/extra/more.pkl", b"cos\nsystem\n(S'touch PWNED'\ntR.")
    report = ckptfix.repair(armed, output=tmp_path / "out.pth", disarm=True).report
    assert report.exit_code == 0
    with zipfile.ZipFile(tmp_path / "out.pth") as archive:
        assert not [name for name in archive.namelist() if "more" in name]


def test_disarmed_weights_load_into_a_model(tmp_path: Path) -> None:
    armed = _armed(tmp_path / "armed.pth", hook=_Payload())
    model = torch.nn.Sequential()
    model.add_module("fc", torch.nn.Linear(4, 3))
    with pytest.raises(ckptfix.HostileError):
        ckptfix.load(model, armed)
    ckptfix.load(model, armed, disarm=True)
    assert torch.equal(model.state_dict()["fc.weight"], WEIGHTS["fc.weight"])


OF_TRAINERS = ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin")


def _trainers_folder(folder: Path, model: str, armed: str = "") -> Path:
    folder.mkdir()
    save_file(WEIGHTS, folder / model)
    for name in OF_TRAINERS:
        torch.save(_Payload() if name == armed else {"last_epoch": 1}, folder / name)
    return folder / model


def test_noop_a_model_with_what_its_trainer_saved(tmp_path: Path) -> None:
    assert ckptfix.check(_trainers_folder(tmp_path / "run", "model.safetensors")).findings == ()


@pytest.mark.parametrize("model", ["model.safetensors", "adapter_model.safetensors"])
@pytest.mark.parametrize("armed", OF_TRAINERS)
def test_what_a_trainer_loads_next_to_the_model_is_read_too(armed: str, model: str, tmp_path: Path) -> None:
    file = _trainers_folder(tmp_path / "run", model, armed)
    output = tmp_path / "new" / model
    output.parent.mkdir()
    report = ckptfix.repair(file, output=output).report
    assert [(finding.code, finding.evidence["files"]) for finding in report.remaining] == [("FIL901", [armed])]
    assert not list(output.parent.iterdir())
    assert ckptfix.repair(file, output=output, disarm=True).report.exit_code == 0
    assert [path.name for path in output.parent.iterdir()] == [model]
    net = torch.nn.Sequential()
    net.add_module("fc", torch.nn.Linear(4, 3))
    ckptfix.load(net, file)  # which reads only the weights
