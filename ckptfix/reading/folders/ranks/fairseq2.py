"""fairseq2: every rank's part of each weight as a plain tensor, in ``model/pp_00/tp_00/sdp_00.pt``.

FSDP divides the rows of each weight among ranks in order; only the names of the files say so. The first of several
replicas has saved. With tensor parallelism, nothing in the files says along which axis a weight is divided.
Every process saves ``trainer/rank_00.pt``, and every data-parallel one ``data_reader/dp_00.pt``: all replicas.

Sources: ``fairseq2/checkpoint/manager.py``, ``fairseq2/nn/fsdp/fsdp2.py``, ``fairseq2/model_checkpoint/`` (0.8)."""

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ckptfix.bytes.listing import list_folder
from ckptfix.bytes.sources import is_torn
from ckptfix.core.buffers import RUNNING_STATISTICS
from ckptfix.core.facts import Fact, Kind, clauses
from ckptfix.core.finding import counted
from ckptfix.core.spec import TensorSpec, contiguous_strides
from ckptfix.errors import UnreadableError, damaged
from ckptfix.reading.folders.chunks import gone
from ckptfix.reading.folders.ranks.files import MOST_RANKS, RankFiles, by_rank, tagged
from ckptfix.reading.folders.ranks.names import FAIRSEQ2_RANK
from ckptfix.reading.folders.ranks.partition import WHOLE, Split, joined
from ckptfix.reading.weights.document import Document

NAME = "fairseq2"

_MODEL, _OPTIMIZER, _FIRST = "model", "optimizer", "pp_00/tp_00"
_PROCESS, _READER = re.compile(r"rank_(\d{2,7})\.pt"), re.compile(r"dp_(\d{2,7})\.pt")


def find(folder: Path) -> Path | None:
    """Return the folder of a save: this one, the one whose model it is, or the only one in it; None if there is
    none."""
    if folder.name == _MODEL and (folder / _FIRST).is_dir():
        return folder.parent
    return tagged(folder, "latest", lambda place: bool(by_rank_in(place / _MODEL / _FIRST)))


def folder_of(file: Path) -> Path | None:
    """Return the folder of the save of which a file is one rank's part."""
    model = file.parent.parent.parent
    return model.parent if FAIRSEQ2_RANK.fullmatch(file.name) and (model / _FIRST).is_dir() else None


def by_rank_in(folder: Path) -> Mapping[tuple[int, ...], Path]:
    return by_rank(folder, FAIRSEQ2_RANK) if folder.is_dir() else {}


def document(files: RankFiles) -> Document:
    """Return the document of a save: a flat state_dict."""
    model = files.folder / _MODEL
    weights: OrderedDict[str, Any] = OrderedDict()
    lost: dict[str, TensorSpec | None] = {}
    count = 1
    stages = sorted(model.glob("pp_*"))
    processes = _replicas(files.folder, len(stages))
    for stage in stages:
        if (stage / "tp_01").exists():
            raise UnreadableError(
                f"{files.folder}: saved with tensor parallelism, and no file says along which axis each weight was"
                " divided; load it with fairseq2 on one GPU, and save it again"
            )
        ranks = {number: path for (number,), path in by_rank_in(stage / "tp_00").items()}
        # Also a link without its file, and an optimizer's part, show that there is a rank.
        beside = (stage / "tp_00", files.folder / _OPTIMIZER / stage.name / "tp_00")
        names = (name for folder in beside if folder.is_dir() for name in list_folder(folder).names)
        count = max((int(match[1]) for match in map(FAIRSEQ2_RANK.fullmatch, names) if match), default=-1) + 1
        if count <= processes <= MOST_RANKS:
            count = next(ranks for ranks in range(count, processes + 1) if processes % ranks == 0)
        files.note_missing(count, ranks, f"{_MODEL}/{stage.name}/tp_00/sdp_{{:02d}}.pt")
        states = {rank: root for rank, path in ranks.items() if (root := files.root(path)) is not None}
        if not states or not all(isinstance(state, dict) for state in states.values()):
            raise damaged(files.folder, clauses(files.damage) or "its files hold no state_dict")
        absent = [rank for rank in range(count) if rank not in states]
        files.check_absent(len(absent))
        files.note_repeated({files.name(ranks[rank]): state for rank, state in states.items()})
        names_of = {rank: files.name(path) for rank, path in ranks.items()}
        if processes != count and not absent and _is_full(states[0], states[count - 1]):
            files.remarks[Fact(Kind.LAST_SHARD, names_of[count - 1])] = None
        for key in dict.fromkeys(key for state in states.values() for key in state):
            entry = _whole(files, key, {rank: state.get(key) for rank, state in states.items()}, absent, names_of)
            if entry is None and absent:
                lost[key] = None
            else:
                weights[key] = entry
    files.note_renamed()
    if (files.folder / _OPTIMIZER).is_dir():
        files.remarks[Fact(Kind.RANK_LEFT_OUT, _OPTIMIZER)] = None
    return replace(files.document(NAME, weights, f"fairseq2, {counted(count, 'rank')}"), lost=lost)


def _replicas(folder: Path, stages: int) -> int:
    """Return the number of data-parallel processes of the training, by the files that each of them saves: a multiple of
    the number of ranks, each of which may have replicas. 0 if there are none, as in saves of the model only."""
    readers, processes = (
        max(by_rank(folder / name, pattern), default=(-1,))[0] + 1 if (folder / name).is_dir() else 0
        for name, pattern in (("data_reader", _READER), ("trainer", _PROCESS))
    )
    return max(readers, processes // stages)


def _is_full(first: Mapping[str, Any], last: Mapping[str, Any]) -> bool:
    """Return whether the last rank has as many rows of all weights as the first, so that there may be more ranks."""
    pairs = ((first[key], last.get(key)) for key in first if isinstance(first[key], TensorSpec))
    return all(isinstance(end, TensorSpec) and end.shape == begin.shape for begin, end in pairs)


def _whole(
    files: RankFiles, key: str, entries: Mapping[int, Any], absent: Sequence[int], names: Mapping[int, str]
) -> Any:
    """Join what the ranks have of a weight; one with fewer rows than ranks is not on all of them.

    What the ``absent`` ranks have is lost. Returns None if it is unknown how much that is."""
    parts = {rank: entry for rank, entry in entries.items() if isinstance(entry, TensorSpec)}
    held = [part for part in parts.values() if part.shape[:1] != (0,)] or list(parts.values())[:1]
    if not held:
        return next(iter(entries.values()))
    if not held[0].shape or key.rpartition(".")[2] in RUNNING_STATISTICS:  # FSDP does not divide buffers
        return joined(key, held, WHOLE, str(files.folder))
    lengths = {rank: part.shape[0] for rank, part in parts.items()}
    if (odd := _out_of_order(lengths)) is not None:
        held_by = [f"{lengths[rank]} in {names[rank]}" for rank in odd]
        raise UnreadableError(
            f"{files.folder}: the numbers of rows of {key} do not fit ({', '.join(held_by)}): all ranks before the last"
            " with any have the same number; put the files of one save together"
        )
    rows = _rows_of_absent(lengths, absent)
    if rows is None:
        return None
    whole = joined(key, held, Split(0, is_uneven=True), str(files.folder))
    row = whole.nbytes // max(whole.shape[0], 1)
    files.lacking[key] += rows * row + sum(part.nbytes for part in held if is_torn(part))
    shape = (whole.shape[0] + rows, *whole.shape[1:])
    return gone(key, TensorSpec(whole.dtype, shape, contiguous_strides(shape)), str(files.folder)) if rows else whole


def _out_of_order(rows: Mapping[int, int]) -> tuple[int, int] | None:
    """Return a rank with fewer rows of a weight than another one, though ranks after it have rows too, and that other
    one; None if there is none."""
    most = max(rows, key=lambda rank: rows[rank])
    stop = min((rank for rank, count in rows.items() if count < rows[most]), default=None)
    is_odd = stop is not None and any(count for rank, count in rows.items() if rank > stop)
    return (stop, most) if stop is not None and is_odd else None


def _rows_of_absent(rows: Mapping[int, int], absent: Sequence[int]) -> int | None:
    """Return how many rows of a weight the absent ranks have, given the rows of the others; None if that is unknown.

    All ranks have the same number, except the last with any, which may have fewer."""
    share, holders = max(rows.values()), [rank for rank, count in rows.items() if count]
    stop = min((rank for rank, count in rows.items() if count < share), default=None)
    found = 0
    for rank in absent:
        if stop is not None and rank > stop:
            continue
        if len(holders) < 2 or rank > holders[-1]:
            return None
        found += share
    return found
