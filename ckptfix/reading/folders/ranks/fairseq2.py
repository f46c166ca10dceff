"""fairseq2: every rank's part of each weight as a plain tensor, in ``model/pp_00/tp_00/sdp_00.pt``.

FSDP divides the rows of each weight among ranks in order; only the names of the files say so. The first of several
replicas has saved. With tensor parallelism, nothing in the files says along which axis a weight is divided.

Sources: ``fairseq2/checkpoint/manager.py``, ``fairseq2/nn/fsdp/fsdp2.py``, ``fairseq2/model_checkpoint/`` (0.8)."""

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
from ckptfix.reading.folders.ranks.files import RankFiles, by_rank, tagged
from ckptfix.reading.folders.ranks.names import FAIRSEQ2_RANK
from ckptfix.reading.folders.ranks.partition import WHOLE, Split, joined
from ckptfix.reading.weights.document import Document

NAME = "fairseq2"

_MODEL, _OPTIMIZER, _FIRST = "model", "optimizer", "pp_00/tp_00"


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
    for stage in sorted(model.glob("pp_*")):
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
        files.note_missing(count, ranks, "sdp_{:02d}.pt")
        states = {rank: root for rank, path in ranks.items() if (root := files.root(path)) is not None}
        if not states or not all(isinstance(state, dict) for state in states.values()):
            raise damaged(files.folder, clauses(files.damage) or "its files hold no state_dict")
        absent = [rank for rank in range(count) if rank not in states]
        files.check_absent(len(absent))
        files.note_repeated({ranks[rank].name: state for rank, state in states.items()})
        for key in dict.fromkeys(key for state in states.values() for key in state):
            entry = _whole(files, key, {rank: state.get(key) for rank, state in states.items()}, absent)
            if entry is None and absent:
                lost[key] = None
            else:
                weights[key] = entry
    files.note_renamed()
    if (files.folder / _OPTIMIZER).is_dir():
        files.remarks[Fact(Kind.RANK_LEFT_OUT, _OPTIMIZER)] = None
    return replace(files.document(NAME, weights, f"fairseq2, {counted(count, 'rank')}"), lost=lost)


def _whole(files: RankFiles, key: str, entries: Mapping[int, Any], absent: Sequence[int]) -> Any:
    """Join what the ranks have of a weight; one with fewer rows than ranks is not on all of them.

    What the ``absent`` ranks have is lost. Returns None if it is unknown how much that is."""
    parts = {rank: entry for rank, entry in entries.items() if isinstance(entry, TensorSpec)}
    held = [part for part in parts.values() if part.numel] or list(parts.values())[:1]
    if not held:
        return next(iter(entries.values()))
    if not held[0].shape or key.rpartition(".")[2] in RUNNING_STATISTICS:  # FSDP does not divide buffers
        return joined(key, held, WHOLE, str(files.folder))
    rows = _rows_of_absent({rank: part.shape[0] for rank, part in parts.items()}, absent)
    if rows is None:
        return None
    whole = joined(key, held, Split(0, is_uneven=True), str(files.folder))
    row = whole.nbytes // max(whole.shape[0], 1)
    files.lacking[key] += rows * row + sum(part.nbytes for part in held if is_torn(part))
    shape = (whole.shape[0] + rows, *whole.shape[1:])
    return gone(key, TensorSpec(whole.dtype, shape, contiguous_strides(shape)), str(files.folder)) if rows else whole


def _rows_of_absent(rows: Mapping[int, int], absent: Sequence[int]) -> int | None:
    """Return how many rows of a weight the absent ranks have, given the rows of the others; None if that is unknown.

    All ranks have the same number, except the last with any, which may have fewer. Raises ``ValueError`` for another
    order."""
    share, holders = max(rows.values()), [rank for rank, count in rows.items() if count]
    stop = min((rank for rank, count in rows.items() if count < share), default=None)
    if stop is not None and any(count for rank, count in rows.items() if rank > stop):
        raise ValueError(f"rank {stop} has {rows[stop]} rows of a weight, and a rank after it has rows too")
    found = 0
    for rank in absent:
        if stop is not None and rank > stop:
            continue
        if len(holders) < 2 or rank > holders[-1]:
            return None
        found += share
    return found
