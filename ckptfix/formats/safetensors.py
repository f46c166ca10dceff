"""The safetensors format: 8 bytes of header length, a JSON header, and the bytes of the tensors without gaps.

Specification: https://github.com/huggingface/safetensors#format. The clauses of the specification that a file can
violate are checked one by one, and the error names the clause.

safetensors has no room for what surrounds a state_dict. ckptfix keeps it in ``__metadata__`` as JSON under three names:
``ckptfix.metadata`` (torch's ``_metadata``), ``ckptfix.ties`` (alias → stored key) and ``ckptfix.container`` (path and
plain extras)."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

from ckptfix.checkpoint import ByteSource, Remark, Storage, TensorSpec, contiguous_strides
from ckptfix.dtypes import BY_SAFETENSORS, DType
from ckptfix.errors import UnreadableError
from ckptfix.formats.document import Document
from ckptfix.formats.notes import restore_container
from ckptfix.formats.sources import Content
from ckptfix.formats.torn import TornBytes, zero_tail

NAME = "safetensors"
HEADER_LIMIT = 100_000_000
_DOUBTFUL = 64
"""Zeros at the end of a damaged file that were not computed where they begin in the middle of a tensor."""
METADATA, TIES, CONTAINER = "ckptfix.metadata", "ckptfix.ties", "ckptfix.container"


def sniff(content: Content) -> bool:
    """Whether the content starts as the specification says: the header begins with ``{`` behind the 8 bytes of its
    length.
    """
    return bytes(content.buffer[8:9]) == b"{"


def read(content: Content, nesting: int = 0) -> Document:
    """The document of a safetensors file: a flat state_dict, or the container that ``__metadata__`` describes.

    Tensors that the file has lost are torn. Raises ``UnreadableError`` where the header itself is not whole or sound.
    """
    header, start, damage = _header(content)
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
        raise UnreadableError(
            f"{content.path}: the header's __metadata__ is not a map of texts; the file is damaged: fetch it again"
        )
    end = start + _check_layout(content, header)
    if end > len(content):
        damage.append(
            f"is cut short: its header describes {end - start} bytes of tensors and {len(content) - start} are there "
            "(MetadataIncompleteBuffer)"
        )
    elif end < len(content):
        damage.append(
            f"has {len(content) - end} bytes behind its last tensor (incomplete metadata, file not fully covered)"
        )
    filled = _filled(content, header, start) if content.salvage and end == len(content) else end
    if filled < end:
        damage.append(
            f"is not complete: of its {end} bytes the last {end - filled} are zeros that were reserved and never filled"
        )
    state_dict: OrderedDict[str, Any] = OrderedDict()
    for key, record in header.items():
        begin, stop = record["data_offsets"]
        shape = _shape(BY_SAFETENSORS[record["dtype"]], record["shape"])
        storage = Storage(key, _source(content, start + begin, stop - begin, filled))
        state_dict[key] = TensorSpec(BY_SAFETENSORS[record["dtype"]].name, shape, contiguous_strides(shape), storage)
    document = _restore(content.path, state_dict, notes)
    document.damage += damage
    return document


def _filled(content: Content, header: Mapping[str, Any], start: int) -> int:
    """Where the tensors of a file that is known to be damaged end, and the space begins that was never filled.

    Zeros at the end are believed to be tensors unless they begin in the middle of floating-point numbers, or a whole
    matrix of such is in them."""
    zeros = zero_tail(content)
    for record in header.values():
        begin, end = (start + offset for offset in record["data_offsets"])
        is_matrix = begin >= zeros and len(record["shape"]) > 1
        is_cut = begin < zeros and len(content) - zeros >= _DOUBTFUL
        if begin < end and end > zeros and (is_matrix or is_cut) and "F" in record["dtype"]:
            return zeros
    return len(content)


def _source(content: Content, start: int, nbytes: int, end: int) -> ByteSource:
    """The bytes of a tensor, as far as they are there."""
    present = max(0, min(nbytes, len(content) - start, end - start))
    source = content.source(start, present)
    return source if present == nbytes else TornBytes(content.path, nbytes, present, source)


def _header(content: Content) -> tuple[dict[str, Any], int, list[str]]:
    """The parsed header, the offset of the first tensor byte, and what is wrong with the length that it declares."""
    path, size = content.path, len(content)
    length = int.from_bytes(content.buffer[:8], "little")
    if size < 8 or length > HEADER_LIMIT or 8 + length > size:
        return _header_by_its_end(content, length)
    try:
        header = json.loads(bytes(content.buffer[8 : 8 + length]), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(
            f"{path}: the header is no valid JSON ({error}): damaged, or no safetensors; fetch it again"
        ) from error
    if not isinstance(header, dict):
        raise UnreadableError(f"{path}: the header is no JSON object; the file is damaged: fetch it again")
    return header, 8 + length, []


def _header_by_its_end(content: Content, length: int) -> tuple[dict[str, Any], int, list[str]]:
    """The header where its length is wrong: whole JSON, its padding of spaces, and exactly the tensors behind it."""
    path, size = content.path, len(content)
    fault = f"the header declares {length} bytes and the file has {size}"
    text = bytes(content.buffer[8 : 8 + HEADER_LIMIT]).decode("utf-8", "surrogateescape")
    try:
        header, end = json.JSONDecoder(object_pairs_hook=_unique).raw_decode(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(
            f"{path}: {fault}: a file that is cut short in its header, or no safetensors (HeaderTooLarge); fetch it"
            " again"
        ) from error
    behind = 8 + len(text[:end].encode("utf-8", "surrogateescape"))
    if not isinstance(header, dict):
        raise UnreadableError(f"{path}: {fault} (HeaderTooLarge), and it is no JSON object; fetch the file again")
    start = size - _check_layout(content, {key: value for key, value in header.items() if key != "__metadata__"})
    # Writers pad the header with spaces to a multiple of 8. A space that could be padding or data leaves it open where
    # the tensors begin, and with it whether the file is cut.
    padding = bytes(content.buffer[behind : max(start, behind + 1)])
    is_padded = behind <= start < behind + 8 and start % 8 == 0 and not padding[: start - behind].strip(b" ")
    if not is_padded and not (start == behind and padding != b" "):
        raise UnreadableError(
            f"{path}: {fault} (HeaderTooLarge), and where its tensors begin cannot be told; fetch the file again"
        )
    return header, start, [f"is damaged: {fault} (HeaderTooLarge)"]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        doubled, _ = Counter(keys).most_common(1)[0]
        raise ValueError(f"the key {doubled!r:.60} stands twice in it")
    return dict(pairs)


def _check_layout(content: Content, header: Mapping[str, Any]) -> int:
    """The size of all tensors, once every one's dtype, shape and offsets agree and they leave no gap and no overlap."""
    path = content.path
    position = 0
    for key, record in sorted(header.items(), key=lambda item: _begin(path, *item)):
        begin, end = record["data_offsets"]
        dtype = BY_SAFETENSORS.get(record["dtype"])
        if dtype is None:
            raise UnreadableError(
                f"{path}: tensor {key} has the dtype {record['dtype']!r:.20}, which this version does not know"
            )
        spec = TensorSpec(dtype.name, _shape(dtype, record["shape"]))
        if end - begin != spec.nbytes or (record["shape"] or [0])[-1] % dtype.packed:
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
    return position


def _shape(dtype: DType, shape: list[int]) -> tuple[int, ...]:
    """The shape that torch gives a tensor of a dtype."""
    return (*shape[:-1], *(size // dtype.packed for size in shape[-1:]))


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _begin(path: str, key: str, record: Any) -> tuple[int, int]:
    """The offsets of a tensor, once its record has the form that the specification asks for."""
    form = isinstance(record, dict) and isinstance(record.get("dtype"), str)
    for name in ("shape", "data_offsets"):
        value = record.get(name) if form else None
        form = isinstance(value, list) and len(value) <= 64 and all(_is_size(size) for size in value)
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
        if not isinstance(key, str) or key not in state_dict or alias in state_dict:
            raise UnreadableError(
                f"{path}: the note {TIES} ties {alias} to {key}, which does not fit the tensors; fetch the file again"
            )
        state_dict[alias] = state_dict[key]
    root = restore_container(state_dict, note(CONTAINER))
    return Document(path, NAME, root, note(METADATA) or None, set(), remarks)
