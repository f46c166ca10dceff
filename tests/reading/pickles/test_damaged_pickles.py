"""Damaged plain pickles: what comes before the damage is read, and no wrong byte goes unreported."""

import pickle
import pickletools
import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.facts import Kind
from ckptfix.reading.torch_files.torch_legacy import first_break
from tests.checks import bytes_of

KEYS = [f"layer.{index}.weight" for index in range(6)]
TENSORS = {key: torch.randn(9, 11, generator=torch.Generator().manual_seed(index)) for index, key in enumerate(KEYS)}
ARRAYS = {key: tensor.numpy() for key, tensor in TENSORS.items()}
with patch.object(torch.UntypedStorage, "_cdata", 94714342941888, create=True):  # the address is a storage's name
    FORMS: dict[str, bytes] = {
        **{f"numpy, protocol {protocol}": pickle.dumps(ARRAYS, protocol) for protocol in range(6)},
        **{f"torch, protocol {protocol}": pickle.dumps(TENSORS, protocol) for protocol in range(6)},
        "nested": pickle.dumps({"epoch": 3, "model": ARRAYS, "log": [0.5] * 20}, 4),
        "OrderedDict": pickle.dumps(OrderedDict(ARRAYS), 2),
    }
LARGE = {key: np.full((200, 100), index, "f4") for index, key in enumerate(KEYS)}  # beyond the frames of protocol 4


def damaged(data: bytes, kind: str, place: int, count: int) -> bytes:
    if kind == "lost":
        return data[:place] + data[place + count :]
    if kind == "doubled":
        return data[: place + count] + data[place:]
    return data[:place] + random.Random(place).randbytes(count) + data[place:]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("optimized", [False, True])
def test_noop(protocol: int, optimized: bool, tmp_path: Path) -> None:
    for value in (ARRAYS, TENSORS, LARGE, nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))):
        data = pickle.dumps(value, protocol)
        data = pickletools.optimize(data) if optimized else data
        path = tmp_path / "whole.pkl"
        path.write_bytes(data)
        checkpoint = ckptfix.open_checkpoint(path)
        assert checkpoint.damage == ()
        assert first_break(data) is None
        members = value.state_dict() if isinstance(value, nn.Module) else value
        for key in checkpoint.specs:
            assert bytes_of(checkpoint.read(key)) == bytes_of(torch.as_tensor(members[key]))


@pytest.mark.parametrize("kind", ["lost", "doubled", "inserted"])
@pytest.mark.parametrize("form", FORMS)
def test_what_comes_before_the_damage_is_read(form: str, kind: str, tmp_path: Path) -> None:
    data, path = FORMS[form], tmp_path / "damaged.pkl"
    for count in (1, 2, 64, 300):
        path.write_bytes(damaged(data, kind, data.index(KEYS[2].encode()) + 180, count))
        checkpoint = ckptfix.open_checkpoint(path, salvage=True)
        named = any(mark.kind is Kind.UNNAMED_LOSS for mark in checkpoint.remarks)
        assert named or not set(KEYS) - set(checkpoint.specs), count
        assert set(KEYS[:2]) <= set(checkpoint.specs) <= set(KEYS), count
        for key in checkpoint.specs:
            assert bytes_of(checkpoint.read(key)) == bytes_of(TENSORS[key]), (key, count)


@pytest.mark.parametrize("around", [lambda model: model, lambda model: {"epoch": 3, "model": model}])
@pytest.mark.parametrize("layers", [1, 2])
def test_the_layers_before_the_end_of_a_module_that_is_cut_are_read(
    around: Callable[[nn.Module], object], layers: int, tmp_path: Path
) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    data, path = pickle.dumps(around(model)), tmp_path / "cut.pkl"
    members = model.state_dict()
    path.write_bytes(data[: data.index(bytes_of(members[f"{layers}.weight"])) + 100])
    checkpoint = ckptfix.open_checkpoint(path, salvage=True)
    assert list(checkpoint.specs) == list(members)[: 2 * layers]
    for key in checkpoint.specs:
        assert bytes_of(checkpoint.read(key)) == bytes_of(members[key])


def test_a_repair_says_that_more_may_be_lost(tmp_path: Path) -> None:
    data, path = FORMS["torch, protocol 4"], tmp_path / "damaged.pkl"
    path.write_bytes(damaged(data, "lost", data.index(bytes_of(TENSORS[KEYS[2]])) + 50, 8))
    report = ckptfix.repair(path, output=tmp_path / "out.pth", salvage=True, values=False).report
    assert report.exit_code == 1
    assert list(torch.load(tmp_path / "out.pth", weights_only=True)) == KEYS[:2]


def mutated(random_: random.Random, data: bytes) -> bytes:
    place, count = random_.randrange(len(data)), random_.choice([1, 2, 8, 100, 512])
    kind = random_.choice(["lost", "doubled", "inserted", "cut"])
    return data[:place] if kind == "cut" else damaged(data, kind, place, count)


@pytest.mark.parametrize("form", FORMS)
def test_no_wrong_bytes_without_a_finding(form: str, tmp_path: Path) -> None:
    """A seeded sample: bytes are lost, doubled or inserted, or everything after a place is lost."""
    random_, path = random.Random(form), tmp_path / "mutated.pkl"
    for _ in range(12):
        path.write_bytes(mutated(random_, FORMS[form]) or b"\0")
        try:
            checkpoint: Any = ckptfix.open_checkpoint(path, salvage=True)
        except ckptfix.CkptfixError:
            continue
        for key in set(checkpoint.specs) & set(KEYS):
            assert bytes_of(checkpoint.read(key)) == bytes_of(TENSORS[key])


def test_deep_nesting_in_front_of_damage_is_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "deep.pkl").write_bytes(b"\x80\x02" + b"}(X\x01\0\0\0a" * 3000 + b"\xff")
    with pytest.raises(ckptfix.UnreadableError, match="not a pickle opcode"):
        ckptfix.check(tmp_path / "deep.pkl", values=False)
