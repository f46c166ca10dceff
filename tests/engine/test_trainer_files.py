"""The optimizer and scheduler that a trainer saves in separate files follow the model next to them."""

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckptfix
from ckptfix.core.finding import Level
from ckptfix.errors import UsageError
from tests.checks import bytes_of


class Net(nn.Module):
    def __init__(self, names: str = "zyx", width: int = 4) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(width, width))
        self.norm = nn.LayerNorm(width)
        self.token = nn.Parameter(torch.zeros(width))  # which decays in the Trainer and not in minGPT

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self._modules.values():
            assert layer is not None
            x = layer(x)
        return x + self.token


def grouped(model: nn.Module) -> Any:
    named = list(model.named_parameters())
    decayed = [p for n, p in named if "bias" not in n and "norm" not in n]
    return [{"params": decayed}, {"params": [p for n, p in named if "bias" in n or "norm" in n], "weight_decay": 0.0}]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    noise = torch.Generator().manual_seed(3)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, 4, generator=noise)).pow(2).mean().backward()
        optimizer.step()


def folder_of_a_trainer(folder: Path, model: nn.Module) -> torch.optim.Optimizer:
    """Write what ``Trainer.save_checkpoint`` writes; safetensors sorts the keys."""
    optimizer = torch.optim.AdamW(grouped(model), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    step(model, optimizer)
    folder.mkdir()
    save_file(dict(sorted(model.state_dict().items())), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(schedule.state_dict(), folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text("{}")
    return optimizer


def test_a_healthy_folder_has_no_finding(tmp_path):
    model = Net()
    folder_of_a_trainer(tmp_path / "run", model)
    for source in (tmp_path / "run", tmp_path / "run" / "model.safetensors"):
        assert ckptfix.check(source, model).findings == ()
        assert ckptfix.check(source).findings == ()


@pytest.mark.parametrize("save", ["pytorch_model.bin", "model.safetensors"])
def test_a_run_of_a_trainer_continues(tmp_path, save):
    """Either a layer is dropped, which needs the order of the file, or the model has a new one."""
    is_ordered = save == "pytorch_model.bin"
    names = "zx" if is_ordered else "zwyx"
    model = Net("zyx")
    optimizer = folder_of_a_trainer(tmp_path / "run", model)
    if is_ordered:
        (tmp_path / "run" / "model.safetensors").unlink()
        torch.save(model.state_dict(), tmp_path / "run" / save)
    (tmp_path / "new").mkdir()
    target = Net(names)
    result = ckptfix.repair(
        tmp_path / "run" / save, target, output=tmp_path / "new" / save, unsafe_fixes=True, fill="target"
    )
    assert not result.report.is_open
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(
        [save, "optimizer.pt", "scheduler.pt", "trainer_state.json"]
    )

    reference, before = copy.deepcopy(target), dict(model.named_parameters())
    kept = {key: value for key, value in model.state_dict().items() if key[0] in names or len(key.split(".")[0]) > 1}
    reference.load_state_dict(kept, strict=False)
    live = torch.optim.AdamW(grouped(reference), lr=0.1)
    for name, parameter in reference.named_parameters():
        if name in before:
            live.state[parameter] = copy.deepcopy(optimizer.state[before[name]])
    resumed = Net(names)
    ckptfix.load(resumed, tmp_path / "new" / save)
    again = torch.optim.AdamW(grouped(resumed), lr=0.1)
    again.load_state_dict(torch.load(tmp_path / "new" / "optimizer.pt", weights_only=True))
    step(reference, live)
    step(resumed, again)
    assert [bytes_of(one) for one in resumed.parameters()] == [bytes_of(one) for one in reference.parameters()]


def test_the_place_of_a_dropped_module_in_a_sorted_file_is_unknown(tmp_path):
    folder_of_a_trainer(tmp_path / "run", Net("zyx"))
    report = ckptfix.repair(tmp_path / "run", Net("zx"), output=tmp_path / "out.safetensors", unsafe_fixes=True).report
    assert [finding.code for finding in report.remaining] == ["OPT101"]


def test_orders_of_a_module_with_many_children_are_not_tried(tmp_path):
    """12 layers at unknown places in the model have 479 million orders."""
    model = Net("zyx")
    model.add_module("gone", nn.Sequential(OrderedDict((name, nn.Linear(4, 4)) for name in "abcdefghijkl")))
    folder_of_a_trainer(tmp_path / "run", model)
    report = ckptfix.repair(tmp_path / "run", Net("zyx"), dry_run=True, unsafe_fixes=True).report
    assert [finding.code for finding in report.remaining] == ["OPT101"]


class Tower(nn.Module):
    """Blocks with what many models have around them: a table, a pooler, a token and a head."""

    def __init__(self, *without: str) -> None:
        super().__init__()
        parts = {"blocks": nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), "adapter": nn.Linear(4, 4)}
        parts |= {"pooler": nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5)), "head": nn.Linear(5, 3)}
        for name in parts.keys() - set(without):
            self.add_module(name, parts[name])
        self._modules = {name: self._modules[name] for name in parts if name in self._modules}
        for name, shape in {"token": (1, 4), "mask": (1, 4), "table": (7, 4)}.items():
            if name not in without:
                self.register_parameter(name, nn.Parameter(torch.randn(shape)))


@pytest.mark.parametrize(
    ("gone", "is_told"),
    [
        pytest.param(("pooler",), True, id="a-module-of-its-own-shapes"),
        pytest.param(("adapter", "table"), True, id="what-fits-at-one-place-only"),
        pytest.param(("token",), False, id="a-parameter-beside-one-of-its-shape"),
    ],
)
def test_shapes_show_where_a_dropped_module_was(tmp_path, gone, is_told):
    model, target = Tower(), Tower(*gone)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for number, parameter in enumerate(model.parameters()):
        optimizer.state[parameter] = {"momentum_buffer": torch.full_like(parameter, number)}
    source = run_in(tmp_path / "run", model.state_dict(), optimizer)
    foreseen = [finding for finding in ckptfix.check(source, target).findings if finding.code == "OPT101"]
    assert [(finding.level, finding.fix) for finding in foreseen] == [(Level.WARNING, None)]
    assert ("cannot follow" in foreseen[0].message) is not is_told
    (tmp_path / "out").mkdir()
    report = ckptfix.repair(source, target, output=tmp_path / "out" / "model.safetensors", unsafe_fixes=True).report
    assert ("OPT101" in [finding.code for finding in report.remaining]) is not is_told
    if is_told:
        made = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)["state"]
        wanted = [number for number, (name, _) in enumerate(model.named_parameters()) if name.split(".")[0] not in gone]
        assert [int(row["momentum_buffer"].max()) for row in made.values()] == wanted


def test_without_the_model_the_order_is_not_known(tmp_path):
    """safetensors keeps no order, so the file's own names do not help."""
    folder_of_a_trainer(tmp_path / "run", Net("zyx"))
    save_file(Net("zx").state_dict(), tmp_path / "like.safetensors")
    report = ckptfix.repair(
        tmp_path / "run", like=tmp_path / "like.safetensors", output=tmp_path / "out.safetensors", unsafe_fixes=True
    ).report
    assert [finding.code for finding in report.remaining] == ["OPT101"]
    assert not (tmp_path / "optimizer.pt").exists()


@pytest.mark.parametrize("in_place", [False, True])
def test_where_the_files_go(tmp_path, in_place):
    folder_of_a_trainer(tmp_path / "run", Net("zyx"))
    target = Net("zyxw")
    old = (tmp_path / "run" / "optimizer.pt").read_bytes()
    settings: dict[str, Any] = {"in_place": True, "backup": True} if in_place else {"beside": True}
    ckptfix.repair(tmp_path / "run" / "model.safetensors", target, fill="target", **settings | {"unsafe_fixes": True})
    names = {path.name for path in (tmp_path / "run").iterdir()}
    kept = tmp_path / "run" / ("optimizer.pt.bak" if in_place else "optimizer.pt")
    assert kept.read_bytes() == old
    made = torch.load(tmp_path / "run" / ("optimizer.pt" if in_place else "optimizer.fixed.pt"), weights_only=True)
    assert [len(group["params"]) for group in made["param_groups"]] == [5, 6]
    assert "scheduler.fixed.pt" not in names


def test_a_run_that_was_killed_between_the_files_continues(tmp_path, monkeypatch):
    """The optimizer is in place and the weights are not: the next run keeps the former and repairs the latter."""
    folder_of_a_trainer(tmp_path / "run", Net("zyx"))
    asked: dict[str, Any] = {"in_place": True, "fill": "target", "unsafe_fixes": True, "accept": ("FIT101",)}
    source = tmp_path / "run" / "model.safetensors"
    old = source.read_bytes()

    def killed(temporary: Path, output: Path, *more: Any) -> None:
        if output == source:
            raise KeyboardInterrupt
        temporary.replace(output)

    with monkeypatch.context() as patch:
        patch.setattr("ckptfix.engine.delivery.deliver_file", killed)
        with pytest.raises(KeyboardInterrupt):
            ckptfix.repair(source, Net("zyxw"), **asked)
    optimizer = tmp_path / "run" / "optimizer.pt"
    assert source.read_bytes() == old
    made = optimizer.read_bytes()
    report = ckptfix.repair(source, Net("zyxw"), **asked).report
    assert [finding.level.name for finding in report.remaining if finding.code == "OPT101"] == ["NOTE"]
    assert optimizer.read_bytes() == made
    assert source.read_bytes() != old
    assert "OPT101" not in [finding.code for finding in ckptfix.check(source, Net("zyxw")).findings]


def test_nothing_is_replaced_unless_asked(tmp_path):
    folder_of_a_trainer(tmp_path / "run", Net("zyx"))
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "optimizer.pt").write_bytes(b"precious")
    settings: dict[str, Any] = {
        "output": tmp_path / "new" / "model.safetensors",
        "unsafe_fixes": True,
        "fill": "target",
    }
    with pytest.raises(ckptfix.UsageError, match=r"optimizer\.pt"):
        ckptfix.repair(tmp_path / "run", Net("zyxw"), **settings)
    assert (tmp_path / "new" / "optimizer.pt").read_bytes() == b"precious"
    assert not (tmp_path / "new" / "model.safetensors").exists()
    ckptfix.repair(tmp_path / "run", Net("zyxw"), force=True, **settings)
    assert (tmp_path / "new" / "optimizer.pt").read_bytes() != b"precious"


def test_the_lists_of_a_scheduler_follow_the_groups(tmp_path):
    """A group for each parameter: removing parameters also removes their groups and the scheduler's rates."""
    model = Net("zyx")
    optimizer = torch.optim.AdamW([{"params": [p], "lr": 1.0 + n} for n, p in enumerate(model.parameters())])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    step(model, optimizer)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": schedule.state_dict()}
    torch.save(saved, tmp_path / "run.pth")
    ckptfix.repair(tmp_path / "run.pth", Net("zx"), output=tmp_path / "out.pth", unsafe_fixes=True)
    made = torch.load(tmp_path / "out.pth", weights_only=True)
    assert made["scheduler"]["base_lrs"] == [group["lr"] for group in made["optimizer"]["param_groups"]]
    assert made["scheduler"]["base_lrs"] == [1.0, 2.0, 3.0, 6.0, 7.0, 8.0, 9.0]
    assert made["scheduler"]["last_epoch"] == saved["scheduler"]["last_epoch"]


def test_a_live_optimizer_loads_from_the_folder(tmp_path):
    model = Net("zyx")
    optimizer = folder_of_a_trainer(tmp_path / "run", model)
    new = Net("zyx")
    own = torch.optim.AdamW(grouped(new), lr=0.1)
    ckptfix.load(new, tmp_path / "run", optimizer=own)
    before = dict(model.named_parameters())
    for name, parameter in new.named_parameters():
        assert torch.equal(own.state[parameter]["exp_avg"], optimizer.state[before[name]]["exp_avg"])


def run_in(folder: Path, weights: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> Path:
    """Save what the Hugging Face Trainer saves."""
    folder.mkdir()
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text('{"global_step": 2}')
    for rank in range(2):
        torch.save(torch.get_rng_state(), folder / f"rng_state_{rank}.pth")
    save_file(weights, folder / "model.safetensors")
    return folder / "model.safetensors"


@pytest.mark.parametrize(
    ("name", "asked", "copied"),
    [
        pytest.param("model.safetensors", {}, True, id="as-a-trainer-finds-it"),
        pytest.param("pytorch_model.bin", {}, True, id="another-format"),
        pytest.param("fixed.safetensors", {}, False, id="a-file-of-the-user's-own"),
        pytest.param("model.safetensors", {"drop_optimizer": True}, False, id="without-the-optimizer"),
    ],
)
def test_an_unchanged_run_is_copied_too(tmp_path, name, asked, copied):
    model = nn.Linear(3, 2)
    weights = {f"module.{key}": value for key, value in model.state_dict().items()}
    source = run_in(tmp_path / "run", weights, torch.optim.SGD(model.parameters()))
    (tmp_path / "out").mkdir()
    for _ in range(2):  # the existing file is equal
        report = ckptfix.repair(source, output=tmp_path / "out" / name, force=True, **asked).report
    files = {"optimizer.pt", "trainer_state.json", "rng_state_0.pth", "rng_state_1.pth"} if copied else set()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {name, *files}
    assert all((tmp_path / "out" / file).read_bytes() == source.with_name(file).read_bytes() for file in files)
    assert report.exit_code == 0
    (tmp_path / "out" / "optimizer.pt").write_text("another run")
    if copied:
        with pytest.raises(UsageError, match="already exists"):
            ckptfix.repair(source, output=(tmp_path / "out" / "pytorch_model.pt"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param([12], [10], id="the-last"),
        pytest.param([3, 12], [3, 2], id="of-the-second-stage"),
        pytest.param([3, 12, 2], [3, 2], id="and-a-whole-stage"),
    ],
)
def test_dropped_blocks_were_next_to_their_siblings(tmp_path, old, new):
    """safetensors sorts ``10`` before ``2``, and all blocks have equal shapes."""

    def built(stages: list[int]) -> nn.Module:
        block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        parts = [nn.ModuleList(copy.deepcopy(block) for _ in range(count)) for count in stages]
        return nn.ModuleDict({"stages": nn.ModuleList(parts), "head": nn.Linear(4, 4)})

    model, target = built(old), built(new)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for number, parameter in enumerate(model.parameters()):
        optimizer.state[parameter] = {"momentum_buffer": torch.full_like(parameter, number)}
    source = run_in(tmp_path / "run", model.state_dict(), optimizer)
    (tmp_path / "out").mkdir()
    report = ckptfix.repair(source, target, output=tmp_path / "out" / "model.safetensors", unsafe_fixes=True).report
    assert not any(finding.code.startswith("OPT") for finding in report.remaining)
    made = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)["state"]
    wanted = {name: number for number, (name, _) in enumerate(model.named_parameters())}
    found = {
        name: int(made[number]["momentum_buffer"].max()) for number, (name, _) in enumerate(target.named_parameters())
    }
    assert found == {name: wanted[name] for name in found}


def test_the_phases_of_a_scheduler_are_not_those_of_groups(tmp_path):
    model = nn.ModuleDict({name: nn.Linear(4, width) for name, width in (("stem", 5), ("aux", 6), ("head", 7))})
    optimizer = torch.optim.AdamW([{"params": list(part.parameters())} for part in model.values()])
    rates = torch.optim.lr_scheduler
    schedule = rates.OneCycleLR(optimizer, [0.1, 0.2, 0.3], 9, three_phase=True)
    both = rates.SequentialLR(optimizer, [rates.ConstantLR(optimizer) for _ in range(3)], [2, 4])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = {"schedule": schedule.state_dict(), "both": both.state_dict()}
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **states}
    torch.save(saved, tmp_path / "run.pth")
    del model["aux"]
    ckptfix.repair(tmp_path / "run.pth", model, output=tmp_path / "out.pth", unsafe_fixes=True)
    made = torch.load(tmp_path / "out.pth", weights_only=True)
    assert [group["max_lr"] for group in made["optimizer"]["param_groups"]] == [0.1, 0.3]
    assert made["schedule"]["_schedule_phases"] == states["schedule"]["_schedule_phases"]
    assert [len(made[name]["_last_lr"]) for name in states] == [2, 2]
    assert len(made["both"]["_schedulers"]) == 3
