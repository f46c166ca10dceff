"""FIL101: more than one set of weights in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.finding import Level


def weights(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"fc.weight": torch.full((2, 2), value), "fc.bias": torch.full((2,), value)}


def saved(folder: Path, content: Any) -> str:
    torch.save(content, folder / "file.pth")
    return str(folder / "file.pth")


@pytest.mark.parametrize(
    ("content", "settings"),
    [
        pytest.param(weights(), {}, id="a bare state_dict"),
        pytest.param({"state_dict": weights(), "epoch": 3}, {}, id="one, in a container"),
        pytest.param(
            {"state_dict": weights(), "optimizer": {"state": {0: {"m": torch.ones(2)}}, "param_groups": []}},
            {},
            id="an optimizer is no set of weights",
        ),
        pytest.param(
            {"state_dict": weights(), "mean": torch.ones(3), "std": torch.ones(3)}, {}, id="loose tensors beside it"
        ),
        pytest.param({"model": weights(), "ema": weights()}, {"weights": "ema"}, id="one was picked"),
        pytest.param({"model": weights(), "ema": weights()}, {"weights": "model"}, id="the first was picked"),
    ],
)
def test_noop(tmp_path, content, settings):
    assert ckptfix.check(saved(tmp_path, content), select=("FIL101",), **settings).findings == ()


def test_two_are_listed_and_one_is_taken(tmp_path):
    file = saved(tmp_path, {"state_dict_ema": weights(2), "state_dict": weights(1)})
    (finding,) = ckptfix.check(file, select=("FIL101",)).findings
    assert (finding.level, finding.fix) == (Level.WARNING, None)
    assert "2 sets of weights (state_dict, state_dict_ema); state_dict was taken" in finding.message
    assert finding.evidence["state_dict_ema"] == {"tensors": 2, "numel": 6}
    assert "--weights" in finding.remedy
    assert ckptfix.open_checkpoint(file).read("fc.bias")[0] == 1
    assert ckptfix.open_checkpoint(file, weights="state_dict_ema").read("fc.bias")[0] == 2


def test_a_name_that_is_not_there(tmp_path):
    with pytest.raises(ckptfix.UsageError, match=r"no weights under 'teacher'; found: .*ema"):
        ckptfix.check(saved(tmp_path, {"model": weights(), "ema": weights()}), weights="teacher")


def test_loose_tensors_do_not_make_a_state_dict_of_the_container(tmp_path):
    file = saved(tmp_path, {"state_dict": weights(), **{f"t{n}": torch.ones(1) for n in range(6)}})
    assert ckptfix.open_checkpoint(file).keys() == ["fc.weight", "fc.bias"]
