"""fairseq2: every rank's part of each weight as a plain tensor, in ``model/pp_00/tp_00/sdp_00.pt``.

FSDP divides the rows of each weight among ranks in order; only the names of the files say so. The first of several
replicas has saved. With tensor parallelism, nothing in the files says along which axis a weight is divided.

Sources: ``fairseq2/checkpoint/manager.py``, ``fairseq2/nn/fsdp/fsdp2.py``, ``fairseq2/model_checkpoint/`` (0.8)."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptfix.core.buffers import RUNNING_STATISTICS
from ckptfix.core.facts import Fact, Kind, clauses
from ckptfix.core.finding import counted
from ckptfix.core.spec import TensorSpec
from ckptfix.errors import UnreadableError
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
    count = 1
    for stage in sorted(model.glob("pp_*")):
        if (stage / "tp_01").exists():
            raise UnreadableError(
                f"{files.folder}: saved with tensor parallelism, and no file says along which axis each weight was"
                " divided; load it with fairseq2 on one GPU, and save it again"
            )
        ranks = {number: path for (number,), path in by_rank_in(stage / "tp_00").items()}
        others = by_rank_in(files.folder / _OPTIMIZER / stage.name / "tp_00")
        count = max([*ranks, *(number for (number,) in others)]) + 1
        files.note_missing(count, ranks, "sdp_{:02d}.pt")
        states = [files.root(path) for path in ranks.values()]
        if files.damage or not all(isinstance(state, dict) for state in states):
            lacks = clauses(files.damage) or "its files hold no state_dict"
            raise UnreadableError(f"{files.folder}: {lacks}; every rank has a part of every weight: fetch it")
        files.note_repeated({ranks[rank].name: state for rank, state in zip(ranks, states, strict=True)})
        weights |= {key: _whole(key, [state.get(key) for state in states], str(model)) for key in states[0]}
    files.note_renamed()
    if (files.folder / _OPTIMIZER).is_dir():
        files.remarks[Fact(Kind.RANK_LEFT_OUT, _OPTIMIZER)] = None
    return files.document(NAME, weights, f"fairseq2, {counted(count, 'rank')}")


def _whole(key: str, entries: Sequence[Any], path: str) -> Any:
    """Join what the ranks have of a weight; one with fewer rows than ranks is not on all of them."""
    parts = [entry for entry in entries if isinstance(entry, TensorSpec)]
    held = [part for part in parts if part.numel] or parts[:1]
    if not held:
        return entries[0]
    is_copy = not held[0].shape or key.rpartition(".")[2] in RUNNING_STATISTICS  # FSDP does not divide buffers
    return joined(key, held, WHOLE if is_copy else Split(0), path)
