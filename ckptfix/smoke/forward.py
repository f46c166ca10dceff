"""Runs one forward pass, traced through the modules, and retries it in other ways if that may help."""

from __future__ import annotations

import gc
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.core.finding import counted
from ckptfix.core.lazy import nn, torch
from ckptfix.errors import CkptfixError
from ckptfix.smoke.inputs import Arguments, Input, make_arguments
from ckptfix.smoke.outcome import (
    MODEL,
    ExamOutcome,
    FaultOrigin,
    Figures,
    NotLoadedError,
    describe,
    diagnose,
    dtype_name,
    figures_of,
    is_cudnn_failure,
    is_dtype_mismatch,
    is_out_of_memory,
    tensors_in,
)

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


class DeviceError(CkptfixError):
    """The requested device does not work on this machine."""


def choose_device(name: str) -> tuple[torch.device, tuple[str, ...]]:
    """Return the device with this name, and notes about it. ``auto`` is CUDA if it works, otherwise the CPU.

    Numbers are those of torch: ``cuda:0`` is the first device in ``CUDA_VISIBLE_DEVICES``. Raises ``DeviceError`` if a
    named device does not work."""
    is_auto = name == "auto"
    if is_auto and not torch.cuda.is_available():
        return torch.device("cpu"), (" as ".join(filter(None, ("there is no CUDA device", _visible()))),)
    device = torch.device("cuda", torch.cuda.current_device()) if is_auto else torch.device(name)
    if not (fault := _fault(device)):
        return device, ()
    if is_auto:
        return torch.device("cpu"), (f"the CUDA environment is broken: {fault}",)
    shown = _visible() if device.type == "cuda" else ""
    raise DeviceError(f"the device {name} does not work here: {fault}{f' ({shown})' if shown else ''}")


def _visible() -> str:
    """Return the value of CUDA_VISIBLE_DEVICES in words; empty if it is not set."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return ""
    return f"CUDA_VISIBLE_DEVICES is {chosen}" if chosen.strip() else "CUDA_VISIBLE_DEVICES is empty"


def _fault(device: torch.device) -> str:
    """Return why the device fails to multiply two small matrices; empty if it does not."""
    try:
        ones = torch.ones(8, 8, device=device)
        total = float((ones @ ones).sum())
    except (RuntimeError, AssertionError, NotImplementedError, ImportError, AttributeError) as error:
        # Only the first sentence is about the device; a list of all backends may follow.
        return (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0].rstrip(".")
    return "" if total == 512 else f"8x8 ones multiplied sum to {total:g}, not to 512"


def place(model: nn.Module, device: torch.device) -> tuple[torch.dtype, tuple[str, ...]]:
    """Move the model to the device. Return the dtype of its floating inputs, which is that of its first floating
    parameter, and notes.

    On the CPU, a model entirely in float16 becomes float32, since many operators lack a float16 version there. A model
    that does not fit into the device's memory is moved in reduced precision."""
    dtype = compute_dtype(model)
    try:
        model.to(device)
    except torch.cuda.OutOfMemoryError:
        reduced = reduced_dtype(dtype, device)
        if reduced is None:
            raise
        model.to("cpu").to(reduced)
        torch.cuda.empty_cache()
        model.to(device)
        note = f"the weights did not fit into memory on {device}, so {dtype_name(dtype)} was reduced to"
        return reduced, (f"{note} {dtype_name(reduced)}",)
    held = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if device.type == "cpu" and dtype == torch.float16 and held == {dtype}:
        model.float()
        return torch.float32, ("float16 weights and input were converted to float32 for the CPU",)
    return dtype, ()


def compute_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of the first floating parameter, float32 if there is none."""
    ordinary = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    return next((parameter.dtype for parameter in model.parameters() if parameter.dtype in ordinary), torch.float32)


def reduced_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype | None:
    """Return the dtype that takes half the memory; None if there is none."""
    if dtype == torch.float64:
        return torch.float32
    if dtype != torch.float32:
        return None
    has_bfloat16 = device.type != "cuda" or torch.cuda.is_bf16_supported()
    return torch.bfloat16 if has_bfloat16 else torch.float16  # bfloat16 has the range of float32


def load_strictly(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Load with ``strict=True``. Raises ``NotLoadedError`` unless every floating parameter comes from the file."""
    with torch.no_grad():
        for parameter in filter(_can_be_nan, model.parameters()):
            parameter.fill_(torch.nan)
    # A model on the meta device needs `assign`; an overridden load_state_dict may not accept it.
    assign = {"assign": True} if any(parameter.is_meta for parameter in model.parameters()) else {}
    try:
        model.load_state_dict(state_dict, strict=True, **assign)
    except RuntimeError as error:
        raise _mismatch(model, state_dict, error) from error
    unproven = unloaded_parameters(model, state_dict)
    if unproven:
        raise NotLoadedError(
            f"the strict load skipped {counted(len(unproven), 'parameter')} that the file does not supply", unproven
        )


def unloaded_parameters(model: nn.Module, state_dict: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the parameters with more NaN than the file has under any of their names: they were not loaded."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in nn.Module.named_parameters(model, remove_duplicate=False):
        if _can_be_nan(parameter):
            names[parameter].append(name)
    missing = []
    for parameter, own in names.items():
        tensors = (state_dict[name] for name in own if name in state_dict)
        given = (int(tensor.isnan().sum()) for tensor in tensors if isinstance(tensor, torch.Tensor))
        if int(parameter.isnan().sum()) > max(given, default=0):
            missing.append(own[0])
    return tuple(missing)


def _can_be_nan(parameter: torch.Tensor) -> bool:
    """Return whether a parameter can be filled with NaN, and torch can count them."""
    from torch.nn.parameter import is_lazy

    ordinary = parameter.dtype.itemsize > 1 and (parameter.is_floating_point() or parameter.is_complex())
    return ordinary and parameter.layout == torch.strided and not parameter.is_meta and not is_lazy(parameter)


def _mismatch(model: nn.Module, state_dict: Mapping[str, Any], error: RuntimeError) -> NotLoadedError:
    """Return the error of the strict load with keys counted instead of listed."""
    wanted = model.state_dict()
    missing = [key for key in wanted if key not in state_dict]
    unexpected = [key for key in state_dict if key not in wanted]
    reshaped = [
        key
        for key, value in wanted.items()
        if isinstance(value, torch.Tensor) and isinstance(state_dict.get(key), torch.Tensor)
        if not torch.nn.parameter.is_lazy(value) and value.shape != state_dict[key].shape
    ]
    counts = ((missing, "missing key"), (unexpected, "unexpected key"), (reshaped, "size mismatch"))
    said = ", ".join(counted(len(keys), noun) for keys, noun in counts if keys)
    lines = [line.strip() for line in str(error).splitlines()]
    return NotLoadedError(f"the strict load found {said or lines[-1]}", (*missing, *unexpected, *reshaped))


class Trace:
    """A context that traces every call of a module in the model.

    A module is an origin if its inputs were finite when it was entered (it may overwrite them) and its output is not.
    Inner modules return before outer ones, so the first origin is the innermost."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []
        self._calls: list[tuple[str, nn.Module, tuple[Figures, ...]]] = []  # path, module, inputs
        self._origins: list[FaultOrigin] = []

    def __enter__(self) -> Trace:
        for path, module in self._model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # compiled code does not call Python hooks
            self._handles.append(module.register_forward_pre_hook(self._entering(path), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leaving))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def running(self) -> tuple[str, str] | None:
        """Path and class of the innermost running module: after an error, the one that raised. None without one."""
        return next(((path, type(module).__name__) for path, module, _ in reversed(self._calls)), None)

    @property
    def depth(self) -> int:
        """The number of running modules; 1 is the model itself."""
        return len(self._calls)

    @property
    def origin(self) -> FaultOrigin | None:
        """The first module that turned finite values into NaN or +Inf; without one, the first that made -Inf, which
        masks contain by design."""
        made = [origin for origin in self._origins if origin.output.nan or origin.output.positive_inf]
        return next(iter(made + self._origins), None)

    def _entering(self, path: str) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = {**{f"input[{index}]": value for index, value in enumerate(args)}, **kwargs}
            self._calls.append((path, module, _figures(given)))

        return enter

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._calls:
            path, left, inputs = self._calls.pop()
            if left is module:
                break  # the inner calls raised, and the model caught that
        else:
            return
        if any(figures.non_finite for figures in inputs):
            return
        bad = next((figures for figures in _figures({"output": output}) if figures.non_finite), None)
        if bad is not None:
            self._origins.append(FaultOrigin(path, type(module).__name__, bad, inputs, _weights(module)))


def _weights(module: nn.Module) -> tuple[Figures, ...]:
    """Return the figures of the module's own tensors, and of broken ones in its children."""
    own, below = (
        [*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)] for recurse in (False, True)
    )
    names = {name for name, _ in own}
    figures = _figures({name: tensor for name, tensor in below if tensor.is_floating_point()})
    return tuple(one for one in figures if one.tensor in names or one.is_broken)


def _figures(values: dict[str, Any]) -> tuple[Figures, ...]:
    return tuple(figures_of(name, tensor) for name, tensor in tensors_in(values))


class LoadedModel(Struct):
    """The model under test, and where it runs. ``dtype`` is that of its floating inputs; ``is_converted`` if a retry
    has converted the whole model to it."""

    model: nn.Module
    device: torch.device
    dtype: torch.dtype
    seed: int = 0
    is_converted: bool = False

    @property
    def setting(self) -> Setting:
        """How another model has to run to be compared with this one."""
        return Setting(self.device, self.seed, self.dtype if self.is_converted else None)

    def arguments(self, given: Iterable[Input]) -> Arguments:
        return make_arguments(given, self.dtype, self.device, self.seed)

    def convert(self, dtype: torch.dtype) -> None:
        """Convert the whole model to one floating dtype."""
        self.model.to(dtype=dtype)
        self.dtype = dtype
        self.is_converted = True

    def release(self) -> None:
        """Drop the model, to make room for another one. This object has no model afterwards."""
        if hasattr(self, "model"):
            del self.model


class Setting(Struct, frozen=True):
    """How a model runs: its device, its seed, and the dtype it is ``converted`` to, None for its own."""

    device: torch.device
    seed: int = 0
    converted: torch.dtype | None = None

    def prepare(self, model: nn.Module) -> tuple[LoadedModel, tuple[str, ...]]:
        """Return the model in eval mode on the device, and notes about moving it."""
        dtype, notes = place(model.eval(), self.device)
        subject = LoadedModel(model, self.device, dtype, self.seed)
        if self.converted is not None:
            subject.convert(self.converted)
        return subject, notes


class Pass(Struct, frozen=True):
    """A forward pass: its outcome, arguments and setting, and the named outputs."""

    outcome: ExamOutcome
    arguments: Arguments
    setting: Setting
    outputs: tuple[tuple[str, torch.Tensor], ...] = ()

    def detached(self) -> Pass:
        """Return the pass with copies of the outputs, which later changes of the model do not affect."""
        return replace(self, outputs=tuple((name, tensor.detach().cpu().clone()) for name, tensor in self.outputs))

    def noting(self, *notes: str) -> Pass:
        return replace(self, outcome=replace(self.outcome, notes=(*self.outcome.notes, *notes)))


def forward(subject: LoadedModel, arguments: Arguments, base: ExamOutcome) -> Pass:
    """Call the model once. An error of its code is part of the outcome and never raised.

    The outcome continues ``base``, whose failure and non-finite values from an earlier pass are dropped."""
    given = {**{f"[{index}]": value for index, value in enumerate(arguments.args)}, **arguments.kwargs}
    # a single positional input needs no name in the report
    names = {name: "" if len(given) == 1 and not arguments.kwargs else name for name in given}
    base = replace(
        base,
        inputs=tuple(describe(names[name], tensor) for name, tensor in given.items()),
        notes=base.notes + arguments.notes,
        warnings=base.warnings + arguments.warnings,
        failure=None,
        non_finite=(),
        origin=None,
    )
    torch.manual_seed(subject.seed)
    started = time.perf_counter()
    with Trace(subject.model) as trace:
        try:
            output = subject.model(*arguments.args, **arguments.keywords)
            synchronize(subject.device)
        except (Exception, SystemExit) as error:  # noqa: BLE001  the user's code may raise anything, and that is the finding
            failure = diagnose("forward", error, trace.running, trace.depth, trace.origin)
            return Pass(replace(base, failure=failure), arguments, subject.setting)
    seconds = time.perf_counter() - started
    tensors = tuple(tensors_in(output))
    figures = (figures_of(name or "output", tensor) for name, tensor in tensors)
    bad = tuple(each for each in figures if each.non_finite)
    outcome = replace(
        base,
        outputs=tuple(describe(name, tensor) for name, tensor in tensors),
        seconds=seconds,
        notes=base.notes if tensors else (*base.notes, "the output contains no tensor"),
        non_finite=bad,
        origin=trace.origin if bad else None,
    )
    return Pass(outcome, arguments, subject.setting, tensors)


def synchronize(device: torch.device) -> None:
    """Wait for the GPU, whose errors would otherwise be reported at a later line."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def attempt(subject: LoadedModel, arguments: Arguments, base: ExamOutcome) -> Pass:
    """Run the forward pass, and again without cuDNN, in one dtype or with less memory if that may help."""
    run = forward(subject, arguments, base)
    if is_cudnn_failure(run.outcome.failure):
        run = _without_cudnn(subject, run, base)
    if is_dtype_mismatch(run.outcome.failure):
        run = _in_one_dtype(subject, run, base)
    if is_out_of_memory(run.outcome.failure):
        run = _with_less(subject, run, base)
    return run


def _without_cudnn(subject: LoadedModel, failed: Pass, base: ExamOutcome) -> Pass:
    with torch.backends.cudnn.flags(enabled=False):
        run = forward(subject, failed.arguments, base)
    if is_cudnn_failure(run.outcome.failure):
        return failed.noting("it also failed with cuDNN turned off")
    error = failed.outcome.failure.error if failed.outcome.failure is not None else ""
    return run.noting(f"cuDNN failed ({error}), so it was turned off")


def _in_one_dtype(subject: LoadedModel, failed: Pass, base: ExamOutcome) -> Pass:
    """Run again with the whole model in its widest dtype, at least float32, which changes no value."""
    held = {parameter.dtype for parameter in subject.model.parameters() if parameter.is_floating_point()}
    widest = torch.float64 if torch.float64 in held else torch.float32
    if held <= {widest}:
        return _blaming_the_code(failed, widest)
    subject.convert(widest)
    run = forward(subject, failed.arguments.to(subject.device, widest), base)
    if is_dtype_mismatch(run.outcome.failure):
        return run
    mixed = ", ".join(sorted(map(dtype_name, held)))
    return run.noting(
        f"the model's {mixed} parameters met another dtype, so all were converted to {dtype_name(widest)}"
    )


def _blaming_the_code(failed: Pass, dtype: torch.dtype) -> Pass:
    """Blame the model's code for a second dtype if parameters and inputs have only one; not if an input is integer."""
    given = (*failed.arguments.args, *failed.arguments.kwargs.values())
    failure = failed.outcome.failure
    if failure is None or not all(tensor.is_floating_point() for tensor in given):
        return failed
    accused = replace(failed.outcome, failure=replace(failure, blame=MODEL))
    note = f"parameters and input are all {dtype_name(dtype)}: the other dtype comes from the model's code"
    return replace(failed, outcome=accused).noting(note)


def _with_less(subject: LoadedModel, failed: Pass, base: ExamOutcome) -> Pass:
    """Run again with the batch halved, down to 1, then with the whole model in reduced precision."""
    full = size = failed.arguments.batch
    run = failed
    while size > 1 and is_out_of_memory(run.outcome.failure):
        size //= 2
        _free(subject)
        run = forward(subject, failed.arguments.first(size), base)
    if not is_out_of_memory(run.outcome.failure):
        return run.noting(f"a batch of {full} did not fit into memory, so it was cut to {size}")
    before, reduced = subject.dtype, reduced_dtype(subject.dtype, subject.device)
    if reduced is not None:
        _free(subject)
        subject.convert(reduced)
        run = forward(subject, failed.arguments.first(1).to(subject.device, reduced), base)
        if run.outcome.failure is None:
            return run.noting(
                f"a batch of {full} did not fit into memory, so it was cut to 1 and {dtype_name(before)} reduced to"
                f" {dtype_name(reduced)}"
            )
    tried = f"a batch of 1 in {dtype_name(subject.dtype)} did not fit into memory either"
    return failed.noting(tried) if is_out_of_memory(run.outcome.failure) else failed


def _free(subject: LoadedModel) -> None:
    gc.collect()
    if subject.device.type == "cuda":
        torch.cuda.empty_cache()
