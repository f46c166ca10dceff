"""TorchScript archives of torch 1.0 to 1.2: a module tree and a table of tensors in ``model.json``.

It is the JSON form of ``ModelDef`` of ``caffe2/proto/torch.proto``, in which whole numbers are texts and defaults may
be left out. The bytes of a tensor are the member that its ``data.key`` names; tensors with one key share a storage."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from ckptfix.checkpoint import Remark, Storage, TensorSpec, contiguous_strides
from ckptfix.dtypes import DTYPES
from ckptfix.errors import HostileError, UnreadableError
from ckptfix.formats.claims import checked
from ckptfix.formats.torch_archive import TorchArchive, read_member

DEPTH_LIMIT = 200
_TYPES = {
    "FLOAT": "float32",
    "DOUBLE": "float64",
    "FLOAT16": "float16",
    "INT8": "int8",
    "UINT8": "uint8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
    "BYTE": "uint8",
}


def read_json(archive: TorchArchive) -> tuple[OrderedDict[str, Any], list[Remark]]:
    """The state_dict of the module tree, and what is to be said of it.

    Raises ``UnreadableError`` where the tree is damaged or has no tensors."""
    try:
        model = json.loads(read_member(archive, "model.json"))
        table = _table(archive, model.get("tensors", []))
        entries: OrderedDict[str, Any] = OrderedDict()
        _gather(archive.path, model["mainModule"], "", 0, table, entries)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise UnreadableError(
            f"{archive.path}: the model.json of TorchScript is malformed ({type(error).__name__}: {error}); fetch "
            " the file again"
        ) from error
    if not entries:
        raise UnreadableError(f"{archive.path}: a TorchScript module without weights; is it the right file?")
    return entries, [Remark("no-metadata", ".", "module versions and non-persistent buffers are not marked in it")]


def _table(archive: TorchArchive, records: list[Mapping[str, Any]]) -> list[TensorSpec]:
    storages: dict[str, Storage] = {}
    return [_tensor(archive, storages, record) for record in records]


def _tensor(archive: TorchArchive, storages: dict[str, Storage], record: Mapping[str, Any]) -> TensorSpec:
    name = record.get("dataType", "")
    if name not in _TYPES:
        raise UnreadableError(f"{archive.path}: a tensor of type {name!s:.40}, which ckptfix does not know")
    key = record["data"]["key"]
    if key not in storages:
        if key not in archive.members:
            raise UnreadableError(
                f"{archive.path}: storage {key!s:.40} is used but not in the archive; it is damaged: fetch it again"
            )
        storages[key] = Storage(key, archive.source(key), str(record.get("device", "cpu")), archive.crc32(key))
    shape = tuple(int(size) for size in record.get("dims", ()))
    strides = tuple(int(size) for size in record["strides"]) if "strides" in record else contiguous_strides(shape)
    if any(size < 0 for size in (*shape, *strides)):
        raise HostileError(f"{archive.path}: a tensor has a negative size; do not use this file")
    return checked(
        TensorSpec(DTYPES[_TYPES[name]].name, shape, strides, storages[key], int(record.get("offset", 0))), archive.path
    )


def _gather(
    path: str, module: Mapping[str, Any], prefix: str, depth: int, table: list[TensorSpec], entries: dict[str, Any]
) -> None:
    if depth > DEPTH_LIMIT:
        raise HostileError(f"{path}: modules nested deeper than {DEPTH_LIMIT}; do not use this file")
    records = module.get("parameters", [])
    for record in sorted(records, key=lambda record: bool(record.get("isBuffer", False))):
        entries[prefix + record["name"]] = table[int(record.get("tensorId", 0))]
    for child in module.get("submodules", []):
        _gather(path, child, f"{prefix}{child['name']}.", depth + 1, table, entries)
