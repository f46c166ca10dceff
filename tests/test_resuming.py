"""A training that goes on after a repair makes the very steps that it would have made: train, edit, repair, resume.

Each way to save a run is tried with each optimizer and each kind of edit. The reference is the same training, whose
model and optimizer are edited live by a function of this file; weights are compared bit for bit after two steps more.
"""

import contextlib
import copy
import itertools
import os
import random
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import ckptfix
from ckptfix.core.finding import Applicability
from ckptfix.core.rename_map import MapRule, RenameMap
from ckptfix.errors import TargetError, UsageError
from tests.checks import bytes_of

Tensors = Mapping[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]


class Layer(nn.Module):
    """A module with the parameters and modules that it is given."""


class LayerNorm(Layer):
    """What the older Hugging Face Trainer decides by a parameter's class."""


def built(shapes: Shapes) -> nn.Module:
    """Return a model of parameters with these names, in this order."""
    model = Layer()
    for key, shape in shapes.items():
        *path, leaf = key.split(".")
        module: nn.Module = model
        for name in path:
            if name not in module._modules:
                module.add_module(name, LayerNorm() if re.match(r"(new)?(ln|norm)", key) else Layer())
            module = module.get_submodule(name)
        module.register_parameter(leaf, nn.Parameter(torch.randn(shape)))
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int = 2) -> None:
    """Make steps with gradients that are numbers of the parameter's name and of its weights."""
    for step in range(first, first + steps):
        for name, parameter in model.named_parameters():
            noise = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
            parameter.grad = torch.randn(parameter.shape, generator=noise) + parameter.detach() / 4
        optimizer.step()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


# Ways to save a run
# ----------------------------------------------------------------------------------------------------------------------


def all_in_one(model: nn.Module) -> Any:
    return list(model.parameters())


def by_decay(
    is_decayed: Callable[[nn.Module, str, torch.Tensor], bool], first: bool = True, named: bool = False
) -> Any:
    def groups(model: nn.Module) -> Any:
        parts: dict[bool, list[Any]] = {True: [], False: []}
        for name, one in model.named_parameters():
            parts[is_decayed(model, name, one)].append((name, one) if named else one)
        return [{"params": parts[which], "weight_decay": 0.1 * which} for which in (first, not first)]

    return groups


def is_norm(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name.rpartition(".")[0]), LayerNorm)


def each_its_own(model: nn.Module) -> Any:
    return [{"params": [one], "weight_decay": 0.1 * (one.ndim > 1)} for one in model.parameters()]


def into_file(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    weights = {f"module.{key}": value for key, value in model.state_dict().items()}
    torch.save({"model": weights, "optimizer": optimizer.state_dict(), "epoch": 3}, folder / "run.pth")
    return folder / "run.pth"


def of_file(path: Path) -> tuple[Tensors, Any]:
    loaded = torch.load(path, weights_only=True)
    return loaded["model"], loaded["optimizer"]


def as_lightning(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    state = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "global_step": 2}
    torch.save({**state, "lr_schedulers": [schedule.state_dict()]}, folder / "last.ckpt")
    return folder / "last.ckpt"


def of_lightning(path: Path) -> tuple[Tensors, Any]:
    loaded = torch.load(path, weights_only=True)
    return loaded["state_dict"], loaded["optimizer_states"][0]


def as_trainer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return folder / "pytorch_model.bin"


def of_trainer(path: Path) -> tuple[Tensors, Any]:
    beside = path.with_name("optimizer.pt")
    return torch.load(path, weights_only=True), torch.load(beside, weights_only=True)


def as_trainer_sorted(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    save_file(model.state_dict(), folder / "model.safetensors")
    return folder / "model.safetensors"


def of_trainer_sorted(path: Path) -> tuple[Tensors, Any]:
    return load_file(path), torch.load(path.with_name("optimizer.pt"), weights_only=True)


def with_names(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    torch.save(
        {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}, folder / "run.pth"
    )
    return folder / "run.pth"


def with_flat_names(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    """As torchtitan has it."""
    flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
    torch.save({"model": model.state_dict(), "optimizer": flat}, folder / "run.pth")
    return folder / "run.pth"


FLAT = StateDictOptions(flatten_optimizer_state_dict=True, strict=False)


@dataclass(frozen=True)
class Saved:
    """A way to group parameters, and to save a run and to load it."""

    groups: Callable[[nn.Module], Any]
    save: Callable[[Path, nn.Module, torch.optim.Optimizer], Path] = into_file
    load: Callable[[Path], tuple[Tensors, Any]] = of_file
    total: int = 0
    """How many parameters the model is to have at least."""
    is_named: bool = False
    """Whether names are in the place of numbers, which ``torch.distributed.checkpoint`` loads."""
    refused: frozenset[str] = field(default_factory=frozenset)
    """The edits after which nothing tells which state belongs to which parameter."""


def decays(model: nn.Module, name: str, one: torch.Tensor) -> bool:
    """``Trainer.get_decay_parameter_names`` of transformers 5: by the names."""
    return not ("bias" in name or is_norm(model, name) or "_norm." in name)


def decayed_before(model: nn.Module, name: str, one: torch.Tensor) -> bool:
    return not ("bias" in name or is_norm(model, name))


def is_matrix(model: nn.Module, name: str, one: torch.Tensor) -> bool:
    return one.ndim > 1 and not name.endswith(".bias")


def part_and_kind(model: nn.Module) -> Any:
    """The head and the rest, each with what decays and what does not."""
    parts: dict[tuple[bool, bool], list[Any]] = {}
    for name, one in model.named_parameters():
        is_head = name.removeprefix("new").startswith("head")  # also under another name
        parts.setdefault((is_head, one.ndim < 2), []).append(one)
    return [{"params": parts[each], "weight_decay": 0.1 * (not each[1])} for each in sorted(parts)]


def biases_last(model: nn.Module) -> Any:
    """What Caffe's users did."""
    by_kind = by_decay(lambda model, name, one: not name.endswith("bias"))(model)
    return [{**group, "weight_decay": 0.0} for group in by_kind]


SAVED: dict[str, Saved] = {
    "plain": Saved(all_in_one),
    "head-and-rest": Saved(part_and_kind, refused=frozenset(("reorder",))),  # next to another of the same shape
    "biases": Saved(biases_last),
    "trainer-5": Saved(by_decay(decays), as_trainer, of_trainer),
    "trainer-4": Saved(by_decay(decayed_before), as_trainer, of_trainer),
    "trainer-safetensors": Saved(
        by_decay(decays),
        as_trainer_sorted,
        of_trainer_sorted,
        refused=frozenset(("drop", "reorder", "concat", "stack")),
    ),
    "timm": Saved(by_decay(is_matrix, first=False)),
    "30-groups": Saved(each_its_own, total=30),
    "lightning": Saved(all_in_one, as_lightning, of_lightning),
    "param_names": Saved(by_decay(decays, named=True)),
    "fqn": Saved(by_decay(is_matrix, first=False), with_names, of_file, is_named=True),
    # Torch loads flat keys of no parameter without a state, which Adafactor's new ones are.
    "flat": Saved(by_decay(is_matrix, first=False), with_flat_names, of_file, is_named=True),
}

# Edits
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edited:
    """The middle of a model before and after, and how the tensors of one become those of the other.

    ``became`` is given the tensors of the middle. Parameters of the result that it does not give are new."""

    before: Shapes
    after: Shapes
    became: Callable[[Tensors], Tensors] = lambda old: {}
    asked: Mapping[str, Any] = field(default_factory=dict)
    is_last: bool = False
    """Whether the middle comes last in the result."""


def mapped(old: str, new: str, *steps: str) -> dict[str, Any]:
    return {"rename_map": RenameMap((MapRule(old, new, steps),), "map.json"), "unsafe_fixes": True}


UNSAFE = {"unsafe_fixes": True}
FILL = {**UNSAFE, "fill": "target", "drop_mismatched": True}
LINEAR: Shapes = {"mid.weight": (4, 4), "mid.bias": (4,)}
QKV = ("q", "k", "v")
PARTED: Shapes = {f"mid.{one}.{leaf}": shape for one in QKV for leaf, shape in (("weight", (4, 4)), ("bias", (4,)))}
JOINED: Shapes = {"mid.qkv.weight": (12, 4), "mid.qkv.bias": (12,)}
BOTH = ("weight", "bias")
TO_PARTS = ("mid.qkv.{weight,bias}", "mid.{q,k,v}.{weight,bias}")

EDITS: dict[str, Edited] = {
    "rename": Edited(
        LINEAR,
        {"inner.weight": (4, 4), "inner.bias": (4,)},
        lambda old: {"inner.weight": old["mid.weight"], "inner.bias": old["mid.bias"]},
        {"rename": ("mid.*=inner.*",), **UNSAFE},
    ),
    "drop": Edited(LINEAR, {}, asked=UNSAFE),
    "add": Edited({}, LINEAR, asked=FILL),
    "reorder": Edited(LINEAR, LINEAR, dict, UNSAFE, is_last=True),
    "other-group": Edited(
        {"mid.weight": (4, 1)},
        {"norm_mid.weight": (4,)},
        lambda old: {"norm_mid.weight": old["mid.weight"][:, 0]},
        {"rename": ("mid.*=norm_mid.*",), **UNSAFE},
    ),
    "reshape": Edited(
        {"mid.weight": (4, 3)},
        {"mid.weight": (4, 3, 1, 1)},
        lambda old: {"mid.weight": old["mid.weight"][..., None, None]},
        UNSAFE,
    ),
    "split": Edited(
        JOINED,
        PARTED,
        lambda old: {f"mid.{q}.{leaf}": old[f"mid.qkv.{leaf}"].chunk(3)[n] for n, q in enumerate(QKV) for leaf in BOTH},
        mapped(*TO_PARTS, "split 3"),
    ),
    "concat": Edited(
        PARTED,
        JOINED,
        lambda old: {f"mid.qkv.{leaf}": torch.cat([old[f"mid.{q}.{leaf}"] for q in QKV]) for leaf in BOTH},
        mapped(*reversed(TO_PARTS), "concat"),
    ),
    "stack": Edited(
        {f"mid.{n}.weight": (2, 3) for n in range(3)},
        {"mid.weight": (3, 2, 3)},
        lambda old: {"mid.weight": torch.stack(list(old.values()))},
        mapped("mid.{e}.weight", "mid.weight", "stack"),
    ),
    "transpose": Edited(
        {"mid.weight": (4, 3)},
        {"mid.weight": (3, 4)},
        lambda old: {"mid.weight": old["mid.weight"].t()},
        mapped("mid.weight", "mid.weight", "transpose"),
    ),
    "permute": Edited(
        {"mid.weight": (8, 3)},
        {"turned.weight": (8, 3)},
        lambda old: {"turned.weight": old["mid.weight"].view(2, 2, 2, 3).transpose(1, 2).reshape(8, 3)},
        mapped("mid.weight", "turned.weight", "(h d t) ... -> (h t d) ... with d=2 t=2"),
    ),
    "fill": Edited(LINEAR, {"mid.weight": (6, 4), "mid.bias": (6,)}, asked=FILL),
}

STEM: Shapes = {"stem.weight": (4, 3), "stem.bias": (4,), "ln.weight": (4,), "ln.bias": (4,)}
HEAD: Shapes = {"k_norm.weight": (4, 4), "k_norm.bias": (4,), "head.weight": (5, 4), "head.bias": (5,)}


def shapes_of(middle: Shapes, total: int, is_last: bool = False) -> Shapes:
    more: Shapes = {f"more.{n}.weight": (2, 1 + n % 3) for n in range(total - len(STEM) - len(HEAD) - 2)}
    return STEM | more | (HEAD | middle if is_last else middle | HEAD)


def state_after(edit: Edited, name: str, old: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Return the state that a parameter of the result has if the optimizer is edited live; None if it starts anew."""
    if name not in {**edit.before, **edit.after}:
        return old[name]
    marks = {
        key: 1000 * n + torch.arange(0, prod(shape)).view(shape) for n, (key, shape) in enumerate(edit.before.items())
    }
    made = edit.became(marks).get(name)
    if made is None:
        return None
    sources = [key for key, mark in marks.items() if bool(torch.isin(mark, made.reshape(-1)).any())]
    if len(sources) == 1 and torch.equal(made, marks[sources[0]]):
        return old[sources[0]]
    found: dict[str, Any] = {}
    for what, first in old[sources[0]].items():
        values: dict[str, Any] = {key: old[key].get(what) for key in sources}
        if what == "step" or not isinstance(first, torch.Tensor):
            found[what] = copy.deepcopy(first)
        elif any(value is None or value.shape != marks[key].shape for key, value in values.items()):
            return None  # factored
        else:
            found[what] = edit.became({**marks, **values})[name].clone(memory_format=torch.contiguous_format)
    return found or None


def resume(folder: Path, saved: Saved, make: Callable[[Any], torch.optim.Optimizer], kind: str) -> ckptfix.Report:
    """Train, edit, repair and go on; compare each weight with the training that was edited live."""
    edit = EDITS[kind]
    model = built(shapes_of(edit.before, saved.total))
    optimizer = make(saved.groups(model))
    train(model, optimizer, 0)
    source = saved.save(folder, model, optimizer)

    wanted = built(shapes_of(edit.after, saved.total, edit.is_last))  # what it has more is what a fill takes
    reference = copy.deepcopy(wanted)
    old = {name: value.detach() for name, value in model.named_parameters()}
    given = {**old, **edit.became({name: old[name] for name in edit.before})}
    live = make(saved.groups(reference))
    rows = {name: copy.deepcopy(optimizer.state[value]) for name, value in model.named_parameters()}
    for name, value in reference.named_parameters():
        if name in given and given[name].shape == value.shape:
            value.data.copy_(given[name])
        if (row := state_after(edit, name, rows)) is not None:
            live.state[value] = row
    (folder / "out").mkdir()
    output = folder / "out" / source.name
    report = ckptfix.repair(source, wanted, output=output, **edit.asked).report
    if kind in saved.refused:
        assert [finding.code for finding in report.findings if finding.fix is None] == ["OPT101"]
        # With only another order, the groups may be the user's own, which is a note: the run is copied.
        assert (folder / "out" / "optimizer.pt").exists() == (saved.load is of_trainer_sorted and kind == "reorder")
        return report
    assert not report.is_open, report
    weights, state = saved.load(output)
    resumed = built(shapes_of(edit.after, saved.total, edit.is_last))
    resumed.load_state_dict(weights)
    again = make(saved.groups(resumed))
    if saved.is_named:  # not strict, since parameters that start anew have no state
        set_optimizer_state_dict(resumed, again, state, options=StateDictOptions(strict=False))
    else:
        again.load_state_dict(state)
    train(reference, live, 2)
    train(resumed, again, 2)
    for (name, one), other in zip(resumed.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(one, other), name
    return report


IS_THOROUGH = "CKPTFIX_THOROUGH" in os.environ
"""Whether all combinations are tried, and 10,000 random runs; it takes a quarter of an hour."""

GRID = [
    (saved, make, edit)
    for (i, saved), (j, make), (k, edit) in itertools.product(enumerate(SAVED), enumerate(OPTIMIZERS), enumerate(EDITS))
    if not (saved == "flat" and make == "adafactor")
    if IS_THOROUGH or (i + k) % len(OPTIMIZERS) == j  # any two of the three are together once
]


@pytest.mark.parametrize(("saved", "make", "edit"), GRID)
def test_a_training_continues(tmp_path, saved, make, edit):
    resume(tmp_path, SAVED[saved], OPTIMIZERS[make], edit)


# Any model, any edits
# ----------------------------------------------------------------------------------------------------------------------

SIZES = [(2, 3), (3, 2), (2, 2), (2,), (3,)]


def random_edits(draw: random.Random, old: dict[str, Shapes], may_move: bool) -> tuple[list[str], Any, dict[str, Any]]:
    """Return the modules of the result in order, the parameters that they are made of, and the settings of a repair.

    ``made`` describes each module of the result by name: its shapes, and how its tensors follow from the old ones."""
    order, made = list(old), {name: (shapes, "same", name) for name, shapes in old.items()}
    rules: list[MapRule] = []
    renamed: list[str] = []
    for name in draw.sample(list(old), draw.randint(0, min(3, len(old)))):
        kind, at, shapes = (
            draw.choice(("drop", "rename", "fill", "reshape", "turn", "split", "move", "add")),
            order.index(name),
            old[name],
        )
        new = f"new{name}"
        if kind == "drop" and len(order) > 1:
            del made[order.pop(at)]
        elif kind == "rename":
            order[at] = new
            made[new] = (*made.pop(name)[:2], name)
            renamed.append(f"{name}.*={new}.*")
        elif kind == "fill":
            made[name] = ({leaf: (*shape[:-1], shape[-1] + 4) for leaf, shape in shapes.items()}, "new", name)
        elif kind == "reshape" and len(shapes["weight"]) == 2:
            made[name] = ({**shapes, "weight": (*shapes["weight"], 1)}, "reshape", name)
        elif kind == "turn" and len(shapes["weight"]) == 2:
            order[at] = new
            made[new] = ({**shapes, "weight": shapes["weight"][::-1]}, "turn", name)
            del made[name]
            rules.append(MapRule(f"{name}.weight", f"{new}.weight", ("transpose",)))
            rules += [MapRule(f"{name}.bias", f"{new}.bias")] * ("bias" in shapes)
        elif kind == "split" and shapes["weight"][0] == 2:
            order[at : at + 1] = [f"{new}.a", f"{new}.b"]
            del made[name]
            half = {leaf: (1, *shape[1:]) for leaf, shape in shapes.items()}
            made |= {f"{new}.a": (half, "first", name), f"{new}.b": (half, "second", name)}
            rules += [MapRule(f"{name}.{leaf}", f"{new}.{{a,b}}.{leaf}", ("split 2",)) for leaf in shapes]
        elif kind == "move" and may_move:
            order.insert(draw.randrange(len(order)), order.pop(at))
        elif kind == "add":
            order.insert(draw.randint(0, len(order)), f"more{name}")
            made[f"more{name}"] = ({"weight": (5, 4)}, "new", name)
    asked: dict[str, Any] = {"rename": tuple(renamed), **FILL}
    return order, made, {**asked, "rename_map": RenameMap(tuple(rules), "map.json")} if rules else asked


FOLLOWS: dict[str, Callable[[torch.Tensor, str], torch.Tensor]] = {
    "same": lambda old, leaf: old,
    "reshape": lambda old, leaf: old[..., None] if leaf == "weight" else old,
    "turn": lambda old, leaf: old.t() if leaf == "weight" else old,
    "first": lambda old, leaf: old[:1],
    "second": lambda old, leaf: old[1:],
}


Named = list[tuple[str, nn.Parameter]]


def by_part_in_reverse(parameters: Named) -> Named:
    parts: dict[str, Named] = {}
    for name, one in parameters:
        parts.setdefault(name.partition(".")[0], []).append((name, one))
    return list(itertools.chain.from_iterable(reversed(parts.values())))


def numbers_of(name: str) -> list[Any]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


ORDERS: dict[str, Callable[[Named], Named]] = {
    "of the model": list,
    "by name": lambda parameters: sorted(parameters, key=lambda pair: pair[0]),
    "by name and number": lambda parameters: sorted(parameters, key=lambda pair: numbers_of(pair[0])),
}
RARE_ORDERS: dict[str, Callable[[Named], Named]] = {
    "in reverse": lambda parameters: parameters[::-1],
    "parts in reverse": by_part_in_reverse,
    "biases last": lambda parameters: sorted(parameters, key=lambda pair: pair[0].endswith("bias")),
}
GROUPS: dict[str, Callable[[str, torch.Tensor], Any]] = {
    "one group": lambda name, one: 0,
    "vectors": lambda name, one: one.ndim < 2,
    "biases": lambda name, one: name.endswith("bias"),
    "all but the head": lambda name, one: not name.removeprefix("new").startswith("head"),
}


def by_script(order: Callable[[Named], Named], label: Callable[[str, torch.Tensor], Any]) -> Saved:
    """Return the groups of a script of one's own: two, of which one may be empty, or a single one."""

    def groups(model: nn.Module) -> Any:
        parts: dict[Any, list[nn.Parameter]] = {} if label("", torch.zeros(1)) == 0 else {False: [], True: []}
        for name, one in order(list(model.named_parameters())):
            parts.setdefault(label(name, one), []).append(one)
        return [{"params": members} for members in parts.values()]

    return Saved(groups)


def scripts(orders: Mapping[str, Callable[[Named], Named]]) -> dict[str, Saved]:
    pairs = itertools.product(orders.items(), GROUPS.items())
    return {f"{name}, {what}": by_script(order, label) for (name, order), (what, label) in pairs}


def follow_at_random(
    folder: Path, draw: random.Random, ways: Mapping[str, Saved], may_move: bool = True
) -> tuple[str, ckptfix.Report]:
    """Make a run, edit it and load the result; each element of a moment shows where it came from."""
    names = [draw.choice(("ln", "fc", "layers.", "norm", "head")) + str(n) for n in range(draw.randint(2, 6))]
    old: dict[str, Shapes] = {}
    for name in names:
        shape = draw.choice(SIZES[3:] if name[:2] in ("ln", "no") else SIZES)
        old[name] = {"weight": shape, **({"bias": shape[:1]} if draw.random() < 0.6 else {})}
    way = draw.choice(list(ways))
    order, made, asked = random_edits(draw, old, may_move and "safetensors" not in way)
    model = built({f"{name}.{leaf}": shape for name in names for leaf, shape in old[name].items()})
    wanted = {f"{name}.{leaf}": shape for name in order for leaf, shape in made[name][0].items()}
    resumed = built(wanted)
    places = {key.rpartition(".")[0]: at for at, (key, _) in enumerate(model.named_parameters())}
    origins = [made[key.rpartition(".")[0]] for key, _ in resumed.named_parameters()]
    kept = [places[origin] for _, how, origin in origins if how != "new"]
    if "safetensors" in way and kept != sorted(kept):
        way = "plain"  # a list of layers moved with its first one, of which a sorted file shows nothing
    if way in ("param_names", "fqn", "flat") and any(
        isinstance(group, dict) and not group["params"] for one in (model, resumed) for group in ways[way].groups(one)
    ):
        way = "plain"  # torch names no parameters of empty groups
    if way == "head-and-rest":
        groups, made_of_result = SAVED[way].groups(model), SAVED[way].groups(resumed)
        if len(made_of_result) > len(groups) or all(len(group["params"]) == 1 for group in groups):
            way = "plain"  # the file shows nothing of such a group, or looks like one of detectron2
    saved = ways[way]
    optimizer = torch.optim.AdamW(saved.groups(model))
    marks: dict[str, torch.Tensor] = {}
    for number, (name, one) in enumerate(model.named_parameters()):
        marks[name] = (1000.0 * number + torch.arange(one.numel())).view(one.shape)
        optimizer.state[one] = {
            "exp_avg": marks[name].clone(), "exp_avg_sq": marks[name].square(), "step": torch.tensor(2.0)
        }  # fmt: skip
    source = saved.save(folder, model, optimizer)
    (folder / "out").mkdir()
    output = folder / "out" / source.name
    report = ckptfix.repair(source, built(wanted), output=output, allow_untrained=True, **asked).report
    if any(finding.fix is None for finding in report.findings if finding.code == "OPT101"):
        return "refused", report
    if report.is_open:
        return "other defects", report  # such as layers that --adapt would leave out
    weights, state = saved.load(output)
    resumed.load_state_dict(weights)
    again = torch.optim.AdamW(saved.groups(resumed))
    if saved.is_named:
        set_optimizer_state_dict(resumed, again, state, options=StateDictOptions(strict=False))
    elif sizes(again.state_dict()) != sizes(state):
        assert "if your script uses other groups" in str(report)
        return "other groups", report
    else:
        again.load_state_dict(state)
    for key, one in resumed.named_parameters():
        name, _, leaf = key.rpartition(".")
        _, how, origin = made[name]
        moment = again.state[one].get("exp_avg", torch.zeros(1))
        if moment.any() if how == "new" else not torch.equal(moment, FOLLOWS[how](marks[f"{origin}.{leaf}"], leaf)):
            return "wrong", report
    return "followed" if report.edits else "nothing to do", report


def sizes(state: Mapping[str, Any]) -> list[int]:
    """Return how many parameters each group has: torch refuses other sizes."""
    return [len(group["params"]) for group in state["param_groups"]]


def random_runs(folder: Path, ways: Mapping[str, Saved], may_move: bool = True) -> Counter[str]:
    """Count the outcomes of random runs of these scripts. One that gives a moment to a wrong parameter fails, unless
    the finding asks for an unsafe fix and names an order, of few scripts, that would fit as well."""
    outcomes: Counter[str] = Counter()

    @settings(max_examples=10_000 if IS_THOROUGH else 150, deadline=None, database=None, derandomize=True)
    @given(st.integers(0, 2**32))
    def run(seed: int) -> None:
        made = folder / "run"
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        outcome, report = follow_at_random(made, random.Random(seed), ways, may_move)
        if outcome == "wrong":
            (finding,) = (finding for finding in report.applied if finding.code == "OPT101")
            assert finding.fix is not None
            assert finding.fix.applicability is Applicability.UNSAFE
            assert finding.evidence["would fit as well"][0] in finding.message
        outcomes[outcome] += 1

    run()
    return outcomes


@pytest.mark.parametrize("ways", [SAVED, scripts(ORDERS)], ids=["trainers", "scripts"])
def test_moments_stay_with_their_parameters(tmp_path, ways):
    outcomes = random_runs(tmp_path, ways)
    assert not outcomes["wrong"]
    assert outcomes["followed"] > outcomes["refused"] > 0, outcomes


def test_a_rare_order_that_fits_as_well_is_named(tmp_path):
    """In another order of the model it may be that which the model has now."""
    outcomes = random_runs(tmp_path, scripts(RARE_ORDERS), may_move=False)
    assert min(outcomes["followed"], outcomes["refused"], outcomes["wrong"]) > 0, outcomes


# A live optimizer gets its state from a file
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


def test_an_optimizer_that_fits_is_loaded_unchanged(tmp_path: Path) -> None:
    model = Layers("a", "b")
    optimizer = adamw(model)
    trained_file(tmp_path / "run.pth", model, optimizer, "module.")
    new = Layers("a", "b")
    own = torch.optim.AdamW(new.parameters(), lr=1.0)
    assert ckptfix.load(new, tmp_path / "run.pth", optimizer=own).exit_code == 0
    assert moments_of(new, own) == moments_of(model, optimizer)
    assert own.param_groups[0]["lr"] == 0.25


def test_a_container_in_memory_is_like_one_in_a_file(tmp_path: Path) -> None:
    """``torch.load`` has read it already; a random state next to the weights does not make it a state_dict."""
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
        with pytest.raises(
            TargetError, match=r"only the order of model\.parameters\(\) identifies .* unsafe_fixes=True"
        ):
            ckptfix.load(new, tmp_path / "run.pth", optimizer=own)
        assert not own.state
    report = ckptfix.load(new, tmp_path / "run.pth", optimizer=own, unsafe_fixes=not names)
    assert report.exit_code == 0
    assert moments_of(new, own) == moments_of(model, optimizer)
    assert [group["lr"] for group in own.param_groups] == [0.001, 0.5], (
        "what tells the script's groups apart is its own"
    )
    assert report.remarks[-1] == "the optimizer's groups differ from the saved ones: lr stay as your script set them"


def test_groups_of_the_live_optimizer_name_the_positions(tmp_path: Path) -> None:
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
    with pytest.raises(ckptfix.UsageError, match="from outside the model"):
        ckptfix.load(new, tmp_path / "run.pth", optimizer=other)
    own.param_groups.reverse()
    with pytest.raises(TargetError, match="has as many parameters as the model in optimizer, but in no known"):
        ckptfix.load(new, tmp_path / "run.pth", optimizer=own)


def test_the_optimizer_is_unchanged_if_a_hook_of_the_model_fails(tmp_path: Path) -> None:
    class Stubborn(Layers):
        def _load_from_state_dict(self, *given: Any) -> None:
            raise RuntimeError("no")

    model = Layers("a", "b")
    trained_file(tmp_path / "run.pth", model, adamw(model))
    new = Stubborn("a", "b")
    own = torch.optim.AdamW(new.parameters(), lr=1.0)
    with pytest.raises(TargetError, match="torch fails to load it into Stubborn"):
        ckptfix.load(new, tmp_path / "run.pth", optimizer=own)
    assert (own.state, own.param_groups[0]["lr"]) == ({}, 1.0)


def test_ambiguous_groups_are_reported_and_load_into_the_live_optimizer(tmp_path: Path) -> None:
    """Vectors and matrices were two groups; nothing shows whether a kernel belongs to the second or to a third."""

    def by_axes(model: nn.Module) -> torch.optim.Optimizer:
        groups: dict[int, list[nn.Parameter]] = {}
        for parameter in model.parameters():
            groups.setdefault(parameter.ndim, []).append(parameter)
        return torch.optim.AdamW({"params": each} for each in groups.values())

    shapes = {"a.weight": (3, 2), "a.bias": (3,), "b.weight": (4, 3), "b.bias": (4,)}
    old, new = built(shapes), built({**shapes, "newc.weight": (2, 4, 3)})
    saved, live = by_axes(old), by_axes(new)
    train(old, saved, 0)
    path, output = tmp_path / "last.pth", tmp_path / "out.pth"
    trained_file(path, old, saved)
    settings: dict[str, Any] = {"fill": "target", "unsafe_fixes": True, "allow_untrained": True}
    report = ckptfix.repair(path, new, output=output, **settings).report
    with pytest.raises(ValueError, match="different number of parameter groups"):
        live.load_state_dict(torch.load(output, weights_only=True)["optimizer"])
    line = str(report).splitlines()[-1]
    printed = f"ckptfix.load(model, {str(path)!r}, optimizer=optimizer)"
    made = "2 groups of 3, 2 parameters, identified by Hugging Face Trainer"
    assert line == f"  its optimizer: {made}; if your script uses other groups: {printed}"
    ckptfix.load(new, path, optimizer=live, **settings)
    assert {key: kept for key, kept in moments_of(new, live).items() if kept} == moments_of(old, saved)


class Alike(nn.Module):
    """Layers of equal shapes: only the order shows whose state is whose."""

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
def test_the_live_optimizer_needs_no_recipe(tmp_path: Path, groups: Any) -> None:
    model, new = Alike("abcd"), Alike("abcd")
    optimizer, own = (torch.optim.Adam(groups(one)) for one in (model, new))
    trained_file(tmp_path / "run.pth", model, optimizer, "module.")
    assert ckptfix.load(new, tmp_path / "run.pth", optimizer=own).exit_code == 0
    assert moments_of(new, own) == moments_of(model, optimizer) != {}
    # in another order of the model, nothing shows whose the moments are
    other = Alike("acbd")
    before = {key: value.clone() for key, value in other.state_dict().items()}
    with pytest.raises(TargetError, match=r"ways to identify the parameters of optimizer fit, and they differ"):
        ckptfix.load(other, tmp_path / "run.pth", optimizer=torch.optim.Adam(groups(other)), unsafe_fixes=True)
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())


def test_one_of_two_optimizers_is_chosen_by_name(tmp_path: Path) -> None:
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
    with pytest.raises(TargetError, match="2 optimizers fit, first, second"):
        ckptfix.load(new, tmp_path / "gan.pth", optimizer=own, weights="D")


def test_new_parameters_have_no_state_and_their_own_group(tmp_path: Path) -> None:
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
        pytest.param({}, "has no optimizer with the model's parameters", id="none"),
        pytest.param(
            {"optimizer": {"state": {}, "param_groups": [{"params": [0]}]}}, "has no optimizer with", id="of another"
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
    with pytest.raises(ckptfix.UsageError, match="from outside the model"):
        ckptfix.load(model, tmp_path / "run.pth", optimizer=adamw(Layers("a", "b")))
    with pytest.raises(ckptfix.UsageError, match="assign=True"):
        ckptfix.load(model, tmp_path / "run.pth", optimizer=adamw(model), assign=True)


def test_a_state_that_the_optimizer_refuses_changes_neither(tmp_path: Path) -> None:
    model, new = nn.Linear(3, 2), nn.Linear(3, 2)
    trained_file(tmp_path / "run.pth", model, torch.optim.AdamW(model.parameters()))
    saved = torch.load(tmp_path / "run.pth")
    for row in saved["optimizer"]["state"].values():
        del row["step"]
    torch.save(saved, tmp_path / "run.pth")
    optimizer = torch.optim.AdamW(new.parameters(), lr=0.5)
    before = new.weight.clone()
    with pytest.raises(TargetError, match=r"AdamW fails to load its state .KeyError: 'step'"):
        ckptfix.load(new, tmp_path / "run.pth", optimizer=optimizer)
    assert torch.equal(new.weight, before)
    assert (optimizer.param_groups[0]["lr"], len(optimizer.state)) == (0.5, 0)


@pytest.mark.parametrize(
    ("make", "asked", "error"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {}, "is not that of SGD: its groups have no dampening"),
        (lambda p: torch.optim.RMSprop(p), {}, "is not that of RMSprop: its groups have no alpha"),
        (lambda p: torch.optim.AdamW, {}, "pass the torch.optim.Optimizer itself"),
        (lambda p: [torch.optim.AdamW(p)], {}, "pass the torch.optim.Optimizer itself"),
        (lambda p: torch.optim.AdamW(p).state_dict(), {}, "pass the torch.optim.Optimizer itself"),
        (torch.optim.AdamW, {"drop_optimizer": True}, "drops the state that the given optimizer should load"),
        (lambda p: torch.optim.AdamW([nn.Parameter(torch.zeros(2))]), {}, "from outside the model"),
        (torch.optim.Adam, {}, None),
    ],
    ids=["sgd", "rmsprop", "class", "list", "state_dict", "dropped", "another model", "adam"],
)
def test_other_optimizers_than_the_saved_one(tmp_path: Path, make: Any, asked: Any, error: str | None) -> None:
    model, new = nn.Linear(3, 2), nn.Linear(3, 2)
    trained_file(tmp_path / "run.pth", model, torch.optim.AdamW(model.parameters()))
    before = new.weight.clone()
    with pytest.raises((UsageError, TargetError), match=error) if error else contextlib.nullcontext():
        ckptfix.load(new, tmp_path / "run.pth", optimizer=make(list(new.parameters())), **asked)
    assert torch.equal(new.weight, before if error else model.weight)
