"""Folders that are one checkpoint."""

from __future__ import annotations

from ckptfix.errors import UnreadableError
from ckptfix.formats.document import Document


def read_folder(path: str, salvage: bool) -> Document:
    """The document of a folder. Raises ``UnreadableError`` where it is no checkpoint."""
    raise UnreadableError(f"{path}: is a folder; name a checkpoint file in it")
