"""FIT105 tie: one tensor with two names, only one of which is in the file.

## What it finds
Keys that the target ties to another key, such as `lm_head.weight` to `embed_tokens.weight`, if the file has only one of
them, or both with different values. Values are compared only for equal dtypes, and not with `--no-values`.

## Why it matters
Some writers omit the twin, because safetensors refuses to store a tensor twice. A strict load reports a missing key,
and a non-strict load may leave the head at random values if the tie is broken. If the file has two different tensors
for the model's one, a load silently overwrites one with the other: the model was trained untied, or one is stale.

## Fix safety
Safe: both names are one tensor in the target, so the stored one has the values of both. They share their storage in the
result. If both keys are in the file, they are left unchanged: nothing shows which of two different ones is right.

## Example
    ckptfix repair gpt2.safetensors --model my_models:gpt2
    # lm_head.weight = transformer.wte.weight

## Sources
- https://huggingface.co/docs/safetensors/torch_shared_tensors
- https://github.com/huggingface/safetensors/issues/202
- https://github.com/pytorch/pytorch/blob/main/torch/nn/modules/module.py (`load_state_dict` copies module by module)"""

from collections.abc import Iterable, Iterator

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.edits import Tie
from ckptfix.core.finding import Finding, Fix, Level, advise, counted
from ckptfix.core.spec import TensorSpec
from ckptfix.core.target import Target
from ckptfix.reading.boxes import have_same_bytes
from ckptfix.rules.rule import Context, Rule


def tie(rule: Rule, context: Context, target: Target) -> Iterator[Finding]:
    """Supply a tied key from its twin, and report twins that differ."""
    # The file may have one tensor for two that the target has untied: then the file's own model has the tie.
    groups = (*target.ties, *(context.source_model.ties if context.source_model is not None else ()))
    if ties := list({edit.key: edit for edit in _ties(context.checkpoint, target, groups)}.values()):
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(ties), 'key')} missing, tied to a key that is in the file",
            keys=[edit.key for edit in ties],
            evidence={"twins": {edit.key: edit.to for edit in ties}},
            fix=Fix.safe(ties),
        )
    if not context.settings.values:
        return
    if unequal := list(_unequal(context.checkpoint, target)):
        kept = {keys[-1]: list(keys[:-1]) for keys in unequal}
        yield rule.finding(
            Level.ERROR,
            f"{counted(sum(map(len, unequal)), 'key')} with different values that are one tied tensor in the target",
            keys=[key for keys in unequal for key in keys],
            evidence={"overwritten_by": kept},
            remedies=advise(f"a load keeps only {', '.join(kept)}; drop the other keys, or untie the model"),
        )


def _ties(checkpoint: Checkpoint, target: Target, groups: Iterable[tuple[str, ...]]) -> Iterator[Tie]:
    """Yield a tie for every missing key of a group if the file has a fitting member of the group."""
    for group in groups:
        stored = [key for key in group if key in checkpoint.specs and target.accepts(key, checkpoint.specs[key].shape)]
        if stored:
            wanted = (key for key in group if key not in checkpoint.entries and key in target.slots)
            yield from (Tie(key, stored[0]) for key in wanted)


def _unequal(checkpoint: Checkpoint, target: Target) -> Iterator[tuple[str, ...]]:
    """Yield the stored keys of every group whose values differ, in the model's order: a load keeps the last."""
    for group in target.ties:
        specs = {key: checkpoint.specs[key] for key in group if key in checkpoint.specs}
        comparable = [spec for spec in specs.values() if spec.storage is not None and spec.quantizer is None]
        if any(not _is_equal(comparable[0], other, checkpoint.path) for other in comparable[1:]):
            yield tuple(specs)


def _is_equal(one: TensorSpec, other: TensorSpec, path: str) -> bool:
    """Return whether two tensors hold the same bytes. Tensors that differ in shape or dtype count as equal."""
    if one.view == other.view or (one.dtype, one.shape) != (other.dtype, other.shape):
        return True
    return have_same_bytes(one, other, path)
