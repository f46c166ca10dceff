import json
import math

import pytest

from ckptfix.report.page.data import CharacterBudget, Layers, data_element, digest, script_json, short
from tests.report.page.reading import Page
from tests.report.page.samples import HOSTILE, weights


def test_harmless_data_is_plain_json():
    assert script_json({"a": [1, 2.5, None, True, "x"]}) == '{"a":[1,2.5,null,true,"x"]}'


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_comes_back_and_ends_nothing(text):
    written = script_json({text: [text]})
    assert written.isascii()
    assert not set(written) & set("<>&")
    assert json.loads(written) == {text: [text]}
    assert Page(data_element("x", written)).data == {"x": {text: [text]}}


def test_numbers_that_are_not_json_are_refused():
    with pytest.raises(ValueError, match="JSON"):
        script_json(float("nan"))


def test_a_budget_is_spent_once():
    budget = CharacterBudget(5)
    assert [budget.take("abc"), budget.take("abc"), budget.take("ab"), budget.take("a")] == [True, False, True, False]


def test_digests_tell_texts_apart():
    assert digest("a") == digest("a") != digest("b")


def data(*elements):
    return Page("".join(elements)).data


def test_no_layer_no_element():
    assert list(Layers(10**6).elements(0, {"source": "a", "layers": []})) == []


def test_figures_are_columns_and_zeros_are_sparse():
    read = data(*Layers(10**6).elements(3, weights("a.pth", 4, {2: ["VAL101"]})))
    assert read["layout-0"]["key"] == [f"layers.{number}.weight" for number in range(4)]
    assert (read["layout-0"]["dtype"], read["layout-0"]["shape"][0]) == ("float32", "4x4")
    figures = read["weights-3"]
    assert len(figures["rms"]) == len(figures["minimum"]) == len(figures["maximum"]) == 4
    assert (figures["zeros"], figures["nonfinite"], figures["flagged"]) == ({"1": 2}, {"2": 3}, {"2": ["VAL101"]})


def test_names_are_kept_once_for_files_that_share_them():
    layers = Layers(10**6)
    first = data(*layers.elements(0, weights("a.pth", seed=1)))
    second = data(*layers.elements(1, weights("b.pth", seed=2)))
    other = data(*layers.elements(2, weights("c.pth", count=5)))
    assert (first.keys(), second.keys()) == ({"layout-0", "weights-0"}, {"weights-1"})
    assert other.keys() == {"layout-1", "weights-2"}
    assert second["weights-1"]["layout"] == 0
    assert second["weights-1"]["rms"] != first["weights-0"]["rms"]


def test_dtypes_of_their_own():
    line = weights("a.pth", 2)
    line["layers"][1]["dtype"] = "float16"
    assert data(*Layers(10**6).elements(0, line))["layout-0"]["dtype"] == ["float32", "float16"]


def test_what_has_no_room_is_left_out_healthy_files_first():
    layers = Layers(1500)
    kept = [number for number in range(20) if list(layers.elements(number, weights("a.pth", seed=number)))]
    assert kept == list(range(len(kept)))
    assert 0 < len(kept) < 20
    assert layers.left_out == 20 - len(kept)
    assert list(layers.elements(20, weights("a.pth", flagged={0: ["VAL101"]})))


def test_a_file_left_out_leaves_no_names_that_others_would_need():
    layers = Layers(900)
    assert not list(layers.elements(0, weights("long.pth", count=100)))
    assert data(*layers.elements(1, weights("a.pth"))).keys() == {"layout-0", "weights-1"}


@pytest.mark.parametrize(
    ("number", "kept"),
    [
        (0.0, 0),
        (1.0, 1),
        (-0.123456, -0.1235),
        (1.23456e-38, 1.235e-38),
        (123456.0, 123500),
        (1.5e300, 1.5e300),
        (1.7976931348623157e308, 1.7976931348623157e308),
        (math.nan, None),
        (-math.inf, None),
    ],
)
def test_four_digits(number, kept):
    assert short(number) == kept
    json.dumps(short(number), allow_nan=False)
