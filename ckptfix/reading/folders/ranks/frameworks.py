"""The frameworks whose folders of ranks open as one checkpoint, in the order in which a folder is asked."""

from __future__ import annotations

from pathlib import Path

from ckptfix.reading.folders.ranks import fsdp, llama, megatron, zero
from ckptfix.reading.folders.ranks.files import ReadContent
from ckptfix.reading.weights.document import Document

FRAMEWORKS = (zero.read_folder, megatron.read_folder, llama.read_folder, fsdp.read_folder)
"""Each returns the merged document of a folder, or None if the folder is not one of that framework."""


def read_ranks(folder: Path, salvage: bool, read: ReadContent) -> Document | None:
    """Return the document of a folder that ranks wrote; None if no framework knows it."""
    return next((document for form in FRAMEWORKS if (document := form(folder, salvage, read)) is not None), None)
