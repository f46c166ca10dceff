from __future__ import annotations

import pytest

from ckptfix.errors import UnreadableError
from ckptfix.formats.sources import Content
from ckptfix.formats.strangers import name_stranger
from tests.attacks.crafted import STORAGE, safetensors, state_dict, torch_zip
from tests.attacks.test_hostile_files import GOOD
from tests.formats.files import opened

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 123456\n"


@pytest.mark.parametrize(
    "content",
    [torch_zip(state_dict()), state_dict(), safetensors(GOOD, STORAGE), b"<tensor", b"{}", b"GG"],
    ids=["a zip file", "a pickle", "safetensors", "something that begins with <", "an empty object", "two letters"],
)
def test_what_may_be_a_checkpoint_is_no_stranger(content):
    assert name_stranger(Content("f", content)) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LFS, "git-lfs pointer of a file of 123456 bytes"),
        (LFS[:60], "git-lfs pointer, not the file itself"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"\xef\xbb\xbf\n  <html>", "a web page"),
        (b"<?xml version='1.0'?><Error/>", "a web page"),
        (b'{"error": "not found"}', "the answer of a web service"),
        (b"\x80\x02\x8a\r\nl\xfc", "turned into CR LF"),
        (bytes(5000), "nothing but zeros"),
        (b"\x89HDF\r\n\x1a\n" + bytes(8), "an HDF5 file"),
        (b"GGUF\x03\0\0\0", "a GGUF file"),
    ],
    ids=[
        "git-lfs",
        "half a git-lfs pointer",
        "html",
        "html behind a mark",
        "xml",
        "json",
        "text mode",
        "zeros",
        "hdf5",
        "gguf",
    ],
)
def test_a_stranger_is_named_with_the_remedy(content, message, tmp_path):
    path = tmp_path / "file.pth"
    path.write_bytes(content)
    with pytest.raises(UnreadableError, match=message) as caught:
        opened(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("content", [b"\0", b"abc", b"\xff" * 100], ids=["a zero", "text", "ones"])
def test_what_nobody_knows_is_shown_by_its_first_bytes(content, tmp_path):
    path = tmp_path / "file.pth"
    path.write_bytes(content)
    with pytest.raises(UnreadableError, match=str(path)):
        opened(path)
