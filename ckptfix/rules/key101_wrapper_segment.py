"""KEY101 wrapper-segment: keys with a segment that a wrapper added.

## What it finds
Path segments that only wrappers add: `_orig_mod` (torch.compile), `_fsdp_wrapped_module` (FSDP),
`_checkpoint_wrapped_module` (activation checkpointing) and `_forward_module` (Lightning, DeepSpeed), at any depth, in
any order, any number of times. FSDP and activation checkpointing clean the keys that they save but leave the segments
in the module paths of `_metadata`; that is a note.

## Why it matters
`load_state_dict` compares whole keys. A model that is not wrapped in the same way reports every key as missing and
every key as unexpected; with `strict=False` it silently loads nothing at all. Under a stale path of `_metadata`, torch
does not find a module's version and treats it as saved before versions existed.

## Fix safety
Safe: torch reserves these names, whole segments are removed, and no value changes. If two keys would become one,
nothing is renamed. If the target itself has such segments, KEY103 matches the two namings instead. A universal
checkpoint made of DeepSpeed's ranks (`--format universal`) keeps them, because the run looks for its own names.

## Example
`module._orig_mod.layer1.0.weight` becomes `module.layer1.0.weight`, and KEY102 removes the rest.

## Sources
timm PR#2003, pytorch#117399, ray#43594; `torch/_dynamo/eval_frame.py`, `torch/distributed/fsdp/_common_utils.py`,
`torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py`."""

from collections.abc import Iterator, Mapping

from ckptfix.core.edits import RenameModule, renames
from ckptfix.core.finding import Finding, Fix, Level, counted
from ckptfix.core.metadata import rename_metadata
from ckptfix.core.wrappers import colliding, has_wrapper_segment, segments_in, without_segments
from ckptfix.rules.fil101_several_state_dicts import choice_of_copies
from ckptfix.rules.rule import Context, Rule


def wrapper_segment(rule: Rule, context: Context) -> Iterator[Finding]:
    """Remove wrapper segments from every key, and from the paths of ``_metadata``."""
    target = context.target
    if context.keeps_wrappers or (target is not None and any(has_wrapper_segment(key) for key in target.slots)):
        return
    entries = context.checkpoint.entries
    new = without_segments(entries)
    clash = colliding(entries, new) if new else None
    if new:
        found = segments_in(new)
        message = f"{counted(len(new), 'key')} with the wrapper segment {', '.join(found)}"
        yield rule.finding(
            Level.ERROR,
            f"{message}, but without it two keys would both be {clash}" if clash else message,
            keys=new,
            evidence={} if clash else {"segments": found},
            fix=None if clash else Fix.safe(renames(new)),
            remedies=choice_of_copies(entries) if clash else (),
        )
    if not clash and (target is None or not any(has_wrapper_segment(path) for path in target.modules or ())):
        yield from _rows(rule, context, new)


def _rows(rule: Rule, context: Context, new: Mapping[str, str]) -> Iterator[Finding]:
    """Report the paths of ``_metadata`` that still have a segment after the keys lost theirs."""
    metadata = context.checkpoint.metadata
    if new:
        metadata = rename_metadata(metadata, {key: new.get(key, key) for key in context.checkpoint.entries})
    rows = without_segments(metadata or ())
    if rows:
        yield rule.finding(
            Level.NOTE,
            f"{counted(len(rows), 'module path')} of _metadata with the wrapper segment "
            f"{', '.join(segments_in(rows))}, which the keys do not have",
            evidence={"modules": list(rows)},
            fix=Fix.safe(RenameModule(path, to) for path, to in rows.items()),
        )
