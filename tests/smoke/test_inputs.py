from __future__ import annotations

import pytest

from ckptfix.errors import UsageError
from ckptfix.smoke.inputs import RandomInput, parse_inputs


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
