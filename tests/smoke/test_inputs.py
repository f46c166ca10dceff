from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ckptfix.errors import UsageError
from ckptfix.smoke.inputs import Arguments, FileInput, RandomInput, make_arguments, parse_inputs

CPU = torch.device("cpu")


def make(*texts: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Arguments:
    return make_arguments(parse_inputs(texts), dtype, CPU, seed)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        pytest.param("2x3x224x224", RandomInput((2, 3, 224, 224)), id="a shape"),
        pytest.param("7", RandomInput((7,)), id="one dimension"),
        pytest.param("2x16:int:0:1000", RandomInput((2, 16), (0, 1000)), id="integers"),
        pytest.param("4:int:-5:-1", RandomInput((4,), (-5, -1)), id="negative integers"),
        pytest.param("mask=2x16:int:1:2", RandomInput((2, 16), (1, 2), "mask"), id="a keyword"),
    ],
)
def test_a_text_is_parsed_and_printed_alike(text: str, meant: RandomInput) -> None:
    assert parse_inputs([text]) == (meant,)
    assert str(meant) == text


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        pytest.param(["2x3x"], "neither a shape nor a file", id="a dangling x"),
        pytest.param([""], "neither a shape nor a file", id="nothing"),
        pytest.param(["-2x3"], "neither a shape nor a file", id="a negative size"),
        pytest.param(["not an identifier=2x3"], "neither a shape nor a file", id="no name that Python knows"),
        pytest.param(["2x0x3"], "size 0", id="an empty tensor"),
        pytest.param(["2x3:int"], "no range", id="integers without a range"),
        pytest.param(["2x3:int:5"], "no range", id="half a range"),
        pytest.param(["2x3:int:5:5"], "no range", id="an empty range"),
        pytest.param(["2x3:float:0:1"], "no range", id="an unknown kind"),
        pytest.param(["x=2x3", "x=2x4"], "twice", id="one name twice"),
        pytest.param(["nowhere.npy"], "no file 'nowhere.npy'", id="a file that is not there"),
    ],
)
def test_nonsense_is_one_line(texts: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        parse_inputs(texts)
    assert "\n" not in str(caught.value)


def test_random_inputs_keep_to_their_range_and_seed() -> None:
    made = make("2x3", "ids=100:int:3:5")
    assert made.args[0].shape == (2, 3)
    assert set(made.kwargs["ids"].tolist()) == {3, 4}
    assert made.kwargs["ids"].dtype == torch.int64
    assert torch.equal(made.args[0], make("2x3", "ids=100:int:3:5").args[0])
    assert not torch.equal(made.args[0], make("2x3", seed=1).args[0])


def test_floats_take_the_models_dtype_and_integers_keep_theirs() -> None:
    made = make("2x3", "4:int:0:9", dtype=torch.float64)
    assert [tensor.dtype for tensor in made.args] == [torch.float64, torch.int64]


def _file(folder: Path, kind: str) -> str:
    """A file with the tensors that the kind names."""
    ones = torch.ones(2, 3)
    path = folder / kind
    contents: dict[str, Any] = {
        "one.pt": ones,
        "several.pt": [ones, ones],
        "named.pt": {"a": ones, "b": ones},
        "nan.pt": torch.tensor([1.0, torch.nan]),
        "mask.pt": torch.tensor([0.0, -torch.inf]),
        "plain.pt": {"a": 1},
    }
    if kind.endswith(".npy"):
        np.save(path, np.full((2, 3), 1.0, order="F"))
    elif kind.endswith(".safetensors"):
        save_file({"a": ones} if kind.startswith("one") else {"a": ones, "b": ones + 0}, path)
    elif kind == "cut.pt":
        path.write_bytes(b"PK\x03\x04 cut off")
    else:
        torch.save(contents[kind], path)
    return str(path)


@pytest.mark.parametrize(
    ("kind", "positional", "named"),
    [
        pytest.param("array.npy", 1, (), id="an array is positional"),
        pytest.param("one.pt", 1, (), id="a tensor is positional"),
        pytest.param("several.pt", 2, (), id="a list is positional"),
        pytest.param("named.pt", 0, ("a", "b"), id="a dict names them"),
        pytest.param("one.safetensors", 1, (), id="one tensor of safetensors is positional"),
        pytest.param("several.safetensors", 0, ("a", "b"), id="several of safetensors are named"),
        pytest.param("mask.pt", 1, (), id="-Inf is what masks hold"),
    ],
)
def test_files_become_arguments(tmp_path: Path, kind: str, positional: int, named: tuple[str, ...]) -> None:
    made = make(_file(tmp_path, kind))
    assert len(made.args) == positional
    assert tuple(sorted(made.kwargs)) == named
    assert all(tensor.dtype == torch.float32 for tensor in (*made.args, *made.kwargs.values()))


def test_a_float64_array_is_converted_and_that_is_said(tmp_path: Path) -> None:
    made = make(f"x={_file(tmp_path, 'array.npy')}")
    assert torch.equal(made.kwargs["x"], torch.ones(2, 3))
    assert made.notes[0].endswith("float64 was converted to float32 for the model")


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        pytest.param("", "nan.pt", "itself holds NaN", id="NaN in the input proves nothing of the file"),
        pytest.param("", "plain.pt", "no tensor", id="no tensors"),
        pytest.param("x=", "named.pt", "2 tensors", id="one name for two tensors"),
        pytest.param("", "cut.pt", "cannot be read", id="damage"),
    ],
)
def test_a_file_that_is_no_input_is_one_line(tmp_path: Path, name: str, kind: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        make(name + _file(tmp_path, kind))
    assert "\n" not in str(caught.value)


def test_a_file_runs_no_code(tmp_path: Path) -> None:
    torch.save(FileInput("x"), tmp_path / "object.pt")
    with pytest.raises(UsageError, match="cannot be read"):
        make(str(tmp_path / "object.pt"))
