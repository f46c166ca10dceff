"""FIT104 dtype-mismatch: a tensor whose dtype differs from the target's.

## What it finds
Tensors whose dtype differs from the target's in kind (a float where the target has integers), or floats of another
width, such as a file in float16 for a model in float32. Integers of another width are not reported; integers instead of
a model's float parameters are a warning.

## Why it matters
`load_state_dict` converts silently, so the load works, but with the lower precision of file and model. In a narrower
dtype, values overflow: float16 turns values from 65520 on into infinity, and casting back does not restore them. A
quantised tensor cannot be copied into any other. Integer parameters were rounded, most of them to zero, or are
quantised by a scheme that the model does not know.

## Fix safety
Unsafe: a cast changes stored bytes. `--unsafe-fixes` casts to the target's dtype. There is no fix if a value would
overflow, or may with `--no-values`, if a fraction or an imaginary part would be lost, or if the tensor is quantised or
was rounded.

## Example
    ckptfix repair half.pth --model my_models:net --unsafe-fixes
    # conv1.weight  float16 → float32

## Sources
- https://github.com/ultralytics/ultralytics/pull/24731 (a cast to float16 above 65504)
- https://pytorch.org/docs/stable/type_info.html"""

from collections import Counter
from collections.abc import Iterator
from math import inf

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.edits import Cast
from ckptfix.core.finding import Finding, Fix, Level, Remedy, counted
from ckptfix.core.target import Target
from ckptfix.rules.quantised_layers import wanted_layers
from ckptfix.rules.rule import Context, Rule
from ckptfix.values.decode import NARROWINGS
from ckptfix.values.dequantising import are_codes
from ckptfix.values.roles import is_layers_own

_AS_STORED = Remedy.of("build the model in the dtype of the file")
_FLOATS = Remedy.of("take these tensors from another copy, or dequantise them with the library that quantised them")
_SORTS = {
    "overflow": (Level.ERROR, "values would overflow", _AS_STORED),
    "quantized": (Level.ERROR, "a load cannot copy from a quantised tensor", _AS_STORED),
    "lossy": (Level.WARNING, "a load drops part of each value", _AS_STORED),
    "rounded": (Level.WARNING, "integer parameters were rounded or are quantised", _FLOATS),
    "unread": (Level.NOTE, "a load converts, and may overflow: the values were not read", _AS_STORED),
    "plain": (Level.NOTE, "a load converts", Remedy.of("casts them", unsafe_fixes=True)),
}


def dtype_mismatch(rule: Rule, context: Context, target: Target) -> Iterator[Finding]:
    """List the tensors of another dtype, grouped by what a load does with them."""
    casts: dict[str, list[Cast]] = {sort: [] for sort in _SORTS}
    for cast in _casts(context.checkpoint, target):
        casts[_sort(cast, context, target)].append(cast)
    for sort, (level, what, remedy) in _SORTS.items():
        if not (alike := tuple(casts[sort])):
            continue
        dtypes = Counter(f"{cast.before} → {cast.dtype}" for cast in alike)
        largest = {cast.key: context.statistics[cast.key].absmax for cast in alike if sort == "overflow"}
        # Do not undo a dtype that the user asked for.
        is_cast = sort == "plain" and context.settings.dtype is None
        yield rule.finding(
            level,
            f"{counted(len(alike), 'tensor')} whose dtype differs from the target's ({', '.join(dtypes)}): {what}",
            keys=[cast.key for cast in alike],
            evidence={"dtypes": dict(dtypes), **({"absmax": largest} if largest else {})},
            fix=Fix.unsafe(alike) if is_cast else None,
            remedies=(remedy,),
        )


def _casts(checkpoint: Checkpoint, target: Target) -> Iterator[Cast]:
    """Yield a cast for every tensor whose dtype differs from the target's in a way that matters."""
    quantised = {key for layer in wanted_layers(checkpoint.specs, target).values() for key in layer.parts.values()}
    for key, spec in checkpoint.specs.items():
        if key in quantised:
            continue  # another rule reports these codes
        slot = target.slots.get(key)
        if slot is not None and spec.dtype != slot.dtype and (_rank(spec.dtype), _rank(slot.dtype)) != (0, 0):
            yield Cast(key, spec.dtype, slot.dtype)


def _sort(cast: Cast, context: Context, target: Target) -> str:
    if DTYPES[cast.before].is_quantized or are_codes(cast.key, context.checkpoint.specs):
        return "quantized"
    slot = target.slots[cast.key]
    # With a file as the target, which tensors are parameters is a guess.
    is_parameter = (
        len(slot.shape or ()) > 1 and is_layers_own(cast.key) if target.modules is None else slot.is_parameter
    )
    if _rank(cast.before) == 0 and is_parameter:
        return "rounded"
    if _rank(cast.before) > _rank(cast.dtype):
        return "lossy"
    limit, before = map(_largest, (cast.dtype, cast.before))
    if limit < before and (figures := context.statistics.get(cast.key)) is not None:
        return "overflow" if figures.absmax > limit else "plain"
    return "unread" if 2 * limit < before else "plain"  # the range of bfloat16 is nearly that of float32


def _largest(dtype: str) -> float:
    return NARROWINGS[dtype].largest if dtype in NARROWINGS else inf if _rank(dtype) else 2.0**64


def _rank(dtype: str) -> int:
    """Return the rank of a kind of numbers, where each kind can hold the earlier ones: integers are 0."""
    kind = DTYPES[dtype]
    return 3 if kind.is_quantized else 2 if kind.is_complex else 1 if kind.is_float else 0
