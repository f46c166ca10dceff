"""KEY104: a prefix that the target does not have, or one that the file lacks."""

from typing import Any

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.finding import Applicability, Level
from ckptfix.report.advice import remedies_text
from ckptfix.rules.key104_foreign_prefix import MOST, foreign_prefix
from tests.checks import check_noop, check_repaired
from tests.rules.proposals import propose, repaired


def net(classes: int = 4) -> nn.Sequential:
    """conv (0), bn (1), an inner pair of the same shapes (2), head (3)."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3))
    return nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), inner, nn.Linear(3, classes))


def prefixed(state, prefix):
    return {prefix + key: value for key, value in state.items()}


def within(**modules: nn.Module) -> Any:
    return nn.ModuleDict(modules)


@pytest.mark.parametrize(
    ("state", "model"),
    [
        pytest.param(prefixed(net().state_dict(), "model."), None, id="no target"),
        pytest.param(net().state_dict(), net(), id="all in place"),
        pytest.param(prefixed(net().state_dict(), "model."), within(model=net()), id="the target has the prefix"),
        pytest.param({"aux.weight": torch.ones(9)}, nn.Linear(2, 2), id="another shape"),
        pytest.param(
            {"0.weight": torch.ones(4, 2), "aux.weight": torch.ones(4, 2), "aux2.bias": torch.ones(4)},
            nn.Linear(2, 4),
            id="a single common name proves nothing",
        ),
        pytest.param(
            {**net().state_dict(), "aux.9.weight": torch.ones(5, 5)},
            nn.Sequential(*net(), *[nn.ReLU()] * 5, nn.Linear(5, 5, bias=False)),
            id="one free key that happens to end like the missing one",
        ),
    ],
)
def test_noop(state, model):
    check_noop(state, "KEY104", model)


@pytest.mark.parametrize("prefix", ["model.", "net.", "backbone.body.", "module.encoder.0.", "a.b.c.d.e.f."])
def test_a_prefix_is_removed_and_added(prefix):
    model = net()
    plain = model.state_dict()
    check_repaired(prefixed(plain, prefix), dict(plain), "KEY104", model)
    wrapped: Any = model
    for name in reversed(prefix.strip(".").split(".")):
        wrapped = within(**{name: wrapped})
    check_repaired(dict(plain), prefixed(plain, prefix), "KEY104", wrapped)


def test_a_file_of_one_tensor():
    check_repaired(
        {"model.weight": torch.ones(4, 2)}, {"weight": torch.ones(4, 2)}, "KEY104", nn.Linear(2, 4, bias=False)
    )


def test_two_prefixes_of_one_trainer():
    """The body under ``model.backbone.``, the head under ``model.``."""
    model = within(body=net(), head=nn.Linear(4, 2, bias=False))
    state = {
        **prefixed(net().state_dict(), "model.backbone.body."),
        "model.head.weight": torch.ones(2, 4),
    }
    report = ckptfix.check(state, model, select=("KEY104",))
    assert report.exit_code == 1
    assert list(repaired(foreign_prefix, state, model)) == list(model.state_dict())


def test_metadata_follows_the_keys():
    wrapped = within(model=within(net=net()))
    check_repaired(wrapped.state_dict(), wrapped["model"]["net"].state_dict(), "KEY104", net())
    check_repaired(net().state_dict(), dict_with_metadata_of(wrapped, net()), "KEY104", wrapped)


def dict_with_metadata_of(wrapped, plain):
    state = wrapped.state_dict()
    for key, value in zip(list(state), plain.state_dict().values(), strict=True):
        state[key] = value
    return state


def test_a_head_of_another_shape_follows():
    state = prefixed(net(classes=1000).state_dict(), "model.")
    report = ckptfix.check(state, net())
    assert [finding.code for finding in report.findings if finding.level == Level.ERROR] == ["KEY104", "FIT103"]
    fitting, report = ckptfix.repair_state_dict(state, net(), drop_mismatched=True, fill="target")
    assert list(fitting) == list(net().state_dict())


def test_entries_that_are_not_tensors_follow():
    class Stateful(nn.Linear):
        def get_extra_state(self):
            return {"steps": 7}

        def set_extra_state(self, state):
            self.steps = state["steps"]

    model = Stateful(2, 2)
    ckptfix.load(model, prefixed(Stateful(2, 2).state_dict(), "model."))
    assert model.steps == 7


@pytest.mark.parametrize(
    "rest",
    [
        pytest.param({}, id="twins"),
        pytest.param({"encoder_q.3.extra": torch.ones(1)}, id="one of them has a key more"),
    ],
)
def test_query_and_key_encoder_are_reported_and_not_chosen(rest):
    state = {**prefixed(net().state_dict(), "encoder_q."), **prefixed(net().state_dict(), "encoder_k."), **rest}
    (finding,) = propose(foreign_prefix, state, net())
    assert finding.fix is None
    assert finding.level == Level.ERROR
    assert "`encoder_k.` extra or `encoder_q.` extra" in finding.message


def test_two_incomplete_sets_are_not_mixed():
    """Each branch lacks what the other has: taking both would make a model that was never trained."""
    first, second = net().state_dict(), net().state_dict()
    state = {
        **{f"a.{key}": value for key, value in first.items() if key != "3.bias"},
        **{f"b.{key}": value for key, value in second.items() if key not in ("0.weight", "0.bias")},
    }
    (finding,) = propose(foreign_prefix, state, net())
    assert finding.fix is None


def test_nothing_is_taken_from_a_smaller_set():
    state = {
        **{f"a.{key}": value for key, value in net().state_dict().items() if key not in ("3.weight", "3.bias")},
        "b.3.weight": torch.ones(4, 3),
        "b.3.bias": torch.ones(4),
        "b.0.weight": torch.ones(3, 3, 3, 3),
    }
    after = repaired(foreign_prefix, state, net())
    assert "3.weight" not in after
    assert "b.3.weight" in after


def test_a_complete_set_is_preferred_to_a_part():
    """A teacher without a head next to the student, which is the model."""
    state = {
        **prefixed(net().state_dict(), "student."),
        **prefixed({key: value for key, value in net().state_dict().items() if not key.startswith("3.")}, "teacher."),
    }
    (finding,) = propose(foreign_prefix, state, net())
    assert finding.fix is not None
    assert finding.fix.applicability == Applicability.SAFE
    assert all(key.startswith("student.") for key in finding.keys)


@pytest.mark.parametrize(
    ("model", "missing"),
    [
        pytest.param(nn.Sequential(*net(), *net()), "2.", id="a part"),
        pytest.param(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)), "1.", id="a single module"),
    ],
)
def test_a_part_of_a_second_set_is_not_another_part_of_the_first(model, missing):
    """The average of another part has the same inner names and shapes as the missing one, and is not taken for it."""
    state = {key: value for key, value in model.state_dict().items() if not key.startswith(missing)}
    assert propose(foreign_prefix, {**state, **prefixed(state, "ema.")}, model) == []


def test_two_sets_are_named_with_their_flags():
    sets = {**prefixed(net().state_dict(), "encoder_k."), **prefixed(net().state_dict(), "encoder_q.")}
    (finding,) = propose(foreign_prefix, sets, net())
    assert remedies_text(finding.remedies) == (
        "--weights encoder_q uses only this set; or --weights encoder_k uses only this set"
    )


@pytest.mark.parametrize("places", [("query", "key"), ("0", "1")])
def test_two_places_for_one_set_are_reported_and_not_chosen(places):
    model = within(**{place: net() for place in places})
    (finding,) = propose(foreign_prefix, net().state_dict(), model)
    assert finding.fix is None
    assert f"`{places[1]}.` missing" in finding.message


def test_few_unknown_keys_in_a_fitting_file_are_not_a_safe_match():
    """An auxiliary head of the same shape looks like the missing head."""
    model = within(body=net(), fc=nn.Linear(3, 4))
    state = {
        **prefixed(net().state_dict(), "body."),
        "aux.fc.weight": torch.ones(4, 3),
        "aux.fc.bias": torch.ones(4),
    }
    (finding,) = propose(foreign_prefix, state, model)
    assert finding.fix is not None
    assert finding.fix.applicability == Applicability.UNSAFE
    _, report = ckptfix.repair_state_dict(state, model)
    assert report.exit_code == 1
    assert not report.fixed


def test_prefixes_end_at_a_dot():
    model = within(blocks=net())
    state = prefixed(net().state_dict(), "backbone_module.blocks.")
    check_repaired(state, prefixed(net().state_dict(), "blocks."), "KEY104", model)


@pytest.mark.parametrize(("layers", "count"), [(MOST, 1), (MOST + 1, 0)])
def test_a_different_prefix_for_each_of_many_layers(layers: int, count: int):
    """Each is looked for among all keys: with ten thousand layers that would take for ever."""
    model = within(**{f"layer{number}": nn.Linear(2, 2) for number in range(layers)})
    state = {f"m{key.partition('.')[0]}.{key}": value for key, value in model.state_dict().items()}
    assert len(propose(foreign_prefix, state, model)) == count


class Ends(nn.Module):
    """An MLP whose first and last layers have names of their own, as transformers writes the heads of SAM."""

    def __init__(self, depth: int = 1) -> None:
        super().__init__()
        self.proj_in, self.layers = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))
        self.proj_out = nn.Linear(4, 4)


def listed(depth: int) -> Any:
    """The same MLP as one list."""
    return within(layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(depth)))


@pytest.mark.parametrize(("file", "target"), [(listed(3), Ends()), (Ends(), listed(3))])
def test_equal_numbers_of_different_layers(file, target):
    state = within(body=net(), head=file).state_dict()
    proposed = propose(foreign_prefix, state, within(model=within(body=net(), head=target)))
    renamed = {key for finding in proposed for key in finding.keys}
    assert renamed == {key for key in state if key.startswith("body.")}


def test_a_longer_list_keeps_its_numbers():
    """Layers that the target does not have, and a head of its own, of another shape."""
    target = within(model=within(body=net(), **dict(Ends(1).named_children()), extra=nn.Linear(9, 9)))
    state = within(body=net(), **dict(Ends(3).named_children())).state_dict()
    (proposed,) = propose(foreign_prefix, state, target)
    assert set(state) - set(proposed.keys) == {f"layers.{n}.{leaf}" for n in (1, 2) for leaf in ("weight", "bias")}


@pytest.mark.parametrize("prefix", ["bert.", ""], ids=["too much", "missing"])
def test_keys_renamed_by_a_release_follow_their_module(prefix):
    """The prefix is removed first, and the name of the tensor is left to the next rule."""
    inner = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 5))
    model = inner if prefix else nn.ModuleDict({"bert": inner})
    state = {f"{prefix}{key}": value for key, value in inner.state_dict().items() if not key.startswith("1.")}
    state |= {f"{prefix}1.{name}": torch.ones(4) for name in ("gamma", "beta")}
    (finding,) = propose(foreign_prefix, state, model)
    assert set(finding.keys) == set(state)
