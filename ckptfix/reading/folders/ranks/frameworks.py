"""The frameworks whose folders of ranks open as one checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from ckptfix.reading.folders.ranks import fsdp, llama, megatron, nanotron, pipeline, universal, zero
from ckptfix.reading.folders.ranks.files import ReadContent, Reader
from ckptfix.reading.weights.document import Document


class Framework(Struct, frozen=True):
    """How the ranks of a framework are read. What its files are called is in ``names.py``.

    ``find`` returns the folder in which the ranks are by the names in it: a folder itself, or one below it.
    ``read`` returns the merged document of that; None if its files are something else after all. ``of_file`` says by
    its name what to read for a file that is one of several ranks: their folder, and what reads it."""

    find: Callable[[Path], Path | None]
    read: Reader
    of_file: Callable[[Path], tuple[Path, Reader] | None]


# Every framework, in the order in which a folder is asked.
FRAMEWORKS = (
    Framework(pipeline.find, pipeline.read_folder, pipeline.of_file),
    Framework(universal.find, universal.read_folder, universal.of_file),
    Framework(zero.find, zero.read_folder, zero.of_file),
    Framework(megatron.find, megatron.read_folder, megatron.of_file),
    Framework(llama.find, llama.read_folder, llama.of_file),
    Framework(nanotron.find, nanotron.read_folder, nanotron.of_file),
    Framework(fsdp.find, fsdp.read_folder, fsdp.of_file),
)


def read_ranks(folder: Path, salvage: bool, read: ReadContent) -> Document | None:
    """Return the document of a folder that ranks wrote; None if no framework knows it."""
    found = (form.read(place, salvage, read) for form in FRAMEWORKS if (place := form.find(folder)) is not None)
    return next((document for document in found if document is not None), None)


def has_ranks(folder: Path) -> bool:
    """Return whether a folder is one that ranks wrote, by the names in it, or by the first file if names do not tell.

    Raises ``UnreadableError`` if it holds several such checkpoints."""
    try:
        return any(form.find(folder) is not None for form in FRAMEWORKS if form.find is not fsdp.find) or fsdp.is_named(
            folder
        )
    except OSError:
        return False  # the reader of the folder says why


def read_siblings(file: Path, salvage: bool, read: ReadContent) -> Document | None:
    """Return the document of all ranks beside a file that is one of them; None for any other file."""
    for form in FRAMEWORKS:
        if (found := form.of_file(file)) is not None:
            folder, read_folder = found
            return read_folder(folder, salvage, read)
    return None
