"""Traces how a library converts the names and layouts of older files, by running its loader on tensors without values.

``Traced`` tensors have a shape and track which elements of which keys of the file they consist of. The library loads or
converts them as it would the file: its own code, of whatever release, moves names, stacks of experts, fused layers and
permutations for rotary embeddings, and no weight is read."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from copy import deepcopy
from functools import lru_cache
from inspect import signature
from io import TextIOBase
from math import prod
from threading import RLock, get_ident
from typing import TYPE_CHECKING, Any, TextIO

import torch
from msgspec.structs import replace
from torch import nn
from torch.utils._pytree import tree_map

from ckptfix.core.parts import Part, Parts, Shape, used_in_full
from ckptfix.maps.elements import Elements, UntraceableError

if TYPE_CHECKING:
    from ckptfix.core.target import Converter


class Traced(torch.Tensor):
    """A tensor without values that tracks where its elements come from."""

    elements: Elements

    @staticmethod
    def __new__(cls, elements: Elements, dtype: torch.dtype = torch.float32) -> Traced:
        made: Traced = torch.Tensor._make_wrapper_subclass(cls, elements.shape, dtype=dtype, device="meta")  # type: ignore[arg-type]  # any sequence is a size
        made.elements = elements
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's stub is of the disabled one
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if (operation := _OPERATIONS.get(name)) is not None:
            with suppress(UntraceableError):
                return operation(*args, **{k: v for k, v in kwargs.items() if name != "_to_copy" or k == "dtype"})
        if name.endswith("_") and isinstance(args[0], Traced):
            raise UntraceableError(f"{name} changes values of the file")
        # The result of any other computation, as for a layer that the file lacks, is not from the file.
        return func(
            *tree_map(_without_trace, args),
            **tree_map(_without_trace, kwargs | {"device": "meta"} if "device" in kwargs else kwargs),
        )

    def parts(self, shapes: Mapping[str, Shape]) -> tuple[Part, ...]:
        """Return the tensor as parts of the file; empty if some elements are not from the file."""
        parts = self.elements.parts(shapes)
        return parts if sum(part.numel for part in parts) == self.numel() else ()


def _without_trace(value: Any) -> Any:
    return (
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, Traced)
        else value
    )


def _permute(tensor: Traced, order: Sequence[int]) -> Traced:
    return Traced(tensor.elements.permuted([at % tensor.ndim for at in order]), tensor.dtype)


def _transpose(tensor: Traced, one: int, other: int) -> Traced:
    order = list(range(tensor.ndim))
    order[one], order[other] = order[other], order[one]
    return _permute(tensor, order)


def _view(tensor: Traced, shape: Sequence[int]) -> Traced:
    known = -prod(shape)
    wanted = tuple(tensor.numel() // known if size == -1 else size for size in shape)
    return Traced(tensor.elements.viewed(wanted), tensor.dtype)


def _slice(tensor: Traced, axis: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Traced:
    if step != 1:
        raise UntraceableError("a step")
    start, stop, _ = slice(start, stop).indices(tensor.shape[axis])
    return Traced(tensor.elements.sliced(axis % tensor.ndim, start, stop), tensor.dtype)


def _split(tensor: Traced, sizes: int | Sequence[int], axis: int = 0) -> list[Traced]:
    if isinstance(sizes, int):
        whole, rest = divmod(tensor.shape[axis], sizes)
        sizes = [sizes] * whole + [rest] * bool(rest)
    return [Traced(each, tensor.dtype) for each in tensor.elements.split(sizes, axis % tensor.ndim)]


def _squeeze(tensor: Traced, axes: int | Sequence[int]) -> Traced:
    gone = {at % tensor.ndim for at in ([axes] if isinstance(axes, int) else axes)}
    return _view(tensor, [size for at, size in enumerate(tensor.shape) if at not in gone or size != 1])


def _unsqueeze(tensor: Traced, axis: int) -> Traced:
    shape = list(tensor.shape)
    shape.insert(axis % (tensor.ndim + 1), 1)
    return _view(tensor, shape)


def _select(tensor: Traced, axis: int, index: int) -> Traced:
    return Traced(tensor.elements.selected(axis % tensor.ndim, index % tensor.shape[axis]), tensor.dtype)


def _elements(tensors: Sequence[torch.Tensor]) -> list[Elements]:
    return [each.elements if isinstance(each, Traced) else Elements(tuple(each.shape)) for each in tensors]


def _cat(tensors: Sequence[torch.Tensor], axis: int = 0) -> Traced:
    return Traced(Elements.joined(_elements(tensors), axis % tensors[0].ndim), tensors[0].dtype)


def _stack(tensors: Sequence[torch.Tensor], axis: int = 0) -> Traced:
    return Traced(Elements.stacked(_elements(tensors), axis % (tensors[0].ndim + 1)), tensors[0].dtype)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ("detach", "alias", "clone", "contiguous", "_to_copy", "to"),
        lambda tensor, dtype=None, **_: Traced(tensor.elements, dtype or tensor.dtype),
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
    "stack": _stack,
}


def converter_of(module: nn.Module) -> Converter | None:
    """Return the function that maps a file like the loader of the model's own library; None for other models."""
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
        torch.empty(0)  # torch caches its factory functions here, before transformers patches them temporarily

    def load(state: State) -> tuple[State, Mapping[str, Any]]:
        options = {"config": deepcopy(model.config), "device_map": "meta", "ignore_mismatched_sizes": True}
        made, facts = type(model).from_pretrained(None, state_dict={**state}, output_loading_info=True, **options)
        return {key: getattr(value, "data", value) for key, value in made.state_dict(keep_vars=True).items()}, facts

    loaded, facts = load(given)
    # It drops tensors of another shape, with their new names. With the model's shapes, it shows these names.
    # Matrices that the library has transposed are none of these.
    shapes = {tuple(old): tuple(new) for _, old, new in facts["mismatched_keys"] if old[1:] == new[1:]}
    if shapes:
        fitting: dict[str, Shape] = {
            key: shapes.get(tuple(each.shape), tuple(each.shape)) for key, each in given.items()
        }
        again, _ = load({key: Traced(Elements.of(key, shape), given[key].dtype) for key, shape in fitting.items()})
        for name, *_ in facts["mismatched_keys"]:
            own: tuple[Part, ...] = again[name].parts(fitting) if isinstance(again.get(name), Traced) else ()
            if len(own) == 1 and own[0] == Part.whole(own[0].source, fitting[own[0].source]):
                loaded[name] = given[own[0].source]
    return loaded


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
"""For each library, an attribute that its classes of whole models have, and the function that converts a file."""


def _library(model: nn.Module) -> str:
    """Return the library with a loader for a whole model of this class; empty if there is none."""
    bases = (base.__module__.partition(".")[0] for base in type(model).__mro__)
    return next((name for name in bases if name in _LIBRARIES and hasattr(type(model), _LIBRARIES[name][0])), "")


def _loaded(model: Any, shapes: Mapping[str, Shape]) -> dict[str, tuple[Part, ...]]:
    """Return the parts of the tensors that the model's library would load from a file with these shapes."""
    given = {key: Traced(Elements.of(key, shape)) for key, shape in shapes.items()}
    with _silent(), suppress(Exception):  # the library's code may raise anything for a file that is not its own
        found = _LIBRARIES[_library(model)][1](model, given)
        traced = {key: value for key, value in found.items() if isinstance(value, Traced)}
        parts = {}
        for key, value in traced.items():
            with suppress(UntraceableError):
                parts[key] = value.parts(shapes)
        return {key: own for key, own in parts.items() if own}
    return {}


_REDIRECTED = RLock()  # without it, two threads could restore each other's redirected stream


class _OfOthers(TextIOBase):
    """A stream that drops the output of the thread that created it, and passes on that of other threads."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.thread = stream, get_ident()

    def write(self, text: str) -> int:
        return len(text) if get_ident() == self.thread else self.stream.write(text)


@contextmanager
def _silent() -> Iterator[None]:
    """Suppress what the library prints and logs about this load; other threads print and log as before."""
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
