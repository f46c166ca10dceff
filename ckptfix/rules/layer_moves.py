"""The matches of a map of layers that change something in a checkpoint, and their edits.

``proved`` runs both models to choose between the maps that shapes leave open."""

import time
from collections.abc import Collection, Iterator
from itertools import islice, starmap

from msgspec.structs import replace

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.edits import Assemble, Edit, Rename
from ckptfix.core.parts import Part, shape_of, used_in_full
from ckptfix.core.plan import Plan, Step
from ckptfix.core.smoke_result import Equivalence
from ckptfix.maps.inference import infer_tied, others
from ckptfix.maps.library import each_of
from ckptfix.maps.matches import Inference, Match
from ckptfix.maps.trees import Label
from ckptfix.rules import RENAMED_LAYERS
from ckptfix.rules.fit109_reparametrised_weight import in_parts, renamed_parts
from ckptfix.rules.quantised_layers import companions
from ckptfix.rules.rule import SourceModel

Moves = dict[str, Match]

MOST_MAPS, MOST_SECONDS = 24, 10.0
"""The most maps that ``--source-model`` tries, and the longest search for them."""


def proved(
    inference: Inference, source_model: SourceModel, tied: Collection[str], checkpoint: Checkpoint
) -> tuple[Inference, Moves, Equivalence]:
    """Return the first possible map that gives equal outputs, else the likeliest, with its moves and the proof."""
    for some in _rounds(inference, tied):
        possible = [(each, moves_of(_decided(each), checkpoint)) for each in some]
        plans = [Plan((Step(RENAMED_LAYERS.code, tuple(edits_of(moves, checkpoint))),)) for _, moves in possible]
        proof = source_model.prove(checkpoint, plans)
        if proof.chosen is not None:
            chosen, moves = possible[proof.chosen]
            shown = moves.keys() - set(proof.open) if proof.is_proved else ()
            return (
                chosen,
                {
                    key: replace(move, label=Label.VERIFIED if key in shown else chosen.matches[key].label)
                    for key, move in moves.items()
                },
                proof,
            )
        if proof.doubt:
            break
    return inference, moves_of(inference, checkpoint), proof


def _rounds(inference: Inference, tied: Collection[str]) -> Iterator[list[Inference]]:
    """Yield the map, and then the other possible ones if shapes and structure leave any, the likeliest first."""
    yield [*each_of(inference, tied), inference]
    if any(match.label < Label.CERTAIN for match in inference.matches.values()):
        first = infer_tied(inference.source, inference.target, {})
        yield [first, *islice(others(first, time.monotonic() + MOST_SECONDS), MOST_MAPS)]


def _decided(inference: Inference) -> Inference:
    """Return the map with its ambiguous keys as likely, because a proof decides about them."""
    matches = {key: replace(each, label=max(each.label, Label.LIKELY)) for key, each in inference.matches.items()}
    return replace(inference, matches=matches)


def keeps_name(key: str, match: Match) -> bool:
    return all(part.source == key for part in match.parts)


def moves_of(inference: Inference, checkpoint: Checkpoint) -> Moves:
    """Return the matches that change something. None of them takes the place of a key that stays in the file."""
    moves = {key: match for key, match in inference.matches.items() if not stays(key, match, inference)}
    kept = used_in_full({key: move.parts for key, move in moves.items()}, inference.source)
    # A tensor in parts can only be renamed.
    moves = {key: move for key, move in moves.items() if key in kept and _is_there(move, inference, checkpoint)}
    while True:
        applied, leaving = (
            {part.source for move in moves.values() if move.label >= least for part in move.parts}
            for least in (Label.LIKELY, Label.AMBIGUOUS)
        )
        blocked = {
            key
            for key, move in moves.items()
            if key in checkpoint.entries and key not in (applied if move.label > Label.AMBIGUOUS else leaving)
        }
        torn = {part.source for key in blocked for part in moves[key].parts}
        gone = {key for key, move in moves.items() if any(part.source in torn for part in move.parts)}
        if not gone:
            return moves | {key: match for key, match in inference.matches.items() if _is_in_doubt(key, match, moves)}
        moves = {key: move for key, move in moves.items() if key not in gone}


def _is_in_doubt(key: str, match: Match, moves: Moves) -> bool:
    """Return whether a key that keeps its name could swap places with an ambiguous move, and so is as doubtful."""
    return (
        key not in moves
        and match.label is Label.AMBIGUOUS
        and any(
            move.label is Label.AMBIGUOUS and move.parts[0].source in match.alternatives and key in move.alternatives
            for move in moves.values()
        )
    )


def _is_there(match: Match, inference: Inference, checkpoint: Checkpoint) -> bool:
    """Return whether the file has the tensors of a match; of a tensor in parts, only a rename is possible."""
    part, *others = match.parts
    is_renamed = not others and part == Part.whole(part.source, inference.source[part.source])
    return is_renamed or all(each.source in checkpoint.specs for each in match.parts)


def stays(key: str, match: Match, inference: Inference) -> bool:
    return keeps_name(key, match) and match.parts == (Part.whole(key, inference.source[key]),)


def edits_of(moves: Moves, checkpoint: Checkpoint) -> Iterator[Edit]:
    parts = in_parts(checkpoint.specs) if any(m.parts[0].source not in checkpoint.specs for m in moves.values()) else {}
    new: dict[str, str] = {}
    for key, move in moves.items():
        part, *others = move.parts
        spec = checkpoint.specs.get(part.source)
        if spec is None:
            yield from starmap(Rename, renamed_parts(part.source, key, parts[part.source]).items())
        elif not others and part == Part.whole(part.source, spec.shape):
            new[part.source] = key
            yield Rename(part.source, key)
        else:
            yield Assemble(key, spec.dtype, shape_of(move.parts), move.parts)
    yield from starmap(Rename, companions(new, checkpoint.specs).items())
