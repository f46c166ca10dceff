"""Text in the place of a checkpoint is quoted where it says itself what went wrong."""

from __future__ import annotations

import json
import time

import pytest

from ckptfix.reading.foreign.files import as_text, name_text

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
def test_no_text(data: bytes) -> None:
    assert as_text(data) is None


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_text_in_any_encoding(encoding: str) -> None:
    assert as_text("\n Not found: ü\n".encode(encoding)) == "Not found: ü"


def test_text_that_ends_inside_of_a_letter() -> None:
    assert as_text("größe".encode()[:3]) == "gr"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (POINTER.decode(), "a git-lfs pointer of a file of 12345 bytes with the sha256 4d7a2146…"),
        (POINTER[:50].decode(), "a git-lfs pointer, not the file itself (it has 50 bytes); run `git lfs pull`"),
        ("<!DOCTYPE html><html><title>Sign in</title>", 'a web page, "Sign in",'),
        ("<html>\n<body><h1>504 &amp;\n Time-out</h1>", 'a web page, "504 & Time-out",'),
        ("<!-- a --><!-- b --><html>", "a web page, and not"),
        ("<html><title>Google Drive - Quota exceeded</title>", "wait until the quota is free"),
        ("<html><title>Google Drive - Virus scan warning</title>", "confirm the download in a browser"),
        (S3, 'a storage service and not a checkpoint: "NoSuchKey: No "such" key."'),
        ("<Error><Code>AccessDenied</Code></Error>", '"AccessDenied"'),
        ("<?xml version='1.0'?><net name='x'><title>t</title></net>", "an XML file (<net>)"),
        ("HTTP/1.1 403 Forbidden\r\nA: b\r\n\r\n<title>Gone</title>", '"Gone"'),
        ("HTTP/2 302 Found\r\nLocation: /login\r\n", '"302 Found"'),
        ('{"error": "Repository not found"}', '"Repository not found"'),
        ('{"error": {"code": 404, "message": "No such object"}}', '"No such object"'),
        ('{"errors": ["bad", {"detail": "worse"}]}', '"bad, worse"'),
        ('{"message": "Not Found", "status": "404"}', '"Not Found"'),
        (json.dumps({"message": "Hello", **dict.fromkeys("abcdefgh", 1)}), "a JSON file with message, a, b, c"),
        ('{"architectures": ["Bert"], "hidden_size": 1}', "a JSON file with architectures, hidden_size"),
        ('{"metadata": {"total_si', "a JSON file, cut short or damaged,"),
        ("404: Not Found", 'the answer of a server and not a checkpoint: "404: Not Found"'),
        ("Entry not found", '"Entry not found"'),
        ("Invalid username or password.", '"Invalid username or password."'),
        ("epoch,loss\n1,0.5", 'a text file and not a checkpoint: "epoch,loss 1,0.5"'),
        ("x" * 500, f'"{"x" * 119}…"'),
        ("import torch\n\nclass Net(torch.nn.Module):\n    pass", "source code"),
        ("#!/bin/sh\nwget", "source code"),
        ("-----BEGIN PGP MESSAGE-----\n", "decrypt it first"),
        ("4\n1\n3\nV 1\n13\nnn.Sequential", "a Lua Torch7 file"),
        ('model_checkpoint_path: "m"', "TensorFlow's note"),
    ],
)
def test_what_a_text_says(text: str, said: str) -> None:
    assert said in name_text(text, len(text))


@pytest.mark.parametrize("part", ["<", "<title>", "<!--", "<?", "<h1 ", "{", "[", '{"error":'])
def test_texts_made_to_be_slow_are_not(part: str) -> None:
    start = time.process_time()  # a quadratic search takes minutes; a busy machine does not count
    text = (part * (1 << 16))[: 1 << 16]
    name_text(text, len(text))
    name_text(f"<html>{text}"[: 1 << 16], len(text))
    assert time.process_time() - start < 20
