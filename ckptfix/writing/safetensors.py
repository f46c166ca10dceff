"""Writes a checkpoint as safetensors, with what the format has no room for in ``__metadata__``."""

from __future__ import annotations

import json
from typing import Any, BinaryIO

from ckptfix.bytes.checksums import is_open, note_checksum, prove, proving
from ckptfix.bytes.copying import LARGE, PAGE, Copier
from ckptfix.bytes.sources import located
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.facts import Kind
from ckptfix.core.notes import encode_container
from ckptfix.core.progress import Task, tell_slower
from ckptfix.core.spec import Storage, TensorSpec
from ckptfix.errors import WriteError
from ckptfix.reading.contiguous import contiguous_blocks, is_range
from ckptfix.reading.safetensors import CONTAINER, METADATA, TIES
from ckptfix.writing.plain import plain_root

ALIGNMENT = 8


def write(checkpoint: Checkpoint, file: BinaryIO) -> Copier:
    """Write the tensors in the order of the state_dict, each once; ties, ``_metadata`` and plain extras go into the
    header. Gives the copier, which has the ranges that were read back.

    Raises ``WriteError`` for dtypes and layouts that safetensors does not know.
    """
    header, order = _header(checkpoint)
    try:
        raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise WriteError(
            f"{checkpoint.path}: a name in it is no valid text (it has half a surrogate pair), which safetensors "
            "cannot hold; write it with --format pth"
        ) from error
    raw += b" " * (_data_start(8 + len(raw), order) - 8 - len(raw))
    copier = Copier(file, Task(f"writing {checkpoint.path}", sum(spec.nbytes for spec in order)))
    passing = {spec.storage for spec in order if spec.storage is not None and _is_proved_by_copy(spec, spec.storage)}
    with proving(checkpoint, (spec.storage for spec in order if spec.storage not in passing)), copier:
        copier.write(len(raw).to_bytes(8, "little") + raw)
        for spec in order:
            if spec.storage is not None and is_range(spec):
                is_summed = _is_proved_by_copy(spec, spec.storage)
                crc = copier.copy(spec.storage.source, *spec.extent, is_summed)
                if is_summed:
                    note_checksum(spec.storage, crc)
                continue
            tell_slower("put in row-major order", spec.nbytes)
            for block in contiguous_blocks(spec, checkpoint.path):
                copier.write_block(block)
    prove(checkpoint, passing)
    return copier


def _is_proved_by_copy(spec: TensorSpec, storage: Storage) -> bool:
    """Whether all that the checksum of a storage is about passes when the tensor is copied."""
    return is_open(storage) and not storage.parts and is_range(spec) and spec.extent == (0, storage.nbytes)


def _data_start(least: int, order: list[TensorSpec]) -> int:
    """Where the tensors begin, at ``least`` or behind it: at a multiple of ``ALIGNMENT``, and of large ones in order
    where the first of them keeps its place in a page, and with it those that followed it in the source.
    """
    start = least + -least % ALIGNMENT
    position = 0
    for spec in order:
        place = located(spec.storage.source) if spec.storage is not None and is_range(spec) else None
        if place is not None and spec.nbytes >= LARGE:
            shift = (place.offset + spec.extent[0] - position - start) % PAGE
            return start if shift % ALIGNMENT else start + shift
        position += spec.nbytes
    return start


def lost_extras(checkpoint: Checkpoint) -> list[str]:
    """The places around the state_dict that a safetensors file cannot carry."""
    root, _ = plain_root(checkpoint)
    return encode_container(checkpoint, root)[1]


def _header(checkpoint: Checkpoint) -> tuple[dict[str, Any], list[TensorSpec]]:
    stored: dict[tuple[object, ...], str] = {}
    records: dict[str, Any] = {}
    ties: dict[str, str] = {}
    order: list[TensorSpec] = []
    position = 0
    for key, spec in checkpoint.specs.items():
        dtype = DTYPES[spec.dtype]
        half = dtype.packed > 1 and not spec.shape  # a scalar pair: its two numbers have no dimension to lie in
        if half or dtype.safetensors is None or spec.layout != "strided" or spec.quantizer is not None:
            kind = spec.layout if spec.layout != "strided" else spec.dtype
            raise WriteError(f"{checkpoint.path}: safetensors cannot hold {key} ({kind}); write it with --format pth")
        if key == "__metadata__":
            raise WriteError(
                f"{checkpoint.path}: safetensors reserves the key __metadata__; rename the tensor, or write it with "
                "--format pth"
            )
        view = spec.view
        if spec.numel and view in stored:
            ties[key] = stored[view]
            continue
        stored[view] = key
        records[key] = {
            "dtype": dtype.safetensors,
            "shape": [*spec.shape[:-1], *(size * dtype.packed for size in spec.shape[-1:])],
            "data_offsets": [position, position + spec.nbytes],
        }
        position += spec.nbytes
        order.append(spec)
    root, _ = plain_root(checkpoint)
    container, _ = encode_container(checkpoint, root)
    notes = {fact.place: fact.data["text"] for fact in checkpoint.remarks if fact.kind is Kind.NOTE} | {"format": "pt"}
    for name, value in ((METADATA, checkpoint.metadata), (TIES, ties), (CONTAINER, container)):
        if value:
            try:
                notes[name] = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise WriteError(
                    f"{checkpoint.path}: its {name.removeprefix('ckptfix.')} has no form in JSON ({error}); write it "
                    "with --format pth"
                ) from error
    return {"__metadata__": notes, **records}, order
