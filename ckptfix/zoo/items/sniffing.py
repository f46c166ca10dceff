"""Whether a file of a zoo is a checkpoint, by its name and its first few thousand bytes.

A name that claims it is taken at its word: a ``.pth`` that turns out to be an error page is an unreadable checkpoint,
and nothing to be copied as if it were right. Every other name has its bytes looked at."""

from __future__ import annotations

import re
import zlib
from enum import Enum
from functools import partial
from pathlib import PurePosixPath

from ckptfix.bytes import decoders
from ckptfix.bytes.sources import Content
from ckptfix.reading.archives import tar_members, unpacking
from ckptfix.reading.archives.wrapped import looks_like_checkpoint
from ckptfix.reading.folders.shard_index import WEIGHT_MAP
from ckptfix.reading.torch_files.torch_legacy import MAGIC

HEAD = 4096
"""Bytes of a file that are read; more are no better, since what tells comes first."""

EXPANDED = 1 << 16
"""Bytes that the head of a compressed file is expanded to, at most."""

_DEPTH = 3
_DECODERS: dict[str, decoders.Decoder] = {"gzip": partial(zlib.decompressobj, zlib.MAX_WBITS | 16), "xz": decoders.xz}

_CLAIMS = re.compile(
    r".*\.(pth|pt|ckpt|safetensors|th|pyth|t7|distcp)(\.(tar|t?gz|bz2|xz|zip|zst))*"
    r"|(pytorch_model|adapter_model|model|consolidated)([-._].*)?\.bin",
    re.IGNORECASE | re.DOTALL,
)
_OTHERWISE = re.compile(
    r".*\.(json|jsonl|ya?ml|toml|ini|cfg|txt|md|rst|csv|tsv|log|html?|css|js|py|pyc|ipynb|sh|c|cpp|h|cu|so|dll|exe|jar|whl|egg"
    r"|npz|npy|docx|xlsx|pptx|pdf|png|jpe?g|gif|bmp|svg|webp|mp3|mp4|wav|flac|avi|webm|onnx|h5|hdf5|gguf|ggml|tflite|pb"
    r"|lock|gitattributes|gitignore|DS_Store)",
    re.IGNORECASE | re.DOTALL,
)
_OF_TORCH = re.compile(
    rb"[^/]*/(data\.pkl|constants\.pkl|model\.json|version|byteorder|\.format_version|\.storage_alignment|\.data/.*|code/.*"
    rb"|(data|tensors|constants)/\d+)",
    re.DOTALL,
)
_LFS = b"version https://git-lfs.github.com/spec/"
_POINTED = re.compile(r".*\.(bin|pkl|pickle|npz|model|tar|zip)", re.IGNORECASE | re.DOTALL)
_LEGACY = MAGIC.to_bytes(10, "little")
_LEGACY_OLD_PROTOCOLS = f"L{MAGIC}L\n".encode()


class Looks(Enum):
    """What a file is by its first bytes."""

    CHECKPOINT = "a checkpoint"
    DOUBTFUL = "a pickle or an archive, in which a checkpoint may be or not"
    INDEX = "the index of a sharded checkpoint, as it seems"
    OTHER = "something else"


def by_name(name: str) -> Looks | None:
    """What the name alone says: a checkpoint, or an index; None where the bytes have to."""
    last = name.rpartition("/")[2]
    if last.endswith(".index.json"):
        return Looks.INDEX
    return Looks.CHECKPOINT if _CLAIMS.fullmatch(last) else None


def is_surely_other(name: str) -> bool:
    """Whether a name is one that checkpoints do not have. Where a look at the bytes is a request over a network, it is
    saved.
    """
    return _OTHERWISE.fullmatch(name.rpartition("/")[2]) is not None


def by_bytes(name: str, head: bytes) -> Looks:
    """What the first bytes say of a file whose name says nothing."""
    if head.startswith(_LFS):
        return Looks.CHECKPOINT if _POINTED.fullmatch(name) else Looks.OTHER
    if head[:1] == b"{":
        return Looks.INDEX if f'"{WEIGHT_MAP}"'.encode() in head else Looks.OTHER
    found = _look(head, _DEPTH)
    return Looks.OTHER if found is Looks.DOUBTFUL and is_surely_other(name) else found


def _look(head: bytes, depth: int) -> Looks:
    if head[:2] == b"PK":
        return _zip(head)
    content = Content("", head)
    if (compression := unpacking.sniff(content)) is not None:
        inside = _expanded(head, compression.name)
        return Looks.DOUBTFUL if not inside or not depth else _look(inside, depth - 1)
    if tar_members.sniff(content):
        return _tar(content, depth)
    if head.startswith(_LEGACY_OLD_PROTOCOLS):
        return Looks.CHECKPOINT
    if not looks_like_checkpoint(head):
        return Looks.OTHER
    is_pickle = head[8:9] != b"{"
    return Looks.DOUBTFUL if is_pickle and _LEGACY not in head[:32] and b"torch" not in head else Looks.CHECKPOINT


def _zip(head: bytes) -> Looks:
    """A zip archive by its first member, which is at its front."""
    if head[:4] != b"PK\x03\x04":
        return Looks.DOUBTFUL if head[:4] == b"PK\x05\x06" else Looks.OTHER
    name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    return Looks.CHECKPOINT if _OF_TORCH.fullmatch(name) else Looks.DOUBTFUL


def _expanded(head: bytes, name: str) -> bytes:
    """What the beginning of a compressed file begins with; nothing of bzip2, whose blocks are longer."""
    if name not in _DECODERS:
        return b""
    try:
        return bytes(_DECODERS[name]().decompress(head, EXPANDED))
    except decoders.FAULTS:
        return b""


def _tar(content: Content, depth: int) -> Looks:
    """A tar archive by those of its files that begin in the head."""
    names = set()
    for name, start, size in tar_members.TarFiles(content).walk():
        names.add(PurePosixPath(name).name)
        if by_name(name) is Looks.CHECKPOINT:
            return Looks.CHECKPOINT
        if depth and _look(bytes(content.buffer[start : start + size]), depth - 1) is Looks.CHECKPOINT:
            return Looks.CHECKPOINT
    return Looks.CHECKPOINT if {"sys_info", "pickle"} <= names else Looks.DOUBTFUL
