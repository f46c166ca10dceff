"""Live tensors as specs: a state_dict in memory becomes a checkpoint without a copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckptfix.core.lazy import torch
from ckptfix.core.spec import Quantizer, Storage, TensorSpec
from ckptfix.errors import UsageError


class LiveBytes:
    """The bytes of a storage of torch, shared and never copied unless they lie on another device."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage

    @property
    def nbytes(self) -> int:
        """How many bytes there are."""
        return self.storage.nbytes()

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop``, as a view of the storage's own memory where it is on the CPU."""
        if start == stop:
            return memoryview(b"")
        whole = torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)
        return bytes_of(whole[start:stop].cpu())


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in the threads that call it: for small blocks, those of its own cost up to forty times more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a uint8 tensor, shared."""
    return memoryview(tensor.numpy())  # type: ignore[arg-type]  # an ndarray is a buffer; its stubs say so from 3.12 on


def spec_of_tensor(tensor: torch.Tensor, storages: dict[int, Storage] | None = None) -> TensorSpec:
    """Return the spec of a live tensor; its bytes stay where they are. ``storages`` carries ties between calls."""
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


def spec_of_number(dtype: str, shape: tuple[int, ...], value: float) -> TensorSpec:
    """Return the spec of a new tensor, all of whose elements are one number."""
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
