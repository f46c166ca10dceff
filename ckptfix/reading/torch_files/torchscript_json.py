"""TorchScript archives of torch 1.0 to 1.2: a module tree and a table of tensors in ``model.json``.

It is the JSON form of ``ModelDef`` of ``caffe2/proto/torch.proto``, in which whole numbers are texts and defaults may
be left out. The bytes of a tensor are the member that its ``data.key`` names; tensors with one key share a storage."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptfix.core.dtypes import DTYPES
from ckptfix.core.spec import Storage, TensorSpec, contiguous_strides
from ckptfix.errors import HostileError, UnreadableError
from ckptfix.reading.pickles.claims import checked
from ckptfix.reading.torch_files.torch_archive import Reading

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


def read_json(reading: Reading) -> OrderedDict[str, Any]:
    """The state_dict of the module tree. A storage that is gone is torn.

    Raises ``UnreadableError`` where the tree is damaged or has no tensors."""
    path = reading.archive.path
    try:
        model = reading.archive.bounds.parse_json(reading.member("model.json"))
        table = _table(reading, model.get("tensors", []))
        entries: OrderedDict[str, Any] = OrderedDict()
        _gather(path, model["mainModule"], "", 0, table, entries)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise UnreadableError(
            f"{path}: the model.json of TorchScript is malformed ({type(error).__name__}: {error}); fetch it again"
        ) from error
    if not entries:
        raise UnreadableError(f"{path}: a TorchScript module without weights; is it the right file?")
    return entries


def _table(reading: Reading, records: list[Mapping[str, Any]]) -> list[TensorSpec]:
    """The tensors of the table. How large a storage is, its member says, else the tensors that lie in it."""
    specs = [_tensor(reading.archive.path, record) for record in records]
    sizes: dict[str, int] = {}
    for record, spec in zip(records, specs, strict=True):
        key = str(record["data"]["key"])
        sizes[key] = max(sizes.get(key, 0), spec.extent[1])
    storages: dict[str, Storage] = {}
    table = []
    for record, spec in zip(records, specs, strict=True):
        key = str(record["data"]["key"])
        if key not in storages:
            storages[key] = _storage(reading, key, sizes[key], str(record.get("device", "cpu")))
        table.append(checked(replace(spec, storage=storages[key]), reading.archive.path))
    return table


def _storage(reading: Reading, key: str, needed: int, device: str) -> Storage:
    archive = reading.archive
    if key in archive.members and archive.is_whole(key):
        return Storage(key, archive.source(key), device, archive.crc32(key))
    return reading.storage(key, key if key in archive.members else None, key, needed, device)


def _tensor(path: str, record: Mapping[str, Any]) -> TensorSpec:
    """The tensor of a record, without its storage."""
    name = record.get("dataType", "")
    if name not in _TYPES:
        raise UnreadableError(f"{path}: a tensor of type {name!s:.40}, which ckptfix does not know")
    shape = tuple(int(size) for size in record.get("dims", ()))
    strides = tuple(int(size) for size in record["strides"]) if "strides" in record else contiguous_strides(shape)
    if any(size < 0 for size in (*shape, *strides)):
        raise HostileError(f"{path}: a tensor has a negative size; do not use this file")
    return checked(TensorSpec(DTYPES[_TYPES[name]].name, shape, strides, offset=int(record.get("offset", 0))), path)


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
