"""Converts specs to torch tensors, and tensors in memory to specs without copying."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from mmap import ACCESS_COPY, mmap
from typing import Any

from ckptfix.bytes.checksums import Alarm, is_sound, refusing, soundness, verified_stream
from ckptfix.bytes.files import OpenFile
from ckptfix.bytes.sources import located, stream
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.lazy import torch
from ckptfix.core.objects import Global, Opaque, is_native, tensors_in
from ckptfix.core.spec import Quantizer, Region, Regions, Storage, TensorSpec
from ckptfix.errors import UnreadableError, UsageError
from ckptfix.reading.pickles.claims import sizes


class LiveBytes:
    """The bytes of a torch storage, which are shared, and copied only from other devices."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes()

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop``, as a view of the storage's memory if it is on the CPU."""
        if start == stop:
            return memoryview(b"")
        whole = torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)
        return bytes_of(whole[start:stop].cpu())


@contextmanager
def one_thread() -> Iterator[None]:
    """Make torch compute in the calling thread: for small blocks, its own threads take up to forty times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a uint8 tensor without copying."""
    return memoryview(tensor.numpy())  # type: ignore[arg-type]  # an ndarray is a buffer; its stubs say so from 3.12 on


def spec_of_tensor(tensor: torch.Tensor, storages: dict[int, Storage] | None = None) -> TensorSpec:
    """Return the spec of a tensor in memory without copying it. ``storages`` carries ties between calls."""
    if hasattr(tensor, "__tensor_flatten__"):
        # The storage of a wrapper such as DTensor is empty.
        raise UsageError(
            f"a tensor of the state_dict is a {type(tensor).__name__}, whose values are elsewhere; pass plain tensors, "
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


def spec_of_number(dtype: str, shape: tuple[int, ...], value: float) -> TensorSpec:
    """Return the spec of a new tensor filled with one number."""
    return spec_of_tensor(torch.full(shape, value, dtype=getattr(torch, dtype)))


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


class Builder:
    """A builder of tensors; those that share bytes in the file share memory too.

    With an ``alarm``, the checksum of every storage is verified, and the alarm is called with a damaged one. The
    storages in ``mapped`` are mapped instead of read, if they are in a file and aligned as torch needs."""

    def __init__(
        self, specs: Iterable[TensorSpec], path: str, alarm: Alarm | None = None, mapped: Collection[Storage] = ()
    ) -> None:
        self.path, self.alarm, self.mapped = path, alarm, mapped
        self._maps: dict[OpenFile, mmap | None] = {}
        self._regions = Regions(part for spec in specs for part in spec.strided_parts())
        self._loaded: dict[int, torch.UntypedStorage] = {}

    def build(self, spec: TensorSpec) -> torch.Tensor:
        """Return the tensor of a spec, on the CPU (a tensor in memory stays on its device)."""
        try:
            tensor = self._sparse(spec) if spec.parts else self._strided(spec)
        except (RuntimeError, ValueError, TypeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UnreadableError(
                f"{self.path}: torch refuses a tensor of {spec.dtype} {spec.shape}: {reason}"
            ) from error
        return tensor.requires_grad_() if spec.can_learn else tensor

    def _strided(self, spec: TensorSpec) -> torch.Tensor:
        if spec.storage is None:
            return torch.empty_strided(spec.shape, spec.strides, dtype=torch_dtype(spec.dtype), device="meta")
        if isinstance(spec.storage.source, LiveBytes):
            storage, offset = spec.storage.source.storage, spec.offset
        else:
            region, offset = self._regions.of(spec)
            if id(region) not in self._loaded:
                mapped = self._map(region) if region.storage in self.mapped else None
                self._loaded[id(region)] = self._read(region) if mapped is None else mapped
            storage = self._loaded[id(region)]
        dtype = torch_dtype(spec.dtype)
        if spec.quantizer is not None:
            return self._quantized(spec, storage, offset, dtype)
        tensor = torch.empty(0, dtype=dtype, device=storage.device)
        tensor.set_(storage, offset, spec.shape, spec.strides)
        if spec.math_bits:
            torch._utils.set_tensor_metadata(tensor, dict(spec.math_bits))  # type: ignore[no-untyped-call]  # how torch.load sets conj and neg
        return tensor

    def _map(self, region: Region) -> torch.UntypedStorage | None:
        """Map the bytes of a region; None if they are not a range of a file, or not aligned for their elements."""
        place = located(region.storage.source)
        if place is None or not region.nbytes:
            return None
        if place.file not in self._maps:
            self._maps[place.file] = _mapped(place.file)
        whole, start = self._maps[place.file], place.offset + region.start
        if whole is None or start % region.align or start + region.nbytes > len(whole):
            return None
        if self.alarm is not None and not is_sound(region.storage):
            self.alarm(region.storage)
        return torch.frombuffer(whole, dtype=torch.uint8, count=region.nbytes, offset=start).untyped_storage()

    def _read(self, region: Region) -> torch.UntypedStorage:
        buffer = torch.empty(region.nbytes, dtype=torch.uint8)
        view, position = bytes_of(buffer), 0
        blocks = (
            stream(region.storage.source, region.start, region.stop)
            if self.alarm is None
            else verified_stream(region.storage, region.start, region.stop, self.alarm)
        )
        for block in blocks:
            view[position : position + block.nbytes] = block
            position += block.nbytes
        return buffer.untyped_storage()

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


def _mapped(file: OpenFile) -> mmap | None:
    """Map a whole file; None if the file system or a system limit does not allow it.

    Writes to the pages do not reach the file, and removing the file changes nothing. But as with
    ``torch.load(mmap=True)``, overwriting the file in place changes the tensors, and truncating it kills the process
    when it reads them (SIGBUS)."""
    if file.is_remote:
        return None
    file = file.opened()
    try:
        return mmap(file.descriptor, 0, access=ACCESS_COPY)
    except (OSError, ValueError):
        return None


def build_tensor(spec: TensorSpec, path: str = "checkpoint", alarm: Alarm | None = None) -> torch.Tensor:
    """Return the tensor of one spec. Only its bytes are read, unless an ``alarm`` requires verifying its storage."""
    return Builder([spec], path, alarm).build(spec)


def build_state_dict(checkpoint: Checkpoint, mapped: Collection[str] = ()) -> OrderedDict[str, Any]:
    """Return the state_dict of a checkpoint as torch objects, with ``_metadata`` as its attribute.

    The tensors of the keys in ``mapped`` are mapped from the file if possible, else read."""
    storages = _storages_under(checkpoint, mapped)
    if storages:
        soundness(storages)  # storages that are read are verified on the way
    builder = Builder(tensors_in(dict(checkpoint.entries)), checkpoint.path, refusing(checkpoint), storages)
    made: dict[int, Any] = {}
    try:
        state_dict: OrderedDict[str, Any] = OrderedDict(
            (key, revive(entry, builder, made)) for key, entry in checkpoint.entries.items()
        )
    except RecursionError as error:
        raise UnreadableError(
            f"{checkpoint.path}: an entry of the state_dict is nested too deeply to be built; remove it first"
        ) from error
    if checkpoint.metadata is not None:
        # All rows are made first: `made` knows objects by their ids, which are used again when one is freed.
        rows = OrderedDict((module, dict(row)) for module, row in checkpoint.metadata.items())
        state_dict._metadata = revive(rows, builder, made)  # type: ignore[attr-defined]  # as torch does
    return state_dict


def revive_tree(value: dict[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """Build the data beside the weights as torch objects. Raises ``UnreadableError`` if bytes fail their checksum."""
    made: dict[str, Any] = revive(value, Builder(tensors_in(value), checkpoint.path, refusing(checkpoint)), {})
    return made


def _storages_under(checkpoint: Checkpoint, keys: Collection[str]) -> Collection[Storage]:
    """Return the storages that only the entries of these keys use, in order."""
    found: dict[bool, dict[Storage, None]] = {True: {}, False: {}}
    for key, entry in checkpoint.entries.items():
        for spec in tensors_in(entry):
            if spec.storage is not None:
                found[key in keys][spec.storage] = None
    return {storage: None for storage in found[True] if storage not in found[False]}


def revive(value: Any, builder: Builder, made: dict[int, Any]) -> Any:
    """Return an entry of a state_dict as torch objects: tensors, dtypes and sizes, also inside tuples, lists and dicts.

    ``made`` has the results so far, so that an object in two places, or in itself, stays one object."""
    if isinstance(value, TensorSpec):
        return builder.build(value)
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, list):
        items: list[Any] = []
        made[id(value)] = items
        items.extend(revive(item, builder, made) for item in value)
        return items
    if isinstance(value, dict):
        pairs: dict[Any, Any] = OrderedDict() if isinstance(value, OrderedDict) else {}
        made[id(value)] = pairs
        for key, item in value.items():
            pairs[key] = revive(item, builder, made)
        return pairs
    if type(value) is tuple:
        made[id(value)] = tuple(revive(item, builder, made) for item in value)
        return made[id(value)]
    if (
        isinstance(value, Global)
        and value.module == "torch"
        and isinstance(found := getattr(torch, value.name, None), torch.dtype | torch.qscheme | torch.layout)
    ):
        return found
    if isinstance(value, Opaque) and str(value.cls) == "torch.Size":
        try:
            return torch.Size(sizes(value))
        except ValueError:
            return value  # torch never writes such a size
    if isinstance(value, Opaque) and str(value.cls) == "torch.device" and is_native(value):
        return torch.device(*value.args)
    return value


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype with a name. Raises ``UnreadableError`` if the installed torch is too old for it."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnreadableError(
            f"a tensor has the dtype {name}, which torch {torch.__version__} does not know; use a newer torch"
        )
    return dtype
