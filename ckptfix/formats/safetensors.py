"""The safetensors format: 8 bytes of header length, a JSON header, and the bytes of the tensors without gaps.

Specification: https://github.com/huggingface/safetensors#format. The clauses of the specification that a file can
violate are checked one by one, and the error names the clause.

safetensors has no room for what surrounds a state_dict. ckptfix keeps it in ``__metadata__`` as JSON under three names:
``ckptfix.metadata`` (torch's ``_metadata``), ``ckptfix.ties`` (alias → stored key) and ``ckptfix.container`` (path and
plain extras)."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from ckptfix.checkpoint import Remark, Storage, TensorSpec, contiguous_strides
from ckptfix.dtypes import BY_SAFETENSORS
from ckptfix.errors import UnreadableError
from ckptfix.formats.document import Document
from ckptfix.formats.notes import restore_container
from ckptfix.formats.sources import Content

NAME = "safetensors"
HEADER_LIMIT = 100_000_000
METADATA, TIES, CONTAINER = "ckptfix.metadata", "ckptfix.ties", "ckptfix.container"


def sniff(content: Content) -> bool:
    """Whether the content starts as the specification says: the header begins with ``{`` behind the 8 bytes of its
    length.
    """
    return bytes(content.buffer[8:9]) == b"{"


def read(content: Content, nesting: int = 0) -> Document:
    """The document of a safetensors file: a flat state_dict, or the container that ``__metadata__`` describes."""
    header, start = _header(content)
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
        raise UnreadableError(
            f"{content.path}: the header's __metadata__ is not a map of texts; the file is damaged: fetch it again"
        )
    _check_layout(content, header, start)
    state_dict: OrderedDict[str, Any] = OrderedDict()
    for key, record in header.items():
        begin, end = record["data_offsets"]
        shape = tuple(record["shape"])
        storage = Storage(key, content.source(start + begin, end - begin))
        state_dict[key] = TensorSpec(BY_SAFETENSORS[record["dtype"]].name, shape, contiguous_strides(shape), storage)
    return _restore(content.path, state_dict, notes)


def _header(content: Content) -> tuple[dict[str, Any], int]:
    """The parsed header and the offset of the first tensor byte."""
    path, size = content.path, len(content)
    length = int.from_bytes(content.buffer[:8], "little")
    if size < 8 or length > HEADER_LIMIT or 8 + length > size:
        raise UnreadableError(
            f"{path}: the header declares {length} bytes and the file has {size}: a file that is cut short, or no "
            "safetensors (HeaderTooLarge); fetch it again"
        )
    try:
        header = json.loads(bytes(content.buffer[8 : 8 + length]), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(
            f"{path}: the header is no valid JSON ({error}): damaged, or no safetensors; fetch it again"
        ) from error
    if not isinstance(header, dict):
        raise UnreadableError(f"{path}: the header is no JSON object; the file is damaged: fetch it again")
    return header, 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        doubled = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {doubled!r:.60} stands twice in it")
    return dict(pairs)


def _check_layout(content: Content, header: Mapping[str, Any], start: int) -> None:
    """Every tensor's dtype, shape and offsets agree, and together they cover the data without gap or overlap."""
    path = content.path
    position = 0
    for key, record in sorted(header.items(), key=lambda item: _begin(path, *item)):
        begin, end = record["data_offsets"]
        dtype = BY_SAFETENSORS.get(record["dtype"])
        if dtype is None:
            raise UnreadableError(
                f"{path}: tensor {key} has the dtype {record['dtype']!r:.20}, which this version does not know"
            )
        spec = TensorSpec(dtype.name, tuple(record["shape"]))
        if end - begin != spec.nbytes:
            raise UnreadableError(
                f"{path}: tensor {key} of {record['dtype']} {record['shape']} needs {spec.nbytes} bytes and its "
                f"data_offsets give {end - begin}; fetch the file again"
            )
        if begin != position:
            fault = "overlap" if begin < position else "leave a gap"
            raise UnreadableError(
                f"{path}: the data_offsets of {key} {fault} at byte {begin} (clause: no overlap, no holes); fetch the "
                "file again"
            )
        position = end
    present = len(content) - start
    if present < position:
        raise UnreadableError(
            f"{path}: the header describes {position} bytes of tensors and {present} are there "
            "(MetadataIncompleteBuffer):"
            " the file is cut short; fetch it again"
        )
    if present > position:
        raise UnreadableError(
            f"{path}: {present - position} bytes follow the last tensor (incomplete metadata, file not fully "
            "covered); the file was appended to: fetch it again"
        )


def _begin(path: str, key: str, record: Any) -> tuple[int, int]:
    """The offsets of a tensor, once its record has the form that the specification asks for."""
    form = isinstance(record, dict) and isinstance(record.get("dtype"), str)
    for name in ("shape", "data_offsets"):
        value = record.get(name) if form else None
        form = form and isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)
    if not form or len(record["data_offsets"]) != 2 or record["data_offsets"][0] > record["data_offsets"][1]:
        raise UnreadableError(
            f"{path}: the header's record of {key!r:.60} is malformed; the file is damaged: fetch it again"
        )
    begin, end = record["data_offsets"]
    return begin, end


def _restore(path: str, state_dict: OrderedDict[str, Any], notes: Mapping[str, str]) -> Document:
    """Put ties, ``_metadata`` and the container back, where ckptfix wrote the file."""

    def note(name: str) -> Any:
        try:
            value = json.loads(notes[name]) if name in notes else {}
        except (ValueError, RecursionError) as error:
            raise UnreadableError(
                f"{path}: the note {name} in __metadata__ is no valid JSON ({error}); fetch the file again"
            ) from error
        if not isinstance(value, dict):
            raise UnreadableError(f"{path}: the note {name} in __metadata__ is no JSON object; fetch the file again")
        return value

    remarks = [Remark("note", name, value) for name, value in notes.items() if not name.startswith("ckptfix.")]
    ties = note(TIES)
    for alias, key in ties.items():
        if key not in state_dict or alias in state_dict:
            raise UnreadableError(
                f"{path}: the note {TIES} ties {alias} to {key}, which does not fit the tensors; fetch the file again"
            )
        state_dict[alias] = state_dict[key]
    root = restore_container(state_dict, note(CONTAINER))
    return Document(path, NAME, root, note(METADATA) or None, set(), remarks)
