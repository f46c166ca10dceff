"""What the optimizer knows of matrices that are only somewhat small."""

from __future__ import annotations

import pytest
import torch

import ckptfix
from ckptfix.reading.opening import open_file
from ckptfix.rules.decayed import decayed
from tests.rules.test_decayed import UNUSED, Net
from tests.rules.value_findings import propose


def save(path, *, steps, gradient=0.0, optimizer=True):
    """What AdamW leaves of the unused layers, 5 % less at each step; their gradients are so large."""
    net = Net()
    adamw = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(steps):
        for name, parameter in net.named_parameters():
            size = gradient if name.startswith(UNUSED) else 1.0
            parameter.grad = size * torch.randn_like(parameter)
        adamw.step()
    torch.save({"model": net.state_dict()} | ({"optimizer": adamw.state_dict()} if optimizer else {}), path)
    return open_file(str(path))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"steps": 5}, id="more-than-half-is-left"),
        pytest.param({"steps": 40, "gradient": 1e-3}, id="gradients-arrived"),
        pytest.param({"steps": 80, "optimizer": False}, id="no-optimizer-to-ask"),
    ],
)
def test_noop(tmp_path, settings):
    assert propose(decayed, save(tmp_path / "t.pth", **settings)) == []


@pytest.mark.parametrize(("steps", "level"), [(40, "NOTE"), (80, "WARNING")])
def test_what_got_no_gradient_is_told_by_what_is_left(tmp_path, steps, level):
    (finding,) = propose(decayed, save(tmp_path / "t.pth", steps=steps))
    assert (finding.level.name, set(finding.keys)) == (level, {"conv3.weight", "spare.weight"})
    assert finding.evidence["tensors"]["spare.weight"]["prediction_agrees"] is True


def test_it_is_replaced_where_that_was_asked_for(tmp_path):
    save(tmp_path / "t.pth", steps=80)
    before = torch.load(tmp_path / "t.pth")["model"]
    torch.save(Net().state_dict(), tmp_path / "donor.pth")
    donor = str(tmp_path / "donor.pth")
    repaired = ckptfix.repair(
        tmp_path / "t.pth", output=tmp_path / "out.pth", replace="VAL201", fill=donor, select="VAL201"
    )
    assert {key for key, value in repaired.state_dict().items() if not value.equal(before[key])} == {
        "conv3.weight",
        "spare.weight",
    }
