"""Replacements for broken values if the user asks for them: ``--replace`` with ``--fill``, ``--recalibrate``, and
``--reset-running-stats``."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property, partial

from msgspec import Struct

from ckptfix.core.buffers import NUM_BATCHES_TRACKED, RUNNING_STATISTICS, split_key
from ckptfix.core.edits import Edit, Replace
from ckptfix.core.finding import FILE, Fix, Placeholder, Remedy
from ckptfix.core.settings import Settings
from ckptfix.core.spec import TensorSpec, TensorStatistics
from ckptfix.reading.tensors import spec_of_tensor
from ckptfix.rules.rule import Context, Rule
from ckptfix.values.decode import is_plain
from ckptfix.values.statistics import tensor_statistics
from ckptfix.values.twins import Twin, twin_sets, twins_beside

DATA = Placeholder("data.npy")

# The statistics of a fresh norm.
FRESH = {"running_mean": "zeros", "running_var": "ones", NUM_BATCHES_TRACKED: "zeros"}


def from_elsewhere(rule: Rule) -> tuple[Remedy, ...]:
    """Return the remedies for layers whose trained values are lost."""
    return (
        Remedy.of("takes these layers from another checkpoint", replace=(rule.code,), fill=FILE),
        Remedy.of("train them again, if the model uses them"),
    )


def for_running_statistics(rule: Rule) -> tuple[Remedy, ...]:
    """Return the remedies for broken statistics of norms."""
    return (
        Remedy.of("measures them again on a few hundred training samples (needs the model)", recalibrate=DATA),
        Remedy.of("takes them from another copy", replace=(rule.code,), fill=FILE),
        Remedy.of("resets them to those of a fresh norm, which needs more training", reset_running_stats=True),
    )


def cured_apart(found: Iterable[str], cures: Mapping[str, Sequence[Edit]]) -> Iterator[tuple[list[str], Fix | None]]:
    """Yield the keys that have a cure, with the requested fix, and then those that have none."""
    for is_cured in (True, False):
        if keys := [key for key in found if bool(cures[key]) is is_cured]:
            edits = tuple(dict.fromkeys(edit for key in keys for edit in cures[key]))
            yield keys, Fix.requested(edits) if edits else None


def replaced_apart(
    rule: Rule, context: Context, found: Collection[str], is_sound: Callable[[str, TensorStatistics], bool]
) -> Iterator[tuple[list[str], Fix | None]]:
    """Yield the keys that ``--replace`` cures, with the fix, then the others; ``is_sound`` judges the new values."""
    replacements = Replacements(context)
    return cured_apart(found, {key: replacements.of(rule.code, key, partial(is_sound, key)) for key in found})


OF_TWINS = "VAL301"  # with --fill twin, this code selects what any rule found broken


def replaces(settings: Settings, code: str, key: str) -> bool:
    """Return whether the user asked to replace a key that the rule of this code found broken."""
    codes = (code, OF_TWINS) if settings.fill == "twin" else (code,)
    return any(fnmatchcase(key, name) or any(one.startswith(name) for one in codes) for name in settings.replace)


IsSound = Callable[[TensorStatistics], bool]


def _is_any(figures: TensorStatistics) -> bool:
    return True


class Replacements(Struct, frozen=True, dict=True):
    """The values that ``--fill`` offers for a checkpoint's broken tensors. They are always finite."""

    context: Context

    def of(self, code: str, key: str, is_sound: IsSound = _is_any) -> tuple[Replace, ...]:
        """Return the edits that replace a broken key's values; none if the user did not ask, or if nothing sound is
        available. ``is_sound`` judges the new values' statistics."""
        return self.beside(key, is_sound) if replaces(self.context.settings, code, key) else ()

    def beside(self, key: str, is_sound: IsSound = _is_any) -> tuple[Replace, ...]:
        """Return the same for a key that must be replaced together with another one, whether it was named or not."""
        spec = self.context.checkpoint.specs[key]
        edit, found = self._offer(key, spec, is_sound)
        is_offered = found is not None and found.shape == spec.shape and _may_replace(found, spec.dtype, is_sound)
        return (edit,) if is_offered else ()

    @cached_property
    def twins(self) -> Mapping[str, tuple[Twin, ...]]:
        """The other copies of each key, those in other sets first."""
        found: dict[str, tuple[Twin, ...]] = {}
        for _, twins in twin_sets(self.context.checkpoint):
            for key, twin in twins.items():
                found[key] = (*found.get(key, ()), twin)
        for key, twin in twins_beside(self.context.checkpoint, self.context.target).items():
            found[key] = (*found.get(key, ()), twin)
        return found

    def sound_twin(self, key: str, is_sound: IsSound = _is_any) -> Twin | None:
        """Return the first other copy of a key that is sound; None if there is none."""
        dtype = self.context.checkpoint.specs[key].dtype
        twins = (twin for twin in self.twins.get(key, ()) if is_plain(twin.spec))
        return next((twin for twin in twins if _may_replace(twin.spec, dtype, is_sound)), None)

    def _offer(self, key: str, spec: TensorSpec, is_sound: IsSound) -> tuple[Replace, TensorSpec | None]:
        fill = self.context.settings.fill
        if fill == "twin":
            twin = self.sound_twin(key, is_sound)
            if twin is None:
                return Replace(key, spec.dtype, spec.shape, "twin"), None
            return Replace(key, spec.dtype, spec.shape, "twin", twin.key, twin.place or None), twin.spec
        if fill == "target":
            target = self.context.target  # which raises if it has no values: they were asked for
            own = target.initial().get(key) if target is not None and target.initial is not None else None
            return Replace(key, spec.dtype, spec.shape, "target"), None if own is None else spec_of_tensor(own.detach())
        donor = self.context.donor.specs.get(key) if self.context.donor is not None else None
        return Replace(key, spec.dtype, spec.shape, "donor", key), donor if donor and is_plain(donor) else None


def reset_edits(key: str, context: Context) -> tuple[Replace, ...]:
    """Return the edits that reset the statistics of ``key``'s norm, measured or fresh; none unless asked for."""
    module, _ = split_key(key)
    settings, specs = context.settings, context.checkpoint.specs
    if not (settings.recalibrate or settings.reset_running_stats):
        return ()
    return tuple(
        Replace(module + name, spec.dtype, spec.shape, "data", settings.recalibrate)
        if settings.recalibrate
        else Replace(module + name, spec.dtype, spec.shape, FRESH[name])
        for name in sorted(RUNNING_STATISTICS)
        if (spec := specs.get(module + name)) is not None
    )


def _may_replace(spec: TensorSpec, dtype: str, is_sound: IsSound) -> bool:
    """Return whether a tensor's values are finite and sound in the dtype of the tensor that it replaces."""
    if spec.dtype != dtype:
        from ckptfix.values.casting import cast_spec

        spec = cast_spec(spec, dtype, "replacement")
    figures = tensor_statistics(spec)
    return not figures.nonfinite and is_sound(figures)
