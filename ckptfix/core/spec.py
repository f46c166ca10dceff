"""A tensor without its values: dtype, shape, strides, and where its bytes are."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import copy
from functools import lru_cache
from typing import Any, Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.core.dtypes import DTYPES

TypedShape = tuple[str, tuple[int, ...]]  # a dtype and a shape


@lru_cache(maxsize=1 << 12)  # called dozens of times per tensor, and many tensors share a shape
def _is_row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if stride != step and size != 1:
            return False
        step *= size
    return True


class ByteSource(Protocol):
    """Where the bytes of a storage are: a range of a file, a compressed member, or memory."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        ...

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop``. Raises ``UnreadableError`` if the file is too short."""
        ...


_NOTHING: Mapping[str, Any] = {}


def _nothing() -> Mapping[str, Any]:
    return _NOTHING  # shared, because a file may have a hundred thousand tensors


# weakref: verified checksums are kept in a table for as long as their storage lives.
class Storage(Struct, frozen=True, eq=False, weakref=True):
    """A run of bytes that one or more tensors view. Tensors are tied if they have the same storage object (``is``).

    ``device`` is the location tag in the file (``cuda:3``, ``xla:0``): reported, never used to place a tensor.
    ``crc32`` is the container's checksum of the whole storage, if it has one. ``parts`` are the storages of the file
    that the bytes are computed from (concatenated chunks, byte-swapped or converted elements): their checksums cover
    it."""

    key: str
    source: ByteSource
    device: str = "cpu"
    crc32: int | None = None
    parts: Collection[Storage] = ()

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.source.nbytes


class Quantizer(Struct, frozen=True):
    """How the integers of a quantised tensor map to reals. Per-channel scales and zero points are tensors."""

    scheme: str
    scale: float | TensorSpec
    zero_point: int | TensorSpec
    axis: int | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """A hashable key that is equal for equal quantizers. torch 1.3 pickled per-channel values as lists."""
        given: tuple[object, ...] = (self.scale, self.zero_point)
        values = (tuple(part) if isinstance(part, list) else part for part in given)
        return (self.scheme, *values, self.axis)

    @property
    def form(self) -> tuple[object, ...]:
        """A key that is equal for quantizers that are equal apart from tensors, whose bytes are compared as others are.

        Numbers are text in it, so that NaN is equal to itself."""
        numbers = (None if isinstance(part, TensorSpec) else str(part) for part in (self.scale, self.zero_point))
        return (self.scheme, self.axis, *numbers)


class TensorSpec(Struct, frozen=True, gc=False):
    """A tensor without its values.

    ``shape``, ``strides`` and ``offset`` are in elements of ``dtype`` (a name in ``core.dtypes``). A strided tensor has
    a ``storage``; a sparse one has ``parts`` (``indices`` and ``values``, or the compressed index tensors) and no
    storage; one saved from the meta device has neither. ``requires_grad`` is kept because a Parameter has it."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()
    storage: Storage | None = None
    offset: int = 0
    layout: str = "strided"
    parts: Mapping[str, TensorSpec] = field(default_factory=_nothing)
    quantizer: Quantizer | None = None
    requires_grad: bool = False
    is_parameter: bool = False
    is_coalesced: bool | None = None
    math_bits: Mapping[str, bool] = field(default_factory=_nothing)

    def __repr__(self) -> str:
        return f"<TensorSpec {self.dtype}{list(self.shape)}{'' if self.layout == 'strided' else f' {self.layout}'}>"

    def __hash__(self) -> int:
        return hash((self.dtype, self.shape, self.strides, self.storage, self.offset, self.layout))

    @property
    def numel(self) -> int:
        """Number of elements (1 for a 0-d tensor)."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def per_byte(self) -> int:
        """Elements per byte, 1 except for the quantised dtypes of 2 and 4 bits."""
        return DTYPES[self.dtype].per_byte

    @property
    def nbytes(self) -> int:
        """Size of the dense tensor in bytes; a tensor with a zero stride takes fewer in the file."""
        dtype = DTYPES[self.dtype]
        return -(-self.numel * dtype.itemsize // dtype.per_byte)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are contiguous in row-major order."""
        return 0 in self.shape or _is_row_major(self.shape, self.strides)

    @property
    def extent(self) -> tuple[int, int]:
        """The first byte of the storage that the tensor uses, and one past the last."""
        dtype, offset, count = DTYPES[self.dtype], self.offset, self.numel
        if count and not self.is_contiguous:
            count = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        itemsize, per_byte = dtype.itemsize, dtype.per_byte
        if per_byte == 1:
            return offset * itemsize, (offset + count) * itemsize
        first = offset * itemsize // per_byte
        return first, -(-(offset + count) * itemsize // per_byte) if count else first

    def at(self, index: int) -> TensorSpec:
        """Return the tensor at an index of the first dimension."""
        offset = self.offset + index * self.strides[0]
        return replace(self, shape=self.shape[1:], strides=self.strides[1:], offset=offset)

    @property
    def has_data(self) -> bool:
        """Whether values were saved (False for tensors from the meta device)."""
        return self.storage is not None or bool(self.parts)

    @property
    def can_learn(self) -> bool:
        """Whether ``requires_grad`` is set and the dtype supports gradients."""
        dtype = DTYPES[self.dtype]
        return self.requires_grad and (dtype.is_float or dtype.is_complex)

    @property
    def view(self) -> tuple[object, ...]:
        """A key that is equal for two strided tensors that are the same view of the same storage."""
        place = (id(self.storage), self.offset, self.dtype, self.shape, self.strides)
        bits = tuple(name for name in sorted(self.math_bits) if self.math_bits[name]) if self.math_bits else ()
        return place if not bits and self.quantizer is None else (*place, bits, self.quantizer and self.quantizer.key)

    @property
    def storages(self) -> tuple[Storage, ...]:
        """The storages that hold the tensor's bytes, in order."""
        return tuple(part.storage for part in self.strided_parts() if part.storage is not None)

    def strided_parts(self) -> Iterator[TensorSpec]:
        """Yield the strided tensors that hold the tensor's bytes: itself or its parts, and the quantizer's tensors."""
        if self.parts:
            for part in self.parts.values():
                yield from part.strided_parts()
        elif self.storage is not None:
            yield self
        if self.quantizer is not None:
            for value in (self.quantizer.scale, self.quantizer.zero_point):
                if isinstance(value, TensorSpec):
                    yield from value.strided_parts()


def with_own_storage(value: Any) -> Any:
    """Return a tensor with a storage that it shares with no other, since optimizers update step counts in place; other
    values are returned as they are."""
    if not isinstance(value, TensorSpec) or value.storage is None:
        return value
    return replace(value, storage=copy(value.storage))


def computed(spec: TensorSpec, name: str, source: ByteSource, storages: Iterable[Storage], **form: Any) -> TensorSpec:
    """Return a row-major tensor like ``spec`` whose bytes ``source`` computes from ``storages``; ``form`` may replace
    its ``dtype`` and ``shape``."""
    device = spec.storage.device if spec.storage is not None else "cpu"
    storage = Storage(name, source, device, parts=tuple(dict.fromkeys(storages)))
    made = replace(spec, storage=storage, offset=0, math_bits=_NOTHING, **form)
    return replace(made, strides=contiguous_strides(made.shape))


@lru_cache(maxsize=256)  # a model has few distinct shapes
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a row-major tensor of this shape."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


class Region(Struct, frozen=True, eq=False):
    """Bytes ``start`` to ``stop`` of a storage, covered by overlapping tensors. ``start`` is a multiple of ``align``,
    the size of their largest element."""

    storage: Storage
    start: int
    stop: int
    align: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether the region is the whole storage."""
        return self.start == 0 and self.stop == self.storage.nbytes


class Regions:
    """The regions of a set of strided tensors."""

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        by_storage: dict[int, list[TensorSpec]] = {}
        for spec in specs:
            if spec.storage is not None:
                by_storage.setdefault(id(spec.storage), []).append(spec)
        self._regions: dict[int, list[Region]] = {key: _merge(views) for key, views in by_storage.items()}

    def __iter__(self) -> Iterator[Region]:
        for regions in self._regions.values():
            yield from regions

    def of(self, spec: TensorSpec) -> tuple[Region, int]:
        """Return the region that contains a tensor, and the tensor's offset in it, in elements."""
        regions = self._regions[id(spec.storage)]
        start, _ = spec.extent
        region = regions[max(bisect_right(regions, start, key=lambda region: region.start) - 1, 0)]
        # An offset that is not a whole number of bytes keeps its remainder.
        return region, (start - region.start) // spec.itemsize * spec.per_byte + spec.offset % spec.per_byte


def _merge(views: list[TensorSpec]) -> list[Region]:
    """Return the unions of overlapping extents, in order. Each starts at an offset aligned for all its dtypes."""
    storage = views[0].storage
    assert storage is not None
    regions: list[Region] = []
    for (start, stop), align in sorted((view.extent, view.itemsize) for view in views):
        # The alignment for a wider dtype can reach into the region before. Empty ones at one place are one.
        while regions and (start < regions[-1].stop or start == regions[-1].start):
            last = regions.pop()
            align = max(align, last.align)
            start, stop = min(start, last.start) // align * align, max(stop, last.stop)
        regions.append(Region(storage, start, stop, align))
    return regions


# Weights below this magnitude have no effect: their contribution is rounded away.
FAINT = 1e-20
DISK_BLOCK = 4096  # bytes; the block size of file systems and disks


class TensorStatistics(Struct, gc=False):
    """Statistics of the numbers of a tensor, or of a range of them.

    ``numel`` counts numbers: a complex element is two. ``zeros`` includes -0.0. ``overflowing`` and ``vanishing`` count
    the finite numbers that the requested cast would turn into infinity (or NaN) and zero. ``minimum`` to ``rms`` are
    over the finite numbers, and 0.0 if there are none; the moments are averages, which cannot overflow.
    ``first_nonfinite`` is the flat row-major index of the first element that is NaN or infinite; None if there is none,
    and for sparse tensors.
    ``words`` are the 8 bytes at each multiple of 4 KiB of the file, for a row-major tensor in a file without checksums:
    equal words hint at a copied block. So do equal ``marks``, for a matrix in any file: pairs of 64-bit integers, a
    hash of 16 bytes and their place in the tensor, sampled where these have certain bits. ``has_faint_rows`` tells
    whether a row of a matrix begins with a nonzero number below ``FAINT``. ``sample`` has about 256 of the numbers, at
    equal distances, as float32; empty for sparse tensors.
    The error of ``mean`` and ``rms`` is less than 1e-12 of the RMS, for float16 and bfloat16 less than 1e-6."""

    numel: int = 0
    nan: int = 0
    pos_inf: int = 0
    neg_inf: int = 0
    zeros: int = 0
    subnormals: int = 0
    overflowing: int = 0
    vanishing: int = 0
    minimum: float = 0.0
    maximum: float = 0.0
    mean: float = 0.0
    rms: float = 0.0
    first_nonfinite: int | None = None
    words: bytes = b""
    marks: bytes = b""
    has_faint_rows: bool = False
    sample: bytes = b""

    @property
    def nonfinite(self) -> int:
        return self.nan + self.pos_inf + self.neg_inf

    @property
    def finite(self) -> int:
        return self.numel - self.nonfinite

    @property
    def absmax(self) -> float:
        """The largest magnitude of the finite numbers."""
        return max(0.0, -self.minimum, self.maximum)

    @property
    def all_zero(self) -> bool:
        return 0 < self.numel == self.zeros

    @property
    def is_constant(self) -> bool:
        """Whether there are at least two numbers, all finite and equal."""
        return self.numel > 1 and not self.nonfinite and self.minimum == self.maximum


def ties(specs: Mapping[str, TensorSpec]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of keys that are one tensor: the same view of the same storage. Empty tensors are not tied."""
    views = Counter([id(spec.storage) for spec in specs.values()])  # most storages have one view, which needs no key
    return grouped(
        {
            key: spec.view
            for key, spec in specs.items()
            if spec.storage is not None and views[id(spec.storage)] > 1 and spec.numel
        }
    )


def grouped(identities: Mapping[str, tuple[object, ...]]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of two or more keys with equal identities, in the order of their first keys."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for key, identity in identities.items():
        groups.setdefault(identity, []).append(key)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)
