"""Checkpoints in memory, made of real torch tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from msgspec.structs import replace

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.spec import Storage, TensorSpec


@dataclass
class MemorySource:
    """A source of bytes in memory that counts how many are read."""

    data: bytes
    bytes_read: int = 0
    largest: int = 0

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def read(self, start: int, stop: int) -> memoryview:
        assert 0 <= start <= stop <= len(self.data), f"bytes {start} to {stop} of {len(self.data)}"
        self.bytes_read += stop - start
        self.largest = max(self.largest, stop - start)
        return memoryview(self.data)[start:stop]


def spec_of(tensor: torch.Tensor, storages: dict[int, Storage]) -> TensorSpec:
    """Return the spec of a tensor; tensors that share memory share a storage."""
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if tensor.layout is not torch.strided:
        values = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
        return TensorSpec(dtype, shape, layout="sparse", parts={"values": spec_of(values, storages)})
    if tensor.is_meta:
        return TensorSpec(dtype, shape, tuple(tensor.stride()))
    untyped = tensor.untyped_storage()
    if untyped.data_ptr() not in storages or untyped.nbytes() == 0:
        data = bytes(torch.tensor([], dtype=torch.uint8).set_(untyped).numpy().tobytes())
        storages[untyped.data_ptr()] = Storage(str(len(storages)), MemorySource(data))
    storage = storages[untyped.data_ptr()]
    return TensorSpec(dtype, shape, tuple(tensor.stride()), storage, int(tensor.storage_offset()))


def checkpoint_of(state_dict: Mapping[str, torch.Tensor], **rest: object) -> Checkpoint:
    """Return a state_dict as a Checkpoint; ``rest`` sets further fields."""
    storages: dict[int, Storage] = {}
    entries = {key: spec_of(tensor.detach(), storages) for key, tensor in state_dict.items()}
    return replace(Checkpoint("model.pth", "test", entries), **rest)


def source_of(checkpoint: Checkpoint, key: str) -> MemorySource:
    """Return the source of a key's bytes."""
    storage = checkpoint.specs[key].storage
    assert storage is not None
    assert isinstance(storage.source, MemorySource)
    return storage.source
