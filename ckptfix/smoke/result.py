"""What a forward test comes to, for the report."""

from dataclasses import dataclass

from ckptfix.smoke.outcome import Comparison


@dataclass(frozen=True)
class SmokeResult:
    """What the forward test saw. ``passed`` None means that it gave no verdict, for the reason in ``note``.

    ``device`` is where it ran (``cpu``, ``cuda:0``), ``inputs`` and ``outputs`` describe tensors as text (``float32[2,
    3, 224, 224]``), ``seconds`` is the time of the forward pass. ``checks`` are lines about what was looked at beyond
    it: training mode, gradients, another device. ``compared`` are the figures of the comparison with another file.
    """

    passed: bool | None
    device: str = ""
    note: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    seconds: float = 0.0
    checks: tuple[str, ...] = ()
    compared: Comparison | None = None
