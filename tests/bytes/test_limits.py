import gzip
import pickle
import struct
import zipfile

import pytest
import torch

import ckptfix
from ckptfix.bytes import limits
from ckptfix.bytes.limits import Bounds, bounded_key, bounded_keys, shown
from ckptfix.errors import HostileError
from tests.attacks.crafted import PROTO, around, get, name, put, storage, torch_zip
from tests.checks import assert_same
from tests.reading.files import opened, read_all


@pytest.mark.parametrize(
    "key", ["text", 0, -5, 1 << 60, (1, ("a", None)), frozenset({1}), 1.5, b"x", None], ids=lambda key: repr(key)
)
def test_noop_an_ordinary_key(key):
    assert bounded_key(key, "f") is key
    assert bounded_keys([key], "f") == [key]


def test_the_same_key_in_many_dicts_passes():
    bounds = Bounds("f", 0)
    for owner in range(100_000):
        bounds.key((1, 2), owner)


def test_the_same_key_in_many_sets_passes():
    bounds = Bounds("f", 0)
    for _ in range(1000):
        assert bounds.keys([(1, 2), frozenset({1})]) == [(1, 2), frozenset({1})]


def test_many_keys_in_one_dict_pass():
    bounds = Bounds("f", 0)
    for index in range(300_000):
        bounds.key((index, index + 1), 5)


def test_keys_of_one_hash_are_refused_in_one_dict():
    bounds, owner = Bounds("f", 0), 5
    for index in range(1, limits.COLLISIONS + 1):
        bounds.key(index * ((1 << 61) - 1), owner)
    with pytest.raises(HostileError, match="chosen to have equal hashes"):
        bounds.key(1000 * ((1 << 61) - 1), owner)


def test_short_arguments_are_not_counted():
    bounds = Bounds("f", 10)
    for _ in range(100_000):
        bounds.count_copies("latin1", (1, 2))


def test_arguments_of_calls_are_bounded_by_the_pickle():
    bounds, large = Bounds("f", 10), "x" * (1 << 19)
    bounds.count_copies(large)
    bounds.count_copies(large)
    with pytest.raises(HostileError, match="over and over"):
        bounds.count_copies(large)


@pytest.mark.parametrize(
    "opcodes",
    [
        pytest.param(b"](" + b"]" * 2000 + b"e", id="lists"),
        pytest.param(b"](" + b"}" * 2000 + b"e", id="dicts"),
        pytest.param(b"N" + b"\x85" * 2000, id="tuples"),
        pytest.param(b"N" + b"\x94" * 10_000, id="memo"),
        pytest.param(b"N" + b"".join(put(1000 * i) for i in range(1000)), id="scattered memo"),
        pytest.param(b"](" + b"M\xff\xff" * 3000 + b"e", id="numbers"),
        pytest.param(b"](" + b"\x8c\x00" * 3000 + b"e", id="empty texts"),
        pytest.param(b"](" + b"N" * 10_000 + b"e", id="a long list"),
        pytest.param(name("models.A") + put(9) + b"0](" + (get(9) + b")\x81") * 1000 + b"e", id="objects"),
        pytest.param(name("models.A") + b")R" * 1000, id="calls of calls"),
        pytest.param(b"](" + b"".join(name(f"m.c{i}") for i in range(1000)) + b"e", id="names"),
        pytest.param(storage() * 500, id="storages"),
    ],
)
def test_objects_of_a_pickle_are_counted(opcodes, tmp_path, monkeypatch):
    path = tmp_path / "many.pth"
    path.write_bytes(torch_zip(around(x=opcodes)))
    monkeypatch.setattr(limits, "MEMORY", 60_000)
    monkeypatch.setattr(limits, "MEMORY_SHARE", 0)
    monkeypatch.setattr(limits, "DENSE_SHARES", ())
    with pytest.raises(HostileError, match="more than 0 MB of memory"):
        opened(path)


def test_open_marks_are_counted(tmp_path, monkeypatch):
    path = tmp_path / "marks.pth"
    monkeypatch.setattr(limits, "MEMORY", 100_000)
    monkeypatch.setattr(limits, "DENSE_SHARES", ())
    path.write_bytes(torch_zip(around(x=b"N" + b"(1" * 2000)))
    assert len(opened(path).specs) == 1
    path.write_bytes(torch_zip(PROTO + b"(" * 2000))
    with pytest.raises(HostileError, match="of memory"):
        opened(path)


def test_noop_many_nested_pickles(tmp_path):
    """``pickle.dump`` of a state_dict: five pickles for each tensor."""
    state_dict = {f"layers.{index}.weight": torch.randn(3) for index in range(300)}
    path = tmp_path / "dumped.pkl"
    path.write_bytes(pickle.dumps(state_dict, protocol=2))
    assert_same(read_all(opened(path)), state_dict)


def test_noop_bytes_of_a_dumped_tensor_in_two_calls(tmp_path):
    """As in protocol 2: Latin-1 text goes to ``_codecs.encode``, the bytes to ``_load_from_bytes``."""
    state_dict = {"weight": torch.full((1 << 20,), 2.0)}
    path = tmp_path / "dumped.pkl"
    path.write_bytes(pickle.dumps(state_dict, protocol=2))
    assert_same(read_all(opened(path)), state_dict)


def test_opcodes_without_a_result_are_bounded(tmp_path, monkeypatch):
    path = tmp_path / "idle.pth"
    path.write_bytes(torch_zip(around(x=b"N" + b"N0" * 100_000), method=zipfile.ZIP_DEFLATED))
    monkeypatch.setattr(limits, "STEPS", 100_000)
    with pytest.raises(HostileError, match="never ends"):
        opened(path)


@pytest.mark.parametrize(
    ("size", "limit"),
    [(0, 64), (1, 64), (4, 64), (8, 128), (16, 256), (60, 600), (200, 1024), (1024, 4096)],
)
def test_the_memory_limit_by_file_size(size, limit):
    assert Bounds("f", size << 20).limit == limit << 20


@pytest.mark.parametrize("form", ["zip", "legacy", "ours"])
def test_a_file_of_any_number_of_small_tensors_is_read(form, tmp_path, monkeypatch):
    """Each takes the same share of the limit in a file of a thousand and of a million tensors."""
    path = tmp_path / "small.pth"
    state_dict = {f"layer.{number}.weight": torch.zeros(1) for number in range(2000)}
    torch.save(state_dict, path, _use_new_zipfile_serialization=form != "legacy")
    if form == "ours":
        ckptfix.repair(path, output=tmp_path / "ours.pth", format="pth")
        path = tmp_path / "ours.pth"
    monkeypatch.setattr(limits, "MEMORY", 0)
    monkeypatch.setattr(limits, "DENSE_SHARES", limits.DENSE_SHARES[1:])
    assert len(opened(path).keys()) == len(state_dict)


def test_unpacking_raises_the_limit_up_to_a_bound():
    bounds = Bounds("f", 2 << 20)
    bounds.spend(50 << 20)
    bounds.unpack(10 << 20)
    assert bounds.limit == 160 << 20
    bounds.unpack(1 << 40)
    bounds.unpack(1 << 40)
    assert bounds.limit == 256 << 20
    bounds.spend(206 << 20)
    with pytest.raises(HostileError, match="of memory"):
        bounds.spend(1)


def test_a_log_of_many_rows_passes(tmp_path):
    """Rows of one number each, compressed, which take ten times their size in memory."""
    rows = b"](" + b"".join(b"}U\x04lossG" + struct.pack(">d", index / 7) + b"s" for index in range(100_000)) + b"e"
    for suffix, pack in (("pth", bytes), ("pth.gz", gzip.compress)):
        path = tmp_path / f"log.{suffix}"
        path.write_bytes(pack(torch_zip(around(log=rows))))
        assert len(opened(path).specs) == 1


def test_json_is_counted_before_it_is_parsed(monkeypatch):
    monkeypatch.setattr(limits, "MEMORY", 10_000)
    assert Bounds("f", 0).parse_json('{"a": [1, 2]}') == {"a": [1, 2]}
    for text in ("[" + "[]," * 1000 + "0]", "[" + '"",' * 1000 + "0]", "{" * 100, "[" + "1," * 1000 + "0]"):
        with pytest.raises(HostileError, match="of memory"):
            Bounds("f", 0).parse_json(text)


def test_what_lies_in_a_packed_file_spends_from_the_packed_size(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MEMORY", 40_000)
    monkeypatch.setattr(limits, "DENSE_SHARES", ())
    path = tmp_path / "many.pkl.gz"
    plain = around(x=b"](" + b"]" * 2000 + b"e" + b"0" + b"B" + struct.pack("<I", 200_000) + bytes(200_000))
    path.write_bytes(gzip.compress(torch_zip(plain)))
    with pytest.raises(HostileError, match="of memory"):
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
def test_values_are_abbreviated(value, text):
    assert shown(value) == text
