"""FIT106: weights that FSDP flattened get their names and shapes from the model."""

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckptfix
from ckptfix.core.edits import Assemble
from ckptfix.report.display import report_lines
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


def _repaired_like(folder: Path, like: Path, whole: Path, *, unsafe_fixes: bool = False) -> list[str]:
    """Repair with the names of a file; return the codes of what is left."""
    report = ckptfix.repair(folder, output=whole, like=like, unsafe_fixes=unsafe_fixes).report
    return [finding.code for finding in report.left if finding.level]


def _is_equal(whole: Path, truth: dict[str, torch.Tensor]) -> bool:
    got = torch.load(whole)["model"]
    return got.keys() == truth.keys() and all(bytes_of(got[key]) == bytes_of(value) for key, value in truth.items())


def test_keys_in_the_order_of_the_ranks_modules_are_certain(tmp_path: Path) -> None:
    folder, truth = unpacked("fsdp1_local_w2", tmp_path)
    torch.save(dict(truth["model"]), tmp_path / "like.pth")
    assert _repaired_like(folder, tmp_path / "like.pth", tmp_path / "whole.pth") == []
    assert _is_equal(tmp_path / "whole.pth", truth["model"])


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_keys_in_another_order_take_that_of_the_ranks_modules(tmp_path: Path, suffix: str) -> None:
    folder, truth = unpacked("fsdp1_local_w2", tmp_path)
    state, like, whole = truth["model"], tmp_path / f"like.{suffix}", tmp_path / "whole.pth"
    if suffix == "pth":
        # Neither sorted nor in the order of the model: the head is before its norm.
        torch.save({key: state[key] for key in sorted(state, key=lambda key: (key.startswith("norm"), key))}, like)
    else:
        save_file({key: value.contiguous() for key, value in state.items()}, like)
    assert _repaired_like(folder, like, whole) == [CODE, "FIT102", "FIT101"]
    assert not whole.exists()
    text = "\n".join(map(str, report_lines(ckptfix.check(folder, like=like))))
    assert "unsafe_fixes=True takes the modules in the order of _metadata, and each weight before its bias" in text
    assert "the fix of FIT106 covers these keys" in text
    assert "do not fill" not in text
    assert _repaired_like(folder, like, whole, unsafe_fixes=True) == []
    assert _is_equal(whole, truth["model"])


class _Scaled(nn.Module):
    """A module whose parameters have names of their own, before a layer of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.gate = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
        self.fc = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("keys", "has_modules", "outcome"),
    [
        pytest.param(list, True, "SAFE", id="in model order"),
        pytest.param(list, False, "UNSAFE", id="without _metadata"),
        pytest.param(sorted, True, "", id="sorted, with own names"),
        pytest.param(sorted, False, "", id="sorted, without _metadata"),
    ],
)
def test_the_order_has_to_be_known(tmp_path: Path, keys, has_modules: bool, outcome: str) -> None:
    state = _Scaled().state_dict()
    flat = OrderedDict(_flat_param=torch.arange(28.0))
    if has_modules:
        vars(flat)["_metadata"] = vars(state)["_metadata"]
    torch.save(flat, tmp_path / "flat.pth")
    torch.save({key: state[key] for key in keys(state)}, tmp_path / "like.pth")
    findings = ckptfix.check(tmp_path / "flat.pth", like=tmp_path / "like.pth").findings
    (finding,) = [each for each in findings if each.code == CODE]
    assert (finding.fix.applicability.name if finding.fix else "") == outcome
    if not outcome:
        left = {each.remedies[0].text for each in findings if each.code in ("FIT101", "FIT102")}
        assert left == {"the weights are in the flat parameters (FIL105, FIT106)"}


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_tied_weight_is_where_the_first_module_has_it(tmp_path: Path, is_reversed: bool) -> None:
    model = Net()
    model.head.weight = model.emb.weight
    flat = OrderedDict(_flat_param=torch.arange(float(sum(each.numel() for each in model.parameters()))))
    state = model.state_dict()
    flat |= {key: state[key] for key, _ in model.named_buffers()}
    vars(flat)["_metadata"] = vars(state)["_metadata"]
    torch.save(flat, tmp_path / "flat.pth")
    torch.save({key: state[key] for key in sorted(state, reverse=is_reversed)}, tmp_path / "like.pth")
    report = ckptfix.check(tmp_path / "flat.pth", like=tmp_path / "like.pth")
    (finding,) = [each for each in report.findings if each.code == CODE]
    assert finding.fix is not None
    names = [edit.key for edit in finding.fix.edits if isinstance(edit, Assemble)]
    assert names == [name for name, _ in model.named_parameters()]
