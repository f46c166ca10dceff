"""The values of a tensor as bytes in row-major order."""

from __future__ import annotations

from collections.abc import Iterator

from ckptfix.bytes.sources import blocks_of, stream
from ckptfix.core.spec import TensorSpec
from ckptfix.errors import WriteError


def is_range(spec: TensorSpec) -> bool:
    """Whether the values of a strided tensor are a range of its storage."""
    return spec.is_contiguous and not spec.math_bits


def contiguous_blocks(spec: TensorSpec, path: str) -> Iterator[memoryview]:
    """The bytes of a strided tensor in row-major order, in blocks."""
    if spec.storage is None:
        raise WriteError(f"{path}: a tensor of the meta device has no values to write; fill it first")
    if is_range(spec):
        yield from stream(spec.storage.source, *spec.extent)
        return
    from ckptfix.reading.tensors import row_major_bytes

    yield from blocks_of(row_major_bytes(spec, path))
