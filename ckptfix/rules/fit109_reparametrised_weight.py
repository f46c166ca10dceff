"""FIT109 reparametrised-weight: the parts of a weight instead of the weight, or the reverse.

## What it finds
Weights that `weight_norm` (`weight_g`, `weight_v`), `spectral_norm` (`weight_orig`, `weight_u`, `weight_v`) or pruning
(`weight_orig`, `weight_mask`) stores in parts, also under the names of `torch.nn.utils.parametrizations`, if the target
wants the plain weight; and those of AWD-LSTM, which trains `weight_hh_l0_raw` and keeps a copy after dropout in
`weight_hh_l0`. Also plain weights, such as those of a vocoder after `remove_weight_norm`, if the target applies
`weight_norm` to them.

## Why it matters
A strict load misses the weight. Using a part instead, such as `weight_v` or `weight_orig`, silently gives a layer with
the wrong scale, or an unpruned one.

## Fix safety
Safe for a plain weight if the target applies `weight_norm`: it stays bit for bit as `weight_v`, and `weight_g` is its
norm, as when torch applies `weight_norm`. A weight with rows of zeros is refused, because it would become NaN.

Unsafe otherwise: `--unsafe-fixes` computes the weight with torch's own function, as `remove_weight_norm`,
`remove_spectral_norm`, `prune.remove` and `remove_parametrizations` do for a model in eval mode, and drops the parts; a
`_raw` weight replaces its copy. Training cannot continue with the parts afterwards. There is no fix if the file lacks a
part (`weight_v` of spectral_norm), or if the shapes do not show the axis of the norm: a square kernel, without a model
to tell whether it belongs to a transposed convolution.

## Example
    ckptfix repair hifigan.pth --model my_models:generator_without_norm --unsafe-fixes
    # compute 78 weights from their parts (weight_norm)

## Sources
- https://pytorch.org/docs/stable/generated/torch.nn.utils.remove_weight_norm.html
- https://pytorch.org/docs/stable/generated/torch.nn.utils.parametrize.remove_parametrizations.html
- https://pytorch.org/docs/stable/generated/torch.nn.utils.prune.remove.html"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from ckptfix.core.edits import PRUNING, SPECTRAL_NORM, WEIGHT_NORM, Adapt, Drop, Edit, Fold, Rename
from ckptfix.core.finding import Blocks, Finding, Fix, Level, Remedy, counted
from ckptfix.core.parts import Shape
from ckptfix.core.spec import TensorSpec
from ckptfix.core.target import Target
from ckptfix.rules.rule import Context, Rule
from ckptfix.values.adapted_tensors import NORM, is_adaptable

_FORMS = (
    (WEIGHT_NORM, ("{}_v", "{}_g")),
    (WEIGHT_NORM, ("parametrizations.{}.original1", "parametrizations.{}.original0")),
    (SPECTRAL_NORM, ("{}_orig", "{}_u", "{}_v")),
    (SPECTRAL_NORM, ("parametrizations.{}.original", "parametrizations.{}.0._u", "parametrizations.{}.0._v")),
    (PRUNING, ("{}_orig", "{}_mask")),
)
"""The keys of each form: first the part with the shape of the weight, then what it is combined with."""

_PART = re.compile(r"(?:(?P<module>.+)\.)?(?:parametrizations\.(?P<new>[^.]+)\..+|(?P<old>[^.]+)_(?:[guv]|orig|mask))")


def reparametrised_weight(rule: Rule, context: Context, target: Target) -> Iterator[Finding]:
    """Propose to compute the weights that the target wants from their parts in the file."""
    if whole := list(_whole(context.checkpoint.specs, target)):
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(whole), 'weight')} that the target has in parts (weight_norm)",
            keys=[adapt.source for adapt, _ in whole],
            evidence={"forms": {WEIGHT_NORM: len(whole)}},
            fix=Fix.safe(edit for pair in whole for edit in pair),
            blocks=Blocks.FILLING,
        )
    folds = list(_folds(context.checkpoint.entries, target))
    raw = dict(_raw(context.checkpoint.specs, target))
    if not folds and not raw:
        return
    edits: list[Edit] = []
    for fold, name in folds:
        edits += (fold, Rename(fold.key, name), *map(Drop, fold.sources))
    for key, name in raw.items():
        edits += (Drop(name), Rename(key, name))
    forms = Counter(fold.form for fold, _ in folds) + Counter({"weight drop": len(raw)})
    yield rule.finding(
        Level.ERROR,
        f"{counted(forms.total(), 'weight')} in parts ({', '.join(forms)}), but the target wants the weight itself",
        keys=(*(key for fold, _ in folds for key in (fold.key, *fold.sources)), *raw),
        evidence={"forms": dict(forms)},
        fix=Fix.unsafe(edits),
        remedies=(Remedy.of("computes them, as torch does to remove the parametrization", unsafe_fixes=True),),
        blocks=Blocks.FILLING,
    )


def _whole(specs: Mapping[str, TensorSpec], target: Target) -> Iterator[tuple[Adapt, Rename]]:
    """Yield the edits that make the parts of `weight_norm` from a plain weight if the target has these parts."""
    for name, keys in in_parts([key for key in target.slots if key not in specs]).items():
        for form, (main, *others) in forms_of(name):
            spec = specs.get(name)
            if form != WEIGHT_NORM or keys != {main, *others} or spec is None or name in target.slots:
                continue
            shape = target.slots[others[0]].shape
            is_fit = is_adaptable(spec) and target.accepts(main, spec.shape) and shape is not None
            if is_fit and shape is not None and _axis(form, spec.shape, [shape], None) is not None:
                yield Adapt(others[0], name, NORM, spec.dtype, spec.shape, shape), Rename(name, main)


def _raw(specs: Mapping[str, TensorSpec], target: Target) -> Iterator[tuple[str, str]]:
    """Yield the trained copy of each weight that was saved after dropout, and the name of the weight."""
    for key, spec in specs.items():
        name = key.removesuffix("_raw")
        if name != key not in target.slots and name in specs and target.accepts(name, spec.shape):
            yield key, name


def in_parts(keys: Collection[str]) -> dict[str, set[str]]:
    """Return the keys of the parts of each tensor that is stored in parts, by the name of the tensor."""
    found: dict[str, set[str]] = {}
    for key in keys:
        if match := _PART.fullmatch(key):
            name = ".".join(filter(None, (match["module"], match["new"] or match["old"])))
            found.setdefault(name, set()).add(key)
    return {
        name: parts for name, parts in found.items() if any(parts.issuperset(form[:2]) for _, form in forms_of(name))
    }


def renamed_parts(name: str, to: str, keys: Collection[str]) -> dict[str, str]:
    """Return the parts' new keys if the tensor is renamed to ``to``, the part with its shape first; empty if
    unknown."""
    for (_, old), (_, new) in zip(forms_of(name), forms_of(to), strict=True):
        if set(old) == set(keys):
            return dict(zip(old, new, strict=True))
    return {}


def forms_of(name: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each form with the keys of a tensor's parts."""
    module, dot, leaf = name.rpartition(".")
    for form, templates in _FORMS:
        yield form, [module + dot + template.format(leaf) for template in templates]


def _folds(entries: Mapping[str, object], target: Target) -> Iterator[tuple[Fold, str]]:
    """Yield the edit that computes each tensor that the target lacks in parts, and its name in the target."""
    parts = in_parts([key for key in entries if key not in target.slots])
    taken, put = _prefixes(parts, target)
    for stem, keys in parts.items():
        name = put + stem.removeprefix(taken)
        for form, (main, *others) in forms_of(stem):
            if keys != {main, *others} or name in entries or name not in target.slots:
                continue
            found = [entry for key in (main, *others) if isinstance(entry := entries[key], TensorSpec)]
            if len(found) <= len(others) or any(spec.storage is None for spec in found):
                continue
            weight, *beside = found
            module = (target.modules or {}).get(name.rpartition(".")[0])
            dim = _axis(form, weight.shape, [spec.shape for spec in beside], module)
            is_plain = is_adaptable(weight) and all(form == PRUNING or spec.dtype == weight.dtype for spec in beside)
            if dim is not None and is_plain and target.accepts(name, weight.shape):
                yield Fold(main, weight.dtype, weight.shape, form, tuple(others), dim), name


def _prefixes(names: Collection[str], target: Target) -> tuple[str, str]:
    """Return the prefixes to remove and to add if that makes all names keys of the target in only one way."""
    first = min(names, default="")
    dots = [at + 1 for at, letter in enumerate(first) if letter == "."]
    found = [(first[:at], "") for at in dots]
    found += [("", key.removesuffix(first)) for key in target.slots if key.endswith(f".{first}")]
    is_wanted = target.slots.keys().__contains__
    fits = [
        pair for pair in found if all(n.startswith(pair[0]) and is_wanted(pair[1] + n[len(pair[0]) :]) for n in names)
    ]
    return fits[0] if len(fits) == 1 and not any(map(is_wanted, names)) else ("", "")


def _axis(form: str, shape: Shape, beside: list[Shape], module: str | None) -> int | None:
    """Return the axis that the norm keeps, -1 if it is over all axes; None if the parts do not show it."""
    if form == PRUNING:
        return 0 if beside == [shape] else None
    if form == WEIGHT_NORM:
        ones = (1,) * len(shape)
        axes = [at for at in range(len(shape)) if beside[0] == (*ones[:at], shape[at], *ones[at + 1 :])]
        return -1 if beside[0] == () else axes[0] if axes else None
    axes = [at for at in range(min(len(shape), 2)) if beside == [(shape[at],), (math.prod(shape) // shape[at],)]]
    if len(axes) > 1 and module is not None:
        return int("ConvTranspose" in module)
    return axes[0] if len(axes) == 1 else None
