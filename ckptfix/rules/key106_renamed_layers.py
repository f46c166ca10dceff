"""KEY106 renamed-layers: the layers have the names and the layout of another implementation.

## What it finds
A healthy, complete file whose layers have other names, or another layout, than the target's: from another library
(timm, torchvision, transformers), from another release, or from before modules were renamed. The map from the file's
keys to the target's comes from the first of these that explains the file:

- the loader of the model's own library, for a model of transformers, diffusers, timm or open_clip. It runs on tensors
  without values that track their elements, so a file from an older release, or from the model's authors, is converted
  exactly as the library would (stacked experts, fused layers, permutations for rotary embeddings). These keys are
  `certain`. `ckptfix map MODEL FILE` gives the reverse map;
- a map that ships with ckptfix, if it explains each key of the target and each of the file, or those below a prefix;
- names that are the target's with underscores or slashes for the dots, which are `certain`;
- the two trees of modules: the largest subtrees with the same shapes first, one decision for each repeated template,
  with names, numbers and the order of the layers as further evidence. This finds layers that one side fuses or stacks
  (`qkv`, `gate_up`, experts) and those that are stored transposed; a square matrix is transposed if its siblings are. A
  map must fill three quarters of the target; if only a few layers have other names, it must leave nothing over.

If the target is a file (`--like`) from the same training, for example the original before renaming and fine-tuning,
tensors that correlate with only one tensor of the file are `certain`, whatever their names and order; those whose
values contradict the map are `ambiguous`. `--no-values` skips this.

## Why it matters
Such a file loads into no model: every key is missing or unexpected. Maps are usually written by hand.

## Fix safety
Each key of the map has a label:

- `certain`: shapes and structure allow only one map, and neither side has extra layers;
- `likely`: names and order decided between layers of equal shapes, or a layer is split or fused and the shapes do not
  show whether its rows are interleaved;
- `ambiguous`: other maps fit as well, also to another network of the file with the same tensors (`actor` and
  `actor_target`), or a layer is fused under a name such as `query_key_value`, which has all queries first in some
  libraries and the three interleaved by head in others. Nothing is applied to these keys.

Safe if every key of the map is certain, nothing is left over, and many keys agree: an auxiliary head may look like the
missing one. Otherwise it needs `--rename-layers`, which leaves ambiguous keys unchanged. Every value stays bit for bit.
Needs a target.

`--source-model` names the model that the file was saved from, and proves the map: both models run on copies, in float64
and in eval mode, with the same random weights and statistics and on the same input. If the outputs agree to 1e-9 of the
largest, and swapping any two tensors of the same shape (or transposing a square matrix) would show, the keys are
`verified`, which is safe. If the first map fails, other possible maps are tried. Tensors whose swap changes no output,
such as the key bias of attention, are listed as unobservable; they follow the other tensors of their module. If the
outputs differ, the map is not applied: the architectures differ.

## Example
    ckptfix repair vit_timm.pth --like vit_transformers.safetensors --rename-layers
    # blocks.0.attn.qkv.weight → layer.0.attention.{query,key,value}.weight

## Sources
transformers' `conversion_mapping`, timm's `checkpoint_filter_fn` and the conversion scripts of both are such maps,
written by hand."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress

from msgspec.structs import asdict, replace

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.coverage import obstacles
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.finding import MODEL, Applicability, Blocks, Finding, Fix, Level, Placeholder, Remedy, advise, counted
from ckptfix.core.lazy import torch
from ckptfix.core.parts import Part, Shape, Shapes, full, used_in_full
from ckptfix.core.smoke_result import Equivalence
from ckptfix.core.target import Target
from ckptfix.core.wrappers import two_sets
from ckptfix.errors import CkptfixError
from ckptfix.maps.doubts import is_metas
from ckptfix.maps.folding import fold
from ckptfix.maps.inference import COUNTER, converted, infer_tied, is_in_order, spelled
from ckptfix.maps.library import head_of, look_up, sized_maps
from ckptfix.maps.matches import Inference, Match
from ckptfix.maps.trees import LARGE, Label
from ckptfix.reading.configs import head_sizes
from ckptfix.reading.weights.prefixed_sets import sets_of
from ckptfix.rules.buf104_transient_buffer import is_superfluous
from ckptfix.rules.fil101_several_state_dicts import choice
from ckptfix.rules.fit109_reparametrised_weight import in_parts, renamed_parts
from ckptfix.rules.layer_moves import Moves, edits_of, keeps_name, moves_of, proved, stays
from ckptfix.rules.rule import Context, Rule
from ckptfix.values.alike import by_values

COVERED = 0.75  # least share of the target's tensors that a map fills; less may be a coincidence of shapes

UNPLACED = 0.25
"""The least share of the target's tensors without a source of their name and shape for which a partial map will do."""

OTHER_MODELS = advise(
    "check whether both are the same architecture (norms before or after a layer, activation, heads); without "
    "--source-model the map is not proved"
)

OTHER_MAP = advise(
    "the outputs differ with your map: correct it, or omit --rename and --rename-map to infer and prove one"
)

PROOF = (
    Remedy.of("applies the map; ckptfix map FILE REFERENCE prints it", rename_layers=True),
    Remedy.of("proves it with the model that the file was saved from", source_model=MODEL),
)

TieGroups = Mapping[str, tuple[str, ...]]  # every tied key with its whole group
ValuesOfBoth = (
    tuple[Mapping[str, "torch.Tensor"], Mapping[str, "torch.Tensor"]] | None
)  # of the file and of the reference


def renamed_layers(rule: Rule, context: Context, target: Target) -> Iterator[Finding]:
    """Propose the map from the layers of another implementation, if it explains the file."""
    checkpoint, source_model = context.checkpoint, context.source_model
    if two_sets(checkpoint.entries) or any(".base_layer." in key for key in checkpoint.entries):
        return  # the layers have an adapter's names, which is merged first
    source, wanted = _sides(context, target)
    values: ValuesOfBoth = None
    if target.reference is not None and context.settings.values and _is_left_over(source, wanted):
        values = _values(checkpoint, target.reference, source, wanted)
    converters = source_model.converts if source_model is not None else None, target.converts
    known = converted(*_everything(checkpoint, target), converters)
    heads = target.heads | head_sizes(checkpoint)
    inference = (
        (_completed(known, target.tie_of) if known is not None else None)
        or (look_up(source, wanted, target.tie_of, heads) if heads else None)
        or _explained(source, wanted, target.tie_of, values)
    )
    if inference is None:
        yield from _proof_without_map(rule, context, target)
        return
    proof: Equivalence | None = None
    moves = moves_of(inference, checkpoint)
    if source_model is not None:
        inference, moves, proof = proved(inference, source_model, target.tie_of, checkpoint)
    is_own = inference.origin not in ("", "values")  # names and shapes would not confirm these maps
    if not is_own:
        moves = _relabelled(moves, source, wanted, target.tie_of, values)
    rivals = _rival_sets(moves, inference) if not inference.origin and source_model is None else ()
    if rivals:
        moves = {key: replace(move, label=Label.AMBIGUOUS) for key, move in moves.items()}
    _doubt_taken_names(moves, checkpoint.entries)
    taken = sum(source.get(key) == wanted.get(key, ()) for key in moves)
    elsewhere = f"; {taken} of their names belong to other layers in the file" if taken else ""
    ambiguous = {key: move for key, move in moves.items() if move.label is Label.AMBIGUOUS}
    if len(ambiguous) < len(moves):
        yield _map_finding(rule, context, target, inference, moves, proof, elsewhere)
    if proof is not None and proof.is_proved and proof.unobservable:
        yield rule.finding(
            Level.NOTE,
            f"{counted(len(proof.unobservable), 'unobservable key')} in the map: a swap with a tensor of the same "
            "shape changes no output",
            keys=proof.unobservable,
        )
    if ambiguous:
        yield _ambiguous_finding(rule, inference, ambiguous, elsewhere, rivals or sets_of(checkpoint.specs), heads)


def _sides(context: Context, target: Target) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Return the shapes of the tensors that can be moved, and of those that are wanted."""
    checkpoint, source_model = context.checkpoint, context.source_model
    source, wanted = _tensors(checkpoint, target), _slots(target)
    if source_model is not None:  # a file may be sorted, but not a model
        return {key: source[key] for key in (*source_model.shapes, *source) if key in source}, wanted
    # A weight in parts on one side moves as a whole.
    shapes = {key: spec.shape for key, spec in checkpoint.specs.items()}
    source = _as_whole(source, shapes, _parts(checkpoint, target))
    if not in_parts(checkpoint.specs):
        wanted = _as_whole(wanted, wanted, in_parts([key for key in wanted if key not in checkpoint.specs]))
    return source, wanted


def _proof_without_map(rule: Rule, context: Context, target: Target) -> Iterator[Finding]:
    """Report whether two models with the same names compute the same, if the user names the second one."""
    is_done = any(step.rule == rule.code for step in context.plan.steps)
    if context.source_model is None or is_done or any(obstacles(context.checkpoint, target)):
        return
    fitting = context.source_model.prove(context.before or context.checkpoint, [context.plan])
    remedies = OTHER_MAP if context.settings.rename or context.settings.rename_map else OTHER_MODELS
    yield rule.finding(
        Level.WARNING if fitting.is_refuted else Level.NOTE,
        f"the keys are those of the target; {fitting}",
        keys=fitting.open,
        evidence=_figures(fitting),
        remedies=remedies if fitting.is_refuted else (),
    )


def _map_finding(
    rule: Rule,
    context: Context,
    target: Target,
    inference: Inference,
    moves: Moves,
    proof: Equivalence | None,
    elsewhere: str,
) -> Finding:
    """Return the finding for the map, with a fix that applies the keys that are not ambiguous."""
    applied = {key: move for key, move in moves.items() if move.label > Label.AMBIGUOUS}
    missing = inference.lacking(target.tie_of)
    is_whole = not missing and not inference.unused
    is_much = _is_much(len(moves), len(inference.matches)) or all(keeps_name(*move) for move in moves.items())
    is_known = bool(inference.origin) or (proof is not None and proof.is_proved)
    is_certain = len(applied) == len(moves) and all(move.label >= Label.CERTAIN for move in moves.values())
    is_safe = is_certain and ((is_whole and is_much) or is_known)
    is_refuted = proof is not None and proof.is_refuted
    first = PROOF[0]
    if left := len(moves) - len(applied):
        first = Remedy.of(
            f"applies the map to these keys, but not to the {counted(left, 'ambiguous key')}", rename_layers=True
        )
    taken = {part.source for move in moves.values() for part in move.parts}
    rest = context.checkpoint.entries.keys() - taken - target.slots.keys() - target.entries
    if rest and not missing and len(applied) == len(moves):
        text = f"applies the map and drops the {counted(len(rest), 'key')} that it leaves over"
        first = Remedy.of(text, rename_layers=True, unsafe_fixes=True)
    remedies = (first, PROOF[1]) if target.modules and not context.source_model else (first,)
    rules = (inference.maps[0] if inference.maps else fold(inference)).rules
    fix = Fix(
        tuple(edits_of(applied, context.checkpoint)),
        Applicability.SAFE if is_safe else Applicability.UNSAFE,
        asked=context.settings.rename_layers,
    )
    return rule.finding(
        Level.ERROR,
        f"{counted(len(applied), 'key')} of the target under another implementation's names or layout "
        f"({counted(len(rules), 'rule')}){elsewhere}{f'; {proof}' if proof else ''}",
        keys=applied,
        evidence={
            **({"shipped": [each.name for each in inference.maps]} if inference.maps else {}),
            **({"origin": inference.origin} if inference.origin else {}),
            "rules": [str(each) for each in rules],
            "labels": dict(Counter(move.label.name.lower() for move in moves.values())),
            "missing": len(missing),
            "unused": len(inference.unused),
            **({"proof": _figures(proof)} if proof is not None else {}),
        },
        fix=None if is_refuted else fix,
        blocks=Blocks.NOTHING if is_refuted else Blocks.FILLING,
        remedies=OTHER_MODELS if is_refuted else () if is_safe else remedies,
    )


def _ambiguous_finding(
    rule: Rule,
    inference: Inference,
    ambiguous: Moves,
    elsewhere: str,
    sets: Sequence[str],
    heads: Collection[int],
) -> Finding:
    """Return the finding for the keys that several sources fit; ``sets`` are the sets of weights to choose from, and
    ``heads`` the sizes that both sides give attention heads."""
    are_fused = all(
        len(move.parts) > 1 or move.parts[0].box != full(inference.source[move.parts[0].source])
        for move in ambiguous.values()
    )
    are_turned = is_metas(inference.source) is not is_metas(inference.target)
    why = "split or fused with an unknown order of rows" if are_fused else "that fit several layers of the file"
    if are_turned:
        why = "with names of Meta's Llama, whose rotary embeddings order the rows of a head differently"
    sized = sized_maps(inference.source, inference.target) if are_turned and not heads else []
    of_llama = [
        Remedy.of("moves them if it is a Llama; N is the size of a head: dim / n_heads", rename_map=Placeholder(name))
        for name in sized
    ]
    fitting_layers = {
        key: list(dict.fromkeys((*(part.source for part in move.parts), *move.alternatives)))
        for key, move in ambiguous.items()
    }
    return rule.finding(
        Level.ERROR,
        f"{counted(len(ambiguous), 'key')} of the target {why}{elsewhere}",
        keys=ambiguous,
        evidence={"alternatives": fitting_layers},
        blocks=Blocks.FILLING,
        remedies=tuple(Remedy.of(_why(each.name), rename_map=each.name) for each in inference.maps)
        or choice(sets)
        or tuple(of_llama)
        or advise(
            "if the rows of queries and keys are in another order, their rules need a step like "
            f"`(h d t) ... -> (h t d) ... with d={_half(heads)} t=2` (d is half the size of a head) in the map from "
            "ckptfix map FILE REFERENCE --output-format json, for --rename-map"
            if are_turned
            else "the names do not say which is which: choose in the map from ckptfix map FILE REFERENCE "
            "--output-format json, and pass it with --rename-map"
        ),
    )


def _why(name: str) -> str:
    """Return what a shipped map is for."""
    return f"applies this map, if a head has {size} elements" if (size := head_of(name)) else "applies this shipped map"


def _half(heads: Collection[int]) -> str:
    """Return half the size of a head as text."""
    return str(min(heads) // 2) if len(heads) == 1 else "…"


def _rival_sets(moves: Moves, inference: Inference) -> tuple[str, ...]:
    """Return the prefixes of networks with the same names and shapes if the moves take most of their tensors from one
    of them, or mix them: nothing shows which one the target is (`actor` or `actor_target`)."""
    moved = {part.source for move in moves.values() for part in move.parts}
    used = inference.source.keys() - set(inference.unused)
    networks: dict[str, dict[str, Shape]] = defaultdict(dict)
    for key, shape in inference.source.items():
        segments = key.split(".")
        for depth in range(1, len(segments)):
            networks[".".join(segments[:depth])][".".join(segments[depth:])] = shape
    alike: dict[frozenset[tuple[str, Shape]], list[str]] = defaultdict(list)
    for front, inside in networks.items():
        if 2 * len(inside) > len(moved):
            alike[frozenset(inside.items())].append(front)
    for names, fronts in alike.items():
        # Names that some of the networks have in the map, and others not.
        either = [0 < sum(f"{front}.{rest}" in used for front in fronts) < len(fronts) for rest, _ in names]
        if 2 * sum(either) > len(moved):
            return tuple(fronts)
    return ()


def _doubt_taken_names(moves: Moves, entries: Collection[str]) -> None:
    """Mark moves to the names of tensors that stay as ambiguous: `layers.1` cannot become `layers.2` if the map does
    not know where `layers.2` belongs."""
    while True:
        applied = {key: move for key, move in moves.items() if move.label > Label.AMBIGUOUS}
        moved = {part.source for move in applied.values() for part in move.parts}
        stuck = [key for key in applied if key in entries and key not in moved]
        if not stuck:
            return
        moves |= {key: replace(moves[key], label=Label.AMBIGUOUS) for key in stuck}


def _figures(proof: Equivalence) -> dict[str, object]:
    return {name: value for name, value in asdict(proof).items() if value not in (None, (), "", 1, 0.0)}


def _tensors(checkpoint: Checkpoint, target: Target) -> dict[str, Shape]:
    """Return the shapes of the tensors that can be moved: floats that the target does not compute, and counters."""
    parts = set() if in_parts(target.slots) else {key for keys in in_parts(checkpoint.specs).values() for key in keys}
    return {
        key: spec.shape
        for key, spec in checkpoint.specs.items()
        if key not in parts and spec.storage is not None and not spec.quantizer and _takes_part(key, spec.dtype)
        if not is_superfluous(key, checkpoint, target)
    }


def _as_whole(given: dict[str, Shape], shapes: Shapes, parts: Mapping[str, Collection[str]]) -> dict[str, Shape]:
    """Return the shapes with one entry for each weight that is in parts, under the weight's name."""
    if not parts:
        return given
    wholes = {next(iter(renamed_parts(name, name, keys)), ""): name for name, keys in parts.items()}
    others = {key for keys in parts.values() for key in keys} - wholes.keys()
    return {
        wholes.get(key, key): shape
        for key, shape in shapes.items()
        if key in wholes or (key in given and key not in others)
    }


def _parts(checkpoint: Checkpoint, target: Target) -> dict[str, set[str]]:
    """Return the keys of the parts of each tensor that only the file has in parts."""
    if in_parts(target.slots):
        return {}
    found = in_parts(checkpoint.specs).items()
    return {name: keys for name, keys in found if name not in checkpoint.entries and renamed_parts(name, name, keys)}


def _slots(target: Target) -> dict[str, Shape]:
    return {
        key: slot.shape for key, slot in target.slots.items() if slot.shape is not None and _takes_part(key, slot.dtype)
    }


def _everything(checkpoint: Checkpoint, target: Target) -> tuple[Shapes, Shapes]:
    """Return the shapes of all tensors of both sides, for a library's own conversion."""
    ours = {
        key: spec.shape for key, spec in checkpoint.specs.items() if spec.storage is not None and not spec.quantizer
    }
    return ours, {key: slot.shape for key, slot in target.slots.items() if slot.shape is not None}


def _takes_part(key: str, dtype: str) -> bool:
    return DTYPES[dtype].is_float or key.endswith(COUNTER)


def _inference(source: Shapes, target: Shapes, tied: TieGroups) -> Inference | None:
    """Return the map; None if the names already fit, or no map explains the file."""
    wanted = {key for key in target if key.rpartition(".")[2] != COUNTER}
    unplaced = {key for key in wanted if source.get(key) != target[key]}
    if not _is_moved(source, target):
        return None
    if known := look_up(source, target, tied):
        return known
    if known := spelled(source, target):
        return _completed(known, tied)
    inference = infer_tied(source, target, tied)
    if _is_much(len(unplaced), len(wanted)):
        return inference if len(wanted.intersection(inference.matches)) >= COVERED * len(wanted) else None
    # Only a few layers have other names: the leftover ones have to be the missing ones.
    if inference.missing or inference.unused:
        return None
    moved = {key for key in wanted - unplaced if not keeps_name(key, inference.matches[key])}
    if moved and is_in_order(source, sorted(source)):  # only names support the map, and they contradict it
        matches = {
            key: match if keeps_name(key, match) else replace(match, label=Label.AMBIGUOUS)
            for key, match in inference.matches.items()
        }
        inference = replace(inference, matches=matches)
    return inference if moved <= _passed_on(unplaced, inference) else None


def _completed(known: Inference, tied: TieGroups) -> Inference:
    """Return a map by spelling or by a loader with what else explains the rest, which a second pass would find.

    Where the rest has another layout, so may layers whose shape does not show it: square matrices."""
    names = {name: key for key, name in known.single_sources.items()}
    before = {key: name for name, key in names.items()}
    renamed = {names.get(key, key): shape for key, shape in known.source.items()}
    missing, unused = set(known.missing), set(known.unused)
    more = _inference(renamed, known.target, tied) if missing and unused else None
    likely: dict[str, Match] = {}
    for key, each in more.matches.items() if more is not None else ():
        sources = {part.source for part in each.parts}
        is_of_rest = key in missing and sources <= unused
        if is_of_rest or (sources == {key} and key in before and each.parts[0].axes):
            parts = tuple(replace(part, source=before.get(part.source, part.source)) for part in each.parts)
            likely[key] = replace(each, parts=parts, label=min(each.label, Label.LIKELY))
    return replace(known, matches=known.matches | likely)


def _passed_on(unplaced: set[str], inference: Inference) -> set[str]:
    """Return the keys whose name a missing key has in the file, and so on for their own names: ``proj_in`` is
    ``layers.0`` in the file, and ``layers.0`` is ``layers.1``."""
    found, todo = set(unplaced), list(unplaced)
    while todo:
        more = {part.source for part in inference.matches[todo.pop()].parts} & inference.target.keys() - found
        found |= more
        todo += more
    return found


def _is_moved(source: Shapes, target: Shapes) -> bool:
    """Return whether a matrix of the target has no source of its name and shape; vectors are too alike to count."""
    return any(len(shape) > 1 and source.get(key) != shape for key, shape in target.items())


def _is_left_over(source: Shapes, target: Shapes) -> bool:
    """Return whether a leftover tensor has the shape of a missing one, or a matrix has no source."""
    left = {shape for key, shape in source.items() if target.get(key) != shape}
    return _is_moved(source, target) or any(
        shape in left and source.get(key) != shape for key, shape in target.items() if shape
    )


def _is_much(moved: int, number: int) -> bool:
    return moved >= max(UNPLACED * number, LARGE)


def _values(checkpoint: Checkpoint, reference: Checkpoint, source: Shapes, target: Shapes) -> ValuesOfBoth:
    """Return the values of both sides, memory-mapped; None if one of them cannot be read as stored."""
    with suppress(CkptfixError):
        sides = checkpoint.state_dict(mmap=True), reference.state_dict(mmap=True)
        plain = [
            str(side[key].layout) == "torch.strided"
            for side, keys in zip(sides, (source, target), strict=True)
            for key in keys
            if key in side
        ]
        return sides if len(plain) == len(source) + len(target) and all(plain) else None
    return None


def _explained(source: Shapes, target: Shapes, tied: TieGroups, values: ValuesOfBoth) -> Inference | None:
    """Return the map from names and shapes, and from the values of both sides if they are from the same training."""
    inference = _inference(source, target, tied)
    return inference if values is None else by_values(inference, source, target, *values)


def _relabelled(moves: Moves, source: Shapes, target: Shapes, tied: TieGroups, values: ValuesOfBoth) -> Moves:
    """Return the moves with their labels after a second inference on the resulting file.

    An ambiguous move becomes likely if the second inference finds it too. If that would move anything else, the map
    contradicts itself and all of it is ambiguous, also if a moved layer could be one that keeps its name."""
    kept = {key for key, move in moves.items() if move.label is Label.AMBIGUOUS and keeps_name(key, move)}
    for _ in range(2):
        applied = {key: move for key, move in moves.items() if move.label > Label.AMBIGUOUS}
        more = dict(_moved_next(applied, source, target, tied, values)) if applied else {}
        if not more:
            return moves
        found = {
            key: replace(moves[key], label=Label.LIKELY)
            for key in more
            if key in moves and kept.isdisjoint(moves[key].alternatives)
        }
        together = {key: move.parts for key, move in (applied | found).items()}
        if {key: move.parts for key, move in found.items()} != more or len(used_in_full(together, source)) < len(
            together
        ):
            break
        moves = moves | found
    return {key: replace(move, label=Label.AMBIGUOUS) for key, move in moves.items()}


def _moved_next(
    moves: Moves, source: Shapes, target: Shapes, tied: TieGroups, values: ValuesOfBoth
) -> Iterator[tuple[str, tuple[Part, ...]]]:
    """Yield what a second inference would move after these moves."""
    made: dict[str, list[str]] = defaultdict(list)
    for key, move in moves.items():
        made[move.parts[0].source].append(key)
    used = {part.source for move in moves.values() for part in move.parts}
    after: dict[str, Shape] = {}  # in the order of the output
    for key, shape in source.items():
        after |= {name: target[name] for name in made[key]} if key in used else {key: shape}
    if values is not None:  # a moved tensor has the values of its new place, as far as they are compared
        values = {**values[0], **{key: values[1][key] for key in moves}}, values[1]
    again = _explained(after, target, tied, values)
    if again is None:
        return
    for key, match in again.matches.items():
        if match.label > Label.AMBIGUOUS and not stays(key, match, again):
            yield key, match.parts
