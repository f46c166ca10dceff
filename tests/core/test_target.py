"""What a module or a file expects, compared with what torch's strict load accepts."""

import pytest
import torch
from torch import nn

from ckptfix.core.target import BUFFER, PARAMETER, Slot, target_from_checkpoint, target_from_module
from ckptfix.reading.opening import open_state_dict


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


class Empties(nn.Module):
    """Two tensors without elements have the same data pointer and are not tied."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(0))
        self.b = nn.Parameter(torch.empty(0))


class Halves(nn.Module):
    """Two views of one buffer that cover different elements."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.arange(8.0)
        self.a = nn.Parameter(flat[:4])
        self.b = nn.Parameter(flat[4:])


class Stateful(nn.Module):
    def __init__(self, state: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("kept", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("dropped", torch.zeros(3), persistent=False)
        self._state = state

    def get_extra_state(self) -> object:
        return self._state

    def set_extra_state(self, state: object) -> None:
        self._state = state


class Loss(nn.Linear):
    """As a loss of torchrl, it overrides a method of torch without its newer arguments."""

    def named_parameters(self, prefix: str = "", recurse: bool = True):  # type: ignore[override]
        return super().named_parameters(prefix=prefix, recurse=recurse)


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(nn.Sequential(), id="nothing"),
        pytest.param(Loss(2, 2), id="with an older named_parameters"),
        pytest.param(nn.BatchNorm1d(3), id="buffers"),
        pytest.param(nn.LSTM(2, 3, num_layers=2), id="a recurrent layer's flat weights"),
        pytest.param(nn.DataParallel(nn.Linear(2, 2)), id="wrapped"),
        pytest.param(nn.Sequential(nn.Linear(2, 2).half()), id="half"),
    ],
)
def test_slots_are_those_of_the_state_dict(module):
    slots = target_from_module(module).slots
    assert {key: (slot.dtype, slot.shape) for key, slot in slots.items()} == {
        key: (str(value.dtype).removeprefix("torch."), tuple(value.shape)) for key, value in module.state_dict().items()
    }
    assert list(slots) == list(module.state_dict())
    assert {key for key, slot in slots.items() if slot.kind == PARAMETER} == {
        name for name, _ in module.named_parameters()
    }


@pytest.mark.parametrize(
    ("module", "ties"),
    [
        pytest.param(nn.Linear(2, 2), (), id="nothing is tied"),
        pytest.param(Empties(), (), id="empty tensors are not tied"),
        pytest.param(Halves(), (), id="a shared flat buffer is not a tie"),
        pytest.param(Tied(), (("embed.weight", "head.weight"),), id="one Parameter under two names"),
    ],
)
def test_ties(module, ties):
    assert target_from_module(module).ties == ties
    assert target_from_checkpoint(open_state_dict(module.state_dict())).ties == ties


@pytest.mark.parametrize("make", [Empties, Halves, Tied])
def test_ties_on_the_meta_device(make):
    with torch.device("meta"):
        module = make()
    assert target_from_module(module).ties == target_from_module(make()).ties


def test_a_tie_of_two_parameters_that_share_their_data():
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    second.weight.data = first.weight.data
    assert target_from_module(nn.Sequential(first, second)).ties == (("0.weight", "1.weight"),)


@pytest.mark.parametrize(
    "state", [{"step": 3}, torch.zeros(7)], ids=["a dict", "a tensor, whose size is its own affair"]
)
def test_kinds(state):
    target = target_from_module(Stateful(state))
    assert target.slots == {"weight": Slot("float32", (2,), PARAMETER), "kept": Slot("int64", (2,), BUFFER)}
    assert target.entries == {"_extra_state"}
    assert target.transient == {"dropped"}
    assert target.label == "Stateful"


def test_a_lazy_parameter_has_no_shape_yet():
    target = target_from_module(nn.LazyLinear(3))
    assert target.slots["weight"] == Slot("float32", None, PARAMETER)
    assert target.accepts("weight", (3, 9))
    assert target.initial is not None
    assert dict(target.initial()) == {}


def test_initial_values_are_the_module_s_own():
    module = nn.Linear(2, 2)
    initial = target_from_module(module).initial
    assert initial is not None
    assert torch.equal(initial()["weight"], module.weight)
    assert not initial()["weight"].requires_grad


def test_the_meta_device_has_no_initial_values():
    assert target_from_module(nn.Linear(2, 2, device="meta")).initial is None


def test_modules_by_path():
    assert target_from_module(nn.Sequential(nn.InstanceNorm1d(2))).modules == {"": "Sequential", "0": "InstanceNorm1d"}


@pytest.mark.parametrize(
    ("key", "tensor", "kind"),
    [
        pytest.param("running_mean", nn.Parameter(torch.zeros(2)), PARAMETER, id="a Parameter, whatever its name"),
        pytest.param("fc.weight", torch.zeros(2), PARAMETER, id="floats of no known name"),
        pytest.param("bn.running_var", torch.zeros(2), BUFFER, id="running statistics"),
        pytest.param("rotary.inv_freq", torch.zeros(2), BUFFER, id="a known name"),
        pytest.param("index", torch.zeros(2, dtype=torch.int32), BUFFER, id="integers"),
    ],
)
def test_kind_by_what_a_file_says(key, tensor, kind):
    target = target_from_checkpoint(open_state_dict({key: tensor}))
    assert target.slots[key].kind == kind
    assert target.initial is None
    assert target.modules is None


def test_entries_of_a_file_that_are_not_tensors():
    target = target_from_checkpoint(open_state_dict({"weight": torch.zeros(1), "_extra_state": {"a": 1}}))
    assert set(target.slots) == {"weight"}
    assert target.entries == {"_extra_state"}
