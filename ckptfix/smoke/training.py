"""What training would meet: a forward pass in training mode, and a backward pass.

In training mode a BatchNorm uses the statistics of the batch, in eval mode those of the file. Weights that are fine in
one and give NaN in the other therefore point to the running statistics.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptfix.smoke.diagnosis import diagnose, is_user_file
from ckptfix.smoke.forward import Pass, Subject, forward, synchronize
from ckptfix.smoke.inputs import Arguments
from ckptfix.smoke.outcome import Gradients, Outcome
from ckptfix.smoke.outputs import figures_of, values_of
from ckptfix.smoke.retries import attempt

if TYPE_CHECKING:
    import torch

_DOUBLED = "the batch of 1 was doubled, since a BatchNorm cannot train on one value per channel"
_NOT_FINITE = re.compile(r"Function '(\w+)' returned nan values")


def train(subject: Subject, arguments: Arguments, backward: bool, base: Outcome) -> Outcome:
    """The outcome of a pass in training mode, with the gradients where a backward pass was asked for."""
    import torch

    # A check in float32 may have converted the model since the pass in eval mode.
    arguments = replace(arguments, notes=(), warnings=()).to(subject.device, subject.dtype)
    base = Outcome(device=base.device, derived=base.derived)
    buffers = {name: buffer.clone() for name, buffer in subject.model.named_buffers()}
    subject.model.train()
    # The detection has to see the forward pass too: it remembers which line made each step of the graph.
    with torch.set_grad_enabled(backward), torch.autograd.set_detect_anomaly(backward):
        run = _forward(subject, arguments, base)
        can_go_back = run.outcome.is_good or run.outcome.is_masked
        outcome = _backward(subject, run) if backward and can_go_back else run.outcome
    subject.model.eval()
    with torch.no_grad():
        for name, buffer in subject.model.named_buffers():  # the running statistics moved
            if name in buffers and buffer.shape == buffers[name].shape:
                buffer.copy_(buffers[name])
    return outcome


def _forward(subject: Subject, arguments: Arguments, base: Outcome) -> Pass:
    """The pass with a batch of at least two, unless the model takes no more than one."""
    if arguments.batch > 1:
        return attempt(subject, arguments, base)
    run = attempt(subject, arguments.doubled(), replace(base, notes=(_DOUBLED,)))
    alone = run if run.outcome.is_good else attempt(subject, arguments, base)
    return alone if alone.outcome.is_good else run


def _backward(subject: Subject, run: Pass) -> Outcome:
    """Backward under anomaly detection; where that stops at a value that is not finite, once more without it, to see
    which parameters it reaches.
    """
    import torch

    operator = where = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _backward_from(run.outputs, subject)
        except Exception as error:  # noqa: BLE001  the user's own backward may raise anything
            found = _NOT_FINITE.search(str(error))
            if found is None:
                return replace(run.outcome, failure=diagnose("training", error))
            operator, where = found[1], _line_of_user("".join(str(warning.message) for warning in caught))
    if operator:
        subject.model.zero_grad(set_to_none=True)
        with torch.autograd.set_detect_anomaly(False):
            _backward_from(forward(subject, run.arguments, run.outcome).outputs, subject)
    return replace(run.outcome, gradients=replace(_look(subject), operator=operator, where=where))


def _backward_from(outputs: Iterable[tuple[str, torch.Tensor]], subject: Subject) -> None:
    import torch

    loss = _projection((tensor for _, tensor in outputs), subject.seed)
    if loss is not None:
        torch.autograd.backward(loss)
        synchronize(subject.device)


def _projection(tensors: Iterable[torch.Tensor], seed: int) -> torch.Tensor | None:
    """A number that depends on every finite value of the outputs; None where none carries a gradient.

    A random projection: the gradient of a plain sum is zero behind a softmax or a norm.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    real = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor for tensor in tensors)
    given = (tensor for tensor in real if tensor.requires_grad and tensor.numel())
    parts = [
        (tensor * torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)).sum() / tensor.numel()
        for tensor in (tensor.where(tensor.isfinite(), 0) if _is_masked(tensor) else tensor for tensor in given)
    ]
    return torch.stack([part.float() for part in parts]).sum() if parts else None


def _is_masked(tensor: torch.Tensor) -> bool:
    return figures_of("", tensor).non_finite > 0


def _look(subject: Subject) -> Gradients:
    finite = frozen = 0
    non_finite, zero, missing = [], [], []
    for name, parameter in subject.model.named_parameters():
        if not parameter.requires_grad:
            frozen += 1
        elif parameter.grad is None:
            missing.append(name)
        elif figures_of(name, parameter.grad).non_finite:
            non_finite.append(name)
        elif not values_of(parameter.grad).any():
            zero.append(name)
        else:
            finite += 1
    return Gradients(finite, tuple(non_finite), tuple(zero), tuple(missing), frozen)


def _line_of_user(text: str) -> str:
    """The innermost line of the user's code in the traceback that the detection wrote: ``model.py:12 in forward``."""
    where = ""
    for file, line, function in re.findall(r'File "(.+)", line (\d+), in (\S+)', text):
        if is_user_file(file):
            where = f"{Path(file).name}:{line} in {function}"
    return where
