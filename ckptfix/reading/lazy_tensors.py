"""The values of tensors, as torch's and as bytes in row-major order. torch is imported when the first one needs it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from ckptfix.bytes.sources import blocks_of, stream
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.lazy import torch
from ckptfix.core.spec import TensorSpec
from ckptfix.errors import WriteError


class LazyTensors:
    """The ``TensorReader`` of every checkpoint that is opened."""

    def tensor(self, checkpoint: Checkpoint, key: str) -> torch.Tensor:
        """Read one tensor; a ``DamageWarning`` says if its storage fails its checksum."""
        from ckptfix.reading.tensors import read_tensor

        return read_tensor(checkpoint, key)

    def state_dict(self, checkpoint: Checkpoint, mapped: Collection[str]) -> dict[str, Any]:
        """Build the whole state_dict. Raises ``UnreadableError`` if bytes fail their checksum."""
        from ckptfix.reading.tensors import build_state_dict

        return build_state_dict(checkpoint, mapped)


def is_range(spec: TensorSpec) -> bool:
    """Return whether the values of a strided tensor are a range of its storage."""
    return spec.is_contiguous and not spec.math_bits


def contiguous_blocks(spec: TensorSpec, path: str) -> Iterator[memoryview]:
    """Yield the bytes of a strided tensor in row-major order, in blocks."""
    if spec.storage is None:
        raise WriteError(f"{path}: a tensor of the meta device has no values to write; fill it first")
    if is_range(spec):
        yield from stream(spec.storage.source, *spec.extent)
        return
    from ckptfix.reading.tensors import row_major_bytes

    yield from blocks_of(row_major_bytes(spec, path))
