"""What a checkpoint is once it has been read: names, shapes, dtypes and where the bytes lie. No tensor is in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from ckptfix.errors import UnknownKeyError
from ckptfix.geometry import Geometry

if TYPE_CHECKING:
    import torch

IN_MEMORY = "memory"
"""The format name of a state_dict that never was a file."""

PathPart = str | int
"""One step into a container: a key of a dict, an attribute of an object, or an index of a list."""


class ByteSource(Protocol):
    """Where the bytes of a storage lie: a range of a file, a compressed member, or memory."""

    @property
    def nbytes(self) -> int:
        """How many bytes there are."""
        ...

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes ``start`` to ``stop``; raises ``UnreadableError`` where the file ends before."""
        ...


_NOTHING: Mapping[str, Any] = {}


def _nothing() -> Mapping[str, Any]:
    return _NOTHING  # one for all: a file may have a hundred thousand tensors


class _Referable:
    __slots__ = ("__weakref__",)  # what is known of a storage's checksum is kept beside it for as long as it lives


@dataclass(frozen=True, eq=False, slots=True)
class Storage(_Referable):
    """A run of bytes that one or more tensors view. Its identity (``is``) is what makes a tie.

    ``device`` is the location tag of the file (``cuda:3``, ``xla:0``): a fact to report, never a place to read to.
    ``crc32`` is the checksum that the container gives for the whole storage, where it has one. ``parts`` are the
    storages of the file that its bytes are made of, where it is none of them itself (chunks that were put together,
    elements that were turned round or converted): their checksums speak for it.
    """

    key: str
    source: ByteSource
    device: str = "cpu"
    crc32: int | None = None
    parts: tuple[Storage, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.source.nbytes


@dataclass(frozen=True)
class Quantizer:
    """How the integers of a quantised tensor stand for reals. Per-channel scales and zero points are tensors
    themselves.
    """

    scheme: str
    scale: float | TensorSpec
    zero_point: int | TensorSpec
    axis: int | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """Equal and hashable for quantizers of the same values: torch 1.3 pickled those of channels as lists."""
        given: tuple[object, ...] = (self.scale, self.zero_point)
        values = (tuple(part) if isinstance(part, list) else part for part in given)
        return (self.scheme, *values, self.axis)


@dataclass(frozen=True, slots=True)
class TensorSpec(Geometry):
    """A tensor without its values.

    ``shape``, ``strides`` and ``offset`` count elements of ``dtype`` (a name of ``ckptfix.dtypes``). A strided tensor
    has a ``storage``; a sparse one has ``parts`` (``indices`` and ``values``, or the compressed index tensors) and no
    storage; one that was saved from the meta device has neither. ``requires_grad`` is kept because a Parameter carries
    it."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()
    storage: Storage | None = None
    offset: int = 0
    layout: str = "strided"
    parts: Mapping[str, TensorSpec] = field(default_factory=_nothing, hash=False)
    quantizer: Quantizer | None = None
    requires_grad: bool = False
    is_parameter: bool = False
    is_coalesced: bool | None = None
    math_bits: Mapping[str, bool] = field(default_factory=_nothing, hash=False)
    _numel: int | None = field(default=None, init=False, repr=False, compare=False)
    _is_contiguous: bool | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def has_data(self) -> bool:
        """Whether values were saved at all (False for tensors of the meta device)."""
        return self.storage is not None or bool(self.parts)

    @property
    def view(self) -> tuple[object, ...]:
        """Equal for two strided tensors that are the same view of the same storage and so hold the same values."""
        place = (id(self.storage), self.offset, self.dtype, self.shape, self.strides)
        bits = tuple(name for name in sorted(self.math_bits) if self.math_bits[name]) if self.math_bits else ()
        return place if not bits and self.quantizer is None else (*place, bits, self.quantizer and self.quantizer.key)

    @property
    def storages(self) -> tuple[Storage, ...]:
        """The storages that hold this tensor's bytes, in order."""
        return tuple(part.storage for part in self.strided_parts() if part.storage is not None)

    def strided_parts(self) -> Iterable[TensorSpec]:
        """The strided tensors that hold this tensor's bytes: itself, or its parts, and a quantizer's tensors."""
        if not self.parts and self.quantizer is None:  # as of nearly all tensors
            return (self,) if self.storage is not None else ()
        return self._several_parts()

    def _several_parts(self) -> Iterator[TensorSpec]:
        if self.parts:
            for part in self.parts.values():
                yield from part.strided_parts()
        elif self.storage is not None:
            yield self
        if self.quantizer is not None:
            for value in (self.quantizer.scale, self.quantizer.zero_point):
                if isinstance(value, TensorSpec):
                    yield from value.strided_parts()


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, of a row-major tensor of this shape."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True)
class Remark:
    """Something that was noticed while reading and that a rule of the family FIL turns into a finding.

    ``kind`` is a word such as ``foreign-class``, ``non-string-key``, ``protocol``; ``where`` names the place in the
    container (``args``, ``optimizer.state``); ``detail`` says what it is (``argparse.Namespace``)."""

    kind: str
    where: str
    detail: str


@dataclass(frozen=True)
class Candidate:
    """A state_dict that was found in a container: its place, its number of tensors and of elements."""

    path: tuple[PathPart, ...]
    tensors: int
    numel: int

    @property
    def name(self) -> str:
        """The name that ``--weights`` takes: ``state_dict``, ``model.ema``, ``[0]``; ``.`` for the top level."""
        return path_name(self.path)


def path_name(path: tuple[PathPart, ...]) -> str:
    """A container path as people write it: ``("model", 0)`` is ``model[0]``; the empty path is ``.``."""
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return name.removeprefix(".") or "."


@dataclass(frozen=True)
class Checkpoint:
    """A state_dict and the container around it, read lazily.

    ``entries`` holds the state_dict in its own order: a ``TensorSpec`` for every tensor and inert plain data for the
    rest (packed parameters, ``_extra_state``). ``metadata`` is torch's ``_metadata`` (module path → its version), None
    where the file has none. ``container`` is the path that led from ``root``, the whole parsed object, to the
    state_dict. ``devices`` are the location tags of the file's storages that a written file keeps; without one, a
    storage is written as ``cpu``. ``producer`` says what wrote the file, where it shows. ``member`` is the name of the
    file inside of the archive or compressed file that ``path`` names. ``damage`` says what is wrong with the file,
    where it was opened to be salvaged, and ``lost`` has the keys whose bytes are gone: with their specs, or None where
    a missing file leaves the name alone. ``picked`` are the keys of the set that ``--weights`` names by its prefix in
    the state_dict, with their names without it; None where the whole state_dict is meant.
    """

    path: str
    format: str
    entries: Mapping[str, object]
    metadata: Mapping[str, Mapping[str, Any]] | None = None
    container: tuple[PathPart, ...] = ()
    root: object = None
    devices: tuple[str, ...] = ()
    producer: str = ""
    candidates: tuple[Candidate, ...] = ()
    remarks: tuple[Remark, ...] = ()
    damage: tuple[str, ...] = ()
    lost: Mapping[str, TensorSpec | None] = field(default_factory=dict)
    member: str = ""
    picked: Mapping[str, str] | None = None

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The tensors of the state_dict, by key, in the file's order."""
        return {key: value for key, value in self.entries.items() if isinstance(value, TensorSpec)}

    def keys(self) -> list[str]:
        """The keys of the tensors, in the file's order."""
        return list(self.specs)

    def read(self, key: str) -> torch.Tensor:
        """The tensor of a key, on CPU, with the dtype, shape and strides of the file.

        Raises ``UnknownKeyError``, a ``KeyError``, for an unknown key and ``UnreadableError`` where the bytes are not
        in the file. Where they are not those that were saved, a ``DamageWarning`` says so: the checksum of a storage is
        proved at the first read of it.
        """
        from ckptfix.tensors import read_tensor

        if key not in self.specs:
            raise UnknownKeyError(self._no_tensor(key))
        return read_tensor(self, key)

    def state_dict(self, *, mmap: bool = False) -> dict[str, Any]:
        """The whole state_dict as torch objects: tensors share memory where the file's tensors share a storage.

        The entries that are no tensors are kept. Torch's ``_metadata`` is set as an attribute where the file has it.
        With ``mmap``, as in ``torch.load``, they are mapped where that can be: writing to one never reaches the file,
        which must not be overwritten or cut short then. Raises ``UnreadableError`` where bytes fail their checksum.
        """
        from ckptfix.tensors import build_state_dict

        return build_state_dict(self, self.entries if mmap else ())

    def _no_tensor(self, key: str) -> str:
        if key in self.entries:
            return f"{self.path}: the entry {key!r} is no tensor; take it from state_dict()"
        if key in self.lost:
            return f"{self.path}: the bytes of {key!r} are gone from the damaged file; see Checkpoint.lost"
        close = get_close_matches(str(key), self.specs, 1)
        return f"{self.path}: has no key {key!r}; {f'did you mean {close[0]!r}?' if close else 'see keys()'}"

    def with_entries(
        self, entries: Mapping[str, object], metadata: Mapping[str, Mapping[str, Any]] | None
    ) -> Checkpoint:
        """The same checkpoint with another state_dict in its container."""
        return replace(self, entries=entries, metadata=metadata)
