from __future__ import annotations

import pytest

from ckptfix.errors import HostileError
from ckptfix.formats import bounds
from ckptfix.formats.bounds import Bounds, bounded_key, bounded_keys, shown
from tests.attacks.crafted import PROTO, around, torch_zip
from tests.formats.files import opened


@pytest.mark.parametrize(
    "key", ["text", 0, -5, 1 << 60, (1, ("a", None)), frozenset({1}), 1.5, b"x", None], ids=lambda key: repr(key)
)
def test_an_honest_key_passes(key):
    assert bounded_key(key, "f") is key
    assert bounded_keys([key], "f") == [key]


def test_the_same_key_in_many_dicts_passes():
    account = Bounds("f", 0)
    dicts = [{} for _ in range(1000)]  # type: list[dict]
    for owner in dicts:
        account.key((1, 2), owner)


def test_keys_of_one_hash_are_refused_in_one_dict():
    account, owner = Bounds("f", 0), object()
    for index in range(1, bounds.COLLISIONS + 1):
        account.key(index * ((1 << 61) - 1), owner)
    with pytest.raises(HostileError, match="chosen to have one hash"):
        account.key(1000 * ((1 << 61) - 1), owner)


def test_short_arguments_are_shared_for_free():
    account = Bounds("f", 10)
    for _ in range(100_000):
        account.hand("latin1", (1, 2))


def test_what_the_calls_are_handed_may_not_grow_past_the_pickle():
    account, large = Bounds("f", 10), "x" * (1 << 19)
    account.hand(large)
    account.hand(large)
    with pytest.raises(HostileError, match="over and over"):
        account.hand(large)


@pytest.mark.parametrize(
    "opcodes", [b"](" + b"]" * 2000 + b"e", b"(" * 2000, b"N" + b"\x85" * 2000], ids=["lists", "marks", "tuples"]
)
def test_a_pickle_makes_a_bounded_number_of_objects(opcodes, tmp_path, monkeypatch):
    path = tmp_path / "many.pth"
    path.write_bytes(torch_zip(around(x=opcodes) if opcodes[0] != 40 else PROTO + opcodes))
    monkeypatch.setattr(bounds, "OBJECTS", 1000)
    with pytest.raises(HostileError, match="makes more than 1000 objects"):
        opened(path)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a" * 99, repr("a" * 40)),
        (b"xy", "b'xy'"),
        (12, "12"),
        (1 << 100_000, "a number of 100001 bits"),
        (None, "None"),
        ([1], "a list"),
    ],
    ids=["long text", "bytes", "a number", "a huge number", "None", "a list"],
)
def test_a_value_is_shown_shortly(value, text):
    assert shown(value) == text
