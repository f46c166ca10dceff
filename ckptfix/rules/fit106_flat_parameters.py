"""FIT106 flat-parameters: weights that FSDP flattened; the target has their names and shapes.

## What it finds
The flat parameters (`_flat_param`) of FSDP 1 after the ranks of a `LOCAL_STATE_DICT` were merged, and, with
`use_orig_params`, named weights with one dimension. Each flat parameter holds all parameters of the modules below it
that are not in a deeper flat parameter, in the order of `named_parameters()`, tied ones once.

## Why it matters
Only FSDP with the same wrapping and number of GPUs loads such weights.

## Fix safety
Safe with `--model`: the number of elements has to match for each flat parameter, and no value changes. `--like FILE`
needs `--unsafe-fixes`, because a file's keys are not always in model order. If they are sorted, as in safetensors
files, there is no fix: nearly every weight would get another one's values. Named weights are reshaped in both cases. If
the numbers do not match, there is no fix: the target is another model, or is wrapped differently.

## Example
    ckptfix repair output/model_final.rank_0.pth --model my_models:dinov2 -o model.pth
    # blocks.0._flat_param [7087872] → blocks.0.norm1.weight [768], blocks.0.norm1.bias [768], …

## Sources
- https://github.com/facebookresearch/dinov2/issues/487, /544
- https://github.com/pytorch/pytorch/blob/main/torch/distributed/fsdp/_flat_param.py"""

from collections.abc import Iterator

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.edits import Assemble
from ckptfix.core.facts import Kind
from ckptfix.core.finding import Applicability, Blocks, Finding, Fix, Level, advise, counted
from ckptfix.core.parts import Part, full
from ckptfix.core.spec import TensorSpec
from ckptfix.core.target import Target
from ckptfix.reading.folders.rank_shards import FLAT
from ckptfix.rules.rule import Context, Rule


def flat_parameters(rule: Rule, context: Context, target: Target) -> Iterator[Finding]:
    """Take the weights out of flat parameters, and give flattened weights their shapes."""
    checkpoint = context.checkpoint
    edits: list[Assemble] = []
    taken, odd, unordered = [], {}, []
    for flat, names in _held(checkpoint, target).items():
        spec, total = checkpoint.specs[flat], sum(target.slots[name].numel for name in names)
        if total != spec.numel:
            odd[flat] = {"file": spec.numel, "target": total}
            continue
        if len(names) > 1 and _is_sorted(target):
            unordered.append(flat)
            continue
        taken.append(flat)
        start = 0
        for name in names:
            shape = target.slots[name].shape or ()
            stop = start + target.slots[name].numel
            edits.append(Assemble(name, spec.dtype, shape, (Part(flat, ((start, stop),), full(shape), shape),)))
            start = stop
    if edits:
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(edits), 'weight')} flattened into {counted(len(taken), 'parameter')} of FSDP",
            keys=taken,
            fix=Fix(tuple(edits), Applicability.SAFE if target.modules is not None else Applicability.UNSAFE),
        )
    if unordered:
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(unordered), 'flat parameter')} of FSDP in model order, but the target's keys are sorted by "
            "name",
            keys=unordered,
            remedies=advise("name the trained model with --model: its code has the order"),
            blocks=Blocks.FILLING,
        )
    if odd:
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(odd), 'flat parameter')} of FSDP whose number of elements differs from the target's",
            keys=odd,
            evidence={"elements": odd},
            remedies=advise("name the trained model, including the modules that it was wrapped in"),
            blocks=Blocks.FILLING,
        )
    if reshapes := list(_flattened(checkpoint, target)):
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(reshapes), 'weight')} that FSDP flattened to one dimension",
            keys=[edit.key for edit in reshapes],
            fix=Fix.safe(reshapes),
        )


def _held(checkpoint: Checkpoint, target: Target) -> dict[str, list[str]]:
    """Return the names of the target's parameters that each flat parameter holds, in order."""
    flats = {
        key.rpartition(".")[0]: key
        for key, spec in checkpoint.specs.items()
        if key.rpartition(".")[2] in FLAT and len(spec.shape) == 1 and spec.is_contiguous
    }
    held: dict[str, list[str]] = {key: [] for key in flats.values()}
    for names in target.names.values() if flats else ():
        left = (name for name in names if target.slots[name].is_parameter and name not in checkpoint.entries)
        if (name := next(left, None)) is None:  # a buffer, or already in the file
            continue
        above = name
        while above and above not in flats:
            above = above.rpartition(".")[0]
        if above in flats:
            held[flats[above]].append(name)
    return held


def _is_sorted(target: Target) -> bool:
    """Return whether a target file's keys are sorted within each dtype, as writers of safetensors do."""
    by_dtype: dict[str, list[str]] = {}
    for name, slot in target.slots.items():
        by_dtype.setdefault(slot.dtype, []).append(name)
    return target.modules is None and all(names == sorted(names) for names in by_dtype.values())


def _flattened(checkpoint: Checkpoint, target: Target) -> Iterator[Assemble]:
    """Yield a reshape for every weight that has its name, but only one dimension."""
    if not checkpoint.remarked(Kind.FLATTENED):
        return
    for name, slot in target.slots.items():
        spec = checkpoint.entries.get(name)
        if not isinstance(spec, TensorSpec) or slot.shape in (None, spec.shape):
            continue
        if len(spec.shape) == 1 and spec.numel == slot.numel and spec.is_contiguous:
            yield Assemble.reshape(name, spec.dtype, spec.shape, slot.shape or ())
