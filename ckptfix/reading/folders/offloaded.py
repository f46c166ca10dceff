"""Weights that accelerate offloaded to disk: ``index.json``, and a file ``NAME.dat`` with the raw elements of each.

The index is ``{name: {"dtype": "bfloat16", "shape": [3, 4]}}``. For a weight that stays in a safetensors file, the
index has the path of that file and the name in it. Source: ``accelerate/utils/offload.py`` (1.15)."""

import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ckptfix.bytes.files import open_bytes
from ckptfix.bytes.limits import unique_keys
from ckptfix.bytes.sources import Content, FileBytes
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.facts import Fact, Kind, clauses
from ckptfix.core.spec import Storage, TensorSpec, contiguous_strides
from ckptfix.errors import UnreadableError
from ckptfix.reading.folders.shard_index import INDEX_LIMIT, file_inside
from ckptfix.reading.weights.document import Document

NAME = "accelerate-offload"
_INDEX = "index.json"
_BEGINS = re.compile(rb'\{\s*"[^"]{1,400}"\s*:\s*\{\s*"(dtype|safetensors_file|weight_name)"')


def looks_like(folder: Path) -> bool:
    """Return whether a folder has the index of accelerate."""
    index = folder / _INDEX
    return index.is_file() and _BEGINS.match(Content.of_file(str(index))[:1024]) is not None


def read_folder(folder: Path) -> Document:
    """Return the document of the weights in a folder. Raises ``UnreadableError`` if none of them is readable."""
    content = Content.of_file(str(folder / _INDEX))
    try:
        index = content.bounds.parse_json(content[:INDEX_LIMIT], unique_keys)
        whole = OrderedDict((name, _spec(entry)) for name, entry in index.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableError(f"{content.path}: a malformed index ({error}); save the weights again") from error
    document = Document(str(folder), NAME, whole, producer="accelerate, weights moved out of memory")
    for name, spec in list(whole.items()):
        try:
            if spec is None:
                raise UnreadableError(f"{name} is in {index[name]['safetensors_file']}")
            path = file_inside(folder, f"{name}.dat", content.path)
            file = open_bytes(str(path))
            if file.size != spec.nbytes:
                raise UnreadableError(f"{path}: {file.size} bytes, not {spec.nbytes}")
        except UnreadableError as error:
            document.damage.append(Fact.of(Kind.SHARD_UNREADABLE, name, error=str(error)))
            document.lost[name] = whole.pop(name)
            continue
        whole[name] = replace(spec, storage=Storage(name, FileBytes(file, 0, file.size)))
    if not whole:
        raise UnreadableError(f"{folder}: {clauses(document.damage)}; name the checkpoint that was loaded")
    return document


def _spec(entry: Mapping[str, Any]) -> TensorSpec | None:
    """Return the spec of a weight without its storage; None if it is not in the folder."""
    if "safetensors_file" in entry:
        return None
    dtype, shape = DTYPES[entry["dtype"]].name, tuple(map(int, entry["shape"]))
    if any(size < 0 for size in shape):
        raise ValueError(f"the shape {list(shape)}")
    return TensorSpec(dtype, shape, contiguous_strides(shape))
