"""Which of a file's state_dicts each optimizer trains, by its name and by the parameter names that fit it."""

import re
from collections.abc import Iterator

from ckptfix.core.checkpoint import Checkpoint, path_name
from ckptfix.core.spec import TensorSpec
from ckptfix.maps.optimizer_states import Optimizer
from ckptfix.maps.positions import namings
from ckptfix.maps.recipes import Layout
from ckptfix.reading.weights.containers import is_averaged
from ckptfix.rules.origins import may_learn


def with_owners(checkpoint: Checkpoint, optimizers: list[Optimizer]) -> Iterator[tuple[Optimizer, list[str]]]:
    """Yield the optimizers, each with the sets that it fits equally well; without the repaired set if it belongs to
    another one. Optimizers of other sets are left out if the repaired set has its own."""
    sets = _other_sets(checkpoint)
    own = path_name(checkpoint.container)
    owners = {optimizer.name: _owners(optimizer.name, [own, *sets]) for optimizer in optimizers}
    has_own = [own] in owners.values()
    for optimizer in optimizers:
        fitting = [name for name, layout in sets.items() if any(namings(optimizer, layout))]
        named = owners[optimizer.name]
        is_doubtful = bool(fitting) and named != [own]
        if is_doubtful and named and own not in named:
            if not has_own:
                yield optimizer, named
        elif not (is_doubtful and has_own):
            yield optimizer, [own, *fitting] if is_doubtful else []


def _other_sets(checkpoint: Checkpoint) -> dict[str, Layout]:
    """Return the state_dicts besides the repaired one, except averages, which no optimizer trains."""
    found: dict[str, Layout] = {}
    for candidate in checkpoint.candidates:
        if candidate.path == checkpoint.container or is_averaged(candidate.name):
            continue
        members = checkpoint.members(candidate)
        specs = {key: spec for key, spec in members.items() if isinstance(spec, TensorSpec)}
        found[candidate.name] = Layout({key: spec.shape for key, spec in specs.items() if may_learn(key, spec, None)})
    return found


_COMMON = frozenset("opt optim optimizer optimizers optimiser state states dict model models net weights".split())


def _owners(name: str, sets: list[str]) -> list[str]:
    """Return the state_dicts that an optimizer's name refers to: ``optG`` to ``G``, ``d_optim`` to ``netD``."""
    words = _words(name)
    return [
        one
        for one in sets
        if words == (own := _words(one)) or any(a.startswith(b) or b.startswith(a) for a in words for b in own)
    ]


def _words(name: str) -> set[str]:
    """Return the words of a name, without those that any optimizer or model may have."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", name)
    return {word.lower() for word in words} - _COMMON
