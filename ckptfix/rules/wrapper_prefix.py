"""KEY102 wrapper-prefix: keys that begin with `module.`, as data-parallel wrappers save them.

## What it finds
A leading `module.`, once or repeated, left by DataParallel, DistributedDataParallel or AveragedModel; of the latter
also its own counter `n_averaged`. With a target: every key that the target wants without the prefix. Without one: a
file in which every key has it.

## Why it matters
`load_state_dict` reports every key twice, as missing and as unexpected (`Unexpected key(s) in state_dict:
"module.conv1.weight"`).

## Fix safety
Safe where every key has the prefix, or where the target wants the key without it in the same shape. A submodule that is
really named `module` stays: the target has it, or other keys stand beside it. Half-prefixed files are told apart from
such models only by a target; without one they are reported and left alone.

## Example
`module.conv1.weight` becomes `conv1.weight`; `_metadata` moves along.

## Sources
pytorch#3805; `torch/nn/parallel/data_parallel.py`, `torch/optim/swa_utils.py`. Cutting by text instead of by segment
turns `module.backbone_module.blocks` into `backbone_blocks` (HumanBench#12)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckptfix.checkpoint import Checkpoint, TensorSpec
from ckptfix.finding import Applicability, Context, Drop, Finding, Fix, Level, Rule, rule
from ckptfix.rules.wrappers import colliding, leading_modules, renames, without_first
from ckptfix.target import Target

COUNTER = "n_averaged"


@rule("KEY102", "wrapper-prefix")
def wrapper_prefix(rule: Rule, context: Context) -> Iterator[Finding]:
    """Take leading ``module.`` segments off."""
    checkpoint, target = context.checkpoint, context.target
    counter = COUNTER if _is_counter(checkpoint) and (target is None or COUNTER not in target.slots) else None
    keys = [key for key in checkpoint.entries if key != counter]
    new = _by_shared_prefix(keys) if target is None else _by_target(checkpoint, keys, target)
    new = {key: name for key, name in new.items() if key != name}
    if not new:
        if target is None and (halves := _half_prefixed(keys)):
            yield rule.finding(
                Level.WARNING,
                f"{len(halves)} keys begin with `module.` while others of the same modules do not",
                keys=tuple(halves),
                remedy="name the model with --model or --like: only it can tell which names are right",
            )
        return
    message = f"{len(new)} keys begin with the wrapper prefix `module.`"
    clash = colliding(checkpoint.entries, new)
    if clash:
        yield rule.finding(
            Level.ERROR,
            f"{message}, and without it two keys would both be {clash}",
            keys=tuple(new),
            remedy="remove one of the two sets of weights",
        )
        return
    drops = (Drop(counter),) if counter is not None else ()
    if drops:
        message += ", and AveragedModel's counter n_averaged stands beside them"
    yield rule.finding(Level.ERROR, message, keys=tuple(new), fix=Fix((*renames(new), *drops), Applicability.SAFE))


def _is_counter(checkpoint: Checkpoint) -> bool:
    """Whether ``n_averaged`` is AveragedModel's: a single integer at the top."""
    entry = checkpoint.entries.get(COUNTER)
    return isinstance(entry, TensorSpec) and entry.numel == 1 and entry.dtype == "int64"


def _by_shared_prefix(keys: list[str]) -> Mapping[str, str]:
    """Without a target: as many ``module.`` as every single key has."""
    shared = min((leading_modules(key) for key in keys), default=0)
    return {key: without_first(key, shared) for key in keys} if shared else {}


def _by_target(checkpoint: Checkpoint, keys: list[str], target: Target) -> Mapping[str, str]:
    """With a target: each key as the target wants it; the prefix that all keys share goes everywhere, if it helps any
    key.
    """
    confirmed: dict[str, str] = {}
    for key in keys:
        if key in target.slots or key in target.entries:
            continue
        for count in range(1, leading_modules(key) + 1):
            name = without_first(key, count)
            if _wants(checkpoint, key, target, name):
                confirmed[key] = name
                break
    if not confirmed or not all(leading_modules(key) for key in keys):
        return confirmed
    # Every key has the prefix: those that the target does not know (another head) follow the rest, so that their names
    # can be compared.
    cuts = {len(key.split(".")) - len(name.split(".")) for key, name in confirmed.items()}
    if len(cuts) != 1 or any(key in target.slots for key in keys):
        return confirmed
    (cut,) = cuts
    return {key: confirmed.get(key, without_first(key, min(cut, leading_modules(key)))) for key in keys}


def _wants(checkpoint: Checkpoint, key: str, target: Target, name: str) -> bool:
    entry = checkpoint.entries[key]
    return name in target.entries or (isinstance(entry, TensorSpec) and target.accepts(name, entry.shape))


def _half_prefixed(keys: list[str]) -> list[str]:
    """Keys with the prefix whose module stands there without it too: ``module.bn1.weight`` beside ``bn1.bias``."""
    plain = {key.rpartition(".")[0] for key in keys if not leading_modules(key)} - {""}
    return [
        key
        for key in keys
        if leading_modules(key) and without_first(key, leading_modules(key)).rpartition(".")[0] in plain
    ]
