"""The results of a forward test and of the proof of a map, for the report."""

import math

from msgspec import Struct

from ckptfix.core.finding import counted


class Comparison(Struct, frozen=True):
    """How far apart the outputs of two runs on the same input are.

    ``difference`` is the largest absolute difference, ``scale`` the largest absolute value of the reference, and
    ``tolerance`` the fraction of it that rounding in their dtype explains. ``agreement`` is the fraction of equal
    argmax over the last dimension, None if there are no classes. ``unlike`` says why the two cannot be compared, and is
    empty if they can. ``differing`` of the ``tensors`` in one file are not bit-identical in the other; None if they
    were not compared."""

    against: str
    identical: bool = False
    difference: float = 0.0
    scale: float = 0.0
    tolerance: float = 0.0
    agreement: float | None = None
    unlike: str = ""
    differing: int | None = None
    tensors: int = 0

    @property
    def is_close(self) -> bool:
        """Whether the outputs are the same except for rounding."""
        return not self.unlike and self.difference <= self.tolerance * self.scale

    def __str__(self) -> str:
        if self.unlike or self.identical:
            return f"against {self.against}: {f'not comparable, {self.unlike}' if self.unlike else 'bit-equal'}"
        classes = "" if self.agreement is None else f", argmax agrees in {100 * self.agreement:.4g} %"
        known = (
            ""
            if self.differing is None
            else f"; the weights differ in {self.differing} of {counted(self.tensors, 'tensor')}"
        )
        if math.isinf(self.difference):
            return f"against {self.against}: a value is finite in one and not in the other{classes}{known}"
        rounding = f"rounding explains {self.tolerance * self.scale:.2g}"
        return f"against {self.against}: largest difference {self.difference:.2g} ({rounding}){classes}{known}"


class SmokeResult(Struct, frozen=True):
    """The result of the forward test. ``passed`` is None if it gave no verdict, for the reason in ``note``.

    ``device`` is where it ran (``cpu``, ``cuda:0``), ``inputs`` and ``outputs`` describe tensors as text (``float32[2,
    3, 224, 224]``), ``seconds`` is the time of the forward pass. ``checks`` are lines about additional checks: training
    mode, gradients, another device. ``compared`` is the comparison with another file."""

    passed: bool | None
    device: str = ""
    note: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    seconds: float = 0.0
    checks: tuple[str, ...] = ()
    compared: Comparison | None = None


class Equivalence(Struct, frozen=True):
    """The result of running the file's model and the target with the same random weights on the same input.

    ``chosen`` is the index of the map that makes the outputs equal, None if there is none, and ``tried`` the number of
    maps. ``difference`` is the smallest one seen, as a fraction of the largest output. ``unobservable`` are the keys of
    the target that can be swapped with a similar tensor without a change in the outputs; of these, ``open`` are not
    implied by other tensors of their module either. ``epsilons`` are those of the norms of both models, if they differ:
    the outputs were compared with equal ones, and with their own they differ by ``own``. ``doubt`` says why the test is
    inconclusive, and is empty if the map is proved or refuted."""

    chosen: int | None = None
    tried: int = 0
    difference: float = math.inf
    unobservable: tuple[str, ...] = ()
    open: tuple[str, ...] = ()
    epsilons: tuple[tuple[float, ...], ...] = ()
    own: float = 0.0
    doubt: str = ""

    @property
    def is_proved(self) -> bool:
        """Whether the outputs are equal, in a test that is conclusive."""
        return self.chosen is not None and not self.doubt

    @property
    def is_refuted(self) -> bool:
        """Whether the outputs differ with every map that was tried."""
        return self.chosen is None and not self.doubt

    def __str__(self) -> str:
        if self.doubt:
            return f"not proved: {self.doubt}"
        far = f"{self.difference:.1g} of the largest"
        if self.chosen is None:
            each = f", with each of {self.tried} maps" if self.tried > 1 else ""
            return f"the outputs of the two models differ by {far}{each}: they do not compute the same"
        epsilons = " and ".join(", ".join(f"{each:g}" for each in some) for some in self.epsilons)
        own = f"; with their own, the outputs differ by {self.own:.1g}"
        unlike = f", if the epsilons of their norms, {epsilons}, are made equal{own}" if epsilons else ""
        if self.open:
            return f"the outputs of both models are equal (to {far}{unlike}), but show not all of the map"
        return f"verified: the outputs of both models are equal (to {far}{unlike})"
