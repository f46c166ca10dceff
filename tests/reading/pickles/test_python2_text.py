"""Strings of Python 2: as the names that torch makes of them, and as the bytes of arrays, of any content."""

import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptfix
from ckptfix.reading.pickles.stream import python2_text, raw_bytes
from tests.checks import bytes_of
from tests.reading.files import in_memory

NAME = "größe.weight"


def legacy_of_python2(raw: bytes) -> bytes:
    """A file whose one key is a string of Python 2."""
    data = in_memory({"K" * len(raw): torch.arange(6.0)}, _use_new_zipfile_serialization=False)
    text = b"X" + struct.pack("<I", len(raw)) + b"K" * len(raw)
    assert data.count(text) == 1
    return data.replace(text, b"U" + bytes([len(raw)]) + raw)


@given(st.binary(max_size=40))
def test_every_byte_is_kept(raw):
    assert raw_bytes(python2_text(raw)) == raw


def test_a_key_in_utf_8_has_the_name_that_torch_gives_it(tmp_path: Path) -> None:
    path = tmp_path / "old.pth"
    path.write_bytes(legacy_of_python2(NAME.encode()))
    checkpoint = ckptfix.open_checkpoint(path)
    assert list(torch.load(path, weights_only=True)) == list(checkpoint.state_dict()) == [NAME]
    assert {type(key) for key in checkpoint.state_dict()} == {str}
    ckptfix.repair(path, output=tmp_path / "new.pth")
    assert list(torch.load(tmp_path / "new.pth", weights_only=True)) == [NAME]


def test_a_key_that_torch_cannot_read_is_latin_1(tmp_path: Path) -> None:
    path = tmp_path / "old.pth"
    path.write_bytes(legacy_of_python2(NAME.encode("latin-1")))
    with pytest.raises(UnicodeDecodeError):
        torch.load(path, weights_only=True)
    assert list(ckptfix.open_checkpoint(path).keys()) == [NAME]


@pytest.mark.parametrize("raw", ["ä€ö".encode() + b"\0", b"\xff\xfe\x80\x3f" * 2], ids=["like UTF-8", "not like it"])
def test_the_bytes_of_an_array_stay_what_they_are(raw: bytes, tmp_path: Path) -> None:
    count = len(raw) // 4
    path = tmp_path / "arrays.pkl"
    path.write_bytes(
        b"\x80\x02}(U\x01wcnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\0\x85U\x01btR(K\x01"
        + bytes([ord("K"), count])
        + b"\x85cnumpy\ndtype\nU\x02f4K\0K\x01\x87R(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb\x89U"
        + bytes([len(raw)])
        + raw
        + b"tbu."
    )
    assert bytes_of(ckptfix.open_checkpoint(path).read("w")) == raw
