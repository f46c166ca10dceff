"""The frameworks whose folders of ranks open as one checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from ckptfix.reading.folders.ranks import fsdp, llama, megatron, nanotron, pipeline, universal, zero
from ckptfix.reading.folders.ranks.files import RankFiles, ReadContent
from ckptfix.reading.weights.document import Document

# Every framework, in the order in which a folder is asked: a module with
# `find(folder)`: the folder in which the ranks are by the names in it, which is this one or one below it;
# `folder_of(file)`: the same for a file that is one of several ranks by its name;
# `document(files)`: the merged document, None if the files are something else after all.
# What its files are called is in `names.py`.
FRAMEWORKS: tuple[ModuleType, ...] = (pipeline, universal, zero, megatron, llama, nanotron, fsdp)


def read_ranks(folder: Path, salvage: bool, read: ReadContent) -> Document | None:
    """Return the document of a folder that ranks wrote; None if no framework knows it."""
    found = (
        _merged(form, RankFiles(place, salvage, read))
        for form in FRAMEWORKS
        if (place := form.find(folder)) is not None
    )
    return next((document for document in found if document is not None), None)


def has_ranks(folder: Path) -> bool:
    """Return whether a folder is one that ranks wrote, by the names in it, or by the first file if names do not tell.

    Raises ``UnreadableError`` if it holds several such checkpoints."""
    try:
        return any(form.find(folder) is not None for form in FRAMEWORKS if form is not fsdp) or fsdp.is_named(folder)
    except OSError:
        return False  # the reader of the folder says why


def read_siblings(file: Path, salvage: bool, read: ReadContent) -> Document | None:
    """Return the document of all ranks beside a file that is one of them; None for any other file."""
    for form in FRAMEWORKS:
        if (folder := form.folder_of(file)) is not None:
            return _merged(form, RankFiles(folder, salvage, read, named=file))
    return None


def _merged(form: ModuleType, files: RankFiles) -> Document | None:
    with files.merging():
        document: Document | None = form.document(files)
        return document
