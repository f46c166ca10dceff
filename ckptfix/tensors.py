"""The bridge to torch: from specs to tensors and back; the one engine module that imports torch at its top."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ckptfix.checkpoint import IN_MEMORY, Candidate, Checkpoint, Quantizer, Storage, TensorSpec, contiguous_strides
from ckptfix.dtypes import DTYPES
from ckptfix.errors import UnreadableError, WriteError
from ckptfix.formats.machine import Global, Opaque
from ckptfix.formats.sources import stream
from ckptfix.regions import Region, Regions

if TYPE_CHECKING:
    from collections.abc import Iterable


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
        return _bytes_of(whole[start:stop].cpu())


class Builder:
    """Builds tensors so that those which share bytes in the file share memory too."""

    def __init__(self, specs: Iterable[TensorSpec], path: str) -> None:
        self.path = path
        self._regions = Regions(part for spec in specs for part in spec.strided_parts())
        self._loaded: dict[int, torch.UntypedStorage] = {}

    def build(self, spec: TensorSpec) -> torch.Tensor:
        """The tensor of a spec, on CPU (a live tensor stays on its device)."""
        try:
            tensor = self._sparse(spec) if spec.parts else self._strided(spec)
        except (RuntimeError, ValueError, TypeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UnreadableError(
                f"{self.path}: torch refuses a tensor of {spec.dtype} {spec.shape}: {reason}"
            ) from error
        return (
            tensor.requires_grad_()
            if spec.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
            else tensor
        )

    def _strided(self, spec: TensorSpec) -> torch.Tensor:
        if spec.storage is None:
            return torch.empty_strided(spec.shape, spec.strides, dtype=torch_dtype(spec.dtype), device="meta")
        if isinstance(spec.storage.source, LiveBytes):
            storage, offset = spec.storage.source.storage, spec.offset
        else:
            region, offset = self._regions.of(spec)
            storage = self._storage(region)
        dtype = torch_dtype(spec.dtype)
        if spec.quantizer is not None:
            return self._quantized(spec, storage, offset, dtype)
        tensor = torch.empty(0, dtype=dtype, device=storage.device)
        tensor.set_(storage, offset, spec.shape, spec.strides)
        if spec.math_bits:
            torch._utils.set_tensor_metadata(tensor, dict(spec.math_bits))  # type: ignore[no-untyped-call]  # how torch.load sets conj and neg
        return tensor

    def _storage(self, region: Region) -> torch.UntypedStorage:
        if id(region) not in self._loaded:
            buffer = torch.empty(region.nbytes, dtype=torch.uint8)
            view, position = _bytes_of(buffer), 0
            for block in stream(region.storage.source, region.start, region.stop):
                view[position : position + block.nbytes] = block
                position += block.nbytes
            self._loaded[id(region)] = buffer.untyped_storage()
        return self._loaded[id(region)]

    def _quantized(
        self, spec: TensorSpec, storage: torch.UntypedStorage, offset: int, dtype: torch.dtype
    ) -> torch.Tensor:
        quantizer = spec.quantizer
        assert quantizer is not None
        parameters: tuple[Any, ...] = (
            getattr(torch, quantizer.scheme),
            self.build(quantizer.scale) if isinstance(quantizer.scale, TensorSpec) else quantizer.scale,
            self.build(quantizer.zero_point) if isinstance(quantizer.zero_point, TensorSpec) else quantizer.zero_point,
        )
        if quantizer.axis is not None:
            parameters = (*parameters, quantizer.axis)
        typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]  # torch has no types here
        tensor: torch.Tensor = torch._utils._rebuild_qtensor(  # type: ignore[no-untyped-call]  # the way torch.load builds one
            typed, offset, spec.shape, spec.strides, parameters, False, OrderedDict()
        )
        return tensor

    def _sparse(self, spec: TensorSpec) -> torch.Tensor:
        parts = {name: self.build(part) for name, part in spec.parts.items()}
        if spec.layout == "sparse_coo":
            return torch.sparse_coo_tensor(
                parts["indices"], parts["values"], spec.shape, is_coalesced=spec.is_coalesced, check_invariants=True
            )
        compressed, plain, values = parts.values()
        layout = getattr(torch, spec.layout)
        return torch.sparse_compressed_tensor(
            compressed, plain, values, spec.shape, layout=layout, check_invariants=True
        )


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a uint8 tensor, shared."""
    return memoryview(tensor.numpy())  # type: ignore[arg-type]  # an ndarray is a buffer; its stubs say so from 3.12 on


def build_tensor(spec: TensorSpec, path: str = "checkpoint") -> torch.Tensor:
    """The tensor of one spec; only the bytes that it covers are read."""
    return Builder([spec], path).build(spec)


def build_state_dict(checkpoint: Checkpoint) -> OrderedDict[str, Any]:
    """The state_dict of a checkpoint as torch objects, with ``_metadata`` as its attribute."""
    builder = Builder(_specs_in(checkpoint.entries.values()), checkpoint.path)
    state_dict: OrderedDict[str, Any] = OrderedDict(
        (key, revive(entry, builder)) for key, entry in checkpoint.entries.items()
    )
    if checkpoint.metadata is not None:
        state_dict._metadata = OrderedDict(  # type: ignore[attr-defined]  # torch hangs it there
            (module, dict(versions)) for module, versions in checkpoint.metadata.items()
        )
    return state_dict


def _specs_in(values: Iterable[Any]) -> Iterable[TensorSpec]:
    for value in values:
        if isinstance(value, TensorSpec):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _specs_in(value)
        elif isinstance(value, dict):
            yield from _specs_in(value.values())


def revive(value: Any, builder: Builder) -> Any:
    """An entry of a state_dict as torch has it: tensors, and dtypes, devices and sizes inside of tuples, lists and
    dicts.
    """
    if isinstance(value, TensorSpec):
        return builder.build(value)
    if isinstance(value, (tuple, list)):
        return type(value)(revive(item, builder) for item in value)
    if isinstance(value, OrderedDict):
        return OrderedDict((key, revive(item, builder)) for key, item in value.items())
    if isinstance(value, dict):
        return {key: revive(item, builder) for key, item in value.items()}
    if (
        isinstance(value, Global)
        and value.module == "torch"
        and isinstance(found := getattr(torch, value.name, None), torch.dtype | torch.qscheme)
    ):
        return found
    if isinstance(value, Opaque) and str(value.cls) == "torch.Size":
        return torch.Size(*value.args)
    return value


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of a name. Raises ``UnreadableError`` where this torch is too old to know it."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnreadableError(
            f"a tensor has the dtype {name}, which torch {torch.__version__} does not know; use a newer torch"
        )
    return dtype


def spec_of_tensor(tensor: torch.Tensor, storages: dict[int, Storage] | None = None) -> TensorSpec:
    """The spec of a live tensor; its bytes stay where they are. ``storages`` carries the ties from one call to the
    next.
    """
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
    bits = {"conj": tensor.is_conj(), "neg": tensor.is_neg()}
    return TensorSpec(
        dtype,
        shape,
        tuple(tensor.stride()),
        storage,
        int(tensor.storage_offset()),
        quantizer=quantizer,
        math_bits=bits if any(bits.values()) else {},
        **common,
    )


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
    if isinstance(value, torch.Tensor):
        return spec_of_tensor(value, storages)
    if type(value) in (tuple, list):
        return type(value)(_specs_of(item, storages) for item in value)
    return value


def open_state_dict(state_dict: Mapping[str, Any], name: str = "state_dict") -> Checkpoint:
    """A live state_dict as a checkpoint. Nothing is copied: an entry that no edit touches keeps its memory."""
    storages: dict[int, Storage] = {}
    entries = {str(key): _specs_of(value, storages) for key, value in state_dict.items()}
    metadata = getattr(state_dict, "_metadata", None)
    specs = [value for value in entries.values() if isinstance(value, TensorSpec)]
    return Checkpoint(
        path=name,
        format=IN_MEMORY,
        entries=entries,
        metadata=None if metadata is None else {str(module): dict(versions) for module, versions in metadata.items()},
        root=entries,
        devices=(),
        candidates=(Candidate((), len(specs), sum(spec.numel for spec in specs)),),
    )


def row_major_bytes(spec: TensorSpec, path: str) -> memoryview:
    """The values of a strided tensor in row-major order, conjugated or negated where the spec says so."""
    tensor = build_tensor(spec, path).detach().resolve_conj().resolve_neg().contiguous()
    return _bytes_of(tensor.view(-1).view(torch.uint8)) if tensor.numel() else memoryview(b"")


class CastBytes:
    """The bytes of a tensor in another dtype, converted block by block when they are read."""

    def __init__(self, spec: TensorSpec, dtype: str, path: str) -> None:
        self.spec, self.dtype, self.path = spec, dtype, path
        self.nbytes = spec.numel * DTYPES[dtype].itemsize
        self._row_major: memoryview | None = None

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes ``start`` to ``stop`` of the converted tensor."""
        size, itemsize = DTYPES[self.dtype].itemsize, self.spec.itemsize
        first, last = start // size, -(-stop // size)
        if self.spec.is_contiguous and self.spec.storage is not None:
            begin = self.spec.offset * itemsize
            raw = self.spec.storage.source.read(begin + first * itemsize, begin + last * itemsize)
        else:
            if self._row_major is None:
                self._row_major = row_major_bytes(self.spec, self.path)
            raw = self._row_major[first * itemsize : last * itemsize]
        if not raw:
            return memoryview(b"")
        values = torch.frombuffer(bytearray(raw), dtype=torch_dtype(self.spec.dtype))
        converted = values.to(torch_dtype(self.dtype))
        if not converted.is_floating_point() and values.is_floating_point() and not values.isfinite().all():
            raise WriteError(f"{self.path}: a NaN or infinity cannot become {self.dtype}; keep the tensor as it is")
        return _bytes_of(converted.view(torch.uint8))[start - first * size : stop - first * size]


def cast_spec(spec: TensorSpec, dtype: str, path: str) -> TensorSpec:
    """The spec of a tensor converted to another dtype; the values are converted when they are read."""
    storage = Storage(f"cast {dtype}", CastBytes(spec, dtype, path))
    return replace(spec, dtype=dtype, strides=contiguous_strides(spec.shape), storage=storage, offset=0, math_bits={})
