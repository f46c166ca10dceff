import pytest

from ckptfix.core.finding import counted
from ckptfix.report.style import cut, evidence_items, percent, quantity, size, tensor_text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1.00 k"), (11_689_512, "11.7 M"), (999_999, "1.00 M"), (7 * 10**9, "7.00 G")],
)
def test_quantity(number, text):
    assert quantity(number) == text


def test_size():
    assert (size(512), size(46_830_571)) == ("512 B", "46.8 MB")


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        pytest.param(5, 5, "100 %", id="all"),
        pytest.param(0, 5, "0 %", id="nothing"),
        pytest.param(0, 0, "100 %", id="all of nothing"),
        pytest.param(10**9 - 1, 10**9, "99.99 %", id="one missing of many is not 100"),
        pytest.param(1, 10**9, "< 0.01 %", id="one of many is not 0"),
        pytest.param(1, 2, "50 %", id="half"),
    ],
)
def test_percent(part, whole, text):
    assert percent(part, whole) == text


def test_plural():
    assert [counted(1, "key"), counted(2, "key"), counted(0, "entry")] == ["1 key", "2 keys", "0 entries"]


def test_tensor_text():
    assert [tensor_text("int64", ()), tensor_text("float32", (2, 3)), tensor_text("float32", None)] == [
        "int64[]",
        "float32[2, 3]",
        "float32[?]",
    ]


def test_no_evidence():
    assert list(evidence_items({})) == []


def test_values_of_all_kinds():
    evidence = {"share": 1 / 3, "segments": ["a", 2], "of": {"lr": 0.1}, "none": None}
    assert list(evidence_items(evidence)) == ["share 0.3333", "segments [a, 2]", "of {lr 0.1}", "none None"]


def test_cut():
    assert list(evidence_items({"a": "x" * 10}, 5)) == ["a xx…"]
    assert cut("12345", 5) == "12345"
