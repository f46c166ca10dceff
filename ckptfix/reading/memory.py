"""A state_dict in memory becomes a checkpoint without a copy."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from ckptfix.core.checkpoint import IN_MEMORY, Candidate, Checkpoint
from ckptfix.core.facts import Fact, Kind
from ckptfix.core.lazy import torch
from ckptfix.core.spec import Storage, TensorSpec
from ckptfix.errors import UnreadableError
from ckptfix.reading.lazy_tensors import LazyTensors
from ckptfix.reading.live import spec_of_tensor


def _specs_of(value: Any, storages: dict[int, Storage]) -> Any:
    """Return an entry of a live state_dict with its tensors as specs, those inside of packed parameters too."""
    if _is_array(value):
        value = _from_array(value)
    if isinstance(value, torch.Tensor):
        return spec_of_tensor(value, storages)
    if type(value) in (tuple, list):
        return type(value)(_specs_of(item, storages) for item in value)
    if type(value) in (dict, OrderedDict):
        made = type(value)((key, _specs_of(item, storages)) for key, item in value.items())
        getattr(made, "__dict__", {}).update(getattr(value, "__dict__", {}))  # a state_dict's _metadata
        return made
    return value


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")  # nobody has an array without it
    return numpy is not None and isinstance(value, numpy.ndarray)


def _from_array(array: Any) -> Any:
    """Return a numpy array as the tensor that shares its memory where torch can; text and objects as a list."""
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    is_sharable = native.flags.writeable and all(stride >= 0 for stride in native.strides)
    try:
        return torch.from_numpy(native if is_sharable else native.copy())
    except TypeError:  # torch has no such element type
        return array.tolist()


def open_state_dict(state_dict: Mapping[Any, Any], name: str = "state_dict") -> Checkpoint:
    """Return a live state_dict as a checkpoint. Nothing is copied: an entry that no edit touches keeps its memory."""
    storages: dict[int, Storage] = {}
    entries = {str(key): _specs_of(value, storages) for key, value in state_dict.items()}
    if len(entries) < len(state_dict):
        raise UnreadableError(f"{name}: it has a key twice, as text and as a number; keep one of them")
    specs = [value for value in entries.values() if isinstance(value, TensorSpec)]
    metadata = getattr(state_dict, "_metadata", None)
    remarks = [Fact.of(Kind.NON_STRING_KEY, key=str(key)) for key in state_dict if not isinstance(key, str)]
    if any(_is_array(value) for value in state_dict.values()):
        remarks.append(Fact(Kind.NUMPY_WEIGHTS))
    return Checkpoint(
        path=name,
        format=IN_MEMORY,
        entries=entries,
        metadata=None if metadata is None else {str(module): dict(versions) for module, versions in metadata.items()},
        root=entries,
        devices=(),
        candidates=(Candidate.of((), specs),),
        remarks=tuple(remarks),
        reader=LazyTensors(),
    )
