"""BUF104 transient-buffer: buffers that one release saves and the next does not.

## What it finds
Position ids, index tables, masks, rotary frequencies, metric states and other buffers that a model computes from its
configuration, if the file has one that the target does not want, or lacks one that it wants. Also running statistics of
an InstanceNorm that does not track them, in files from before torch 0.4.0.

## Why it matters
Whether such a buffer is saved changes between releases of a library. A strict load then fails over a tensor that
carries no learned value: `Missing key(s): "embeddings.position_ids"`, or the same as unexpected, or `Unexpected
running stats buffer(s)`. A model for other images or longer texts has them in another shape: `size mismatch`.

## Fix safety
Safe, with one exception:

- A buffer is dropped if the target has it but does not save it, or lacks it and the name is known for such a buffer.
- A buffer is filled only from the model's own initialisation, which is not random here, and only under a known name. A
  buffer of another shape is replaced in the same way, or by the one in the `--like` file.
- A buffer that the target wants in the stored shape is kept: ESM's `inv_freq` differs from a fresh one.
- InstanceNorm statistics are dropped only if the file is older than 0.4.0, because evaluation did not use them then.

Unsafe, with a warning, if the target computes different values for a float buffer such as `inv_freq`. The model may
then be configured differently (base or scaling of its rotary embedding) and give different results. `rope.freqs` of
Meta's Llama is compared with the `inv_freq` of a model of transformers; without a model, its values have to be powers
of one number. Masks, counters and indices are not compared, and nothing is compared with `--no-values`, or if the model
has more than 4 GB of weights.

## Example
    ckptfix repair bert.bin --model my_models:bert
    # - embeddings.position_ids

## Sources
- https://github.com/huggingface/transformers/issues/6882, https://github.com/huggingface/transformers/issues/24921
- https://github.com/huggingface/transformers/pull/24576 (ESM)
- https://github.com/pytorch/pytorch/blob/main/torch/nn/modules/instancenorm.py (`_load_from_state_dict`)"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptfix.core.buffers import NUM_BATCHES_TRACKED, TRANSIENT, is_rope, is_transient, split_key
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.edits import Drop, Fill
from ckptfix.core.finding import Finding, Fix, Level, Remedy, counted
from ckptfix.core.lazy import torch
from ckptfix.core.spec import TensorSpec
from ckptfix.core.target import BUFFER, Target
from ckptfix.maps.doubts import is_metas
from ckptfix.rules.rule import AFFORDABLE, Context, Rule

# The known transient buffers whose values depend on more than a size.
_ROTARY = frozenset(
    {"inv_freq", "cos_cached", "sin_cached", "freqs_cos", "freqs_sin", "freqs_cis_real", "freqs_cis_imag"}
)


def transient_buffer(rule: Rule, context: Context, target: Target) -> Iterator[Finding]:
    """Drop or fill buffers that the target can compute itself."""
    checkpoint = context.checkpoint

    def safe(edits: Sequence[Fill | Drop], noun: str, what: str, **evidence: object) -> Finding:
        keys = tuple(dict.fromkeys(edit.key for edit in edits))
        fix = Fix.safe(edits)
        return rule.finding(Level.ERROR, f"{counted(len(keys), noun)} {what}", keys, evidence, fix)

    if stale := [Drop(key) for key in checkpoint.specs if _is_stale_instance_norm(key, checkpoint, target)]:
        yield safe(stale, "running statistic", "that InstanceNorm tracked only before torch 0.4.0")
    # The size of Meta's frequencies is that of a head, which decides the order of the rows in its layers.
    is_unmoved = is_metas(checkpoint.entries) and not is_metas(target.slots)
    extra = [
        key for key in checkpoint.specs if is_superfluous(key, checkpoint, target) and not (is_unmoved and is_rope(key))
    ]
    if different := _different(extra, context, target):
        extra = [key for key in extra if key not in different]
        yield rule.finding(
            Level.WARNING,
            f"{counted(len(different), 'buffer')} with values that differ from those this model computes",
            keys=different,
            evidence={"largest_difference": different},
            fix=Fix.unsafe(map(Drop, different)),
            remedies=(
                Remedy.of("first check that the model is configured like the saved one"),
                Remedy.of("drops them", unsafe_fixes=True),
            ),
        )
    if extra:
        leaves = sorted({split_key(key)[1] for key in extra} & TRANSIENT.keys())
        what = "unexpected: this model computes them and does not save them"
        yield safe([*map(Drop, extra)], "buffer", what, known={leaf: TRANSIENT[leaf] for leaf in leaves})
    known = list(_known(target))
    # Buffers of a model of another size, such as another window.
    resized = [fill for fill in known if (spec := checkpoint.specs.get(fill.key)) and spec.shape != fill.shape]
    if resized:
        shapes = {
            fill.key: {"file": list(checkpoint.specs[fill.key].shape), "target": list(fill.shape)} for fill in resized
        }
        edits: list[Fill | Drop] = [*(Drop(fill.key) for fill in resized), *resized]
        yield safe(edits, "buffer", "of another shape, which the model computes", shapes=shapes)
    fills = [fill for fill in known if fill.key not in checkpoint.entries]
    if fills and target.initial is not None:
        yield safe(fills, "buffer", "missing, which the model computes")


def is_superfluous(key: str, checkpoint: Checkpoint, target: Target) -> bool:
    """Return whether the target neither wants a stored buffer nor needs its values."""
    if key in target.slots or key in target.entries:
        return False
    spec = checkpoint.specs[key]
    return key in target.transient or (is_transient(key, spec.shape) and not spec.is_parameter)


def _different(extra: list[str], context: Context, target: Target) -> dict[str, float]:
    """Return the superfluous buffers whose values differ from the model's own, with the largest difference of each.

    The tolerance is at least 1e-3, because the cosine of a large angle depends on the device that computed it."""
    comparable = [
        key
        for key in extra
        if (key in target.transient or is_rope(key)) and _is_computed(key, context.checkpoint.specs[key])
    ]
    is_large = target.initial is not None and target.nbytes > AFFORDABLE
    if not comparable or not context.settings.values or is_large:
        return {}
    from ckptfix.bytes.checksums import is_sound  # imported late: only this reads values

    specs = context.checkpoint.specs
    # A buffer that fails its checksum shows nothing about the model's configuration.
    comparable = [key for key in comparable if all(map(is_sound, specs[key].storages))]
    different = {}
    for key in comparable:
        stored = context.checkpoint.read(key).detach().cpu()
        own = _frequencies(stored, context, target) if is_rope(key) else context.initial.get(key)
        if own is None or own.shape != specs[key].shape or not own.is_floating_point() or not own.numel():
            continue
        tolerance = max(1e-3, 4 * torch.finfo(stored.dtype).eps, 4 * torch.finfo(own.dtype).eps)
        if not torch.allclose(stored.double(), own.double(), rtol=tolerance, atol=tolerance, equal_nan=True):
            different[key] = float((stored.double() - own.double()).abs().max())
    return different


def _frequencies(stored: torch.Tensor, context: Context, target: Target) -> torch.Tensor:
    """Return the model's frequencies in place of Meta's ``rope.freqs``; without a model, the powers of one number that
    end like the stored ones."""
    for key in target.transient:
        if key.endswith("inv_freq") and key in context.initial and context.initial[key].shape == stored.shape:
            return context.initial[key]
    last = max(len(stored) - 1, 1)
    return (stored[-1].double() ** (1 / last)) ** torch.arange(len(stored))


def _is_computed(key: str, spec: TensorSpec) -> bool:
    """Return whether a buffer's values follow from the configuration and matter: floats, no mask or counter."""
    leaf = split_key(key)[1]
    is_dense_float = DTYPES[spec.dtype].is_float and DTYPES[spec.dtype].packed == 1 and spec.storage is not None
    return (
        is_dense_float and "mask" not in leaf and (leaf in _ROTARY or is_rope(key) or not is_transient(key, spec.shape))
    )


def _is_stale_instance_norm(key: str, checkpoint: Checkpoint, target: Target) -> bool:
    """Return whether a key is a running statistic that InstanceNorm saved before 0.4.0 without using it."""
    head, leaf = split_key(key)
    module = head.removesuffix(".")
    return (
        leaf in {"running_mean", "running_var"}
        and key not in target.slots
        and "InstanceNorm" in (target.modules or {}).get(module, "")
        and "version" not in (checkpoint.metadata or {}).get(module, {})
        and head + NUM_BATCHES_TRACKED not in checkpoint.entries
    )


def _known(target: Target) -> Iterator[Fill]:
    """Yield fills for the known buffers whose values a fresh model or the reference file has."""
    stored = {} if target.reference is None else target.reference.specs
    for key, slot in target.slots.items():
        has_values = target.initial is not None or (key in stored and stored[key].has_data)
        if has_values and slot.kind == BUFFER and slot.shape is not None and is_transient(key, slot.shape):
            yield Fill(key, slot.dtype, slot.shape, "formula")
