"""The names that the positions of a saved optimizer may have, and the state_dict that it trains."""

from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.core.finding import Level
from tests.rules.test_following import followed, net, sources
from tests.rules.test_opt101_stale_optimizer import Net, findings, one_group, saved, train, without_aux


def test_an_order_that_no_shape_shows_is_unknown(tmp_path):
    trained, wanted = net(a=(3, 3), b=(3, 3)), net(b=(3, 3), a=(3, 3))
    ways_on = followed(tmp_path / "run.pth", trained, wanted)
    assert len(ways_on) == 2
    assert {tuple(sources(way)) for way in ways_on} == {(0, 1, 2, 3), (2, 3, 0, 1)}


@pytest.mark.parametrize(
    ("names", "touched", "left"),
    [
        (("optG", "optD"), ["optG"], 0),
        (("g_optim", "d_optim"), ["g_optim"], 0),
        (("first", "second"), [], 2),
    ],
)
def test_the_optimizer_of_another_state_dict_is_left_unchanged(tmp_path, names, touched, left):
    both = Net(), Net()
    made = [torch.optim.AdamW(model.parameters()) for model in both]
    for model, optimizer in zip(both, made, strict=True):
        train(model, optimizer)
    states = {name: optimizer.state_dict() for name, optimizer in zip(names, made, strict=True)}
    torch.save({"G": both[0].state_dict(), "D": both[1].state_dict(), **states}, tmp_path / "gan.pth")
    asked: dict[str, Any] = {"weights": "G", "unsafe_fixes": True, "output": tmp_path / "out.pth"}
    report = ckptfix.repair(tmp_path / "gan.pth", without_aux(Net()), **asked).report
    assert [finding.code for finding in report.remaining if finding.level is Level.ERROR] == ["OPT101"] * left
    result = torch.load(tmp_path / "out.pth", weights_only=True)
    assert [name for name in names if str(result[name]) != str(states[name])] == touched


def test_the_optimizer_of_other_weights_is_named(tmp_path):
    """Who repairs an average has no optimizer in step with it."""
    average = {key: value.clone() for key, value in Net().state_dict().items()}
    saved(Net(), one_group, tmp_path / "run.pth", model_ema=average)
    asked: dict[str, Any] = {"weights": "model_ema", "unsafe_fixes": True, "output": tmp_path / "out.pth"}
    report = ckptfix.repair(tmp_path / "run.pth", without_aux(Net()), **asked).report
    (finding,) = (one for one in report.findings if one.code == "OPT101")
    assert (finding.level, finding.evidence) == (Level.NOTE, {"sets": ["model"]})
    assert findings(ckptfix.repair(tmp_path / "run.pth", Net(), dry_run=True, weights="model_ema").report) == []
