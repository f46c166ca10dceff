"""A training that goes on after a repair makes the very step that it would have made: train, edit, repair, resume."""

import copy
import json
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import ckptfix
from ckptfix.core.edits import Assemble, Drop, Edit
from ckptfix.core.finding import Finding, Level
from ckptfix.core.parts import Part
from ckptfix.core.plan import Plan, Step
from ckptfix.report.display import report_lines
from tests.cli.programs import run_here

Edited = Callable[[nn.Module], nn.Module]
Groups = Callable[[nn.Module], Any]
Make = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    """Three layers and norms of several shapes, and a parameter that never has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 8)
        self.norm = nn.LayerNorm(8)
        self.mid = nn.Linear(8, 6)
        self.bn = nn.BatchNorm1d(6)
        self.aux = nn.Linear(6, 6)
        self.head = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn(self.mid(self.norm(self.stem(x)).relu()))
        out: torch.Tensor = self.head(x + self.aux(x) if "aux" in self._modules else x)
        return out


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    """Make some steps on the same numbers every time."""
    noise = torch.Generator().manual_seed(5)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=noise)).pow(2).mean().backward()
        optimizer.step()


def one_group(model: nn.Module) -> Any:
    return list(model.parameters())


def by_decay(is_decayed: Callable[[str, torch.Tensor], bool], decay_first: bool) -> Groups:
    def groups(model: nn.Module) -> Any:
        parts: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        for name, parameter in model.named_parameters():
            parts[is_decayed(name, parameter)].append(parameter)
        both = [{"params": parts[True], "weight_decay": 0.1}, {"params": parts[False], "weight_decay": 0.0}]
        return both if decay_first else both[::-1]

    return groups


def named(model: nn.Module) -> Any:
    return list(model.named_parameters())


def each_its_own(model: nn.Module) -> Any:
    return [{"params": [p], "weight_decay": 0.1 if p.ndim > 1 else 0.0} for p in model.parameters()]


GROUPS: dict[str, Groups] = {
    "plain": one_group,
    "param_names": named,
    "hugging-face": by_decay(lambda name, p: "bias" not in name and "norm" not in name, True),
    "timm": by_decay(lambda name, p: p.ndim > 1 and not name.endswith(".bias"), False),
    "detectron2": each_its_own,
}

# The edits of a model, with the origin of each parameter of the new one
# ----------------------------------------------------------------------------------------------------------------------


def without_aux(model: nn.Module) -> nn.Module:
    del model.aux
    return model


def reordered(model: nn.Module) -> nn.Module:
    model._modules = {name: model._modules[name] for name in sorted(model._modules, key=lambda name: name != "head")}
    return model


# No-op cases
# ----------------------------------------------------------------------------------------------------------------------


def saved(model: nn.Module, groups: Groups, path: Path, prefix: str = "", **more: Any) -> torch.optim.Optimizer:
    """Train a model and save it with its optimizer."""
    optimizer = torch.optim.AdamW(groups(model))
    train(model, optimizer)
    weights = {prefix + key: value for key, value in model.state_dict().items()}
    torch.save({"model": weights, "optimizer": optimizer.state_dict(), **more}, path)
    return optimizer


def findings(report: ckptfix.Report) -> list[str]:
    return [finding.code for finding in report.findings if finding.code.startswith("OPT")]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("prefix", ["", "module.", "model."])
def test_noop_renamed_parameters_keep_their_positions(tmp_path, groups, prefix):
    saved(Net(), GROUPS[groups], tmp_path / "run.pth", prefix)
    report = ckptfix.repair(tmp_path / "run.pth", Net(), output=tmp_path / "out.pth").report
    # param_names are of the model inside of its wrapper already
    assert findings(report) == []
    old, new = (torch.load(tmp_path / name, weights_only=True)["optimizer"] for name in ("run.pth", "out.pth"))
    assert old["param_groups"] == new["param_groups"]


@pytest.mark.parametrize("own", ["", "module."])
def test_names_in_the_place_of_numbers_follow_if_they_had_the_prefix_too(tmp_path, own):
    """As Composer saves them; torch's own names are those inside of the wrapper."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    names = [own + name for name, _ in model.named_parameters()]
    held = optimizer.state_dict()
    named = {
        "state": {names[number]: row for number, row in held["state"].items()},
        "param_groups": [{**held["param_groups"][0], "params": names}],
    }
    weights = {f"module.{key}": value for key, value in model.state_dict().items()}
    torch.save({"model": weights, "optimizer": named}, tmp_path / "run.pth")
    report = ckptfix.repair(tmp_path / "run.pth", Net(), output=tmp_path / "out.pth").report
    assert findings(report) == ["OPT101"] * bool(own)
    saved_again = torch.load(tmp_path / "out.pth", weights_only=True)["optimizer"]
    bare = [name for name, _ in model.named_parameters()]
    assert saved_again["param_groups"][0]["params"] == bare
    assert list(saved_again["state"]) == [bare[number] for number in held["state"]]
    for number, row in held["state"].items():
        assert torch.equal(saved_again["state"][bare[number]]["exp_avg"], row["exp_avg"])


def test_a_buffer_is_not_in_an_optimizer(tmp_path):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    weights = {key: value for key, value in model.state_dict().items() if "num_batches" not in key}
    weights["bn.running_mean"][0] = float("nan")
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, tmp_path / "run.pth")
    report = ckptfix.repair(tmp_path / "run.pth", Net(), output=tmp_path / "out.pth", reset_running_stats=True).report
    assert len(report.edits) >= 1
    assert findings(report) == []


def test_two_optimizers_follow_their_own_models(tmp_path):
    model = nn.ModuleDict({"generator": Net(), "critic": Net()})
    both = [torch.optim.Adam(part.parameters()) for part in model.values()]
    for part, optimizer in zip(model.values(), both, strict=True):
        train(part, optimizer)
    states = [optimizer.state_dict() for optimizer in both]
    torch.save({"state_dict": model.state_dict(), "optimizer_states": states}, tmp_path / "gan.ckpt")
    assert findings(ckptfix.check(tmp_path / "gan.ckpt", model)) == []


def test_optimizers_of_a_file_follow_one_by_one(tmp_path):
    model = nn.ModuleDict({"generator": Net(), "critic": nn.Linear(3, 2)})
    both = [torch.optim.Adam(part.parameters()) for part in model.values()]
    train(model["generator"], both[0])
    train(model["critic"], both[1])
    states = [optimizer.state_dict() for optimizer in both]
    torch.save({"state_dict": model.state_dict(), "optimizer_states": states}, tmp_path / "gan.ckpt")
    del model["generator"].aux
    report = ckptfix.repair(tmp_path / "gan.ckpt", model, output=tmp_path / "out.ckpt", unsafe_fixes=True).report
    assert [finding.message for finding in report.fixed if finding.code == "OPT101"] == [
        "the optimizer in optimizer_states[0] is out of step with the weights: 2 parameters gone"
    ]
    made = torch.load(tmp_path / "out.ckpt", weights_only=True)["optimizer_states"]
    both[0] = torch.optim.Adam(model["generator"].parameters())
    for optimizer, state in zip(both, made, strict=True):
        optimizer.load_state_dict(state)
    assert str(made[1]) == str(states[1])


def marked(model: nn.Module, *optimizers: torch.optim.Optimizer, without: str = "-") -> None:
    """Make a step, and fill each moment with a number of its parameter's name."""
    for name, parameter in model.named_parameters():
        parameter.grad = None if name.startswith(without) else torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
        for name, parameter in model.named_parameters():
            for value in optimizer.state.get(parameter, {}).values():
                if value.shape == parameter.shape:
                    value.fill_(mark(name))


def mark(name: str) -> float:
    """Return a number of a name, below what would be impossible for both moments of Adam (OPT106)."""
    return float(zlib.crc32(name.encode()) % 10_000 + 1) / 64


def assert_in_step(model: nn.Module, optimizer: torch.optim.Optimizer, new: str = "-") -> None:
    """Each moment belongs to its parameter, and new parameters have none."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        values = [value for value in optimizer.state.get(parameter, {}).values() if value.ndim]
        wanted = [] if names[parameter].startswith(new) else [mark(names[parameter])]
        assert {float(number) for value in values for number in value.unique()} == set(wanted), names[parameter]


class Decoder(nn.Module):
    """Tables, equal layers, and a head."""

    def __init__(self, layers: int, head: bool = True) -> None:
        super().__init__()
        self.masked_embed = nn.Parameter(torch.zeros(4))
        self.wte = nn.Embedding(5, 4)
        self.h = nn.ModuleList(
            nn.ModuleDict({"ln": nn.LayerNorm(4), "up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})
            for _ in range(layers)
        )
        if head:
            self.lm_head = nn.Linear(4, 5, bias=False)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("is_hidden", [True, False])
@pytest.mark.parametrize("is_one", [True, False])
def test_muon_for_matrices_and_adam_for_the_rest(tmp_path, layers, is_hidden, is_one):
    """As two optimizers, and as two groups of one, whose first has no second moments."""

    def made(model: nn.Module) -> list[torch.optim.Optimizer]:
        parts: dict[bool, list[Any]] = {True: [], False: []}
        for name, parameter in model.named_parameters():
            parts[parameter.ndim > 1 and not (is_hidden and name.startswith(("wte", "lm_head")))].append(parameter)
        if is_one:
            groups: list[Any] = [{"params": parts[True], "lr": 0.1}, {"params": parts[False]}]
            return [torch.optim.AdamW(groups)]
        return [torch.optim.Muon(parts[True]), torch.optim.AdamW(parts[False])]

    model, target = Decoder(2), Decoder(layers)
    both = made(model)
    marked(model, *both)
    if is_one:
        for parameter in both[0].param_groups[0]["params"]:
            del both[0].state[parameter]["exp_avg_sq"]
    states = {f"opt{number}": optimizer.state_dict() for number, optimizer in enumerate(both)}
    torch.save({"model": model.state_dict(), **states}, tmp_path / "run.pth")
    asked: dict[str, Any] = {"unsafe_fixes": True, "fill": "target", "output": tmp_path / "out.pth"}
    report = ckptfix.repair(tmp_path / "run.pth", target, **asked, allow_untrained=True).report
    assert [finding.code for finding in report.fixed if finding.code == "OPT101"] == ["OPT101"] * len(both)
    result = torch.load(tmp_path / "out.pth", weights_only=True)
    target.load_state_dict(result["model"])
    for number, optimizer in enumerate(made(target)):
        optimizer.load_state_dict(result[f"opt{number}"])
        assert_in_step(target, optimizer, new="h.2.")


@pytest.mark.parametrize("groups", ["reversed", "reversed and empty", "one", "each its own"])
@pytest.mark.parametrize("edit", ["add", "masked_embed"])
def test_groups_that_a_recipe_has_in_reverse_take_new_parameters(tmp_path, groups, edit):
    def made(model: nn.Module) -> torch.optim.Optimizer:
        parts: dict[bool, list[Any]] = {False: [], True: []}
        for parameter in model.parameters():
            parts[groups != "reversed and empty" and parameter.ndim > 1].append(parameter)
        both = [{"params": part, "weight_decay": 0.1 * is_decayed} for is_decayed, part in parts.items()]
        one = {"one": one_group, "each its own": each_its_own}.get(groups, lambda model: both)
        return torch.optim.AdamW(one(model))

    model, target = Decoder(2), Decoder(2 + (edit == "add"))
    if edit != "add":
        del target.masked_embed  # by its name it may be a buffer
    optimizer = made(model)
    marked(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pth")
    asked: dict[str, Any] = {"unsafe_fixes": True, "fill": "target", "output": tmp_path / "out.pth"}
    report = ckptfix.repair(tmp_path / "run.pth", target, **asked, allow_untrained=True).report
    if edit == "add" and groups == "reversed and empty":  # which may be the group of what is new
        assert findings(report) == ["OPT101"]
        return
    assert "OPT101" in [finding.code for finding in report.fixed]
    result = torch.load(tmp_path / "out.pth", weights_only=True)
    again = made(target)
    again.load_state_dict(result["optimizer"])
    assert_in_step(target, again, new="h.2.")


@pytest.mark.parametrize(
    ("make", "begins_with"),
    [
        (lambda p: torch.optim.NAdam(p), {"mu_product": 1.0, "exp_avg": 0.0}),
        (lambda p: torch.optim.Rprop(p, lr=0.25), {"step_size": 0.25, "prev": 0.0}),
        (lambda p: torch.optim.SGD(p, momentum=0.9), {"momentum_buffer": 0.0}),
        (lambda p: torch.optim.SGD(p, momentum=0.9, dampening=0.5), None),
        (lambda p: torch.optim.Adafactor(p), None),
    ],
    ids=["nadam", "rprop", "sgd", "dampened", "factored"],
)
def test_flat_keys_begin_as_the_optimizer_does(tmp_path, make, begins_with):
    model, target = Decoder(1), Decoder(2)
    optimizer = make(model.parameters())
    marked(model, optimizer)
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "run.pth")
    asked: dict[str, Any] = {"unsafe_fixes": True, "fill": "target", "output": tmp_path / "out.pth"}
    report = ckptfix.repair(tmp_path / "run.pth", target, **asked, allow_untrained=True).report
    assert ("OPT101" in [finding.code for finding in report.fixed]) is (begins_with is not None)
    result = torch.load(tmp_path / "out.pth", weights_only=True)["optimizer"]
    for name, number in (begins_with or {}).items():
        assert float(result[f"state.h.1.up.weight.{name}"].max()) == number


def test_fused_momentum_begins_with_zeros(tmp_path):
    """torch's kernel fails if only some of the parameters have one, and zeros lead to the same first step."""
    model, target = Decoder(1), Decoder(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    marked(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pth")
    asked: dict[str, Any] = {"unsafe_fixes": True, "fill": "target", "output": tmp_path / "out.pth"}
    ckptfix.repair(tmp_path / "run.pth", target, **asked, allow_untrained=True)
    steps = []
    for fused in (True, False):
        result = torch.load(tmp_path / "out.pth", weights_only=True)
        again = Decoder(2)
        again.load_state_dict(result["model"])
        own = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
        own.load_state_dict(result["optimizer"])
        own.param_groups[0].update(fused=fused, foreach=False)
        for parameter in again.parameters():
            parameter.grad = torch.ones_like(parameter)
            if not fused and not own.state[parameter]["momentum_buffer"].any():
                del own.state[parameter]
        own.step()
        steps.append(list(again.parameters()))
    for one, other in zip(*steps, strict=True):
        torch.testing.assert_close(one, other)


# What cannot be found out
# ----------------------------------------------------------------------------------------------------------------------


class Same(nn.Module):
    """Equal layers: only their order distinguishes them."""

    def __init__(self, names: str = "abc", bias: bool = False) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(3, 3, bias=bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self._modules.values():
            assert layer is not None
            x = layer(x)
        return x


def test_an_optimizer_in_an_order_that_nothing_confirms_is_left_unchanged(tmp_path):
    """The file's order or the model's: both fit, and lead to other states."""
    model = Same("abc")
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pth")
    asked: dict[str, Any] = {"unsafe_fixes": True, "fill": "target"}
    result = ckptfix.repair(tmp_path / "run.pth", Same("cabd"), output=tmp_path / "out.pth", **asked)
    found = [finding for finding in result.report.remaining if finding.code == "OPT101"]
    assert [finding.level for finding in found] == [Level.ERROR]
    assert result.report.exit_code == 1
    old, new = (torch.load(tmp_path / name, weights_only=True)["optimizer"] for name in ("run.pth", "out.pth"))
    assert str(old) == str(new)


@pytest.mark.parametrize("names", ["abc", "cab"])
def test_another_order_of_the_model_alone_is_reported(tmp_path, names):
    """Nothing else is to be repaired; in the same order, all ways to name the parameters agree."""
    model = Same("abc")
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pth")
    report = ckptfix.repair(tmp_path / "run.pth", Same(names), dry_run=True, unsafe_fixes=True).report
    found = [finding for finding in report.remaining if finding.code == "OPT101"]
    assert [finding.level for finding in found] == ([] if names == "abc" else [Level.ERROR])
    for finding in found:
        assert len(finding.evidence["recipes"]) == 2
        assert finding.evidence["recipes"][0] == "model.parameters() in the file's order"


@pytest.mark.parametrize("is_dropped", [False, True])
@pytest.mark.parametrize("bias", [False, True], ids=["a-group-for-each-layer", "a-group-for-each-parameter"])
def test_groups_that_may_be_in_reverse_are_left_unchanged(tmp_path, bias, is_dropped):
    """From the top down: the moments of layers with equal shapes do not show the order."""
    model = Same("abc", bias)
    layers = reversed([*model.children()])
    groups = [{"params": [one], "lr": 0.1 + n} for n, layer in enumerate(layers) for one in layer.parameters()]
    saved(model, lambda model: groups, tmp_path / "run.pth")
    asked: dict[str, Any] = {"unsafe_fixes": True, "output": tmp_path / "out.pth"}
    report = ckptfix.repair(tmp_path / "run.pth", Same("bc" if is_dropped else "abc", bias), **asked).report
    assert findings(report) == ["OPT101"] * is_dropped
    reversed_ones = [finding.evidence["recipes"][1].endswith("in reverse") for finding in report.remaining]
    assert reversed_ones == [True] * is_dropped
    old, new = (torch.load(tmp_path / name, weights_only=True)["optimizer"] for name in ("run.pth", "out.pth"))
    assert str(old) == str(new)


def test_groups_in_order_of_first_use_do_not_follow_another_order(tmp_path):
    """For groups that differ in shapes: the user's own script may list them in a fixed order or not."""

    def made(names: tuple[str, ...]) -> nn.Module:
        neck = nn.Sequential(nn.LayerNorm(2, bias=False), nn.Linear(3, 4))
        layers = {"aux": nn.Linear(2, 2, bias=False), "neck": neck}
        return nn.Sequential(OrderedDict((name, layers[name]) for name in names))

    model = made(("aux", "neck"))
    parts: dict[Any, list[Any]] = {}
    for name, one in model.named_parameters():
        parts.setdefault((name.partition(".")[0], one.ndim), []).append(one)
    optimizer = torch.optim.AdamW([{"params": part} for part in parts.values()])
    marked(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pth")
    report = ckptfix.repair(tmp_path / "run.pth", made(("neck", "aux")), dry_run=True, unsafe_fixes=True).report
    assert [finding.fix for finding in report.findings if finding.code == "OPT101"] == [None]


@pytest.mark.parametrize("is_renamed", [False, True])
def test_groups_by_name_do_not_follow_other_names(tmp_path, is_renamed):
    """Nothing shows whether the script still sorts by the old ones."""

    def made(name: str, layers: int) -> nn.Module:
        sizes = {"c": 2, name: 3, "b": 4, "d": 5}
        return nn.Sequential(OrderedDict((key, nn.Linear(3, size)) for key, size in list(sizes.items())[:layers]))

    model, target = made("a", 4), made("z" if is_renamed else "a", 3)
    optimizer = torch.optim.AdamW([{"params": [one]} for _, one in sorted(model.named_parameters())])
    marked(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pth")
    asked: dict[str, Any] = {"rename": ("a.*=z.*",)} if is_renamed else {}
    report = ckptfix.repair(tmp_path / "run.pth", target, dry_run=True, unsafe_fixes=True, **asked).report
    assert [finding.fix is None for finding in report.findings if finding.code == "OPT101"] == [is_renamed]


@pytest.mark.parametrize(
    ("groups", "asked", "is_refused"),
    [
        pytest.param(one_group, "b.*=z.*", True, id="one-group"),
        pytest.param(lambda model: sorted(model.named_parameters()), "b.*=z.*", True, id="sorted-with-names"),
        pytest.param(lambda model: list(model.named_parameters()), "b.*=z.*", False, id="with-names"),
        pytest.param(
            lambda model: [{"params": list(model.parameters())[n::2]} for n in (1, 0)], "b.*=z.*", True, id="odd"
        ),
        pytest.param(one_group, "b.*=ab.*", False, id="no-other-order"),
        pytest.param(one_group, "*=enc.*", False, id="all-below-another"),
    ],
)
def test_a_rename_moves_what_a_script_lists_by_name(tmp_path, groups, asked, is_refused):
    """No position moves; but a script that sorts names, as equal shapes allow, makes the optimizer in another order."""

    def made(*names: str) -> nn.Module:
        layers: dict[str, nn.Module] = {name: nn.Linear(3, 3, bias=False) for name in names}
        return nn.Sequential(OrderedDict({**layers, "x": nn.Linear(3, 5, bias=False)}))

    model = made("c", "b", "d", "a")
    new = {"b.*=z.*": "czda", "b.*=ab.*": ("c", "ab", "d", "a")}.get(asked, "cbda")
    target: nn.Module = made(*new)
    if asked == "*=enc.*":
        target = nn.Sequential(OrderedDict(enc=target))
    optimizer = torch.optim.AdamW(groups(model))
    marked(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pth")
    report = ckptfix.repair(tmp_path / "run.pth", target, dry_run=True, unsafe_fixes=True, rename=(asked,)).report
    assert [finding.code for finding in report.findings if finding.fix is None] == ["OPT101"] * is_refused


@pytest.mark.parametrize(
    ("gone", "is_refused"), [("a", True), ("last", False)], ids=["another state", "the same state"]
)
def test_possible_orders_with_the_same_result_are_accepted(tmp_path, gone, is_refused):
    """Sorted or not, the last of three layers is the last; of the first two, one or the other is gone."""
    layers = {name: nn.Linear(4, 4, bias=False) for name in ("b", "a", "last")}
    model = nn.Sequential(OrderedDict(layers))
    path, _ = trained(tmp_path, model, one_group(model))
    del layers[gone]
    assert codes_of(path, nn.Sequential(OrderedDict(layers)), output=tmp_path / "out.pth") == ["OPT101"] * is_refused


def test_names_in_order_may_have_been_sorted(tmp_path):
    layers = {name: nn.Linear(4, 4, bias=False) for name in "abc"}
    model = nn.Sequential(OrderedDict(layers))
    path, _ = trained(tmp_path, model, one_group(model))
    target = nn.Sequential(OrderedDict(z=layers["a"], b=layers["b"], c=layers["c"]))
    assert codes_of(path, target, output=tmp_path / "out.pth", rename=("a.*=z.*",)) == ["OPT101"]


@pytest.mark.parametrize(("order", "is_refused"), [("bca", True), ("acb", False)])
def test_groups_with_names_may_come_as_the_script_meets_them(tmp_path, order, is_refused):
    layers = {name: nn.Linear(4, 4) for name in "abc"}
    model = nn.Sequential(OrderedDict(layers))
    named = [list(part) for part in zip(*[iter(model.named_parameters())] * 2, strict=True)]
    groups = [{"params": named[0]}, {"params": [*named[1], *named[2]]}]
    path, _ = trained(tmp_path, model, groups)
    target = nn.Sequential(OrderedDict((name, layers[name]) for name in order))
    assert codes_of(path, target, output=tmp_path / "out.pth") == ["OPT101"] * is_refused


def test_one_of_several_equal_groups_is_removed(tmp_path):
    before = layers("a", "b", "c", "wide")
    path, _ = trained(tmp_path, before, [{"params": list(one.parameters())} for one in before.values()])
    assert codes_of(path, layers("a", "c", "wide"), output=tmp_path / "out.pth") == ["OPT101"]


def test_sorted_groups_of_one_parameter_in_a_sorted_file_are_reported(tmp_path):
    layers = {name: nn.Linear(4, 4, bias=False) for name in "cab"}
    model = nn.Sequential(OrderedDict(layers))
    optimizer = torch.optim.AdamW([{"params": [one]} for _, one in sorted(model.named_parameters())])
    marked(model, optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    target = nn.Sequential(OrderedDict(c=layers["c"], z=layers["a"], b=layers["b"]))
    path = tmp_path / "model.safetensors"
    assert codes_of(path, target, rename=("a.*=z.*",), dry_run=True) == ["OPT101"]


def test_a_head_may_come_first_in_one_group(tmp_path):
    layers = {name: nn.Linear(4, 4) for name in ("body", "neck", "head")}
    model = nn.Sequential(OrderedDict(layers))
    groups = [one for name in ("head", "body", "neck") for one in layers[name].parameters()]
    path, _ = trained(tmp_path, model, groups)
    del layers["neck"]
    assert codes_of(path, nn.Sequential(OrderedDict(layers)), output=tmp_path / "out.pth") == ["OPT101"]


@pytest.mark.parametrize(("names", "groups"), [("abc", 1), ("bca", 1), ("cab", 3)])
def test_an_optimizer_without_a_state_has_nothing_to_move(tmp_path, names, groups):
    model = Same("abc")
    parts = [[*layer.parameters()] for layer in model.children()] if groups > 1 else [[*model.parameters()]]
    optimizer = torch.optim.SGD([{"params": part} for part in parts], lr=0.1)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pth")
    report = ckptfix.repair(tmp_path / "run.pth", Same(names), unsafe_fixes=True, output=tmp_path / "out.pth").report
    assert (findings(report), report.exit_code) == ([], 0)


class Listed(nn.Module):
    """Layers of given shapes; a shape with one number makes a norm."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.LayerNorm(shape) if len(shape) == 1 else nn.Linear(shape[1], shape[0]))


def followed_with(tmp_path: Path, old: nn.Module, new: nn.Module, groups: Any) -> ckptfix.Report:
    optimizer = torch.optim.AdamW(groups)
    for parameter in old.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.save({"model": old.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pth")
    asked: dict[str, Any] = {"unsafe_fixes": True, "fill": "target", "allow_untrained": True}
    return ckptfix.repair(tmp_path / "run.pth", new, output=tmp_path / "out.pth", **asked).report


@pytest.mark.parametrize(("new", "is_refused"), [("anew", True), ("new", False)])
def test_a_new_parameter_among_names_in_order_may_be_sorted(tmp_path, new, is_refused):
    """The names of both groups are in the order of the model, and sorted: under ``bnew`` these are two orders."""
    old = Listed(b=(2, 2), c=(3, 2))
    groups = [
        {"params": [pair for pair in old.named_parameters() if pair[0].endswith(leaf)], "weight_decay": decay}
        for leaf, decay in (("weight", 0.1), ("bias", 0.0))
    ]
    wanted = Listed(b=(2, 2), **{new: (5, 4)}, c=(3, 2)) if is_refused else Listed(b=(2, 2), c=(3, 2), new=(5, 4))
    report = followed_with(tmp_path, old, wanted, groups)
    assert [finding.fix is None for finding in report.findings if finding.code == "OPT101"] == [is_refused]


@pytest.mark.parametrize(("names", "is_refused"), [("cab", True), ("abc", False)])
def test_an_empty_group_tells_no_order(tmp_path, names, is_refused):
    """The order by name in one of two groups is as uncertain as in a single group."""
    old, new = Same(names), Same(names[:2])
    report = followed_with(tmp_path, old, new, [{"params": list(old.parameters())}, {"params": []}])
    assert [finding.fix is None for finding in report.findings if finding.code == "OPT101"] == [is_refused]


@pytest.mark.parametrize(("shapes", "doubt"), [({"b": (3, 3)}, True), ({"b": (4, 3)}, False)])
def test_an_order_of_few_scripts_is_named_if_it_fits_as_well(tmp_path, shapes, doubt):
    old = Listed(a=(3, 3), **shapes, c=(3, 3) if doubt else (5, 4))
    new = Listed(a=(3, 3), **shapes)
    report = followed_with(tmp_path, old, new, list(old.parameters()))
    (finding,) = [finding for finding in report.applied if finding.code == "OPT101"]
    assert ("in reverse would fit as well" in finding.message) is doubt
    assert "identified by model.parameters()" in str(report).splitlines()[-1]


def test_a_removed_norm_is_recognised_by_its_name(tmp_path):
    """Only its class shows, by the Trainer's rule, that the weight of ``ln_f`` does not decay."""
    old, new = Listed(a=(3, 2), ln_f=(3,), b=(4, 3)), Listed(a=(3, 2), b=(4, 3))
    decayed = {name for name, _ in old.named_parameters() if not ("bias" in name or name.startswith("ln"))}
    groups = [
        {"params": [one for name, one in old.named_parameters() if (name in decayed) is has], "weight_decay": 0.1 * has}
        for has in (True, False)
    ]
    report = followed_with(tmp_path, old, new, groups)
    (finding,) = [finding for finding in report.applied if finding.code == "OPT101"]
    assert finding.evidence["named by"] == "Hugging Face Trainer"


@pytest.mark.parametrize("ties", [(True, True), (False, False), (True, False)])
def test_a_tie_that_is_undone_leaves_the_state_with_the_first_name(tmp_path, ties):
    old, new = Same("abc"), Same("abc")
    for model, is_tied in zip((old, new), ties, strict=True):
        if is_tied:
            model.get_submodule("c").weight = model.get_parameter("a.weight")
    optimizer = saved(old, one_group, tmp_path / "run.pth")
    report = ckptfix.repair(tmp_path / "run.pth", new, unsafe_fixes=True, output=tmp_path / "out.pth").report
    is_undone = ties[0] and not ties[1]
    assert (findings(report), report.exit_code) == (["OPT101"] * is_undone, 0)
    if is_undone:
        own = torch.optim.AdamW(new.parameters())
        own.load_state_dict(torch.load(tmp_path / "out.pth", weights_only=True)["optimizer"])
        names = dict(old.named_parameters())
        assert new.get_parameter("c.weight") not in own.state
        assert all(
            torch.equal(own.state[parameter]["exp_avg"], optimizer.state[names[name]]["exp_avg"])
            for name, parameter in new.named_parameters()
            if name != "c.weight"
        )


@pytest.mark.parametrize("prefix", ["", "module.", "model."])
def test_noop_ties_that_were_saved_as_copies(tmp_path, prefix):
    model = Same("abc")
    model.get_submodule("c").weight = model.get_parameter("a.weight")
    optimizer = saved(model, one_group, tmp_path / "run.pth")
    state = {prefix + key: value.clone() for key, value in model.state_dict().items()}  # as `.cpu()` of each does
    torch.save({"model": state, "optimizer": optimizer.state_dict()}, tmp_path / "run.pth")
    report = ckptfix.repair(tmp_path / "run.pth", model, output=tmp_path / "out.pth").report
    assert (findings(report), report.exit_code) == ([], 0)
    written = torch.load(tmp_path / "out.pth", weights_only=True)["optimizer"]
    assert str(written) == str(optimizer.state_dict())


@pytest.mark.parametrize("is_dropped", [False, True])
def test_names_of_a_submodule_are_not_certain(tmp_path, is_dropped):
    model = Same("abc")
    model.add_module("enc", Same("abc"))
    enc = model.get_submodule("enc")
    saved(model, lambda model: list(enc.named_parameters()), tmp_path / "run.pth")
    if is_dropped:
        del model.b
    report = ckptfix.repair(tmp_path / "run.pth", model, unsafe_fixes=True, output=tmp_path / "out.pth").report
    assert [finding.code for finding in report.remaining] == ["OPT101"] * is_dropped
    old, new = (torch.load(tmp_path / name, weights_only=True)["optimizer"] for name in ("run.pth", "out.pth"))
    assert str(old) == str(new)


@pytest.mark.parametrize("edit", ["add", "drop"])
def test_a_new_parameter_in_an_order_of_the_users_own_has_no_known_place(tmp_path, edit):
    """``sorted(named_parameters())``: torch loads by position, so a new one at another place moves all that follow."""
    model, target = Decoder(2), Decoder(3 if edit == "add" else 1)
    optimizer = torch.optim.AdamW(sorted(model.named_parameters()))
    marked(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pth")
    asked: dict[str, Any] = {"unsafe_fixes": True, "fill": "target", "output": tmp_path / "out.pth"}
    report = ckptfix.repair(tmp_path / "run.pth", target, **asked, allow_untrained=True).report
    left = [finding for finding in report.remaining if finding.code == "OPT101"]
    assert ["ckptfix.load" in str(finding.remedies) for finding in left] == [True] * (edit == "add")
    if edit == "drop":
        again = torch.optim.AdamW(sorted(target.named_parameters()))
        again.load_state_dict(torch.load(tmp_path / "out.pth", weights_only=True)["optimizer"])
    else:
        again = torch.optim.AdamW(sorted(target.named_parameters()))
        ckptfix.load(target, tmp_path / "run.pth", optimizer=again, unsafe_fixes=True, fill="target")
    assert_in_step(target, again, new="h.2.")


@pytest.mark.parametrize("is_sorted", [True, False])
def test_names_in_an_order_of_the_users_own_do_not_follow_a_model_in_another(tmp_path, is_sorted):
    """The head comes first in the optimizer; nothing shows what the script makes of the other model. Sorted keys do
    not say either that it is another one."""
    model = nn.Sequential(OrderedDict((name, nn.Linear(4, 4)) for name in ("one", "two", "head")))
    optimizer = torch.optim.AdamW(sorted(model.named_parameters(), key=lambda pair: pair[0][:4] != "head"))
    marked(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pth")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    target = nn.Sequential(OrderedDict((name, nn.Linear(4, 4)) for name in ("two", "one", "head")))
    path = tmp_path / ("model.safetensors" if is_sorted else "run.pth")
    (found,) = ckptfix.repair(path, target, dry_run=True, unsafe_fixes=True).report.findings
    assert (found.code, found.fix, found.level) == ("OPT101", None, Level.NOTE if is_sorted else Level.ERROR)


@pytest.mark.parametrize("is_of_trainer", [True, False])
def test_groups_by_name_and_in_the_order_of_the_model_are_distinguished(tmp_path, is_of_trainer):
    """minGPT sorts names and the Trainer does not: where both fit, only a file of the trainer shows which it was."""
    layers: dict[str, nn.Module] = {name: nn.Linear(4, 4) for name in ("b", "a", "last")}
    layers["table"] = nn.Embedding(5, 4)  # which does not decay in minGPT, but in another script that sorts
    model, target = (nn.Sequential(OrderedDict(copy.deepcopy(layers))) for _ in range(2))
    del target.a
    optimizer = torch.optim.AdamW(by_decay(lambda name, p: "bias" not in name, True)(model))
    marked(model, optimizer)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    if is_of_trainer:
        (tmp_path / "trainer_state.json").write_text("{}")
    report = ckptfix.repair(tmp_path / "pytorch_model.bin", target, dry_run=True, unsafe_fixes=True).report
    assert findings(report) == ["OPT101"]
    assert ("OPT101" in [finding.code for finding in report.fixed]) is is_of_trainer


@pytest.mark.parametrize("edit", ["same", "reorder"])
def test_unknown_groups_are_reported_if_the_order_changes(tmp_path, edit):
    model = Net()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": parameters[::3]}, {"params": parameters[1::3] + parameters[2::3]}])
    train(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pth")
    target = reordered(Net()) if edit == "reorder" else Net()
    report = ckptfix.repair(tmp_path / "run.pth", target, dry_run=True, unsafe_fixes=True).report
    assert findings(report) == (["OPT101"] if edit == "reorder" else [])
    assert report.exit_code == (edit == "reorder")


@pytest.mark.parametrize("rest", [0, 1500], ids=["few", "among-many-keys"])
def test_an_optimizer_among_the_weights_follows(tmp_path, rest):
    model = Net()
    optimizer = saved(model, one_group, tmp_path / "run.pth")
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    apart = {"optimizer": optimizer.state_dict(), "scheduler": schedule.state_dict()}
    more = {f"more.{number}": torch.zeros(1) for number in range(rest)}
    torch.save({**model.state_dict(), **more, **apart}, tmp_path / "flat.pth")
    target = without_aux(Net())
    report = ckptfix.repair(tmp_path / "flat.pth", target, output=tmp_path / "out.pth", unsafe_fixes=True).report
    assert [(one.code, one.level) for one in report.findings if not one.fix] == [("FIT102", Level.NOTE)]
    made = torch.load(tmp_path / "out.pth", weights_only=True)
    state, other = made.pop("optimizer"), made.pop("scheduler")
    target.load_state_dict(made)
    torch.optim.AdamW(target.parameters()).load_state_dict(state)
    assert other == apart["scheduler"]
    assert ckptfix.repair(tmp_path / "out.pth", target, output=tmp_path / "again.pth").report.edits == ()
    report = ckptfix.repair(tmp_path / "flat.pth", Net(), output=tmp_path / "out.safetensors", unsafe_fixes=True).report
    (lost,) = (one for one in report.findings if one.code == "FIL104")
    assert lost.evidence["places"] == ["optimizer", "scheduler"]


def test_parameters_frozen_since_are_a_note(tmp_path):
    saved(Net(), one_group, tmp_path / "run.pth")
    model = Net()
    model.stem.requires_grad_(False)
    report = ckptfix.repair(tmp_path / "run.pth", model, dry_run=True).report
    (finding,) = (one for one in report.findings if one.code == "OPT101")
    assert finding.level is Level.NOTE
    assert finding.keys == ("stem.weight", "stem.bias")
    assert report.exit_code == 0


def test_an_optimizer_of_some_other_parameters_is_not_named(tmp_path):
    model = Net()
    optimizer = torch.optim.AdamW([*model.head.parameters(), *model.aux.parameters()])
    train(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pth")
    target = without_aux(Net())
    asked: dict[str, Any] = {"unsafe_fixes": True, "output": tmp_path / "out.pth", "force": True}
    report = ckptfix.repair(tmp_path / "run.pth", target, **asked).report
    assert [finding.code for finding in report.remaining] == ["OPT101"]
    assert report.exit_code == 1
    report = ckptfix.repair(tmp_path / "run.pth", target, keep_optimizer=True, **asked).report
    assert report.exit_code == 0
    lines = [str(line) for line in report_lines(report)]
    assert "accepted, as you asked: OPT101" in lines
    assert "nothing left to do" not in lines
    report = ckptfix.repair(tmp_path / "run.pth", target, drop_optimizer=True, **asked).report
    assert report.exit_code == 0
    assert list(torch.load(tmp_path / "out.pth", weights_only=True)) == ["model"]


def test_a_recipe_is_not_certain(tmp_path):
    saved(Net(), one_group, tmp_path / "run.pth")
    report = ckptfix.check(tmp_path / "run.pth", like=None, select=("FIT102", "OPT101"), model=without_aux(Net()))
    (foreseen,) = (one for one in report.findings if one.code == "OPT101")  # nothing is dropped yet
    assert (foreseen.level, foreseen.fix) == (Level.WARNING, None)
    assert foreseen.evidence["gone"] == ["aux.weight", "aux.bias"]
    plan = ckptfix.repair(tmp_path / "run.pth", without_aux(Net()), unsafe_fixes=True, dry_run=True).plan
    assert {step.rule for step in plan.steps} == {"FIT102", "OPT101"}


def test_a_plan_carries_the_optimizer(tmp_path):
    """The edits are written as JSON and read back, and give the same file."""
    saved(Net(), GROUPS["hugging-face"], tmp_path / "run.pth", "module.")
    target = without_aux(Net())
    first = ckptfix.repair(tmp_path / "run.pth", target, output=tmp_path / "one.pth", unsafe_fixes=True)
    plan = Plan.from_json(json.loads(json.dumps(first.plan.to_json())))
    ckptfix.repair(tmp_path / "run.pth", target, output=tmp_path / "two.pth", plan=plan)
    assert (tmp_path / "one.pth").read_bytes() == (tmp_path / "two.pth").read_bytes()


def test_safetensors_has_no_place_for_it(tmp_path):
    saved(Net(), one_group, tmp_path / "run.pth")
    report = ckptfix.repair(
        tmp_path / "run.pth", without_aux(Net()), output=tmp_path / "out.safetensors", unsafe_fixes=True
    ).report
    assert findings(report) == []
    assert "FIL104" in {finding.code for finding in report.findings}


# Weights that are split, fused, stacked, turned round and reshaped
# ----------------------------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Parameters of these shapes, in this order."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


def rows(start: int, stop: int, width: int = 3) -> Any:
    return ((start, stop), (0, width))


FUSE = Assemble(
    "qkv", "float32", (6, 3), tuple(Part(n, rows(0, 2), rows(2 * i, 2 * i + 2)) for i, n in enumerate("qkv"))
)
Q = {"q": (2, 3), "k": (2, 3), "v": (2, 3), "z": (5,)}


def brought_in_step(path: Path, edits: list[Edit]) -> tuple[dict[str, Any], ckptfix.Report]:
    """Apply edits of weights, and then those that the rule proposes for the optimizer."""
    first = Plan((Step("X", tuple(edits)),))
    (finding,) = (one for one in ckptfix.repair(path, plan=first).report.remaining if one.code == "OPT101")
    assert finding.fix is not None
    plan = Plan((*first.steps, Step("OPT101", finding.fix.edits)))
    report = ckptfix.repair(path, plan=plan, output=path.with_name("out.pth"), force=True).report
    assert "OPT101" not in {one.code for one in report.remaining}
    made: dict[str, Any] = torch.load(path.with_name("out.pth"), weights_only=True)
    return made, report


def test_a_number_that_is_a_tensor_of_one_element_is_not_cut(tmp_path):
    """QHAdam counts its steps and keeps the weights of its averages so."""
    optimizer = torch.optim.AdamW(named(Layers(**Q)))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {"exp_avg": torch.randn_like(parameter), "weight": torch.ones(1)}
    state = optimizer.state_dict()["state"]
    torch.save({"model": Layers(**Q).state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pth")
    made, _ = brought_in_step(tmp_path / "run.pth", [FUSE])
    row = next(one for one in made["optimizer"]["state"].values() if one["exp_avg"].shape == (6, 3))
    assert torch.equal(row["exp_avg"], torch.cat([state[at]["exp_avg"] for at in range(3)]))
    assert torch.equal(row["weight"], torch.ones(1))


@pytest.mark.parametrize("spoilt", ["steps", "a state is missing", "factored", "lists", "axes"])
def test_state_that_cannot_be_split_exactly_starts_anew(tmp_path, spoilt):
    model = Layers(**Q)
    make = torch.optim.Adafactor if spoilt == "factored" else torch.optim.AdamW
    optimizer = make(model.parameters())
    for _ in range(2):
        for name, parameter in model.named_parameters():
            if not (spoilt == "a state is missing" and name == "k"):
                parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    saved = optimizer.state_dict()
    if spoilt == "steps":
        saved["state"][1]["step"] = torch.tensor(1.0)
    for number, parameter in enumerate(model.parameters()):
        if spoilt == "lists":  # as SOAP has them
            saved["state"][number]["GG"] = [torch.eye(size) for size in parameter.shape]
        if spoilt == "axes":  # as Shampoo has them: what is of an axis may have the shape of the whole by chance
            saved["state"][number]["pre_cond_0"] = torch.ones(2, 3) if parameter.ndim > 1 else torch.eye(5)
    torch.save({"model": model.state_dict(), "optimizer": saved}, tmp_path / "run.pth")
    made, _ = brought_in_step(tmp_path / "run.pth", [FUSE])
    assert made["optimizer"]["param_groups"][0]["params"] == [0, 1]
    assert list(made["optimizer"]["state"]) == [1]
    assert str(made["optimizer"]["state"][1]) == str(saved["state"][3])


@pytest.mark.parametrize("groups", [one_group, named])
def test_a_state_of_all_parameters_together_follows_none(tmp_path, groups):
    model = Net()
    optimizer = torch.optim.LBFGS(groups(model))

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value: torch.Tensor = model(torch.ones(4, 3)).pow(2).mean()
        value.backward()
        return value

    optimizer.step(loss)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pth")
    assert findings(ckptfix.check(tmp_path / "run.pth", Net())) == []
    report = ckptfix.repair(
        tmp_path / "run.pth", without_aux(Net()), output=tmp_path / "out.pth", unsafe_fixes=True
    ).report
    (left,) = report.remaining
    assert (left.code, left.fix) == ("OPT101", None)
    assert "all parameters together" in left.message


def left_without_aux(folder: Path) -> Finding:
    """What a repair leaves of ``run.pth``, which nothing is wrong with, for a model without one of its layers."""
    assert findings(ckptfix.check(folder / "run.pth", Net())) == []
    repaired = ckptfix.repair(folder / "run.pth", without_aux(Net()), output=folder / "out.pth", unsafe_fixes=True)
    (left,) = repaired.report.remaining
    assert (left.code, left.fix) == ("OPT101", None)
    return left


@pytest.mark.parametrize("is_inside", [False, True], ids=["apex", "FusedAdam"])
def test_float32_copies_by_position_do_not_follow_a_removed_parameter(tmp_path, is_inside):
    """Their loaders copy what the list has, one after another, into the weights of the new model."""
    model = Net()
    optimizer = saved(model, one_group, tmp_path / "plain.pth").state_dict()
    copies = [parameter.detach().clone() for parameter in model.parameters()]
    whole = optimizer | {"master_weights": copies} if is_inside else {"optimizer": optimizer, "fp32": [copies]}
    torch.save({"model": model.state_dict(), "optimizer": whole}, tmp_path / "run.pth")
    left = left_without_aux(tmp_path)
    assert f"{'master_weights' if is_inside else 'fp32'} lists a copy of each parameter" in left.message


@pytest.mark.parametrize("form", ["within", "renamed", "around"])
def test_slow_copies_of_lookahead_do_not_follow_a_removed_parameter(tmp_path, form):
    model = Net()
    optimizer = saved(model, one_group, tmp_path / "plain.pth").state_dict()
    slow = {140063779997088 + number: {"slow_param": value.detach()} for number, value in enumerate(model.parameters())}
    whole = {
        "within": optimizer | {"slow_state": slow},
        "renamed": {
            "fast_state": optimizer["state"],
            "slow_state": slow,
            "param_groups": optimizer["param_groups"],
        },
        "around": {"slow_state": slow, "base_optimizer": optimizer},
    }[form]
    torch.save({"model": model.state_dict(), "optimizer": whole}, tmp_path / "run.pth")
    left = left_without_aux(tmp_path)
    assert "slow_state lists a copy of each parameter" in left.message


def test_a_saved_plan_without_the_optimizer_is_reported(tmp_path):
    saved(Net(), one_group, tmp_path / "run.pth")
    plan = Plan((Step("X", (Drop("head.bias"),)),))
    report = ckptfix.repair(tmp_path / "run.pth", plan=plan, output=tmp_path / "out.pth").report
    assert [finding.code for finding in report.remaining] == ["OPT101"]
    assert report.exit_code == 1


# Several readings
# ----------------------------------------------------------------------------------------------------------------------


def layers(*names: str) -> nn.ModuleDict:
    """Return layers of one shape, except for ``wide``: only their order distinguishes the rest."""
    return nn.ModuleDict({name: nn.Linear(4, 4 + (name == "wide")) for name in names})


def trained(folder: Path, model: nn.Module, groups: Any, lr: Any = 0.01) -> tuple[Path, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(groups, lr=lr)
    for number, one in enumerate(model.parameters()):
        one.grad = torch.full_like(one, number + 1.0)
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "run.pth")
    return folder / "run.pth", optimizer


def codes_of(path: Path, wanted: nn.Module, **asked: Any) -> list[str]:
    report = ckptfix.repair(path, wanted, unsafe_fixes=True, fill="target", allow_untrained=True, **asked).report
    return [finding.code for finding in report.findings if finding.fix is None and finding.level is Level.ERROR]


@pytest.mark.parametrize("names", [("new", "a", "b", "wide"), ("wide", "a", "b")], ids=["new", "reorder"])
def test_a_second_check_finds_the_weights_in_the_order_of_the_optimizer(tmp_path, names):
    before, wanted = layers("a", "b", "wide"), layers(*names)
    path, optimizer = trained(tmp_path, before, before.parameters())
    written = tmp_path / "fixed.pth"
    assert codes_of(path, wanted, output=written) == []
    assert list(torch.load(written)["model"]) == list(wanted.state_dict())
    again = ckptfix.check(written, wanted)
    assert (again.findings, again.exit_code) == ((), 0)
    resumed = torch.optim.AdamW(wanted.parameters())
    resumed.load_state_dict(torch.load(written)["optimizer"])
    for name, one in wanted.named_parameters():
        state = optimizer.state[before.get_parameter(name)] if "new" not in name else {}
        assert resumed.state[one].keys() == state.keys()
        assert all(torch.equal(resumed.state[one][what], value) for what, value in state.items())


def matrices_and_rest(model: nn.Module, is_sorted: bool) -> Any:
    order = sorted(model.named_parameters()) if is_sorted else list(model.named_parameters())
    return [
        {"params": [p for _, p in order if (p.ndim > 1) is first], "weight_decay": 0.1 * first}
        for first in (True, False)
    ]


def test_sorted_names_may_not_be_the_order_of_the_model(tmp_path):
    before = layers("a", "b")
    path, _ = trained(tmp_path, before, matrices_and_rest(before, is_sorted=True), lr=torch.tensor(0.01))
    assert "OPT101" in codes_of(path, layers("b2", "a", "b"))


def test_a_new_part_of_unknown_group_is_ambiguous(tmp_path):
    before = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 3)})
    groups = [{"params": list(before[name].parameters()), "lr": lr} for name, lr in (("body", 0.1), ("head", 0.2))]
    path, _ = trained(tmp_path, before, groups)
    wanted = nn.ModuleDict({"body": before["body"], "neck": nn.Linear(4, 5), "head": before["head"]})
    assert "OPT101" in codes_of(path, wanted)


def test_outer_layers_before_inner_ones_are_considered(tmp_path):
    def parts(*numbers: int) -> nn.Module:
        inner = {part: nn.ModuleDict({"layer": layers(*map(str, numbers))}) for part in ("a", "b")}
        return nn.ModuleDict({**inner, "out": nn.Linear(4, 4)})

    before = parts(0, 1)
    inner = [[one for key, one in before.named_parameters() if f".{n}." in key] for n in "01"]
    outer = [one for key, one in before.named_parameters() if key.startswith("out")]
    groups = [{"params": each, "lr": 0.1 / n} for n, each in enumerate([outer, *inner], 1)]
    path, _ = trained(tmp_path, before, groups)
    assert "OPT101" in codes_of(path, parts(1, 0))  # and "a", "b" in reverse order fit as well


def test_a_removed_layer_and_a_new_one_of_its_shape(tmp_path):
    before, wanted = layers("a", "b", "c", "lost"), layers("a", "b", "c", "more")
    path, optimizer = trained(tmp_path, before, before.parameters())
    written = tmp_path / "fixed.pth"
    codes_of(path, wanted, output=written)
    resumed = torch.optim.AdamW(wanted.parameters())
    resumed.load_state_dict(torch.load(written)["optimizer"])
    assert not resumed.state[wanted.get_parameter("more.weight")]
    codes_of(path, wanted, output=written, rename=("lost.*=more.*",), force=True)
    resumed.load_state_dict(torch.load(written)["optimizer"])
    kept = optimizer.state[before.get_parameter("lost.weight")]["exp_avg"]
    assert torch.equal(resumed.state[wanted.get_parameter("more.weight")]["exp_avg"], kept)


def test_layers_are_counted_as_in_timm(tmp_path):
    """ConvNeXt's groups span its stages, which the names of its blocks do not show."""
    models, optim = pytest.importorskip("timm.models"), pytest.importorskip("timm.optim")

    def groups(model: nn.Module) -> Any:
        return optim.param_groups_layer_decay(model, weight_decay=0.1, layer_decay=0.7)

    before, wanted = (models.ConvNeXt(depths=(1, 1, 2, 1), dims=(8,) * 4, num_classes=n) for n in (3, 5))
    path, optimizer = trained(tmp_path, before, groups(before))
    asked: dict[str, Any] = {"unsafe_fixes": True, "drop_mismatched": True, "fill": "target"}
    ckptfix.repair(path, wanted, output=tmp_path / "out.pth", **asked)
    resumed = torch.optim.AdamW(groups(wanted))
    scales = [group["lr_scale"] for group in resumed.param_groups]
    resumed.load_state_dict(torch.load(tmp_path / "out.pth", weights_only=True)["optimizer"])
    assert [group["lr_scale"] for group in resumed.param_groups] == scales
    for (key, one), other in zip(wanted.named_parameters(), before.parameters(), strict=True):
        if key.startswith("head.fc"):
            assert not resumed.state[one]
        else:
            assert torch.equal(resumed.state[one]["exp_avg"], optimizer.state[other]["exp_avg"]), key


@pytest.mark.parametrize("is_of_trainer", [True, False])
def test_the_file_of_a_trainer_has_the_recipe_of_the_trainer(tmp_path, is_of_trainer):
    def block(has_bias: bool) -> nn.Module:
        return nn.ModuleDict({"fc": nn.Linear(4, 4, has_bias), "norm": nn.RMSNorm(4), "out": nn.Linear(4, 3, False)})

    before = block(has_bias=False)
    path, optimizer = trained(tmp_path, before, matrices_and_rest(before, is_sorted=False))
    if is_of_trainer:
        path = tmp_path / "pytorch_model.bin"
        torch.save(before.state_dict(), path)
        torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
        (tmp_path / "trainer_state.json").write_text("{}")
    (tmp_path / "out").mkdir()
    assert codes_of(path, block(has_bias=True), output=tmp_path / "out" / path.name) == ["OPT101"] * (not is_of_trainer)


@pytest.mark.parametrize(("release", "layers"), [("this", 2), ("this", 5), ("4.57.1", 2)])
def test_the_order_of_the_model_for_a_file_with_old_names(tmp_path, release, layers):
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    before, wanted = (ViTForImageClassification(ViTConfig(**sizes, num_hidden_layers=n)) for n in (3, layers))
    decays = {name: not ("bias" in name or "norm" in name) for name, _ in wanted.named_parameters()}
    decays |= {name: not ("bias" in name or "norm" in name) for name, _ in before.named_parameters()}
    groups = [
        {"params": [p for name, p in before.named_parameters() if decays[name] is first], "weight_decay": 0.1 * first}
        for first in (True, False)
    ]
    _, optimizer = trained(tmp_path, before, groups)
    before.save_pretrained(tmp_path)
    assert "vit.encoder.layer.0" in (tmp_path / "model.safetensors").read_bytes()[:2000].decode(errors="replace")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    if release != "this":
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "transformers_version": release}))
    (tmp_path / "out").mkdir()
    found = codes_of(tmp_path / "model.safetensors", wanted, output=tmp_path / "out" / "model.safetensors")
    assert found == ["OPT101"] * (release != "this")
    if release == "this":
        state = torch.load(tmp_path / "out" / "optimizer.pt")
        order = [name for first in (True, False) for name, _ in wanted.named_parameters() if decays[name] is first]
        old = dict(before.named_parameters())
        assert [number in state["state"] for number in range(len(order))] == [name in old for name in order]
        for number, name in enumerate(order):
            if name in old:
                assert torch.equal(state["state"][number]["exp_avg"], optimizer.state[old[name]]["exp_avg"])


def test_a_removed_group_is_named(tmp_path):
    before = layers("a", "wide")
    groups = [{"params": list(before[name].parameters()), "lr": lr} for name, lr in (("a", 0.1), ("wide", 0.2))]
    path, _ = trained(tmp_path, before, groups)
    report = ckptfix.repair(path, layers("a"), unsafe_fixes=True, output=tmp_path / "fixed.pth").report
    (found,) = (finding for finding in report.findings if finding.code == "OPT101")
    assert "1 group dropped with all its parameters" in found.message
    torch.optim.AdamW(layers("a").parameters()).load_state_dict(torch.load(tmp_path / "fixed.pth")["optimizer"])


def test_names_instead_of_numbers_follow_a_rename(tmp_path):
    """minGPT's recipe, which sorts by name, fits too; but the order of named parameters means nothing."""
    before, wanted = layers("a", "b", "wide"), layers("a", "z", "wide")
    optimizer = torch.optim.AdamW(matrices_and_rest(before, is_sorted=True))
    for one in before.parameters():
        one.grad = torch.ones_like(one)
    optimizer.step()
    state = get_optimizer_state_dict(before, optimizer)
    torch.save({"model": before.state_dict(), "optimizer": state}, tmp_path / "run.pth")
    assert codes_of(tmp_path / "run.pth", wanted, output=tmp_path / "fixed.pth", rename=("b.*=z.*",)) == []
    assert torch.load(tmp_path / "fixed.pth")["optimizer"]["state"].keys() == dict(wanted.named_parameters()).keys()


def test_an_optimizer_with_names_that_follows_safely_needs_no_decision(tmp_path: Path) -> None:
    weights = {f"_forward_module.{name}": torch.randn(3) for name in ("a.weight", "b.weight")}
    state = {
        name: {"exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3), "step": torch.tensor(2.0)} for name in weights
    }
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [*weights]}]}
    torch.save({"module": weights, "optimizer": optimizer}, tmp_path / "a.pth")
    checked = run_here("check", tmp_path / "a.pth", cwd=tmp_path).stdout
    assert "OPT101" in checked
    assert "--unsafe-fixes" not in checked
    assert run_here("repair", tmp_path / "a.pth", "-o", tmp_path / "b.pth", cwd=tmp_path).returncode == 0
    assert [*torch.load(tmp_path / "b.pth")["optimizer"]["state"]] == ["a.weight", "b.weight"]
