"""Writes a checkpoint as safetensors; what the format has no place for goes into ``__metadata__``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from msgspec.structs import replace

from ckptfix.bytes.checksums import verifying
from ckptfix.bytes.copying import LARGE, PAGE, Copier
from ckptfix.bytes.limits import Bounds
from ckptfix.bytes.sources import ranges_of
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.facts import Kind
from ckptfix.core.metadata import metadata_text
from ckptfix.core.notes import encode_container
from ckptfix.core.progress import Task
from ckptfix.core.spec import TensorSpec, ties
from ckptfix.errors import HostileError, Opt, WriteError
from ckptfix.reading.boxes import is_range, row_major_blocks
from ckptfix.reading.safetensors import ALIGNMENT, CONTAINER, METADATA, TIES
from ckptfix.writing.plain import plain_root

_TEXT = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode

# Tensors of more than `REPEATED_LIMIT` bytes in all may repeat stored bytes (zero strides, overlapping views) at most
# `REPEATED` times: otherwise, 40 kB of views could become gigabytes.
REPEATED_LIMIT, REPEATED = 1 << 28, 64


def write(checkpoint: Checkpoint, file: BinaryIO) -> Copier:
    """Write each tensor once; ties, ``_metadata`` and plain extras go into the header. Returns the copier with the
    ranges that were read back.

    Raises ``WriteError`` for dtypes and layouts that safetensors does not have."""
    notes, records, order = _header(checkpoint)
    try:
        raw = ",".join(["{" + _field("__metadata__", notes), *records]).encode() + b"}"
    except UnicodeEncodeError as error:
        raise WriteError(
            f"{checkpoint.path}: a name in it is not valid text (half a surrogate pair), which safetensors cannot "
            "hold; write it with ",
            Opt("format", "pth"),
        ) from error
    raw += b" " * (_data_start(8 + len(raw), order) - 8 - len(raw))
    total = sum(spec.nbytes for spec in order)
    _check_repetition(checkpoint.path, order, total)
    _check_readable(checkpoint.path, notes, raw, total)
    task = Task(f"writing {checkpoint.path}", total)
    with verifying(checkpoint, (spec.storage for spec in order)) as verifier, Copier(file, task, verifier) as copier:
        copier.write(len(raw).to_bytes(8, "little") + raw)
        for spec in order:
            if spec.storage is not None and is_range(spec):
                copier.copy(spec.storage.source, *spec.extent)
                continue
            for block in row_major_blocks(spec, checkpoint.path):
                copier.write_block(block)
    return copier


def _check_repetition(path: str, order: list[TensorSpec], total: int) -> None:
    """Raise ``WriteError`` if a few stored bytes would become a large file, as safetensors stores every element."""
    stored = sum(storage.nbytes for storage in {spec.storage for spec in order if spec.storage is not None})
    if total > REPEATED_LIMIT and total > REPEATED * stored:
        largest = max(order, key=lambda spec: spec.nbytes)
        raise WriteError(
            f"{path}: tensors like one of shape {list(largest.shape)} repeat {stored} stored bytes, and"
            f" safetensors would store {total >> 20} MiB; write it with ",
            Opt("format", "pth"),
        )


def _check_readable(path: str, notes: Mapping[str, str], raw: bytes, nbytes: int) -> None:
    """Raise ``WriteError`` if reading the header again would exceed the limits for a file of this size."""
    bounds = Bounds(path, len(raw) + nbytes)
    try:
        bounds.expect_json(raw)
        for text in notes.values():
            bounds.expect_json(text)
    except HostileError as error:
        raise WriteError(
            f"{path}: its _metadata and names exceed the header of a safetensors file; write it with ",
            Opt("format", "pth"),
        ) from error


def _data_start(least: int, order: list[TensorSpec]) -> int:
    """Return where the tensors begin: the first multiple of ``ALIGNMENT`` from ``least`` on, or a later one at which
    the first large tensor keeps its offset within a page, and with it those that followed it in the source."""
    start = least + -least % ALIGNMENT
    position = 0
    for spec in order:
        ranges = ranges_of(spec.storage.source, *spec.extent) if spec.storage is not None and is_range(spec) else []
        if ranges and spec.nbytes >= LARGE:
            shift = (ranges[0].offset - position - start) % PAGE
            return start if shift % ALIGNMENT else start + shift
        position += spec.nbytes
    return start


def lost_extras(checkpoint: Checkpoint) -> list[str]:
    """Return the paths of extras in the container that a safetensors file cannot store."""
    return _note(checkpoint)[1]


def tied_keys(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the keys that are tied to an earlier key, in the order of the state_dict, each with that key."""
    first = {key: group[0] for group in ties(checkpoint.specs) for key in group[1:]}
    return {key: first[key] for key in checkpoint.specs if key in first}


def untied(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with ties broken: each tied tensor has a storage of its own with the same values."""
    tied = tied_keys(checkpoint)
    if not tied:
        return checkpoint
    entries = {
        key: replace(entry, storage=replace(entry.storage))
        if key in tied and isinstance(entry, TensorSpec) and entry.storage is not None
        else entry
        for key, entry in checkpoint.entries.items()
    }
    return replace(checkpoint, entries=entries)


def _note(checkpoint: Checkpoint) -> tuple[dict[str, Any], list[str]]:
    """Return the note about the container, and the paths of extras that it cannot store. The result is cached."""
    known: tuple[dict[str, Any], list[str]] | None = checkpoint.derived.get("note")
    if known is None:
        known = checkpoint.derived["note"] = encode_container(checkpoint, plain_root(checkpoint)[0])
    return known


def _header(checkpoint: Checkpoint) -> tuple[dict[str, str], Iterator[str], list[TensorSpec]]:
    """Return the notes of the header, the record of each tensor as text in the order of the state_dict, and the tensors
    in the order of their bytes: as in the reference writer, large elements come first, so that each is aligned."""
    tied = tied_keys(checkpoint)
    stored: dict[str, tuple[TensorSpec, str]] = {}
    for key, spec in checkpoint.specs.items():
        dtype = DTYPES[spec.dtype]
        half = dtype.packed > 1 and not spec.shape  # a scalar pair: its two numbers have no dimension to be in
        if half or dtype.safetensors is None or spec.layout != "strided" or spec.quantizer is not None:
            kind = spec.layout if spec.layout != "strided" else spec.dtype
            raise WriteError(
                f"{checkpoint.path}: safetensors cannot hold {key} ({kind}); write it with ", Opt("format", "pth")
            )
        if key == "__metadata__":
            raise WriteError(
                f"{checkpoint.path}: safetensors reserves the key __metadata__; rename the tensor, or write it with ",
                Opt("format", "pth"),
            )
        if key not in tied:
            stored[key] = spec, dtype.safetensors
    begins: dict[str, int] = {}
    order, position = sorted(stored, key=lambda key: -stored[key][0].itemsize), 0
    for key in order:
        begins[key], position = position, position + stored[key][0].nbytes
    # A generator, because the records of 10,000 tensors as objects take 12 MB.
    records = (_record(key, spec, name, begins[key]) for key, (spec, name) in stored.items())
    return _notes(checkpoint, tied), records, [stored[key][0] for key in order]


def _record(key: str, spec: TensorSpec, dtype: str, begin: int) -> str:
    shape = (*spec.shape[:-1], *(size * DTYPES[spec.dtype].packed for size in spec.shape[-1:]))
    fields = {"dtype": dtype, "shape": shape, "data_offsets": (begin, begin + spec.nbytes)}
    return _field(key, fields)


def _field(key: str, value: Mapping[str, Any]) -> str:
    return f"{_TEXT(key)}:{_TEXT(value)}"


def _notes(checkpoint: Checkpoint, tied: dict[str, str]) -> dict[str, str]:
    notes = {fact.place: fact.data["text"] for fact in checkpoint.remarked(Kind.NOTE)} | {"format": "pt"}
    for name, value in ((METADATA, checkpoint.metadata), (TIES, tied), (CONTAINER, _note(checkpoint)[0])):
        if value:
            try:
                notes[name] = (metadata_text if name == METADATA else _TEXT)(value)
            except (TypeError, ValueError, RecursionError) as error:
                raise WriteError(
                    f"{checkpoint.path}: its {name.removeprefix('ckptfix.')} has no form in JSON ({error}); write it "
                    "with ",
                    Opt("format", "pth"),
                ) from error
    return notes
