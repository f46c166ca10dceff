"""Live tensors as specs: a state_dict in memory becomes a checkpoint without a copy."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from ckptfix.checkpoint import IN_MEMORY, Candidate, Checkpoint, Quantizer, Remark, Storage, TensorSpec
from ckptfix.errors import UnreadableError, UsageError


class LiveBytes:
    """The bytes of a storage of torch, shared and never copied unless they lie on another device."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage

    @property
    def nbytes(self) -> int:
        """How many bytes there are."""
        return self.storage.nbytes()

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes ``start`` to ``stop``, as a view of the storage's own memory where it is on the CPU."""
        if start == stop:
            return memoryview(b"")
        whole = torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)
        return bytes_of(whole[start:stop].cpu())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a uint8 tensor, shared."""
    return memoryview(tensor.numpy())  # type: ignore[arg-type]  # an ndarray is a buffer; its stubs say so from 3.12 on


def spec_of_tensor(tensor: torch.Tensor, storages: dict[int, Storage] | None = None) -> TensorSpec:
    """The spec of a live tensor; its bytes stay where they are. ``storages`` carries the ties from one call to the
    next.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        # A wrapper such as DTensor has a storage of its own that holds nothing.
        raise UsageError(
            f"a tensor of the state_dict is a {type(tensor).__name__}, whose values lie elsewhere; pass plain tensors, "
            "for sharded ones those of get_model_state_dict(…, options=StateDictOptions(full_state_dict=True))"
        )
    storages = {} if storages is None else storages
    common: dict[str, Any] = {
        "requires_grad": tensor.requires_grad,
        "is_parameter": isinstance(tensor, torch.nn.Parameter),
    }
    tensor = tensor.detach()
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if tensor.layout != torch.strided:
        names = _sparse_parts(tensor)
        parts = {name: spec_of_tensor(part, storages) for name, part in names.items()}
        layout = str(tensor.layout).removeprefix("torch.")
        coalesced = tensor.is_coalesced() if layout == "sparse_coo" else None
        return TensorSpec(dtype, shape, layout=layout, parts=parts, is_coalesced=coalesced, **common)
    if tensor.device.type == "meta":
        return TensorSpec(dtype, shape, tuple(tensor.stride()), **common)
    live = tensor.untyped_storage()
    storage = storages.setdefault(live._cdata, Storage(f"live{len(storages)}", LiveBytes(live), str(tensor.device)))
    quantizer = _quantizer(tensor, storages) if tensor.is_quantized else None
    bits = {name: True for name, is_set in (("conj", tensor.is_conj()), ("neg", tensor.is_neg())) if is_set}
    return TensorSpec(
        dtype,
        shape,
        tuple(tensor.stride()),
        storage,
        int(tensor.storage_offset()),
        quantizer=quantizer,
        math_bits=bits,
        **common,
    )


def spec_of_ones(dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    """The spec of a new tensor of ones."""
    return spec_of_tensor(torch.ones(shape, dtype=getattr(torch, dtype)))


def _sparse_parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if tensor.layout == torch.sparse_coo:
        return {"indices": tensor._indices(), "values": tensor._values()}
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return {"crow_indices": tensor.crow_indices(), "col_indices": tensor.col_indices(), "values": tensor.values()}
    return {"ccol_indices": tensor.ccol_indices(), "row_indices": tensor.row_indices(), "values": tensor.values()}


def _quantizer(tensor: torch.Tensor, storages: dict[int, Storage]) -> Quantizer:
    scheme = str(tensor.qscheme()).removeprefix("torch.")
    if scheme == "per_tensor_affine":
        return Quantizer(scheme, tensor.q_scale(), tensor.q_zero_point())
    scales = spec_of_tensor(tensor.q_per_channel_scales(), storages)
    zero_points = spec_of_tensor(tensor.q_per_channel_zero_points(), storages)
    return Quantizer(scheme, scales, zero_points, tensor.q_per_channel_axis())


def _specs_of(value: Any, storages: dict[int, Storage]) -> Any:
    """An entry of a live state_dict with its tensors as specs, those inside of packed parameters too."""
    if _is_array(value):
        value = _from_array(value)
    if isinstance(value, torch.Tensor):
        return spec_of_tensor(value, storages)
    if type(value) in (tuple, list):
        return type(value)(_specs_of(item, storages) for item in value)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _specs_of(item, storages)) for key, item in value.items())
    return value


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")  # nobody has an array without it
    return numpy is not None and isinstance(value, numpy.ndarray)


def _from_array(array: Any) -> Any:
    """A numpy array as the tensor that shares its memory where torch can; text and objects as a list."""
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    is_sharable = native.flags.writeable and all(stride >= 0 for stride in native.strides)
    try:
        return torch.from_numpy(native if is_sharable else native.copy())
    except TypeError:  # torch has no such element type
        return array.tolist()


def open_state_dict(state_dict: Mapping[Any, Any], name: str = "state_dict") -> Checkpoint:
    """A live state_dict as a checkpoint. Nothing is copied: an entry that no edit touches keeps its memory."""
    storages: dict[int, Storage] = {}
    entries = {str(key): _specs_of(value, storages) for key, value in state_dict.items()}
    if len(entries) < len(state_dict):
        raise UnreadableError(f"{name}: it has a key twice, as text and as a number; keep one of them")
    _check_level(entries, name)
    metadata = getattr(state_dict, "_metadata", None)
    remarks = [Remark("non-string-key", ".", str(key)) for key in state_dict if not isinstance(key, str)]
    if any(_is_array(value) for value in state_dict.values()):
        remarks.append(Remark("numpy-weights", ".", "numpy arrays"))
    specs = [value for value in entries.values() if isinstance(value, TensorSpec)]
    return Checkpoint(
        path=name,
        format=IN_MEMORY,
        entries=entries,
        metadata=None if metadata is None else {str(module): dict(versions) for module, versions in metadata.items()},
        root=entries,
        devices=(),
        candidates=(Candidate((), len(specs), sum(spec.numel for spec in specs)),),
        remarks=tuple(remarks),
    )


def _check_level(entries: Mapping[str, Any], name: str) -> None:
    """Raises where the weights lie one level deeper: nothing would be found wrong at this one."""
    if not any(isinstance(value, TensorSpec) for value in entries.values()):
        for key, value in entries.items():
            if isinstance(value, Mapping) and any(isinstance(part, TensorSpec) for part in value.values()):
                raise UsageError(f"the {name} holds no tensors, but its entry {key!r} does; pass that one")
