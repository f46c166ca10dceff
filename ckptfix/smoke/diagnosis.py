"""Whose fault an error is: the environment's, the input's, the model code's or the checkpoint's.

The stage decides in most cases. In the forward pass the parameters have the shapes that the model asked for (the strict
load saw to that), so an error about shapes or ranges is the input's or the code's, and one after a NaN that a broken
weight made is the checkpoint's.
"""

from __future__ import annotations

import re
import traceback
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from ckptfix.errors import CkptfixError, TargetError
from ckptfix.smoke.outcome import CHECKPOINT, ENVIRONMENT, INPUT, MODEL, Failure, Origin
from ckptfix.smoke.proof import NotLoadedError

_BLAME_OF_STAGE = {
    "start": ENVIRONMENT,
    "device": ENVIRONMENT,
    "build": MODEL,
    "read": CHECKPOINT,
    "load": CHECKPOINT,
    "move": ENVIRONMENT,
    "input": INPUT,
    "forward": MODEL,
}

_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory|CUBLAS_STATUS_ALLOC_FAILED", re.I)
_CUDNN = re.compile(r"CUDNN_STATUS_|cuDNN error|Unable to find a valid cuDNN algorithm")
_DTYPE = re.compile(
    r"must have the same dtype|expected scalar type|Input type .* should be the same|same dtype, but got"
    r"|expected m1 and m2 to have the same dtype|Found dtype \w+ but expected|dtype of input and hidden"
    r"|Expected object of scalar type|mixed dtype|does not match weight dtype"
    r"|not implemented for 'Half'"
)

# After one of these the process can do nothing more on the GPU, and the line that reported it need not be the one.
# https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution
_STICKY = re.compile(
    r"illegal memory access|device-side assert|unspecified launch failure|misaligned address|illegal instruction was"
)
# What the kernels of torch print where an index is too large: Indexing.cu, IndexKernel.cu, Loss.cu.
_INDEX_ASSERT = re.compile(
    r"Assertion `.*(srcIndex < srcSelectDimSize|index out of bounds|idx_dim|t >= 0 && t < n_classes).*` failed"
)

_ENVIRONMENT = re.compile(
    r"not implemented for '|no kernel image|CUDA error|CUDNN_STATUS|CUBLAS_STATUS|HIP error|MPS backend|cuDNN error"
    r"|not compiled with CUDA|No CUDA GPUs|driver version is insufficient|unable to open shared memory|Bus error"
    r"|not currently implemented for the MPS|Found no NVIDIA driver|no attribute '_cuda_|Unable to find a valid cuDNN"
)

# Tensors on two devices: model and input are on one, so the third was made by the model's own code.
_DEVICES = re.compile(r"to be on the same device|expected CPU tensor|Expected object of (backend|device type)")

# The messages of torch 2.x for an input of another shape, range or dtype than the layer that it met.
_INPUT = re.compile(
    r"shapes cannot be multiplied|must match the size of tensor|expected input\[|Calculated padded input size"
    r"|Kernel size can't be greater|Output size is too small|index out of range|is invalid for input of size"
    r"|Expected \d|expected \d+D|must have the same (dtype|number of dimensions|size)|expected scalar type"
    r"|Expected tensor for argument|expecting embedding dimension|Expected more than 1 (value|spatial element)"
    r"|Input type .* should be the same|normalized_shape|input.size\(-1\) must be equal|must be equal to input_size"
    r"|Sizes of tensors must match|shape mismatch|not enough values to unpack|too many values to unpack"
    r"|Dimension out of range|size mismatch|should be smaller than|is out of bounds|does not match weight dtype"
    r"|to have the same dtype"
)

_CALL = re.compile(r"forward\(\) (missing|got an unexpected|got multiple|takes)")


def diagnose(
    stage: str,
    error: BaseException,
    running: tuple[str, str] | None = None,
    depth: int = 0,
    origin: Origin | None = None,
) -> Failure:
    """What to say of an error that was raised in this stage.

    ``running`` is path and class of the innermost running module, ``depth`` how many were running, ``origin`` the
    module that had made NaN before.
    """
    module, kind = running or (None, "")
    return Failure(
        stage=stage,
        blame=_blame(stage, error, depth, origin),
        error=_one_line(error),
        module=module,
        kind=kind,
        where=_where(error),
        keys=error.keys if isinstance(error, NotLoadedError) else (),
        origin=origin,
        traceback=_traceback(error),
    )


def holds_for_any_input(failure: Failure) -> bool:
    """Whether another input could not have helped: the environment gave way, the weights are broken, names of the code
    are missing, or the code leaves the process.
    """
    if failure.blame in (ENVIRONMENT, CHECKPOINT):
        return True
    return failure.error.startswith(("NameError", "ImportError", "ModuleNotFoundError", "SyntaxError", "SystemExit"))


def is_out_of_memory(failure: Failure | None) -> bool:
    """Whether memory ran out, on the device or in the process."""
    return failure is not None and bool(_OUT_OF_MEMORY.search(failure.error) or failure.error.startswith("MemoryError"))


def is_cudnn_failure(failure: Failure | None) -> bool:
    """Whether cuDNN gave way, which says that torch may do without it."""
    return failure is not None and bool(_CUDNN.search(failure.error)) and not is_out_of_memory(failure)


def is_dtype_mismatch(failure: Failure | None) -> bool:
    """Whether two dtypes met (Double and Float, Half and Float), or one that the device does not compute in."""
    return failure is not None and bool(_DTYPE.search(failure.error))


def is_sticky(text: str) -> bool:
    """Whether the GPU is lost to the process, and the line that reported it need not be the true one."""
    return bool(_STICKY.search(text))


def blame_of_assert(printed: str) -> str | None:
    """Whose fault a device-side assert is, from what the kernel printed: an index too large is the input's; None where
    it printed nothing that says so.
    """
    return INPUT if _INDEX_ASSERT.search(printed) else None


def _blame(stage: str, error: BaseException, depth: int, origin: Origin | None) -> str:
    text = str(error)
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(text):
        return ENVIRONMENT
    if stage == "move" and "meta tensor" in text:  # the factory builds it without memory, and the file has no value
        return MODEL
    if stage == "read" and isinstance(error, ImportError | OSError):  # what is wrong in the file is an UnreadableError
        return ENVIRONMENT
    if stage != "forward":
        return _BLAME_OF_STAGE.get(stage, MODEL)
    if origin is not None:
        return CHECKPOINT if origin.broken else MODEL
    if isinstance(error, TypeError) and _CALL.search(text):
        return INPUT if depth <= 1 else MODEL  # the call of an inner module is the model's own
    if isinstance(error, RuntimeError | ValueError | IndexError | AssertionError):
        if _DEVICES.search(text):
            return MODEL
        if _INPUT.search(text):
            return INPUT
    return ENVIRONMENT if _ENVIRONMENT.search(text) else MODEL


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, CkptfixError):
        return lines[0]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _traceback(error: BaseException) -> str:
    """The user's own part of the traceback; empty where none of the user's code ran."""
    if isinstance(error, TargetError):
        return error.traceback_text
    frames = error.__traceback__
    while frames is not None and not _is_user_code(frames.tb_frame):
        frames = frames.tb_next
    if frames is None:
        return ""
    return "".join(traceback.format_exception(type(error), error, frames, chain=False))


def _where(error: BaseException) -> str:
    """The innermost line of the user's code that the error passed through: ``model.py:12 in forward``."""
    last = error.__cause__ if isinstance(error, TargetError) and error.__cause__ is not None else error
    where = ""
    for frame, line in traceback.walk_tb(last.__traceback__):
        if _is_user_code(frame):
            where = f"{Path(frame.f_code.co_filename).name}:{line} in {frame.f_code.co_name}"
    return where


def _is_user_code(frame: FrameType) -> bool:
    return is_user_file(frame.f_code.co_filename)


def is_user_file(name: str) -> bool:
    """Whether a source file is neither of ckptfix, nor of torch, nor of Python itself."""
    above = Path(name).parents
    of_python = Path(traceback.__file__).parent in above and "site-packages" not in Path(name).parts
    return not (name.startswith("<") or of_python or any(folder in above for folder in _libraries()))


@cache
def _libraries() -> tuple[Path, ...]:
    """The folders of ckptfix and of torch, which need not be imported for this."""
    specs = (find_spec("ckptfix"), find_spec("torch"))
    return tuple(Path(spec.origin).parent for spec in specs if spec is not None and spec.origin)
