"""BUF104 transient-buffer: buffers that one release saves and the next does not.

## What it finds

Position ids, index tables, masks, rotary frequencies, metric states and their like, which a model works out from
its own configuration, where the file has one that the target does not want, or lacks one that it does. Also running
statistics of an InstanceNorm that does not track them, in files from before torch 0.4.0.

## Why it matters

Whether such a buffer is saved changes between releases of a library. A strict load then fails over a tensor that
carries no learned value: `Missing key(s): "embeddings.position_ids"`, or the same as unexpected, or `Unexpected
running stats buffer(s)`.

## Fix safety

Safe. A buffer is dropped where the target has one of the same name that it does not save, or has none at all and
the name is known for one of these. It is filled only from the model's own initialisation, which is not random here,
and only under a known name. A buffer that the target wants is kept as stored, whatever its name: ESM's `inv_freq`
differs from a fresh one. InstanceNorm statistics are dropped only where the file is older than 0.4.0, as evaluation
did not use them then.

## Example

    ckptfix repair bert.bin --model my_models:bert
    # - embeddings.position_ids

## Sources

- https://github.com/huggingface/transformers/issues/6882, https://github.com/huggingface/transformers/issues/24921
- https://github.com/huggingface/transformers/pull/24576 (ESM)
- https://github.com/pytorch/pytorch/blob/main/torch/nn/modules/instancenorm.py (`_load_from_state_dict`)
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptfix.buffers import NUM_BATCHES_TRACKED, TRANSIENT, is_transient, split_key
from ckptfix.checkpoint import Checkpoint
from ckptfix.finding import Applicability, Context, Drop, Fill, Finding, Fix, Level, Rule, counted, rule
from ckptfix.target import BUFFER, Target


@rule("BUF104", "transient-buffer")
def transient_buffer(rule: Rule, context: Context) -> Iterator[Finding]:
    """Drops or fills buffers that the target can work out for itself."""
    if context.target is None:
        return
    checkpoint, target = context.checkpoint, context.target
    if stale := [key for key in checkpoint.specs if _is_stale_instance_norm(key, checkpoint, target)]:
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(stale), 'running statistic')} that InstanceNorm tracked before torch 0.4.0 only",
            keys=tuple(stale),
            fix=Fix(tuple(Drop(key) for key in stale), Applicability.SAFE),
        )
    if extra := [key for key in checkpoint.specs if _is_extra(key, checkpoint, target)]:
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(extra), 'buffer')} too many: this model does not save what it works out for itself",
            keys=tuple(extra),
            evidence={"known": {leaf: TRANSIENT[leaf] for leaf in _leaves(extra) if leaf in TRANSIENT}},
            fix=Fix(tuple(Drop(key) for key in extra), Applicability.SAFE),
        )
    if fills := list(_fills(checkpoint, target)):
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(fills), 'buffer')} missing that the model works out for itself",
            keys=tuple(fill.key for fill in fills),
            fix=Fix(tuple(fills), Applicability.SAFE),
        )


def _leaves(keys: list[str]) -> list[str]:
    return sorted({split_key(key)[1] for key in keys})


def _is_extra(key: str, checkpoint: Checkpoint, target: Target) -> bool:
    """Whether the target does not want a stored buffer and can do without its values."""
    if key in target.slots or key in target.entries:
        return False
    spec = checkpoint.specs[key]
    return key in target.transient or (is_transient(key, spec.shape) and not spec.is_parameter)


def _is_stale_instance_norm(key: str, checkpoint: Checkpoint, target: Target) -> bool:
    """Whether a key holds a running statistic that InstanceNorm saved before 0.4.0 and does not track in the target.

    Later files have a version in ``_metadata`` or a counter; theirs were in use: to drop them would change the results.
    """
    head, leaf = split_key(key)
    module = head.removesuffix(".")
    return (
        leaf in {"running_mean", "running_var"}
        and key not in target.slots
        and "InstanceNorm" in (target.modules or {}).get(module, "")
        and "version" not in (checkpoint.metadata or {}).get(module, {})
        and head + NUM_BATCHES_TRACKED not in checkpoint.entries
    )


def _fills(checkpoint: Checkpoint, target: Target) -> Iterator[Fill]:
    """Buffers of a known name that the target wants, the file lacks, and a fresh model has."""
    if target.initial is None:
        return
    for key, slot in target.slots.items():
        if slot.kind != BUFFER or slot.shape is None or key in checkpoint.entries:
            continue
        if is_transient(key, slot.shape):
            yield Fill(key, slot.dtype, slot.shape, "target")
