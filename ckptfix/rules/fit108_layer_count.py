"""FIT108 layer-count: a stack of equal layers whose number differs between file and target.

## What it finds
Layers with the same tensors of the same shapes, numbered from 0 (`encoder.layer.0.…`, `blocks.11.…`), of which the file
has more or fewer than the target. Stacks of unequal layers, like the stages of a ResNet, are left to the rules on
missing and unexpected keys.

## Why it matters
A strict load fails with `Missing key(s)` or `Unexpected key(s)`. The model is another variant, or was made shallower
(distillation, pruning) or deeper (repeated layers), starting from chosen layers of the file.

## Fix safety
Unsafe, and only with `--adapt depth=LAYERS`, which lists the file's layer for each layer of the model, such as
`depth=0-5,8-11` or `depth=0,0,1,1,2,2`. Values stay bit for bit, but the layers were not trained in this combination. A
layer listed twice is copied, and one that is not listed is dropped. `depth@encoder.*=0-5` applies only to stacks below
that path. Without `--adapt`, `--unsafe-fixes` drops the last layers that the model lacks, and `--fill` fills those that
the file lacks: that is a note.

## Example
    ckptfix repair bert.pth --model my_models:bert_6_layers --adapt depth=0,2,4,6,8,10
    # rename 80 keys, drop 96 keys

## Sources
- https://github.com/huggingface/transformers-research-projects/tree/main/distillation (every second layer)
- https://arxiv.org/abs/2312.15166 (SOLAR: layers repeated)"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ckptfix.core.adaptations import DEPTH, IDLE, Adaptation, adaptation, chosen
from ckptfix.core.buffers import layers_of
from ckptfix.core.edits import Adapt, Drop, Edit, Rename
from ckptfix.core.finding import Blocks, Finding, Fix, Level, Placeholder, Remedy, counted
from ckptfix.core.spec import TensorSpec
from ckptfix.core.target import Target
from ckptfix.errors import Opt, UsageError
from ckptfix.rules.rule import Context, Rule

LayerShapes = Mapping[str, tuple[int, ...] | None]  # the shapes of a layer's tensors, by the rest of their keys


class Stack(NamedTuple):
    """A path with numbered layers below it, and their number in the file and in the target."""

    path: str
    old: int
    new: int


def layer_count(rule: Rule, context: Context, target: Target) -> Iterator[Finding]:
    """Report the stacks; drop, move and copy layers if the user asks for that."""
    file = _stacks({key: spec.shape for key, spec in context.checkpoint.specs.items()})
    model = _stacks({key: slot.shape for key, slot in target.slots.items()})
    given = {text: each for text in context.settings.adapt if (each := adaptation(text)).name == DEPTH}
    used = []
    for path, (old, layer) in file.items():
        new, wanted = model.get(path, (old, layer))
        if new == old or wanted != layer:
            continue
        stack = Stack(path, old, new)
        asked = chosen(DEPTH, f"{path}.", (), [*given.values()])
        used.append(asked)
        edits = tuple(_edits(stack, _layers(asked, stack), context.checkpoint.specs)) if asked else ()
        is_settled = context.settings.unsafe_fixes if new < old else bool(context.settings.fill)
        what = "moved" if edits else "the last ones are dropped" if new < old else "the last ones are filled"
        yield rule.finding(
            Level.NOTE if is_settled and not edits else Level.ERROR,
            f"{counted(old, 'layer')} of `{path}` in the file and {new} in the model"
            f"{f', {what}' if edits or is_settled else ''}",
            evidence={"file": old, "model": new},
            fix=Fix.requested(edits) if edits else None,
            remedies=(
                Remedy.of(
                    "starts the model with these layers of the file, or others",
                    adapt=Placeholder(f"depth={_spread(stack)}"),
                ),
            ),
            blocks=Blocks.NOTHING if is_settled or edits else Blocks.FILLING,
        )
    for text, each in given.items():
        if each not in used:
            words = f"{text} fits no layers: no stack of equal layers has another depth"
            yield rule.finding(Level.NOTE, words, evidence={IDLE: [text]})


def _spread(stack: Stack) -> str:
    """Return the value of ``depth`` that spreads the file's layers evenly over the model's."""
    return ",".join(str(layer * stack.old // stack.new) for layer in range(stack.new))


def _stacks(shapes: Mapping[str, tuple[int, ...] | None]) -> dict[str, tuple[int, LayerShapes]]:
    """Return the number of layers and the tensors of one layer, by path, for stacks whose layers are all alike."""
    found: dict[str, dict[str, dict[str, tuple[int, ...] | None]]] = defaultdict(lambda: defaultdict(dict))
    for key, shape in shapes.items():
        for path, number, rest in layers_of(key):
            found[path][number][rest] = shape
    stacks: dict[str, tuple[int, LayerShapes]] = {}
    for path, layers in found.items():
        first = layers.get("0")
        if first is not None and all(layers.get(str(n)) == first for n in range(len(layers))):
            stacks[path] = (len(layers), first)
    return stacks


def _layers(asked: Adaptation, stack: Stack) -> tuple[int, ...]:
    """Return the file's layer for each layer of the model. Raises ``UsageError`` if their number is wrong."""
    layers = asked.layers()
    if len(layers) != stack.new or max(layers) >= stack.old:
        raise UsageError(
            Opt("adapt", asked.text),
            f" names {counted(len(layers), 'layer')} up to {max(layers)}; {stack.path} has {stack.old} in the file, "
            f"from 0, and {stack.new} in the model: give ",
            Opt("adapt", asked.with_recipe(_spread(stack))),
        )
    return layers


def _edits(stack: Stack, layers: tuple[int, ...], specs: Mapping[str, TensorSpec]) -> Iterator[Edit]:
    """Yield the edits for one stack: the first use of a layer keeps or moves it, and every other one copies it."""
    first = {old: old if layers[old : old + 1] == (old,) else layers.index(old) for old in layers}
    for key, spec in specs.items():
        number, rest = next(((int(at), rest) for path, at, rest in layers_of(key) if path == stack.path), (-1, ""))
        uses = [new for new, old in enumerate(layers) if old == number]
        if number >= 0 and not uses:
            yield Drop(key)
        for new in uses:
            name = f"{stack.path}.{new}.{rest}"
            if new != first[number]:
                yield Adapt(name, key, DEPTH, spec.dtype, spec.shape, spec.shape)
            elif name != key:
                yield Rename(key, name)
