"""Files that are not checkpoints are named for what they are; possible checkpoints and noise are not."""

import base64
import gzip
import json
import os
import pickle
import random
import socket
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

import ckptfix
from ckptfix.bytes.sources import Content
from ckptfix.errors import UnreadableError
from ckptfix.reading.foreign.files import UNFINISHED, as_text, name_content, name_foreign_file, name_mangled
from ckptfix.reading.foreign.signatures import signatures
from tests.attacks.crafted import STORAGE, safetensors, state_dict, torch_zip
from tests.attacks.test_hostile_files import GOOD
from tests.reading.files import in_memory, opened

JOBLIB = (
    b"\x80\x04\x95\xe3\0\0\0\0\0\0\0}\x94\x8c\x01w\x94\x8c\x13joblib.numpy_pickle\x94\x8c\x11NumpyArrayWrapper"
    b"\x94\x93\x94)\x81\x94}\x94b\x0c" + b"\xff" * 12 + bytes(64)
)
"""What joblib.dump writes of an array: a record, padding of 0xFF, the bytes."""

WITH_WEIGHTS = (
    pickle.dumps(torch.nn.Linear(2, 2), 3)[:-1] + b"cjoblib.numpy_pickle\nNumpyArrayWrapper\n)\x81}b" + JOBLIB[-77:]
)

NOISE = random.Random(3).randbytes(1 << 16)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(torch_zip(state_dict()), id="a zip file"),
        pytest.param(state_dict(), id="a pickle"),
        pytest.param(safetensors(GOOD, STORAGE), id="safetensors"),
        pytest.param(b"(dp0\nS'weight'\np1\n", id="a pickle of Python 2, all letters, cut short"),
        pytest.param(b"{}", id="an empty object"),
        pytest.param(b"GG", id="two letters"),
        pytest.param(b"BM" + bytes(range(60)), id="two letters of a bitmap"),
        pytest.param(b"MZ" + bytes(range(60)), id="two letters of a program"),
        pytest.param(b"\xff\xd8\xff" + bytes(range(60)), id="three bytes of a JPEG image"),
    ],
)
def test_noop_possible_checkpoints(content: bytes) -> None:
    assert name_foreign_file(Content("f", content)) is None


def test_noop_random_bytes_have_no_name() -> None:
    numbers = random.Random(5)
    for _ in range(2000):
        size = numbers.choice([12, 40, 300, 2000])
        assert name_foreign_file(Content("f", numbers.randbytes(size))) is None


def test_signatures_are_unambiguous() -> None:
    plain = [known for known in signatures() if not set(known.begins.pattern) & set(b"[({")]
    assert len(plain) > 25
    for known in plain:
        for magic in known.begins.pattern.split(b"|"):
            start = magic.decode().replace(r"\.", ".").replace(r"\*", "*").encode().decode("unicode_escape")
            said = name_foreign_file(
                Content("f", bytes(range(1, 1 + known.at)) + start.encode("latin-1") + b"\x01\x9c" * 40)
            )
            assert said == f"f: {known.what}, not a PyTorch checkpoint; {known.remedy}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 99\n", "of a file of 99"),
        (b"\x80\x02\x8a\r\nl\xfc", "into CR LF"),
        (bytes(5000), "only zeros at its start"),
        (b"\x89HDF\r\n\x1a\n" + bytes(8), "an HDF5 file"),
        (bytes(512) + b"\x89HDF\r\n\x1a\n" + bytes(8), "an HDF5 file"),
        (b"\x89HDF\r\n\x1a\n" + bytes(80) + b"keras_version", "a Keras model in HDF5"),
        (b"GGUF\x03\0\0\0", "a GGUF file"),
        (b"05\x03\x04\0\0\x08\x08" + bytes(64), "a voice of GPT-SoVITS"),
        (b"\x30\0\0\0FT01FH01" + bytes(64), "the data of a program of ExecuTorch"),
        (b"\xff\xd8\xff\xe0\0\x10JFIF\0", "a JPEG image"),
        (b"BM" + struct.pack("<I", 60) + bytes(54), "a bitmap image"),
        (b"MZ" + bytes(58) + struct.pack("<I", 64) + b"PE\0\0", "of Windows"),
        (b"<html><title>Not Found</title>", 'a web page, "Not Found"'),
        (b"<html>", "a web page, not a checkpoint"),
        (gzip.compress(b"<html><title>Not Found</title>", mtime=0), 'a web page, "Not Found"'),
        (b"HTTP/1.1 403 Forbidden\r\nA: b\r\nC: d\r\n\r\n<html>\r\n", '"403 Forbidden"'),
        (b"I am a text\n", '"I am a text"'),
        (b"class Net:\n    pass\n", "source code"),
        (b"\xff\xfe" + torch_zip(state_dict()).decode("cp437").encode("utf-16-le"), "as UTF-16 text"),
        (b"\xfe\xff" + torch_zip(state_dict()).decode("latin-1").encode("utf-16-be"), "as UTF-16 text"),
        (bytes(600) + b"\1" * 100, "begins with 600 zeros"),
        (JOBLIB, "a joblib file with NumPy arrays"),
        (WITH_WEIGHTS, "a joblib file with NumPy arrays"),
        (zlib.compress(JOBLIB), "a zlib stream, as joblib"),
        (gzip.compress(JOBLIB, mtime=0), "a joblib file with NumPy arrays"),
        (NOISE, "look random"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_foreign_file_is_named_with_the_remedy(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file.pth"
    path.write_bytes(content)
    with pytest.raises(UnreadableError, match=message) as caught:
        opened(path)
    assert str(caught.value).startswith(str(path))
    assert ";" in str(caught.value)


@pytest.mark.parametrize("content", [b"\0", b"abc", b"\xff" * 100], ids=["a zero", "text", "ones"])
def test_unknown_files_are_shown_by_their_first_bytes(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file.pth"
    path.write_bytes(content)
    with pytest.raises(UnreadableError, match=str(path)):
        opened(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.pth", "neither a torch file nor safetensors"),
        *((f"model.pth{suffix}", "unfinished") for suffix in sorted(UNFINISHED - {".aria2"})),
        ("model.pth.aria2", "aria2c -c"),
        ("model.ckpt-9.data-00000-of-00001", "by its name, the data of a TensorFlow checkpoint"),
        ("data/0", "folder that has data.pkl"),
    ],
)
def test_the_file_name_counts_if_the_bytes_are_unknown(name: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"\x9c\x01" * 30)
    with pytest.raises(UnreadableError, match=message):
        opened(path)


@pytest.mark.parametrize("name", ["model.pth", "model.pth.part"])
def test_the_error_of_a_known_format_is_kept(name: str, tmp_path: Path) -> None:
    """Random-looking bytes and names of downloads are only the last resort: this is a damaged pickle."""
    path = tmp_path / name
    path.write_bytes(b"\x80\x02" + NOISE)
    with pytest.raises(UnreadableError) as caught:
        opened(path)
    assert "random" not in str(caught.value)
    assert "unfinished" not in str(caught.value)


def _link(path: Path) -> None:
    path.symlink_to("nowhere")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(os.path.relpath(path))  # the path of a socket may have some hundred letters


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "No such file or directory; check the path"),
        (_link, "is a link to nowhere, which does not exist"),
        (os.mkfifo, "is not a regular file"),
        (_socket, "is not a regular file"),
        (lambda path: path.write_bytes(b""), "is empty"),
    ],
    ids=["nothing", "a link to nothing", "a pipe", "a socket", "an empty file"],
)
def test_what_is_not_a_file_is_reported(make: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    make(path)
    with pytest.raises(UnreadableError, match=message):
        opened(path)


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="File name too long"):
        opened(tmp_path / ("n" * 300))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x93NUMPY\1\0v\0{'descr': '|O', 'fortran_order': False, 'shape': (), }", "pickled Python objects of NumPy"),
        (struct.pack("<iiiq", 0, 2, 0, 32013312) + NOISE, "a weight file of Darknet"),
        (struct.pack("<iiii", 0, 1, 0, 320133) + NOISE, "a weight file of Darknet"),
        (b"IxFI\x00\x03\x00\x00" + bytes(40), "a Faiss index"),
        (b"3000000 300\n</s> \x00\x80\x3a\x3f", "word vectors of word2vec"),
        (pickle.dumps("hello", protocol=0), "the file holds a str"),
        (b"S'hello'\np0\n.", "the file holds a str"),
        (b"Version 1\npicture of a cat\n.", "a text file"),
        (b"Vocabulary\ncat\ndog\n.", "a text file"),
    ],
)
def test_files_that_begin_like_another_format(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    path.write_bytes(content)
    with pytest.raises(UnreadableError, match=message):
        opened(path)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146ab" + b"0" * 54 + b"\nsize 12345\n"
S3 = '<?xml version="1.0"?>\n<Error><Code>NoSuchKey</Code><Message>No &quot;such&quot; key.</Message></Error>'


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x80\x02}q\0.", id="a pickle"),
        pytest.param(b"PK\x03\x04", id="a zip archive"),
        pytest.param(b"\xff\xfe\0\xd8", id="half a pair of surrogates"),
        pytest.param(b"caf\xe9 au lait", id="Latin-1"),
        pytest.param(b" \n\t ", id="blanks"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_data_that_is_not_text(data: bytes) -> None:
    assert as_text(data) is None


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_text_in_any_encoding(encoding: str) -> None:
    assert as_text("\n Not found: ü\n".encode(encoding)) == "Not found: ü"


def test_text_cut_inside_a_character() -> None:
    assert as_text("größe".encode()[:3]) == "gr"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (POINTER.decode(), "a git-lfs pointer of a file of 12345 bytes with the sha256 4d7a2146…"),
        (POINTER[:50].decode(), "a git-lfs pointer, not the file itself (it has 50 bytes); run `git lfs pull`"),
        ("/annex/objects/SHA256E-s98--ab.pth\n", "a pointer of git-annex, not the file itself; run `git annex get`"),
        ("../.git/annex/objects/X9/MD5E-s98--ab.pth", "a pointer of git-annex"),
        ("outs:\n- md5: ab\n  size: 98\n  path: model.pth\n", "a pointer of DVC, not the file itself; run `dvc pull`"),
        ("outs:\n  - a", 'a text file, not a checkpoint: "outs: - a"'),
        ("<!DOCTYPE html><html><title>Sign in</title>", 'a web page, "Sign in",'),
        ("<html>\n<body><h1>504 &amp;\n Time-out</h1>", 'a web page, "504 & Time-out",'),
        ("<!-- a --><!-- b --><html>", "a web page, not"),
        ("<html><title>Google Drive - Quota exceeded</title>", "wait until the quota is free"),
        ("<html><title>Google Drive - Virus scan warning</title>", "confirm the download in a browser"),
        (S3, 'a storage service\'s error response, not a checkpoint: "NoSuchKey: No "such" key."'),
        ("<Error><Code>AccessDenied</Code></Error>", '"AccessDenied"'),
        ("<?xml version='1.0'?><net name='x'><title>t</title></net>", "an XML file (<net>)"),
        ("HTTP/1.1 403 Forbidden\r\nA: b\r\n\r\n<title>Gone</title>", '"Gone"'),
        ("HTTP/2 302 Found\r\nLocation: /login\r\n", '"302 Found"'),
        ('{"error": "Repository not found"}', '"Repository not found"'),
        ('{"error": {"code": 404, "message": "No such object"}}', '"No such object"'),
        ('{"errors": ["bad", {"detail": "worse"}]}', 'response, not a checkpoint: "{"errors": ["bad", {"detail"'),
        ('{"message": "Not Found", "status": "404"}', '"Not Found"'),
        (json.dumps({"message": "Hello", **dict.fromkeys("abcdefgh", 1)}), "a JSON file with message, a, b, c"),
        ('{"architectures": ["Bert"], "hidden_size": 1}', "a JSON file with architectures, hidden_size"),
        ('{"metadata": {"total_si', "a JSON file, cut short or damaged,"),
        ("404: Not Found", 'a server\'s response, not a checkpoint: "404: Not Found"'),
        ("Entry not found", '"Entry not found"'),
        ("Invalid username or password.", '"Invalid username or password."'),
        ("epoch,loss\n1,0.5", 'a text file, not a checkpoint: "epoch,loss 1,0.5"'),
        ("x" * 500, f'"{"x" * 119}…"'),
        ("import torch\n\nclass Net(torch.nn.Module):\n    pass", "source code"),
        ("#!/bin/sh\nwget", "source code"),
        ("-----BEGIN PGP MESSAGE-----\n", "decrypt it first"),
        ("4\n1\n3\nV 1\n13\nnn.Sequential", "a Lua Torch7 file"),
        ('model_checkpoint_path: "m"', "TensorFlow's record"),
    ],
)
def test_kinds_of_text_files(text: str, said: str) -> None:
    assert said in name_content(text, len(text))


@pytest.mark.parametrize("part", ["<", "<title>", "<!--", "<?", "<h1 ", "{", "[", '{"error":'])
def test_adversarial_texts_are_read_in_linear_time(part: str) -> None:
    start = time.process_time()  # a quadratic search takes minutes; a busy machine does not count
    text = (part * (1 << 16))[: 1 << 16]
    name_content(text, len(text))
    name_content(f"<html>{text}"[: 1 << 16], len(text))
    assert time.process_time() - start < 20


STATE = {"größe": torch.arange(-40.0, 40.0), "weight": torch.randn(16, 8, generator=torch.Generator().manual_seed(1))}
CHECKPOINTS = {
    "zip": in_memory(STATE),
    "legacy": in_memory(STATE, _use_new_zipfile_serialization=False),
    "safetensors": save(STATE),
    "safetensors whose header stays what it was": save({"weight": STATE["weight"]}),
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
    "Latin-1": (lambda data: data.decode("latin-1").encode(), "saved as text: .* encoded as UTF-8; fetch it again"),
    "Windows-1252": (windows, "saved as text: .* encoded as UTF-8; fetch it again"),
    "UTF-8": (lambda data: data.decode("utf-8", "replace").encode(), r"U\+FFFD, which cannot be undone; fetch"),
    "ASCII": (lambda data: data.decode("ascii", "replace").encode(), r"U\+FFFD, which cannot be undone; fetch"),
    "chunks": (chunked, "web server's chunked response"),
    "chunks with an extension": (lambda data: chunked(data, b" ;name=value"), "web server's chunked response"),
    "an answer": (lambda data: b"HTTP/1.1 200 OK\r\n\r\n" + chunked(data), "web server's chunked response"),
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
def test_noop_files_without_transfer_damage(data: bytes) -> None:
    said = name_foreign_file(Content("f", data)) or ""
    assert name_mangled(Content("f", data)) is None
    assert not any(word in said for word in ("base64", "saved as text", "web server"))


@pytest.mark.parametrize("name", ["é€“”" * 9, "größe der fläche im übermaß der äste über der öde der übung"])
def test_noop_zeros_and_names_in_other_alphabets(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(save({f"{name}.{at}": torch.zeros(400) for at in range(4)})[:-4])
    with pytest.raises(UnreadableError, match="is cut short"):
        ckptfix.open_checkpoint(path)


@pytest.mark.parametrize("salvage", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("form", CHECKPOINTS)
def test_transfer_damage_is_named(tmp_path: Path, form: str, change: str, salvage: bool) -> None:
    make, said = CHANGES[change]
    path = tmp_path / "model.pth"
    path.write_bytes(make(CHECKPOINTS[form]))
    with pytest.raises(UnreadableError, match=said):
        ckptfix.open_checkpoint(path, salvage=salvage)
