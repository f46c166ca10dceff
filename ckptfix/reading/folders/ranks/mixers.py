"""Mamba and gated delta nets in Megatron: layers whose projections are several matrices in one tensor.

In ranks, each matrix is split separately, and the sizes follow from the shapes of the layer. In a folder of
``torch_dist``, each is an item of its own: ``in_proj.weight.z``. So are the halves of a gated layer if every layer was
saved separately (``singleton_local_shards``).

Sources: Megatron-LM (core 0.19), ``megatron/core/ssm/mamba_mixer.py``, ``gated_delta_net/``, ``transformer/mlp.py``."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ckptfix.core.parts import Box, full
from ckptfix.core.spec import TensorSpec
from ckptfix.reading.folders.chunks import merge_parts
from ckptfix.reading.folders.ranks.partition import WHOLE, Split, stacked

_OWN = re.compile(
    r"(.*\.)(in_proj\.(?:weight|bias)|conv1d[._](?:weight|bias)|out_proj\.weight|A_log|D|dt_bias|norm\.weight)"
)
# The names of the matrices in a tensor, in their order, by the name of the tensor.
_MATRICES = (
    (re.compile(r".*\.in_proj\.(?:weight|bias)"), (".z", ".x", ".B", ".C", ".dt")),
    (re.compile(r".*\.conv1d\.(?:weight|bias)"), (".x", ".B", ".C")),
    (re.compile(r".*\.in_proj\.(?:weight|bias)"), (".query", ".key", ".value", ".z", ".beta", ".alpha")),
    (re.compile(r".*\.conv1d\.(?:weight|bias)"), (".query", ".key", ".value")),
    (re.compile(r".*\.linear_fc1\.(?:weight|bias)\d*"), ("_w", "_v")),
)


def split_of(name: str, parts: Sequence[TensorSpec], state: Mapping[str, Any]) -> Split | None:
    """Return how a tensor of such a layer is split, from the state_dict of one rank; None if it is not of one."""
    if (match := _OWN.fullmatch(name)) is None or (sizes := _sizes(match[1], state)) is None:
        return None
    own, (projected, convolved) = match[2], sizes
    if own == "out_proj.weight":
        return Split(1)
    if not own.startswith(("in_proj", "conv1d")):
        return Split(0)
    widths = [[size] * len(parts) for size in (projected if own.startswith("in_proj") else convolved)]
    return stacked(0, widths, parts[0]) if len(parts) > 1 else WHOLE


def _sizes(layer: str, state: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the rows of each matrix in the projection and in the convolution on one rank; None if the shapes are not
    those of such a layer."""
    held = {
        name: spec.shape
        for name in ("in_proj.weight", "conv1d.weight", "conv1d_weight", "A_log", "out_proj.weight")
        if isinstance(spec := state.get(f"{layer}{name}"), TensorSpec)
    }
    if len(held) != 4 or len(held["out_proj.weight"]) != 2 or not all(held.values()):
        return None
    rows, heads, inner = held["in_proj.weight"][0], held["A_log"][0], held["out_proj.weight"][1]
    filters = held.get("conv1d.weight", held.get("conv1d_weight", (0,)))[0]
    group = (filters - inner) // 2
    made: tuple[tuple[int, ...], tuple[int, ...]]
    if f"{layer}D" in state:
        made = (inner, inner, group, group, heads), (inner, group, group)
    else:
        made = (group, group, inner, inner, heads, heads), (group, group, inner)
    return made if min(made[0]) > 0 and tuple(map(sum, made)) == (rows, filters) else None


def rejoined(entries: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return tensors by name with one in place of its matrices, where the first of them was."""
    wholes = _wholes(entries)
    parts = {part for _, names in wholes.values() for part in names}
    made: dict[Any, Any] = {}
    for name, spec in entries.items():
        if name in wholes:
            whole, names = wholes[name]
            made[whole] = _stacked(whole, [entries[part] for part in names])
        elif name not in parts:
            made[name] = spec
    return made


def rejoined_state(state: Mapping[Any, Mapping[Any, Any]]) -> dict[Any, Mapping[Any, Any]]:
    """Return the state of an optimizer by name, with the moments of one tensor in place of those of its matrices.

    Other entries, such as the step, are those of the first matrix. Nothing is changed if a moment does not have the
    shape of its matrix."""
    moments = {
        name: {field: spec for field, spec in row.items() if isinstance(spec, TensorSpec) and spec.shape}
        for name, row in state.items()
    }
    shapes = {
        name: next(iter(held.values())) for name, held in moments.items() if len({s.shape for s in held.values()}) == 1
    }
    wholes = {
        first: (whole, names)
        for first, (whole, names) in _wholes(shapes).items()
        if whole not in state and all(moments[part].keys() == moments[first].keys() for part in names)
    }
    parts = {part for _, names in wholes.values() for part in names}
    made: dict[Any, Mapping[Any, Any]] = {}
    for name, row in state.items():
        if name in wholes:
            whole, names = wholes[name]
            joined = {field: _stacked(whole, [moments[part][field] for part in names]) for field in moments[name]}
            made[whole] = {**row, **joined}
        elif name not in parts:
            made[name] = row
    return made


def _wholes(entries: Mapping[Any, Any]) -> dict[Any, tuple[str, list[str]]]:
    """Return the names of the tensors that are there as matrices, and those of the matrices, by the first matrix."""
    return {
        found[1][0]: found
        for name in entries
        for pattern, ends in _MATRICES
        if isinstance(name, str) and (found := _matrices(name, pattern, ends, entries)) is not None
    }


def _matrices(
    name: str, pattern: re.Pattern[str], ends: Sequence[str], entries: Mapping[Any, Any]
) -> tuple[str, list[str]] | None:
    """Return the name of the tensor that begins with this matrix, and the names of its matrices; None if there are not
    all of them, or if they do not fit."""
    whole = name.removesuffix(ends[0])
    if whole == name or whole in entries or pattern.fullmatch(whole) is None:
        return None
    names = [whole + end for end in ends]
    specs = [spec for part in names if isinstance(spec := entries.get(part), TensorSpec) and spec.shape]
    fits = len(specs) == len(ends) and len({(spec.dtype, spec.shape[1:]) for spec in specs}) == 1
    return (whole, names) if fits else None


def _stacked(name: str, parts: Sequence[TensorSpec]) -> TensorSpec:
    begin = 0
    copies: dict[Box, list[TensorSpec]] = {}
    for part in parts:
        box = (begin, begin + part.shape[0]), *full(part.shape[1:])
        copies[box] = [part]
        begin += part.shape[0]
    return merge_parts(name, parts[0].dtype, (begin, *parts[0].shape[1:]), copies, name)
