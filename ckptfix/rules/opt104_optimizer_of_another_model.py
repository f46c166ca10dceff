"""OPT104 optimizer-of-another-model: the optimizer's moments have shapes that no weight has.

## What it finds
An optimizer most of whose moments of two and more dimensions have a shape that no tensor of the file has: the state
of another model, or of this one before it was changed. Moments in one flat tensor do not
count, nor do those next to an object, such as GaLore's, which have fewer rows or columns than their weight (OPT102).

A note if the file has another optimizer that fits: HiFi-GAN saves the generator in a file of its own.

## Why it matters
`optimizer.load_state_dict` compares only the numbers of parameters. If these match, the load succeeds and the first
step fails with `The size of tensor a must match the size of tensor b`, or moments go to the wrong weights.

## Fix safety
There is no fix. `--drop-optimizer` drops the optimizer, and `--keep-optimizer` keeps it unchanged.

## Example
The weights were replaced by those of a wider model, and `optimizer` was copied from the old checkpoint.

## Sources
`torch/optim/optimizer.py` (`load_state_dict`); pytorch#1489."""

from collections.abc import Hashable, Iterator

from msgspec.structs import replace

from ckptfix.core.checkpoint import value_at
from ckptfix.core.finding import Finding, Level
from ckptfix.core.objects import Opaque, tensors_in
from ckptfix.maps.optimizer_states import fits, logical_shape, optimizers_of, values_in
from ckptfix.rules.opt101_stale_optimizer import KEEP, dropping
from ckptfix.rules.rule import Context, Rule


def optimizer_of_another_model(rule: Rule, context: Context) -> Iterator[Finding]:
    """Look for the shape of each moment among the weights of the file as opened."""
    checkpoint = context.before or context.checkpoint
    now = {optimizer.name for optimizer in optimizers_of(context.checkpoint)}
    optimizers = [optimizer for optimizer in optimizers_of(checkpoint) if optimizer.name in now]
    states = {
        id(value_at(checkpoint.root, optimizer.path) if optimizer.is_flat else optimizer.state)
        for optimizer in optimizers
        if optimizer.path[0] not in checkpoint.beside
    }
    tensors = tensors_in([checkpoint.root, dict(checkpoint.entries)], lambda value: id(value) in states)
    shapes = {spec.shape for spec in tensors}
    mismatched: dict[str, Finding] = {}
    for optimizer in optimizers:
        known: dict[Hashable, bool] = {}
        strange: list[list[int]] = []
        matrices = 0
        for row in map(optimizer.row, optimizer.ids):
            kept = {name: shape for name, value in values_in(row) if (shape := logical_shape(value))}
            is_projected = any(isinstance(value, Opaque) and not logical_shape(value) for value in row.values())
            if is_projected or not any(len(shape) > 1 for shape in kept.values()):
                continue
            matrices += 1
            form = tuple(kept.items())
            if form not in known:
                known[form] = any(fits(row, shape) for shape in shapes)
            if not known[form]:
                largest = max(kept.values(), key=len)
                strange.append(list(largest))
        if 2 * len(strange) > matrices:
            mismatched[optimizer.name] = rule.finding(
                Level.WARNING,
                f"{optimizer.label} has moments of {len(strange)} of {matrices} matrices with a shape that no weight "
                "has: it belongs to another model",
                evidence={"shapes without a weight": strange[:8]},
                remedies=(*dropping(context), KEEP),
                is_accepted=context.settings.keep_optimizer,
            )
    # HiFi-GAN saves the generator in another file than both optimizers.
    level = Level.WARNING if len(mismatched) == len(optimizers) else Level.NOTE
    yield from (replace(finding, level=level) for finding in mismatched.values())
