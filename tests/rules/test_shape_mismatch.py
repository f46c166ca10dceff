"""FIT103: the right name and another shape."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckptfix.finding import Applicability, Drop, Level
from ckptfix.rules.shape_mismatch import shape_mismatch
from tests.rules.proposals import propose, repaired


def scalar(shape: tuple[int, ...]) -> nn.Module:
    module = nn.Module()
    module.scale = nn.Parameter(torch.full(shape, 3.0))
    return module


@pytest.mark.parametrize(
    ("state", "model"),
    [
        pytest.param(nn.Linear(2, 3).state_dict(), None, id="no target"),
        pytest.param(nn.Linear(2, 3).state_dict(), nn.Linear(2, 3), id="the same shapes"),
        pytest.param(nn.Linear(2, 3).state_dict(), nn.LazyLinear(3), id="a lazy parameter takes any shape"),
        pytest.param({"other": torch.zeros(9)}, nn.Linear(2, 3), id="missing and unexpected are other rules' business"),
    ],
)
@pytest.mark.parametrize("drop_mismatched", [False, True])
def test_noop(state, model, drop_mismatched):
    assert propose(shape_mismatch, state, model, drop_mismatched=drop_mismatched) == []


def test_shown_with_both_shapes_and_never_resized():
    (finding,) = propose(shape_mismatch, nn.Linear(2, 10).state_dict(), nn.Linear(2, 3))
    assert finding.level == Level.ERROR
    assert finding.evidence["shapes"]["weight"] == {"file": [10, 2], "target": [3, 2]}
    assert finding.fix is None
    assert "--drop-mismatched" in finding.remedy


def test_dropped_where_asked_for():
    state = {"weight": torch.zeros(3, 2), "bias": torch.zeros(4)}
    (finding,) = propose(shape_mismatch, state, nn.Linear(2, 3), drop_mismatched=True)
    assert finding.fix is not None
    assert finding.fix.edits == (Drop("bias"),)
    assert finding.fix.asked
    assert finding.fix.applicability == Applicability.UNSAFE


def test_an_entry_that_is_no_tensor():
    (finding,) = propose(shape_mismatch, {"weight": "gone", "bias": torch.zeros(3)}, nn.Linear(2, 3))
    assert finding.evidence["shapes"] == {"weight": {"file": None, "target": [3, 2]}}


@pytest.mark.parametrize(("stored", "wanted"), [((1,), ()), ((), (1,))], ids=["[1] for []", "[] for [1]"])
def test_one_element_is_reshaped(stored, wanted):
    model = scalar(wanted)
    (finding,) = propose(shape_mismatch, scalar(stored).state_dict(), model)
    assert finding.fix is not None
    assert finding.fix.applicability == Applicability.SAFE
    after = repaired(shape_mismatch, scalar(stored).state_dict(), model)
    model.load_state_dict(after, strict=True)
    assert after["scale"].item() == 3.0
