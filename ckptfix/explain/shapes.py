"""Infers causes and advice from the shapes of mismatched keys."""

import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod

from ckptfix.core.finding import counted
from ckptfix.core.parts import Shape
from ckptfix.core.target import PARAMETER, Slot, Target
from ckptfix.explain.advice import MERGE, Advice, Cause
from ckptfix.explain.mismatch import Mismatch
from ckptfix.rules.misfits import Case, Misfits, differ_by_ones, narrowed, parts_of_ranks
from ckptfix.rules.position_tables import POSITIONS, Pairing
from ckptfix.rules.quantised_layers import keys_of_codes


def shape_causes(mismatch: Mismatch) -> Iterator[Cause]:
    """Yield the causes that the two shapes of each key show."""
    for reason, group in _by_reason(mismatch.shapes, _cases(mismatch)).items():
        if reason in (_EMPTY, _UNGATHERED):
            yield f"{counted(len(group), 'key')} with {reason}.", tuple(group)
        else:
            lines = (f"{key}  file {list(stored)}  model {list(wanted)}" for key, (stored, wanted) in group.items())
            yield f"{counted(len(group), 'key')} whose shape differs: {reason}.", tuple(lines)


_EMPTY = (
    "nothing in the file (a size of 0): it is one part of a model that ZeRO or FSDP sharded, and the weights are in"
    " the other files"
)
_UNGATHERED = (
    "nothing in the model (a size of 0): ZeRO-3 sharded it when it was built, so load the file before that, or inside"
    " deepspeed.zero.GatheredParameters; or it was built without its words, images or classes"
)
_ONES = "an extra or missing axis of one element, which changes no value"
_CODES = "quantised weights with different bits or group size, or from another release of the quantiser"
_PACKED = (
    "two codes of 4 bits in each byte on one side, as bitsandbytes packs weights: either the file was saved from a"
    " quantised model, or the model was built with quantization_config and the file is not quantised"
)
_RANKS = "an adapter of another rank than the model's: build it with the rank in the adapter's configuration"
_FLAT = "one row of numbers instead of a matrix, like packed codes and parts of flat parameters"
_PART = "one rank's part of a tensor-parallel training, 1/{} of the model along one axis"
_POSITIONS = "position embeddings for another resolution or length"
_OTHER_AXES = "the same axes in another order, as in another library or release"
_ANOTHER_SIZE = "a model of another size or configuration than the file's, so look for its variant first"
_LORA = re.compile(r"(^|[._])lora_(A|B|up|down)\b")  # the factors of a layer's change
# Causes that neither a formula nor the values of a fresh model can repair.
_HOPELESS = (_EMPTY, _UNGATHERED, _CODES, _PACKED, _RANKS, _FLAT, _OTHER_AXES, _ANOTHER_SIZE)


def _by_reason(
    shapes: Mapping[str, tuple[Shape, Shape]], cases: Iterable[Case]
) -> dict[str, dict[str, tuple[Shape, Shape]]]:
    """Return the mismatched keys with their shapes, grouped by the reason that the shapes show."""
    groups: dict[str, dict[str, tuple[Shape, Shape]]] = {}
    others: dict[str, tuple[Shape, Shape]] = {}
    codes = {*keys_of_codes(shapes)}
    for key, (stored, wanted) in shapes.items():
        if 0 in stored:
            reason = _EMPTY
        elif 0 in wanted:
            reason = _UNGATHERED
        elif differ_by_ones(stored, wanted):
            reason = _ONES
        elif key in codes or key.endswith(".scales"):
            reason = _CODES
        elif _is_packed(stored, wanted) or _is_packed(wanted, stored):
            reason = _PACKED
        elif _LORA.search(key) and sum(one != other for one, other in zip(stored, wanted, strict=False)) == 1:
            reason = _RANKS
        elif len(stored) == 1 < len(wanted) and stored[0] not in wanted:
            reason = _FLAT
        else:
            others[key] = stored, wanted
            continue
        groups.setdefault(reason, {})[key] = stored, wanted
    if parts := _parts(others):
        return {**groups, _PART.format(parts): others}
    for case in cases:
        if some := {key: others.pop(key) for key in case.shapes if key in others}:
            groups.setdefault(case.words, {}).update(some)
    for key, (stored, wanted) in [*others.items()]:
        if POSITIONS.search(key) and (stored[-1:] == wanted[-1:] or set(stored[:-1]) <= {1}):
            groups.setdefault(_POSITIONS, {})[key] = others.pop(key)
    if others:
        is_turned = all(sorted(old) == sorted(new) for old, new in others.values())
        groups[_OTHER_AXES if is_turned else _ANOTHER_SIZE] = others
    return groups


def _is_packed(codes: Shape, whole: Shape) -> bool:
    return codes[1:] == (1,) and prod(whole) == 2 * codes[0]


def _parts(shapes: Mapping[str, tuple[Shape, Shape]]) -> int:
    """Return into how many parts all of these tensors are split, 0 if they are not. The embedding has to be among them:
    a model with wider hidden layers looks the same otherwise."""
    return parts_of_ranks(shapes) if any("emb" in key.lower() for key in shapes) else 0


def _cases(mismatch: Mismatch) -> list[Case]:
    slots = {key: Slot("float32", shape, PARAMETER) for key, (_, shape) in mismatch.shapes.items()}
    return Misfits(mismatch.shapes, Pairing(Target(mismatch.model or "the model", slots), {})).cases()


def _recipes(mismatch: Mismatch) -> dict[str, str]:
    """Return the value of ``--adapt`` for each mismatched key that has a recipe."""
    found = [case for case in _cases(mismatch) if case.recipes]
    return {
        key: f"{case.name}={case.recipes[0]}"
        for case in found
        for key, (_, wanted) in case.shapes.items()
        if all(wanted)
    }


def advice_on_shapes(mismatch: Mismatch) -> Iterator[Advice]:
    """Yield what makes the mismatched keys fit, or says that nothing does."""
    for said in filter(None, map(narrowed, _cases(mismatch))):
        yield Advice(f"{said[:1].upper()}{said[1:]}.")
    parts = _parts(mismatch.shapes)
    recipes = {} if parts else _recipes(mismatch)
    left = {key: shapes for key, shapes in mismatch.shapes.items() if key not in recipes}
    reasons = _by_reason(left, _cases(mismatch))
    ones = reasons.pop(_ONES, None)
    if parts:
        yield Advice("puts the ranks together, with the files of all of them in one folder", MERGE)
    if parts or any(reason in _HOPELESS for reason in reasons):
        yield Advice("Do not fill these in: that would give a model with random weights.")
        return
    if ones:
        yield Advice(
            f"gives {counted(len(ones), 'key')} the axes of the model", "ckptfix repair {FILE} --model {MODEL}"
        )
    if recipes:
        adapt = " ".join(f"--adapt {recipe}" for recipe in dict.fromkeys(recipes.values()))
        is_of_words = "vocab=" in adapt
        proviso = (
            "if the smaller vocabulary begins the larger; if not, build the model with the vocabulary of the file"
            if is_of_words
            else "by the formula of a library"
        )
        yield Advice(
            f"makes {counted(len(recipes), 'key')} fit the model's shapes, {proviso}",
            f"ckptfix repair {{FILE}} --model {{MODEL}} {adapt}",
        )
    if reasons:
        yield Advice(
            "uses the mismatched keys of your fresh model (untrained), and the rest of the file",
            "ckptfix repair {FILE} --model {MODEL} --drop-mismatched --fill target",
        )
