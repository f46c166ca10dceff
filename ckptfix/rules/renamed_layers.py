"""KEY106 renamed-layers: the layers have the names and the layout of another implementation.

## What it finds
A healthy, complete file whose layers have other names, or another layout, than the target's: from another library
(timm, torchvision, transformers), from another release, or from before modules were renamed. The rule infers the whole
map from the file's keys to the target's by matching the two trees of modules: the largest subtrees with the same shapes
first, one decision for each repeated template, with names, numbers and the order of the layers as further evidence. It
finds layers that one side fuses or stacks (`qkv`, `gate_up`, experts) and those that are stored transposed. A map must
fill three quarters of the target; if only a few layers have other names, it has to leave nothing over on either side.

Maps that ship with ckptfix outrank what is inferred, if one explains each key of both sides: they know the permutation
for rotary embeddings and how rows are interleaved.

## Why it matters
Such a file loads into nothing: every key is missing or unexpected. The maps are usually written by hand.

## Fix safety
Each key of the map has a label. `certain`: shapes and structure leave one map. `likely`: names and order decide
between layers of equal shapes, or a layer is split or fused, and whether its rows are interleaved shows in no shape.
`ambiguous`: other maps fit as well; nothing is applied to these keys. The fix is safe if every key of the map is
certain, nothing is left over, and many keys agree: an auxiliary head may look like the missing one. Otherwise it needs
`--rename-layers`, which leaves the ambiguous keys as they are. Every value stays bit for bit. Needs a target.

## Example
    ckptfix repair vit_timm.pth --like vit_transformers.safetensors --rename-layers
    # blocks.0.attn.qkv.weight → layer.0.attention.{query,key,value}.weight

## Sources
transformers' `conversion_mapping`, timm's `checkpoint_filter_fn` and the conversion scripts of both are such maps,
written by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.edits import Assemble, Edit, Rename
from ckptfix.core.finding import Applicability, Finding, Fix, Level, Remedy, advise, counted
from ckptfix.core.parts import Part, Shape, full, shape_of, used_in_full
from ckptfix.core.target import Target
from ckptfix.maps.folding import fold
from ckptfix.maps.inference import COUNTER, Inference, Match, infer
from ckptfix.maps.library import look_up
from ckptfix.maps.trees import LARGE, Label
from ckptfix.rules.rule import Context, Rule, rule
from ckptfix.rules.wrapper_segment import two_sets

COVERED = 0.75
"""The share of the target's tensors that a map has to fill: less may be a coincidence of shapes."""

UNPLACED = 0.25
"""The share of the target's tensors without a source of their name and shape from which on a part of a map will do."""

SHOWN = "applies the map; ckptfix map FILE REFERENCE prints it"

Specs = Mapping[str, Shape]
Moves = dict[str, Match]


@rule("KEY106", "renamed-layers")
def renamed_layers(rule: Rule, context: Context) -> Iterator[Finding]:
    """Propose the map from the layers of another implementation, if it explains the file."""
    checkpoint, target = context.checkpoint, context.target
    if target is None or two_sets(checkpoint.entries):
        return
    source, wanted = _tensors(checkpoint), _slots(target)
    inference = _inference(source, wanted, target.tie_of)
    if inference is None:
        return
    moves = _moves(inference, checkpoint)
    least = min((move.label for move in moves.values()), default=Label.AMBIGUOUS)
    applied = {key: move for key, move in moves.items() if move.label > Label.AMBIGUOUS}
    ambiguous = {key: move for key, move in moves.items() if move.label is Label.AMBIGUOUS}
    labels = Counter(move.label.name.lower() for move in moves.values())
    if applied and _is_stable(applied, source, wanted, target.tie_of):
        missing = [key for key in inference.missing if not inference.matches.keys() & set(target.tie_of.get(key, ()))]
        is_whole = not missing and not inference.unused
        is_much = _is_much(len(moves), len(inference.matches)) or all(_keeps_name(*move) for move in moves.items())
        rules = (inference.maps[0] if inference.maps else fold(inference)).rules
        is_safe = least is Label.CERTAIN and is_whole and is_much
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(applied), 'key')} of the target under another implementation's names or layout "
            f"({counted(len(rules), 'rule')})",
            keys=tuple(applied),
            evidence={
                **({"shipped": [each.name for each in inference.maps]} if inference.maps else {}),
                "rules": [str(each) for each in rules],
                "labels": dict(labels),
                "missing": len(missing),
                "unused": len(inference.unused),
            },
            fix=Fix(
                tuple(_edits(applied, checkpoint)),
                Applicability.SAFE if is_safe else Applicability.UNSAFE,
                asked=context.settings.rename_layers,
            ),
            remedies=() if is_safe else (Remedy((("rename_layers", True),), SHOWN),),
        )
    if ambiguous:
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(ambiguous), 'key')} of the target with several layers of the file that fit",
            keys=tuple(ambiguous),
            evidence={"alternatives": {key: _alternatives(move) for key, move in ambiguous.items()}},
            remedies=tuple(Remedy((("rename_map", each.name),), "applies this shipped map") for each in inference.maps)
            or advise(
                "the names do not say which is which: choose in the map that ckptfix map FILE REFERENCE writes with"
                " --output-format json, and give it to --rename-map"
            ),
        )


def _tensors(checkpoint: Checkpoint) -> dict[str, Shape]:
    """Return the shapes of what can be moved: floats with values, and counters of batches."""
    return {
        key: spec.shape
        for key, spec in checkpoint.specs.items()
        if spec.storage is not None and not spec.quantizer and _takes_part(key, spec.dtype)
    }


def _slots(target: Target) -> dict[str, Shape]:
    return {
        key: slot.shape for key, slot in target.slots.items() if slot.shape is not None and _takes_part(key, slot.dtype)
    }


def _takes_part(key: str, dtype: str) -> bool:
    return DTYPES[dtype].is_float or key.rpartition(".")[2] == COUNTER


def _inference(source: Specs, target: Specs, tied: Collection[str]) -> Inference | None:
    """Return the map, or None if names alone explain the file, or if there is no map that explains it."""
    wanted = {key for key in target if key.rpartition(".")[2] != COUNTER}
    unplaced = {key for key in wanted if source.get(key) != target[key]}
    if not any(len(target[key]) > 1 for key in unplaced):
        return None  # vectors of one length are many
    if known := look_up(source, target, tied):
        return known
    inference = _inferred(tuple(source.items()), tuple(target.items()))
    if _is_much(len(unplaced), len(wanted)):
        return inference if len(wanted.intersection(inference.matches)) >= COVERED * len(wanted) else None
    # A few layers have other names: those that are left over have to be those that are missing.
    stay = all(_keeps_name(key, inference.matches[key]) for key in inference.matches.keys() & (wanted - unplaced))
    return inference if stay and not inference.missing and not inference.unused else None


@lru_cache(maxsize=4)
def _inferred(source: tuple[tuple[str, Shape], ...], target: tuple[tuple[str, Shape], ...]) -> Inference:
    """Return the inferred map; that of the files of a zoo which have the same structure is inferred once."""
    return infer(dict(source), dict(target))


def _is_much(moved: int, number: int) -> bool:
    return moved >= max(UNPLACED * number, LARGE)


def _keeps_name(key: str, match: Match) -> bool:
    return all(part.source == key for part in match.parts)


def _moves(inference: Inference, checkpoint: Checkpoint) -> Moves:
    """Return the matches that change something. None of them takes the place of a key that stays in the file."""
    moves = {key: match for key, match in inference.matches.items() if not _stays(key, match, inference)}
    kept = used_in_full({key: move.parts for key, move in moves.items()}, inference.source)
    moves = {key: move for key, move in moves.items() if key in kept}
    while True:
        leaving = {part.source for move in moves.values() if move.label > Label.AMBIGUOUS for part in move.parts}
        blocked = {key for key in moves if key in checkpoint.entries and key not in leaving}
        torn = {part.source for key in blocked for part in moves[key].parts}
        gone = {key for key, move in moves.items() if any(part.source in torn for part in move.parts)}
        if not gone:
            return moves
        moves = {key: move for key, move in moves.items() if key not in gone}


def _stays(key: str, match: Match, inference: Inference) -> bool:
    shape = full(inference.target[key])
    return match.parts == (Part(key, shape, shape),)


def _is_stable(moves: Moves, source: Specs, target: Specs, tied: Collection[str]) -> bool:
    """Tell whether the map, applied, leaves nothing that another look would move: else it contradicts itself."""
    used = {part.source for move in moves.values() for part in move.parts}
    after = {key: shape for key, shape in source.items() if key not in used} | {key: target[key] for key in moves}
    again = _inference(after, target, tied)
    return again is None or not any(
        match.label > Label.AMBIGUOUS and not _stays(key, match, again) for key, match in again.matches.items()
    )


def _edits(moves: Moves, checkpoint: Checkpoint) -> Iterator[Edit]:
    for key, move in moves.items():
        part, *others = move.parts
        spec = checkpoint.specs[part.source]
        if not others and part == Part(part.source, full(spec.shape), full(spec.shape)):
            yield Rename(part.source, key)
        else:
            yield Assemble(key, spec.dtype, shape_of(move.parts), move.parts)


def _alternatives(move: Match) -> list[str]:
    return list(dict.fromkeys([part.source for part in move.parts] + list(move.alternatives)))
