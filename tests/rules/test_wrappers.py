"""Models saved by torch through each of its wrappers, and the arithmetic on names that the KEY rules share."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import ckptfix
from ckptfix.core.wrappers import (
    bare,
    colliding,
    leading_modules,
    shared_modules,
    strip_segments,
    without_first,
    without_segments,
)
from tests.checks import assert_same

Wrap = Callable[[Any], Any]
"""A model in, the model wrapped out; Any, because torch's types of wrapped modules and of attributes are wide."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.bn(self.conv(x)))


class Net(nn.Module):
    """BatchNorms, so that the versions in `_metadata` matter, and layers without tensors, so that it has idle rows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Lightning(nn.Module):
    """The way a trainer's module holds the network."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def net(seed: int = 0) -> Net:
    """A net whose BatchNorms have counted a batch, in eval mode."""
    torch.manual_seed(seed)
    model = Net()
    model(torch.randn(4, 3, 8, 8))
    return model.eval()


def outputs(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)))
    return result


def compiled(model: Any) -> Any:
    """Wrapped only: nothing is compiled before the first call."""
    return torch.compile(model, backend="eager")


def checkpointed(model: Any) -> Any:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    return model


def compiled_inside(model: Any) -> Any:
    model.blocks[0] = compiled(model.blocks[0])
    return model


def fully_sharded(model: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    cpu = torch.device("cpu")
    model.blocks[0] = FullyShardedDataParallel(model.blocks[0], device_id=cpu, use_orig_params=True)
    return FullyShardedDataParallel(model, device_id=cpu, use_orig_params=True)


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group with this process only, which DistributedDataParallel and FSDP require."""
    meeting = tmp_path_factory.mktemp("gloo") / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    dist.destroy_process_group()


DDP = DistributedDataParallel
WRAPS: dict[str, Wrap] = {
    "DataParallel": DataParallel,
    "DDP": DDP,
    "compile": compiled,
    "checkpoint": checkpointed,
    "AveragedModel": AveragedModel,
    "DDP(compile)": lambda model: DDP(compiled(model)),
    "compile(DDP)": lambda model: compiled(DDP(model)),
    "DDP(checkpoint)": lambda model: DDP(checkpointed(model)),
    "DDP(compile(checkpoint))": lambda model: DDP(compiled(checkpointed(model))),
    "DataParallel(DataParallel)": lambda model: DataParallel(DataParallel(model)),
    "AveragedModel(DataParallel)": lambda model: AveragedModel(DataParallel(model)),
    "AveragedModel(compile)": lambda model: AveragedModel(compiled(model)),
    "AveragedModel(DDP)": lambda model: AveragedModel(DDP(model)),
    "DataParallel(AveragedModel)": lambda model: DataParallel(AveragedModel(model)),
    "compile(AveragedModel)": lambda model: compiled(AveragedModel(model)),
    "AveragedModel(AveragedModel(DataParallel))": lambda model: AveragedModel(AveragedModel(DataParallel(model))),
    "a compiled block": compiled_inside,
    "DDP(a compiled block, checkpoint)": lambda model: DDP(compiled_inside(checkpointed(model))),
}
IN_AN_ATTRIBUTE: dict[str, Wrap] = {
    "Lightning": Lightning,
    "Lightning(compile)": lambda model: Lightning(compiled(model)),
    "DDP(Lightning(DataParallel))": lambda model: DDP(Lightning(DataParallel(model))),
}
ALL = WRAPS | IN_AN_ATTRIBUTE


def save(model: nn.Module, folder: Path) -> Path:
    file = folder / "saved.pth"
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, file)
    return file


@pytest.mark.parametrize("name", ALL)
def test_a_wrapped_save_loads_into_the_plain_model(name: str, tmp_path: Path) -> None:
    file = save(ALL[name](net()), tmp_path)
    model = net(seed=5)
    report = ckptfix.load(model, file)
    assert report.exit_code == 0
    assert report.coverage is not None
    assert report.coverage.share == 1
    assert torch.equal(outputs(model), outputs(net()))
    assert_same(ckptfix.repair(file, net(seed=5)).state_dict(), net().state_dict())


@pytest.mark.parametrize("name", WRAPS)
def test_without_a_target_the_result_is_that_of_a_plain_save(name: str, tmp_path: Path) -> None:
    repair = ckptfix.repair(save(WRAPS[name](net()), tmp_path))
    assert_same(repair.state_dict(), net().state_dict())
    assert repair.report.exit_code == 0
    assert not ckptfix.repair(repair.state_dict()).plan


@pytest.mark.parametrize("name", ALL)
def test_a_plain_save_loads_into_the_wrapped_model(name: str, tmp_path: Path) -> None:
    model = ALL[name](net(seed=5))
    ckptfix.load(model, save(net(), tmp_path))
    weights = [value for key, value in model.state_dict().items() if not key.endswith("n_averaged")]
    for loaded, saved in zip(weights, net().state_dict().values(), strict=True):
        assert torch.equal(loaded, saved)


@pytest.mark.parametrize("name", [name for name in ALL if "checkpoint" not in name])
def test_a_plain_save_becomes_what_the_wrapped_model_saves(name: str) -> None:
    # checkpoint_wrapper is left out: the `_metadata` that it saves has other paths than its keys.
    wrapped = ALL[name](net()).state_dict()
    averaged = {key: torch.zeros_like(value) for key, value in wrapped.items() if key.endswith("n_averaged")}
    made, _ = ckptfix.repair_state_dict(net().state_dict(), ALL[name](net(seed=5)))
    assert set(made) == set(wrapped)
    assert vars(made)["_metadata"] == wrapped._metadata
    for key, value in made.items():
        assert torch.equal(value, averaged.get(key, wrapped[key]))


@pytest.mark.parametrize("saved", ["DDP(compile)", "AveragedModel(DataParallel)", "a compiled block"])
@pytest.mark.parametrize("wanted", ["compile(DDP)", "compile(AveragedModel)", "DDP(a compiled block, checkpoint)"])
def test_one_wrapping_loads_into_another(saved: str, wanted: str, tmp_path: Path) -> None:
    model = ALL[wanted](net(seed=5))
    report = ckptfix.load(model, save(ALL[saved](net()), tmp_path))
    assert report.exit_code == 0
    assert torch.equal(outputs(model), outputs(net()))


@pytest.mark.parametrize("outer", [lambda model: model, compiled], ids=["FSDP", "compile(FSDP)"])
def test_fsdp(outer: Wrap, tmp_path: Path) -> None:
    """Its keys are clean and the paths of its `_metadata` are not."""
    wrapped = outer(fully_sharded(net()))
    model = net(seed=5)
    ckptfix.load(model, save(wrapped, tmp_path))
    assert torch.equal(outputs(model), outputs(net()))
    assert_same(ckptfix.repair_state_dict(wrapped.state_dict())[0], net().state_dict())


def test_fsdp_parameters_by_their_inner_names() -> None:
    """What a trainer saves that collects ``named_parameters`` itself."""
    named = {key: value.detach() for key, value in fully_sharded(net()).named_parameters()}
    assert all("_fsdp_wrapped_module" in key for key in named)
    named.update((key, value) for key, value in net().state_dict().items() if "running" in key or "num_b" in key)
    model = net(seed=5)
    ckptfix.load(model, named)
    assert torch.equal(outputs(model), outputs(net()))


def test_dtensors_are_refused() -> None:
    """Their own storage holds nothing: read as plain tensors, they would be garbage."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ckptfix.UsageError, match=r"DTensor.*full_state_dict=True"):
        ckptfix.check(model.state_dict())


@pytest.mark.parametrize(
    ("key", "stripped", "plain", "modules"),
    [
        pytest.param("a.weight", "a.weight", "a.weight", 0, id="plain"),
        pytest.param("module.module.weight", "module.module.weight", "weight", 2, id="modules"),
        pytest.param("module._orig_mod.a.module.w", "module.a.module.w", "a.w", 1, id="mixed"),
        pytest.param("module", "module", "module", 0, id="a parameter named module"),
        pytest.param("module.module", "module.module", "module", 1, id="one of that name in a wrapper"),
        pytest.param("modules.w", "modules.w", "modules.w", 0, id="a longer word"),
        pytest.param("my_module.module", "my_module.module", "my_module.module", 0, id="last and part of a word"),
    ],
)
def test_names(key: str, stripped: str, plain: str, modules: int) -> None:
    assert (strip_segments(key), bare(key), leading_modules(key)) == (stripped, plain, modules)
    assert without_first(key, modules) == key[len("module.") * modules :]


def test_colliding() -> None:
    assert colliding(["a", "b"], {"a": "b", "b": "a"}) is None
    assert colliding(["a", "b"], {"a": "b"}) == "b"
    assert colliding(["a"], {"a": ""}) == "a"
    assert colliding(["a", "b", "c"], {"c": "x"}) is None


@pytest.mark.parametrize(
    ("keys", "shared"),
    [
        ([], 0),
        (["module.b", "module.a"], 1),
        (["module.module.b", "module.n_averaged"], 1),
        (["module.b", "a"], 0),
        (["module.b", "z"], 0),
        (["module.module.module", "module.module.w"], 2),
    ],
)
def test_shared_modules(keys: list[str], shared: int) -> None:
    assert shared_modules(keys) == shared == min(map(leading_modules, keys), default=0)


def test_without_segments() -> None:
    paths = ["", "a.weight", "a._orig_mod.weight", "_orig_mod", "a._other.weight", "_forward_module.a"]
    assert without_segments(paths) == {"a._orig_mod.weight": "a.weight", "_orig_mod": "", "_forward_module.a": "a"}


def test_names_in_an_optimizer_lose_their_wrappers():
    """Activation checkpointing inside of FSDP, with an optimizer that was made by the names of the bare model."""
    keys = ["_fsdp_wrapped_module.a._checkpoint_wrapped_module.weight", "module._orig_mod.a.bias"]
    assert [bare(key) for key in keys] == ["a.weight", "a.bias"]
