"""What the child tells the parent, as plain data that goes through JSON. Free of torch: the parent never imports it for
this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

STAGES = ("start", "device", "build", "read", "load", "move", "input", "forward", "control")
"""What the child does, in order; the last stage that it named is where a crash or a time-out happened."""

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


@dataclass(frozen=True)
class Failure:
    """Why the model did not run.

    ``error`` is one line; ``module`` and ``kind`` name the innermost module that was running, ``where`` the line of the
    user's code, ``keys`` the entries of the state_dict that it is about, ``origin`` the module that had made NaN
    before, ``contrast`` says what ran where this did not.
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
    contrast: str = ""

    @property
    def place(self) -> str:
        """Where it happened, as the end of a sentence: `` in features.3 (Conv2d), at model.py:12 in forward``; empty
        where unknown.
        """
        module = f" in {module_name(self.module, self.kind)}" if self.module is not None else ""
        return module + (f"{',' if module else ''} at {self.where}" if self.where else "")


@dataclass(frozen=True)
class Outcome:
    """What the child saw. ``failure`` None and no ``non_finite``: the model ran and gave finite values.

    ``derived`` means that the input came from the model and not from the user; ``undecided`` says why there is no
    verdict.
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

    def to_json(self) -> dict[str, Any]:
        """The outcome as plain JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        """The outcome that ``to_json`` gave away."""
        known = dict(data)
        known["non_finite"] = tuple(Figures(**figures) for figures in data["non_finite"])
        known["origin"] = _origin(data["origin"])
        if data["failure"] is not None:
            failure = dict(data["failure"])
            known["failure"] = Failure(
                **{**failure, "keys": tuple(failure["keys"]), "origin": _origin(failure["origin"])}
            )
        for name in ("notes", "inputs", "outputs"):
            known[name] = tuple(data[name])
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
