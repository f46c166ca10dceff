"""What a saved optimizer shows about the training of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from msgspec import Struct

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.lazy import np
from ckptfix.core.spec import TensorSpec
from ckptfix.core.target import Target
from ckptfix.maps.optimizer_states import optimizers_in
from ckptfix.maps.recipes import Layout, named_by_itself, namings
from ckptfix.values.decode import Array, encoding
from ckptfix.values.roles import is_buffer
from ckptfix.values.statistics import tensor_statistics
from ckptfix.values.walk import Walk

HYPERPARAMETERS = ("lr", "momentum", "weight_decay")

# Names under which trainers save the number of steps.
COUNTERS = ("global_step", "step", "steps", "iteration", "iter", "num_steps", "num_updates")

# Share of the learning rate below which no loss leaves a weight: a step of Adam is about as large as the rate.
OF_A_STEP = 0.1


class Training(Struct, frozen=True):
    """The optimizer's effect on one parameter.

    ``second_moments`` is Adam's average of the squared gradient, ``momentum`` SGD's buffer. ``initial_lr`` is where a
    scheduler started. With ``decoupled`` weight decay, as in AdamW, the decay is not part of the gradients."""

    lr: float
    weight_decay: float
    momentum_factor: float = 0.0
    initial_lr: float | None = None
    steps: int | None = None
    second_moments: TensorSpec | None = None
    momentum: TensorSpec | None = None
    decoupled: bool = False

    @property
    def saw_no_gradient(self) -> bool | None:
        """Whether the second moments are zero throughout; None for an optimizer without them."""
        return None if self.second_moments is None else tensor_statistics(self.second_moments).all_zero

    def saw_decay_only(self, rms: float, start: float) -> bool:
        """Return whether a parameter that shrank from ``start`` to ``rms`` got only the gradients of Adam's own weight
        decay: moments are no larger, and weights are smaller than one step on a loss would make them."""
        if self.second_moments is None or self.decoupled or rms >= OF_A_STEP * max(self.lr, self.initial_lr or 0.0):
            return False
        return tensor_statistics(self.second_moments).mean <= (self.weight_decay * start) ** 2

    def predicted_share(self, steps: int | None) -> float | None:
        """Return the share of its initial size that a parameter without gradients keeps after these steps, if known.

        A scheduler is assumed to lower the rate evenly, so the mean rate is half of the initial one."""
        if steps is None or self.weight_decay <= 0 or (self.second_moments is not None and not self.saw_no_gradient):
            return None
        is_scheduled = self.initial_lr is not None and self.initial_lr != self.lr
        lr = (self.initial_lr or 0.0) / 2 if is_scheduled else self.lr
        rate = lr * self.weight_decay
        return _factor(rate, self.momentum_factor) ** steps if 0 < rate < 1 else None


def strongest_decay(root: object) -> dict[str, float] | None:
    """Return the ``lr``, ``momentum`` and ``weight_decay`` of the group with the most decay, if there is one."""
    found = (
        {name: float(value) for name in HYPERPARAMETERS if isinstance(value := group.get(name), (int, float))}
        for optimizer in optimizers_in(root)
        for group in optimizer.groups
    )
    return max(found, key=lambda group: group.get("weight_decay", 0.0), default=None)


def counted_steps(root: object) -> int | None:
    """Return the number of steps that the trainer saved; None if it saved none."""
    counts = [root.get(name) for name in COUNTERS] if isinstance(root, Mapping) else []
    return max((count for count in counts if type(count) is int and count > 0), default=None)


def was_stepped(root: object) -> bool:
    """Return whether the optimizer or the trainer shows that training has begun."""
    return counted_steps(root) is not None or any(optimizer.state for optimizer in optimizers_in(root))


def trainings(checkpoint: Checkpoint, target: Target | None) -> Mapping[str, Training]:
    """Return the training of each parameter, by key; empty if nothing shows which parameter is at which position.

    Names by a recipe count only if the file has moments to confirm them, and all fitting recipes agree."""
    parameters = {key: spec for key, spec in checkpoint.specs.items() if not is_buffer(key, spec, target)}
    layout = Layout({key: spec.shape for key, spec in parameters.items()})
    for optimizer in optimizers_in(checkpoint.root):
        found = named_by_itself(optimizer, parameters) or list(namings(optimizer, layout))
        if found and found[0].moments and all(naming.names == found[0].names for naming in found):
            group_of = {number: group for group in optimizer.groups for number in group["params"]}
            return {key: _training(group_of[number], optimizer.row(number)) for number, key in found[0].names.items()}
    return {}


def alignment(weight: TensorSpec, other: TensorSpec) -> float | None:
    """Return the cosine between a tensor and its momentum; None if they are stored differently."""
    if not all(spec.storage is not None and encoding(spec.dtype) and spec.is_contiguous for spec in (weight, other)):
        return None
    if weight.dtype != other.dtype or weight.shape != other.shape or not weight.numel:
        return None
    scales = [tensor_statistics(spec).absmax or 1.0 for spec in (weight, other)]  # or squares underflow
    sums = np.zeros(3)
    for mine, theirs in zip(_numbers_of(weight), _numbers_of(other), strict=True):
        mine, theirs = mine / scales[0], theirs / scales[1]
        sums += mine @ theirs, mine @ mine, theirs @ theirs
    return float(sums[0] / math.sqrt(sums[1] * sums[2])) if sums[1] * sums[2] > 0 else None


def _numbers_of(spec: TensorSpec) -> Iterator[Array]:
    stored = encoding(spec.dtype)
    assert stored is not None, f"{spec.dtype} holds no numbers"
    for block in Walk(spec).blocks():
        yield stored.decode(np.frombuffer(block, dtype=stored.unit)).astype(np.float64)


def _factor(rate: float, momentum: float) -> float:
    """Return the factor by which a step of SGD shrinks a weight that only decays, in the long run.

    With momentum m and decay r, it is the larger root of z² - (1 + m - r) z + m, about 1 - r / (1 - m)."""
    middle = (1 + momentum - rate) / 2
    below = middle**2 - momentum
    return middle + math.sqrt(below) if below > 0 else math.sqrt(momentum)


def _training(group: Mapping[str, object], row: Mapping[str, object]) -> Training:
    second, momentum = row.get("exp_avg_sq"), row.get("momentum_buffer")
    initial = group.get("initial_lr")
    return Training(
        lr=_number(group.get("lr")),
        weight_decay=_number(group.get("weight_decay")),
        momentum_factor=min(max(_number(group.get("momentum")), 0.0), 0.9999),
        initial_lr=float(initial) if isinstance(initial, (int, float)) else None,
        steps=_count(row.get("step")),
        second_moments=second if isinstance(second, TensorSpec) and second.has_data else None,
        momentum=momentum if isinstance(momentum, TensorSpec) and momentum.has_data else None,
        decoupled=group.get("decoupled_weight_decay") is True,
    )


def _count(step: object) -> int | None:
    """Return a step count, which is an int before torch 1.12 and a 0-d tensor since."""
    if isinstance(step, TensorSpec) and step.numel == 1 and step.has_data:
        return int(tensor_statistics(step).maximum)
    return int(step) if isinstance(step, (int, float)) and math.isfinite(step) else None


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
