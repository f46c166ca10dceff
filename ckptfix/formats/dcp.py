"""Folders of torch.distributed.checkpoint: ``.metadata`` and ``__<rank>_<n>.distcp`` files.

Every chunk of a tensor is a whole torch.save file at an offset of a ``.distcp`` file. Its inner record says where the
bytes lie, so a tensor of one chunk is a range of that file, and one of many chunks is put together when it is read;
``dcp_to_torch_save`` takes everything into memory instead. Format:
https://pytorch.org/docs/stable/distributed.checkpoint.html"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptfix.checkpoint import PathPart, Remark, Storage, TensorSpec
from ckptfix.errors import HostileError, UnreadableError
from ckptfix.finding import counted
from ckptfix.formats import torch_zip
from ckptfix.formats.chunks import Box, ChunkedBytes, RowMajorBytes, check_tiling
from ckptfix.formats.claims import checked
from ckptfix.formats.dcp_metadata import Location, StoredObject, StoredTensor, parse_metadata
from ckptfix.formats.document import Document
from ckptfix.formats.payload import payload_remarks
from ckptfix.formats.shard_index import file_inside
from ckptfix.formats.sources import Content
from ckptfix.formats.torn import TornBytes, is_torn
from ckptfix.formats.windows import WindowContent

NAME = "dcp"
METADATA = ".metadata"
_DEPTH_LIMIT = 100


def looks_like(folder: Path) -> bool:
    """Whether a folder holds what torch.distributed.checkpoint writes."""
    return (folder / METADATA).is_file() or any(folder.glob("*.distcp"))


def read_folder(folder: Path, salvage: bool) -> Document:
    """The document of a folder: the container that was saved, nested as it was.

    Tensors in files that are missing or damaged are torn. Raises ``UnreadableError`` where none is whole.
    """
    if not (folder / METADATA).is_file():
        raise UnreadableError(
            f"{folder}: chunks of torch.distributed.checkpoint without their {METADATA} file, which says what they"
            " are; files that begin with a dot are easily left behind: fetch it too"
        )
    return _Reading(folder).document()


class _Reading:
    """One reading of a folder: what comes out of it, what is damaged, and what was noticed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with _opened(folder / METADATA) as content:
            self.metadata = parse_metadata(content)
        self.contents: dict[str, Content] = {}
        self.names = set(self.metadata.names)
        self.remarks: dict[Remark, None] = {}
        self.leaves: dict[str, Any] = {}
        self.faults: dict[str, list[str]] = {}

    def document(self) -> Document:
        """The document of the folder."""
        try:
            for name, item in self.metadata.items.items():
                self._read(name, item)
        finally:
            for content in self.contents.values():
                content.close()
        whole = any(isinstance(leaf, TensorSpec) and not is_torn(leaf) for leaf in self.leaves.values())
        if self.faults and not whole:
            raise UnreadableError(f"{self.folder}: {'; '.join(self._damage())}; no tensor is whole: fetch it again")
        return Document(
            str(self.folder),
            NAME,
            self._nested(),
            names=self.names,
            remarks=[*payload_remarks(self.names), *(mark for mark in self.remarks if mark.kind != "payload")],
            damage=self._damage(),
        )

    def _read(self, name: str, item: StoredTensor | StoredObject) -> None:
        try:
            self.leaves[name] = (
                self._tensor(name, item) if isinstance(item, StoredTensor) else self._load(item.location)
            )
        except HostileError:
            raise
        except UnreadableError as error:
            self.faults.setdefault(str(error), []).append(name)
            if isinstance(item, StoredTensor):
                gone = TornBytes(str(self.folder), item.spec.nbytes)
                self.leaves[name] = replace(item.spec, storage=Storage(name, gone))

    def _tensor(self, name: str, item: StoredTensor) -> TensorSpec:
        """The spec of a tensor: that of its only chunk, or one over all of its chunks."""
        boxes = [box for box, _ in item.chunks]
        check_tiling(boxes, item.shape, name)
        parts = [self._chunk(name, item.dtype, box, location) for box, location in item.chunks]
        if len(parts) == 1:
            return parts[0]
        path, spec = str(self.folder), item.spec
        sources = [(box, RowMajorBytes(part, path)) for box, part in zip(boxes, parts, strict=True)]
        storage = Storage(name, ChunkedBytes(item.shape, spec.itemsize, sources))
        return checked(replace(spec, storage=storage), path)

    def _chunk(self, name: str, dtype: str, box: Box, location: Location | None) -> TensorSpec:
        part = self._load(location)
        if not isinstance(part, TensorSpec) or (part.dtype, part.shape) != (dtype, box.shape):
            raise UnreadableError(f"the chunk of {name} at {list(box.offsets)} is not what {METADATA} says")
        return part

    def _load(self, location: Location | None) -> Any:
        """The root of the torch.save file at a location."""
        if location is None:
            raise UnreadableError(f"{METADATA} does not say where it lies")
        outer = self._content(location.file)
        stop = location.offset + location.nbytes
        if stop > len(outer):
            raise UnreadableError(f"{location.file} is cut short")
        content = WindowContent(outer, location.offset, stop)
        if not torch_zip.sniff(content):
            raise UnreadableError(f"{location.file} holds no torch.save file at byte {location.offset}")
        document = torch_zip.read(content)
        if document.damage:
            raise UnreadableError(f"{location.file} {'; '.join(document.damage)}")
        self.names.update(document.names)
        self.remarks.update(dict.fromkeys(document.remarks))
        return document.root

    def _content(self, name: str) -> Content:
        if name not in self.contents:
            file = file_inside(self.folder, name, str(self.folder / METADATA))
            if not file.is_file():
                raise UnreadableError(f"{name} is missing")
            self.contents[name] = Content.of_file(str(file))
        return self.contents[name]

    def _path(self, name: str) -> tuple[PathPart, ...]:
        return self.metadata.paths.get(name, (name,))

    def _nested(self) -> Any:
        """The container as it was saved: the planner flattened it and wrote down the path of every leaf."""
        root = _Node()
        for name, leaf in self.leaves.items():
            *folders, last = self._path(name)
            node: Any = root
            for part in folders:
                node = node.setdefault(part, _Node()) if isinstance(node, _Node) else None
            if not isinstance(node, _Node) or last in node or len(folders) > _DEPTH_LIMIT:
                raise UnreadableError(
                    f"{self.folder}: {name} has no place of its own in the container; {METADATA} is damaged:"
                    " fetch it again"
                )
            node[last] = leaf
        return _plain(root)

    def _damage(self) -> list[str]:
        """What is wrong, each as a clause behind the folder's name, with the number of items that it costs."""
        return [f"has damage: {fault} ({counted(len(names), 'item')})" for fault, names in self.faults.items()]


class _Node(dict[PathPart, Any]):
    """A dict or list of the container, told apart from a dict that was saved as a leaf."""


def _plain(value: Any) -> Any:
    """The container of plain dicts and lists; a list is what the planner numbered from 0 on."""
    if not isinstance(value, _Node):
        return value
    if all(isinstance(key, int) for key in value) and sorted(value) == list(range(len(value))):
        return [_plain(value[index]) for index in range(len(value))]
    return {key: _plain(member) for key, member in value.items()}


@contextmanager
def _opened(path: Path) -> Iterator[Content]:
    content = Content.of_file(str(path))
    try:
        yield content
    finally:
        content.close()
