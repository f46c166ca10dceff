"""FIL101 several-state-dicts: the file holds more than one set of weights.

## What it finds
Two or more state_dicts of comparable size in one file: raw weights and their moving average (EMA), a generator and a
discriminator, a student and a teacher.

A note if both sets are in one state_dict (keys with `student.` and `teacher.`, `encoder_q.` and `encoder_k.`, or
without a prefix and with `ema_model.`) and no model is named, because a model may well have both. An average whose
names lost their dots (`model_ema.outweight`, `ema_out_weight`) is noted even with a model. Another note lists smaller
groups of tensors outside the weights: a smaller network, other parts of a nested state_dict (Megatron-LM), or an
average that is a list, as in `torch_ema` (`ema.shadow_params`). A warning if most tensors in the file belong to no set
of weights and no optimizer: these were not checked.

## Why it matters
The wrong set loads without an error and gives poor results (MeanFlow#12). The file does not say which one the authors
evaluated.

## Fix safety
The choice is yours. Without `--weights`, the raw set under the most common name is used, and the finding remains. If it
does not fit the model and another set does, the other is used; if only one set fits, the finding is a note. Of two sets
in one state_dict, neither is chosen.

`--weights PREFIX` keeps only the keys under a prefix, and removes the prefix; you may omit a prefix of nearly all keys
(`module.`). In a Stable Diffusion file, the average replaces its network, and the other parts stay. `--weights plain`
keeps the keys without a prefix if another set has one.

A list of tensors chosen with `--weights` gets its names from the file's state_dict or, without one, from the model's
parameters in the order of `model.parameters()`, if the shapes allow only one assignment. Layers of the same shape that
swapped places in the code since then would get each other's weights: compare the model's outputs.

## Example
`{state_dict, state_dict_ema}`: repair with `--weights state_dict_ema` for the averaged weights.
`{student.fc.weight, teacher.fc.weight}`: `--weights teacher` makes `fc.weight` of the second.

## Sources
Field reports: MeanFlow#12, actionformer_release#103; DINO, MoCo and BYOL save two networks in one state_dict."""

from collections.abc import Collection, Iterator, Sequence

from ckptfix.core.checkpoint import Checkpoint, path_name, value_at
from ckptfix.core.edits import Drop, renames
from ckptfix.core.facts import Kind, clause
from ckptfix.core.finding import MODEL, NAME, Blocks, Finding, Fix, Level, Remedy, advise, counted
from ckptfix.reading.foreign.weightless import NAME_THEM
from ckptfix.reading.weights.listed_sets import names_in_order
from ckptfix.reading.weights.prefixed_sets import PLAIN, copied_under, is_follower, lost_dots, sets_of
from ckptfix.rules.rule import Context, Rule

MOST = 6  # sets that the remedies name
_KEEPING = "repairs this set and keeps the others unchanged"


def choice(names: Sequence[str], effect: str = "uses only this set") -> tuple[Remedy, ...]:
    """Return a remedy for each set; sets that follow another one, such as averages, come last."""
    ordered = sorted(names, key=is_follower)
    named = tuple(Remedy.of(effect, weights=name) for name in ordered[:MOST])
    rest = (Remedy.of("uses another one", weights=NAME),) if len(names) > MOST else ()
    return (*named, *rest)


def choice_of_copies(keys: Collection[str]) -> tuple[Remedy, ...]:
    """Return a remedy for each set if one has the plain names and the others a prefix."""
    copies = copied_under(keys)
    names = [PLAIN, *(prefix[:-1] for prefix in copies)]
    return choice(names) if copies else advise("remove one of the two sets of weights")


def several_state_dicts(rule: Rule, context: Context) -> Iterator[Finding]:
    """List the sets of weights if none was picked; otherwise take the picked one out of its state_dict."""
    if context.checkpoint.picked is not None:
        yield from _picked(rule, context)
    elif unnamed := _places(context.checkpoint):
        yield from _unnamed(rule, context, unnamed)
    elif context.settings.weights is None:
        yield from _in_container(rule, context)
        yield from _in_state_dict(rule, context)
        yield from _in_lists(rule, context)
        yield from _beside(rule, context)
        yield from _unread(rule, context)


def _picked(rule: Rule, context: Context) -> Iterator[Finding]:
    checkpoint, picked = context.checkpoint, context.checkpoint.picked or {}
    taken = {key: name for key, name in picked.items() if key in checkpoint.entries}
    others = [key for key in checkpoint.entries if key not in taken]
    edits = (*renames(taken), *(Drop(key) for key in others))
    if edits:
        yield rule.finding(
            Level.NOTE,
            f"{counted(len(taken), 'key')} in the set {context.settings.weights} that --weights picks; "
            f"{counted(len(others), 'key')} outside it left out",
            fix=Fix.requested(edits),
        )


def _places(checkpoint: Checkpoint) -> list[str]:
    """Return the keys of tensors taken from a list, which are positions; none once they have names."""
    taken = value_at(checkpoint.root, checkpoint.container)
    places = [
        path_name((*checkpoint.container, at)) for at in range(len(taken) if isinstance(taken, (list, tuple)) else 0)
    ]
    return [place for place in places if place in checkpoint.specs]


def _unnamed(rule: Rule, context: Context, keys: Sequence[str]) -> Iterator[Finding]:
    """Name the tensors of a list by the model's parameters."""
    target, specs = context.target, context.checkpoint.specs
    slots = [] if target is None else [(name, target.slots[name]) for name in target.names]
    parameters = [(name, slot.shape) for name, slot in slots if slot.is_parameter]
    names = names_in_order([specs[key] for key in keys], parameters)
    held = f"{counted(len(keys), 'tensor')} in a list, which has no names"
    if names is None:
        fit = "" if target is None else f"; {target.label}'s {len(parameters)} parameters fit in no order or in several"
        asked = (Remedy.of("gives them the names of its parameters", model=MODEL),) if target is None else ()
        blocks = Blocks.WRITING | Blocks.FILLING
        yield rule.finding(Level.ERROR, held + fit, remedies=(*asked, *advise(NAME_THEM)), blocks=blocks)
    else:
        yield rule.finding(
            Level.WARNING,
            f"{held}: they get the names of the model's parameters in order, whose shapes all fit",
            keys=names,
            fix=Fix.requested(renames(dict(zip(keys, names, strict=True)))),
        )


def _in_container(rule: Rule, context: Context) -> Iterator[Finding]:
    checkpoint = context.checkpoint
    parts: Collection[str] = ()
    if context.target is not None:
        from ckptfix.rules.fit101_missing_key import parts_of  # imported late: only a check with a target needs it

        parts = parts_of(checkpoint, context.target)
    taken = path_name(checkpoint.container)
    names = [candidate.name for candidate in checkpoint.candidates if candidate.name not in parts]
    if len(names) < 2:
        return
    from ckptfix.reading.adapter_checks import companion  # imported late: most files have one set

    if companion(checkpoint) is not None:  # a hypernetwork is several state_dicts, which FIL108 reports
        return
    fitting = [candidate.name for candidate in checkpoint.candidates if candidate.fits]
    is_only_one = fitting == [taken] and all(candidate.fits is not None for candidate in checkpoint.candidates)
    why = ", the only one with weights that fit the target" if is_only_one else ""
    if len(fitting) > 1:
        why = f", and {', '.join(name for name in fitting if name != taken)} would fit the target as well"
    yield rule.finding(
        Level.NOTE if is_only_one else Level.WARNING,
        f"the file holds {len(names)} sets of weights ({', '.join(names)}); {taken} was taken{why}",
        evidence={
            candidate.name: {"tensors": candidate.tensors, "numel": candidate.numel}
            for candidate in checkpoint.candidates
        },
        remedies=()
        if is_only_one
        else choice([taken, *(name for name in fitting or names if name != taken)], _KEEPING),
    )


def _in_state_dict(rule: Rule, context: Context) -> Iterator[Finding]:
    """Note two networks in one state_dict.

    With a target, the rules on names report what does not fit, except an average whose names lost their dots."""
    specs, target = context.checkpoint.specs, context.target
    names = sets_of(specs)
    if names and (target is None or (lost_dots(specs, names[1]) and not target.slots.keys() >= specs.keys())):
        kept = ", and both are kept" if target is None else ""
        yield rule.finding(
            Level.NOTE,
            f"the state_dict holds two networks with the same tensors, {' and '.join(names)}{kept}: "
            f"{' or '.join(f'--weights {name}' for name in names)} takes one of them",
            evidence={"sets": list(names)},
        )


def _in_lists(rule: Rule, context: Context) -> Iterator[Finding]:
    for fact in context.checkpoint.remarked(Kind.LISTED_AVERAGE):
        said = f"{fact.place} is {clause(fact)}: --weights {fact.place} uses it, under these names"
        yield rule.finding(Level.NOTE, said, evidence={"sets": [fact.place]})


def _unread(rule: Rule, context: Context) -> Iterator[Finding]:
    """Warn that most of the file was skipped: the weights may be in that part."""
    for fact in context.checkpoint.remarked(Kind.MOST_UNREAD):
        names = fact.data["others"]
        separate = advise("save the weights as one state_dict, with their names")
        yield rule.finding(Level.WARNING, clause(fact), remedies=choice(names, _KEEPING) if names else separate)


def _beside(rule: Rule, context: Context) -> Iterator[Finding]:
    """Note other tensors that may be weights: torch.load reads them, but a strict load does not."""
    checkpoint = context.checkpoint
    offered = {candidate.name for candidate in checkpoint.candidates}
    beside = checkpoint.remarked(Kind.WEIGHTS_BESIDE)
    others = {fact.place: clause(fact) for fact in beside if fact.place not in offered}
    if others:
        listed = ", ".join(list(others)[:3]) + (", …" if len(others) > 3 else "")
        yield rule.finding(
            Level.NOTE,
            f"{path_name(checkpoint.container)} was used, and there are other tensors outside it ({listed}): parts of "
            "the same model if its state_dict is nested, or of another one; --weights NAME uses one of them",
            evidence={"beside": others},
        )
