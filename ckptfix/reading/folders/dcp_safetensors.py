"""Folders of ``shard-<rank>-model-<n>-of-<total>.safetensors``: the chunks of each rank, which torch's
HuggingFaceStorageWriter saves (``save_distributed=True``) unless it merges them itself.

The ``__metadata__`` of a shard has the offsets of its chunks in their tensors (``DCP_SHARDING_INFO``), but not the
sizes of the tensors, which are taken from the chunks. So a missing chunk in the middle is noticed, but not a missing
last chunk in the shard of the last rank; a remark says so. torch saves each chunk once. Format:
https://github.com/pytorch/pytorch/blob/main/torch/distributed/checkpoint/hf_storage.py"""

import json
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

from ckptfix.bytes.listing import list_folder
from ckptfix.bytes.sources import Content, is_torn
from ckptfix.core.facts import Fact, Kind, clauses, first_facts
from ckptfix.core.parts import Box, box_at, numel, shape_over
from ckptfix.core.spec import TensorSpec, contiguous_strides
from ckptfix.errors import UnreadableError, damaged
from ckptfix.reading import safetensors
from ckptfix.reading.folders.chunks import agree, check_tiling, gone, merge_parts
from ckptfix.reading.folders.shard_index import file_inside
from ckptfix.reading.pickles.claims import sizes
from ckptfix.reading.sniffing import is_safetensors
from ckptfix.reading.weights.document import Document

NAME = "dcp-safetensors"
NOTE = "DCP_SHARDING_INFO"
SHARD = re.compile(r"shard-(\d{1,9})-model-\d{1,9}-of-\d{1,9}\.safetensors")


def looks_like(folder: Path) -> bool:
    """Return whether a folder has such shards."""
    return any(map(SHARD.fullmatch, list_folder(folder).names))


def read_folder(folder: Path) -> Document:
    """Return the document of a folder: a flat state_dict, whose tensors are assembled from their chunks when read.

    A tensor with a missing chunk is torn. Raises ``UnreadableError`` if none is intact."""
    names = sorted(filter(SHARD.fullmatch, list_folder(folder).names))
    ranks = {int(match[1]) for name in names if (match := SHARD.fullmatch(name))}
    missing = sorted(set(range(1, max(ranks) + 1)) - ranks)
    damage = [Fact.of(Kind.RANKS_MISSING, ranks=len(missing), first=missing[0])] if missing else []
    chunks: dict[str, dict[Box, list[TensorSpec]]] = {}
    origins: dict[tuple[str, Box], str] = {}
    repeated: list[Fact] = []
    read: list[str] = []
    for name in names:
        try:
            shard, offsets = _shard(folder, name)
        except UnreadableError as error:
            damage.append(Fact.of(Kind.SHARD_UNREADABLE, name, error=str(error)))
            continue
        read.append(name)
        damage += [Fact.of(Kind.SHARD_DAMAGED, name, cause=fact) for fact in shard.damage]
        held = {key: box_at(offsets.get(key, (0,) * len(spec.shape)), spec.shape) for key, spec in shard.root.items()}
        others = [origins.get((key, box)) for key, box in held.items() if numel(box)]
        if others and None not in others:
            repeated.append(Fact.of(Kind.RANK_REPEATED, name, other=others[0]))
        for key, box in held.items():
            origins.setdefault((key, box), name)
            chunks.setdefault(key, {}).setdefault(box, []).append(shard.root[key])
    faults: list[Fact] = []
    entries = OrderedDict((key, _tensor(key, parts, str(folder), faults)) for key, parts in chunks.items())
    damage += first_facts(faults, Kind.TENSORS_LACKING, most=1)
    if not any(isinstance(spec, TensorSpec) and not is_torn(spec) for spec in entries.values()):
        raise damaged(folder, f"{clauses(damage) or 'has no tensors'}; no tensor is whole")
    lacking = bool(missing) or len(read) < len(names)
    lost = [Fact.of(Kind.UNNAMED_LOSS, lost="shards that are not there")] if lacking else []
    remarks = [*repeated, *lost, Fact(Kind.LAST_SHARD, read[-1])]
    return Document(str(folder), NAME, entries, remarks=remarks, damage=damage)


def _shard(folder: Path, name: str) -> tuple[Document, dict[str, tuple[int, ...]]]:
    content = Content.of_file(str(file_inside(folder, name, str(folder / "shards"))))
    if not is_safetensors(content):
        raise UnreadableError(f"{name} is not a safetensors file")
    document = safetensors.read(content)
    if not isinstance(document.root, dict) or not all(isinstance(spec, TensorSpec) for spec in document.root.values()):
        raise UnreadableError(f"{name} holds more than tensors")
    note = next((m.data["text"] for m in document.remarks if (m.kind, m.place) == (Kind.NOTE, NOTE)), "{}")
    try:
        info = json.loads(note)
        offsets = {key: sizes(value["saved_offsets"]) for key, value in info.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableError(f"{name} has a damaged note {NOTE}: {error}") from error
    if any(len(offset) != len(document.root[key].shape) for key, offset in offsets.items() if key in document.root):
        raise UnreadableError(f"{name} has a damaged note {NOTE}: an offset and its tensor differ in their dimensions")
    return document, offsets


def _tensor(key: str, parts: dict[Box, list[TensorSpec]], path: str, faults: list[Fact]) -> Any:
    """Return the tensor of its chunks; a torn one if they do not cover it, with the reason appended to ``faults``."""
    specs = [spec for same in parts.values() for spec in same]
    if not all(agree(same, path) for same in parts.values()):
        faults.append(Fact.of(Kind.RANKS_DIFFER, keys=(key,)))
    if len(parts) == 1 and not any(start for start, _ in next(iter(parts))):
        return next((spec for spec in specs if not is_torn(spec)), specs[0])
    shape = shape_over(parts)
    whole = TensorSpec(specs[0].dtype, shape, contiguous_strides(shape))
    try:
        if any(spec.dtype != whole.dtype for spec in specs):
            raise UnreadableError(f"the chunks of {key} differ in their dtypes")
        check_tiling(parts, shape, key)
        return merge_parts(key, whole.dtype, shape, parts, path)
    except UnreadableError as error:
        faults.append(Fact.of(Kind.CHUNKS_LACKING, key, error=str(error)))
        return gone(key, whole, path)
