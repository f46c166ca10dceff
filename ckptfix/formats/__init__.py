"""The container formats: one module each, told apart by their bytes and never by a suffix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckptfix.checkpoint import Checkpoint
from ckptfix.errors import UnreadableError
from ckptfix.formats import safetensors, torch_legacy, torch_zip
from ckptfix.formats.containers import open_document
from ckptfix.formats.document import Document
from ckptfix.formats.sources import Content
from ckptfix.formats.strangers import name_stranger


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


def open_file(path: str, weights: str | None = None) -> Checkpoint:
    """The checkpoint in a file; no tensor is read and nothing of it runs.

    ``weights`` picks one of several state_dicts by its name in the container. Raises ``UnreadableError`` with the true
    cause where there is none."""
    content = Content.of_file(path)
    try:
        stranger = name_stranger(content)
        if stranger is not None:
            raise UnreadableError(stranger)
        start = bytes(content.buffer[:8])
        for form in FORMATS:
            if form.sniff(content):
                return open_document(form.read(content), weights)
    finally:
        content.close()
    raise UnreadableError(
        f"{path}: neither a torch file nor safetensors (it starts with {start!r}); is it the right file, and is the "
        "download complete?"
    )
