"""The files of experts that DeepSpeed writes next to model states, each with the weights of one expert of a layer in
the training's dtype: ``layer_0_expert_3_mp_rank_00_model_states.pt``. AutoEP's have a part of a stack.

``num_experts`` in the model states counts the experts of each layer. A missing file costs nothing if the optimizer
states have the masters of its weights.

Source: ``deepspeed/runtime/engine.py`` (``_save_moe_checkpoint``, 0.9 to 0.19)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.bytes.sources import is_torn
from ckptfix.core.facts import Fact, Kind
from ckptfix.core.spec import TensorSpec
from ckptfix.errors import HostileError
from ckptfix.reading.folders.chunks import gone
from ckptfix.reading.folders.ranks.files import MOST_RANKS, RankFiles, by_rank
from ckptfix.reading.folders.ranks.names import ZERO_EXPERT
from ckptfix.reading.folders.ranks.zero_masters import STACKED
from ckptfix.reading.folders.ranks.zero_numbered import EXPERT_KEY

_LISTED = 4
_LONGEST = 200  # characters of a key that are shown
_MOST_ABSENT = 1024  # missing files whose weights are listed
_NAME = "layer_{}_expert_{}_mp_rank_{:02d}_model_states.pt"


class Experts(Struct):
    """The files of experts that are missing or cannot be read, and what is lost with them."""

    are_there: bool  # whether there is any file
    absent: Sequence[str]  # the names of missing files
    total: int  # the number of files that there should be
    lost: Mapping[str, int]  # the bytes of lost weights by key
    unnamed: Sequence[int]  # layers without any file, so that the names of their weights are unknown
    damaged: Sequence[Fact]  # what is wrong with existing files
    torn: Sequence[str]  # the weights in these that are cut

    def note(self, files: RankFiles, masters: Mapping[str, TensorSpec] | None) -> None:
        """Record missing files as damage, or these and damaged ones as remarks if all of their weights have masters."""
        lost = {key: nbytes for key, nbytes in self.lost.items() if STACKED.sub(r"\1", key) not in (masters or {})}
        for key, nbytes in lost.items():
            files.lacking[key] += nbytes
        for layer in self.unnamed if masters is None else ():
            files.remarks[Fact.of(Kind.UNNAMED_LOSS, str(layer), lost=f"experts of layer {layer}")] = None
        if self.absent:
            first = tuple(self.absent[:_LISTED])
            fact = Fact.of(Kind.EXPERTS_LACKING, absent=len(self.absent), experts=self.total, names=first)
            if masters is None or lost:
                files.damage.append(fact)
            else:
                files.remarks[fact] = None
        are_whole = all(STACKED.sub(r"\1", key) in masters for key in self.torn) if masters is not None else False
        if self.damaged and are_whole and not lost:
            names = tuple(dict.fromkeys(fact.place for fact in self.damaged))
            files.damage[:] = [fact for fact in files.damage if fact not in self.damaged]
            files.remarks[Fact.of(Kind.EXPERTS_DAMAGED, names=names)] = None


def take_experts(files: RankFiles, roots: Sequence[Any], are_spread: bool) -> Experts:
    """Add the weights in the files of experts to the model states of each tensor-parallel rank; those of missing files
    are marked as lost. With ``are_spread``, as in stage 3, there are no such files."""
    found = by_rank(files.folder, ZERO_EXPERT)
    before = len(files.damage)
    held = {numbers: _of_expert(files, file, numbers[1]) for numbers, file in found.items()}
    damaged_files = [fact for fact in files.damage[before:] if fact.kind is not Kind.RANK_MISPLACED]
    torn = [key for own in held.values() for key, spec in own.items() if is_torn(spec)]
    counts = None if are_spread else roots[0].get("num_experts")
    counts = counts if isinstance(counts, list) and all(type(count) is int and count >= 0 for count in counts) else []
    if sum(counts) > MOST_RANKS:
        raise HostileError(f"{files.folder}: claims {sum(counts)} experts; do not use this checkpoint")
    ranks_of: dict[tuple[int, int], list[int]] = {}
    for layer, expert, rank in found:
        ranks_of.setdefault((layer, expert), []).append(rank)
    # If experts are not split like the other weights, one tensor-parallel rank writes each of them.
    by_all = 2 * sum(len(ranks) == len(roots) for ranks in ranks_of.values()) > len(ranks_of)
    absent = [
        (layer, expert, rank)
        for layer, count in enumerate(counts)
        for expert in range(count)
        for rank in range(len(roots) if by_all else 1)
        if rank not in ranks_of.get((layer, expert), ()) and (by_all or (layer, expert) not in ranks_of)
    ]
    models = {(layer, rank): own for (layer, _, rank), own in held.items() if own and len(absent) <= _MOST_ABSENT}
    lost: dict[str, int] = {}
    unnamed: dict[int, None] = {}
    for layer, expert, rank in sorted([*held, *absent]):
        if not (own := held.get((layer, expert, rank), {})):
            own = {
                key: gone(key, spec, str(files.folder))
                for name, spec in models.get((layer, rank), {}).items()
                if (key := _renumbered(name, expert))
            }
            lost.update({key: spec.nbytes for key, spec in own.items()})
            unnamed.update({} if own else {layer: None})
        roots[rank]["module"].update(own)
    return Experts(
        bool(found),
        [_NAME.format(*numbers) for numbers in absent],
        len(found) + len(absent),
        lost,
        [*unnamed],
        damaged_files,
        torn,
    )


def _renumbered(key: str, expert: int) -> str:
    """Return the key of the same weight of another expert."""
    if match := STACKED.fullmatch(key):
        return f"{match[1]}.{expert}"
    match = EXPERT_KEY.fullmatch(key)
    return f"{match[1]}{expert}{match[3]}" if match else ""


def _of_expert(files: RankFiles, file: Path, expert: int) -> dict[str, TensorSpec]:
    """Return the weights in the file of an expert; those of AutoEP as a stack of one. Empty if it cannot be read or
    has those of another expert, which is damage."""
    made = {}
    for key, spec in (files.root(file) or {}).items():
        stacked = STACKED.fullmatch(str(key))
        match = stacked or EXPERT_KEY.fullmatch(str(key))
        if match is None or int(match[2]) != expert or not isinstance(spec, TensorSpec):
            files.damage.append(Fact.of(Kind.RANK_MISPLACED, files.name(file), other=str(key)[:_LONGEST]))
            return {}
        made[str(key)] = replace(spec, shape=(1, *spec.shape), strides=(spec.numel, *spec.strides)) if stacked else spec
    return made
