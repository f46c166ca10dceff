"""FIT101 missing-key: a key that the target wants but the file lacks.

## What it finds
Keys that are still missing after every other rule: a head that was left out, a part that the file's model did not have,
or the wrong file. The message gives their share of the target by number of elements, and a tensor of the same module
that may be the missing one under another name.

## Why it matters
A strict load fails with `Missing key(s) in state_dict`. A non-strict load leaves them at random values and says so only
in its return value, so the results are wrong without any error.

## Fix safety
Safe if the file has the whole module as a separate set of weights (`generator` next to `model`): the set is joined with
the rest under the model's names, and also stays where it is.

Unsafe otherwise, and only on request. `--fill target` takes the model's own initial values (random, from `--seed`),
`--fill FILE` takes those of another checkpoint under the same key with the same shape. The report lists what was filled
with its numel, and does not count it as coverage. Initial values are untrained, and the exit code is 1; it is 0 with
those of another checkpoint.

Nothing is filled if no key of the file belongs to the target. The vector `weight_v` of spectral_norm is not filled
either if `weight_u` is stored: they belong together and scale the weights.

## Example
    ckptfix repair backbone.pth --model my_models:classifier --fill target
    # + head.weight  float32[10, 512]  target

## Sources
- https://github.com/microsoft/torchgeo/issues/4036 (a mismatch that strict=False swallowed)
- https://pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.load_state_dict"""

from collections.abc import Collection, Iterable, Iterator

from msgspec.structs import replace

from ckptfix.core.buffers import COUNTED_SINCE, NUM_BATCHES_TRACKED, split_key
from ckptfix.core.checkpoint import Checkpoint, value_at
from ckptfix.core.edits import Edit, Fill, Tie
from ckptfix.core.finding import FILE, Blocks, Finding, Fix, Level, Remedy, advise, counted
from ckptfix.core.spec import TensorSpec
from ckptfix.core.target import Target
from ckptfix.core.wording import first_names
from ckptfix.rules.leftovers import (
    IN_FLAT,
    NAME_THE_MODEL,
    is_of_another_model,
    is_singular,
    numel_of_parameters,
    other_layout,
    untrained,
)
from ckptfix.rules.rule import Context, Rule

_ELSEWHERE = advise("do not fill them: the file may have them in another form")

_SINGULAR = advise(
    "do not fill them: a vector that does not match the stored `_u` scales the weights wrongly; load with "
    "strict=False and run the model once in training mode, which makes spectral_norm compute `_v`"
)


def missing_key(rule: Rule, context: Context, target: Target) -> Iterator[Finding]:
    """List what is missing; fill it if the user asks for that, and report what was filled separately."""
    filled: list[str] = []
    unfilled: list[str] = []
    edits: list[Edit] = []
    parts = {fill.key: fill for fills in parts_of(context.checkpoint, target).values() for fill in fills}
    joined: list[Edit] = []
    for group in _missing(context, target):
        if (part := next((parts[key] for key in group if key in parts), None)) is not None:
            joined += [part, *(Tie(key, part.key) for key in group if key != part.key)]
            continue
        fill = _fill(group, context, target)
        if fill is None:
            unfilled.extend(group)
            continue
        filled.extend(group)
        edits.append(fill)
        edits.extend(Tie(key, fill.key) for key in group if key != fill.key)
    if joined:
        keys = [edit.key for edit in joined if isinstance(edit, (Fill, Tie))]
        extent, evidence = _extent(keys, target)
        said = f"{extent}, which the file has in a separate set of weights"
        yield rule.finding(Level.ERROR, said, keys=keys, evidence=evidence, fix=Fix.safe(joined))
    if filled:
        extent, evidence = _extent(filled, target)
        yield rule.finding(
            Level.ERROR,
            f"{extent}, filled from {_origin(context)}",
            keys=filled,
            evidence=evidence,
            fix=Fix.requested(edits),
        )
    if unfilled:
        extent, evidence = _extent(unfilled, target)
        apart = _apart(unfilled, context.checkpoint)
        hidden = other_layout(context, target)
        yield rule.finding(
            Level.ERROR,
            extent,
            keys=unfilled,
            evidence=evidence,
            remedies=advise(
                f"the file has them in separate sets ({first_names(apart)}): load each into the module with its name"
            )
            if apart
            else (advise(hidden) if hidden == IN_FLAT else _ELSEWHERE)
            if hidden
            else tuple(_remedies(unfilled, context, target)),
            blocks=Blocks.FILLING if apart or hidden else Blocks.NOTHING,
        )


def _apart(keys: Collection[str], checkpoint: Checkpoint) -> list[str]:
    """Return the other sets of the file that belong to one module each: `decoder` has `decoder.fc.weight`."""
    found = []
    for each in checkpoint.candidates:
        members = value_at(checkpoint.root, each.path) if each.path != checkpoint.container else None
        if isinstance(members, dict) and each.path:
            names = {f"{each.path[-1]}.{key}" for key, entry in members.items() if isinstance(entry, TensorSpec)}
            found += [each.name] * (not names.isdisjoint(keys))
    return found


def parts_of(checkpoint: Checkpoint, target: Target) -> dict[str, list[Fill]]:
    """Return the fills that complete the state_dict from other sets of weights, by the names of these: the set
    `generator` with `0.weight`, next to `model`, if the model has all of it as `generator.0.weight`."""
    if not checkpoint.container or any(key.startswith(f"{checkpoint.container[-1]}.") for key in target.slots):
        return {}  # nothing shows which of the sets the other ones complete
    found: dict[str, list[Fill]] = {}
    for each in checkpoint.candidates:
        members = checkpoint.members(each) if each.path and each.path != checkpoint.container else {}
        fills = [
            Fill(f"{each.path[-1]}.{key}", entry.dtype, entry.shape, "part", donor_key=f"{each.name}:{key}")
            for key, entry in members.items()
            if isinstance(entry, TensorSpec)
        ]
        if fills and all(fill.key in target.slots and target.accepts(fill.key, fill.shape) for fill in fills):
            found[each.name] = fills
    return found


def _missing(context: Context, target: Target) -> Iterator[tuple[str, ...]]:
    """Yield the missing keys, tied ones together. A key whose twin is in the file is left to the rule on ties."""
    checkpoint = context.checkpoint
    uncounted = context.settings.is_for_torch_before(COUNTED_SINCE)
    seen: set[str] = set()
    for key in (*target.slots, *sorted(target.entries)):
        if key in checkpoint.entries or key in seen or (uncounted and split_key(key)[1] == NUM_BATCHES_TRACKED):
            continue
        group = target.tie_of.get(key, (key,))
        seen.update(group)
        if not any(twin in checkpoint.specs and target.accepts(twin, checkpoint.specs[twin].shape) for twin in group):
            yield tuple(twin for twin in group if twin not in checkpoint.entries)


def _fill(group: tuple[str, ...], context: Context, target: Target) -> Fill | None:
    """Return the fill for the first key of a tied group from the user's source; None if nothing fits."""
    key = group[0]
    slot = target.slots.get(key)
    entries = context.checkpoint.entries
    if slot is None or context.settings.fill is None or is_singular(key, entries):
        return None
    if entries and entries.keys().isdisjoint(target.slots.keys() | target.entries):
        return None  # nothing in the file belongs to the target: the result would consist of fills only
    if context.settings.fill == "target":
        if target.initial is None or slot.shape is None:
            return None
        return Fill(key, slot.dtype, slot.shape, "target")
    stored = context.donor.specs if context.donor else {}
    for name in group:
        if name in stored and stored[name].has_data and target.accepts(key, stored[name].shape):
            return Fill(key, stored[name].dtype, stored[name].shape, "donor", donor_key=name)
    return None


def _extent(keys: list[str], target: Target) -> tuple[str, dict[str, int]]:
    """Return the share of the target that the keys are, in words and as evidence. Tied keys count once."""
    parameters, gone = numel_of_parameters(target), set(keys)
    numel = sum(parameters[key] for key in parameters if not gone.isdisjoint(target.names[key]))
    total = sum(parameters.values())
    share = f"{100 * numel / total:.3g} % of the target's parameters" if numel else "none of them a parameter"
    return f"{counted(len(keys), 'key')} missing, {share}", {"parameters": numel, "of": total}


def _origin(context: Context) -> str:
    fill = context.settings.fill
    if fill != "target":
        return str(fill)
    # A model in memory has the values that it has, whatever the seed.
    is_seeded = context.target is not None and context.target.is_deferred
    return "the model's initialisation" + (f" (seed {context.settings.seed})" if is_seeded else "")


def _remedies(keys: list[str], context: Context, target: Target) -> Iterator[Remedy]:
    """Yield what to do about keys that were not filled, given what was asked for."""
    fill = context.settings.fill
    if any(is_singular(key, context.checkpoint.entries) for key in keys):
        yield from _SINGULAR
    elif is_of_another_model(context.checkpoint, target):
        yield from NAME_THE_MODEL
    elif fill is not None and fill != "twin" and (fill != "target" or target.initial is not None):
        yield Remedy.of(f"{_origin(context)} does not have them in the target's shape")
    else:
        yield from fillings(keys, context.checkpoint, target)
        if words := _embedding_for(keys, context.checkpoint, target):
            yield from advise(f"if {words} is tied to it in the file's model, build yours with tied weights, too")


def _embedding_for(keys: list[str], checkpoint: Checkpoint, target: Target) -> str:
    """Return the only word embedding with the shape of the only missing weight; empty if there is none."""
    shape = target.slots[keys[0]].shape if keys[1:] == [] and keys[0] in target.slots else None
    alike = [key for key, spec in checkpoint.specs.items() if spec.shape == shape]
    if len(alike) != 1 or shape is None or len(shape) != 2 or shape[0] <= shape[1]:
        return ""
    from ckptfix.values.roles import is_embedding  # imported late: few checks need it

    return alike[0] if is_embedding(alike[0]) else ""


def fillings(keys: Iterable[str], checkpoint: Checkpoint, target: Target, **options: object) -> Iterator[Remedy]:
    """Yield the sources for some keys: the model, with what then stays untrained, or another checkpoint."""
    if target.initial is not None:
        price = untrained(checkpoint, target)
        lost = tuple((key, price[key]) for key in keys if key in price)
        what = "untrained initial values" if lost else "own values for these buffers"
        yield replace(Remedy.of(f"takes the model's {what}", **options, fill="target"), untrained=lost)
    yield Remedy.of("takes them from another checkpoint", **options, fill=FILE)
