"""FIL104 lost-extras: data besides the weights that the output format cannot hold.

## What it finds
Members of the container that safetensors cannot hold: tensors outside the state_dict, for example those of an optimizer
or a second set of weights. Numbers, strings, lists and dicts are stored in the header, and ckptfix restores them. Also
entries of the state_dict that contain tensors: the packed weight and bias of a quantised layer, an `_extra_state`.

A `.pth` file has no place for the text in the header of a safetensors file: the settings of a training (`ss_…`), a
description of quantised weights (torchao).

## Why it matters
The new file has all weights, but training cannot be resumed from it: momentum and second moments would start from zero.
Without an entry of the state_dict, a strict load fails. That is an error, and no file is written.

## Fix safety
There is no fix, and the source is unchanged; the other format keeps everything. This is only a note, because most
conversions drop the optimizer on purpose.

## Example
`{"state_dict": …, "optimizer": …, "epoch": 90}` written as safetensors keeps `epoch` and drops `optimizer`.

## Sources
https://github.com/huggingface/safetensors#format: one flat table of tensors, plus text."""

from collections.abc import Iterator

from ckptfix.core.facts import Kind
from ckptfix.core.finding import Blocks, Finding, Level, Remedy, counted
from ckptfix.core.objects import holds_tensors
from ckptfix.core.wording import first_names
from ckptfix.rules.rule import Context, Rule

_USUAL = ("format",)  # what safetensors files of all libraries say


def lost_extras(rule: Rule, context: Context) -> Iterator[Finding]:
    """Report what the format of the output cannot hold."""
    if context.settings.format == "pth":
        names = [fact.place for fact in context.checkpoint.remarked(Kind.NOTE) if fact.place not in _USUAL]
        if names:
            yield rule.finding(
                Level.NOTE,
                f"a .pth file has no place for {counted(len(names), 'text')} in the header ({first_names(names)}), and "
                "the output will not have them",
                evidence={"header": names},
                remedies=(Remedy.of("keeps them", format="safetensors"),),
            )
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
