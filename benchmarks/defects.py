"""Plants defects into small trained nets, and says which keys have them and which rules should report them.

Every defect is planted into each of the architectures that can have it, with ``SEEDS`` seeds. Decayed layers come from
real training: a layer whose output does not reach the loss gets gradients of zero, and the optimizer shrinks it.
"""

from __future__ import annotations

import copy
import itertools
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.small_nets import ARCHITECTURES, WITH_NORMS, Make, Net, fresh, train_spare_layers, trained

SEEDS = 5

State = Mapping[str, torch.Tensor]

_FOLDER = tempfile.TemporaryDirectory()


@dataclass(frozen=True)
class Defect:
    """A defect in one file, how strong it is, and the keys that have it.

    ``checked`` are the arguments of ``ckptfix.check``; ``companions`` are keys that may be named too.
    """

    name: str
    strength: str
    keys: set[str]
    codes: tuple[str, ...]
    checked: tuple[Any, ...]
    companions: set[str] = field(default_factory=set)
    settings: Mapping[str, Any] = field(default_factory=dict)


def planted_defects(seed: int) -> Iterator[Defect]:
    """Yield every defect of the tables, and every net without a defect."""
    for kind in ARCHITECTURES:
        yield from _decayed(kind, seed)
        state = trained(kind, seed, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), 30)[0].state_dict()
        yield Defect("none", "trained 30 steps", set(), (), (state,))
        yield from _overflow(state)
        yield from _zeroed(state)
        yield from _scales(state)
        yield from _twins(state)
        if kind in WITH_NORMS:
            yield from _statistics(state)
    yield from _non_finite(trained(ARCHITECTURES[seed % 4], seed, torch.optim.Adam, 5)[0].state_dict())


_RUNS: tuple[tuple[str, Make, tuple[int, ...]], ...] = (
    (
        "SGD, momentum 0.9",
        lambda p: torch.optim.SGD(p, 0.05, 0.9, weight_decay=2e-2),
        (45, 120, 350, 560, 850, 1200, 2000),
    ),
    ("SGD", lambda p: torch.optim.SGD(p, 0.05, weight_decay=0.2), (45, 120, 350, 560, 850, 1200, 2000)),
    ("AdamW", lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=1.0), (45, 120, 350, 560, 850, 1200, 2000)),
    ("Adam, L2", lambda p: torch.optim.Adam(p, 1e-3, weight_decay=1e-2), (30, 100, 200, 400, 2000)),
)
"""Optimizers with a learning rate at which 2000 steps have the effect of a long training."""

SHARES = (0.5, 0.1, 1e-2, 1e-3, 1e-4, 1e-6)
"""Bounds of the strengths of decay: the share of the initial RMS that is left."""


def _decayed(kind: type[Net], seed: int) -> Iterator[Defect]:
    start = fresh(kind, seed).state_dict()
    matrices = {key for key, value in start.items() if key.startswith("spare.") and value.ndim > 1}
    companions = {key for key in start if key.startswith("spare.")} - matrices
    for name, make, all_steps in _RUNS:
        net, optimizer = trained(kind, seed, make, 20)
        done = 20
        for steps in all_steps:
            train_spare_layers(net, optimizer, steps - done)
            done = steps
            state = net.state_dict()
            file = Path(_FOLDER.name) / f"{kind.__name__}-{seed}-{name}-{steps}.pth"
            bare = file.with_suffix(".bare.pth")
            torch.save({"model": state}, bare)
            torch.save({"model": state, "optimizer": optimizer.state_dict(), "step": steps}, file)
            for keys, strength in _by_strength(start, state, matrices):
                others = companions | (matrices - keys)
                yield Defect(f"decay, {name}", strength, keys, ("VAL201", "VAL202"), (bare,), others)
                with_optimizer = f"decay, {name}, with the optimizer's state"
                yield Defect(with_optimizer, strength, keys, ("VAL201", "VAL202"), (file,), others)


def _by_strength(start: State, state: State, matrices: set[str]) -> Iterator[tuple[set[str], str]]:
    """Yield the matrices grouped by how much of them is left."""
    left = {key: float(state[key].norm() / start[key].norm()) for key in matrices}
    borders = (math.inf, *SHARES, 0.0)
    for upper, lower in itertools.pairwise(borders):
        keys = {key for key, share in left.items() if lower <= share < upper}
        if keys:
            yield keys, _strength(upper, lower)


def _strength(upper: float, lower: float) -> str:
    if upper > 1:
        return f"more than {lower:g} left"
    return f"{lower:g} to {upper:g} left" if lower else f"less than {upper:g} left"


def _changed(state: State, **changes: torch.Tensor) -> dict[str, torch.Tensor]:
    changed = {key: value.clone() for key, value in state.items()}
    return {**changed, **{key.replace("__", "."): value for key, value in changes.items()}}


def _non_finite(state: State) -> Iterator[Defect]:
    for value in (math.nan, math.inf, -math.inf):
        large = torch.randn(10**7) * 0.02
        large[int(torch.randint(10**7, ()))] = value
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            cast = {key: item.to(dtype) if item.is_floating_point() else item for key, item in state.items()}
            cast["large.weight"] = large.view(2500, 4000).to(dtype)
            strength = f"{value}, {str(dtype).removeprefix('torch.')}"
            yield Defect("one non-finite value in 10⁷", strength, {"large.weight"}, ("VAL101",), (cast,))


def _overflow(state: State) -> Iterator[Defect]:
    weight = state["hidden.weight"]
    for dtype, over, fits in (
        ("float16", 65520.0, 65519.0),
        ("bfloat16", 3.3962e38, 3.39e38),
        ("float8_e4m3fn", 465.0, 464.0),
    ):
        for value, keys, told in ((over, {"hidden.weight"}, "overflows"), (fits, set(), "just fits")):
            large = weight.clone()
            large[3, 7] = value
            changed = _changed(state, hidden__weight=large)
            yield Defect(f"a value that {told} in a cast", dtype, keys, ("VAL102",), (changed,),
                         settings={"dtype": dtype, "select": ("VAL102",)})  # fmt: skip
    overflowed = _changed(state, hidden__weight=(weight * 3e6).half().float())
    yield Defect("overflowed in a cast, cast back", "float16", {"hidden.weight"}, ("VAL101", "VAL206"), (overflowed,))
    tiny = _changed(state, hidden__weight=weight * 1e-8)
    yield Defect("a matrix that a cast would flush", "float16", {"hidden.weight"}, ("VAL102",), (tiny,),
                 settings={"dtype": "float16", "select": ("VAL102",)})  # fmt: skip
    flushed = _changed(state, hidden__weight=(weight * 1e-8).half().float())
    yield Defect("flushed in a cast, cast back", "float16", {"hidden.weight"}, ("VAL202",), (flushed,))


def _zeroed(state: State) -> Iterator[Defect]:
    inner = next(key for key, value in state.items() if key.startswith(("blocks.", "cell.")) and value.ndim > 1)
    matrices = {key for key, value in state.items() if value.ndim > 1}
    for strength, keys in (
        ("a linear layer", {"hidden.weight"}),
        ("a layer of a block", {inner}),
        ("the last layer", {"head.weight"}),
        ("all matrices", matrices),
    ):
        changes = {key.replace(".", "__"): torch.zeros_like(state[key]) for key in keys}
        yield Defect("zeroed", strength, keys, ("VAL202",), (_changed(state, **changes),))
    constant = _changed(state, hidden__weight=torch.full_like(state["hidden.weight"], 0.01))
    yield Defect("one value throughout", "0.01", {"hidden.weight"}, ("VAL205",), (constant,))


def _statistics(state: State) -> Iterator[Defect]:
    names = ("bn.running_mean", "bn.running_var")
    mean, variance = (state[name].clone() for name in names)
    for name in names:
        bad = state[name].clone()
        bad[5] = math.nan
        yield Defect(
            "NaN in a statistic", name.partition(".")[2], {name}, ("VAL101",), (_changed(state, **{name: bad}),)
        )
    swapped = _changed(state, bn__running_mean=variance, bn__running_var=mean)
    yield Defect("swapped statistics", "mean and variance of a norm", {names[1]}, ("VAL103",), (swapped,))
    other = next(key for key in state if key.startswith("blocks.") and key.endswith("running_var")).removesuffix("var")
    crossed = _changed(state)
    for name in ("mean", "var"):
        one, two = f"{other}{name}", f"bn.running_{name}"
        crossed[one], crossed[two] = state[two].clone(), state[one].clone()
    yield Defect("swapped statistics", "of two norms", {f"{other}var", names[1]}, ("VAL103",), (crossed,))
    negative = _changed(state, bn__running_var=variance.index_fill(0, torch.tensor([4]), -0.1))
    yield Defect("negative variance", "1 of 48 channels", {names[1]}, ("VAL103",), (negative,))
    zero = _changed(state, bn__running_var=torch.zeros_like(variance))
    yield Defect("variance of zero", "all channels", {names[1]}, ("VAL103",), (zero,))
    unused = _changed(state, bn__running_var=torch.ones_like(variance), bn__running_mean=torch.zeros_like(mean))
    yield Defect("fresh statistics", "30 batches counted", {names[1]}, ("VAL103",), (unused,))


def _scales(state: State) -> Iterator[Defect]:
    for factor in (1e2, 1e3, 1e4, 1e6):
        larger = _changed(state, hidden__weight=state["hidden.weight"] * factor)
        yield Defect("a layer too large", f"{factor:g} times", {"hidden.weight"}, ("VAL206",), (larger,))
    for factor in (1e-38, 1e-40):
        smaller = _changed(state, hidden__weight=state["hidden.weight"] * factor)
        yield Defect("subnormal", f"{factor:g} times", {"hidden.weight"}, ("VAL203",), (smaller,))


def _twins(state: State) -> Iterator[Defect]:
    one_nan = state["hidden.weight"].clone()
    one_nan[0, 0] = math.nan
    all_nan = {key: value * math.nan if value.is_floating_point() else value for key, value in state.items()}
    floats = {key for key, value in state.items() if value.is_floating_point()}
    for strength, broken, keys in (
        ("one NaN in the raw set", _changed(state, hidden__weight=one_nan), {"hidden.weight"}),
        ("the raw set is NaN", all_nan, floats),
        ("a zero layer in the raw set", _changed(state, hidden__weight=torch.zeros_like(one_nan)), {"hidden.weight"}),
    ):
        for is_raw in (True, False):
            sets = [copy.deepcopy(dict(broken)), copy.deepcopy(dict(state))]
            raw, average = sets if is_raw else sets[::-1]
            told = strength if is_raw else strength.replace("raw set", "average")
            file = Path(_FOLDER.name) / f"{abs(hash((told, id(state))))}.pth"
            torch.save({"state_dict": raw, "state_dict_ema": average}, file)
            yield Defect("one of two sets is broken", told, keys, ("VAL301",), (file,))
