"""Each kind of fact has its own name, and text that its data fills in."""

import doctest

import pytest

from ckptfix.core import facts
from ckptfix.core.facts import Fact, Kind, clause, clauses


def test_every_kind_has_its_own_name() -> None:
    assert {name: kind.value for name, kind in Kind.__members__.items()} == {
        name: name.lower().replace("_", "-") for name in Kind.__members__
    }


def test_the_examples_in_docstrings_are_right() -> None:
    results = doctest.testmod(facts)
    assert (results.failed, results.attempted > 0) == (0, True)


def test_a_name_from_the_file_is_not_a_template() -> None:
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
        (Fact.of(Kind.STORAGES_UNWRITTEN, storages=1), "lacks 1 storage that its tensors use"),
        (Fact.of(Kind.RANKS_MISSING, ranks=2, first=3), "lacks the shards of 2 ranks, the first shard-00003"),
        (
            Fact.of(Kind.INDEX_MOVED, keys=tuple("abcde")),
            "has a stale index that lists another shard for a, b, c, d and 1 more",
        ),
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
def test_optional_data_of_facts(fact: Fact, words: str) -> None:
    assert clause(fact) == words


def test_several_facts_are_one_sentence() -> None:
    assert clauses([Fact(Kind.CUT_SHORT), Fact(Kind.BYTEORDER_ODD)]) == (
        "is cut short; has a byteorder that is neither little nor big"
    )
