"""Plain pickles that end early: everything complete by then is read, and never a wrong byte."""

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptfix
from ckptfix.core.facts import clause
from tests.checks import bytes_of

TENSORS = OrderedDict((f"layer.{n}.weight", torch.arange(4.0 * n, 4.0 * n + 12).reshape(3, 4)) for n in range(4))
ARRAYS = {key: tensor.numpy() for key, tensor in TENSORS.items()}


def nested(arrays: dict[str, Any]) -> dict[str, Any]:
    return {"epoch": 3, "model": dict(arrays), "names": ["a", "b"]}


FORMS = {
    "numpy, protocol 0": pickle.dumps(ARRAYS, 0),
    "numpy, protocol 2": pickle.dumps(ARRAYS, 2),
    "numpy, protocol 5": pickle.dumps(ARRAYS, 5),
    "numpy, nested": pickle.dumps(nested(ARRAYS), 2),
    "numpy, nested, protocol 0": pickle.dumps(nested(ARRAYS), 0),
    "a list of numpy arrays beside it": pickle.dumps({"model": ARRAYS, "means": [np.ones(3), np.ones(2)]}, 2),
    "torch tensors": pickle.dumps(dict(TENSORS), 4),
    "torch tensors in an OrderedDict": pickle.dumps(TENSORS, 2),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_cut_pickle_gives_its_complete_values(form: str, tmp_path: Path) -> None:
    data, path, most = FORMS[form], tmp_path / "cut.pkl", 0
    for cut in range(1, len(data), 37):
        path.write_bytes(data[:cut])
        with pytest.raises(ckptfix.UnreadableError):
            ckptfix.open_checkpoint(path)
        try:
            checkpoint = ckptfix.open_checkpoint(path, salvage=True)
        except ckptfix.UnreadableError:
            continue
        assert "is cut short" in clause(checkpoint.damage[0])
        assert set(checkpoint.keys()) <= set(TENSORS), cut
        most = max(most, len(checkpoint.keys()))
        for key in checkpoint.specs:
            assert bytes_of(checkpoint.read(key)) == bytes_of(TENSORS[key]), cut
    assert most >= len(TENSORS) - 1


@pytest.mark.parametrize("form", FORMS)
def test_zeros_that_were_never_filled_are_not_part_of_a_value(form: str, tmp_path: Path) -> None:
    data, path, most = FORMS[form], tmp_path / "reserved.pkl", 0
    for cut in range(1, len(data), 37):
        path.write_bytes(data[:cut] + bytes(len(data) - cut + 1024))
        with pytest.raises(ckptfix.UnreadableError):
            ckptfix.open_checkpoint(path)
        try:
            checkpoint = ckptfix.open_checkpoint(path, salvage=True)
        except ckptfix.UnreadableError:
            continue
        most = max(most, len(checkpoint.keys()))
        for key in checkpoint.specs:
            assert bytes_of(checkpoint.read(key)) == bytes_of(TENSORS[key]), cut
    assert most >= len(TENSORS) - 1


def test_the_error_names_the_complete_values(tmp_path: Path) -> None:
    data, path = pickle.dumps(ARRAYS, 2), tmp_path / "cut.pkl"
    path.write_bytes(data[: len(data) * 3 // 4])
    with pytest.raises(ckptfix.UnreadableError, match=r"its pickle ends at byte \d+.*take \d of \d tensors"):
        ckptfix.open_checkpoint(path)


def test_a_value_without_its_state_is_left_out(tmp_path: Path) -> None:
    data, path = pickle.dumps(ARRAYS, 2), tmp_path / "cut.pkl"
    path.write_bytes(data[: data.index(b"layer.1.weight") + 60])
    assert ckptfix.open_checkpoint(path, salvage=True).keys() == ["layer.0.weight"]
