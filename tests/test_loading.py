from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from torch import nn

import ckptfix
from ckptfix.errors import TargetError, UsageError
from ckptfix.loading import _left_empty, _prepare, load_strictly
from ckptfix.reading.opening import open_state_dict
from tests.checks import bytes_of, is_mapped


@pytest.mark.parametrize(
    ("map_location", "said"),
    [
        pytest.param("cuda:99", "map_location='cuda:99' does not work here (", id="a device that is not there"),
        pytest.param("here", "map_location='here' does not work here (", id="no device"),
        pytest.param({"cuda:0": "cpu"}, "is of type dict, but all tensors go to one device", id="a mapping"),
        pytest.param(lambda storage, place: storage, "is of type function, but", id="a function"),
    ],
)
def test_a_map_location_that_is_no_device_is_refused_in_one_line(map_location: Any, said: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ckptfix.UsageError) as caught:
        ckptfix.load(model, model.state_dict(), map_location=map_location)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("setting", ["in_place", "output", "beside"])
def test_a_load_writes_no_file(setting: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    torch.save(nn.DataParallel(nn.Linear(2, 2)).state_dict(), path)
    content, given = path.read_bytes(), dict[str, Any]({setting: True})
    with pytest.raises(ckptfix.UsageError, match=f"^load.. has no setting '{setting}'"):
        ckptfix.load(nn.Linear(2, 2), path, **given)
    assert (path.read_bytes(), [entry.name for entry in tmp_path.iterdir()]) == (content, ["model.pth"])


class Stubborn(nn.Linear):
    """Raises what it was told to from its own hook."""

    def __init__(self, error: Exception) -> None:
        super().__init__(2, 2)
        self.error = error

    def _load_from_state_dict(self, *given: Any) -> None:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [KeyError("0.weight"), RuntimeError("no\nroom\nhere"), ValueError("odd"), AttributeError("x"), AssertionError()],
    ids=lambda error: type(error).__name__,
)
def test_what_the_load_raises_is_an_error_of_one_line(error: Exception) -> None:
    with pytest.raises(ckptfix.TargetError, match=r"^state_dict: torch fails to load it into Stubborn \(") as caught:
        ckptfix.load(Stubborn(error), nn.Linear(2, 2).state_dict())
    assert type(error).__name__ in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


def test_a_load_goes_by_way_of_the_device() -> None:
    model, source = nn.Linear(2, 2), nn.Linear(2, 2)
    load_strictly(model, open_state_dict(source.state_dict()), torch.device("cpu"))
    assert torch.equal(model.weight, source.weight)


class Net(nn.Module):
    """Tied weights, a frozen parameter, buffers of both kinds, and modules that load in their own ways."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 40)
        self.head = nn.Linear(40, 50)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(300), requires_grad=False)
        self.norm = nn.BatchNorm1d(4)
        self.keeper = Keeper()
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.randn(200))
        self.register_buffer("positions", torch.randn(200), persistent=False)


class Keeper(nn.Module):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.randn(300))
        self.extra = torch.randn(300)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.kept = state_dict.pop(prefix + "kept")
        super()._load_from_state_dict({**state_dict, prefix + "kept": self.kept}, prefix, *rest)

    def get_extra_state(self) -> torch.Tensor:
        return self.extra

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra = state


@pytest.fixture(params=["pth", "legacy.pth", "safetensors"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(1)
    path = tmp_path / f"net.{request.param}"
    if request.param == "safetensors":
        save_model(Net(), str(path))
    else:
        torch.save(Net().state_dict(), path, _use_new_zipfile_serialization=request.param == "pth")
    return path


def values(model: nn.Module) -> dict[str, bytes]:
    return {key: bytes_of(value) for key, value in model.state_dict().items()}


def wanted(path: Path) -> dict[str, bytes]:
    stored = ckptfix.open_checkpoint(path).state_dict()
    return {key: bytes_of(stored.get(key, stored["embed.weight"])) for key in Net().state_dict()}


def test_a_load_keeps_the_parameters_and_shares_no_memory_with_the_file(file: Path) -> None:
    model = Net()
    before = {name: (id(parameter), parameter.data_ptr()) for name, parameter in model.named_parameters()}
    expected, content = wanted(file), file.read_bytes()
    ckptfix.load(model, file)
    assert values(model) == expected
    assert {name: (id(parameter), parameter.data_ptr()) for name, parameter in model.named_parameters()} == before
    assert model.head.weight is model.embed.weight
    assert [parameter.requires_grad for parameter in (model.embed.weight, model.frozen)] == [True, False]
    assert [key for key, value in model.state_dict().items() if is_mapped(value, file)] == []
    os.truncate(file, 0)
    assert values(model) == expected
    file.write_bytes(content)


def test_assigned_parameters_are_those_of_the_file(file: Path) -> None:
    model = Net()
    before = list(model.parameters())  # kept, or a new one could get the id of an old one
    model.head.weight.requires_grad_(False)
    expected, content = wanted(file), file.read_bytes()
    report = ckptfix.load(model, file, assign=True)
    assert values(model) == expected
    assert report.remarks == ()
    assert not {id(parameter) for parameter in before} & {id(parameter) for parameter in model.parameters()}
    if not file.name.endswith("legacy.pth"):  # where its tensors lie is a matter of chance
        assert is_mapped(model.embed.weight, file)
        assert is_mapped(model.scale, file)
    assert model.head.weight is model.embed.weight
    wants = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert wants == {"embed.weight": False, "head.bias": True, "frozen": False, "norm.weight": True, "norm.bias": True}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    changed = values(model)
    assert changed != expected
    assert file.read_bytes() == content
    file.rename(file.with_name("old"))
    file.write_bytes(b"another file")
    file.with_name("old").unlink()
    assert values(model) == changed


def test_a_model_on_the_meta_device_gets_its_tensors_assigned(file: Path) -> None:
    with torch.device("meta"):
        model = Net()
    with pytest.raises(ckptfix.TargetError, match=r"is on the meta device.*; load with assign=True, or"):
        ckptfix.load(model, file)
    report = ckptfix.load(model, file, assign=True)
    assert values(model) == wanted(file)
    assert model.head.weight is model.embed.weight
    assert report.remarks == (
        "the model has 1 tensor on the meta device still, which no state_dict holds: fill positions before use",
    )


def test_an_assigned_model_trains_like_the_one_it_was(file: Path) -> None:
    copied, assigned = Net(), Net()
    ckptfix.load(copied, file)
    ckptfix.load(assigned, file, assign=True)
    for model in (copied, assigned):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model.head(model.embed(torch.arange(9))).square().sum().backward()
        optimizer.step()
    assert values(assigned) == values(copied) != wanted(file)


def test_a_prefix_is_taken_off_before_the_tensors_are_assigned(tmp_path: Path) -> None:
    path, source, model = tmp_path / "wrapped.pth", nn.Linear(30, 20), nn.Linear(30, 20)
    torch.save({"state_dict": nn.DataParallel(source).state_dict()}, path)
    report = ckptfix.load(model, path, assign=True)
    assert values(model) == values(source)
    assert [finding.code for finding in report.fixed] == ["KEY102"]
    assert is_mapped(model.weight, path)


def test_assigned_tensors_of_a_state_dict_are_its_own() -> None:
    model, source = nn.Linear(2, 2), nn.Linear(2, 2)
    ckptfix.load(model, source.state_dict(), assign=True)
    assert model.weight.data_ptr() == source.weight.data_ptr()


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("settings", [{}, {"values": False}], ids=["values read", "values not read"])
def test_nothing_of_a_damaged_file_gets_into_the_model(settings: Any, assign: bool, tmp_path: Path) -> None:
    path, source = tmp_path / "net.pth", Net()
    torch.save(source.state_dict(), path)
    data = bytearray(path.read_bytes())
    data[data.index(bytes_of(source.scale)) + 2] ^= 4
    path.write_bytes(data)
    model = Net()
    before, tensors = values(model), [id(parameter) for parameter in model.parameters()]
    with pytest.raises(ckptfix.UnreadableError, match="the storage of scale fails its checksum"):
        ckptfix.load(model, path, assign=assign, **settings)
    assert values(model) == before
    assert [id(parameter) for parameter in model.parameters()] == tensors


class Twice(nn.Module):
    """One parameter under three names, one buffer under two."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.b = self.c = self.a
        self.x: torch.Tensor
        self.register_buffer("x", torch.zeros(2))
        self.register_buffer("y", self.x)
        self.own = nn.Parameter(torch.zeros(2))


def numbered(**changed: Any) -> dict[str, Any]:
    names = ("a", "b", "c", "x", "y", "own")
    return {name: torch.full((2,), float(index)) for index, name in enumerate(names)} | changed


def test_a_state_dict_without_ties_in_the_dtypes_of_the_model_is_left_alone():
    state_dict = numbered()
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in state_dict})
    before = dict(state_dict)
    assert _prepare(model, state_dict, "f") == ()
    assert all(state_dict[key] is before[key] for key in before)


def test_what_is_one_tensor_in_the_model_becomes_one_with_the_last_value_as_a_copy_would_leave_it():
    assigned, copied, state_dict = Twice(), Twice(), numbered()
    copied.load_state_dict(state_dict)
    assert _prepare(assigned, state_dict, "f") == ()
    assigned.load_state_dict(state_dict, assign=True)
    assert assigned.a is assigned.b is assigned.c
    assert assigned.x is assigned.y
    assert not assigned.a.requires_grad
    for key, value in copied.state_dict().items():
        assert torch.equal(assigned.state_dict()[key], value), key


def test_a_tie_of_which_the_state_dict_has_one_end_is_left_alone():
    state_dict = numbered()
    del state_dict["b"], state_dict["c"]
    before = state_dict["a"]
    _prepare(Twice(), state_dict, "f")
    assert state_dict["a"] is before


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (torch.float16, "assign=True gave the model the dtypes of the file: float16 for float32"),
        (torch.float64, "assign=True gave the model the dtypes of the file: float64 for float32"),
    ],
)
def test_another_width_is_remarked_and_not_converted(dtype, said):
    state_dict = numbered(own=torch.ones(2, dtype=dtype))
    assert _prepare(Twice(), state_dict, "f") == (said,)
    assert state_dict["own"].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_another_kind_of_numbers_is_refused(dtype):
    with pytest.raises(TargetError, match=rf"^f: own is of {str(dtype)[6:]} and the model of float32 there, which"):
        _prepare(Twice(), numbered(own=torch.ones(2, dtype=dtype)), "f")


def test_what_the_meta_device_left_empty_is_named():
    assert _left_empty(Twice()) == ()
    model = nn.Linear(2, 2)
    for name in ("a", "b", "c", "d"):
        model.register_buffer(name, torch.empty(1, device="meta"), persistent=False)
    (remark,) = _left_empty(model)
    assert remark == (
        "the model has 4 tensors on the meta device still, which no state_dict holds: fill a, b, c … before use"
    )


# The optimizer of a script gets its state from the same file
# ----------------------------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for number, name in enumerate(names):
            self.add_module(name, nn.Linear(3, 3 + number))


def adamw(model: nn.Module, decay_first: bool | None = None, names: bool = False) -> torch.optim.AdamW:
    """Return an optimizer of one group, or of two: with decay and without."""
    parts = {True: [], False: []}  # type: dict[bool, list[Any]]
    for name, parameter in model.named_parameters():
        parts[parameter.ndim > 1].append((name, parameter) if names else parameter)
    if decay_first is None:
        return torch.optim.AdamW(model.named_parameters() if names else model.parameters(), lr=0.25)
    groups: list[dict[str, Any]] = [{"params": parts[decay_first]}, {"params": parts[not decay_first], "lr": 0.5}]
    return torch.optim.AdamW(groups)


def trained_file(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, prefix: str = "") -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    weights = {prefix + key: value for key, value in model.state_dict().items()}
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, path)


def moments_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    state = optimizer.state
    return {name: bytes_of(state[one]["exp_avg"]) for name, one in model.named_parameters() if one in state}


def test_an_optimizer_is_loaded_as_it_is(tmp_path: Path) -> None:
    model = Layers("a", "b")
    optimizer = adamw(model)
    trained_file(tmp_path / "run.pth", model, optimizer, "module.")
    new = Layers("a", "b")
    own = torch.optim.AdamW(new.parameters(), lr=1.0)
    assert ckptfix.load(new, tmp_path / "run.pth", optimizer=own).exit_code == 0
    assert moments_of(new, own) == moments_of(model, optimizer)
    assert own.param_groups[0]["lr"] == 0.25


def test_a_container_in_memory_is_one_as_in_a_file(tmp_path: Path) -> None:
    """``torch.load`` has read it already; a random state beside the weights does not make it a state_dict."""
    model = Layers("a", "b")
    optimizer = adamw(model)
    trained_file(tmp_path / "run.pth", model, optimizer, "module.")
    container = {"rng": torch.get_rng_state(), **torch.load(tmp_path / "run.pth", weights_only=True)}
    new = Layers("a", "b")
    own = torch.optim.AdamW(new.parameters(), lr=1.0)
    assert ckptfix.load(new, container, optimizer=own).exit_code == 0
    assert moments_of(new, own) == moments_of(model, optimizer)
    assert list(ckptfix.repair_state_dict(container, new)[0]) == list(new.state_dict())
    with pytest.raises(UsageError, match="container in memory"):  # it may hold objects of any class
        ckptfix.repair(container, new, output=tmp_path / "out.pth")


@pytest.mark.parametrize("names", [True, False], ids=["names", "a recipe"])
def test_state_moves_to_the_groups_of_the_script(tmp_path: Path, names: bool) -> None:
    model = Layers("a", "b", "c")
    optimizer = adamw(model, names=names)
    trained_file(tmp_path / "run.pth", model, optimizer)
    new = Layers("a", "b", "c")
    own = adamw(new, decay_first=False)
    if not names:
        with pytest.raises(TargetError, match=r"only the order of model\.parameters\(\) tells .* unsafe_fixes=True"):
            ckptfix.load(new, tmp_path / "run.pth", optimizer=own)
        assert not own.state
    report = ckptfix.load(new, tmp_path / "run.pth", optimizer=own, unsafe_fixes=not names)
    assert report.exit_code == 0
    assert moments_of(new, own) == moments_of(model, optimizer)
    assert [group["lr"] for group in own.param_groups] == [0.001, 0.5], (
        "what tells the script's groups apart is its own"
    )
    assert report.remarks[-1] == "the optimizer has other groups than the saved one: lr stay as they were"


def test_groups_of_the_script_itself_name_their_positions(tmp_path: Path) -> None:
    """No recipe has a head before its backbone; the same script makes both optimizers."""

    def own_groups(model: nn.Module) -> torch.optim.AdamW:
        parts = [[p for n, p in model.named_parameters() if (n[0] in "bd") is inside] for inside in (True, False)]
        return torch.optim.AdamW([{"params": part, "lr": 0.5 / (1 + n)} for n, part in enumerate(parts)])

    model, new = Layers("a", "b", "c", "d"), Layers("a", "b", "c", "d")
    optimizer = own_groups(model)
    trained_file(tmp_path / "run.pth", model, optimizer, "module.")
    own = own_groups(new)
    assert ckptfix.load(new, tmp_path / "run.pth", optimizer=own).exit_code == 0
    assert moments_of(new, own) == moments_of(model, optimizer)
    other = own_groups(Layers("a", "b", "c", "d"))
    other.param_groups.reverse()
    with pytest.raises(ckptfix.UsageError, match="not the model's"):
        ckptfix.load(new, tmp_path / "run.pth", optimizer=other)
    own.param_groups.reverse()
    with pytest.raises(TargetError, match="has no optimizer whose"):
        ckptfix.load(new, tmp_path / "run.pth", optimizer=own)


class Alike(nn.Module):
    """Layers of equal shapes, of which only the order tells the state apart."""

    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(3, 3))


@pytest.mark.parametrize(
    "groups",
    [
        lambda model: [{"params": list(layer.parameters())} for layer in model.children()],
        lambda model: [{"params": list(layer.parameters())} for layer in reversed(list(model.children()))],
        lambda model: list(reversed(list(model.parameters()))),
        lambda model: [parameter for name, parameter in model.named_parameters() if name[0] != "d"],
    ],
    ids=["layers", "layers from the top", "parameters from the top", "one is frozen"],
)
def test_an_optimizer_of_the_same_script_takes_no_recipe(tmp_path: Path, groups: Any) -> None:
    model, new = Alike("abcd"), Alike("abcd")
    optimizer, own = (torch.optim.Adam(groups(one)) for one in (model, new))
    trained_file(tmp_path / "run.pth", model, optimizer, "module.")
    assert ckptfix.load(new, tmp_path / "run.pth", optimizer=own).exit_code == 0
    assert moments_of(new, own) == moments_of(model, optimizer) != {}
    # in another order of the model, nothing tells whose the moments are
    other = Alike("acbd")
    before = {key: value.clone() for key, value in other.state_dict().items()}
    with pytest.raises(TargetError, match=r"ways to name the parameters of optimizer, which fit and differ"):
        ckptfix.load(other, tmp_path / "run.pth", optimizer=torch.optim.Adam(groups(other)), unsafe_fixes=True)
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())


def test_of_two_optimizers_the_name_tells(tmp_path: Path) -> None:
    both = Layers("a", "b"), Layers("a", "b")
    made = [adamw(model) for model in both]
    for model, optimizer in zip(both, made, strict=True):
        trained_file(tmp_path / "one.pth", model, optimizer)
    saved = {"G": both[0].state_dict(), "D": both[1].state_dict()}
    torch.save({**saved, "optG": made[0].state_dict(), "optD": made[1].state_dict()}, tmp_path / "gan.pth")
    new = Layers("a", "b")
    own = adamw(new)
    ckptfix.load(new, tmp_path / "gan.pth", optimizer=own, weights="D")
    assert moments_of(new, own) == moments_of(both[1], made[1])
    torch.save({**saved, "first": made[0].state_dict(), "second": made[1].state_dict()}, tmp_path / "gan.pth")
    with pytest.raises(TargetError, match="2 optimizers that fit, first, second"):
        ckptfix.load(new, tmp_path / "gan.pth", optimizer=own, weights="D")


def test_what_is_new_has_no_state_and_its_own_group(tmp_path: Path) -> None:
    model = Layers("a", "b")
    optimizer = adamw(model, names=True)
    trained_file(tmp_path / "run.pth", model, optimizer)
    new = Layers("a", "b", "c")
    new_ones = [parameter for name, parameter in new.named_parameters() if name.startswith("c.")]
    old_ones = [parameter for name, parameter in new.named_parameters() if not name.startswith("c.")]
    groups: list[dict[str, Any]] = [{"params": old_ones}, {"params": new_ones, "lr": 9}]
    own = torch.optim.AdamW(groups)
    state = ckptfix.repair_optimizer_state(tmp_path / "run.pth", new, own, fill="target")
    assert [group["lr"] for group in state["param_groups"]] == [0.25, 9]
    ckptfix.load(new, tmp_path / "run.pth", optimizer=own, fill="target")
    assert moments_of(new, own) == moments_of(model, optimizer)


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        pytest.param({}, "has no optimizer whose parameters are the model's", id="none"),
        pytest.param(
            {"optimizer": {"state": {}, "param_groups": [{"params": [0]}]}}, "has no optimizer whose", id="of another"
        ),
    ],
)
def test_without_an_optimizer_nothing_is_loaded(tmp_path: Path, saved: dict[str, Any], said: str) -> None:
    model = Layers("a", "b")
    torch.save({"model": {key: value + 1 for key, value in model.state_dict().items()}, **saved}, tmp_path / "run.pth")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(TargetError, match=said):
        ckptfix.load(model, tmp_path / "run.pth", optimizer=adamw(model))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    model = Layers("a", "b")
    trained_file(tmp_path / "run.pth", model, adamw(model))
    with pytest.raises(ckptfix.UsageError, match="not the model's"):
        ckptfix.load(model, tmp_path / "run.pth", optimizer=adamw(Layers("a", "b")))
    with pytest.raises(ckptfix.UsageError, match="assign=True"):
        ckptfix.load(model, tmp_path / "run.pth", optimizer=adamw(model), assign=True)


@pytest.mark.parametrize(
    ("make", "asked", "error"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {}, "is not that of SGD: its groups have no dampening"),
        (lambda p: torch.optim.RMSprop(p), {}, "is not that of RMSprop: its groups have no alpha"),
        (lambda p: torch.optim.AdamW, {}, "give the torch.optim.Optimizer itself"),
        (lambda p: [torch.optim.AdamW(p)], {}, "give the torch.optim.Optimizer itself"),
        (lambda p: torch.optim.AdamW(p).state_dict(), {}, "give the torch.optim.Optimizer itself"),
        (torch.optim.AdamW, {"drop_optimizer": True}, "leaves out the state that the given optimizer is to load"),
        (lambda p: torch.optim.AdamW([nn.Parameter(torch.zeros(2))]), {}, "that are not the model's"),
        (torch.optim.Adam, {}, None),
    ],
    ids=["sgd", "rmsprop", "class", "list", "state_dict", "dropped", "another model", "adam"],
)
def test_what_is_not_the_optimizer_that_was_saved(tmp_path: Path, make: Any, asked: Any, error: str | None) -> None:
    model, new = nn.Linear(3, 2), nn.Linear(3, 2)
    trained_file(tmp_path / "run.pth", model, torch.optim.AdamW(model.parameters()))
    before = new.weight.clone()
    with pytest.raises((UsageError, TargetError), match=error) if error else contextlib.nullcontext():
        ckptfix.load(new, tmp_path / "run.pth", optimizer=make(list(new.parameters())), **asked)
    assert torch.equal(new.weight, before if error else model.weight)
