"""OPT102 unreadable-optimizer-state: the optimizer's state holds objects that a repaired file cannot hold as they are.

## What it finds
Moments that a class makes of several tensors, as quantised optimizers have them, and other objects with tensors in the
state of an optimizer; also such as an earlier version of ckptfix took apart into plain data. And options of its groups
that are objects of a class or functions: an enum, a configuration.

## Why it matters
As plain data they do not load into any optimizer, and nothing says so before the training goes on. Options take the
place of those of the script: an optimizer that compares its method with a member of an enum goes on with another one.

## Fix safety
The moments of torchao's 4-bit, 8-bit and fp8 optimizers are carried bit for bit in a `.pth`, which is a note:
`torch.load` reads the file with `weights_only=True` after `import torchao.optim`. Those of bitsandbytes are plain
tensors and need nothing. There is no fix for other classes: `--drop-optimizer` leaves the optimizer out, and
`--keep-optimizer` keeps its state as plain data.

## Example
`optimizer.state[0].exp_avg` is a `torchao.optim.subclass_8bit.OptimState8bit`: codes, scales and a map of 256 values.

## Sources
https://github.com/pytorch/ao/tree/main/torchao/optim; `torch/_tensor.py` (`_rebuild_from_type_v2`)."""

from __future__ import annotations

from collections.abc import Iterator

from ckptfix.core.finding import Finding, Level, Remedy, counted
from ckptfix.core.objects import Opaque, holds_tensors
from ckptfix.maps.optimizer_states import Optimizer, optimizers_of
from ckptfix.reading.weights.quantized_modules import composed_class, is_low_bit_moment
from ckptfix.rules.rule import Context, Rule
from ckptfix.writing.plain import has_plain_form


def unreadable_optimizer_state(rule: Rule, context: Context) -> Iterator[Finding]:
    """Name the classes in the state of optimizers that the file has now, and had when it was opened."""
    was = {} if context.before is None else {one.name: one for one in optimizers_of(context.before)}
    for optimizer in optimizers_of(context.checkpoint):
        classes = dict.fromkeys((*_classes(was.get(optimizer.name, optimizer)), *_classes(optimizer)))
        carried = [name for name in classes if is_low_bit_moment(name) and not _is_taken_apart(optimizer)]
        others = [name for name in classes if name not in carried]
        if carried:
            yield rule.finding(
                Level.NOTE,
                f"{optimizer.label} has moments of {', '.join(carried)}, which are carried as they are: "
                f"torch.load reads them with weights_only=True after `import {carried[0].partition('.subclass_')[0]}`",
            )
        options = _options(was.get(optimizer.name, optimizer))
        found = [
            ("state", others, counted(len(optimizer.ids), "parameter"), "it does not load"),
            ("options", list(dict.fromkeys(options.values())), ", ".join(options), "they go"),
        ]
        for what, named, where, outcome in found:
            if not named or context.settings.format == "safetensors":
                continue
            yield rule.finding(
                Level.ERROR,
                f"{optimizer.label} has {what} of {', '.join(named)} ({where}), which a file for weights_only=True "
                f"holds as plain data only: {outcome} into an optimizer",
                evidence={"classes": named},
                remedies=(
                    Remedy.of("leaves it out: training continues with new moments", drop_optimizer=True),
                    Remedy.of("keeps it as plain data", keep_optimizer=True),
                ),
                is_accepted=context.settings.keep_optimizer,
            )


def _options(optimizer: Optimizer) -> dict[str, str]:
    """Return the options of groups that have no plain form of their own, with their classes."""
    options = ((name, value) for group in optimizer.groups for name, value in group.items())
    return {name: str(getattr(value, "cls", value)) for name, value in options if not has_plain_form(value)}


def _classes(optimizer: Optimizer) -> Iterator[str]:
    """Yield the classes of the objects in the rows that have tensors in them."""
    for number in optimizer.ids:
        for value in optimizer.row(number).values():
            if name := composed_class(value):
                yield name
            elif isinstance(value, Opaque) and holds_tensors(value):
                yield str(value.cls)


def _is_taken_apart(optimizer: Optimizer) -> bool:
    """Return whether the objects were made plain data when the file was written."""
    rows = (optimizer.row(number) for number in optimizer.ids)
    return any(isinstance(value, dict) and composed_class(value) for row in rows for value in row.values())
