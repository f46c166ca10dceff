"""fairscale's FSDP (fairseq, metaseq, OPT): ``local_state_dict()`` of every rank beside ``local_metadata_dict()``.

``shard_metadata`` has, for every wrapped module, the names and shapes in each of its flat parameters. A flat parameter
is split into equal parts, the last of which are padded. Source: ``fully_sharded_data_parallel.py``,
``consolidate_shard_weights`` (0.4)."""

import math
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptfix.bytes.sources import is_torn
from ckptfix.core.facts import Fact, Kind
from ckptfix.core.finding import counted
from ckptfix.core.spec import TensorSpec
from ckptfix.core.wording import first_names
from ckptfix.errors import UnreadableError
from ckptfix.reading.folders.chunks import Flat, Spread, agree
from ckptfix.reading.folders.ranks.files import COUNTERS, RankFiles, note_copies
from ckptfix.reading.foreign.weightless import is_optimizer
from ckptfix.reading.pickles.claims import sizes
from ckptfix.reading.weights.document import Document

NAME = "fairscale"
_METADATA = "shard_metadata"


def has_metadata(root: Any) -> bool:
    """Return whether a file has fairscale's metadata of flat parameters."""
    return isinstance(root, dict) and isinstance(held := root.get(_METADATA), dict) and "param_metadata" in held


def document(files: RankFiles, roots: Mapping[int, Any], present: Mapping[int, Path], pattern: str) -> Document:
    """Return the merged document of ranks; parameters with missing ranks are torn."""
    names = {rank: present[rank].name for rank in roots}
    odd = files.of_another_save({rank: _said(root) for rank, root in roots.items()}, names, "step, lengths or dtypes")
    roots = {rank: root for rank, root in roots.items() if rank not in odd}
    first, path = roots[min(roots)], str(files.folder)
    units = first[_METADATA]["param_metadata"]
    if unlike := [names[rank] for rank, root in roots.items() if _layout(root) != _layout(first)]:
        raise ValueError(
            f"the weights of {first_names(unlike)} have other names or shapes than those of {names[min(roots)]}"
        )
    backing = {
        _joined(unit["fsdp_path"], name): (unit, held) for unit in units for name, held in unit["params"].items()
    }
    fits = [key for key, value in first.items() if isinstance(value, dict) and backing.keys() <= value.keys()]
    if not fits:
        raise ValueError(f"its state_dict lacks some of the {counted(len(backing), 'flat parameter')} of the metadata")
    place = fits[0]
    if any(unit["no_broadcast_optim_state"] for unit in units):
        raise UnreadableError(f"{path}: each of its ranks has its own experts, which are not merged")
    states = {rank: root[place] for rank, root in roots.items()}
    flats: dict[str, Spread] = {}
    world = 1
    for key, (_, held) in backing.items():
        length, total = states[min(states)][key].numel, sum(held["numels"])
        parts = [(rank * length, state[key]) for rank, state in states.items()]
        if any(part.shape != (length,) or not part.is_contiguous for _, part in parts) or (total and not length):
            raise ValueError(f"the ranks hold {key} in parts of different lengths")
        flats[key], world = Spread([Flat(parts)]), max(world, -(-total // max(length, 1)))
    files.note_missing(world, {rank: file for rank, file in present.items() if rank in roots and rank < world}, pattern)
    weights: OrderedDict[str, Any] = OrderedDict()
    for key, (unit, held) in backing.items():
        start = 0
        for name, size, numel in zip(held["names"], held["shapes"], held["numels"], strict=True):
            shape = sizes(size)
            if math.prod(shape) != numel:
                raise ValueError(f"{name} has the shape {list(shape)} and {numel} elements")
            whole = _joined(unit["fsdp_path"], str(name))
            weights[whole] = spec = flats[key].tensor(whole, shape, start, path)
            if is_torn(spec):
                held = flats[key].flats[0].count(start, start + numel)
                files.lacking[whole] += (numel - held) * spec.itemsize
                length = states[min(states)][key].numel
                for rank in (
                    rank for rank in range(start // length, -(-(start + numel) // length)) if rank not in roots
                ):
                    own = min((rank + 1) * length, start + numel) - max(rank * length, start)
                    files.held_by[pattern.format(rank)] += own * spec.itemsize
            start += numel
    for unit in units:
        weights.update({str(copy): weights[str(source)] for source, copy in unit["shared_param_info"]})
    for key, entry in states[min(states)].items():
        if key in backing:
            continue
        copies = [copy for state in states.values() if isinstance(copy := state.get(key), TensorSpec)]
        if copies and not agree(copies, path, reads=False):
            note_copies(files.remarks, (key,))
        weights[key] = next((copy for copy in copies if not is_torn(copy)), entry)
    files.note_renamed()
    merged = {**first, place: weights}
    for key in [
        key for key, value in first.items() if key == _METADATA or (isinstance(value, dict) and is_optimizer(value))
    ]:
        del merged[key]
        if key != _METADATA:
            files.remarks[Fact(Kind.RANK_LEFT_OUT, key)] = None
    return files.document(NAME, merged, f"FSDP of fairscale, {counted(len(roots), 'rank')}")


def _said(root: Any) -> tuple[object, ...]:
    """Return facts that are equal on all ranks of a save: counters, fairseq's too, and lengths of flat parameters."""
    holders = (root, *(root.get("optimizer_history") or ())[-1:])
    counters = [
        (key, value) for held in holders for key, value in held.items() if key in COUNTERS and type(value) is int
    ]
    states = [value for value in root.values() if isinstance(value, dict)]
    parts = [spec for state in states for key, spec in state.items() if "flat_param" in str(key)]
    flat = {(spec.dtype, spec.numel) for spec in parts if isinstance(spec, TensorSpec)}
    return counters, sorted(flat)


def _layout(root: Any) -> tuple[object, ...]:
    """Return the names and shapes of weights, which are equal on all ranks."""
    units = [
        (unit["fsdp_path"], name, held["names"], [*map(sizes, held["shapes"])], unit["shared_param_info"])
        for unit in root[_METADATA]["param_metadata"]
        for name, held in unit["params"].items()
    ]
    return units, [[*value] for value in root.values() if isinstance(value, dict) and not is_optimizer(value)]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
