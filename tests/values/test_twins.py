import pytest
import torch
from torch import nn

from ckptfix.core.target import target_from_module
from ckptfix.reading.opening import open_file, open_state_dict
from ckptfix.values.twins import entry_at, twin_sets, twins_beside

STATE = {"conv.weight": torch.ones(4, 2), "fc.weight": torch.ones(3, 4), "fc.bias": torch.ones(3)}


def saved(tmp_path, **sets):
    torch.save(sets, tmp_path / "model.pth")
    return open_file(str(tmp_path / "model.pth"), next(iter(sets)))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"gen.weight": torch.ones(4, 2), "b": torch.ones(3)}, id="another-model"),
        pytest.param({key: torch.ones(7) for key in STATE}, id="other-shapes"),
        pytest.param({"conv.weight": STATE["conv.weight"]}, id="a-part-of-it"),
    ],
)
def test_noop_different_weights(tmp_path, other):
    assert list(twin_sets(saved(tmp_path, state_dict=STATE, other=other))) == []


def critic(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).state_dict()


@pytest.mark.parametrize(
    ("one", "other"), [("critic1", "critic2"), ("G_A", "G_B"), ("state_dict", "state_dict_ema")], ids=lambda name: name
)
def test_noop_two_networks_of_one_architecture(tmp_path, one, other):
    assert list(twin_sets(saved(tmp_path, **{one: critic(0), other: critic(1)}))) == []


@pytest.mark.parametrize("broken", [["0.weight"], ["0.weight", "2.weight"]], ids=["a-layer", "all"])
def test_a_broken_average_is_a_twin(tmp_path, broken):
    raw = critic(0)
    averaged = {key: value * 0.9 + 0.1 * critic(1)[key] for key, value in raw.items()}
    averaged |= {key: torch.full((16, 16), float("nan")) for key in broken}
    assert [place for place, _ in twin_sets(saved(tmp_path, model=raw, model_ema=averaged))] == ["model_ema"]


def test_sets_without_values_are_twins_by_name_only(tmp_path):
    other = {key: value.clone() for key, value in STATE.items()}
    assert list(twin_sets(saved(tmp_path, critic=STATE, critic_target=other))) == []
    assert [place for place, _ in twin_sets(saved(tmp_path, model=STATE, ema=other))] == ["ema"]


@pytest.mark.parametrize("prefix", ["", "module.", "model.module."])
def test_an_average_under_a_prefix_is_a_twin(tmp_path, prefix):
    averaged = {prefix + key: value.clone() for key, value in STATE.items()}
    checkpoint = saved(tmp_path, state_dict=STATE, state_dict_ema=averaged)
    ((place, twins),) = twin_sets(checkpoint)
    assert place == "state_dict_ema"
    assert {key: twin.key for key, twin in twins.items()} == {key: prefix + key for key in STATE}
    assert twins["fc.bias"].label == f"state_dict_ema: {prefix}fc.bias"
    assert entry_at(checkpoint, place, prefix + "fc.bias") is twins["fc.bias"].spec
    assert entry_at(checkpoint, "", "fc.bias") is checkpoint.specs["fc.bias"]
    assert entry_at(checkpoint, "nowhere", "fc.bias") is None


@pytest.mark.parametrize(
    ("raw", "averaged"),
    [
        ("backbone.conv.weight", "ema_backbone_conv_weight"),
        ("online_model.conv.weight", "ema_model.conv.weight"),
        ("student.conv.weight", "teacher.conv.weight"),
    ],
)
def test_averages_in_the_same_state_dict(raw, averaged):
    twins = twins_beside(open_state_dict({raw: torch.ones(4, 2), averaged: torch.zeros(4, 2)}), None)
    assert {key: (twin.place, twin.key) for key, twin in twins.items()} == {raw: ("", averaged), averaged: ("", raw)}


def test_a_tie_that_was_stored_twice():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

    state = {"a.weight": torch.ones(4, 4), "b.weight": torch.ones(4, 4)}
    found = twins_beside(open_state_dict(state), target_from_module(Tied()))
    assert {key: twin.key for key, twin in found.items()} == {"a.weight": "b.weight", "b.weight": "a.weight"}
    assert twins_beside(open_state_dict(Tied().state_dict()), target_from_module(Tied())) == {}, "one tensor"


def test_input_and_output_embedding_are_a_tie_by_their_names():
    embedding = torch.randn(32, 4)
    state = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding + 0.1}
    assert list(twins_beside(open_state_dict(state), None)) == list(state)
    for other in (embedding[1:], torch.randn(32, 4), 0.1 * embedding.flip(0), torch.zeros(32, 4)):
        assert twins_beside(open_state_dict({**state, "lm_head.weight": other}), None) == {}
