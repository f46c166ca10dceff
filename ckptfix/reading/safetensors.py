"""The safetensors format: 8 bytes of header length, a JSON header, and the bytes of the tensors without gaps.

Specification: https://github.com/huggingface/safetensors#format. The format has no checksums: if the file's size does
not match its layout, remarks name the tensors whose values are in doubt.

safetensors has no place for the container around a state_dict. ckptfix stores it in ``__metadata__`` as JSON under
three names: ``ckptfix.metadata`` (torch's ``_metadata``), ``ckptfix.ties`` (alias → stored key) and
``ckptfix.container`` (path and plain extras)."""

import json
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from ckptfix.bytes.limits import Bounds, shown, unique_keys
from ckptfix.bytes.sources import BLOCK, Content, TornBytes, unfilled_from
from ckptfix.core.dtypes import BY_SAFETENSORS
from ckptfix.core.facts import Fact, Kind
from ckptfix.core.notes import restore_container
from ckptfix.core.spec import Storage, TensorSpec, contiguous_strides
from ckptfix.errors import UnreadableError, damaged
from ckptfix.reading.sniffing import SAFETENSORS_HEADER_LIMIT as HEADER_LIMIT
from ckptfix.reading.weights.document import Document

NAME = "safetensors"
_LEAST_TEXT = 8
_ANOTHER_FILE = rb'(?s)PK\x03\x04|.{4}\0{4}\{\s*"'
METADATA, TIES, CONTAINER = "ckptfix.metadata", "ckptfix.ties", "ckptfix.container"


def read(content: Content) -> Document:
    """Return the document of a safetensors file: a flat state_dict, or the container that ``__metadata__`` describes.

    Tensors that the file has lost are torn. Raises ``UnreadableError`` if the header is truncated or invalid."""
    header, start = read_header(content)
    damage: list[Fact] = []
    notes = header.pop("__metadata__", {})
    if notes is None:
        notes = {}  # as in the library
    if not isinstance(notes, dict):
        raise damaged(content.path, "the header's __metadata__ does not map strings to strings: the file is damaged")
    odd = [name for name, value in notes.items() if not isinstance(value, str)]
    notes |= {name: json.dumps(notes[name]) for name in odd}
    placed, nbytes = check_layout(content, header)
    last = len(content) - nbytes  # start of the tensors if the header's length leaves out its padding
    if start < last < start + ALIGNMENT and not last % ALIGNMENT and not content[start:last].strip(b" "):
        start = last
        damage.append(Fact(Kind.HEADER_PADDING))
    end = start + nbytes
    zeros = unfilled_from(content, [(start + begin, spec) for begin, spec in placed.values()])
    if end > len(content):
        damage.append(Fact.of(Kind.DATA_CUT, needed=nbytes, there=len(content) - start))
    elif end < len(content):
        damage.append(Fact.of(Kind.DATA_SURPLUS, surplus=len(content) - end))
    if zeros is not None:
        damage.append(Fact.of(Kind.UNFILLED, nbytes=len(content), zeros=len(content) - zeros))
    state_dict: OrderedDict[str, Any] = OrderedDict()
    for key, (begin, spec) in placed.items():
        filled = end if zeros is None else zeros
        present = max(0, min(spec.nbytes, len(content) - start - begin, filled - start - begin))
        source = content.source(start + begin, present)
        if present < spec.nbytes:
            source = TornBytes(content.path, spec.nbytes, present, source)
        state_dict[key] = replace(spec, storage=Storage(key, source))
    document = _restore(content.path, content.bounds, state_dict, notes)
    document.damage += damage
    if odd:
        document.remarks.append(Fact.of(Kind.HEADER_NOTES, keys=tuple(odd)))
    surplus = len(content) - end
    if surplus and not _is_appended(content, end):
        why = Fact.of(Kind.BYTES_BEFORE, surplus=surplus)
        for key, (begin, spec) in placed.items():
            if _is_doubtful(content, start + begin, spec.nbytes, surplus):
                document.remarks.append(Fact.of(Kind.DOUBTFUL_VALUES, key, cause=why))
    return document


def _is_appended(content: Content, end: int) -> bool:
    """Return whether the bytes after the last tensor are another file, a text or padding, and not tensor data."""
    from ckptfix.reading.foreign.files import as_text

    tail = content[end : end + BLOCK]
    if not tail.strip(b"\r\n"):
        return bool(tail)
    is_last_filled = content[end - 1 : end] != b"\0"
    is_text = len(tail) >= _LEAST_TEXT and as_text(tail) is not None
    return bool(re.match(_ANOTHER_FILE, tail)) or is_text or (is_last_filled and not any(tail))


def _is_doubtful(content: Content, begin: int, nbytes: int, surplus: int) -> bool:
    """Return whether a complete tensor has other values if the surplus bytes (or missing ones) are before it.

    The file does not show where bytes are missing or extra: a resumed download may leave out a block in the middle, or
    fetch it twice."""
    stop = begin + nbytes
    return stop <= len(content) and any(
        content[at : min(at + BLOCK, stop)] != content[at + surplus : min(at + BLOCK, stop) + surplus]
        for at in range(begin, stop, BLOCK)
    )


def _restore(path: str, bounds: Bounds, state_dict: OrderedDict[str, Any], notes: Mapping[str, str]) -> Document:
    """Return the document with the ties, ``_metadata`` and container that ckptfix stored in the notes."""
    remarks = [Fact.of(Kind.NOTE, name, text=value) for name, value in notes.items() if not name.startswith("ckptfix.")]

    def note(name: str) -> dict[str, Any]:
        """Return a note of ckptfix. A damaged note is remarked, but does not make the weights unreadable."""
        fault = "is not a JSON object"
        try:
            value = bounds.parse_json(notes[name]) if name in notes else {}
        except (ValueError, RecursionError) as error:
            value, fault = None, f"is not valid JSON ({error})"
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


ALIGNMENT = 8  # writers pad the header with spaces to a multiple of this many bytes
_WITHOUT_TORCH = ("F6_E2M3", "F6_E3M2")
_NOTHING = TensorSpec("uint8", (0,), (1,))


def read_header(content: Content) -> tuple[dict[str, Any], int]:
    """Return the parsed header, and the offset of the first tensor byte.

    Raises ``UnreadableError`` if it is truncated, too long or invalid."""
    size = len(content)
    length = int.from_bytes(content[:8], "little")
    if HEADER_LIMIT < length <= size - 8:
        raise UnreadableError(
            f"{content.path}: the header has {length} bytes, but safetensors reads at most {HEADER_LIMIT} "
            "(HeaderTooLarge); save the tensors again in several files"
        )
    if size < 8 or 8 + length > size:
        raise damaged(
            content.path,
            f"is damaged: the header declares {length} bytes and the file has {size} (HeaderTooLarge): it is cut "
            "short in its header, or not a safetensors file",
        )
    return _parsed_header(content, content[8 : 8 + length]), 8 + length


def _parsed_header(content: Content, raw: bytes) -> dict[str, Any]:
    path = content.path
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise damaged(path, f"the header is not UTF-8 ({error.reason} at byte {8 + error.start})") from error
    try:
        header = content.bounds.parse_json(text, unique_keys, _no_constant)
        "".join(header).encode("utf-8")  # an escape may be half of a surrogate pair
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"the header is not valid JSON ({error}): damaged, or not a safetensors file") from error
    assert isinstance(header, dict), "its first character is a brace"
    return header


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def check_layout(content: Content, header: dict[str, Any]) -> tuple[dict[str, tuple[int, TensorSpec]], int]:
    """Return the tensors in the order of the header, each with its offset after the header, and their size in bytes.

    Raises ``UnreadableError`` if dtypes, shapes and offsets contradict each other or leave gaps or overlaps. Empties
    the header, which takes more memory than the result."""
    path = content.path
    position, placed = 0, dict.fromkeys(header, (0, _NOTHING))
    for key in sorted(header, key=lambda key: _begin(path, key, header[key])):
        record = header.pop(key)
        begin, end = record["data_offsets"]
        spec = _spec(path, key, record)
        placed[key] = begin, spec
        if end - begin != spec.nbytes:
            raise _violated(
                path,
                key,
                "the size is that of dtype and shape",
                f"{record['dtype']} {_shown_shape(record['shape'])} needs {spec.nbytes} bytes and its data_offsets "
                f"give {end - begin}",
            )
        if begin != position:
            fault = "overlap the tensor before" if begin < position else "leave a gap"
            raise _violated(path, key, "no overlap, no holes", f"its data_offsets {fault} at byte {begin}")
        position = end
    return placed, position


def _violated(path: str, key: str, clause: str, detail: str) -> UnreadableError:
    return UnreadableError(
        f"{path}: tensor {key!r:.60} contradicts the specification of safetensors (clause: {clause}): {detail}; fetch "
        "the file again"
    )


def _shown_shape(shape: list[int]) -> str:
    """Return a shape for a message, shortened because a file may give a tensor any number of dimensions."""
    return f"[{', '.join(map(str, shape[:8]))}{', …' if len(shape) > 8 else ''}]"


def _spec(path: str, key: str, record: Mapping[str, Any]) -> TensorSpec:
    """Return the spec of a tensor without its bytes, in torch's shape for its dtype."""
    name, shape = record["dtype"], record["shape"]
    dtype = BY_SAFETENSORS.get(name)
    if dtype is None:
        known = "torch has no dtype for it" if name in _WITHOUT_TORCH else "the specification knows no such dtype"
        raise _violated(path, key, "a known dtype", f"{name!r:.20}: {known}")
    numel = 1
    for size in shape:
        numel *= size
        if numel * 8 * dtype.itemsize >= 1 << 64:
            raise _violated(path, key, "no overflow", f"{_shown_shape(shape)} has more elements than can be counted")
    if (shape or [0])[-1] % dtype.packed:
        raise _violated(
            path, key, "sub-byte elements fill whole bytes", f"{name} {_shown_shape(shape)} ends a row inside a byte"
        )
    sizes = (*shape[:-1], *(size // dtype.packed for size in shape[-1:]))
    return TensorSpec(dtype.name, sizes, contiguous_strides(sizes))


def _begin(path: str, key: str, record: Any) -> tuple[int, int]:
    """Return the offsets of a tensor after checking its record against the specification."""
    if not isinstance(record, dict):
        raise _violated(path, key, "a record of dtype, shape and data_offsets", f"it is a {type(record).__name__}")
    for name in ("dtype", "shape", "data_offsets"):
        if name not in record:
            raise _violated(path, key, "a record of dtype, shape and data_offsets", f"it has no {name}")
    if not isinstance(record["dtype"], str):
        raise _violated(path, key, "a known dtype", f"it is a {type(record['dtype']).__name__}, not text")
    for name in ("shape", "data_offsets"):
        sizes = record[name]
        if not isinstance(sizes, list):
            raise _violated(path, key, f"{name} is a list", f"it is a {type(sizes).__name__}")
        wrong = next((size for size in sizes if type(size) is not int or not 0 <= size < 1 << 63), None)
        if wrong is not None or None in sizes:
            raise _violated(path, key, f"{name} holds whole numbers from 0 to 2^63", f"it holds {shown(wrong)}")
    if len(record["shape"]) > 64:
        raise _violated(path, key, "a shape that torch can have", f"it has {len(record['shape'])} dimensions")
    if len(record["data_offsets"]) != 2:
        raise _violated(path, key, "two data_offsets", f"it has {len(record['data_offsets'])}")
    begin, end = record["data_offsets"]
    if begin > end:
        raise _violated(path, key, "data_offsets in order", f"it begins at {begin} and ends at {end}")
    return begin, end
