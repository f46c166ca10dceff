from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ckptfix.errors import UsageError
from ckptfix.smoke.exam import Exam, examine
from ckptfix.smoke.inputs import (
    Arguments,
    Draw,
    FileInput,
    RandomInput,
    make_arguments,
    odd_channels,
    parse_inputs,
    refuse_non_finite,
    scale_check,
)
from tests.smoke import models
from tests.smoke.conftest import Save


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        pytest.param("2x3x224x224", RandomInput((2, 3, 224, 224)), id="a shape"),
        pytest.param("7", RandomInput((7,)), id="one dimension"),
        pytest.param("2x16:int:0:1000", RandomInput((2, 16), (0, 1000)), id="integers"),
        pytest.param("4:int:-5:-1", RandomInput((4,), (-5, -1)), id="negative integers"),
        pytest.param("mask=2x16:int:1:2", RandomInput((2, 16), (1, 2), "mask"), id="a keyword"),
        pytest.param("more.ids=2x6", RandomInput((2, 6), None, "more.ids"), id="a member of a dict"),
    ],
)
def test_an_input_is_printed_as_it_was_given(text: str, meant: RandomInput) -> None:
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
def test_an_invalid_input_is_an_error_of_one_line(texts: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        parse_inputs(texts)
    assert "\n" not in str(caught.value)


NAN, INF = torch.nan, torch.inf


def image(channel: float | None = None) -> Tensor:
    """Two images of three channels from 0 to 1; ``channel`` fills the second."""
    made = torch.linspace(0, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)
    if channel is not None:
        made[:, 1] = channel
    return made


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(image(), id="finite"),
        pytest.param(torch.tensor([0.0, -INF, 0.0]), id="a mask"),
        pytest.param(torch.arange(3), id="integers"),
        pytest.param(torch.empty(0), id="nothing"),
    ],
)
def test_noop_a_finite_input(given: Tensor) -> None:
    refuse_non_finite("x.pt", given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param(torch.tensor([1.0, NAN]), "has NaN; give", id="NaN"),
        pytest.param(image(NAN), "has NaN in all of channel 1, as from scaling by 0/0; give", id="0/0"),
        pytest.param(image() * NAN, "has NaN; give", id="every channel"),
        pytest.param(torch.tensor([1.0, INF]), "infinite values", id="Inf"),
        pytest.param(torch.tensor([1.0, -INF]), "infinite values", id="-Inf among other values is no mask"),
    ],
)
def test_an_input_that_is_not_finite_is_refused(given: Tensor, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        refuse_non_finite("x.pt", given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param(image(), [], id="all vary"),
        pytest.param(image() * 0, [], id="all are constant: a blank image"),
        pytest.param(torch.ones(2, 3, 1), [], id="one value for each channel"),
        pytest.param(torch.ones(2, 3), [], id="no channels"),
        pytest.param(torch.zeros(2, 3, 4, dtype=torch.int64), [], id="integers"),
        pytest.param(image(0.0), ["x: channel 1 is constant, while others vary"], id="constant"),
    ],
)
def test_a_channel_that_never_varies_is_reported(given: Tensor, said: list[str]) -> None:
    assert odd_channels("x", given) == said


def trained_on(batch: Tensor) -> nn.Module:
    """A model whose statistics saw this batch."""
    torch.manual_seed(0)
    model = models.Net().train()
    model.bn.momentum = 1.0
    with torch.no_grad():
        model(batch)
    return model.eval()


def said_of(model: nn.Module, given: Tensor) -> str:
    with scale_check(model, given) as warned, torch.no_grad():
        model(given)
    assert not any(module._forward_pre_hooks for module in model.modules())
    return "".join(warned)


@pytest.mark.parametrize(
    ("model", "given"),
    [
        pytest.param(trained_on(image()), image(), id="as in training"),
        pytest.param(trained_on(image()), image() * 2 - 1, id="another normalisation"),
        pytest.param(trained_on(image() * 255), image() * 255, id="trained on 0 … 255"),
        pytest.param(models.Net().eval(), image() * 255, id="statistics that never moved say nothing"),
        pytest.param(nn.Conv2d(3, 2, 1), image() * 255, id="no statistics"),
    ],
)
def test_noop_an_input_scaled_as_in_training(model: nn.Module, given: Tensor) -> None:
    assert said_of(model, given) == ""


@pytest.mark.parametrize(
    ("seen", "given", "said"),
    [
        pytest.param(image(), image() * 255, "divide an image of 0 … 255 by 255", id="0 … 255 where 0 … 1 was seen"),
        pytest.param(image() * 255, image(), "multiply an image of 0 … 1 by 255", id="0 … 1 where 0 … 255 was seen"),
        pytest.param(image(), image() * -1e4, "times as large as", id="another scale altogether"),
    ],
)
def test_another_scale_is_reported(seen: Tensor, given: Tensor, said: str) -> None:
    warning = said_of(trained_on(seen), given)
    assert said in warning
    assert "bn (BatchNorm2d)" in warning


def test_a_given_image_of_bytes_is_reported_and_passes(save: Save, tmp_path: Any) -> None:
    import numpy as np

    np.save(tmp_path / "x.npy", (image() * 255).to(torch.uint8).numpy())
    outcome = examine(
        Exam(save(trained_on(image())), "tests.smoke.models:Net", inputs=(str(tmp_path / "x.npy"),), device="cpu")
    )
    assert outcome.is_good
    [warning] = outcome.warnings
    assert "0 … 255" in warning


CPU = torch.device("cpu")


def make(*texts: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Arguments:
    return make_arguments(parse_inputs(texts), dtype, CPU, seed)


def test_names_with_dots_make_dicts() -> None:
    given = parse_inputs(["3x2", "x=1", "more.ids=2x6", "more.deep.er=4", "images.0.image=3x2"])
    arguments = make_arguments(given, torch.float32, torch.device("cpu"))
    made = arguments.keywords
    assert made.keys() == {"x", "more", "images"}
    assert [image["image"].shape for image in made["images"]] == [(3, 2)]
    assert made["more"]["ids"].shape == (2, 6)
    assert made["more"]["deep"]["er"].shape == (4,)


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
        "empty.pt": torch.ones(0, 3, 4, 4),
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
    ("draw", "floats", "integers"),
    [("uniform", (0, 1), (3, 4)), ("ones", (1, 1), (4, 4)), ("zeros", (0, 0), (3, 3))],
)
def test_other_numbers_of_the_same_shape(draw: Draw, floats: tuple[int, int], integers: tuple[int, int]) -> None:
    inputs = [RandomInput((50,), None, None, draw), RandomInput((50,), (3, 5), None, draw)]
    first, second = make_arguments(inputs, torch.float32, CPU).args
    assert floats[0] <= first.min() <= first.max() <= floats[1]
    assert (int(second.min()), int(second.max())) == integers


def test_an_image_of_bytes_becomes_floats_and_a_mask_of_bytes_does_not(tmp_path: Path) -> None:
    np.save(tmp_path / "image.npy", np.full((1, 3, 4, 4), 255, dtype=np.uint8))
    np.save(tmp_path / "mask.npy", np.ones((1, 3), dtype=np.uint8))
    made = make(str(tmp_path / "image.npy"), str(tmp_path / "mask.npy"))
    assert [tensor.dtype for tensor in made.args] == [torch.float32, torch.uint8]
    assert made.args[0].max() == 255
    assert "uint8 was converted to float32" in made.notes[0]


def test_the_first_of_a_batch_and_twice_the_batch() -> None:
    made = make("4x3", "mask=4x2", "table=5x5")
    assert made.batch == 4
    assert [tuple(tensor.shape) for tensor in (*made.first(1).args, *made.first(1).kwargs.values())] == [
        (1, 3),
        (1, 2),
        (5, 5),
    ]
    twice = made.first(1).doubled()
    assert (twice.batch, twice.kwargs["table"].shape) == (2, (5, 5))
    assert not torch.equal(twice.args[0][0], twice.args[0][1])
    assert torch.equal(twice.args[0][0], made.args[0][0])


def test_only_floats_are_converted() -> None:
    made = make("2", "2:int:0:9").to(CPU, torch.float64)
    assert [tensor.dtype for tensor in made.args] == [torch.float64, torch.int64]


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


def test_a_float64_array_is_converted_and_that_is_reported(tmp_path: Path) -> None:
    made = make(f"x={_file(tmp_path, 'array.npy')}")
    assert torch.equal(made.kwargs["x"], torch.ones(2, 3))
    assert made.notes[0].endswith("float64 was converted to float32 for the model")


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        pytest.param("", "nan.pt", "itself has NaN", id="NaN in the input proves nothing of the file"),
        pytest.param("", "plain.pt", "no tensor", id="no tensors"),
        pytest.param("", "empty.pt", "holds no sample", id="no elements"),
        pytest.param("x=", "named.pt", "2 tensors", id="one name for two tensors"),
        pytest.param("", "cut.pt", "cannot be read", id="damage"),
    ],
)
def test_a_file_that_is_not_an_input_is_one_line(tmp_path: Path, name: str, kind: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        make(name + _file(tmp_path, kind))
    assert "\n" not in str(caught.value)


def test_a_file_runs_no_code(tmp_path: Path) -> None:
    torch.save(FileInput("x"), tmp_path / "object.pt")
    with pytest.raises(UsageError, match="cannot be read"):
        make(str(tmp_path / "object.pt"))
