"""How much of a target came from the file, and whether a strict load can succeed."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct, field

from ckptfix.core.buffers import NUM_BATCHES_TRACKED, split_key
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.edits import Adapt, Fill, Replace
from ckptfix.core.target import PARAMETER, Target

# Origins of trained values: a checkpoint named by `--fill`, the file's other set of weights, an adapter, or the tensor
# to which a filled one was tied. Values computed by a formula need no training.
TRAINED = frozenset({"donor", "twin", "adapter", "tie", "formula"})


class Coverage(Struct, frozen=True):
    """How much of the target came from the file, by number of elements; tied tensors count once.

    ``filled`` counts the elements of parameters from elsewhere by origin (``target``, a donor's path), ``adapted``
    those that recipes of ``--adapt`` computed, by recipe; the latter count as coming from the file."""

    parameters: int
    parameters_from_file: int
    buffers: int
    buffers_from_file: int
    filled: Mapping[str, int] = field(default_factory=dict)
    adapted: Mapping[str, int] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """The fraction of the target's parameters that came from the file, 1.0 for a target without parameters."""
        return self.parameters_from_file / self.parameters if self.parameters else 1.0

    @property
    def untrained(self) -> int:
        """Number of parameter elements with no trained source, neither the file nor another that the user named."""
        trained = sum(numel for origin, numel in self.filled.items() if origin in TRAINED)
        return self.parameters - self.parameters_from_file - trained


def measure_coverage(
    result: Checkpoint, target: Target, filled: Mapping[str, Fill | Replace], adapted: Iterable[Adapt] = ()
) -> Coverage:
    """Count the elements of the target's parameters and buffers that came from the file."""
    # Names tied to a filled tensor have values from elsewhere too.
    views = {result.specs[key].view: fill for key, fill in filled.items() if key in result.specs}
    filled = {**{key: views[spec.view] for key, spec in result.specs.items() if spec.view in views}, **filled}
    recipes = {result.specs[edit.key].view: edit for edit in adapted if edit.key in result.specs}
    counts: Counter[tuple[str, bool]] = Counter()
    origins: Counter[str] = Counter()
    by_recipe: Counter[str] = Counter()
    is_hooked = is_loaded_by_hooks(result, target)
    for key, group in target.names.items():
        slot = target.slots[key]
        fits = [name for name in group if name in result.specs and target.accepts(name, result.specs[name].shape)]
        numel = result.specs[fits[0]].numel if fits else slot.numel
        from_file = any(name not in filled for name in fits) or (is_hooked and key not in filled)
        counts[slot.kind, from_file] += numel
        edit = recipes.get(result.specs[fits[0]].view) if fits else None
        if fits and not from_file and slot.is_parameter:
            origins[filled[fits[0]].origin] += numel
        elif edit is not None and slot.is_parameter:
            by_recipe[edit.recipe] += numel - edit.untrained
            counts[PARAMETER, True] -= edit.untrained
            counts[PARAMETER, False] += edit.untrained
            origins["target"] += edit.untrained
    parameters, buffers = (
        (counts[kind, True] + counts[kind, False], counts[kind, True]) for kind in (PARAMETER, "buffer")
    )
    return Coverage(*parameters, *buffers, dict(+origins), dict(by_recipe))


def is_loaded_by_hooks(checkpoint: Checkpoint, target: Target) -> bool:
    """Return whether the model's hooks load every parameter although names or shapes differ."""
    if target.loads is None or not _misfits(checkpoint, target):
        return False
    loaded = target.loads(checkpoint)
    return loaded is not None and all(
        key in loaded for key, slot in target.slots.items() if slot.is_parameter and slot.shape is not None
    )


def lost_by_edits(source: Checkpoint, result: Checkpoint, target: Target, filled: Collection[str]) -> list[str]:
    """Return the parameters that the model's own hooks load from the source but that the result does not supply."""
    before = target.loads(source) if target.loads is not None and _misfits(source, target) else None
    if not before or is_loaded_by_hooks(result, target):
        return []
    missing = {key for key in _misfits(result, target) if key in target.slots}
    return sorted(key for key in before if key in missing or key in filled)


def obstacles(result: Checkpoint, target: Target, is_uncounted: bool = False) -> list[str]:
    """Return the keys on which a strict ``load_state_dict`` would fail: missing, unexpected, not a tensor, or of
    another shape. If the model's own hooks load everything, there are none.

    ``is_uncounted`` means a result for a torch without ``num_batches_tracked``."""
    return [] if is_loaded_by_hooks(result, target) else _misfits(result, target, is_uncounted)


def _misfits(result: Checkpoint, target: Target, is_uncounted: bool = False) -> list[str]:
    wanted = [*target.slots, *sorted(target.entries)]
    known = set(wanted)
    missing = [
        key
        for key in wanted
        if key not in result.entries and not (is_uncounted and split_key(key)[1] == NUM_BATCHES_TRACKED)
    ]
    unexpected = [key for key in result.entries if key not in known]
    mismatched = [
        key
        for key in target.slots
        if key in result.entries and not (key in result.specs and target.accepts(key, result.specs[key].shape))
    ]
    return [*missing, *unexpected, *mismatched]
