import pytest
import torch

from ckptfix.core.finding import Level
from ckptfix.rules.val203_subnormal import subnormal
from tests.checks import check_repaired
from tests.rules.healthy import HEALTHY, build
from tests.rules.proposals import propose


def weight(subnormals: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    tensor = torch.ones(16, 16, dtype=dtype)
    tensor.view(-1)[:subnormals] = torch.finfo(dtype).smallest_normal / 4
    return {"fc.weight": tensor}


def test_noop_healthy_models():
    for name in HEALTHY:
        assert propose(subnormal, build(name).state_dict()) == [], name


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(weight(0), id="none"),
        pytest.param(weight(200, torch.float16), id="half-computes-with-them"),
        pytest.param(weight(200, torch.bfloat16), id="bfloat16"),
        pytest.param({"w": torch.zeros(8, 8)}, id="zeros"),
        pytest.param({"w": weight(200)["fc.weight"].index_fill(0, torch.tensor([15]), 1e30)}, id="other-bytes"),
    ],
)
def test_noop(state):
    assert propose(subnormal, state) == []


@pytest.mark.parametrize(
    ("state", "level"),
    [
        (weight(2), Level.NOTE),
        (weight(3), Level.WARNING),
        (weight(200, torch.float64), Level.WARNING),
        ({"bn.weight": torch.full((64,), 1e-40)}, Level.NOTE),
    ],
    ids=["few", "many", "double", "a-vector"],
)
def test_the_level_depends_on_the_share(state, level):
    (finding,) = propose(subnormal, state)
    assert (finding.level, finding.keys, finding.fix) == (level, tuple(state), None)


def test_flushed_on_request():
    before = {**weight(7), "b": torch.tensor([1e-40, -0.0, -1e-45, 1.0])}
    after = {"fc.weight": torch.where(before["fc.weight"] < 1, 0.0, 1.0), "b": torch.tensor([0.0, -0.0, 0.0, 1.0])}
    with pytest.raises(AssertionError):  # a note and a warning are two findings
        check_repaired(before, after, "VAL203", flush_subnormals=True)
    for key in before:
        check_repaired({key: before[key]}, {key: after[key]}, "VAL203", flush_subnormals=True)
