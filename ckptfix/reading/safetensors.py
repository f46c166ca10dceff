"""The safetensors format: 8 bytes of header length, a JSON header, and the bytes of the tensors without gaps.

Specification: https://github.com/huggingface/safetensors#format. Nothing in the format tells a damaged tensor from a
whole one: if the file's size is not that of its layout, the tensors that may be others are named.

safetensors has no room for what surrounds a state_dict. ckptfix keeps it in ``__metadata__`` as JSON under three names:
``ckptfix.metadata`` (torch's ``_metadata``), ``ckptfix.ties`` (alias → stored key) and ``ckptfix.container`` (path and
plain extras)."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptfix.bytes.limits import Bounds
from ckptfix.bytes.sources import BLOCK, Content
from ckptfix.bytes.torn import TornBytes, unfilled_from
from ckptfix.core.dtypes import BY_SAFETENSORS
from ckptfix.core.facts import Fact, Kind
from ckptfix.core.notes import restore_container
from ckptfix.core.spec import ByteSource, Storage, TensorSpec, contiguous_strides
from ckptfix.errors import UnreadableError
from ckptfix.reading.safetensors_header import check_layout, padding_behind, read_header, shape_of
from ckptfix.reading.weights.document import Document

NAME = "safetensors"
_LEAST_TEXT = 8
_ANOTHER_FILE = re.compile(rb'PK\x03\x04|.{4}\0{4}\{\s*"', re.DOTALL)
METADATA, TIES, CONTAINER = "ckptfix.metadata", "ckptfix.ties", "ckptfix.container"


def read(content: Content, nesting: int = 0) -> Document:
    """The document of a safetensors file: a flat state_dict, or the container that ``__metadata__`` describes.

    Tensors that the file has lost are torn. Raises ``UnreadableError`` where the header itself is not whole or sound.
    """
    header, start, damage = read_header(content)
    notes = header.pop("__metadata__", {})
    if notes is None:
        notes = {}  # as the library takes it
    if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
        raise UnreadableError(
            f"{content.path}: the header's __metadata__ is not a map of texts; the file is damaged: fetch it again"
        )
    nbytes = check_layout(content, header)
    if padding_behind(content, start, len(content) - start - nbytes):
        start = len(content) - nbytes
        damage.append(Fact(Kind.HEADER_PADDING))
    end = start + nbytes
    specs = {key: _spec(record) for key, record in header.items()}
    placed = [(start + header[key]["data_offsets"][0], spec) for key, spec in specs.items()]
    zeros = unfilled_from(content, placed)
    if end != len(content):
        damage.append(_misfit(nbytes, len(content) - start))
    if zeros is not None:
        damage.append(Fact.of(Kind.UNFILLED, nbytes=len(content), zeros=len(content) - zeros))
    state_dict: OrderedDict[str, Any] = OrderedDict()
    for (begin, spec), key in zip(placed, specs, strict=True):
        source = _source(content, begin, spec.nbytes, end if zeros is None else zeros)
        state_dict[key] = replace(spec, storage=Storage(key, source))
    document = _restore(content.path, content.bounds, state_dict, notes)
    document.damage += damage
    surplus = len(content) - end
    if surplus and not _is_appended(content, end):
        why = Fact.of(Kind.BYTES_BEFORE, surplus=surplus)
        for (begin, spec), key in zip(placed, specs, strict=True):
            if _is_doubtful(content, begin, spec.nbytes, surplus):
                document.remarks.append(Fact.of(Kind.DOUBTFUL_VALUES, key, cause=why))
    return document


def _is_appended(content: Content, end: int) -> bool:
    """Whether the bytes after the last tensor are something of their own: another file, a text, or zeros that follow
    a number. Then no tensor is doubtful."""
    from ckptfix.reading.foreign.pages import as_text

    tail = bytes(content.buffer[end : end + BLOCK])
    if not tail.strip(b"\r\n"):
        return bool(tail)
    is_last_filled = bytes(content.buffer[end - 1 : end]) != b"\0"
    is_text = len(tail) >= _LEAST_TEXT and as_text(tail) is not None
    return bool(_ANOTHER_FILE.match(tail)) or is_text or (is_last_filled and not any(tail))


def _is_doubtful(content: Content, begin: int, nbytes: int, surplus: int) -> bool:
    """Whether a tensor that is there as a whole is another one if the surplus (or lack) of bytes is before it.

    The file does not say where the bytes are missing or too many: a resumed download may leave out a block in the
    middle, or fetch it twice."""
    stop = begin + nbytes
    return stop <= len(content) and any(
        content.buffer[at : min(at + BLOCK, stop)] != content.buffer[at + surplus : min(at + BLOCK, stop) + surplus]
        for at in range(begin, stop, BLOCK)
    )


def _misfit(needed: int, there: int) -> Fact:
    """Return that a file does not end where its tensors do."""
    if needed > there:
        return Fact.of(Kind.DATA_CUT, needed=needed, there=there)
    return Fact.of(Kind.DATA_SURPLUS, surplus=there - needed)


def _spec(record: Mapping[str, Any]) -> TensorSpec:
    """What the header says of a tensor."""
    dtype = BY_SAFETENSORS[record["dtype"]]
    shape = shape_of(dtype, record["shape"])
    return TensorSpec(dtype.name, shape, contiguous_strides(shape))


def _source(content: Content, start: int, nbytes: int, end: int) -> ByteSource:
    """The bytes of a tensor, as far as they are there."""
    present = max(0, min(nbytes, len(content) - start, end - start))
    source = content.source(start, present)
    return source if present == nbytes else TornBytes(content.path, nbytes, present, source)


def _restore(path: str, bounds: Bounds, state_dict: OrderedDict[str, Any], notes: Mapping[str, str]) -> Document:
    """Put ties, ``_metadata`` and the container back, where ckptfix wrote the file."""
    remarks = [Fact.of(Kind.NOTE, name, text=value) for name, value in notes.items() if not name.startswith("ckptfix.")]

    def note(name: str) -> dict[str, Any]:
        """A note of ours. One that somebody else damaged is no reason to refuse the weights."""
        fault = "is no JSON object"
        try:
            value = bounds.parse_json(notes[name]) if name in notes else {}
        except (ValueError, RecursionError) as error:
            value, fault = None, f"is no valid JSON ({error})"
        if isinstance(value, dict):
            return value
        remarks.append(Fact.of(Kind.DAMAGED_NOTE, name, fault=fault))
        return {}

    loose = []
    for alias, key in note(TIES).items():
        if isinstance(key, str) and key in state_dict and alias not in state_dict:
            state_dict[alias] = state_dict[key]
        else:
            loose.append(alias)
    if loose:
        remarks.append(Fact.of(Kind.DAMAGED_NOTE, TIES, fault=f"does not fit the tensors (as {loose[0]!r:.60})"))
    root = restore_container(state_dict, note(CONTAINER))
    return Document(path, NAME, root, note(METADATA) or None, set(), remarks)
