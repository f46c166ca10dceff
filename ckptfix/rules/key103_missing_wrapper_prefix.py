"""KEY103 missing-wrapper-prefix: the target is wrapped, and the file is not, or differently.

## What it finds
Keys that name the same tensor as a key of the target once the segments of wrappers (`module`, `_orig_mod`,
`_fsdp_wrapped_module`, `_checkpoint_wrapped_module`, `_forward_module`) are ignored on both sides; and, if the target
is an AveragedModel and the file is not, its missing counter `n_averaged`.

## Why it matters
A model that was wrapped before loading (DataParallel, torch.compile, activation checkpointing) wants the wrapped names:
`Missing key(s) in state_dict: "module.conv1.weight"`.

## Fix safety
Safe: the target confirms name and shape of at least one key, and a key is renamed only if it is unique on both sides.
The counter is 0, as in a fresh AveragedModel: its next update starts the average anew. Needs a target.

## Example
`layer1.conv.weight` becomes `_orig_mod.layer1._checkpoint_wrapped_module.conv.weight` for a compiled, checkpointed
model.

## Sources
pytorch#3805, pytorch#117399, timm PR#2003."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.edits import Fill, renames
from ckptfix.core.finding import Finding, Fix, Level, counted
from ckptfix.core.spec import TensorSpec
from ckptfix.core.target import Target
from ckptfix.core.wrappers import COUNTER, MODULE, WRAPPER_SEGMENTS, bare, is_counter, two_sets
from ckptfix.rules.rule import Context, Rule


def missing_wrapper_prefix(rule: Rule, context: Context, target: Target) -> Iterator[Finding]:
    """Add the wrapper segments that the target has, and the counter of an AveragedModel."""
    checkpoint = context.checkpoint
    if two_sets(checkpoint.entries):
        return
    new = _new_names(checkpoint, target)
    fills = tuple(_fresh_counters(checkpoint, target, new))
    parts = []
    if new:
        is_bare = all(len(key) < len(goal) for key, goal in new.items())
        how = "without the wrapper segments that" if is_bare else "with different wrapper segments than"
        parts.append(f"{counted(len(new), 'key')} {how} the target's keys have")
    if fills:
        parts.append(f"no counter {COUNTER}, which the target's AveragedModel has")
    if parts:
        yield rule.finding(
            Level.ERROR,
            ", and ".join(parts),
            keys=(*new, *(fill.key for fill in fills)),
            fix=Fix.safe((*renames(new), *fills)),
        )


def _new_names(checkpoint: Checkpoint, target: Target) -> Mapping[str, str]:
    """Return the keys with one prefix for all, if that agrees more than matching names without wrappers."""

    def agreement(new: Mapping[str, str]) -> int:
        return sum(target.accepts(new.get(key, key), spec.shape) for key, spec in checkpoint.specs.items())

    single = _by_bare_names(checkpoint, target)
    shared = _shared_wrappers(key for key in target.slots if not is_counter(key))
    keys = [key for key in checkpoint.entries if not is_counter(key)]
    wholes = [{key: ".".join((*shared[:n], key)) for key in keys} for n in range(1, len(shared) + 1)]
    least = max(agreement(single), agreement({})) + 1
    return max((whole for whole in wholes if agreement(whole) >= least), key=agreement, default=single)


def _shared_wrappers(keys: Iterable[str]) -> list[str]:
    """Return the wrapper segments that all keys begin with, not counting the last segment of a key."""
    shared: list[str] = []
    for parts in zip(*(key.split(".")[:-1] for key in keys), strict=False):
        if len(set(parts)) != 1 or parts[0] not in {MODULE, *WRAPPER_SEGMENTS}:
            break
        shared.append(parts[0])
    return shared


def _by_bare_names(checkpoint: Checkpoint, target: Target) -> Mapping[str, str]:
    """Return the new names of keys for which the target has exactly one, if at least one agrees in shape too."""
    wanted = _by_bare_name((*target.slots, *target.entries))
    present = _by_bare_name(checkpoint.entries)
    new: dict[str, str] = {}
    confirmed = False
    for name, keys in present.items():
        goals = wanted.get(name, [])
        if len(keys) == len(goals) == 1 and keys != goals:
            new[keys[0]] = goals[0]
            entry = checkpoint.entries[keys[0]]
            confirmed |= isinstance(entry, TensorSpec) and target.accepts(goals[0], entry.shape)
    return new if confirmed else {}


def _fresh_counters(checkpoint: Checkpoint, target: Target, new: Mapping[str, str]) -> Iterator[Fill]:
    """Yield the missing counters of AveragedModels that wrap the whole target, if any key of the file belongs to it."""
    names = {new.get(key, key) for key in checkpoint.entries}
    if names.isdisjoint(target.slots):
        return
    for key, slot in target.slots.items():
        inner = key.removesuffix(COUNTER) + MODULE + "."
        is_averages = is_counter(key) and any(other.startswith(inner) for other in target.slots)
        if is_averages and key not in names and slot.numel == 1 and slot.shape is not None:
            yield Fill(key, slot.dtype, slot.shape, "zeros")


def _by_bare_name(keys: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        groups[bare(key)].append(key)
    return groups
