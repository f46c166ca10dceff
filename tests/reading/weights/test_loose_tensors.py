"""Tensors in plain attributes of whole models are named if they would be lost, and otherwise not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, spectral_norm, weight_norm

from ckptfix.bytes.sources import MemoryBytes
from ckptfix.core.facts import clause
from ckptfix.core.objects import Global, Opaque
from ckptfix.core.spec import Storage, TensorSpec
from ckptfix.reading.weights.loose_tensors import attribute_remarks, loose_remarks
from tests.reading.files import opened, saved

pytestmark = pytest.mark.filterwarnings("ignore")


def linear(**attributes: Any) -> nn.Module:
    """A small module, with attributes."""
    module = nn.Linear(3, 4)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def passing() -> Any:
    module: Any = linear()
    module.register_buffer("scratch", torch.ones(9), persistent=False)
    module.original_scratch = module.scratch  # as transformers keep the first `inv_freq`
    return module


def run_backward() -> Any:
    module: Any = linear()
    module(torch.ones(2, 3)).sum().backward()
    module.last_gradients = module.weight.grad
    return module


def stepped() -> Any:
    module = run_backward()
    module.optimizer = torch.optim.Adam(module.parameters())
    module.optimizer.step()
    module.inner = {"best": module.optimizer}
    return module


class Metric(nn.Module):
    """A module with the instance dict of a metric of torchmetrics."""

    def __init__(self) -> None:
        super().__init__()
        self._defaults, self._persistent = {"seen": torch.zeros(3)}, {"seen": False}
        self.seen = torch.ones(3)


def pruned() -> nn.Module:
    module = linear()
    prune.random_unstructured(module, "weight", 0.5)
    prune.l1_unstructured(module, "weight", 0.5)
    return module


def normed_lstm() -> nn.Module:
    return weight_norm(nn.LSTM(3, 4, 2, bidirectional=True), "weight_hh_l0")


def unused_hook() -> nn.Module:
    module = linear()
    module.register_forward_hook(Hook())
    return module


class Hook:
    kept = None

    def __init__(self) -> None:
        self.kept = torch.ones(5)

    def __call__(self, *_: Any) -> None:
        """Does nothing."""


def itself() -> Any:
    module: Any = nn.Sequential(linear(), linear())
    module[0].parent = [module]
    module[1].head = module[0].weight[:1]
    return module


NO_AXIS: Any = None

NOTHING: dict[str, Callable[[], Any]] = {
    "a state_dict's own": linear,
    "attributes without tensors": lambda: linear(stride=8, names={0: "cat"}, sizes=[1, 2], config=None),
    "an LSTM": lambda: nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2),
    "a GRU": lambda: nn.GRU(3, 4),
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "attention of several widths": lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True),
    "weight_norm": lambda: weight_norm(linear()),
    "weight_norm along no axis": lambda: weight_norm(linear(), dim=NO_AXIS),
    "weight_norm of an LSTM": normed_lstm,
    "spectral_norm": lambda: spectral_norm(linear()),
    "spectral_norm that ran": lambda: (module := spectral_norm(linear()), module(torch.ones(1, 3)))[0],
    "pruned": pruned,
    "compiled": lambda: torch.compile(linear()),
    "data-parallel": lambda: nn.DataParallel(nn.BatchNorm1d(3)),
    "averaged": lambda: torch.optim.swa_utils.AveragedModel(linear()),
    "a non-persistent buffer": passing,
    "gradients": run_backward,
    "an optimizer's state": stepped,
    "a hook": unused_hook,
    "a metric": lambda: nn.Sequential(linear(), Metric()),
    "a view of a parameter, and the whole model again": itself,
    "caches": lambda: linear(bias_cache={"cpu": torch.ones(99)}, _cached=torch.ones(3), kv_caches=[torch.ones(2)]),
    "what releases save or do not": lambda: linear(inv_freq=torch.ones(9), original_inv_freq=torch.ones(9)),
    "an input to draw the graph with": lambda: linear(example_input_array=torch.ones(99)),
    "tensors without numbers": lambda: linear(anchors=torch.empty(0), grid=[torch.empty(0)] * 3),
    "tensors without values": lambda: linear(shape=torch.ones(9, device="meta")),
}  # fmt: skip


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("build", NOTHING.values(), ids=NOTHING)
def test_noop(build: Callable[[], Any], zipped: bool, tmp_path: Path) -> None:
    path = saved({"epoch": 3, "model": build()}, tmp_path, _use_new_zipfile_serialization=zipped)
    assert remarks(path) == []


def remarks(path: Path) -> list[tuple[str, str]]:
    """The remarks on the attributes of a whole model."""
    kinds = ("tensor-attribute", "most-in-attributes")
    return [(fact.place, fact.kind.value) for fact in opened(path).remarks if fact.kind.value in kinds]


class Detect(nn.Module):
    """A head like YOLO's, whose strides are computed once and never registered."""

    def __init__(self) -> None:
        super().__init__()
        self.cv = nn.Conv2d(3, 6, 1)
        self.stride = torch.tensor([8.0, 16.0, 32.0])
        self.grids = {"large": [torch.ones(2), torch.zeros(2)]}
        self.hidden = [nn.Linear(3, 4)]


def striding() -> Any:
    model: Any = nn.Sequential(Detect())
    model.stride = model[0].stride
    return model


class Settings:
    """An object that is not a module."""

    def __init__(self) -> None:
        self.sizes = {"base": (torch.ones(3), 5)}


SOME: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "tensors, dicts of them, and a module in a list": (
        lambda: nn.Sequential(linear(), Detect()),
        ["1.stride", "1.grids", "1.hidden"],
    ),
    "a tensor at two places": (striding, ["stride", "0.stride", "0.grids", "0.hidden"]),
    "a parameter in a list": (lambda: linear(extra=[nn.Parameter(torch.ones(2))]), ["extra"]),
    "an object that is no module": (lambda: linear(generator=Settings()), ["generator"]),
    "a weight of a name that begins another": (lambda: linear(bi=torch.ones(5), weigh=torch.ones(2)), ["bi", "weigh"]),
    "a compiled module": (lambda: torch.compile(linear(anchors=torch.ones(2))), ["_orig_mod.anchors"]),
}  # fmt: skip


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("case", SOME)
def test_what_no_key_names(case: str, zipped: bool, tmp_path: Path) -> None:
    build, expected = SOME[case]
    path = saved({"model": build()}, tmp_path, _use_new_zipfile_serialization=zipped)
    assert remarks(path) == [(name, "tensor-attribute") for name in expected]


def test_more_numbers_in_attributes_than_with_names(tmp_path: Path) -> None:
    path = saved(linear(train_inputs=[torch.ones(17)]), tmp_path)
    assert remarks(path) == [("train_inputs", "tensor-attribute"), (".", "most-in-attributes")]
    assert clause(opened(path).remarks[-1]) == "17 elements in attributes, and 16 elements with names"


def test_one_tensor_under_many_names_weighs_once(tmp_path: Path) -> None:
    path = saved(linear(**{f"a{number}": torch.ones(16) if number < 1 else None for number in range(3)}), tmp_path)
    assert remarks(path) == [("a0", "tensor-attribute")]
    shared = torch.ones(16)
    path = saved(linear(**{f"a{number}": shared for number in range(3)}), tmp_path)
    assert remarks(path) == [(f"a{number}", "tensor-attribute") for number in range(3)]


def spec(*parts: Storage) -> TensorSpec:
    return TensorSpec("float32", (1,), (1,), Storage("s", MemoryBytes(bytes(4)), parts=parts))


def test_a_view_of_a_part_of_a_named_storage_is_named() -> None:
    whole = spec()
    assert whole.storage is not None
    assert attribute_remarks({"view": spec(whole.storage)}, {"weight": whole}) == []
    assert len(attribute_remarks({"other": spec()}, {"weight": whole})) == 1


def test_what_holds_itself_ends() -> None:
    endless: list[Any] = [spec()]
    endless.append(endless)
    state = {"_parameters": {}, "_buffers": {}, "_modules": {}, "deep": endless, 5: spec()}
    module = Opaque(Global("m", "Net"), state=state)
    state["_modules"] = {"me": module}
    state["again"] = {"all": module}
    assert [fact.place for fact in loose_remarks([module], (0,), {})] == ["deep", "."]


@pytest.mark.parametrize("root", [{"model": {"weight": 1}}, {"model": None}, {"model": 5}])
def test_what_is_not_a_module_has_no_attributes(root: Any) -> None:
    assert loose_remarks(root, ("model",), {}) == []
