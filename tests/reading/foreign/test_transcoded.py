"""A checkpoint that went through something made for text is named, with what to do."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

import ckptfix
from ckptfix.bytes.sources import Content
from ckptfix.errors import UnreadableError
from ckptfix.reading.foreign.files import name_foreign_file, name_mangled
from tests.reading.files import in_memory

STATE = {"größe": torch.arange(-40.0, 40.0), "weight": torch.randn(16, 8, generator=torch.Generator().manual_seed(1))}
CHECKPOINTS = {
    "zip": in_memory(STATE),
    "legacy": in_memory(STATE, _use_new_zipfile_serialization=False),
    "safetensors": save(STATE),
}


def chunked(data: bytes, extension: bytes = b"") -> bytes:
    parts = (data[at : at + 1000] for at in range(0, len(data), 1000))
    return b"".join(b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in parts) + b"0\r\n\r\n"


def windows(data: bytes) -> bytes:
    return "".join(bytes([byte]).decode("cp1252", "ignore") or chr(byte) for byte in data).encode()


CHANGES = {
    "base64": (base64.b64encode, "written as base64 text; decode it first"),
    "base64 in lines": (base64.encodebytes, "written as base64 text; decode it first"),
    "data URL": (lambda data: b"data:application/octet-stream;base64," + base64.b64encode(data), "base64 text"),
    "Latin-1": (lambda data: data.decode("latin-1").encode(), "saved as text: .* letters of UTF-8; fetch it again"),
    "Windows-1252": (windows, "saved as text: .* letters of UTF-8; fetch it again"),
    "UTF-8": (lambda data: data.decode("utf-8", "replace").encode(), r"U\+FFFD, which cannot be undone; fetch"),
    "ASCII": (lambda data: data.decode("ascii", "replace").encode(), r"U\+FFFD, which cannot be undone; fetch"),
    "chunks": (chunked, "answer of a web server"),
    "chunks with an extension": (lambda data: chunked(data, b" ;name=value"), "answer of a web server"),
    "an answer": (lambda data: b"HTTP/1.1 200 OK\r\n\r\n" + chunked(data), "answer of a web server"),
}


@pytest.mark.parametrize(
    "data",
    [
        *(pytest.param(data, id=name) for name, data in CHECKPOINTS.items()),
        pytest.param(base64.b64encode(b"no checkpoint at all, but a text of some length" * 3), id="base64 of a text"),
        pytest.param("größe, Straße, Übermaß: “typed” — by somebody…".encode() * 9, id="a text"),
        pytest.param(bytes(range(256)) * 4, id="every byte"),
        pytest.param(b"12\r\nthe number of the page\r\n", id="a text that begins like a chunk"),
    ],
)
def test_what_was_not_changed(data: bytes) -> None:
    said = name_foreign_file(Content("f", data)) or ""
    assert name_mangled(Content("f", data)) is None
    assert not any(word in said for word in ("base64", "saved as text", "web server"))


def test_zeros_and_names_of_other_alphabets_are_utf8_by_right(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(save({"é€“”" * 9: torch.zeros(40)})[:-4])
    with pytest.raises(UnreadableError, match="is cut short"):
        ckptfix.open_checkpoint(path)


@pytest.mark.parametrize("salvage", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("form", CHECKPOINTS)
def test_what_was_changed_is_named_and_never_taken_for_weights(
    tmp_path: Path, form: str, change: str, salvage: bool
) -> None:
    make, said = CHANGES[change]
    path = tmp_path / "model.pth"
    path.write_bytes(make(CHECKPOINTS[form]))
    with pytest.raises(UnreadableError, match=said):
        ckptfix.open_checkpoint(path, salvage=salvage)
