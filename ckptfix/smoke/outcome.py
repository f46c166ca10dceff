"""The outcome of an exam, as plain data that the child sends to the parent as JSON. Reading it needs no torch."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msgspec import Struct

from ckptfix.core.lazy import torch
from ckptfix.core.smoke_result import Comparison
from ckptfix.errors import CkptfixError, TargetError

# Stages after the verdict, which do not change it.
LATER_STAGES = ("devices", "control", "compare")
ENVIRONMENT, INPUT, MODEL, CHECKPOINT = "environment", "input", "model", "checkpoint"  # what is to blame for a failure


class Figures(Struct, frozen=True):
    """The numbers of NaN and infinite values in a tensor, and the range of the finite ones, None without any."""

    tensor: str
    shown: str
    nan: int = 0
    positive_inf: int = 0
    negative_inf: int = 0
    low: float | None = None
    high: float | None = None

    @property
    def non_finite(self) -> int:
        """The number of values that are NaN or infinite."""
        return self.nan + self.positive_inf + self.negative_inf

    @property
    def is_broken(self) -> bool:
        """Whether a weight with these values is broken: not finite, and not a mask of zeros and -Inf."""
        is_mask = self.negative_inf == self.non_finite and not self.low and not self.high
        return self.non_finite > 0 and not is_mask

    @property
    def is_negative_variance(self) -> bool:
        """Whether this is a negative running variance of a BatchNorm, whose root is NaN."""
        return self.tensor == "running_var" and self.low is not None and self.low < 0

    def __str__(self) -> str:
        counts = (f"{self.nan} NaN", f"{self.positive_inf} +Inf", f"{self.negative_inf} -Inf")
        bad = ", ".join(count for count in counts if not count.startswith("0 "))
        span = "" if self.low is None else f"finite values {self.low:.4g} … {self.high:.4g}"
        return ": ".join(filter(None, (f"{self.tensor} {self.shown}", ", ".join(filter(None, (bad, span))))))


class FaultOrigin(Struct, frozen=True):
    """The first module whose inputs were finite and whose output was not."""

    module: str
    kind: str
    output: Figures
    inputs: tuple[Figures, ...] = ()
    weights: tuple[Figures, ...] = ()

    @property
    def name(self) -> str:
        """The module in words: ``features.3 (Conv2d)``."""
        return module_name(self.module, self.kind)

    @property
    def broken(self) -> tuple[str, ...]:
        """The keys of its broken weights: not finite, or a negative variance."""
        broken = (figures for figures in self.weights if figures.is_broken or figures.is_negative_variance)
        return tuple(self.key(figures.tensor) for figures in broken)

    def key(self, tensor: str) -> str:
        """Return the key of one of its tensors in the state_dict."""
        return f"{self.module}.{tensor}" if self.module else tensor


class Failure(Struct, frozen=True):
    """Why the model did not run.

    ``error`` is one line; ``module`` and ``kind`` are path and class of the innermost running module, ``where`` the
    line of the user's code, ``keys`` the entries of the state_dict that it is about, ``origin`` the module that had
    made non-finite values before."""

    stage: str
    blame: str
    error: str
    module: str | None = None
    kind: str = ""
    where: str = ""
    keys: tuple[str, ...] = ()
    origin: FaultOrigin | None = None
    traceback: str = ""

    @property
    def place(self) -> str:
        """Where it happened, to end a sentence: `` in features.3 (Conv2d), at model.py:12 in forward``; empty if
        unknown."""
        module = f" in {module_name(self.module, self.kind)}" if self.module is not None else ""
        return module + (f"{',' if module else ''} at {self.where}" if self.where else "")


class Gradients(Struct, frozen=True):
    """The gradients after a backward pass, by the names of the parameters.

    ``missing`` ones require a gradient and have none. ``operator`` is the first backward function that made a
    non-finite value, ``where`` the line of the user's forward code that it belongs to."""

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


class ExamOutcome(Struct, frozen=True):
    """The outcome of an exam. Without ``failure`` and ``non_finite``, the model ran and its output is finite.

    ``derived`` means that the input was derived from the model, not given; ``undecided`` says why there is no verdict.
    For non-finite values, ``finite_in_float32`` says whether the same pass is finite in float32, if it ran in less, and
    ``shared`` whether the model gives such values with its own initial weights too. ``warnings`` are about the given
    input. ``training`` is the outcome in training mode, ``devices`` the comparison with the CPU, ``compared`` that with
    another file."""

    device: str = ""
    notes: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    seconds: float = 0.0
    failure: Failure | None = None
    non_finite: tuple[Figures, ...] = ()
    origin: FaultOrigin | None = None
    derived: bool = False
    undecided: str = ""
    finite_in_float32: bool | None = None
    shared: bool = False
    warnings: tuple[str, ...] = ()
    training: ExamOutcome | None = None
    gradients: Gradients | None = None
    devices: Comparison | None = None
    compared: Comparison | None = None

    @property
    def is_good(self) -> bool:
        """Whether the model ran and gave finite values."""
        return self.failure is None and not self.non_finite

    @property
    def is_masked(self) -> bool:
        """Whether the only non-finite values are -Inf, as from masks."""
        return bool(self.non_finite) and not any(figures.nan or figures.positive_inf for figures in self.non_finite)


def module_name(path: str, kind: str) -> str:
    """Return a module in words: ``features.3 (Conv2d)``; the model itself has no path."""
    return f"{path} ({kind})" if path else f"the model itself ({kind})"


class NotLoadedError(CkptfixError):
    """The file does not load all parameters of the model. ``keys`` are the affected ones."""

    def __init__(self, message: str, keys: tuple[str, ...]) -> None:
        super().__init__(message)
        self.keys = keys


_DEPTH = 16  # outputs are nested a few levels; deeper is a cycle


def tensors_in(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in nested tuples, lists, dicts, dataclasses and named tuples, with its path (``logits``,
    ``hidden[2]``).

    transformers' ModelOutput is an OrderedDict, a PackedSequence a named tuple."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth < _DEPTH:
        for step, part in _parts(value):
            yield from tensors_in(part, f"{name}{step}" if name else step.removeprefix("."), depth + 1)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    import dataclasses

    if isinstance(value, Mapping):
        yield from ((f".{key}", part) for key, part in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f".{field}", getattr(value, field)) for field in value._fields)
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value))


def describe(name: str, tensor: torch.Tensor) -> str:
    """Return a tensor for the report: ``float32[2, 10]``, or with its name ``logits: float32[2, 10]``."""
    shown = shape_of(tensor)
    return f"{name}: {shown}" if name else shown


def shape_of(tensor: torch.Tensor) -> str:
    """Return dtype and shape: ``float32[2, 10]``, or ``float32[nested]``."""
    shape = "nested" if tensor.is_nested else ", ".join(map(str, tensor.shape))
    return f"{dtype_name(tensor.dtype)}[{shape}]"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: ``float32``."""
    return str(dtype).removeprefix("torch.")


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the stored values as a dense, real, floating tensor; empty for integers and on the meta device."""
    values = tensor.detach()
    if values.is_meta:
        return torch.empty(0)
    if values.is_nested:
        values = values.values()
    elif values.is_sparse:
        values = values.coalesce().values()
    elif values.layout != torch.strided:
        values = values.values()  # compressed sparse: the indices are integers
    if values.is_quantized:
        values = values.dequantize()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if not values.is_floating_point():
        return torch.empty(0)
    return values.float() if values.dtype.itemsize == 1 else values  # float8 has no isfinite


def figures_of(name: str, tensor: torch.Tensor) -> Figures:
    """Return the figures of a tensor, in a single pass if all values are finite."""
    shown, values = shape_of(tensor), values_of(tensor)
    if values.numel() == 0:
        return Figures(name, shown)
    low, high = values.aminmax()  # NaN if there is one anywhere
    if low.isfinite() and high.isfinite():
        return Figures(name, shown, low=low.item(), high=high.item())
    finite = values[values.isfinite()]
    return Figures(
        name,
        shown,
        nan=int(values.isnan().sum()),
        positive_inf=int(values.isposinf().sum()),
        negative_inf=int(values.isneginf().sum()),
        low=finite.min().item() if finite.numel() else None,
        high=finite.max().item() if finite.numel() else None,
    )


BLAME_OF_STAGE = {
    "start": ENVIRONMENT,
    "device": ENVIRONMENT,
    "build": MODEL,
    "read": CHECKPOINT,
    "load": CHECKPOINT,
    "move": ENVIRONMENT,
    "input": INPUT,
    "forward": MODEL,
    "training": MODEL,
}

_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory|CUBLAS_STATUS_ALLOC_FAILED", re.I)
_CUDNN = re.compile(r"CUDNN_STATUS_|cuDNN error|Unable to find a valid cuDNN algorithm")
_DTYPE = re.compile(
    r"must have the same dtype|expected scalar type|Input type .* should be the same|same dtype, but got"
    r"|expected m1 and m2 to have the same dtype|Found dtype \w+ but expected|dtype of input and hidden"
    r"|Expected object of scalar type|mixed dtype|does not match weight dtype"
    r"|not implemented for 'Half'|input must have the type"
)

# After one of these, the process cannot use the GPU any more, and the line that reported it may not have caused it.
# https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution
_STICKY = re.compile(
    r"illegal memory access|device-side assert|unspecified launch failure|misaligned address|illegal instruction was"
)
# What torch's kernels print if an index is too large: Indexing.cu, IndexKernel.cu, Loss.cu.
_INDEX_ASSERT = re.compile(
    r"Assertion `.*(srcIndex < srcSelectDimSize|index out of bounds|idx_dim|t >= 0 && t < n_classes).*` failed"
)

_ENVIRONMENT = re.compile(
    r"not implemented for '|no kernel image|CUDA error|CUDNN_STATUS|CUBLAS_STATUS|HIP error|MPS backend|cuDNN error"
    r"|not compiled with CUDA|No CUDA GPUs|driver version is insufficient|unable to open shared memory|Bus error"
    r"|not currently implemented for the MPS|Found no NVIDIA driver|no attribute '_cuda_|Unable to find a valid cuDNN"
)

# Tensors on two devices: model and input are on the same one, so the model's own code made another tensor.
_DEVICES = re.compile(r"to be on the same device|expected CPU tensor|Expected object of (backend|device type)")

# Messages of torch 2.x about an input whose shape, range or dtype a layer does not accept.
_INPUT = re.compile(
    r"shapes cannot be multiplied|must match the size of tensor|expected input\[|Calculated padded input size"
    r"|Kernel size can't be greater|Output size is too small|index out of range|is invalid for input of size"
    r"|Expected \d|expected \d+D|must have the same (dtype|number of dimensions|size)|expected scalar type"
    r"|Expected tensor for argument|expecting embedding dimension|Expected more than 1 (value|spatial element)"
    r"|Input type .* should be the same|normalized_shape|input.size\(-1\) must be equal|must be equal to input_size"
    r"|Sizes of tensors must match|shape mismatch|not enough values to unpack|too many values to unpack"
    r"|Dimension out of range|size mismatch|should be smaller than|is out of bounds|does not match weight dtype"
    r"|to have the same dtype|input must have the type"
)

_CALL = re.compile(r"forward\(\) (missing|got an unexpected|got multiple|takes)")


def diagnose(
    stage: str,
    error: BaseException,
    running: tuple[str, str] | None = None,
    depth: int = 0,
    origin: FaultOrigin | None = None,
) -> Failure:
    """Return the failure for an error that was raised in this stage.

    ``running`` is path and class of the innermost running module, ``depth`` the number of running ones, ``origin`` the
    module that had made non-finite values before."""
    module, kind = running or (None, "")
    message = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if not isinstance(error, CkptfixError):
        message = ": ".join(filter(None, (type(error).__name__, message)))
    return Failure(
        stage=stage,
        blame=_blame(stage, error, depth, origin),
        error=message,
        module=module,
        kind=kind,
        where=_where(error),
        keys=error.keys if isinstance(error, NotLoadedError) else (),
        origin=origin,
        traceback=_traceback(error),
    )


def holds_for_any_input(failure: Failure) -> bool:
    """Return whether another input would not help: the environment or the checkpoint is at fault, the code has missing
    names or imports, or it exits."""
    if failure.blame in (ENVIRONMENT, CHECKPOINT):
        return True
    return failure.error.startswith(("NameError", "ImportError", "ModuleNotFoundError", "SyntaxError", "SystemExit"))


def is_out_of_memory(failure: Failure | None) -> bool:
    """Return whether memory ran out, on the device or in the process."""
    return failure is not None and bool(_OUT_OF_MEMORY.search(failure.error) or failure.error.startswith("MemoryError"))


def is_cudnn_failure(failure: Failure | None) -> bool:
    """Return whether cuDNN failed, without which torch may work."""
    return failure is not None and bool(_CUDNN.search(failure.error)) and not is_out_of_memory(failure)


def is_dtype_mismatch(failure: Failure | None) -> bool:
    """Return whether an operator got two dtypes (Double and Float), or one that the device does not support."""
    return failure is not None and bool(_DTYPE.search(failure.error))


def is_sticky(text: str) -> bool:
    """Return whether an error makes the GPU unusable for the process, and may be reported at a wrong line."""
    return bool(_STICKY.search(text))


def blame_of_assert(printed: str) -> str | None:
    """Return what is to blame for a device-side assertion by the kernel's output: the input if an index is too large,
    None if unknown."""
    return INPUT if _INDEX_ASSERT.search(printed) else None


def _blame(stage: str, error: BaseException, depth: int, origin: FaultOrigin | None) -> str:
    text = str(error)
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(text):
        return ENVIRONMENT
    if stage == "move" and "meta tensor" in text:  # built on the meta device, without a value in the file
        return MODEL
    if stage == "read" and isinstance(error, ImportError | OSError):  # defects of the file are UnreadableErrors
        return ENVIRONMENT
    if stage != "forward":
        return BLAME_OF_STAGE.get(stage, MODEL)
    if origin is not None:
        return CHECKPOINT if origin.broken else MODEL
    if isinstance(error, TypeError) and _CALL.search(text):
        return INPUT if depth <= 1 else MODEL  # the model itself calls the inner modules
    if isinstance(error, RuntimeError | ValueError | IndexError | AssertionError):
        if _DEVICES.search(text):
            return MODEL
        if _INPUT.search(text):
            return INPUT
    return ENVIRONMENT if _ENVIRONMENT.search(text) else MODEL


def _traceback(error: BaseException) -> str:
    """Return the user's own part of the traceback; empty if none of the user's code ran."""
    if isinstance(error, TargetError):
        return error.traceback_text
    frames = error.__traceback__
    while frames is not None and not is_user_file(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    if frames is None:
        return ""
    return "".join(traceback.format_exception(type(error), error, frames, chain=False))


def _where(error: BaseException) -> str:
    """Return the innermost line of the user's code that the error passed through: ``model.py:12 in forward``."""
    last = error.__cause__ if isinstance(error, TargetError) and error.__cause__ is not None else error
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(last.__traceback__)]
    return user_line((code.co_filename, line, code.co_name) for code, line in reversed(frames))


def user_line(calls: Iterable[tuple[str, int | str, str]]) -> str:
    """Return the first call (file, line, function) in the user's code: ``model.py:12 in forward``; empty if none."""
    found = (f"{Path(file).name}:{line} in {function}" for file, line, function in calls if is_user_file(file))
    return next(found, "")


def is_user_file(name: str) -> bool:
    """Return whether a source file belongs neither to ckptfix nor to torch nor to Python itself."""
    above = Path(name).parents
    of_python = Path(traceback.__file__).parent in above and "site-packages" not in Path(name).parts
    return not (name.startswith("<") or of_python or any(folder in above for folder in _libraries()))


@cache
def _libraries() -> tuple[Path, ...]:
    """Return the folders of ckptfix and torch, without importing torch."""
    specs = (find_spec("ckptfix"), find_spec("torch"))
    return tuple(Path(spec.origin).parent for spec in specs if spec is not None and spec.origin)
