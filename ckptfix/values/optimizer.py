"""What the optimizer saved beside the weights says about how they were trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

PLACES = ("optimizer", "optimizer_state_dict", "optim", "optimizers", "optimizer_states", "opt")

HYPERPARAMETERS = ("lr", "momentum", "weight_decay")


def strongest_decay(root: object) -> dict[str, float] | None:
    """``lr``, ``momentum`` and ``weight_decay`` of the parameter group with the most decay; None where no optimizer is
    there."""
    groups = [_hyperparameters(group) for group in _param_groups(root)]
    return max(groups, key=lambda group: group.get("weight_decay", 0.0), default=None)


def _param_groups(root: object) -> Iterator[Mapping[str, object]]:
    if not isinstance(root, Mapping):
        return
    for place in PLACES:
        saved = root.get(place)
        for optimizer in saved if isinstance(saved, list) else [saved]:
            groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
            if isinstance(groups, list):
                yield from (group for group in groups if isinstance(group, Mapping))


def _hyperparameters(group: Mapping[str, object]) -> dict[str, float]:
    values = {name: group.get(name) for name in HYPERPARAMETERS}
    return {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}
