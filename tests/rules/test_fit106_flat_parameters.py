"""FIT106: weights that FSDP flattened get their names and shapes from the model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckptfix
from ckptfix.core.edits import Assemble
from ckptfix.rules.fit106_flat_parameters import flat_parameters
from tests.checks import bytes_of
from tests.reading.folders.ranks.generators.fsdp import Net
from tests.reading.folders.ranks.genuine import unpacked
from tests.rules.proposals import propose

CODE = "FIT106"


@pytest.mark.parametrize(
    ("state", "model"),
    [
        pytest.param({"_flat_param": torch.ones(3)}, None, id="no target"),
        pytest.param(Net().state_dict(), Net(), id="nothing is flat"),
        pytest.param({"weight": torch.ones(4)}, nn.Linear(2, 2, bias=False), id="not by FSDP"),
        pytest.param({"my_flat_param": torch.ones(4)}, nn.Linear(2, 2, bias=False), id="a name that only ends so"),
    ],
)
def test_noop(state, model):
    assert propose(flat_parameters, state, model) == []


def test_tied_parameters_are_in_it_once():
    model = Net()
    model.head.weight = model.emb.weight
    total = sum(parameter.numel() for parameter in model.parameters())
    (finding,) = propose(flat_parameters, {"_flat_param": torch.arange(float(total))}, model)
    assert finding.fix is not None
    names = [edit.key for edit in finding.fix.edits if isinstance(edit, Assemble)]
    assert names == [name for name, _ in model.named_parameters()]


def test_no_fix_for_another_number_of_elements():
    (finding,) = propose(flat_parameters, {"_flat_param": torch.ones(5)}, nn.Linear(2, 2, bias=False))
    assert (finding.fix, finding.evidence) == (None, {"elements": {"_flat_param": {"file": 5, "target": 4}}})


@pytest.mark.parametrize("name", ["fsdp1_local_w2", "fsdp1_local_names_w2"])
def test_genuine_ranks_fit_the_model(tmp_path: Path, name: str) -> None:
    folder, truth = unpacked(name, tmp_path)
    report = ckptfix.repair(folder, Net(), output=tmp_path / "whole.pth", format="pth").report
    assert CODE in [finding.code for finding in report.fixed]
    got = torch.load(tmp_path / "whole.pth")["model"]
    assert got.keys() == truth["model"].keys()
    for key, value in truth["model"].items():
        assert (got[key].shape, bytes_of(got[key])) == (value.shape, bytes_of(value)), key
    Net().load_state_dict(got)


@pytest.mark.parametrize("name", ["fsdp1_local_w2", "fsdp1_local_names_w2"])
def test_without_a_model_it_is_an_error(tmp_path: Path, name: str) -> None:
    folder, _ = unpacked(name, tmp_path)
    report = ckptfix.check(folder)
    assert [(finding.code, finding.level.name) for finding in report.findings if finding.level] == [("FIL105", "ERROR")]
    assert report.exit_code == 1


def test_the_order_of_the_file_is_not_used(tmp_path: Path) -> None:
    folder, truth = unpacked("fsdp1_local_w2", tmp_path)
    torch.save(truth["model"], tmp_path / "like.pth")
    like = tmp_path / "like.pth"
    assert CODE in [finding.code for finding in ckptfix.check(folder, like=like).remaining]
    ckptfix.repair(folder, output=tmp_path / "whole.pth", unsafe_fixes=True, like=like)
    got = torch.load(tmp_path / "whole.pth")["model"]
    assert all(bytes_of(got[key]) == bytes_of(value) for key, value in truth["model"].items())


def test_sorted_keys_are_not_the_order_of_the_model(tmp_path: Path) -> None:
    folder, truth = unpacked("fsdp1_local_w2", tmp_path)
    like, whole = tmp_path / "like.safetensors", tmp_path / "whole.pth"
    save_file({key: value.contiguous() for key, value in truth["model"].items()}, like)
    report = ckptfix.repair(folder, output=whole, unsafe_fixes=True, like=like).report
    assert CODE in [finding.code for finding in report.remaining]
    assert not whole.exists()
