"""Opening a file or folder as a checkpoint: the container formats, recognised by content and never by extension."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from ckptfix.bytes.sources import Content
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.facts import WRONG_BYTES, Fact, Kind
from ckptfix.core.settings import SOURCE, Settings
from ckptfix.core.tree import tensors_in
from ckptfix.core.wording import clause, clauses
from ckptfix.errors import HostileError, UnreadableError, UsageError
from ckptfix.reading import sniffing
from ckptfix.reading.pickles.payload import refusing_payload
from ckptfix.reading.weights.containers import open_document
from ckptfix.reading.weights.document import Document

# What only some files need is imported when one of them comes: the first answer is to come at once.


@dataclass(frozen=True)
class Format:
    """A container format: its name, the module that reads it, and how its bytes begin."""

    name: str
    module: str
    sniff: Callable[[Content], bool]

    def read(self, content: Content) -> Document:
        """The document of a content of this format."""
        module = import_module(self.module)
        document: Document = module.read(content)
        return document


FORMATS = (
    Format("torchscript", "ckptfix.reading.torch_files.torchscript", sniffing.is_torchscript_zip),
    Format("torch-package", "ckptfix.reading.torch_files.torch_package", sniffing.is_torch_package_zip),
    Format("torch-zip", "ckptfix.reading.torch_files.torch_zip", sniffing.is_zip),
    Format("safetensors", "ckptfix.reading.safetensors", sniffing.is_safetensors),
    Format("torch-tar", "ckptfix.reading.torch_files.torch_tar", sniffing.is_torch_tar),
    Format("torch-legacy", "ckptfix.reading.torch_files.torch_legacy", sniffing.is_pickle),
)
"""Every format, in the order in which a file is asked."""


Source = str | os.PathLike[str] | Mapping[str, Any]
"""A checkpoint file, or a state_dict in memory."""


def open_source(source: Source, settings: Settings) -> Checkpoint:
    """Open a checkpoint file or a state_dict in memory, as the settings of a repair ask."""
    if not isinstance(source, Mapping):
        if not isinstance(source, (str, os.PathLike)):
            raise UsageError(f"the source is of type {type(source).__name__}; give a path or a state_dict")
        path, weights = os.fspath(source), settings.weights
        return open_file(path, weights, salvage=settings.salvage, member=settings.member, narrow=False)
    if settings.smoke_settings.compare == SOURCE:
        raise UsageError("--compare source: a state_dict in memory is no file to compare with; name one")
    from ckptfix.reading.memory import open_state_dict
    from ckptfix.reading.weights.prefixed_sets import with_pick

    checkpoint = open_state_dict(source)
    return checkpoint if settings.weights is None else with_pick(checkpoint, settings.weights)


def open_file(
    path: str, weights: str | None = None, *, salvage: bool = False, member: str | None = None, narrow: bool = True
) -> Checkpoint:
    """The checkpoint in a file or folder; no tensor is read and nothing of it runs.

    ``weights`` picks one of several state_dicts by its name in the container, or one of several sets in a state_dict by
    the prefix of its keys; without ``narrow``, the others stay beside it and ``Checkpoint.picked`` names it. ``member``
    picks one of several files in an archive. ``salvage`` gives what is whole of a damaged file; the rest is named in
    ``Checkpoint.lost``. Raises ``UnreadableError`` with the true cause where there is nothing."""
    if os.path.isdir(path):  # noqa: PTH112 - that of Path raises where a name is too long or a folder is closed
        from ckptfix.reading.folders.folders import read_folder, weights_file

        file = weights_file(path)
        if file is None:
            return open_document(read_folder(path, salvage, read_unwrapped), weights, salvage=salvage, narrow=narrow)
        path = file
    if member is None and (document := _read_ranks(path, salvage)) is not None:
        return open_document(document, weights, salvage=salvage, narrow=narrow)
    content = Content.of_file(path)
    if member is not None or sniffing.may_be_wrapped(content):
        from ckptfix.reading.archives.wrapped import unwrap

        content = unwrap(content, member)
    document = _read_index(content, salvage) or read_unwrapped(content, salvage)
    checkpoint = open_document(document, weights, salvage=salvage, narrow=narrow)
    return replace(checkpoint, path=path, member=content.member) if content.member else checkpoint


def _read_ranks(path: str, salvage: bool) -> Document | None:
    """The document of all ranks of a training, where the file is named like one of them and has others beside it."""
    if not sniffing.may_be_rank(path):
        return None
    from ckptfix.reading.folders.ranks.frameworks import read_siblings

    try:
        return read_siblings(Path(path), salvage, read_unwrapped)
    except OSError:
        return None  # whoever opens the file says why


def _read_index(content: Content, salvage: bool) -> Document | None:
    """The document of a sharded checkpoint, where the content is the index of one."""
    if not sniffing.may_be_json(content):
        return None
    from ckptfix.reading.folders import sharded

    return sharded.read(content, salvage) if sharded.sniff(content) else None


def read_unwrapped(content: Content, salvage: bool) -> Document:
    """The document of what came out of a compressed file or archive, with the damage of that first."""
    try:
        document = read_content(content, salvage)
    except HostileError:
        raise
    except UnreadableError as error:
        if not content.damage:
            raise
        inner = str(error).removeprefix(f"{content.path}: ")
        raise UnreadableError(f"{content.path}: {clauses(content.damage)}; what is in it {inner}") from error
    document.damage[:0] = content.damage
    document.remarks += _doubts(content)
    return document


def _doubts(content: Content) -> list[Fact]:
    """That tensors without a checksum of their own may be wrong, where what they were packed in fails its own."""
    return [Fact.of(Kind.DOUBTFUL_VALUES, cause=fact) for fact in content.damage if fact.kind in WRONG_BYTES]


def read_content(content: Content, salvage: bool) -> Document:
    """The document of one file's bytes, by the first format that knows how they begin.

    Where that does not work out, the checkpoint may begin behind something else, or have been transferred as text.
    """
    content.salvage = salvage
    with refusing_payload(content.path, content.bounds.names):
        return _read_or_mend(content)


def _read_or_mend(content: Content) -> Document:
    try:
        document = _read(content)
    except HostileError:
        raise
    except UnreadableError as error:
        mended = _read_mended(content)
        # In a plain pickle that is damaged, each tensor is a file of torch, which has no name for it.
        if mended is not None and (_tensors(mended) or not sniffing.is_pickle(content)):
            return mended
        from ckptfix.reading.foreign.files import name_stranger

        if (stranger := name_stranger(content)) is not None:
            raise UnreadableError(stranger) from error
        raise
    if not document.damage:
        return document
    mended = _read_mended(content)
    if mended is not None and _tensors(mended) >= _tensors(document):
        return mended  # less is what lies inside of a plain pickle: each of its tensors is a file of torch
    from ckptfix.reading.foreign.files import name_mangled

    if (mangled := name_mangled(content)) is not None:
        raise UnreadableError(f"{content.path}: {mangled}")
    return document


def _tensors(document: Document) -> int:
    from ckptfix.reading.pickles.arrays import arrays_in

    return sum(1 for _ in tensors_in(document.root)) + sum(1 for _ in arrays_in(document.root))


def _read_mended(content: Content) -> Document | None:
    """The document of a damaged file whose damage can be undone; None where it is damaged in another way."""
    from ckptfix.reading.foreign.pages import READ, as_text
    from ckptfix.reading.salvage.recovery import mend

    mended = mend(content)
    if mended is None:
        return None
    mended.content.salvage = content.salvage
    try:
        with refusing_payload(content.path, mended.content.bounds.names):
            document = _read(mended.content)
    except HostileError:
        raise
    except UnreadableError:
        document = None
    if mended.exact and (document is None or document.damage):
        if as_text(bytes(content.buffer[:READ])) is not None:
            return None  # the lines of a text end in CR LF by right
        raise UnreadableError(
            f"{content.path}: {clause(mended.cause)} only where no byte is missing; transfer it again in binary mode"
        )
    if document is not None:
        document.damage.insert(0, mended.cause)
    return document


def _read(content: Content) -> Document:
    for form in FORMATS:
        if form.sniff(content):
            return form.read(content)
    from ckptfix.reading.foreign.files import describe_unknown

    raise UnreadableError(f"{content.path}: {describe_unknown(content)}")
