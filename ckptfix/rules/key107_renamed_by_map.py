"""KEY107 renamed-by-map: layers renamed or rearranged by the user's map.

## What it finds
The keys that the rules of `--rename-map FILE` and the patterns of `--rename OLD=NEW` name. `ckptfix map A B` infers
such a map and prints it; it can be edited by hand, and applies to other sizes of the same family. A map that fits only
backwards is applied backwards, and none is applied if the file already fits the target; a note says so. A pattern of
`--rename` is always applied as written. A map may omit a wrapper's leading `module.`.

A rule is `from → to` with patterns of keys: `{n}` is a number (`{n+1}`, `{2n+1}` are computed from it), `{a,b}` one of
several strings, and `*` any text. The steps join or split what only one side has: `concat`, `stack`, axes in another
order as einops writes them (`(h d t) ... -> (h t d) ... with d=64 t=2`, or `transpose`), `unstack`, `split 3` (or the
shares: `split 4:1:1`); axes that end with `for q,k` change only for these strings. If two rules match a key, the one
with fewer variables applies.

## Why it matters
If neither names nor shapes match the layers of two implementations, only a map can.

## Fix safety
You asked for the fix, so it needs no other flag. Every value stays bit for bit. A rule is refused if it names a key
that the file or the target lacks, gives two sources to one element, or splits unevenly; a rule with `"optional": true`
may name missing keys. A rule with the label `ambiguous` is not applied: choose its source, and remove the label.

## Example
    ckptfix map vit_timm.pth vit_transformers.safetensors --output-format json > vit.json
    ckptfix repair vit_large_timm.pth --rename-map vit.json
    # blocks.{n}.attn.qkv.{weight,bias} → layer.{n}.attention.{query,key,value}.{weight,bias}, split 3

## Sources
The notation of axes is that of einops (https://einops.rocks)."""

from collections.abc import Iterator

from msgspec.structs import replace

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.coverage import obstacles
from ckptfix.core.edits import Assemble, Edit, Rename, renames
from ckptfix.core.finding import Finding, Fix, Level, advise, counted
from ckptfix.core.parts import Part
from ckptfix.core.rename_map import AMBIGUOUS, RenameMap
from ckptfix.core.spec import TensorSpec
from ckptfix.core.target import Target
from ckptfix.core.wrappers import leading_modules, shared_modules, without_first
from ckptfix.errors import UsageError
from ckptfix.maps.library import fitting
from ckptfix.maps.resolving import resolve
from ckptfix.rules.rule import Context, Rule


def renamed_by_map(rule: Rule, context: Context) -> Iterator[Finding]:
    """Propose the edits of the user's map."""
    checkpoint, target, given = context.checkpoint, context.target, context.settings.rename_map
    assert isinstance(given, RenameMap), "Needs.MAP"
    if target is not None and not any(obstacles(checkpoint, target)):
        by_hand = tuple(each for each in given.rules if each.by_hand)
        if by_hand != given.rules:
            yield rule.finding(
                Level.NOTE,
                f"{given.name or 'the map'} was not applied: the file already fits",
                evidence={"map": given.name or "given"},
            )
        given = replace(given, rules=by_hand)
    wrappers = _wrappers(checkpoint, target, given)
    key_of = {without_first(key, wrappers): key for key in checkpoint.entries}
    entries = {name: checkpoint.entries[key] for name, key in key_of.items()}
    # A rule may rename an entry that is not a tensor, but any other step needs a shape.
    shapes = {name: entry.shape if isinstance(entry, TensorSpec) else () for name, entry in entries.items()}
    wanted = None
    if target is not None:
        wanted = {key: slot.shape or () for key, slot in target.slots.items()} | dict.fromkeys(target.entries, ())
    edits: list[Edit] = []
    try:
        moves = resolve(fitting(given, shapes, wanted) if wanted else given, shapes, wanted)
    except UsageError as error:  # a pattern of --rename, which may fit another file
        renamed = [step.rule for step in context.plan.steps if any(isinstance(edit, Rename) for edit in step.edits)]
        after = f", after {' and '.join(renamed)} renamed its keys" if renamed else ""
        raise UsageError(f"{checkpoint.path}{after}: ", *error.args) from error
    for key, move in moves.items():
        (part, *others) = move.parts
        if not others and part == Part.whole(part.source, shapes[part.source]):
            edits += renames({key_of[part.source]: key})
        else:
            entry = entries[part.source]
            parts = tuple(replace(each, source=key_of[each.source]) for each in move.parts)
            edits.append(Assemble(key, entry.dtype if isinstance(entry, TensorSpec) else "", move.shape, parts))
    if wrappers and moves:
        used = {part.source for move in moves.values() for part in move.parts}
        edits += renames({key: name for name, key in key_of.items() if name not in used})
    if edits:
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(edits), 'key')} renamed or rearranged by the map",
            keys=moves,
            evidence={"map": given.name or "given", "rules": len(given.rules)},
            fix=Fix.requested(edits),
        )
    if unclear := [each for each in given.rules if each.label == AMBIGUOUS]:
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(unclear), 'rule')} of the map with several possible sources",
            evidence={"rules": [str(each) for each in unclear]},
            remedies=advise(f"choose their sources in {given.name or 'the map'}, and remove the label 'ambiguous'"),
        )


def _wrappers(checkpoint: Checkpoint, target: Target | None, given: RenameMap) -> int:
    """Return how many leading ``module.`` a wrapper added: none if the map or the target has such names itself."""
    if target is None:
        return 0
    named = [*target.slots, *target.entries, *(name for each in given.rules for name in (each.source, each.target))]
    return 0 if any(map(leading_modules, named)) else shared_modules(checkpoint.entries)
