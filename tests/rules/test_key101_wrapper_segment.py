"""KEY101: segments that only wrappers make."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ckptfix
from ckptfix.core.finding import Applicability, Level
from ckptfix.rules.key101_wrapper_segment import wrapper_segment
from tests.checks import assert_same, check_noop, check_repaired
from tests.rules.proposals import propose

ONE = torch.ones(2)


def with_metadata(state: dict[str, Any], *modules: str) -> OrderedDict[str, Any]:
    made = OrderedDict(state)
    made._metadata = OrderedDict((module, {"version": 1}) for module in modules)  # type: ignore[attr-defined]  # torch hangs it there
    return made


def compiled() -> Any:
    return torch.compile(nn.Linear(2, 2), backend="eager")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(3)


@pytest.mark.parametrize(
    ("state", "model"),
    [
        pytest.param({}, None, id="empty"),
        pytest.param(nn.BatchNorm1d(3).state_dict(), None, id="plain keys"),
        pytest.param({"my_orig_mod.weight": ONE, "_orig_model.weight": ONE}, None, id="a segment is compared whole"),
        pytest.param({"module.weight": ONE}, None, id="module is a name that users take too"),
        pytest.param(
            with_metadata({"weight": ONE}, "", "forward_module"),
            None,
            id="a path of _metadata is compared by segment too",
        ),
        pytest.param(
            compiled().state_dict(),
            compiled(),
            id="the target is wrapped itself",
        ),
        pytest.param(
            nn.Sequential(checkpoint_wrapper(Block())).state_dict(),
            nn.Sequential(checkpoint_wrapper(Block())),
            id="the target's _metadata has the segment too",
        ),
    ],
)
def test_noop(state, model):
    check_noop(state, "KEY101", model)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("_orig_mod.a.weight", "a.weight", id="first"),
        pytest.param("a._checkpoint_wrapped_module.weight", "a.weight", id="in the middle"),
        pytest.param("module._orig_mod.a.weight", "module.a.weight", id="behind module, which another rule takes"),
        pytest.param("_forward_module._fsdp_wrapped_module.a._fsdp_wrapped_module.weight", "a.weight", id="three"),
        pytest.param("_orig_mod._orig_mod.weight", "weight", id="twice"),
        pytest.param("backbone_orig_mod._orig_mod.x", "backbone_orig_mod.x", id="beside a name that ends so"),
    ],
)
def test_repaired(before, after):
    report = check_repaired({before: ONE, "other": ONE + 1}, {after: ONE, "other": ONE + 1}, "KEY101")
    assert report.findings[0].level == Level.ERROR
    assert report.findings[0].keys == (before,)


def test_entries_that_are_not_tensors_move_along():
    check_repaired({"_orig_mod.fc.scale": 1.5, "_orig_mod.w": ONE}, {"fc.scale": 1.5, "w": ONE}, "KEY101")


@pytest.mark.parametrize(
    "state",
    [
        pytest.param({"_orig_mod.weight": ONE, "weight": ONE}, id="both namings"),
        pytest.param({"a._orig_mod.weight": ONE, "_orig_mod.a.weight": ONE}, id="two wrappings of one name"),
        pytest.param({"_orig_mod": ONE}, id="nothing would be left"),
    ],
)
def test_a_collision_is_reported_and_not_fixed(state):
    (finding,) = propose(wrapper_segment, state)
    assert finding.fix is None
    assert "two keys would both be" in finding.message


def test_metadata_with_segments_that_the_keys_lack():
    """FSDP and checkpoint_wrapper clean the keys and forget the paths."""
    model = nn.Sequential(checkpoint_wrapper(Block()), nn.ReLU())
    saved, plain = model.state_dict(), nn.Sequential(Block(), nn.ReLU()).state_dict()
    assert list(saved) == list(plain)
    assert "0.bn" not in vars(saved)["_metadata"]
    report = check_repaired(saved, plain, "KEY101")
    (finding,) = report.findings
    assert (finding.level, finding.fix and finding.fix.applicability) == (Level.NOTE, Applicability.SAFE)
    assert finding.evidence == {"modules": ["0._checkpoint_wrapped_module", "0._checkpoint_wrapped_module.bn"]}
    assert report.exit_code == 0


def test_metadata_of_fsdp():
    module = "_fsdp_wrapped_module"
    saved = with_metadata({"0.w": ONE}, "", module, f"{module}.0", f"{module}.0.{module}", f"{module}.0.{module}.act")
    check_repaired(saved, with_metadata({"0.w": ONE}, "", "0", "0.act"), "KEY101")


def test_keys_and_metadata_in_one_pass():
    saved = with_metadata(
        {"_orig_mod.0.w": ONE}, "", "_orig_mod", "_orig_mod.0", "_orig_mod.0._checkpoint_wrapped_module"
    )
    report = check_repaired_twice_found(saved, with_metadata({"0.w": ONE}, "", "0"))
    assert [finding.level for finding in report] == [Level.ERROR, Level.NOTE]


def check_repaired_twice_found(before, after):
    repaired, report = ckptfix.repair_state_dict(before, select=("KEY101",))
    assert_same(repaired, after)
    return report.fixed


@pytest.mark.parametrize("second", ["module.", "x.", "module.module."])
def test_a_second_set_of_weights_is_unchanged(second):
    """Were the other set moved out of the way, a second pass would bring this one after it."""
    plain = nn.Linear(2, 2).state_dict()
    state = {f"{start}{key}": value for start in (f"_orig_mod.{second}", second) for key, value in plain.items()}
    repaired, report = ckptfix.repair_state_dict(state, nn.Linear(2, 2))
    assert list(repaired) == list(state)
    assert not report.fixed
    assert report.exit_code == 1
