"""FIT101 missing-key: a key that the target wants and the file does not have.

## What it finds

Keys that are still missing after every other rule: a head that was left out, a part that the file's model did not
have, or the wrong file. The message states their share of the target by number of elements.

## Why it matters

A strict load fails with `Missing key(s) in state_dict`. A load that is not strict leaves them at random values and
says so only in its return value, and the results are wrong without any error.

## Fix safety

Nothing is filled unasked, nor where no key of the file belongs to the target. `--fill target` takes the model's own
initial values (random, from `--seed`), `--fill FILE` takes those of another checkpoint under the same key with the same
shape. Whatever was filled is listed in the report with its numel and does not count as coverage.

## Example

    ckptfix repair backbone.pth --model my_models:classifier --fill target
    # + head.weight  float32[10, 512]  target

## Sources

- https://github.com/microsoft/torchgeo/issues/4036 (a mismatch that strict=False swallowed)
- https://pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.load_state_dict
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptfix.core.buffers import COUNTED_SINCE, NUM_BATCHES_TRACKED, split_key
from ckptfix.core.edits import Edit, Fill, Tie
from ckptfix.core.finding import FILE, Applicability, Blocks, Finding, Fix, Level, Remedy, advise, counted
from ckptfix.core.target import PARAMETER, Target
from ckptfix.rules.other_layout import NAME_THE_MODEL, is_of_another_model, other_layout, untrained
from ckptfix.rules.rule import Context, Rule, rule

_ELSEWHERE = advise("fill nothing in: the file may have them in another form")


@rule("FIT101", "missing-key")
def missing_key(rule: Rule, context: Context) -> Iterator[Finding]:
    """Lists what is missing; fills it where that was asked for, and counts what was filled apart from the rest."""
    if context.target is None:
        return
    target = context.target
    filled: list[str] = []
    unfilled: list[str] = []
    edits: list[Edit] = []
    for group in _missing(context, target):
        fill = _fill(group, context, target)
        if fill is None:
            unfilled.extend(group)
            continue
        filled.extend(group)
        edits.append(fill)
        edits.extend(Tie(key, fill.key) for key in group if key != fill.key)
    if filled:
        extent, evidence = _extent(filled, target)
        yield rule.finding(
            Level.ERROR,
            f"{extent}, filled from {_origin(context)}",
            keys=tuple(filled),
            evidence=evidence,
            fix=Fix(tuple(edits), Applicability.UNSAFE, asked=True),
        )
    if unfilled:
        extent, evidence = _extent(unfilled, target)
        is_there = bool(other_layout(context.checkpoint, target))
        yield rule.finding(
            Level.ERROR,
            extent,
            keys=tuple(unfilled),
            evidence=evidence,
            remedies=_ELSEWHERE if is_there else tuple(_remedies(unfilled, context, target)),
            blocks=Blocks.FILLING if is_there else Blocks.NOTHING,
        )


def _missing(context: Context, target: Target) -> Iterator[tuple[str, ...]]:
    """The missing keys, tied ones together. A key whose twin is in the file is left to the rule on ties."""
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
    """The fill for the first key of a tied group from where the user said, None where there is nothing that fits."""
    key = group[0]
    slot = target.slots.get(key)
    if slot is None or context.settings.fill is None or _is_of_another_model(context, target):
        return None
    if context.settings.fill == "target":
        if target.initial is None or slot.shape is None:
            return None
        return Fill(key, slot.dtype, slot.shape, "target")
    stored = context.donor.specs if context.donor else {}
    for name in group:
        if name in stored and stored[name].has_data and target.accepts(key, stored[name].shape):
            return Fill(key, stored[name].dtype, stored[name].shape, "donor", donor_key=name)
    return None


def _is_of_another_model(context: Context, target: Target) -> bool:
    """Whether nothing of the file is for the target: then a fill would make a model of fillings alone."""
    entries = context.checkpoint.entries
    return bool(entries) and entries.keys().isdisjoint(target.slots.keys() | target.entries)


def _extent(keys: list[str], target: Target) -> tuple[str, dict[str, int]]:
    """How much of the target the keys are, in words and in figures. Tied keys count once."""
    first = {key: target.tie_of.get(key, (key,))[0] for key in (*target.slots, *keys)}
    parameters = {name for key, name in first.items() if key in target.slots and target.slots[key].kind == PARAMETER}
    missing = {first[key] for key in keys} & parameters
    numel = sum(target.slots[name].numel for name in missing)
    total = sum(target.slots[name].numel for name in parameters)
    share = f"{100 * numel / total:.3g} % of the target's parameters" if numel else "none of them a parameter"
    return f"{counted(len(keys), 'key')} missing, {share}", {"parameters": numel, "of": total}


def _origin(context: Context) -> str:
    fill = context.settings.fill
    return f"the model's initialisation (seed {context.settings.seed})" if fill == "target" else str(fill)


def _remedies(keys: list[str], context: Context, target: Target) -> Iterator[Remedy]:
    """What to do about keys that were not filled, given what was asked for already."""
    fill = context.settings.fill
    if is_of_another_model(context.checkpoint, target):
        yield from NAME_THE_MODEL
    elif fill is not None and fill != "twin" and (fill != "target" or target.initial is not None):
        yield Remedy(text=f"{_origin(context)} does not have them in the shape that the target wants")
    else:
        if target.initial is not None:
            price = untrained(context.checkpoint, target)
            lost = tuple((key, price[key]) for key in keys if key in price)
            yield Remedy((("fill", "target"),), "takes the model's initial values, which are untrained", lost)
        yield Remedy((("fill", FILE),), "takes them from another checkpoint")
