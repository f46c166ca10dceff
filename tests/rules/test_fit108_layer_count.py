"""FIT108: stacks of layers of another depth."""

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.finding import Applicability, Level
from ckptfix.errors import UsageError
from ckptfix.report.advice import Presentation, next_command
from ckptfix.rules.fit108_layer_count import layer_count
from tests.rules.proposals import propose, repaired


def model(depth: int, width: int = 4) -> nn.Module:
    """An encoder with a norm next to its layers, which have counters: tensors without an axis."""
    layers = [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(depth)]
    for n, layer in enumerate(layers):
        layer.state_dict()["0.weight"].fill_(n)
    stack = nn.ModuleList(layers)
    stack.add_module("norm", nn.LayerNorm(width))
    return nn.ModuleDict({"layers": stack, "head": nn.Linear(width, 2)})


def kept(state: dict[str, torch.Tensor], depth: int) -> list[int]:
    return [int(state[f"layers.{n}.0.weight"][0, 0]) for n in range(depth)]


@pytest.mark.parametrize(
    ("state", "target"),
    [
        pytest.param(model(3).state_dict(), None, id="no target"),
        pytest.param(model(3).state_dict(), model(3), id="as many"),
        pytest.param(model(3).state_dict(), model(2, 5), id="layers of another width"),
        pytest.param({"a.0.w": torch.zeros(2), "a.1.v": torch.zeros(2)}, model(2), id="another stack"),
        pytest.param(
            nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)).state_dict(),
            nn.Sequential(nn.Linear(2, 2)),
            id="modules that are no layers of a stack",
        ),
    ],
)
def test_noop(state, target):
    assert propose(layer_count, state, target) == []
    asked = propose(layer_count, state, target, adapt=("depth=0,1",))
    assert [(found.level, found.fix) for found in asked] == [(Level.NOTE, None)] * (target is not None)


def test_both_counts_are_named_without_a_fix():
    (finding,) = propose(layer_count, model(6).state_dict(), model(3))
    assert finding.message == "6 layers of `layers` in the file and 3 in the model"
    assert (finding.level, finding.fix) == (Level.ERROR, None)
    assert not finding.remedies[0].is_complete


@pytest.mark.parametrize("depth", [3, 8])
def test_no_command_for_layers_of_another_variant(depth):
    report = ckptfix.check(model(6).state_dict(), model(depth))
    assert {finding.code for finding in report.left} == {"FIT108", "FIT101" if depth > 6 else "FIT102"}
    assert next_command(report, Presentation()) == ""


@pytest.mark.parametrize(("depth", "asked"), [(3, {"unsafe_fixes": True}), (8, {"fill": "target"})])
def test_a_note_if_other_fixes_suffice(depth, asked):
    for settings, level in ((asked, Level.NOTE), ({}, Level.ERROR)):
        (finding,) = propose(layer_count, model(6).state_dict(), model(depth), **settings)
        assert (finding.level, finding.fix) == (level, None)


@pytest.mark.parametrize(
    ("recipe", "old", "expected"),
    [
        ("depth=0-2", 6, [0, 1, 2]),
        ("depth=0,2,4", 6, [0, 2, 4]),
        ("depth=5,0,3", 6, [5, 0, 3]),
        ("depth=0,0,1,1", 2, [0, 0, 1, 1]),
        ("depth@lay*=1,0,1", 2, [1, 0, 1]),
        ("depth=1,1,0", 2, [1, 1, 0]),
        ("depth=2,2,1,2", 3, [2, 2, 1, 2]),
        ("depth=1,1", 3, [1, 1]),
    ],
)
def test_layers_are_moved_dropped_and_copied(recipe, old, expected):
    before, target = model(old), model(len(expected))
    (finding,) = propose(layer_count, before.state_dict(), target, adapt=(recipe,))
    assert finding.fix is not None
    assert (finding.fix.applicability, finding.fix.asked) == (Applicability.UNSAFE, True)
    after = repaired(layer_count, before.state_dict(), target, adapt=(recipe,))
    target.load_state_dict(after, strict=True)
    assert kept(after, len(expected)) == expected
    assert torch.equal(after["head.weight"], before.state_dict()["head.weight"])
    assert len({after[f"layers.{n}.0.weight"].data_ptr() for n in range(len(expected))}) == len(expected)


@pytest.mark.parametrize(("old", "new", "example"), [(6, 3, "depth=0,2,4"), (2, 4, "depth=0,0,1,1")])
def test_the_advice_names_layers_and_is_no_complete_command(old, new, example):
    (finding,) = propose(layer_count, model(old).state_dict(), model(new))
    (remedy,) = finding.remedies
    assert [str(value) for _, value in remedy.options] == [example]
    assert not remedy.is_complete
    assert propose(layer_count, model(old).state_dict(), model(new), adapt=(example,))[0].fix is not None


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("depth=0-3", "names 4 layers up to 3; layers has 6 in the file, from 0, and 3 in the model.*depth=0,2,4"),
        ("depth=0,1,6", "names 3 layers up to 6; layers has 6 in the file"),
        ("depth=0,1,2 depth=0,2,4", "depth=0,2,4.* both apply to layers; give one of them"),
    ],
)
def test_what_is_refused(recipe, said):
    with pytest.raises(UsageError, match=said):
        propose(layer_count, model(6).state_dict(), model(3), adapt=recipe.split())


def test_a_whole_repair(tmp_path):
    torch.save(model(6).state_dict(), tmp_path / "six.pth")
    report = ckptfix.repair(
        tmp_path / "six.pth", model(3), adapt={"depth": "0,2,4"}, output=tmp_path / "three.pth", select="KEY"
    ).report
    state = torch.load(tmp_path / "three.pth", weights_only=True)
    assert kept(state, 3) == [0, 2, 4]
    assert report.exit_code == 0
    assert report.coverage is not None
    assert report.coverage.share == 1.0
