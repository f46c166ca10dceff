"""FIT102 unexpected-key: a key that the target has no place for.

## What it finds
Keys of the file that the target does not want, after the rules on names and buffers.

## Why it matters
A strict load fails with `Unexpected key(s) in state_dict`. Such keys belong to a part that the target lacks, such as a
decoder or an auxiliary head, or the file belongs to another model.

## Fix safety
Unsafe: `--unsafe-fixes` drops learned values. It is not suggested, and the report says what to do instead, if

- the keys may be the missing ones in another layout (fused or split projections, stacked experts, `weight_norm` on only
  one side);
- they are a LoRA that was never merged: they are the trained part, and have to be merged first;
- they are the statistics that a policy normalises its inputs with: without them it runs but behaves differently;
- no key of the file fits the target: it is the wrong model, or the wrong state_dict of the file.

## Example
    ckptfix repair googlenet.pth --model my_models:googlenet_without_aux --unsafe-fixes
    # - aux1.fc1.weight

## Sources
- https://pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.load_state_dict"""

import re
from collections.abc import Iterator

from msgspec.structs import replace

from ckptfix.core.buffers import has_statistics
from ckptfix.core.checkpoint import value_at
from ckptfix.core.edits import Drop
from ckptfix.core.finding import NAME, Applicability, Blocks, Finding, Fix, Level, Remedy, advise, counted
from ckptfix.core.target import Target
from ckptfix.core.wording import KEEP_STATISTICS
from ckptfix.reading.foreign.weightless import is_of_training
from ckptfix.reading.weights.prefixed_sets import copied_under, sets_of
from ckptfix.rules.fil101_several_state_dicts import choice, choice_of_copies
from ckptfix.rules.leftovers import NAME_THE_MODEL, are_flat, is_of_another_model, other_layout
from ckptfix.rules.rule import Context, Rule

# Segments in the keys of low-rank adapters, next to the layers that they change or around them.
_ADAPTER = re.compile(r"(^|[._])(lora|hada|lokr)_\w|(^|\.)base_layer\.")

_MERGE = "merge the adapter first, by its configuration or with the library that made it, and repair the result"
_MERGE_INTO_BASE = "merge an adapter into its model: ckptfix repair MODEL_FILE --adapter ADAPTER"


def _of_adapter(keys: list[str]) -> tuple[Remedy, ...]:
    """Return what to do with an adapter, inside its base or on its own; empty if the keys are not an adapter's."""
    if not any(map(_ADAPTER.search, keys)):
        return ()
    return advise(_MERGE if any(".base_layer." in key for key in keys) else _MERGE_INTO_BASE)


def unexpected_key(rule: Rule, context: Context, target: Target) -> Iterator[Finding]:
    """List the keys that the target has no place for."""
    checkpoint = context.checkpoint
    members = value_at(checkpoint.root, checkpoint.container)
    apart = [str(key) for key, value in members.items() if is_of_training(value)] if isinstance(members, dict) else []
    if apart and context.settings.format != "safetensors":
        yield rule.finding(
            Level.NOTE,
            f"{', '.join(apart)} among the keys of the weights are kept: remove them before load_state_dict",
            evidence={"places": apart},
        )
    unexpected = [key for key in checkpoint.entries if key not in target.slots and key not in target.entries]
    if not unexpected:
        return
    numel = sum(checkpoint.specs[key].numel for key in unexpected if key in checkpoint.specs)
    evidence = {"numel": numel, "of": sum(spec.numel for spec in checkpoint.specs.values())}
    if len(unexpected) == len(checkpoint.entries) and not are_flat(unexpected):
        others = (Remedy.of("uses another state_dict of the file", weights=NAME),) if checkpoint.candidates[1:] else ()
        yield rule.finding(
            Level.ERROR,
            f"nothing in the file belongs to {target.label}: {counted(len(unexpected), 'key')} unknown to it",
            keys=unexpected,
            evidence=evidence,
            remedies=_of_adapter(unexpected) or choice(sets_of(checkpoint.specs)) or (*NAME_THE_MODEL, *others),
            blocks=Blocks.FILLING,
        )
        return
    copies = copied_under(checkpoint.entries)
    is_copy = bool(copies) and all(key.startswith(copies) for key in unexpected)
    hidden = "" if is_copy else _MERGE if any(map(_ADAPTER.search, unexpected)) else other_layout(context, target)
    drops = Fix.unsafe(map(Drop, unexpected))
    yield rule.finding(
        Level.ERROR,
        f"{counted(len(unexpected), 'key')} that the target does not have",
        keys=unexpected,
        evidence=evidence,
        # Keys that hold the model's weights in another form must not be dropped along with the rest.
        fix=replace(drops, applicability=Applicability.DISPLAY_ONLY) if hidden else drops,
        remedies=choice_of_copies(checkpoint.entries)
        if is_copy
        else advise(hidden)
        if hidden
        else NAME_THE_MODEL
        if is_of_another_model(checkpoint, target)
        else (*advise(KEEP_STATISTICS) * has_statistics(unexpected), Remedy.of("drops them", unsafe_fixes=True)),
        blocks=Blocks.FILLING if hidden else Blocks.NOTHING,
    )
