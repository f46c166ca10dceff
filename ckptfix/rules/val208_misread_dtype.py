"""VAL208 misread-dtype: a weight matrix whose bytes were read with the wrong dtype or byte order.

## What it finds
Matrices of at least 256 values, named like a layer's, with values that no training gives:

- a gap around zero: nearly all values are between half and twice their RMS, many different ones and with both signs.
  bfloat16 read as float16 looks like this; the gain of a norm, with all values near one, does not;
- values over twenty orders of magnitude, most at most a thousandth of the RMS, which become an ordinary matrix if their
  bits are read as float16. float16 read as bfloat16 looks like this;
- NaN or values in the hundreds and more, which become an ordinary matrix if the bytes of each value are reversed: a
  big-endian machine wrote them;
- only integers up to 255: the codes of a quantised matrix without their scale. int8 and uint8 matrices are such codes
  too, unless a model is given or a tensor in the file is named like a scale.

## Why it matters
The shapes fit and the file loads; the layer gives noise.

## Fix safety
There is no fix: which tensors were misread, and how, is only a guess. Convert the original file again. A file from a
big-endian machine loads after `torch.serialization.set_default_load_endianness(LoadEndianness.BIG)`.

## Example
`layers.0.mlp.weight` in float16: all of 4096 values are between 0.5 and 2, none is near zero.

## Sources
https://en.wikipedia.org/wiki/Bfloat16_floating-point_format, https://arxiv.org/abs/2208.07339 (int8 codes and scales)
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckptfix.core.finding import Finding, Level, advise, counted
from ckptfix.core.lazy import np
from ckptfix.core.spec import TensorSpec, TensorStatistics
from ckptfix.rules.rule import Context, Rule
from ckptfix.values.decode import Array, encoding
from ckptfix.values.roles import is_layers_own, usual_rms
from ckptfix.values.scan import first_numbers, first_units

SMALLEST = 256  # values; the statistics of a smaller matrix may be chance
LOOK = 1 << 14  # values of a suspect that are examined
DISTINCT = 16  # least number of different values; a binary or ternary network has fewer

# Below this share of the RMS there is at most this share of the values; in a normal matrix, a fifth.
HOLE, OUTSIDE = 0.25, 0.005
SIGN = 0.1  # least share of either sign in a matrix
LARGE = 100  # no matrix has a larger RMS: try its bytes in reverse order
LARGEST_CODE = 255  # of an unsigned byte
CODES = "only integers, like codes without their scale"
_SCALE = re.compile(r"scal(e|ing)|SCB|absmax|zero_?point|(^|[._])(qweight|zeros|alpha|a|b)$", re.IGNORECASE)


def misread_dtype(rule: Rule, context: Context) -> Iterator[Finding]:
    """Report the matrices whose statistics are those of misread bytes; propose nothing."""
    found: dict[str, list[str]] = {}
    may_be_codes = context.target is None and not any(_SCALE.search(key) for key in context.checkpoint.specs)
    for key, figures in context.statistics.items():
        spec = context.checkpoint.specs[key]
        if spec.numel < SMALLEST or not is_layers_own(key) or spec.quantizer is not None:
            continue
        what = _what(spec, figures) if key in context.matrices else ""
        if may_be_codes and len(spec.shape) > 1 and spec.dtype in ("int8", "uint8") and _are_codes(spec):
            what = CODES
        if what and not _starts_so(key, figures, context):
            found.setdefault(what, []).append(key)
    for what, keys in found.items():
        yield rule.finding(
            Level.WARNING,
            f"{counted(len(keys), 'weight matrix')} with {what}",
            keys=keys,
            evidence={
                "tensors": {
                    key: {"rms": context.statistics[key].rms, "absmax": context.statistics[key].absmax} for key in keys
                }
            },
            remedies=advise("convert the original file again, or take these tensors from another copy"),
        )


def _starts_so(key: str, figures: TensorStatistics, context: Context) -> bool:
    start = context.start(key)
    return start is not None and 0.5 * start.absmax <= figures.absmax <= 2 * start.absmax


def _what(spec: TensorSpec, figures: TensorStatistics) -> str:
    """Return how a matrix seems to have been misread; empty for an ordinary one."""
    if (figures.nonfinite or figures.rms > LARGE) and _is_reversed(spec):
        return "bytes in the wrong order, as on a big-endian machine"
    if not figures.rms or figures.nonfinite:
        return ""
    if figures.rms > 1 and figures.absmax.is_integer() and figures.absmax <= LARGEST_CODE and _are_codes(spec):
        return CODES
    if figures.rms > 0.5 and figures.absmax < 2.5 * figures.rms and figures.zeros < OUTSIDE * spec.numel:
        return "a gap around zero, like bfloat16 read as float16" if _has_hole(spec, figures) else ""
    if spec.dtype == "bfloat16" and figures.rms < usual_rms(spec) and _is_float16(spec, figures):
        return "float16 bits read as bfloat16"
    return ""


def _are_codes(spec: TensorSpec) -> bool:
    numbers = first_numbers(spec, LOOK)
    return bool((numbers == np.rint(numbers)).all()) and len(np.unique(numbers)) > DISTINCT


def _has_hole(spec: TensorSpec, figures: TensorStatistics) -> bool:
    numbers = first_numbers(spec, LOOK)
    negative = int(np.count_nonzero(numbers < 0)) / len(numbers)
    sizes = np.abs(numbers)
    inside = int(np.count_nonzero(sizes < HOLE * figures.rms))
    return SIGN < negative < 1 - SIGN and inside <= OUTSIDE * len(sizes) and len(np.unique(sizes)) > DISTINCT


def _is_float16(spec: TensorSpec, figures: TensorStatistics) -> bool:
    """Return whether most values are negligible next to the largest, and an ordinary matrix if read as float16."""
    if figures.zeros > 0.01 * spec.numel or np.median(np.abs(first_numbers(spec, LOOK))) > 1e-3 * figures.rms:
        return False
    return _is_ordinary(first_units(spec, LOOK).view(np.float16).astype(np.float64))


def _is_reversed(spec: TensorSpec) -> bool:
    """Return whether the values become an ordinary matrix if the bytes of each are reversed."""
    stored = encoding(spec.dtype)
    assert stored is not None, "the values of a matrix are floats"
    with np.errstate(all="ignore"):
        return _is_ordinary(stored.decode(first_units(spec, LOOK).byteswap()).astype(np.float64))


def _is_ordinary(numbers: Array) -> bool:
    """Return whether the numbers look like a trained matrix."""
    if not np.isfinite(numbers).all():
        return False
    rms = float(np.sqrt(np.mean(numbers**2)))
    return 1e-4 < rms < 10 and 2.2 * rms < float(np.abs(numbers).max()) < 50 * rms
