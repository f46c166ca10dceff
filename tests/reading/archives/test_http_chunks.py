"""The body of an HTTP answer with the sizes of its chunks in it is read without them."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

import ckptfix
from ckptfix.bytes.sources import Content
from ckptfix.reading.archives.http_chunks import first_chunk, may_be_chunked
from tests.checks import bytes_of
from tests.reading.files import in_memory

STATE_DICT = {
    "weight": torch.arange(3000.0).reshape(30, 100),
    "bias": torch.arange(50.0),
    "count": torch.tensor(7),
}
BODY = save(STATE_DICT)
HEADERS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(data: bytes, size: int = 1000, extension: bytes = b"", last: bytes = b"0\r\n\r\n") -> bytes:
    parts = (data[at : at + size] for at in range(0, len(data), size))
    return b"".join(b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in parts) + last


@pytest.mark.parametrize(
    "head",
    [BODY[:64], in_memory(STATE_DICT)[:64], b"1000", b"3e8\n", b"\r\n", b"zz\r\n", b"", b"1" * 20 + b"\r\n"],
    ids=["safetensors", "torch", "a number", "a line feed", "an empty line", "letters", "nothing", "a huge number"],
)
def test_what_is_no_chunk(head: bytes) -> None:
    assert not may_be_chunked(head)
    assert first_chunk(Content("x", head)) is None


def test_a_text_that_begins_like_a_chunk_is_a_text(tmp_path: Path) -> None:
    (tmp_path / "model.pth").write_bytes(b"12\r\nthe number of the page\r\n")
    with pytest.raises(ckptfix.UnreadableError, match="a text file and not a checkpoint"):
        ckptfix.open_checkpoint(tmp_path / "model.pth")


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(chunked(BODY), id="safetensors"),
        pytest.param(HEADERS + chunked(BODY, 4096), id="with the headers"),
        pytest.param(chunked(BODY, 1 << 20, b" ;name=value"), id="one chunk with an extension"),
        pytest.param(chunked(BODY, last=b"0\r\nExpires: never\r\n\r\n"), id="with a trailer"),
        pytest.param(chunked(in_memory(STATE_DICT)), id="a zip of torch"),
        pytest.param(chunked(in_memory(STATE_DICT, _use_new_zipfile_serialization=False)), id="a legacy file"),
        pytest.param(chunked(gzip.compress(BODY)), id="compressed"),
    ],
)
def test_the_sizes_are_taken_out(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(data)
    with pytest.raises(ckptfix.UnreadableError, match=r"sizes of its chunks in between: .* take all 3 tensors"):
        ckptfix.open_checkpoint(path)
    report = ckptfix.repair(path, salvage=True, output=tmp_path / "out.safetensors", values=False).report
    assert report.exit_code == 0
    written = ckptfix.open_checkpoint(tmp_path / "out.safetensors")
    assert {key: bytes_of(written.read(key)) for key in written.specs} == {
        key: bytes_of(tensor) for key, tensor in STATE_DICT.items()
    }


@pytest.mark.parametrize("cut", [300, 1006, 1010, 9000])
def test_chunks_that_end_early_give_what_is_there(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(chunked(BODY)[:cut])
    with pytest.raises(ckptfix.UnreadableError, match="its chunks end early, after"):
        ckptfix.open_checkpoint(path)
    checkpoint = ckptfix.open_checkpoint(path, salvage=True)
    assert "weight" in checkpoint.lost
    for key in checkpoint.specs:
        assert bytes_of(checkpoint.read(key)) == bytes_of(STATE_DICT[key])
