"""The container formats: one module each, told apart by their bytes and never by a suffix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ckptfix.checkpoint import Checkpoint
from ckptfix.errors import HostileError, UnreadableError
from ckptfix.formats import safetensors, sharded, torch_legacy, torch_tar, torch_zip, torchscript
from ckptfix.formats.containers import open_document
from ckptfix.formats.document import Document
from ckptfix.formats.folders import read_folder
from ckptfix.formats.mending import mend
from ckptfix.formats.sources import Content
from ckptfix.formats.strangers import name_stranger
from ckptfix.formats.wrapped import unwrap


@dataclass(frozen=True)
class Format:
    """A container format: its name, how its bytes begin, and how it is read."""

    name: str
    sniff: Callable[[Content], bool]
    read: Callable[[Content], Document]


FORMATS = (
    Format(torchscript.NAME, torchscript.sniff, torchscript.read),
    Format(torch_zip.NAME, torch_zip.sniff, torch_zip.read),
    Format(safetensors.NAME, safetensors.sniff, safetensors.read),
    Format(torch_tar.NAME, torch_tar.sniff, torch_tar.read),
    Format(torch_legacy.NAME, torch_legacy.sniff, torch_legacy.read),
)
"""Every format, in the order in which a file is asked."""


def open_file(path: str, weights: str | None = None, *, salvage: bool = False, member: str | None = None) -> Checkpoint:
    """The checkpoint in a file or folder; no tensor is read and nothing of it runs.

    ``weights`` picks one of several state_dicts by its name in the container, ``member`` one of several files in an
    archive. ``salvage`` gives what is whole of a damaged file; the rest is named in ``Checkpoint.lost``. Raises
    ``UnreadableError`` with the true cause where there is nothing."""
    if Path(path).is_dir():
        return open_document(read_folder(path, salvage), weights, salvage=salvage)
    content = unwrap(Content.of_file(path), member, salvage)
    try:
        document = sharded.read(content, salvage) if sharded.sniff(content) else read_content(content, salvage)
        checkpoint = open_document(document, weights, salvage=salvage)
        return replace(checkpoint, path=path, member=content.member) if content.member else checkpoint
    finally:
        content.close()


def read_content(content: Content, salvage: bool) -> Document:
    """The document of one file's bytes, by the first format that knows how they begin.

    Where that does not work out, the checkpoint may begin behind something else, or have been transferred as text.
    """
    content.salvage = salvage
    try:
        document = _read(content)
    except HostileError:
        raise
    except UnreadableError:
        mended = _read_mended(content)
        if mended is None:
            raise
        return mended
    return (_read_mended(content) or document) if document.damage else document


def _read_mended(content: Content) -> Document | None:
    """The document of a damaged file whose damage can be undone; None where it is damaged in another way."""
    mended = mend(content)
    if mended is None:
        return None
    mended.content.salvage = content.salvage
    try:
        document = _read(mended.content)
    except HostileError:
        raise
    except UnreadableError:
        document = None
    if mended.exact and (document is None or document.damage):
        raise UnreadableError(
            f"{content.path}: {mended.cause} only where no byte is missing; transfer it again in binary mode"
        )
    if document is not None:
        document.damage.insert(0, mended.cause)
    return document


def _read(content: Content) -> Document:
    stranger = name_stranger(content)
    if stranger is not None:
        raise UnreadableError(stranger)
    for form in FORMATS:
        if form.sniff(content):
            return form.read(content)
    raise UnreadableError(
        f"{content.path}: neither a torch file nor safetensors (it starts with {bytes(content.buffer[:8])!r});"
        " is it the right file, and is the download complete?"
    )
