"""OPT101 stale-optimizer: the optimizer's state no longer matches the weights.

## What it finds
An optimizer in the file whose parameters this repair drops, adds, reorders, reshapes, splits, fuses, replaces or moves
to another group, or whose stored names it changes. With `--model`, also an optimizer whose parameters are in another
order than the model's. A rename moves nothing in an optimizer that numbers its parameters, unless a script may list
them by name and the new names sort differently. Buffers are not in an optimizer.

`check` warns if the optimizer could not follow once mismatched keys are dropped or filled.

## Why it matters
`torch.optim` identifies parameters by position. After two keys are dropped, `optimizer.load_state_dict` raises
`loaded state dict contains a parameter group that doesn't match the size of optimizer's group`. If the number is right
and the order is not, momentum and second moments silently go to the wrong weights.

## Fix safety
The state follows the weights: it moves to the new position or group, is reshaped, split, fused and permuted with them,
and is dropped with them. These parameters start without a state, and are listed:

- new ones, and those whose values did not come from this training;
- those whose state cannot be split exactly: factored (Adafactor), blockwise (8-bit), or with unequal step counts;
- a few layers that KEY106 renamed only by shape, to entirely different names. Use `--rename OLD=NEW` or
  `--rename-layers` to say that they are the same layers.

Safe if the file has the names: `param_names` (torch 2.6, an optimizer made of `named_parameters()`), or names instead
of numbers (FSDP, `torch.distributed.checkpoint`).

Unsafe if the names follow from a recipe, the way in which a trainer orders parameters: plain, Hugging Face Trainer,
timm, layer-wise decay, ultralytics, detectron2, DETR, minGPT, Muon for the matrices and Adam for the rest (as two
optimizers or two groups), or a script of your own that groups them by parts of the model, by kinds of parameters, or by
both. The sizes of all groups and the shapes of all moments confirm a recipe. For equal shapes, ckptfix assumes the
order of the model, and the finding names any rare order (reversed, biases last) that would fit as well.

Nothing is touched if:

- two recipes fit and lead to different states, unless one belongs to a trainer that left its own file or option;
- groups of equal shapes could be swapped, or could list their parameters by name, reversed, or with the head first;
- the names fit both at the top and under a prefix;
- another state_dict of the file fits too, and the optimizer's name does not say whose it is (`optG` of `G`);
- a parameter is new, and nothing shows its group, or its place in your own order;
- the state covers all parameters together (L-BFGS), or a separate list has a copy of each (the float32 weights
  of apex and Megatron).

`ckptfix.load(model, file, optimizer=optimizer)` in the training script knows groups and order, and an optimizer with
names (`AdamW(model.named_parameters())`) has none of these doubts. If positions move, the state_dict is put into model
order too. `--drop-optimizer` drops the optimizer: training continues from the weights, with new moments.
`--keep-optimizer` keeps it unchanged.

## Example
`{"model": …, "optimizer": …}` whose two keys `fc.*` are dropped: the optimizer of 62 parameters becomes one of 60.

## Sources
`torch/optim/optimizer.py` (`state_dict`, `load_state_dict`); pytorch#1489; `transformers/trainer.py`
(`get_decay_parameter_names`); `timm/optim/_param_groups.py`."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec.structs import replace

from ckptfix.core.checkpoint import Checkpoint, path_name
from ckptfix.core.coverage import obstacles
from ckptfix.core.edits import Moments, Omit, Regroup
from ckptfix.core.finding import MODEL, Applicability, Finding, Fix, Level, Remedy, advise, counted
from ckptfix.core.plan import Plan
from ckptfix.core.spec import TensorSpec
from ckptfix.maps.optimizer_states import Optimizer, logical_shape, optimizers_in
from ckptfix.maps.recipes import Naming, named_by_itself
from ckptfix.rules.following import Followed, rivals, ways
from ckptfix.rules.origins import NEW, Change, Origin
from ckptfix.rules.position_names import is_listed_anew, readings, with_owners
from ckptfix.rules.rule import Context, Rule

DROP = Remedy.of("drops it: training continues from the weights with new moments", drop_optimizer=True)
IN_STEP = Remedy.of("updates it to match", unsafe_fixes=True)
KEEP = Remedy.of("keeps it as it is", keep_optimizer=True)


def dropping(context: Context) -> tuple[Remedy, ...]:
    """Return the remedy that drops the optimizer; nothing for a universal checkpoint, which needs one."""
    return () if context.settings.format == "universal" else (DROP,)


def stale_optimizer(rule: Rule, context: Context) -> Iterator[Finding]:
    """Update the optimizers to match the edits, or report which one cannot follow.

    The last of five steps: ``optimizer_states`` reads the state, ``origins`` finds what the plan changes,
    ``position_names`` the name of each position, ``following`` what becomes of the state; this makes the finding."""
    optimizers = list(optimizers_in(context.checkpoint.root))
    if context.settings.drop_optimizer:
        yield from _left_out(rule, optimizers)
        return
    if context.before is None:
        return
    if context.settings.format == "safetensors":
        optimizers = []  # safetensors cannot hold an optimizer: FIL104
    optimizers += optimizers_in(context.checkpoint.beside)
    before, plan = context.before, context.plan
    if any(isinstance(edit, (Regroup, Moments)) for edit in plan.edits):
        before, plan = context.checkpoint, Plan()  # compare only the result with itself
    change = Change.of(before, context.checkpoint, plan, context.target, context.settings.rename_layers)
    if not plan.edits and change.target is None:
        return
    own = path_name(context.checkpoint.container)
    for optimizer, sets in with_owners(context.checkpoint, optimizers):
        if not sets or own in sets:
            change = _with_lost(change, context, before, optimizer)
            is_known = bool(plan.edits) or change.model is not None
            found = list(_out_of_step(rule, context, optimizer, change, plan, sets)) if is_known else []
            yield from found or _foreseen(rule, context, optimizer, change)
        elif change.touches:
            yield rule.finding(
                Level.NOTE,
                f"{optimizer.label} belongs to {' or '.join(sets)} and stays as it is; {own}, which changes, has no "
                "optimizer",
                evidence={"sets": sets},
            )


def _with_lost(change: Change, context: Context, before: Checkpoint, optimizer: Optimizer) -> Change:
    """Return the change with the tensors that damage took, if the optimizer has the states of parameters by name. Only
    then do their places among the others not matter. One that was filled keeps its place if it has no state."""
    own = {key: spec for key, spec in before.lost.items() if key in optimizer.ids and spec is not None}
    if not own or (context.settings.format == "universal" and not own.keys() <= change.after.keys()):
        return change  # a universal checkpoint needs all weights
    filled = {key: Origin(key) for key in own if key in change.after and not optimizer.row(key)}
    after = {key: spec for key, spec in change.after.items() if key in own or key not in before.lost}
    return replace(change, before={**change.before, **own}, after=after, origins={**change.origins, **filled})


def _left_out(rule: Rule, optimizers: list[Optimizer]) -> Iterator[Finding]:
    optimizers = [optimizer for optimizer in optimizers if optimizer.path]
    if optimizers:
        names = ", ".join(optimizer.name for optimizer in optimizers)
        yield rule.finding(
            Level.NOTE,
            f"{names} dropped, because of --drop-optimizer: resumed training starts with new moments and the script's "
            "learning rate",
            fix=Fix.requested(Omit(optimizer.name) for optimizer in optimizers),
        )


def _out_of_step(
    rule: Rule, context: Context, optimizer: Optimizer, change: Change, plan: Plan, sets: list[str]
) -> Iterator[Finding]:
    """Yield the finding for an optimizer that no longer matches; it may also belong to the state_dicts in ``sets``."""
    found = ways(optimizer, change)
    is_moved = is_listed_anew(optimizer, change)
    if found and all(way.is_unchanged for way in found) and not is_moved:
        yield from _frozen(rule, context, found[0])
        return
    known = readings(optimizer, change)
    if plan.edits and not found and not known and _is_of_result(optimizer, change, context):
        yield rule.finding(
            Level.NOTE,
            f"{optimizer.label} does not fit the weights of the file but those of the result, so an earlier run was "
            "stopped: it stays unchanged",
            evidence={"parameters": len(optimizer.ids)},
        )
        return
    if not found and not is_moved and not (plan.edits and known):
        has_names = bool(named_by_itself(optimizer, change.before))
        if not change.touches and not change.is_ordered and (has_names or change.model_orders):
            yield from _in_unknown_order(rule, optimizer, change, has_names)
            return
        if not _is_touched(optimizer, change, plan, found):
            return
    if sets and found:
        words = f"fits {' and '.join(sets)} equally, and its name does not say which: it stays unchanged, though"
        yield _stays(rule, context, optimizer, f"{words} {sets[0]} changes", sets=sets)
    elif len(found) != 1 or is_moved:
        sources, reason = [way.source for way in found], _reason(optimizer, found, known)
        why = "which other edits change" if plan.edits else "which the model has in another order"
        yield _stays(
            rule,
            context,
            optimizer,
            f"no longer matches the weights, {why}, and {reason}: it stays unchanged, and will fail to load or assign "
            "moments to the wrong weights",
            _with_model(context, found, _is_named(known)),
            **({"recipes": sources} if sources else {}),
        )
    else:
        yield _brought_in_step(rule, context, change, found[0])


def _stays(
    rule: Rule,
    context: Context,
    optimizer: Optimizer,
    message: str,
    remedies: Iterable[Remedy] = (),
    **evidence: object,
) -> Finding:
    return rule.finding(
        Level.ERROR,
        f"{optimizer.label} {message}",
        evidence={"parameters": len(optimizer.ids), **evidence},
        remedies=(*dropping(context), *remedies, KEEP),
        is_accepted=context.settings.keep_optimizer,
    )


def _brought_in_step(rule: Rule, context: Context, change: Change, way: Followed) -> Finding:
    is_certain = way.naming.is_certain
    others = rivals(way.optimizer, change, way)
    how = ""
    if others:
        how = f"; it is assumed to be in the order of {way.source}, but {others[0]} would fit as well"
    elif not (is_certain or way.naming.own_shapes):
        how = f" (0 of {len(way.naming.names)} parameters with a unique shape)"
    return rule.finding(
        Level.ERROR,
        f"{way.optimizer.label} is out of step with the weights: {_what(way)}{how}",
        keys=(*way.anew, *way.added),
        evidence={**_evidence(way), **({"would fit as well": others} if others else {})},
        fix=Fix(way.edits(change.new_order), Applicability.SAFE if is_certain else Applicability.UNSAFE),
        remedies=() if is_certain else (IN_STEP, *dropping(context), KEEP),  # a safe fix needs no decision
        is_accepted=context.settings.keep_optimizer,
    )


def _is_of_result(optimizer: Optimizer, change: Change, context: Context) -> bool:
    """Return whether an optimizer that cannot belong to the file's parameters already fits the result's."""
    after = Change.of(context.checkpoint, context.checkpoint, Plan(), context.target)
    is_settled = any(way.is_unchanged and not way.naming.is_certain for way in ways(optimizer, after))
    return is_settled and len(optimizer.ids) == len(after.result) and not _may_be_of(optimizer, change)


def _in_unknown_order(rule: Rule, optimizer: Optimizer, change: Change, has_names: bool) -> Iterator[Finding]:
    if has_names or len(optimizer.ids) == len(change.model_orders[0]):
        what = "names" if has_names else "as many parameters as the model,"
        yield rule.finding(
            Level.NOTE,
            f"{optimizer.label} has {what} in an order that no known recipe gives for this model: if you did not "
            "define its groups, it belongs to another release of the model",
            evidence={"parameters": len(optimizer.ids)},
        )


def _is_touched(optimizer: Optimizer, change: Change, plan: Plan, found: list[Followed]) -> bool:
    """Return whether edits, or the model's order, change what an optimizer's positions mean."""
    if not plan.edits:
        return bool(found) or change.reorders
    is_lost = change.model is not None and not change.is_ordered and not change.model_orders
    # A tensor that is only named like a buffer is a parameter if the optimizer has more parameters than the rest.
    is_wide = bool(found) or len(optimizer.ids) > len(change.parameters)
    is_tied = len(optimizer.ids) == len(change.result)
    return is_lost or replace(change, is_wide=is_wide, is_tied=is_tied).touches


def _may_be_of(optimizer: Optimizer, change: Change) -> bool:
    """Return whether the file has a parameter for each row of the state, in any order."""
    shapes = Counter(spec.shape for spec in change.parameters.values())
    largest = (max(map(logical_shape, optimizer.row(number).values()), key=len, default=()) for number in optimizer.ids)
    return len(optimizer.ids) == shapes.total() and not Counter(filter(None, largest)) - shapes


def _is_named(known: list[Naming]) -> bool:
    """Return whether every position has one certain name, so that only the result's groups are in doubt."""
    return bool(known) and all(naming.names == known[0].names for naming in known)


def _reason(optimizer: Optimizer, found: list[Followed], known: list[Naming]) -> str:
    """Return why an optimizer cannot follow."""
    if len(found) == 1:
        return "the shapes allow that the script lists parameters by name, and the new names sort differently"
    if found:
        return f"{counted(len(found), 'way')} to name its parameters fit and differ"
    if optimizer.copies:
        return f"{optimizer.copies} lists a copy of each parameter, by position"
    if optimizer.is_joint:
        return "its state covers all parameters together"
    if _is_named(known):
        return "nothing shows the group or position of each parameter"
    return "its parameters cannot be identified"


def _foreseen(rule: Rule, context: Context, optimizer: Optimizer, change: Change) -> Iterator[Finding]:
    """Warn that an optimizer will have to follow once the keys that do not fit are dropped, filled or replaced."""
    target, specs = context.target, context.checkpoint.specs
    misfits = set(obstacles(context.checkpoint, target)) if target is not None else ()
    if target is None or not misfits:
        return
    after = {
        key: specs[key] if key in specs and key not in misfits else TensorSpec(slot.dtype, slot.shape or ())
        for key, slot in target.slots.items()
    }
    origins = {key: NEW if key in misfits else change.origins.get(key, NEW) for key in after}
    later = replace(change, after=after, origins=origins)
    found = ways(optimizer, later)
    once = f"out of step once the misfits ({counted(len(misfits), 'key')}) are dropped or filled"
    if len(found) != 1 and len(optimizer.ids) == len(change.parameters) and later.touches:
        reason = _reason(optimizer, found, readings(optimizer, later))
        yield rule.finding(
            Level.WARNING,
            f"{optimizer.label} will be {once}, and cannot follow: {reason}",
            evidence={"parameters": len(optimizer.ids)},
            remedies=(*dropping(context), KEEP),
        )
    if len(found) == 1 and not found[0].is_unchanged and not found[0].naming.is_certain:
        yield rule.finding(
            Level.WARNING,
            f"{optimizer.label} will be {once}: an unsafe fix then updates it to match ({_what(found[0])})",
            evidence=_evidence(found[0]),
            remedies=(IN_STEP,),
        )


def _frozen(rule: Rule, context: Context, way: Followed) -> Iterator[Finding]:
    """Note parameters with an optimizer state that are frozen in the model."""
    frozen = context.target.frozen if context.target is not None else ()
    steps = [step for group in way.groups for step in group]
    keys = tuple(step.key for step in steps if step.key in frozen and way.optimizer.row(step.source))
    if keys:
        yield rule.finding(
            Level.NOTE,
            f"{counted(len(keys), 'frozen parameter')} of the model with state in {way.optimizer.label}, which will "
            "not load into an optimizer of only the trainable parameters",
            keys=keys,
        )


def _with_model(context: Context, found: list[Followed], is_named: bool) -> tuple[Remedy, ...]:
    if context.target is not None and context.target.modules is not None:
        if is_named and not found:
            return advise("use the script's own optimizer: ckptfix.load(model, file, optimizer=optimizer)")
        if not found:
            return ()
        names = "names settle this: save a step of the old model with AdamW(model.named_parameters())"
        return advise(f"{names}; or use the script's own optimizer: ckptfix.load(model, file, optimizer=optimizer)")
    return (Remedy.of("gives the order of the parameters", model=MODEL),)


def _what(way: Followed) -> str:
    """Return in words what changes."""
    words = [
        f"{counted(len(keys), 'parameter')} {what}"
        for keys, what in (
            (way.gone, "gone"),
            (way.added, "new"),
            (way.anew, "with replaced values or state that cannot be split, reset"),
        )
        if keys
    ]
    if any(step.shape and step.source is not None for group in way.groups for step in group):
        words.append("other shapes")
    if (emptied := len(way.optimizer.groups) - len(way.groups)) > 0:
        words.append(f"{counted(emptied, 'group')} dropped with all its parameters; remove it from the script too")
    return ", ".join(words) or "other names or another order of parameters"


def _evidence(way: Followed) -> dict[str, Any]:
    naming = way.naming
    figures: dict[str, Any] = {"parameters": len(way.optimizer.ids), "named by": naming.source}
    if not naming.is_certain:
        figures["moments of the right shape"] = naming.moments
        figures["with a unique shape"] = naming.own_shapes
    for name, keys in (("gone", way.gone), ("new", way.added), ("start anew", way.anew)):
        if keys:
            figures[name] = list(keys)
    if not way.optimizer.is_keyed:
        figures["parameters of each group"] = list(map(len, way.groups))
    return figures
