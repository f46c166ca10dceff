"""What a file is, by its name and by a few thousand bytes of it."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import tarfile
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from ckptfix.zoo.items.sniffing import HEAD, Looks, by_bytes, by_name, is_surely_other

WEIGHTS = OrderedDict(weight=torch.randn(64, 64), bias=torch.randn(64))


def saved(**options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(WEIGHTS, buffer, **options)
    return buffer.getvalue()


def zipped(*members: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, raw in members:
            archive.writestr(name, raw)
    return buffer.getvalue()


def tarred(*members: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, raw in members:
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))
    return buffer.getvalue()


def scripted() -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), buffer)
    return buffer.getvalue()


MODERN, LEGACY = saved(), saved(_use_new_zipfile_serialization=False)

CHECKPOINTS = {
    "zip": MODERN,
    "legacy": LEGACY,
    "legacy of protocol 1": saved(_use_new_zipfile_serialization=False, pickle_protocol=1),
    "safetensors": save(dict(WEIGHTS)),
    "torchscript": scripted(),
    "gzip of a zip": gzip.compress(MODERN),
    "gzip of legacy": gzip.compress(LEGACY),
    "xz": lzma.compress(LEGACY),
    "tar with one": tarred(("model.pth", MODERN)),
    "tar with one of another name": tarred(("weights", LEGACY)),
    "tar.gz": gzip.compress(tarred(("weights", LEGACY))),
    "torch 0.1": tarred(("sys_info", b"x"), ("pickle", b"y"), ("storages", b"z")),
}
DOUBTFUL = {
    "plain pickle": pickle.dumps({"a": [1, 2, 3]}),
    "pickle of protocol 0": pickle.dumps({"a": 1}, protocol=0),
    "an ordinary zip": zipped(("images/1.png", b"x"), ("model.pth", MODERN)),
    "a tar of something": tarred(("notes.txt", b"x" * 9000)),
    "bzip2": bz2.compress(LEGACY),
}
OTHERS = {
    "nothing": b"",
    "text": b"cat sat on the mat\n" * 100,
    "json": json.dumps({"architectures": ["ResNet"]}).encode(),
    "png": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "hdf5": b"\x89HDF\r\n\x1a\n" + bytes(100),
    "gguf": b"GGUF\x03\0\0\0" + bytes(100),
    "zeros": bytes(HEAD),
    "gzip of text": gzip.compress(b"a,b,c\n" * 1000),
    "elf": b"\x7fELF" + bytes(100),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpoints_are_known_by_their_bytes(kind: str):
    assert by_bytes("weights_without_suffix", CHECKPOINTS[kind][:HEAD]) is Looks.CHECKPOINT


@pytest.mark.parametrize("kind", DOUBTFUL)
def test_what_may_hold_anything_is_doubtful(kind: str):
    assert by_bytes("thing", DOUBTFUL[kind][:HEAD]) is Looks.DOUBTFUL


@pytest.mark.parametrize("kind", OTHERS)
def test_other_files(kind: str):
    assert by_bytes("thing", OTHERS[kind][:HEAD]) is Looks.OTHER


def test_every_beginning_of_a_checkpoint_is_looked_at_without_an_error():
    for raw in (*CHECKPOINTS.values(), *DOUBTFUL.values()):
        for end in (*range(0, 64), 100, 511, 512, 513, 1024, 2000):
            by_bytes("thing", raw[:end])


def test_archives_of_other_programs_are_none():
    raw = zipped(("[Content_Types].xml", b"<Types/>"), ("word/document.xml", b"x"))
    assert by_bytes("report.docx", raw) is Looks.OTHER
    assert by_bytes("arrays.npz", zipped(("arr_0.npy", b"\x93NUMPY"))) is Looks.OTHER


def test_an_index_is_seen_by_its_map():
    raw = json.dumps({"metadata": {"total_size": 1}, "weight_map": {"a": "b.bin"}}).encode()
    assert by_bytes("weights.json", raw) is Looks.INDEX
    assert by_name("sub/model.safetensors.index.json") is Looks.INDEX


def test_a_pointer_to_a_file_that_was_never_fetched():
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12\n"
    assert by_bytes("net.bin", pointer) is Looks.CHECKPOINT
    assert by_bytes("cat.png", pointer) is Looks.OTHER


@pytest.mark.parametrize(
    "name",
    "a.pth a.PT b/a.ckpt a.safetensors a.th a.pth.tar a.pth.tar.gz a.pt.zip pytorch_model.bin "
    "pytorch_model-00001-of-00002.bin adapter_model.bin .pth __0_0.distcp".split(),
)
def test_names_that_claim_to_be_checkpoints(name: str):
    assert by_name(name) is Looks.CHECKPOINT
    assert not is_surely_other(name)


@pytest.mark.parametrize("name", "a.bin training_args.bin a.pkl a.tar a.zip a.pth.json weights pth a.pth/b.txt".split())
def test_names_that_claim_nothing(name: str):
    assert by_name(name) is None


def test_a_new_line_in_a_name_is_part_of_it():
    assert by_name("a\n.pth") is Looks.CHECKPOINT
    assert by_name("a.pth\n.txt") is None


def test_the_corpus_is_seen_whole(corpus: Path):
    """Each genuine file is seen by its bytes alone, whatever it is called."""
    unseen = [
        path.name
        for folder in ("1.0.0-py27", "1.4.0-py27", "1.6.0", "2.6.0")
        for path in sorted((corpus / folder).iterdir())
        if path.is_file() and by_bytes("thing", path.read_bytes()[:HEAD]) is Looks.OTHER
    ]
    assert unseen == []
