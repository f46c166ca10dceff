"""The archive of torch.export since torch 2.8 (``.pt2``): raw storages, and a JSON file that describes them.

``data/weights/<model>_weights_config.json`` has the names, dtypes, shapes and strides of a model's state_dict, and for
each tensor its member ``data/weights/weight_N``. Tensors that share a storage share the member, which is all of it even
if none of them covers it. Every member is some tensor's. The graph and its constants are not read.

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
    used = {storage.key for weights in models.values() for spec in weights.values() for storage in spec.storages}
    members = (name.removeprefix(_FOLDER) for name in reading.whole if name.startswith(_FOLDER) and name not in configs)
    unnamed = [Fact(Kind.STORAGE_UNNAMED, f"{_FOLDER}{name}") for name in members if name not in used]
    reading.torn += unnamed
    remarks = [Fact(Kind.TORCH_EXPORT), *reading.doubts, *archive.doubts]
    return Document(content.path, NAME, root, remarks=remarks, damage=[*reading.damage, *archive.damage(root)])


def _weights(content: Content, reading: Reading, name: str) -> OrderedDict[str, Any]:
    specs: OrderedDict[str, tuple[str, TensorSpec]] = OrderedDict()
    sizes_of: dict[str, int] = {}  # of the storages, as far as the tensors in them reach
    try:
        for key, entry in content.bounds.parse_json(reading.member(name))["config"].items():
            if entry["use_pickle"]:
                raise UnreadableError(
                    f"{content.path}: {key} is a quantised weight or another subclass of torch.Tensor, which"
                    " torch.export stores as a pickle; load it with torch.export.load, and save the state_dict"
                )
            spec = replace(_spec(entry["tensor_meta"]), is_parameter=bool(entry["is_param"]))
            specs[key] = (place := str(entry["path_name"])), spec
            sizes_of[place] = max(sizes_of.get(place, 0), spec.extent[1])
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise UnreadableError(
            f"{content.path}: its list of weights is not what torch.export writes ({type(error).__name__}: {error}); "
            "it is damaged or from an unknown release"
        ) from error
    storages = {place: _storage(reading, place, nbytes) for place, nbytes in sizes_of.items()}
    return OrderedDict(
        (key, checked(replace(spec, storage=storages[place]), content.path)) for key, (place, spec) in specs.items()
    )


def _storage(reading: Reading, place: str, nbytes: int) -> Storage:
    """Return the storage of some tensors, of which they need at least the first ``nbytes`` bytes."""
    name = f"{_FOLDER}{place}"
    present = name if name in reading.archive.members else None
    if present is not None and reading.archive.is_whole(name):
        nbytes = max(nbytes, reading.archive.source(name).nbytes)
    return reading.storage(place, present, name, nbytes, "cpu")


def _spec(meta: Mapping[str, Any]) -> TensorSpec:
    """Return the spec that a ``TensorMeta`` describes, without its bytes."""
    number, layout = meta["dtype"], meta["layout"]
    if number not in _DTYPES or _DTYPES[number] not in DTYPES or layout != _STRIDED:
        raise ValueError(f"dtype {shown(number)} in the layout {shown(layout)}")
    shape, strides = (sizes([size["as_int"] for size in meta[name]]) for name in ("sizes", "strides"))
    (offset,) = sizes([meta["storage_offset"]["as_int"]])
    return TensorSpec(_DTYPES[number], shape, strides, offset=offset, requires_grad=meta["requires_grad"] is True)
