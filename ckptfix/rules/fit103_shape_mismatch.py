"""FIT103 shape-mismatch: a key with the right name but another shape.

## What it finds
Keys that the file and the target both have, with different shapes, and keys that are not tensors in the file.

## Why it matters
`size mismatch for fc.weight: copying a param with shape …`; `strict=False` does not help. The model differs in its
number of classes, vocabulary, resolution or input channels. Or one side has layers that the other lacks, which shifts
the numbers of a Sequential: then the advice names the missing key with that shape.

## Fix safety
Changes are made only on request, except that leading or trailing axes of one element are added or removed, safely,
because no value moves. That turns a linear layer `[64, 16]` into a 1x1 convolution `[64, 16, 1, 1]`, `[]` into `[1]`,
and the reverse.

`--adapt NAME=RECIPE` resizes a tensor to the model's shape by a library's formula. This is unsafe: the new values were
not trained, so fine-tune the model. The message names the recipes that fit, that of the model's own library first.

- `pos_embed=timm`, `plain`, `dinov2`, `siglip2`, `dpt`, `radio`, `vilt`, `nearest`, `yolos` or `torchvision` resamples
  the position embeddings of images. The grid of patches and the number of extra tokens come from the model, from the
  config.json next to `--like`, or else from the tokens in the file. The file's grid comes from its own config.json, or
  is assumed to be square, or given by hand: `pos_embed=timm:12x24` (`pos_embed=timm:12x24:24x48` with the model's, for
  `--like`). There is no recipe for patches of several frames (ViViT).
- `pos_embed=linear` or `cut` stretches or cuts the positions of texts, rows or columns, and frames; in a table of 514
  rows, as in RoBERTa, the first two stay. A table of sinusoids is not stretched: if the model has a longer one that
  begins with the same rows, that one is taken, which is safe.
- `window_bias=swin`, `beit` or `bilinear` resamples tables of relative positions; their index tables are taken from the
  model. For windows over time, `swin` repeats the image table. `window_bias=levit` is for `attention_biases` (TinyViT,
  LeViT).
- `patch_embed=timm` is for patches of another size, in convolutions over images or videos and in linear layers.
- `in_chans=timm` or `mean` is for images with other channels.
- `vocab=cut`, `pad:mean`, `pad:zeros` or `pad:target` changes embeddings, output layers and their biases together.
- `inflate=mean` or `centre` turns image convolutions into video convolutions.

`pos_embed@visual.*=timm` applies only to keys that match the pattern, which then count as position embeddings whatever
their names. Impossible grids and recipes that do not fit are refused.

`--drop-mismatched` drops the other keys, and `--fill target` or `--fill FILE` replaces them; the report lists these
with their numel. The message says if the shapes are those of a matrix and its transpose. If the axes of all such
tensors are in another order, and only one order gives the target's shapes (spconv 1 has `[3, 3, 3, 16, 32]`, spconv 2
`[32, 3, 3, 3, 16]`), `--unsafe-fixes` reorders them. If other tensors fit in either order, like square matrices among
transposed ones, it is only reported.

## Example
    ckptfix repair imagenet.pth --model my_models:resnet18_10_classes --drop-mismatched --fill target
    # fc.weight  file [1000, 512]  target [10, 512]
    ckptfix repair vit.pth --model my_models:vit_384 --adapt pos_embed=timm
    # adapt 1 key (443 k elements) by pos_embed=timm, 14x14 → 24x24: pos_embed  [1, 197, 768] → [1, 577, 768]

## Sources
- https://github.com/pytorch/pytorch/blob/main/torch/nn/modules/module.py (`_load_from_state_dict`)
- https://github.com/huggingface/pytorch-image-models/blob/main/timm/layers/pos_embed.py
- https://github.com/google-research/vision_transformer/pull/317 (a square root that took 196 positions for 195)"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any

from ckptfix.core.adaptations import DEPTH, HEAD, IDLE, VOCAB, adaptation
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.edits import Adapt, Assemble, Drop, Fill
from ckptfix.core.finding import Blocks, Finding, Fix, Level, Remedy, advise, counted
from ckptfix.core.lazy import torch
from ckptfix.core.parts import Part, Shape, extent, full
from ckptfix.core.spec import TensorSpec
from ckptfix.core.target import Target, grid_of_config
from ckptfix.reading.configs import model_config
from ckptfix.rules.fit101_missing_key import fillings
from ckptfix.rules.leftovers import NAME_THE_MODEL, is_of_another_model, untrained
from ckptfix.rules.misfits import Case, Misfits, adapt_edits, differ_by_ones, of_use, parts_of_ranks, recipes_of
from ckptfix.rules.position_tables import POSITIONS, Pairing
from ckptfix.rules.quantised_layers import wanted_layers
from ckptfix.rules.rule import Context, Rule
from ckptfix.values.adapted_tensors import is_adaptable

_TRANSPOSED = advise(
    "convert the file with the model's code: it stores these tensors transposed, like GPT-2's Conv1D; square tensors "
    "of the same layers fit but may be transposed too"
)

MOST_AXES = 6  # axes of the largest tensor whose orders are tried

# By key: the shape in the file, None for an entry that is not a tensor, and the shape in the target.
Mismatches = dict[str, tuple[Shape | None, Shape]]


def shape_mismatch(rule: Rule, context: Context, target: Target) -> Iterator[Finding]:
    """Show both shapes; adapt or drop the keys if the user asks for that."""
    checkpoint, specs = context.checkpoint, context.checkpoint.specs
    pairs: Mismatches = {}
    reshapes = []
    quantised = wanted_layers(specs, target)  # codes have the shape of their packing
    codes = {key for layer in quantised.values() for key in layer.parts.values()}
    for key, slot in target.slots.items():
        if key not in checkpoint.entries or slot.shape is None or key in codes:
            continue
        spec = specs.get(key)
        if spec is not None and differ_by_ones(spec.shape, slot.shape) and _is_plain(spec):
            reshapes.append(Assemble.reshape(key, spec.dtype, spec.shape, slot.shape))
        elif spec is None or spec.shape != slot.shape:
            pairs[key] = None if spec is None else spec.shape, slot.shape
    if reshapes:
        yield rule.finding(
            Level.WARNING,
            f"{counted(len(reshapes), 'key')} with an extra or missing axis of one element",
            keys=[edit.key for edit in reshapes],
            evidence=_shown({edit.key: (extent(edit.parts[0].box), edit.shape) for edit in reshapes}),
            fix=Fix.safe(reshapes),
        )
    for axes, keys in _turned(pairs, checkpoint, target).items():
        turned = {key: pairs.pop(key) for key in keys}
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(keys), 'tensor')} with axes in another order: the target's axes are "
            f"{', '.join(map(str, axes))} of the file",
            keys=keys,
            evidence=_shown(turned),
            fix=Fix.unsafe(
                Assemble(key, specs[key].dtype, shape, (Part(key, full(specs[key].shape), full(shape), axes=axes),))
                for key, (_, shape) in turned.items()
            ),
            remedies=(Remedy.of("reorders the axes for the target", unsafe_fixes=True),),
            blocks=Blocks.FILLING,
        )
    shapes = {key: (old, new) for key, (old, new) in pairs.items() if old is not None and is_adaptable(specs[key])}
    given = tuple(map(adaptation, context.settings.adapt))
    tensors = {key: spec.shape for key, spec in specs.items()}
    stored = grid_of_config(model_config(checkpoint), tensors) if shapes else None
    fixed = [key for key in shapes if context.settings.values and _is_of_sinusoids(checkpoint, key)]
    if shorter := _of_same_formula(fixed, shapes, context, target):
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(shorter), 'table')} of sinusoids shorter than the target's, which begins with the same rows",
            keys=shorter,
            evidence=_shown({key: shapes[key] for key in shorter}),
            fix=Fix.safe(
                edit
                for key in shorter
                for edit in (Drop(key), Fill(key, target.slots[key].dtype, shapes[key][1], "formula"))
            ),
        )
        for key in shorter:
            del pairs[key], shapes[key]
    known = Misfits(shapes, Pairing(target, tensors, stored, fixed), given).cases()
    known_keys = {key for case in known for key in case.shapes if case.name != HEAD}
    if (parts := parts_of_ranks(shapes)) and VOCAB in {case.name for case in known}:
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(pairs), 'key')} whose shape differs: each has 1/{parts} of the rows or columns",
            keys=pairs,
            evidence=_shown(pairs),
            remedies=advise(
                "if this is a tensor-parallel rank, put the files of all ranks into one folder and name it; otherwise "
                "name the model that the file belongs to"
            ),
            blocks=Blocks.FILLING,
        )
        return
    is_other = is_of_another_model(checkpoint, target, known_keys)
    used = of_use(given, known, {edit.recipe for edit in context.plan.edits if isinstance(edit, Adapt)})
    for case in known:
        edits = adapt_edits(case, given, specs, used)
        if edits or (case.name != HEAD and not is_other):
            for edit in edits:
                pairs.pop(edit.key, None)
            left = {key: pairs.pop(key) for key in case.shapes if key in pairs and case.name != HEAD}
            yield from _case_findings(rule, context, target, case, edits, left)
    for text, asked in zip(context.settings.adapt, given, strict=True):
        if asked.name != DEPTH and asked not in used:
            words = f"{text} fits no key: no tensor of this kind has another shape"
            yield rule.finding(Level.NOTE, words, evidence={IDLE: [text]})
    if pairs:
        heads = tuple(remedy for case in known if case.name == HEAD for remedy in recipes_of(case, target, {}))[:1]
        yield _unknown(rule, context, target, pairs, is_other, heads)


def _shown(pairs: Mapping[str, tuple[Shape | None, Shape]]) -> dict[str, Any]:
    """Return the shapes as a finding's evidence."""
    lists = {key: (None if old is None else list(old), list(new)) for key, (old, new) in pairs.items()}
    return {"shapes": {key: {"file": old, "target": new} for key, (old, new) in lists.items()}}


def _is_of_sinusoids(checkpoint: Checkpoint, key: str) -> bool:
    """Return whether each column of a table is a sine: the two rows around a row sum to a multiple of it."""
    shape = checkpoint.specs[key].shape
    if len(shape) != 2 or shape[0] < _FEWEST_ROWS or not POSITIONS.search(key):
        return False
    table = checkpoint.read(key).double()
    inner, sums = table[1:-1], table[:-2] + table[2:]
    factors = (inner * sums).sum(0) / (inner * inner).sum(0).clamp_min(1e-12)
    return bool((sums - factors * inner).square().mean() < 5e-5 * table.var(0).mean())


def _of_same_formula(
    fixed: Sequence[str], shapes: Mapping[str, tuple[Shape, Shape]], context: Context, target: Target
) -> list[str]:
    """Return the tables of sinusoids that the target has with more rows, beginning with those of the file."""
    longer = [
        key for key in fixed if shapes[key][0][0] < shapes[key][1][0] and shapes[key][0][1:] == shapes[key][1][1:]
    ]
    found = []
    for key in longer:
        own = target.reference.read(key) if target.reference is not None else context.initial.get(key)
        if own is None:
            continue
        table = context.checkpoint.read(key).cpu()
        tolerance = 4 * max(torch.finfo(each.dtype).eps for each in (table, own))
        if torch.allclose(table.double(), own[: len(table)].double(), rtol=0, atol=tolerance):
            found.append(key)
    return found


_FEWEST_ROWS = 8  # of a table in which sinusoids can be recognised


def _case_findings(
    rule: Rule, context: Context, target: Target, case: Case, edits: tuple[Adapt, ...], left: Mismatches
) -> Iterator[Finding]:
    """Yield the findings for a known case: the edits that were asked for, and the recipes for the rest."""
    for recipe in dict.fromkeys(edit.recipe for edit in edits):
        mine = [edit for edit in edits if edit.recipe == recipe]
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(mine), 'key')} adapted to the target's shape by {recipe}: {case.words}",
            keys=[edit.key for edit in mine],
            evidence=_shown({edit.key: (edit.before, edit.shape) for edit in mine}),
            fix=Fix.requested(mine),
        )
    if left:
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(left), 'key')} whose shape differs from the target's: {case.words}",
            keys=left,
            evidence=_shown(left),
            fix=_dropped(left, context),
            remedies=(
                *recipes_of(case, target, untrained(context.checkpoint, target)),
                *fillings(left, context.checkpoint, target, drop_mismatched=True),
            ),
        )


def _turned(pairs: Mismatches, checkpoint: Checkpoint, target: Target) -> dict[tuple[int, ...], list[str]]:
    """Return the keys whose axes are in another order, by that order, if only one order fits all such tensors."""
    found = {}
    for rank in sorted({len(new) for _, new in pairs.values()} & set(range(2, MOST_AXES + 1))):
        alike = {key: (old or (), new) for key, (old, new) in pairs.items() if len(new) == rank}
        orders = [
            axes
            for axes in permutations(range(rank))
            if all(len(old) == rank and tuple(old[axis] for axis in axes) == new for old, new in alike.values())
        ]
        uneven = [old for old, _ in alike.values() if 1 not in old]  # a 1x3 kernel is not a 3x1 kernel
        orders = [axes for axes in orders if uneven and not _mixes_equal(axes, uneven)]
        if (
            len(orders) == 1
            and not any(
                key not in pairs and spec.shape == tuple(spec.shape[axis] for axis in orders[0])
                for key, spec in checkpoint.specs.items()
                if len(spec.shape) == rank and key in target.slots
            )
            and all(_is_plain(checkpoint.specs[key]) and checkpoint.specs[key].per_byte == 1 for key in alike)
        ):
            found[orders[0]] = list(alike)
    return found


def _mixes_equal(axes: tuple[int, ...], shapes: list[Shape]) -> bool:
    """Return whether an order permutes adjacent axes of equal size, which shapes cannot tell apart."""
    runs = [[0]]
    for axis in range(1, len(axes)):
        if all(shape[axis] == shape[axis - 1] for shape in shapes):
            runs[-1].append(axis)
        else:
            runs.append([axis])
    places = [sorted(map(axes.index, run)) for run in runs]
    return any(
        places[at][-1] - places[at][0] == len(run) - 1 and [axes[place] for place in places[at]] != run
        for at, run in enumerate(runs)
    )


def _unknown(
    rule: Rule, context: Context, target: Target, pairs: Mismatches, is_other: bool, heads: tuple[Remedy, ...]
) -> Finding:
    turned = sum(_is_transposed(*pair) for pair in pairs.values())
    timed = sum(len(new) == 4 and (*old[:2], *old[3:]) == new for old, new in pairs.values() if old)
    # If most are transposed, the others may be too, and a head of another size is not a reason to fill them.
    is_turned = 2 * turned > sum(len(new) > 1 for _, new in pairs.values())
    moved = _moved(pairs, context.checkpoint, target)
    remedies = (
        _TRANSPOSED
        if is_turned
        else advise(f"{moved}: one side has layers that the other lacks; name the model that the file belongs to")
        if moved
        else NAME_THE_MODEL
        if is_other
        else (
            *fillings(pairs, context.checkpoint, target, drop_mismatched=True),
            *heads,
            Remedy.of("name the model that the file belongs to"),
        )
    )
    return rule.finding(
        Level.ERROR,
        f"{counted(len(pairs), 'key')} whose shape differs from the target's"
        f"{f', {turned} of them transposed' if turned else ''}"
        f"{f', {timed} of them over time too, an axis that inflate adds and no recipe removes' if timed else ''}",
        keys=pairs,
        evidence=_shown(pairs),
        fix=_dropped(pairs, context),
        remedies=remedies,
        blocks=Blocks.FILLING if is_turned or moved or is_other else Blocks.NOTHING,
    )


def _moved(pairs: Mismatches, checkpoint: Checkpoint, target: Target) -> str:
    """Return, as a clause, which matrix of another shape may be one that is missing elsewhere; empty if none."""
    missing = {slot.shape: key for key, slot in target.slots.items() if key not in checkpoint.entries}
    for key, (shape, _) in pairs.items():
        if shape is not None and len(shape) > 1 and shape in missing:
            return f"{key} of the file has the shape of the missing {missing[shape]}"
    return ""


def _dropped(keys: Iterable[str], context: Context) -> Fix | None:
    asked = context.settings.drop_mismatched
    return Fix.requested(map(Drop, keys)) if asked else None


def _is_plain(spec: TensorSpec) -> bool:
    """Return whether a reshape changes nothing else, unlike with a quantizer, which refers to an axis by number."""
    return spec.layout == "strided" and spec.quantizer is None and spec.is_contiguous


def _is_transposed(old: Shape | None, new: Shape) -> bool:
    """Return whether two shapes differ only in the order of axes. A vector in two dimensions has no order."""
    return old is not None and old != new and sorted(old) == sorted(new) and sum(size > 1 for size in old) > 1
