"""BUF101 missing-num-batches-tracked: a BatchNorm without its counter, as before torch 0.4.1.

## What it finds
Modules that have `running_mean` and `running_var` in the file but no `num_batches_tracked`. With a target, only those
whose counter the target wants. Without one, those with version 2 in `_metadata`, and those with the same version as
another norm that has its counter.

In a file without `_metadata`, it finds everything that looks like a BatchNorm. The statistics of a reinforcement
learner do not: they come with a `count`, or no norm in the file has a weight. Nothing is reported if such a file is in
safetensors, in numpy arrays, or has a counter elsewhere: then the norms are frozen, as in detectron2.

## Why it matters
The counter came with torch 0.4.1 and raised the version of BatchNorm in `_metadata` to 2. Torch supplies a missing
counter to a module of version 1 or none; at version 2, and in every reader that compares keys, it is a missing key.

## Fix safety
Safe: a 0-d int64 zero is what torch itself would supply. Only a BatchNorm with `momentum=None` uses it. A stored count
is never touched. Nothing is added under `--for-torch` older than 0.4.1, nor without a target if `_metadata` gives
another version than 2: torchvision's FrozenBatchNorm2d has 1 and detectron2's 3, and a strict load of either refuses
the counter, while torch supplies it to an old BatchNorm.

## Example
    ckptfix repair resnet-2017.pth
    # + bn1.num_batches_tracked  int64[]  zeros

## Sources
- https://github.com/pytorch/pytorch/blob/main/torch/nn/modules/batchnorm.py (`_load_from_state_dict`)
- https://github.com/pytorch/pytorch/issues/110361
- https://github.com/pytorch/vision/blob/main/torchvision/ops/misc.py (`FrozenBatchNorm2d`)"""

from collections.abc import Iterator

from ckptfix.core.buffers import COUNTED_SINCE, NUM_BATCHES_TRACKED, split_key
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.edits import Fill
from ckptfix.core.facts import Kind
from ckptfix.core.finding import Finding, Fix, Level, counted
from ckptfix.rules.rule import Context, Rule

SAFETENSORS = "safetensors"  # a format that came years after the counter, and has no room for `_metadata`
_COUNTING_VERSION = 2  # the version of BatchNorm in `_metadata` that has the counter


def missing_num_batches_tracked(rule: Rule, context: Context) -> Iterator[Finding]:
    """Supply the counter, as torch would."""
    if context.settings.is_for_torch_before(COUNTED_SINCE):
        return
    checkpoint, target = context.checkpoint, context.target
    fills = []
    if target is None:
        fills = [Fill(module + NUM_BATCHES_TRACKED, "int64", (), "zeros") for module in _incomplete(checkpoint)]
    else:
        for module in _uncounted(checkpoint):
            slot = target.slots.get(key := module + NUM_BATCHES_TRACKED)
            if slot is not None and slot.shape is not None:
                fills.append(Fill(key, slot.dtype, slot.shape, "zeros"))
    if not fills:
        return
    fails = sum(_version(checkpoint, split_key(fill.key)[0]) >= _COUNTING_VERSION for fill in fills)
    yield rule.finding(
        Level.ERROR if fails else Level.WARNING,
        f"{counted(len(fills), 'BatchNorm module')} without num_batches_tracked, as saved before torch {COUNTED_SINCE}",
        keys=[fill.key for fill in fills],
        evidence={"modules": len(fills), "strict_load_fails": fails},
        fix=Fix.safe(fills),
    )


def _uncounted(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the modules with a BatchNorm's running statistics but no counter, as prefixes that end with a dot."""
    specs = checkpoint.specs
    for module in _with_leaf(checkpoint, "running_mean"):
        mean, variance = specs[module + "running_mean"], specs.get(module + "running_var")
        is_norm = variance is not None and len(mean.shape) == 1 and mean.shape == variance.shape
        counter = module + NUM_BATCHES_TRACKED
        # A damaged file may have lost a counter that was not zero, with or without a wrapper's prefix.
        is_lost = any(f".{key}".endswith(f".{counter}") for key in checkpoint.lost)
        if is_norm and counter not in checkpoint.entries and not is_lost:
            yield module


def _with_leaf(checkpoint: Checkpoint, name: str) -> list[str]:
    """Return the modules that have a tensor of this name, as prefixes that end with a dot."""
    candidates = [key for key in checkpoint.specs if key.endswith(name)]
    return [module for module, leaf in map(split_key, candidates) if leaf == name]


def _incomplete(checkpoint: Checkpoint) -> list[str]:
    """Return the uncounted modules that are a BatchNorm according to the file."""
    uncounted = list(_uncounted(checkpoint))
    if not uncounted:
        return []
    if not checkpoint.metadata:
        is_numpy = checkpoint.remarked(Kind.NUMPY_WEIGHTS)
        if is_numpy or checkpoint.format == SAFETENSORS or _with_leaf(checkpoint, NUM_BATCHES_TRACKED):
            return []
        has_weights = any(module + "weight" in checkpoint.specs for module in _with_leaf(checkpoint, "running_mean"))
        return [module for module in uncounted if has_weights and module + "count" not in checkpoint.entries]
    counted_versions = {_version(checkpoint, module) for module in _with_leaf(checkpoint, NUM_BATCHES_TRACKED)}
    # A frozen BatchNorm has version 1 or 3 and never a counter, even if BatchNorms of version 2 in the file do.
    versions = {_COUNTING_VERSION} | {version for version in counted_versions if version < _COUNTING_VERSION}
    return [module for module in uncounted if _version(checkpoint, module) in versions]


def _version(checkpoint: Checkpoint, module: str) -> int:
    """Return a module's version in ``_metadata``, 0 if it has none."""
    version = (checkpoint.metadata or {}).get(module.removesuffix("."), {}).get("version")
    return version if isinstance(version, int) else 0
