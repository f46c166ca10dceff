"""The archive of torch.export since torch 2.8 (``.pt2``): raw storages, and a JSON file that describes them.

``data/weights/<model>_weights_config.json`` has the names, dtypes, shapes and strides of a model's state_dict, and for
each tensor its member ``data/weights/weight_N``; tied tensors share one. The graph and its constants are not read.

Layout: https://docs.pytorch.org/docs/stable/export/pt2_archive.html, ``torch/_export/serde/schema.py``."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from ckptfix.bytes.limits import shown
from ckptfix.bytes.sources import Content
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.facts import Fact, Kind
from ckptfix.core.spec import Storage, TensorSpec
from ckptfix.errors import UnreadableError
from ckptfix.reading.archives.zip_directory import EXPORT_MARK
from ckptfix.reading.pickles.claims import checked, sizes
from ckptfix.reading.torch_files.torch_zip import Reading, open_archive
from ckptfix.reading.weights.document import Document

NAME = "torch-export"

_FOLDER, _CONFIG = "data/weights/", "_weights_config.json"

_NAMES = (
    "uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool bfloat16"
    " uint16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu uint32 uint64"
).split()
_DTYPES = dict(zip((*range(1, 14), *range(28, 36)), _NAMES, strict=True))  # dtypes by their numbers in `ScalarType`
_STRIDED = 7


def read(content: Content) -> Document:
    """Return the document of an exported program: its state_dict, or those of its models by name if it has several."""
    archive = open_archive(content, EXPORT_MARK)
    reading = Reading(archive)
    if reading.is_big_endian:
        raise UnreadableError(f"{content.path}: was written on a big-endian machine; export it again on another one")
    configs = [name for name in reading.whole if name.startswith(_FOLDER) and name.endswith(_CONFIG)]
    models = {}
    for name in configs:
        models[name.removeprefix(_FOLDER).removesuffix(_CONFIG)] = _weights(content, reading, name)
    root: Any = next(iter(models.values())) if len(models) == 1 else models
    remarks = [Fact(Kind.TORCH_EXPORT), *reading.doubts, *archive.doubts]
    return Document(content.path, NAME, root, remarks=remarks, damage=[*reading.damage, *archive.damage(root)])


def _weights(content: Content, reading: Reading, name: str) -> OrderedDict[str, Any]:
    weights: OrderedDict[str, Any] = OrderedDict()
    storages: dict[str, Storage] = {}
    try:
        for key, entry in content.bounds.parse_json(reading.member(name))["config"].items():
            place = f"{_FOLDER}{entry['path_name']}"
            if entry["use_pickle"]:
                raise UnreadableError(
                    f"{content.path}: {key} is a quantised weight or another subclass of torch.Tensor, which"
                    " torch.export stores as a pickle; load it with torch.export.load, and save the state_dict"
                )
            spec = _spec(entry["tensor_meta"])
            if place not in storages:
                present = place if place in reading.archive.members else None
                storages[place] = reading.storage(entry["path_name"], present, place, spec.extent[1], "cpu")
            spec = replace(spec, storage=storages[place], is_parameter=bool(entry["is_param"]))
            weights[key] = checked(spec, content.path)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise UnreadableError(
            f"{content.path}: its list of weights is not what torch.export writes ({type(error).__name__}: {error}); "
            "it is damaged or from an unknown release"
        ) from error
    return weights


def _spec(meta: Mapping[str, Any]) -> TensorSpec:
    """Return the spec that a ``TensorMeta`` describes, without its bytes."""
    number, layout = meta["dtype"], meta["layout"]
    if number not in _DTYPES or _DTYPES[number] not in DTYPES or layout != _STRIDED:
        raise ValueError(f"dtype {shown(number)} in the layout {shown(layout)}")
    shape, strides = (sizes([size["as_int"] for size in meta[name]]) for name in ("sizes", "strides"))
    (offset,) = sizes([meta["storage_offset"]["as_int"]])
    return TensorSpec(_DTYPES[number], shape, strides, offset=offset, requires_grad=meta["requires_grad"] is True)
