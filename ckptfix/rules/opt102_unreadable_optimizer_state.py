"""OPT102 unreadable-optimizer-state: the optimizer's state will not load after the repair.

## What it finds
Moments that a class builds from several tensors, as in quantised optimizers, and other objects with tensors in the
state of an optimizer, including those that an earlier version of ckptfix turned into plain data. Also options of its
groups that are objects or functions: an enum, a configuration. A warning: state of torch's own optimizers without
`step`, which no release of torch adds.

## Why it matters
As plain data they load into no optimizer, and nothing says so until training resumes. Options replace those of the
script: an optimizer that compares its method with an enum member continues with a different method. Without `step`,
`optimizer.load_state_dict`, or with a torch before 1.12 the first step, fails with `KeyError: 'step'`.

## Fix safety
The moments of torchao's 4-bit, 8-bit and fp8 optimizers are copied bit for bit into a `.pth`, which is a note:
`torch.load` reads the file with `weights_only=True` after `import torchao.optim`. Those of bitsandbytes are plain
tensors and need nothing. There is no fix for other classes, and none for steps that were not saved: `--drop-optimizer`
drops the optimizer, and `--keep-optimizer` keeps its state as plain data.

## Example
`optimizer.state[0].exp_avg` is a `torchao.optim.subclass_8bit.OptimState8bit`: codes, scales and a map of 256 values.

## Sources
https://github.com/pytorch/ao/tree/main/torchao/optim; `torch/_tensor.py` (`_rebuild_from_type_v2`);
`torch/optim/adam.py` (`__setstate__`)."""

from collections.abc import Iterator
from typing import Any

from ckptfix.core.finding import Finding, Level, Remedy, counted
from ckptfix.core.objects import Opaque, holds_tensors
from ckptfix.maps.optimizer_states import Optimizer, optimizers_of
from ckptfix.reading.weights.quantized_modules import composed_class, is_low_bit_moment
from ckptfix.rules.opt101_stale_optimizer import KEEP, dropping
from ckptfix.rules.rule import Context, Rule
from ckptfix.writing.plain import has_plain_form

# Options that only torch's own optimizers (and their imitations) have, and the averages that they keep with `step`.
_OF_TORCH = {"amsgrad", "differentiable"}
_AVERAGES = {"exp_avg_sq", "exp_inf", "square_avg", "sum", "prev", "ax"}


def unreadable_optimizer_state(rule: Rule, context: Context) -> Iterator[Finding]:
    """Report the classes in the state of optimizers, in the file now and when it was opened."""
    was = {} if context.before is None else {one.name: one for one in optimizers_of(context.before)}
    for optimizer in optimizers_of(context.checkpoint):
        classes = dict.fromkeys((*_classes(was.get(optimizer.name, optimizer)), *_classes(optimizer)))
        carried = [name for name in classes if is_low_bit_moment(name) and not _is_taken_apart(optimizer)]
        others = [name for name in classes if name not in carried]
        if carried:
            module = carried[0].partition(".subclass_")[0]
            yield rule.finding(
                Level.NOTE,
                f"{optimizer.label} has moments of {', '.join(carried)}, which are copied unchanged: torch.load reads "
                f"them with weights_only=True after `import {module}`",
                evidence={"import": module},
            )
        if context.settings.format == "safetensors":
            continue  # safetensors omits the optimizer
        options = _options(was.get(optimizer.name, optimizer))
        for what, named, where, outcome in (
            ("state", others, counted(len(optimizer.ids), "parameter"), "it will not load into an optimizer"),
            ("options", [*dict.fromkeys(options.values())], ", ".join(options), "an optimizer accepts that as its own"),
        ):
            if named:
                yield rule.finding(
                    Level.ERROR,
                    f"{optimizer.label} has {what} of {', '.join(named)} ({where}), which a file for "
                    f"weights_only=True can hold only as plain data: {outcome}",
                    evidence={"classes": named},
                    remedies=(*dropping(context), Remedy.of("keeps it as plain data", keep_optimizer=True)),
                    is_accepted=context.settings.keep_optimizer,
                )
        if uncounted := list(_without_step(optimizer)):
            yield rule.finding(
                Level.WARNING,
                f"{optimizer.label} has no `step` for {counted(len(uncounted), 'parameter')}: torch's optimizers fail "
                "with KeyError: 'step'",
                evidence={"parameters": [str(number) for number in uncounted]},
                remedies=(*dropping(context), KEEP),
                is_accepted=context.settings.keep_optimizer,
            )


def _options(optimizer: Optimizer) -> dict[str, str]:
    """Return the groups' options that have no plain form, with their classes."""
    options = ((name, value) for group in optimizer.groups for name, value in group.items())
    return {name: str(getattr(value, "cls", value)) for name, value in options if not has_plain_form(value)}


def _classes(optimizer: Optimizer) -> Iterator[str]:
    """Yield the classes of the objects with tensors in the optimizer's rows."""
    for number in optimizer.ids:
        for value in optimizer.row(number).values():
            if name := composed_class(value):
                yield name
            elif isinstance(value, Opaque) and holds_tensors(value):
                yield str(value.cls)


def _without_step(optimizer: Optimizer) -> Iterator[Any]:
    """Yield the parameters whose averages lack the step count that torch's optimizers need."""
    for group in optimizer.groups:
        if "step" not in group and group.keys() & _OF_TORCH:  # apex has one step per group
            rows = ((number, optimizer.row(number)) for number in group["params"])
            yield from (number for number, row in rows if "step" not in row and row.keys() & _AVERAGES)


def _is_taken_apart(optimizer: Optimizer) -> bool:
    """Return whether the objects became plain data when the file was written."""
    rows = (optimizer.row(number) for number in optimizer.ids)
    return any(isinstance(value, dict) and composed_class(value) for row in rows for value in row.values())
