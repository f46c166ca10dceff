"""What is no tensor of the state_dict, compared place by place: ``epoch``, ``args.lr``, ``optimizer.state[0].exp_avg``.

What a side lacks as a whole is one place: ``optimizer`` and not each of its moments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from ckptfix.comparison.difference import Texts
from ckptfix.comparison.gap import Tolerance, measure_gap
from ckptfix.core.checkpoint import Checkpoint, PathPart, path_name
from ckptfix.core.facts import Kind
from ckptfix.core.finding import counted
from ckptfix.core.objects import Global, Opaque
from ckptfix.core.spec import TensorSpec
from ckptfix.reading.pickles.arrays import NumpyArray, numpy_type
from ckptfix.report.inspection import describe

LIMIT = 100_000
"""Places that are told; nobody reads more."""

_DEPTH = 64

_EXACT = Tolerance()

Text = tuple[str | None, str | None]
Place = tuple[PathPart, ...]


def compare_extras(a: Checkpoint, b: Checkpoint, read_values: bool, tolerance: Tolerance = _EXACT) -> Texts:
    """What differs beside the two state_dicts, by place; the texts in a header of safetensors lie there too."""
    if a.path == b.path:
        return {}  # two sets of weights of one file: beside each lies the other
    beside = [_without(side.root, side.container) for side in (a, b)]
    notes = [{mark.place: mark.data["text"] for mark in side.remarks if mark.kind is Kind.NOTE} for side in (a, b)]
    for texts in notes:
        texts.pop("format", None)  # says "pt", and is the form's and not the weights'
    return {
        **_texts(_differences(beside[0], beside[1], (), read_values, tolerance)),
        **_texts(_differences(notes[0], notes[1], ("__metadata__",), read_values)),
    }


def compare_entries(a: Checkpoint, b: Checkpoint, read_values: bool) -> Texts:
    """What differs among the entries of the two state_dicts that are no tensors on either side, by key."""
    left, right = ({key: side.entries[key] for key in side.entries if key not in side.specs} for side in (a, b))
    return _texts(_differences(left, right, (), read_values))


def compare_metadata(a: Checkpoint, b: Checkpoint, modules: Mapping[str, str]) -> Texts:
    """The rows of ``_metadata`` that differ, under the names of B; ``modules`` says what became of a module's name."""
    if a.metadata is None or b.metadata is None:
        whole = (_count(a), _count(b))
        return {} if whole[0] == whole[1] else {"_metadata": whole}
    left = {_renamed(module, modules): dict(row) for module, row in a.metadata.items()}
    right = {module: dict(row) for module, row in b.metadata.items()}
    return {
        module: (_row(left.get(module)), _row(right.get(module)))
        for module in {**left, **right}
        if left.get(module) != right.get(module)
    }


def _count(checkpoint: Checkpoint) -> str | None:
    return None if checkpoint.metadata is None else counted(len(checkpoint.metadata), "row")


def _row(row: Mapping[str, object] | None) -> str | None:
    return None if row is None else ", ".join(f"{name} {value!r:.40}" for name, value in row.items()) or "no version"


def _renamed(module: str, modules: Mapping[str, str]) -> str:
    """A module without keys of its own goes where the module around it went."""
    above, below = module.split("."), list[str]()
    while above:
        if (to := modules.get(".".join(above))) is not None:
            return ".".join([*to.split("."), *below]) if to else ".".join(below)
        below.insert(0, above.pop())
    return module


def _texts(differences: Iterator[tuple[Place, Text]]) -> Texts:
    return {path_name(place): text for place, text in islice(differences, LIMIT)}


class _Absent:
    """Stands where a side has nothing."""


_ABSENT = _Absent()


def _differences(
    a: object, b: object, place: Place, read_values: bool, tolerance: Tolerance = _EXACT
) -> Iterator[tuple[Place, Text]]:
    if a is _ABSENT or b is _ABSENT:
        yield place, (_text(a), _text(b))
        return
    left, right = _children(a), _children(b)
    if left is None or right is None or len(place) >= _DEPTH:
        if not _same(a, b, read_values, tolerance):
            texts = (_text(a), _text(b))
            yield place, texts if texts[0] != texts[1] else (texts[0], f"{texts[1]}, other values")
        return
    if _kind(a) != _kind(b):
        yield place, (_kind(a), _kind(b))
    for name in {**left, **right}:
        yield from _differences(
            left.get(name, _ABSENT), right.get(name, _ABSENT), (*place, name), read_values, tolerance
        )


def _same(a: object, b: object, read_values: bool, tolerance: Tolerance) -> bool:
    if isinstance(a, TensorSpec) and isinstance(b, TensorSpec):
        if (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
            return False
        if not read_values:
            return True
        gap = measure_gap(a, b, tolerance)
        return gap.is_equal or gap.is_close
    if isinstance(a, Global) and isinstance(b, Global):
        return str(a) == str(b)
    if isinstance(a, float) and isinstance(b, float) and a != a and b != b:
        return True
    if _children(a) is not None and _children(b) is not None:
        return True  # too deep to look at: what is the same so far counts as the same
    return type(a) is type(b) and a == b


def _text(value: object) -> str | None:
    return None if value is _ABSENT else describe(value)


def _kind(value: object) -> str:
    """A dict is a dict: that one is ordered and the other is not makes no difference."""
    if isinstance(value, Opaque):
        return f"object of {value.cls}"
    return "list" if isinstance(value, list | tuple) else "array" if isinstance(value, NumpyArray) else "dict"


def _children(value: object) -> dict[PathPart, object] | None:
    """What a value holds, by name; None for one that holds nothing."""
    if isinstance(value, Opaque):
        named = (*value.attributes.items(), *value.pairs.items(), *value.kwargs.items())
        held: dict[PathPart, object] = {str(name): child for name, child in named}
        held.update(enumerate((*value.args, *value.items)))
        return held
    if isinstance(value, NumpyArray):
        dtype, order = numpy_type(value.dtype)
        return {"dtype": order + dtype, "shape": value.shape, "fortran": value.fortran, "data": value.data}
    if isinstance(value, Mapping):
        return {name if isinstance(name, str | int) else str(name): child for name, child in value.items()}
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return None


def _without(root: object, container: Place) -> object:
    """A container without the state_dict that lies in it, as a dict of what is beside the way to it."""
    if not container:
        return {}
    beside = _children(root) or {}
    inside = _without(beside.pop(container[0], None), container[1:])
    return {**beside, container[0]: inside} if inside else beside
