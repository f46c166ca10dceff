"""What a library itself makes of the names and layouts of older files: its loader, run on tensors without values.

``Traced`` tensors have a shape and say which elements of which key of the file they are made of. The library loads or
converts them as it would the file: names, stacks of experts, fused layers and permutations for rotary embeddings are
moved by its own code, whatever its release, and no weight is read."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from copy import deepcopy
from functools import lru_cache
from inspect import signature
from io import TextIOBase
from itertools import accumulate, pairwise
from math import prod
from threading import RLock, get_ident
from typing import TYPE_CHECKING, Any, TextIO

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import nn
from torch.utils._pytree import tree_map

from ckptfix.core.parts import Part, Parts, Shape, merged, used_in_full
from ckptfix.maps.layout import boxes_of, normal

if TYPE_CHECKING:
    from ckptfix.core.target import Converter

# An axis as the axes of the source that it consists of: size and stride of each, the outermost first.
Axis = tuple[tuple[int, int], ...]


class _UntraceableError(NotImplementedError):
    """What was done to a traced tensor does not only move its elements."""


class _Piece(Struct, frozen=True):
    """Elements of a key of the file, and where the box that they fill begins."""

    source: str
    place: Shape
    axes: tuple[Axis, ...]
    offset: int = 0

    @property
    def sizes(self) -> Shape:
        return tuple(prod(size for size, _ in axis) for axis in self.axes)

    def sliced(self, axis: int, start: int, stop: int) -> Iterator[_Piece]:
        """Yield what is within ``start`` and ``stop`` of an axis."""
        begin = self.place[axis]
        first, last = max(start - begin, 0), min(stop - begin, self.sizes[axis])
        if first < last:
            for at, offset, factors in _cut(self.axes[axis], first, last):
                place = (*self.place[:axis], begin + first + at - start, *self.place[axis + 1 :])
                yield _Piece(
                    self.source, place, (*self.axes[:axis], factors, *self.axes[axis + 1 :]), self.offset + offset
                )

    def viewed(self, groups: Sequence[tuple[slice, slice]], before: Shape, after: Shape) -> _Piece:
        """Return the piece in another shape with the same order of elements."""
        place, axes = list[int](), list[Axis]()
        for ours, theirs in groups:
            sizes, wanted = self.sizes[ours], after[theirs]
            inner, outer = prod(before[ours][1:]), prod(wanted[1:])
            size, start = prod(sizes), self.place[ours][0] * inner if before[ours] else 0
            if sizes[1:] != before[ours][1:] or start % outer or size % outer:
                raise _UntraceableError("a part of an axis is not a part of the new ones")
            place += [start // outer, *(0 for _ in wanted[1:])][: len(wanted)]
            axes += _regrouped(
                [f for axis in self.axes[ours] for f in axis], (size // outer, *wanted[1:])[: len(wanted)]
            )
        return _Piece(self.source, tuple(place), tuple(axes), self.offset)

    def parts(self, shape: Shape) -> Iterator[Part]:
        """Yield the parts of the source, which has this shape, that the piece consists of: one for each box of it."""
        factors = [factor for axis in self.axes for factor in axis]
        order = sorted(range(len(factors)), key=lambda at: -factors[at][1])
        box, strides = [], [prod(shape[at + 1 :]) for at in range(len(shape))]
        left = list(order)
        for size, stride in zip(shape, strides, strict=True):
            own = [at for at in left if stride <= factors[at][1] < stride * size] if size > 1 else []
            left = [at for at in left if at not in own]
            expected = stride
            for at in reversed(own):
                if factors[at][1] != expected:  # every second row is many boxes
                    outer = next(each for each in reversed(own) if factors[each][1] >= expected)
                    yield from (each for piece in self._along(outer) for each in piece.parts(shape))
                    return
                expected *= factors[at][0]
            start = self.offset // stride % size if size else 0
            box.append((start, start + prod(factors[at][0] for at in own)))
        if left:
            raise _UntraceableError("an element is used several times")
        place = tuple((start, start + size) for start, size in zip(self.place, self.sizes, strict=True))
        part = Part(self.source, tuple(box), place)
        if order != list(range(len(order))):
            part = replace(
                part, view=tuple(factors[at][0] for at in order), axes=tuple(map(order.index, range(len(order))))
            )
        yield normal(part)

    def _along(self, number: int) -> Iterator[_Piece]:
        """Take the piece apart along one of its factors."""
        flat = [(at, factor) for at, axis in enumerate(self.axes) for factor in axis]
        axis, (size, stride) = flat[number]
        within = number - sum(at < axis for at, _ in flat)
        inner = prod(n for n, _ in self.axes[axis][within + 1 :])
        if within:
            raise _UntraceableError("a part of an axis is not a box")
        rest = (*self.axes[:axis], self.axes[axis][1:], *self.axes[axis + 1 :])
        for index in range(size):
            place = (*self.place[:axis], self.place[axis] + index * inner, *self.place[axis + 1 :])
            yield _Piece(self.source, place, rest, self.offset + index * stride)


def _cut(axis: Axis, start: int, stop: int) -> Iterator[tuple[int, int, Axis]]:
    """Yield the ranges of an axis between two places: where each begins there, and its offset in the source."""
    at = 0
    for box in boxes_of(start, stop, [size for size, _ in axis]):
        factors = tuple((end - begin, stride) for (begin, end), (_, stride) in zip(box, axis, strict=True))
        yield at, sum(begin * stride for (begin, _), (_, stride) in zip(box, axis, strict=True)), factors
        at += prod(size for size, _ in factors)


def _regrouped(factors: list[tuple[int, int]], sizes: Sequence[int]) -> Iterator[Axis]:
    """Yield the axes of these sizes that the factors of others make."""
    left = [factor for factor in factors if factor[0] != 1]
    for size in sizes:
        axis = []
        while size > 1:
            have, stride = left.pop(0)
            taken = have if size % have == 0 else size
            if have % taken:
                raise _UntraceableError("the sizes do not divide")
            if taken < have:
                left.insert(0, (have // taken, stride))
            axis.append((taken, stride * (have // taken)))
            size //= taken
        yield tuple(axis)


def _groups(before: Shape, after: Shape) -> list[tuple[slice, slice]]:
    """Return the shortest runs of axes with the same number of elements on both sides."""
    groups, at, to = [], 0, 0
    while at < len(before) or to < len(after):
        start, begin = at, to
        ours, theirs, at, to = prod(before[at : at + 1]), prod(after[to : to + 1]), at + 1, to + 1
        while ours != theirs and (at < len(before) or to < len(after)):
            if (ours < theirs and at < len(before)) or to >= len(after):
                ours, at = ours * before[at], at + 1
            else:
                theirs, to = theirs * after[to], to + 1
        groups.append((slice(start, min(at, len(before))), slice(begin, min(to, len(after)))))
    return groups


class Traced(torch.Tensor):
    """A tensor without values that knows where its elements come from."""

    pieces: tuple[_Piece, ...]

    @staticmethod
    def __new__(cls, shape: Sequence[int], pieces: Iterable[_Piece], dtype: torch.dtype = torch.float32) -> Traced:
        made: Traced = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device="meta")  # type: ignore[arg-type]  # any sequence is a size
        made.pieces = tuple(pieces)
        return made

    @classmethod
    def of(cls, key: str, shape: Shape) -> Traced:
        """Return the tensor of a key of the file."""
        strides = accumulate(reversed(shape[1:]), int.__mul__, initial=1) if shape else ()
        axes = tuple(
            ((size, stride),) if size != 1 else () for size, stride in zip(shape, reversed([*strides]), strict=True)
        )
        return cls(shape, [_Piece(key, (0,) * len(shape), axes)])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's stub is of the disabled one
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if (operation := _OPERATIONS.get(name)) is not None:
            with suppress(_UntraceableError):
                return operation(*args, **{k: v for k, v in kwargs.items() if name != "_to_copy" or k == "dtype"})
        if name.endswith("_") and isinstance(args[0], Traced):
            raise _UntraceableError(f"{name} changes values of the file")
        # Whatever else is computed, as for a layer that the file lacks, is not in the file.
        return func(
            *tree_map(_without_trace, args),
            **tree_map(_without_trace, kwargs | {"device": "meta"} if "device" in kwargs else kwargs),
        )

    def parts(self, shapes: Mapping[str, Shape]) -> tuple[Part, ...]:
        """Return the parts of the file that the tensor consists of; none if some of it is not from there."""
        parts = merged(part for piece in self.pieces for part in piece.parts(shapes[piece.source]))
        return parts if sum(part.numel for part in parts) == self.numel() else ()


def _without_trace(value: Any) -> Any:
    return (
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, Traced)
        else value
    )


def _permute(tensor: Traced, order: Sequence[int]) -> Traced:
    def turned(items: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(items[at] for at in order)

    pieces = (replace(each, place=turned(each.place), axes=turned(each.axes)) for each in tensor.pieces)
    return Traced(turned(tensor.shape), pieces, tensor.dtype)


def _transpose(tensor: Traced, one: int, other: int) -> Traced:
    order = list(range(tensor.ndim))
    order[one], order[other] = order[other], order[one]
    return _permute(tensor, order)


def _view(tensor: Traced, shape: Sequence[int]) -> Traced:
    known = -prod(shape)
    wanted = tuple(tensor.numel() // known if size == -1 else size for size in shape)
    groups = _groups(tuple(tensor.shape), wanted)
    return Traced(wanted, (each.viewed(groups, tuple(tensor.shape), wanted) for each in tensor.pieces), tensor.dtype)


def _slice(tensor: Traced, axis: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Traced:
    size = tensor.shape[axis]
    start, stop, _ = slice(start, stop).indices(size)
    if step != 1:
        raise _UntraceableError("a step")
    axis %= tensor.ndim
    shape = (*tensor.shape[:axis], max(stop - start, 0), *tensor.shape[axis + 1 :])
    return Traced(shape, (each for piece in tensor.pieces for each in piece.sliced(axis, start, stop)), tensor.dtype)


def _split(tensor: Traced, sizes: int | Sequence[int], axis: int = 0) -> list[Traced]:
    if isinstance(sizes, int):
        whole, rest = divmod(tensor.shape[axis], sizes)
        sizes = [sizes] * whole + [rest] * bool(rest)
    return [_slice(tensor, axis, start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


def _squeeze(tensor: Traced, axes: int | Sequence[int]) -> Traced:
    gone = {at % tensor.ndim for at in ([axes] if isinstance(axes, int) else axes)}
    return _view(tensor, [size for at, size in enumerate(tensor.shape) if at not in gone or size != 1])


def _unsqueeze(tensor: Traced, axis: int) -> Traced:
    shape = list(tensor.shape)
    shape.insert(axis % (tensor.ndim + 1), 1)
    return _view(tensor, shape)


def _select(tensor: Traced, axis: int, index: int) -> Traced:
    index %= tensor.shape[axis]
    return _squeeze(_slice(tensor, axis, index, index + 1), axis)


def _cat(tensors: Sequence[Traced], axis: int = 0) -> Traced:
    axis %= tensors[0].ndim
    pieces, start = [], 0
    for tensor in tensors:
        for each in getattr(tensor, "pieces", ()):
            place = (*each.place[:axis], each.place[axis] + start, *each.place[axis + 1 :])
            pieces.append(replace(each, place=place))
        start += tensor.shape[axis]
    shape = tensors[0].shape
    return Traced((*shape[:axis], start, *shape[axis + 1 :]), pieces, tensors[0].dtype)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ("detach", "alias", "clone", "contiguous", "_to_copy", "to"),
        lambda tensor, dtype=None, **_: Traced(tensor.shape, tensor.pieces, dtype or tensor.dtype),
    ),
    **dict.fromkeys(
        ("view", "_unsafe_view", "reshape", "_reshape_alias"), lambda tensor, shape, *_: _view(tensor, shape)
    ),
    "transpose": _transpose,
    "t": lambda tensor: _transpose(tensor, 0, 1),
    "permute": _permute,
    "slice": _slice,
    "split": _split,
    "split_with_sizes": _split,
    "unbind": lambda tensor, axis=0: [_select(tensor, axis, at) for at in range(tensor.shape[axis])],
    "select": _select,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "cat": _cat,
    "stack": lambda tensors, axis=0: _cat([_unsqueeze(each, axis) for each in tensors], axis),
}


def converter_of(module: nn.Module) -> Converter | None:
    """Return what gives the map that the loader of a model's own library applies to a file; None for other models."""
    found = {path: child for path, child in module.named_modules() if _library(child)}
    fronts = {path: f"{path}." if path else "" for path in found}
    inner = {path for path in found for other, front in fronts.items() if path != other and path.startswith(front)}
    outer = {path: child for path, child in found.items() if path not in inner}

    @lru_cache(maxsize=4)
    def parts_of(given: tuple[tuple[str, Shape], ...]) -> Parts:
        parts: dict[str, tuple[Part, ...]] = {}
        shapes = dict(given)
        for path, child in outer.items():
            front = f"{path}." if path else ""
            own = {key.removeprefix(front): shape for key, shape in shapes.items() if key.startswith(front)}
            loaded = _loaded(child, own)
            for key, pieces in loaded.items():
                parts[front + key] = tuple(replace(each, source=front + each.source) for each in pieces)
        return used_in_full(parts, shapes)

    return (lambda shapes: parts_of(tuple(shapes.items()))) if outer else None


State = dict[str, Any]


def _by_transformers(model: Any, given: State) -> State:
    with torch.device("meta"):
        torch.empty(0)  # or torch remembers the functions that transformers replaces for a while
    options = {"config": deepcopy(model.config), "device_map": "meta", "ignore_mismatched_sizes": True}
    made = type(model).from_pretrained(None, state_dict=given, **options)
    return {key: getattr(value, "data", value) for key, value in made.state_dict(keep_vars=True).items()}


def _by_diffusers(model: Any, given: State) -> State:
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES as CLASSES

    known = next(CLASSES[base.__name__] for base in type(model).__mro__ if base.__name__ in CLASSES)
    converted: State = known["checkpoint_mapping_fn"](checkpoint=given, config=dict(model.config))
    return converted


def _by_timm(model: Any, given: State) -> State:
    modules = [vars(sys.modules[base.__module__]) for base in type(model).__mro__]
    convert = next(each[name] for each in modules for name in ("checkpoint_filter_fn", "_filter_fn") if name in each)
    converted: State = convert(given, model) if len(signature(convert).parameters) > 1 else convert(given)
    return converted


def _by_open_clip(model: Any, given: State) -> State:
    from open_clip.convert import convert_state_dict
    from open_clip.model import convert_to_custom_text_state_dict

    converted: State = convert_state_dict(model, given)
    return converted if hasattr(model, "positional_embedding") else convert_to_custom_text_state_dict(converted)


_LIBRARIES: dict[str, tuple[str, Callable[[Any, State], State]]] = {
    "transformers": ("from_pretrained", _by_transformers),
    "diffusers": ("from_single_file", _by_diffusers),
    "timm": ("reset_classifier", _by_timm),
    "open_clip": ("encode_text", _by_open_clip),
}
"""What the classes of whole models have in each library, and what it makes of a file for such a model."""


def _library(model: nn.Module) -> str:
    """Return the library that loads files into a whole model; empty if there is none."""
    bases = (base.__module__.partition(".")[0] for base in type(model).__mro__)
    return next((name for name in bases if name in _LIBRARIES and hasattr(type(model), _LIBRARIES[name][0])), "")


def _loaded(model: Any, shapes: Mapping[str, Shape]) -> dict[str, tuple[Part, ...]]:
    """Return the parts of the tensors that its library gives a model of this class for a file of these shapes."""
    given = {key: Traced.of(key, shape) for key, shape in shapes.items()}
    with _silent(), suppress(Exception):  # the library's code may raise anything for a file that is not its own
        found = _LIBRARIES[_library(model)][1](model, given)
        traced = {key: value for key, value in found.items() if isinstance(value, Traced)}
        parts = {}
        for key, value in traced.items():
            with suppress(_UntraceableError):
                parts[key] = value.parts(shapes)
        return {key: own for key, own in parts.items() if own}
    return {}


_REDIRECTED = RLock()  # two threads that put back what they found would leave each other's stream in its place


class _OfOthers(TextIOBase):
    """A stream that leaves out what this thread writes, and passes on what others do."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.thread = stream, get_ident()

    def write(self, text: str) -> int:
        return len(text) if get_ident() == self.thread else self.stream.write(text)


@contextmanager
def _silent() -> Iterator[None]:
    """Keep the library from reporting on a load that does not happen; other threads print and log as before."""
    mine = get_ident()

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != mine

    loggers = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    handlers = {each for logger in (logging.root, *loggers) for each in logger.handlers}
    handlers |= {logging.lastResort} if logging.lastResort else set()
    for handler in handlers:
        handler.addFilter(is_of_others)
    try:
        with _REDIRECTED, redirect_stdout(_OfOthers(sys.stdout)), redirect_stderr(_OfOthers(sys.stderr)):
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_of_others)
