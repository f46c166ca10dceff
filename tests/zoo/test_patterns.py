import re

import pytest

from ckptfix.zoo.patterns import compile_patterns, literal


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        pytest.param("*.pth", "a.pth", True, id="at the top"),
        pytest.param("*.pth", "a/b/c.pth", True, id="without a slash: at any depth"),
        pytest.param("*.pth", "a.pth.bak", False, id="the whole name"),
        pytest.param("a.pth", "aXpth", False, id="a dot is a dot"),
        pytest.param("*.PTH", "a.pth", False, id="case counts"),
        pytest.param("a/*.pth", "a/b.pth", True, id="with a slash: from the root"),
        pytest.param("a/*.pth", "x/a/b.pth", False, id="and from nowhere else"),
        pytest.param("a/*.pth", "a/b/c.pth", False, id="a star stays in its folder"),
        pytest.param("a/**/*.pth", "a/b/c/d.pth", True, id="two stars do not"),
        pytest.param("a/**/*.pth", "a/d.pth", True, id="and may be no folder"),
        pytest.param("**/a.pth", "a.pth", True, id="from anywhere"),
        pytest.param("/a.pth", "a.pth", True, id="a slash in front: the root"),
        pytest.param("/a.pth", "x/a.pth", False, id="and no other folder"),
        pytest.param("./a.pth", "a.pth", True, id="the root as shells write it"),
        pytest.param("old/", "old/a/b.pth", True, id="all of a folder"),
        pytest.param("old/", "x/old/b.pth", True, id="of any folder so called"),
        pytest.param("x/old/", "y/x/old/b.pth", False, id="but not with a slash"),
        pytest.param("old/", "older/b.pth", False, id="and of no other folder"),
        pytest.param("a?.pth", "ab.pth", True, id="one character"),
        pytest.param("a?b", "a/b", False, id="which is no slash"),
        pytest.param("a[0-9].pth", "a5.pth", True, id="a range"),
        pytest.param("a[!0-9].pth", "a5.pth", False, id="all but a range"),
        pytest.param("a[!0-9]b", "a/b", False, id="nor is that a slash"),
        pytest.param("a[^]b", "a^b", True, id="a hat is itself"),
        pytest.param("[a", "[a", True, id="a bracket that is never closed"),
        pytest.param("a\nb*", "a\nb\nc", True, id="names may hold line feeds"),
    ],
)
def test_what_a_pattern_means(pattern, name, expected):
    assert (compile_patterns([pattern]).fullmatch(name) is not None) == expected


def test_no_pattern_means_nothing():
    assert compile_patterns([]).fullmatch("") is None


def test_any_of_several():
    expression = compile_patterns(["*.pth", "b/"])
    assert expression.fullmatch("x/a.pth")
    assert expression.fullmatch("b/c")
    assert not expression.fullmatch("c")


@pytest.mark.parametrize("name", ["a.pth", "a*b?.pth", "a[1].pth", "[!x]", "a]b", "**", "a\\b"])
def test_a_literal_means_its_name_alone(name):
    expression = compile_patterns([literal(name)])
    assert expression.fullmatch(name)
    assert not expression.fullmatch(name + "x")
    assert not expression.fullmatch(re.sub(r"[*?]", "x", name) if re.search(r"[*?]", name) else "other")
