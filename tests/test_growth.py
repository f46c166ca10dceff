"""The work grows as the keys do, and no faster: lines that are run are counted, since a clock is never sure."""

import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptfix

PACKAGE = str(Path(ckptfix.__file__).parent)
SOME = 8
"""Layers of the smallest file, of six keys each; the larger ones have twice and four times as many."""

SLACK = 1.1
"""How much more than twice the lines twice the keys may take, for tables that grow by doubling."""


def state_dict(layers: int, prefix: str) -> OrderedDict[str, torch.Tensor]:
    """Keys that give the rules something to do: a wrapper, counters that are missing, ties, running statistics."""
    made: OrderedDict[str, torch.Tensor] = OrderedDict()
    for number in range(layers):
        layer = f"{prefix}layers.{number // 8}.{number % 8}"
        made[f"{layer}.conv.weight"] = torch.ones(2, 2)
        made[f"{layer}.tied.weight"] = made[f"{layer}.conv.weight"]
        for name in ("weight", "bias", "running_mean", "running_var"):
            made[f"{layer}.bn.{name}"] = torch.ones(2)
    return made


def save_safetensors(tensors: OrderedDict[str, torch.Tensor], path: Path) -> None:
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, path)


def save_pickle(tensors: OrderedDict[str, torch.Tensor], path: Path) -> None:
    path.write_bytes(pickle.dumps(dict(tensors)))


SAVERS: dict[str, Callable[[OrderedDict[str, torch.Tensor], Path], None]] = {
    "zip": lambda tensors, path: torch.save(tensors, path),
    "legacy": lambda tensors, path: torch.save(tensors, path, _use_new_zipfile_serialization=False),
    "safetensors": save_safetensors,
    "pickle": save_pickle,
}


def lines_run(work: Callable[[], Any]) -> int:
    """How many lines of the package a piece of work runs; each turn of a loop is one, in a comprehension too."""
    count = 0

    def of_line(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return of_line

    def of_call(frame: FrameType, _event: str, _argument: object) -> Any:
        return of_line if frame.f_code.co_filename.startswith(PACKAGE) else None

    before = sys.gettrace()
    sys.settrace(of_call)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def assert_linear(work: Callable[[int], Callable[[], Any]]) -> None:
    """That the step from twice the layers to four times as many adds twice what the step from one to two adds."""
    work(SOME)()  # what is imported and kept for good
    few, more, many = (lines_run(work(SOME * factor)) for factor in (1, 2, 4))
    assert few < more < many
    assert many - more <= SLACK * 2 * (more - few)


def test_a_nested_loop_would_be_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(f"{__name__}.PACKAGE", str(Path(__file__).parent))

    def work(layers: int) -> Callable[[], Any]:
        return lambda: [0 for _ in range(layers) for _ in range(layers)]

    with pytest.raises(AssertionError):
        assert_linear(work)


@pytest.mark.parametrize("form", SAVERS)
def test_a_check_is_linear(form: str, tmp_path: Path):
    for factor in (1, 2, 4):
        SAVERS[form](state_dict(SOME * factor, "module."), tmp_path / f"{SOME * factor}")

    def work(layers: int) -> Callable[[], Any]:
        return lambda: ckptfix.check(tmp_path / f"{layers}", values=False)

    assert_linear(work)


@pytest.mark.parametrize("prefix", ["module.", "backbone.", "_orig_mod.", ""])
def test_a_check_against_another_file_is_linear(prefix: str, tmp_path: Path):
    """All rules that need a target, with keys that fit, that fit under another name, and that are missing."""
    for factor in (1, 2, 4):
        layers = SOME * factor
        save_safetensors(state_dict(layers, prefix), tmp_path / f"{layers}")
        like = state_dict(layers, "")
        for number in range(layers):
            like[f"layers.{number // 8}.{number % 8}.bn.num_batches_tracked"] = torch.tensor(0)
            like[f"head.{number}.weight"] = torch.ones(3)
        torch.save(like, tmp_path / f"{layers}.like")

    def work(layers: int) -> Callable[[], Any]:
        return lambda: ckptfix.check(tmp_path / f"{layers}", like=tmp_path / f"{layers}.like", values=False)

    assert_linear(work)


@pytest.mark.parametrize("target", ["pth", "safetensors"])
def test_a_repair_is_linear(target: str, tmp_path: Path):
    for factor in (1, 2, 4):
        torch.save(state_dict(SOME * factor, "module."), tmp_path / f"{SOME * factor}")

    def work(layers: int) -> Callable[[], Any]:
        output = tmp_path / f"{layers}.{target}"
        return lambda: ckptfix.repair(tmp_path / f"{layers}", output=output, format=target, values=False, force=True)

    assert_linear(work)


def test_a_check_of_values_is_linear(tmp_path: Path):
    for factor in (1, 2, 4):
        torch.save(state_dict(SOME * factor, ""), tmp_path / f"{SOME * factor}")

    def work(layers: int) -> Callable[[], Any]:
        return lambda: ckptfix.check(tmp_path / f"{layers}")

    assert_linear(work)


DEFECTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zero": torch.zeros_like,
    "decayed": lambda tensor: tensor * 3e-9,
    "not finite": lambda tensor: tensor / 0,
    "subnormal": lambda tensor: torch.full_like(tensor, 1e-42),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_check_of_values_that_are_all_broken_is_linear(defect: str):
    def work(layers: int) -> Callable[[], Any]:
        torch.manual_seed(0)
        state = {f"sound.{number}.weight": torch.randn(8, 8) for number in range(3 * layers)}
        for number in range(4 * layers):
            state[f"layers.{number}.conv.weight"] = DEFECTS[defect](torch.randn(8, 8))
            state[f"layers.{number}.bn.weight"] = torch.ones(8)
        return lambda: ckptfix.check(state)

    assert work(SOME)().remaining
    assert_linear(work)
