import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from torch import nn

import ckptfix
from ckptfix.errors import DamageWarning, TargetError, UnreadableError
from ckptfix.loading import _left_empty, _prepare, load_strictly
from ckptfix.reading.opening import open_state_dict
from tests.checks import bytes_of, is_mapped
from tests.reading.folders.ranks.genuine import swap, unpacked


@pytest.mark.parametrize(
    ("map_location", "said"),
    [
        pytest.param("cuda:99", "map_location='cuda:99' does not work here (", id="a device that is not there"),
        pytest.param("here", "map_location='here' does not work here (", id="no device"),
        pytest.param({"cuda:0": "cpu"}, "is of type dict, but all tensors go to one device", id="a mapping"),
        pytest.param(lambda storage, place: storage, "is of type function, but", id="a function"),
    ],
)
def test_a_map_location_that_is_not_a_device_is_refused_in_one_line(map_location: Any, said: str) -> None:
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
    """Raise a given error from its own hook."""

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
def test_errors_of_the_load_are_one_line(error: Exception) -> None:
    with pytest.raises(ckptfix.TargetError, match=r"^state_dict: torch fails to load it into Stubborn \(") as caught:
        ckptfix.load(Stubborn(error), nn.Linear(2, 2).state_dict())
    assert type(error).__name__ in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


def test_a_load_uses_the_map_location() -> None:
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


@pytest.mark.parametrize("mmap", [False, True])
def test_a_load_keeps_the_parameters_and_shares_no_memory_with_the_file(file: Path, mmap: bool) -> None:
    model = Net()
    given: dict[str, bool] = {}
    model.register_load_state_dict_pre_hook(
        lambda _, state_dict, *rest: given.update({key: is_mapped(value, file) for key, value in state_dict.items()})
    )
    before = {name: (id(parameter), parameter.data_ptr()) for name, parameter in model.named_parameters()}
    expected, content = wanted(file), file.read_bytes()
    ckptfix.load(model, file, mmap=mmap)
    is_aligned = not file.name.endswith("legacy.pth")  # where its tensors are is a matter of chance
    assert given["embed.weight"] is mmap or not is_aligned
    assert values(model) == expected
    assert {name: (id(parameter), parameter.data_ptr()) for name, parameter in model.named_parameters()} == before
    assert model.head.weight is model.embed.weight
    assert [parameter.requires_grad for parameter in (model.embed.weight, model.frozen)] == [True, False]
    mapped = [key for key, value in model.state_dict().items() if is_mapped(value, file)]
    assert mapped == [key for key in ("keeper.kept", "keeper._extra_state") if given[key]]  # which its own hooks kept
    if not mapped:
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
    if not file.name.endswith("legacy.pth"):  # the addresses of its tensors depend on chance
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
        "1 tensor still on the meta device, because no state_dict has values for them: fill positions before use",
    )


def test_an_assigned_model_trains_like_the_original(file: Path) -> None:
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
def test_a_damaged_file_leaves_the_model_unchanged(settings: Any, assign: bool, tmp_path: Path) -> None:
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


def test_noop_no_ties_and_the_dtypes_of_the_model():
    state_dict = numbered()
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in state_dict})
    before = dict(state_dict)
    assert _prepare(model, state_dict, "f") == ()
    assert all(state_dict[key] is before[key] for key in before)


def test_tied_keys_become_one_tensor_with_the_last_value():
    assigned, copied, state_dict = Twice(), Twice(), numbered()
    copied.load_state_dict(state_dict)
    assert _prepare(assigned, state_dict, "f") == ()
    assigned.load_state_dict(state_dict, assign=True)
    assert assigned.a is assigned.b is assigned.c
    assert assigned.x is assigned.y
    assert not assigned.a.requires_grad
    for key, value in copied.state_dict().items():
        assert torch.equal(assigned.state_dict()[key], value), key


def test_noop_one_end_of_a_tie():
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
def test_another_precision_is_noted_and_not_converted(dtype, said):
    state_dict = numbered(own=torch.ones(2, dtype=dtype))
    assert _prepare(Twice(), state_dict, "f") == (said,)
    assert state_dict["own"].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_another_kind_of_dtype_is_refused(dtype):
    with pytest.raises(TargetError, match=rf"^f: own is {str(dtype)[6:]}, but float32 in the model, and"):
        _prepare(Twice(), numbered(own=torch.ones(2, dtype=dtype)), "f")


def test_tensors_left_on_the_meta_device_are_named():
    assert _left_empty(Twice()) == ()
    model = nn.Linear(2, 2)
    for name in ("a", "b", "c", "d", "e"):
        model.register_buffer(name, torch.empty(1, device="meta"), persistent=False)
    (remark,) = _left_empty(model)
    assert remark == (
        "5 tensors still on the meta device, because no state_dict has values for them: fill a, b, c, d and 1 more "
        "before use"
    )


@pytest.mark.parametrize(
    ("setting", "hint"),
    [({"device": "cuda"}, "give map_location"), ({"force": True}, "it is one of repair()")],
    ids=["of the forward test", "of the output"],
)
def test_settings_of_what_load_does_not_do_are_refused(setting: Any, hint: str, file: Path) -> None:
    with pytest.raises(ckptfix.UsageError, match=r"^load\(\) has no setting") as error:
        ckptfix.load(torch.nn.Linear(2, 2), file, **setting)
    assert str(error.value).endswith(hint)


def test_weights_of_ranks_in_the_wrong_order_are_not_given_out(tmp_path: Path) -> None:
    saved, truth = unpacked("zero3_w2_fp32_g1", tmp_path)
    first, second = sorted(saved.rglob("*optim_states.pt"))
    assert ckptfix.repair(saved).state_dict().keys() == truth.keys()
    swap(first, second)
    for give_out in (
        lambda: ckptfix.load(nn.Linear(2, 2), saved),
        ckptfix.repair(saved).state_dict,
        ckptfix.open_checkpoint(saved).state_dict,
    ):
        with pytest.raises(UnreadableError, match="the merged weights are wrong"):
            give_out()
    with pytest.warns(DamageWarning, match="the merged weights are wrong"):
        ckptfix.open_checkpoint(saved).read(next(iter(truth)))
