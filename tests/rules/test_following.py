"""Following: which position of a saved optimizer each parameter of the result gets its state from."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.target import target_from_module
from ckptfix.maps.optimizer_states import optimizers_of
from ckptfix.rules.following import Followed, ways
from ckptfix.rules.origins import Change
from tests.rules.test_opt104_optimizer_of_another_model import run


def net(**layers: tuple[int, int]) -> nn.Module:
    return nn.Sequential(OrderedDict((name, nn.Linear(*sizes)) for name, sizes in layers.items()))


def followed(path: Path, trained: nn.Module, wanted: nn.Module) -> list[Followed]:
    """The ways to keep the optimizer of one model in step while its file becomes that of another one."""
    torch.save(run(trained), path)
    repaired = ckptfix.repair(path, wanted, unsafe_fixes=True, fill="target", keep_optimizer=True)
    change = Change.of(ckptfix.open_checkpoint(path), repaired.checkpoint, repaired.plan, target_from_module(wanted))
    (optimizer,) = optimizers_of(repaired.checkpoint)
    return ways(optimizer, change)


def sources(way: Followed) -> list[object]:
    return [step.source for group in way.groups for step in group]


def test_noop(tmp_path):
    (way,) = followed(tmp_path / "run.pth", net(a=(3, 4), b=(4, 5)), net(a=(3, 4), b=(4, 5)))
    assert way.is_unchanged
    assert (sources(way), way.anew, way.added, way.gone) == ([0, 1, 2, 3], (), (), ())


@pytest.mark.parametrize(
    ("wanted", "taken", "added", "gone"),
    [
        pytest.param({"a": (3, 4), "c": (5, 2)}, [0, 1, 4, 5], (), ("b.weight", "b.bias"), id="a layer less"),
        pytest.param(
            {"a": (3, 4), "b": (4, 5), "x": (5, 5), "c": (5, 2)},
            [0, 1, 2, 3, None, None, 4, 5],
            ("x.weight", "x.bias"),
            (),
            id="a layer more",
        ),
        pytest.param({"c": (5, 2), "a": (3, 4), "b": (4, 5)}, [4, 5, 0, 1, 2, 3], (), (), id="another order"),
    ],
)
def test_positions_of_the_result(wanted, taken, added, gone, tmp_path):
    (way,) = followed(tmp_path / "run.pth", net(a=(3, 4), b=(4, 5), c=(5, 2)), net(**wanted))
    assert not way.is_unchanged
    assert (sources(way), way.anew, way.added, way.gone) == (taken, (), added, gone)
