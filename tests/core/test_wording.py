"""Facts have words, each kind once, and no words are left over."""

from __future__ import annotations

import doctest
import subprocess

import pytest

from ckptfix.core import facts, wording
from ckptfix.core.facts import Fact, Kind
from ckptfix.core.wording import clause, clauses, first_names, no_option, quoted, typed


def test_every_kind_has_words() -> None:
    assert set(wording._WORDS) == set(Kind)


@pytest.mark.parametrize("module", [facts, wording], ids=lambda module: module.__name__)
def test_the_examples_hold(module: object) -> None:
    results = doctest.testmod(module)  # type: ignore[arg-type]  # a module is what it is given
    assert (results.failed, results.attempted > 0) == (0, True)


def test_a_name_from_the_file_is_no_template() -> None:
    assert clause(Fact(Kind.STORAGE_LACKING, "{nbytes}")) == "lacks its storage {nbytes}"
    assert clause(Fact.of(Kind.NOTE, "by", text="{0}")) == "{0}"


def test_facts_of_equal_data_are_one() -> None:
    one, same, other = (Fact.of(Kind.ZIP_CUT, nbytes=nbytes) for nbytes in (1, 1, 2))
    assert list(dict.fromkeys([one, other, same])) == [one, other]


def test_a_shard_says_what_is_wrong_with_its_file() -> None:
    fact = Fact.of(Kind.SHARD_DAMAGED, "a.bin", cause=Fact.of(Kind.CUT_SHORT, nbytes=3, end=7))
    assert clause(fact) == "has a shard a.bin that is cut short: it has 3 bytes and its storages end at byte 7"


@pytest.mark.parametrize(
    ("fact", "words"),
    [
        (Fact(Kind.CUT_SHORT), "is cut short"),
        (Fact.of(Kind.ZIP_DISPLACED, nbytes=-3), "lacks 3 bytes before its zip directory"),
        (Fact.of(Kind.MEMBER_CUT, there=3, size=0), "is cut short: the zip archive has 3 bytes of an unknown size"),
        (
            Fact.of(Kind.SHARDS_MISSING, names=("a", "b"), keys=1, nbytes=0, total=None),
            "lacks 2 shards: a, b with 1 key",
        ),
        (
            Fact.of(Kind.SHARDS_MISSING, names=("a",), keys=0, nbytes=5, total=10),
            "lacks the shard a, 5 of 10 bytes (50 %)",
        ),
        (
            Fact.of(Kind.DOUBTFUL_VALUES, cause=Fact(Kind.ZIP_CHECKSUM)),
            "the file fails the checksum of the zip archive: some of its bytes are wrong",
        ),
    ],
)
def test_what_only_some_facts_of_a_kind_have(fact: Fact, words: str) -> None:
    assert clause(fact) == words


def test_several_facts_are_one_sentence() -> None:
    assert clauses([Fact(Kind.CUT_SHORT), Fact(Kind.BYTEORDER_ODD)]) == (
        "is cut short; has a byteorder that is neither little nor big"
    )
    assert first_names("abcdef") == "a, b, c, d and 2 more"


PLAIN = ["model.pth", "a/b c.pth", "it's.pth", "$HOME", "*.pth", "größe.pth", "", "back\\slash", "--only"]
ODD = ["two\nlines.pth", "tab\t'quoted'\\.pth", "esc\x1b[31m1", "bytes\udcff\udc80.pth", "no\u200bwidth 12", "\x017"]


@pytest.mark.parametrize("word", [*PLAIN, *ODD])
def test_bash_reads_the_word_that_was_meant(word: str) -> None:
    text = quoted(word)
    assert text.isprintable()
    done = subprocess.run(["bash", "-c", f"printf %s {text}"], capture_output=True, check=True)
    assert done.stdout == word.encode("utf-8", "surrogateescape")


def test_words_are_joined_by_blanks() -> None:
    assert typed(["ckptfix", "repair", "a b.pth", "-o", "x\ny"]) == r"ckptfix repair 'a b.pth' -o $'x\012y'"


@pytest.mark.parametrize(("name", "word"), [("a-x", "a-x"), ("./-x", "./-x"), ("-x", "./-x"), ("--fill", "./--fill")])
def test_a_file_is_no_option(name: str, word: str) -> None:
    assert no_option(name) == word
