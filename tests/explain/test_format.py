"""If the file is given, the answer is about that file."""

from pathlib import Path

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.explain import explain, judge
from ckptfix.explain.format import Verdict
from ckptfix.report.advice import Presentation

PREFIX = (
    'RuntimeError: Error(s) in loading state_dict for Linear:\n\tMissing key(s) in state_dict: "weight", "bias".\n\t'
    'Unexpected key(s) in state_dict: "module.weight", "module.bias".'
)
CUDA = "RuntimeError: CUDA error: no kernel image is available for execution on the device"
KEY = "KeyError: 'model_state_dict'"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "plain.pth"
    torch.save(nn.Linear(3, 2).state_dict(), path)
    return path


@pytest.fixture
def wrapped(tmp_path: Path) -> Path:
    path = tmp_path / "wrapped.pth"
    torch.save({"net": {f"module.{key}": value for key, value in nn.Linear(3, 2).state_dict().items()}}, path)
    return path


def verdict(message: str, file: Path, model: nn.Module | None = None) -> Verdict:
    return judge(explain(message), ckptfix.check(file, model), Presentation())


def test_a_file_that_is_clean_is_not_blamed(plain: Path):
    told = verdict(PREFIX, plain, nn.Linear(3, 2))
    assert (told.confirming, told.others, told.command) == ((), (), "")
    assert "does not have this problem. It fits Linear as it is" in told.sentence


def test_without_a_model_names_cannot_be_compared(plain: Path):
    assert "Name your model too" in verdict(PREFIX, plain).sentence


def test_a_clean_file_agrees_with_a_fault_of_the_environment(plain: Path):
    assert verdict(CUDA, plain).sentence.endswith("itself, so it is not at fault.")


def test_an_unknown_message(plain: Path):
    assert (
        "nothing is wrong with it as far as ckptfix can see"
        in judge(None, ckptfix.check(plain), Presentation()).sentence
    )


def test_an_unknown_message_may_be_about_what_is_wrong_with_the_file(wrapped: Path):
    told = judge(None, ckptfix.check(wrapped), Presentation())
    assert told.sentence == f"{wrapped} has 1 defect, which may be the cause:"


def test_a_missing_entry_is_answered_from_the_files_own(tmp_path: Path):
    path, weights = tmp_path / "file.pth", nn.Linear(3, 2).state_dict()
    torch.save({"models": {"g": weights, "d": nn.Linear(3, 2).state_dict()}}, path)
    assert "under 'models.g'" in verdict("KeyError: 'params'", path).sentence


def test_the_file_has_what_the_message_tells_of(wrapped: Path):
    told = verdict(PREFIX, wrapped, nn.Linear(3, 2))
    assert [finding.code for finding in told.confirming] == ["KEY102"]
    assert told.others == ()
    assert told.command == f"ckptfix repair {wrapped}"


def test_an_adapter_that_is_loaded_as_a_model(tmp_path: Path):
    layer = "lora_unet_middle_block_1"
    adapter = {f"{layer}.lora_down.weight": torch.randn(4, 16), f"{layer}.lora_up.weight": torch.randn(16, 4)}
    torch.save({**adapter, f"{layer}.alpha": torch.tensor(4.0)}, tmp_path / "style.pth")
    missing = 'Error(s) in loading state_dict for UNet:\n\tMissing key(s) in state_dict: "time_embed.0.weight".'
    assert [finding.code for finding in verdict(missing, tmp_path / "style.pth").confirming] == ["FIL108"]


def test_a_defect_that_the_message_is_not_about(wrapped: Path):
    told = verdict(CUDA, wrapped, nn.Linear(3, 2))
    assert told.confirming == ()
    assert [finding.code for finding in told.others] == ["KEY102"]
    assert "The message is not about it" in told.sentence


def test_a_key_of_the_container_is_told_where_the_weights_are(plain: Path, wrapped: Path):
    assert "holds a bare state_dict of 2 tensors" in verdict(KEY, plain).sentence
    assert "holds 2 tensors under 'net'" in verdict(KEY, wrapped, nn.DataParallel(nn.Linear(3, 2))).sentence


def test_a_command_that_fills_has_its_price(tmp_path: Path):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    torch.save({key: value for key, value in model.state_dict().items() if key.startswith("0")}, tmp_path / "part.pth")
    message = 'RuntimeError: Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: "1.weight".'
    told = verdict(message, tmp_path / "part.pth", model)
    assert told.command.endswith("--fill target")
    assert told.price == "`1` becomes untrained: 27.27 % of the model"
