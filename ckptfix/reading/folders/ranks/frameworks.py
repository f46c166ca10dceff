"""The frameworks whose folders of ranks open as one checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckptfix.reading.folders.ranks import fsdp, llama, megatron, pipeline, universal, zero
from ckptfix.reading.folders.ranks.files import ReadContent, Reader
from ckptfix.reading.weights.document import Document


@dataclass(frozen=True)
class Framework:
    """How the ranks of a framework are read.

    ``read`` returns the merged document of a folder, None if the folder is not one of that framework. ``of_file`` says
    by its name alone what to read for a file that is one of several ranks: their folder, and what reads it."""

    name: str
    read: Reader
    of_file: Callable[[Path], tuple[Path, Reader] | None]


FRAMEWORKS = (
    Framework(pipeline.NAME, pipeline.read_folder, pipeline.of_file),
    Framework(universal.NAME, universal.read_folder, universal.of_file),
    Framework(zero.NAME, zero.read_folder, zero.of_file),
    Framework(megatron.NAME, megatron.read_folder, megatron.of_file),
    Framework(llama.NAME, llama.read_folder, llama.of_file),
    Framework(fsdp.NAME, fsdp.read_folder, fsdp.of_file),
)
"""Every framework, in the order in which a folder is asked."""


def read_ranks(folder: Path, salvage: bool, read: ReadContent) -> Document | None:
    """Return the document of a folder that ranks wrote; None if no framework knows it."""
    found = (form.read(folder, salvage, read) for form in FRAMEWORKS)
    return next((document for document in found if document is not None), None)


def read_siblings(file: Path, salvage: bool, read: ReadContent) -> Document | None:
    """Return the document of all ranks beside a file that is one of them; None for any other file."""
    for form in FRAMEWORKS:
        if (found := form.of_file(file)) is not None:
            folder, read_folder = found
            return read_folder(folder, salvage, read)
    return None
