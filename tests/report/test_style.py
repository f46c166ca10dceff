import io

import pytest

from ckptfix.core.finding import counted
from ckptfix.errors import printable
from ckptfix.report.style import Span, TextFormat, cut, evidence_items, percent, quantity, size, tensor_text


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "color"),
    [
        pytest.param(io.StringIO(), {}, False, id="a pipe has no colours"),
        pytest.param(io.StringIO(), {"FORCE_COLOR": "0"}, False, id="FORCE_COLOR=0 forces nothing"),
        pytest.param(Terminal(), {"NO_COLOR": "1"}, False, id="NO_COLOR"),
        pytest.param(Terminal(), {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, id="NO_COLOR wins"),
        pytest.param(Terminal(), {"TERM": "dumb"}, False, id="a dumb terminal"),
        pytest.param(Terminal(), {"NO_COLOR": ""}, True, id="an empty NO_COLOR counts as none"),
        pytest.param(Terminal(), {}, True, id="a terminal"),
        pytest.param(io.StringIO(), {"FORCE_COLOR": "1"}, True, id="FORCE_COLOR in a pipe"),
    ],
)
def test_where_colours_are(stream, environment, color):
    assert TextFormat.of(stream, environment).color is color


def test_a_long_line_is_broken_at_spaces_and_continues_further_in():
    lines = ["  the weight matrix has decayed to nothing at all", "short", "x" * 30]
    assert TextFormat(width=20).write(lines) == (
        "  the weight matrix\n    has decayed to\n    nothing at all\nshort\n" + "x" * 30 + "\n"
    )
    colored = TextFormat(color=True, width=12).write([("run ", Span("words of one", "error"))])
    assert colored == "run \x1b[1;31mwords\x1b[0m\x1b[1;31m of\x1b[0m\n  \x1b[1;31mone\x1b[0m\n"


def test_a_command_is_never_broken():
    line = ("run: ", Span("ckptfix repair a.pth --model zoo:net --fill target", "command"))
    assert TextFormat(width=20).write([line]).count("\n") == 1


def test_a_pipe_breaks_no_line():
    assert TextFormat.of(io.StringIO(), {}).width == 0


def test_a_role_is_an_escape_sequence_only_with_colours():
    lines = [("a ", Span("b", "error"))]
    assert TextFormat().write(lines) == "a b\n"
    assert TextFormat(color=True).write(lines) == "a \x1b[1;31mb\x1b[0m\n"


@pytest.mark.parametrize("hostile", ["\x1b[2J", "a\rb", "a\nb", "\x07", "\x9b31m", "\u202e", "\ud800"])
def test_nothing_in_a_text_reaches_the_terminal_as_a_control(hostile):
    for piece in (hostile, Span(hostile, "error")):
        text = TextFormat().write([(piece,)])
        assert text.endswith("\n")
        assert text[:-1].isprintable()


def test_printable_keeps_what_people_read():
    assert printable("Größe layers.{0…3} ×") == "Größe layers.{0…3} ×"  # noqa: RUF001 - the sign is the point


def test_an_ascii_stream_gets_ascii():
    assert TextFormat(encoding="ascii").write(["a.{0…3} → ü"]) == "a.{0...3} -> \\xfc\n"


def test_a_latin_stream_gets_what_it_has():
    assert TextFormat(encoding="latin-1").write(["… ü"]) == "... ü\n"


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
        pytest.param(170, 11_490, "1.48 %", id="nearest, as messages round it"),
        pytest.param(11_320, 11_490, "98.52 %", id="and with the rest 100"),
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
