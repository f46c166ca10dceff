"""The container formats: one module each, told apart by their bytes and never by a suffix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckptfix.checkpoint import Checkpoint
from ckptfix.errors import UnreadableError
from ckptfix.formats import safetensors, torch_legacy, torch_zip
from ckptfix.formats.containers import open_document
from ckptfix.formats.document import Document
from ckptfix.formats.folders import read_folder
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
    Format(torch_zip.NAME, torch_zip.sniff, torch_zip.read),
    Format(safetensors.NAME, safetensors.sniff, safetensors.read),
    Format(torch_legacy.NAME, torch_legacy.sniff, torch_legacy.read),
)
"""Every format, in the order in which a file is asked."""


def open_file(path: str, weights: str | None = None, *, salvage: bool = False, member: str | None = None) -> Checkpoint:
    """The checkpoint in a file or folder; no tensor is read and nothing of it runs.

    ``weights`` picks one of several state_dicts by its name in the container, ``member`` one of several files in an
    archive. ``salvage`` gives what is whole of a damaged file; the rest is named in ``Checkpoint.lost``. Raises
    ``UnreadableError`` with the true cause where there is nothing."""
    if Path(path).is_dir():
        return open_document(read_folder(path, salvage), weights)
    content = unwrap(Content.of_file(path), member)
    try:
        return open_document(read_content(content, salvage), weights)
    finally:
        content.close()


def read_content(content: Content, salvage: bool) -> Document:
    """The document of one file's bytes, by the first format that knows how they begin."""
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
