"""FIL104 lost-extras: what is beside the weights and does not fit into the format to be written.

## What it finds
Members of the container that safetensors cannot carry: tensors outside of the state_dict, such as those of an optimizer
or of a second set of weights. Numbers, texts, lists and dicts are carried in the header, and ckptfix restores them.
Entries of the state_dict itself that are not tensors but hold some: the packed weight and bias of a quantised layer, an
`_extra_state`.

## Why it matters
The new file is whole as far as the weights go, but training cannot be resumed from it: momentum and second moments
would begin anew. Without an entry of the state_dict it is not whole: a strict load fails. That is an error, and no file
is written.

## Fix safety
There is no fix, and nothing in the source changes: `--format pth` keeps everything. A note: leaving the optimizer
out is what most conversions want.

## Example
`{"state_dict": …, "optimizer": …, "epoch": 90}` written as safetensors keeps `epoch` and leaves `optimizer` out.

## Sources
https://github.com/huggingface/safetensors#format: one flat table of tensors, and text beside it."""

from __future__ import annotations

from collections.abc import Iterator

from ckptfix.core.finding import Blocks, Finding, Level, Remedy, counted
from ckptfix.core.objects import holds_tensors
from ckptfix.core.wording import first_names
from ckptfix.rules.rule import Context, Rule


def lost_extras(rule: Rule, context: Context) -> Iterator[Finding]:
    """Name what a safetensors file will not have."""
    if context.settings.format != "safetensors":
        return
    from ckptfix.writing.safetensors import lost_extras as places_lost

    lost = places_lost(context.checkpoint)
    if weights := tuple(place for place in lost if holds_tensors(context.checkpoint.entries.get(place))):
        yield rule.finding(
            Level.ERROR,
            f"safetensors cannot carry {counted(len(weights), 'entry')} of the state_dict with unnamed tensors, and a "
            "strict load would miss them",
            keys=weights,
            remedies=(Remedy.of("keeps them", format="pth"),),
            blocks=Blocks.WRITING,
        )
    if lost := [place for place in lost if place not in weights]:
        yield rule.finding(
            Level.NOTE,
            f"safetensors cannot carry {first_names(lost)}, and the output will not have it",
            evidence={"places": lost},
            remedies=(Remedy.of("keeps it", format="pth"),),
        )
