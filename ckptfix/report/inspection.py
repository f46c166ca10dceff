"""What ``inspect`` shows of a checkpoint: where its state_dict is, its tensors, what else it holds. Reads no tensor."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ckptfix.core.checkpoint import Checkpoint, ContainerPath, PathPart, path_name
from ckptfix.core.facts import Kind, clause
from ckptfix.core.finding import counted
from ckptfix.core.objects import Global, Opaque, tensors_in
from ckptfix.core.option import CHECK
from ckptfix.core.report import REPORT_VERSION, plain
from ckptfix.core.spec import TensorSpec, ties
from ckptfix.known.recognition import likeness_of
from ckptfix.reading.pickles.arrays import NumpyArray, numpy_type
from ckptfix.reading.weights.modules import is_module
from ckptfix.report.advice import Presentation
from ckptfix.report.key_lists import folded_lines
from ckptfix.report.likeness import likeness_lines
from ckptfix.report.style import Line, Span, elements, size, spec_text
from ckptfix.writing.plain import has_plain_form

# The ratio of stored bytes to those that tensors cover above which the unused bytes are reported.
BLOAT = 1.25

_NAMES = (Kind.PAYLOAD, Kind.UNTRUSTED)
_NODES = 100_000  # objects whose classes are counted at most
_VALUE_LENGTH = 60


def inspect_checkpoint(checkpoint: Checkpoint, file_size: int | None = None) -> dict[str, Any]:
    """Return the facts as JSON data, as ``ckptfix inspect --output-format json`` prints them."""
    specs = checkpoint.specs
    parts = (part.storage for spec in specs.values() for part in spec.strided_parts())
    storages = list({id(storage): storage for storage in parts if storage is not None}.values())
    dtypes: dict[str, dict[str, int]] = {}
    for spec in specs.values():
        entry = dtypes.setdefault(spec.dtype, {"tensors": 0, "numel": 0})
        entry["tensors"] += 1
        entry["numel"] += spec.numel
    metadata = checkpoint.metadata
    likeness = likeness_of(checkpoint)
    return {
        "version": REPORT_VERSION,
        "source": checkpoint.path,
        "member": checkpoint.member or None,
        "format": checkpoint.format,
        "producer": checkpoint.producer or None,
        "container": path_name(checkpoint.container),
        "candidates": [
            {"name": candidate.name, "tensors": candidate.tensors, "numel": candidate.numel}
            for candidate in checkpoint.candidates
        ],
        "tensors": len(specs),
        "numel": sum(spec.numel for spec in specs.values()),
        "dtypes": dtypes,
        "devices": dict(Counter(storage.device for storage in storages)),
        "file_size": file_size,
        "stored_bytes": sum(storage.nbytes for storage in storages),
        "tensor_bytes": covered_bytes(specs.values()),
        "ties": [list(group) for group in ties(specs)],
        "metadata": None if metadata is None else len(metadata),
        "entries": {key: describe(value) for key, value in checkpoint.entries.items() if key not in specs},
        "extras": extras(checkpoint),
        "classes": classes(checkpoint.root),
        "unknown_classes": classes(checkpoint.root, unknown_only=True),
        "untrusted_names": [clause(fact) for fact in checkpoint.remarked(*_NAMES)],
        "damage": [clause(fact) for fact in checkpoint.damage],
        "lost": list(checkpoint.lost),
        "likeness": None if likeness is None else likeness.to_json(),
        "remarks": [
            {"kind": fact.kind.value, "where": fact.place, "detail": clause(fact)}
            for fact in checkpoint.remarks
            if fact.kind is not Kind.UNTRUSTED
        ],
        "keys": {
            key: plain(
                {
                    "dtype": spec.dtype,
                    "shape": spec.shape,
                    **({"strides": spec.strides} if spec.layout == "strided" and not spec.is_contiguous else {}),
                    **({"layout": spec.layout} if spec.layout != "strided" else {}),
                }
            )
            for key, spec in specs.items()
        },
    }


def inspection_lines(
    checkpoint: Checkpoint, file_size: int | None = None, presentation: Presentation | None = None
) -> Iterator[Line]:
    """Yield the lines that ``ckptfix inspect`` prints."""
    presentation = presentation or Presentation()
    limit = presentation.limit
    facts = inspect_checkpoint(checkpoint, file_size)
    yield (
        Span(f"{facts['source']}: ", "strong"),
        f"{facts['format']}, {counted(facts['tensors'], 'tensor')}, {elements(facts['numel'])}",
    )
    if facts["member"]:
        yield f"packed: it is stored in the file as {facts['member']}"
    yield from (("", Span(f"damage: the file {cause}", "warning")) for cause in facts["damage"])
    if facts["producer"]:
        yield f"written by: {facts['producer']}"
    yield f"state_dict: {'the file itself' if facts['container'] == '.' else facts['container']}"
    if (likeness := likeness_of(checkpoint)) is not None:
        yield from likeness_lines(likeness, partial(presentation.command, CHECK, checkpoint.path), presentation.choices)
    for candidate in facts["candidates"]:
        if (name := candidate["name"]) != facts["container"]:
            held = f"{counted(candidate['tensors'], 'tensor')}, {elements(candidate['numel'])}"
            yield f"  also: {name} ({held}; {presentation.option('weights', name)})"
    yield "dtypes: " + _joined(
        f"{name} {counted(entry['tensors'], 'tensor')} ({elements(entry['numel'])})"
        for name, entry in facts["dtypes"].items()
    )
    yield "saved on: " + _joined(
        f"{device} ({counted(count, 'storage')})" for device, count in facts["devices"].items()
    )
    yield from _size_lines(facts)
    metadata = facts["metadata"]
    yield "_metadata: " + ("none" if metadata is None else counted(metadata, "module"))
    yield from _section("ties", [" = ".join(group) for group in facts["ties"]], limit, "none")
    yield from _section(
        "entries that are not tensors", [f"{key}: {text}" for key, text in facts["entries"].items()], limit
    )
    yield from _section("outside the state_dict", [f"{name}: {text}" for name, text in facts["extras"].items()], limit)
    unknown = facts["unknown_classes"]
    known = {name: count for name, count in facts["classes"].items() if name not in unknown}
    yield from _section("objects of known classes", _counts(known), limit)
    yield from _section("objects of unknown classes (not loaded)", _counts(unknown), limit)
    names = facts["untrusted_names"]
    yield from _section("untrusted names in its pickles (none was resolved)", names, limit)
    yield from _section("lost tensors", facts["lost"], limit)
    yield from _section(
        "remarks", [f"{remark['kind']}: {remark['detail']} ({remark['where']})" for remark in facts["remarks"]], limit
    )
    specs = checkpoint.specs
    # The table is what the command is for, so it gets more room than a list in a report.
    table = folded_lines(specs, None if presentation.verbose else 40, lambda key: spec_text(specs[key]))
    yield from _section("keys", table, None)


def size_on_disk(path: str | Path) -> int | None:
    """Return the bytes of a file, or of all files in a folder; None if there is none, as for a URL."""
    path = Path(path)
    try:
        if not path.is_dir():
            return path.stat().st_size
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    except (OSError, ValueError):
        return None


def key_lines(checkpoint: Checkpoint) -> Iterator[Line]:
    """Yield one line for each tensor, ``key dtype[shape]``, in the file's order."""
    for key, spec in checkpoint.specs.items():
        yield f"{key} {spec_text(spec)}"


def covered_bytes(specs: Iterable[TensorSpec]) -> int:
    """Return the bytes of the storages that at least one tensor touches, between its first and its last element."""
    extents: dict[int, list[tuple[int, int]]] = {}
    for spec in specs:
        for part in spec.strided_parts():
            extents.setdefault(id(part.storage), []).append(part.extent)
    total = 0
    for ranges in extents.values():
        end = 0
        for start, stop in sorted(ranges):
            total += max(0, stop - max(start, end))
            end = max(end, stop)
    return total


def extras(checkpoint: Checkpoint) -> dict[str, str]:
    """Return what the container holds outside the state_dict, described, by path."""
    found: dict[str, str] = {}
    place: ContainerPath = ()
    here = checkpoint.root
    for step in checkpoint.container:
        members = children(here) or {}
        for name, value in members.items():
            if name != step:
                found[path_name((*place, name))] = describe(value)
        if step not in members:
            break
        place, here = (*place, step), members[step]
    return found


def classes(root: object, unknown_only: bool = False) -> dict[str, int]:
    """Count the objects in the container by class, except tensors and built-in types."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    pending = [root]
    while pending and len(seen) < _NODES:
        value = pending.pop()
        if id(value) in seen or not isinstance(value, Opaque | Mapping | list | tuple):
            continue
        seen.add(id(value))
        if isinstance(value, Opaque):
            if not (unknown_only and _is_known(value)):
                found[str(value.cls)] += 1
            pending += [*value.args, *value.kwargs.values(), value.state]
        pending += (children(value) or {}).values()
    return dict(found.most_common())


def _is_known(value: Opaque) -> bool:
    """Return whether an object can be converted to plain data, or is one of torch's own modules."""
    return has_plain_form(value) or (str(value.cls).startswith("torch.") and is_module(value))


def _counts(numbers: Mapping[str, int]) -> list[str]:
    return [f"{name} ({count})" for name, count in numbers.items()]


def describe(value: object) -> str:
    """Describe a value of a container in a few words."""
    if isinstance(value, TensorSpec):
        return spec_text(value)
    if isinstance(value, Opaque):
        return f"object of {value.cls}"
    if isinstance(value, Global):
        return f"the name {value}"
    if isinstance(value, NumpyArray):
        return f"numpy array of shape {value.shape}"
    if value is None or isinstance(value, bool | int | float | str):
        # The repr of a huge int raises, that of a huge string is slow.
        if isinstance(value, int) and value.bit_length() > 256:
            return "a huge number"
        text = repr(value[: _VALUE_LENGTH + 1] if isinstance(value, str) else value)
        return text if len(text) <= _VALUE_LENGTH else text[: _VALUE_LENGTH - 1] + "…"
    if isinstance(value, Mapping):
        tensors = sum(isinstance(item, TensorSpec) for item in value.values())
        return f"dict of {len(value)}" + (f", {counted(tensors, 'tensor')}" if tensors else "")
    if isinstance(value, list | tuple | set | frozenset):
        tensors = sum(1 for _ in tensors_in(value))
        return f"{type(value).__name__} of {len(value)}" + (f", {counted(tensors, 'tensor')}" if tensors else "")
    if isinstance(value, bytes | bytearray):
        return f"{len(value)} bytes"
    return type(value).__name__


def children(value: object) -> dict[PathPart, object] | None:
    """Return the values inside a value, by name; None for a leaf."""
    if isinstance(value, Opaque):
        named = (*value.attributes.items(), *value.pairs.items(), *value.kwargs.items())
        return {str(name): child for name, child in named} | dict(enumerate((*value.args, *value.items)))
    if isinstance(value, NumpyArray):
        dtype, order = numpy_type(value.dtype)
        return {"dtype": order + dtype, "shape": value.shape, "fortran": value.fortran, "data": value.data}
    if isinstance(value, Mapping):
        return {name if isinstance(name, str | int) else str(name): child for name, child in value.items()}
    return dict(enumerate(value)) if isinstance(value, list | tuple) else None


def _size_lines(facts: Mapping[str, Any]) -> Iterator[Line]:
    on_disk = "" if facts["file_size"] is None else f"file {size(facts['file_size'])}, "
    yield f"size: {on_disk}storages {size(facts['stored_bytes'])}, tensors cover {size(facts['tensor_bytes'])}"
    if facts["stored_bytes"] > BLOAT * facts["tensor_bytes"]:
        spare = facts["stored_bytes"] - facts["tensor_bytes"]
        yield (
            Span(f"  {size(spare)} belong to no tensor of this state_dict: a view saves its whole storage", "warning"),
        )


def _section(title: str, lines: Sequence[str], limit: int | None, empty: str = "") -> Iterator[Line]:
    if not lines:
        if empty:
            yield f"{title}: {empty}"
        return
    yield f"{title}:"
    shown = lines if limit is None else lines[:limit]
    yield from (f"  {line}" for line in shown)
    if len(lines) > len(shown):
        yield f"  … and {len(lines) - len(shown)} more (-v)"


def _joined(items: Iterator[str]) -> str:
    return ", ".join(items) or "none"
