import sys

import pytest

from ckptfix.zoo.drafting.writing import WIDTH, comment, quoted, texts, value

if sys.version_info >= (3, 11):
    import tomllib
else:
    # Installed with Python 3.10 only, so mypy may or may not see it.
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

ODD = ['a"b', "a\\b", "a\nb\tc\rd", "\x00\x1b\x7f", "ü漢🦓", "\u2028\u200b\xad", "#", "'''", '"""', ""]


@pytest.mark.parametrize("text", ODD)
def test_a_text_comes_back(text):
    assert tomllib.loads(f"a = {quoted(text)}") == {"a": text}


def test_bytes_that_are_no_text_become_any_character():
    assert quoted("a\udcffb") == '"a?b"'


@pytest.mark.parametrize(
    "given", ["a", 1, -1.5, True, False, [], ["a", 1], {}, {"a": 1, "b-c": ["x"], "d e": {"f": True}}]
)
def test_a_value_comes_back(given):
    assert tomllib.loads(f"a = {value(given)}") == {"a": given}


@pytest.mark.parametrize("text", [*ODD, "word " * 100, "x" * 500, "a\udcff"])
def test_a_remark_is_a_remark_whatever_it_says(text):
    lines = list(comment(text))
    assert all(line.startswith("#") for line in lines)
    assert tomllib.loads("\n".join(lines)) == {}


def test_a_long_remark_is_wrapped():
    lines = list(comment("word " * 100, "# - "))
    assert max(map(len, lines)) <= WIDTH
    assert [line[:6] for line in lines[:2]] == ["# - wo", "#     "]


@pytest.mark.parametrize("given", [["a"], ["a", "b"], [f"name{number}" for number in range(40)]])
def test_texts_come_back(given):
    text = "\n".join(texts("match", given))
    assert tomllib.loads(text) == {"match": given[0] if len(given) == 1 else given}
    assert max(map(len, text.splitlines())) <= WIDTH
