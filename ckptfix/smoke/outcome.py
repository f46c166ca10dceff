"""What the child tells the parent, as plain data that goes through JSON. Free of torch: the parent never imports it for
this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ckptfix.core.smoke_result import Comparison

AFTERTHOUGHTS = ("devices", "control", "compare")
"""Stages that come after the verdict, which stands whatever becomes of them."""

ENVIRONMENT, INPUT, MODEL, CHECKPOINT = "environment", "input", "model", "checkpoint"
"""Whose fault a failure is."""


@dataclass(frozen=True)
class Figures:
    """The values of one tensor in short: how many are NaN or infinite, and the range of the finite ones (None without
    any).
    """

    tensor: str
    shown: str
    nan: int = 0
    positive_inf: int = 0
    negative_inf: int = 0
    low: float | None = None
    high: float | None = None

    @property
    def non_finite(self) -> int:
        """How many elements are NaN or infinite."""
        return self.nan + self.positive_inf + self.negative_inf

    @property
    def is_broken(self) -> bool:
        """Whether a weight with these values cannot be right: it is not finite, and no mask of zeros and -Inf."""
        is_mask = self.negative_inf == self.non_finite and not self.low and not self.high
        return self.non_finite > 0 and not is_mask

    @property
    def is_negative_variance(self) -> bool:
        """Whether this is the running variance of a BatchNorm, and below zero, where its root is NaN."""
        return self.tensor == "running_var" and self.low is not None and self.low < 0

    def __str__(self) -> str:
        counts = (f"{self.nan} NaN", f"{self.positive_inf} +Inf", f"{self.negative_inf} -Inf")
        bad = ", ".join(count for count in counts if not count.startswith("0 "))
        span = "" if self.low is None else f"finite values {self.low:.4g} … {self.high:.4g}"
        return ": ".join(filter(None, (f"{self.tensor} {self.shown}", ", ".join(filter(None, (bad, span))))))


@dataclass(frozen=True)
class Origin:
    """The first module whose inputs were finite and whose output was not."""

    module: str
    kind: str
    output: Figures
    inputs: tuple[Figures, ...] = ()
    weights: tuple[Figures, ...] = ()

    @property
    def name(self) -> str:
        """The module as a reader looks for it: ``features.3 (Conv2d)``."""
        return module_name(self.module, self.kind)

    @property
    def broken(self) -> tuple[str, ...]:
        """The keys of its weights that cannot be right: not finite, or a negative variance."""
        broken = (figures for figures in self.weights if figures.is_broken or figures.is_negative_variance)
        return tuple(self.key(figures.tensor) for figures in broken)

    def key(self, tensor: str) -> str:
        """The key of one of its tensors in the state_dict."""
        return f"{self.module}.{tensor}" if self.module else tensor


@dataclass(frozen=True)
class Failure:
    """Why the model did not run.

    ``error`` is one line; ``module`` and ``kind`` name the innermost module that was running, ``where`` the line of the
    user's code, ``keys`` the entries of the state_dict that it is about, ``origin`` the module that had made NaN
    before.
    """

    stage: str
    blame: str
    error: str
    module: str | None = None
    kind: str = ""
    where: str = ""
    keys: tuple[str, ...] = ()
    origin: Origin | None = None
    traceback: str = ""

    @property
    def place(self) -> str:
        """Where it happened, as the end of a sentence: `` in features.3 (Conv2d), at model.py:12 in forward``; empty
        where unknown.
        """
        module = f" in {module_name(self.module, self.kind)}" if self.module is not None else ""
        return module + (f"{',' if module else ''} at {self.where}" if self.where else "")


@dataclass(frozen=True)
class Gradients:
    """What a backward pass left behind, by the names of the parameters.

    ``missing`` have none, though they want one. ``operator`` and ``where`` are the backward function that first made a
    value that is not finite, and the line of the user's forward code that it belongs to.
    """

    finite: int = 0
    non_finite: tuple[str, ...] = ()
    zero: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    frozen: int = 0
    operator: str = ""
    where: str = ""

    def __str__(self) -> str:
        parts = (
            (self.finite, "finite"),
            (len(self.non_finite), "not finite"),
            (len(self.zero), "all zero"),
            (len(self.missing), "none"),
            (self.frozen, "frozen"),
        )
        return "gradients: " + (", ".join(f"{count} {what}" for count, what in parts if count) or "nothing to train")


@dataclass(frozen=True)
class Outcome:
    """What the child saw. ``failure`` None and no ``non_finite``: the model ran and gave finite values.

    ``derived`` means that the input came from the model and not from the user; ``undecided`` says why there is no
    verdict. ``finite_in_float32`` and ``shared`` are about values that are not finite: what the same pass gives in
    float32, where it ran in less, and whether the model with its own initial weights gives such values too.
    ``warnings`` are about the input that was given. ``training`` is the same in training mode, ``devices`` the
    comparison with the CPU, ``compared`` that with another file.
    """

    device: str = ""
    notes: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    seconds: float = 0.0
    failure: Failure | None = None
    non_finite: tuple[Figures, ...] = ()
    origin: Origin | None = None
    derived: bool = False
    undecided: str = ""
    finite_in_float32: bool | None = None
    shared: bool = False
    warnings: tuple[str, ...] = ()
    training: Outcome | None = None
    gradients: Gradients | None = None
    devices: Comparison | None = None
    compared: Comparison | None = None

    @property
    def is_good(self) -> bool:
        """Whether the model ran and gave finite values."""
        return self.failure is None and not self.non_finite

    @property
    def is_masked(self) -> bool:
        """Whether what is not finite is -Inf alone, a model's way to say "never"."""
        return bool(self.non_finite) and not any(figures.nan or figures.positive_inf for figures in self.non_finite)

    def to_json(self) -> dict[str, Any]:
        """The outcome as plain JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        """The outcome that ``to_json`` gave away."""
        known: dict[str, Any] = {name: tuple(item) if isinstance(item, list) else item for name, item in data.items()}
        known["non_finite"] = tuple(Figures(**figures) for figures in data["non_finite"])
        known["origin"] = _origin(data["origin"])
        if data["failure"] is not None:
            failure = dict(data["failure"])
            known["failure"] = Failure(
                **{**failure, "keys": tuple(failure["keys"]), "origin": _origin(failure["origin"])}
            )
        if data["training"] is not None:
            known["training"] = Outcome.from_json(data["training"])
        if data["gradients"] is not None:
            lists = {name: tuple(value) for name, value in data["gradients"].items() if isinstance(value, list)}
            known["gradients"] = Gradients(**{**data["gradients"], **lists})
        for name in ("devices", "compared"):
            known[name] = None if data[name] is None else Comparison(**data[name])
        return cls(**known)


def _origin(data: Mapping[str, Any] | None) -> Origin | None:
    if data is None:
        return None
    return Origin(
        data["module"],
        data["kind"],
        Figures(**data["output"]),
        tuple(Figures(**figures) for figures in data["inputs"]),
        tuple(Figures(**figures) for figures in data["weights"]),
    )


def module_name(path: str, kind: str) -> str:
    """A module as a reader looks for it: ``features.3 (Conv2d)``; the model itself has no path."""
    return f"{path} ({kind})" if path else f"the model itself ({kind})"
