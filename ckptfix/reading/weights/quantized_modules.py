"""The entries that torch's quantised modules add to a state_dict besides their parameters and buffers.

Their weights are packed for a kernel in a ``torch.ScriptObject``, and the module's own ``_save_to_state_dict`` unpacks
them. The same is done here by class (``torch/ao/nn/quantized``, which was ``torch/nn/quantized`` before 1.13, and
``torch/nn/intrinsic/quantized``), in torch's order. The weights of recurrent layers have no other form than a
ScriptObject, so they stay one, and FIL102 reports that no file can store it. Whole models and TorchScript give the same
keys and values."""

import math
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from ckptfix.bytes.sources import MemoryBytes
from ckptfix.core.objects import Global, Opaque, holds_tensors
from ckptfix.core.spec import Storage, TensorSpec
from ckptfix.reading.pickles.claims import TypedStorage

SCRIPT_OBJECT = "torch.ScriptObject"

_QUANTIZED = r"torch\.(ao\.)?nn\.(intrinsic\.)?quantized\.(dynamic\.|reference\.)?(modules\.)?"
_OBSERVER = r"torch\.(ao\.)?quantization\.observer\.\w*(MinMax|Histogram)Observer"
_QAT_CONV = r"torch\.(ao\.)?nn\.intrinsic\.qat\.modules\.conv_fused\.ConvBn(ReLU)?[123]d"


def is_packed_convolution(value: Any) -> bool:
    """Return whether an inert object is a quantised convolution, whose state is a tuple that ends in ``weight, bias,
    scale, zero_point, training``."""
    return (
        isinstance(value, Opaque)
        and re.match(_QUANTIZED, str(value.cls)) is not None
        and "Conv" in value.cls.name
        and isinstance(value.state, tuple)
        and len(value.state) >= 13
        and isinstance(value.state[-5], TensorSpec)
    )


def is_script_object(value: Any) -> bool:
    """Return whether a value is a ``torch.ScriptObject``, which ``weights_only=True`` never loads."""
    return isinstance(value, Opaque) and str(value.cls) == SCRIPT_OBJECT


def composed_class(value: Any) -> str:
    """Return the class of a tensor that is composed of other tensors, such as torchao's quantised weights; empty for
    anything else.

    Only the class can compose its parts (``_rebuild_wrapper_subclass``). A dict of them, which FIL102 writes, is
    recognised too: it does not load into a model either."""
    name, args = _call(value)
    if not name.endswith("._rebuild_from_type_v2") or len(args) < 2:
        return ""
    function, cls = args[:2]
    is_composed = isinstance(cls, (Global, str)) and str(function).endswith("._rebuild_wrapper_subclass")
    return str(cls) if is_composed else ""


def _call(value: Any) -> tuple[str, tuple[Any, ...]]:
    """Return the function and the arguments of a call in a pickle, or of the dict that FIL102 writes for it."""
    if isinstance(value, Opaque):
        return str(value.cls), value.args
    args = value.get("args") if isinstance(value, dict) else None
    return (str(value.get("class", "")), args) if isinstance(args, tuple) else ("", ())


_LOW_BIT = r"torchao\.(optim|prototype\.low_bit_optim)\.subclass_\w+\.OptimState\w+"


def is_low_bit_moment(name: str) -> bool:
    """Return whether a class is one of torchao's for the moments of 4-bit, 8-bit and fp8 optimizers, which
    ``weights_only=True`` allows after ``import torchao``."""
    return re.fullmatch(_LOW_BIT, name) is not None


def rebuilding_call(value: Any) -> str:
    """Return the unknown function with which a file builds a tensor from a storage or another tensor: one of a later
    torch, of the user's own code, or with a damaged name. Empty for anything else.

    The dict that FIL102 writes for such a tensor is recognised too."""
    name, args = _call(value)
    is_function = name.rpartition(".")[2].lstrip("_")[:1].islower() and not name.startswith("torch.")
    kinds = (TypedStorage, TensorSpec) if is_function else TypedStorage
    return name if any(isinstance(part, kinds) for part in args) else ""


def part_names(value: Any) -> list[str]:
    """Return the names of the tensors that a composed tensor consists of."""
    state = value.args[3] if isinstance(value, Opaque) and len(value.args) > 3 else None
    return [str(name) for name, part in state.items() if holds_tensors(part)] if isinstance(state, dict) else []


def quantized_version(module: Opaque) -> int | None:
    """Return the version of a quantised module's class; None for other classes and for version 1."""
    name = str(module.cls)
    if re.fullmatch(_OBSERVER, name):
        return 3
    if re.fullmatch(_QAT_CONV, name):
        return 2
    if not re.match(_QUANTIZED, name) or ".reference." in name:
        return None
    is_dynamic = ".dynamic." in name
    if module.cls.name in ("RNNBase", "LSTM", "GRU"):
        return 2 if is_dynamic else None
    if module.cls.name == "LinearPackedParams":
        return 3
    return (4 if is_dynamic else 3) if module.cls.name.startswith("Linear") else None


def packed_entries(module: Opaque, children: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the entries between a module's buffers and its submodules. ``children`` are its ``_modules``."""
    attributes = module.attributes
    if is_packed_convolution(module):
        weight, bias, scale, zero_point, _ = module.state[-5:]
        yield "weight", weight
        yield "bias", bias
        yield from _scale({"scale": scale, "zero_point": zero_point})
    elif not re.match(_QUANTIZED, str(module.cls)):
        return
    elif module.cls.name == "LinearPackedParams":
        yield from _linear(module)
    elif module.cls.name == "EmbeddingPackedParams":
        yield from _embedding(attributes)
    elif module.cls.name == "QFunctional" or ("_packed_params" in children and "scale" in attributes):
        yield from _scale(attributes)
    elif "weight_qscheme" in attributes:
        yield from _reference(attributes)
    else:
        for name in ("param", "_packed_weight_ih", "_packed_weight_hh"):
            if is_script_object(attributes.get(name)):
                yield name, attributes[name]


def packed_attributes(module: Opaque) -> Iterator[tuple[str, Any]]:
    """Yield the entries after a module's submodules: the packed weights that torch.fx sets on a graph module."""
    if re.match(_QUANTIZED, str(module.cls)):
        return
    attributes = module.attributes
    for name in sorted(map(str, attributes)):  # in a crafted file, keys may not be text
        if "_packed_weight" in name and is_script_object(attributes.get(name)):
            yield name, attributes[name]


def _contents(value: Any) -> Any:
    """Return the contents of a ScriptObject, whose state is ``(contents, class)``."""
    state = value.state if is_script_object(value) else None
    return state[0] if isinstance(state, tuple) and len(state) == 2 else None


def _linear(module: Opaque) -> Iterator[tuple[str, Any]]:
    attributes = module.attributes
    held = _contents(attributes.get("_packed_params"))
    if held is None and isinstance(module.state, tuple):
        held = module.state[:2]  # torch 1.4 and 1.5: (weight, bias, training, dtype)
    if not isinstance(held, tuple) or len(held) != 2 or not isinstance(held[0], TensorSpec):
        return
    dtype = attributes.get("dtype", module.state[3] if isinstance(module.state, tuple) and module.state[3:] else None)
    is_integer = held[0].quantizer is not None
    yield "dtype", dtype if isinstance(dtype, Global) else Global("torch", "qint8" if is_integer else "float16")
    yield "_packed_params", held


def _embedding(attributes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    held = _contents(attributes.get("_packed_weight"))
    tensors = held[1] if isinstance(held, tuple) and len(held) == 4 else None  # (version, tensors, floats, integers)
    if not isinstance(tensors, list) or len(tensors) != 1 or not isinstance(tensors[0], TensorSpec):
        return
    dtype = attributes.get("dtype")
    yield "dtype", dtype if isinstance(dtype, Global) else Global("torch", tensors[0].dtype)
    yield "_packed_weight", tensors[0]


def _reference(attributes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of ``_save_weight_qparams``; TorchScript stores the scheme and dtype as numbers."""
    buffers = attributes.get("_buffers")
    scheme = _numbered(SCHEMES, attributes["weight_qscheme"])
    yield "weight_qscheme", scheme
    yield "weight_dtype", _numbered(_DTYPES, attributes.get("weight_dtype"))
    names = ["weight_scale", "weight_zero_point"] if scheme is not None else []
    if isinstance(scheme, Global) and scheme.name == "per_channel_affine":
        names.append("weight_axis")
    for name in names:
        if isinstance(buffers, dict) and name in buffers:
            yield name, buffers[name]


# The numbers in c10/core/QScheme.h and c10/core/ScalarType.h.
SCHEMES = {
    0: "per_tensor_affine",
    1: "per_channel_affine",
    2: "per_tensor_symmetric",
    3: "per_channel_symmetric",
    4: "per_channel_affine_float_qparams",
}
_DTYPES = {0: "uint8", 1: "int8", 2: "int16", 3: "int32", 12: "qint8", 13: "quint8", 14: "qint32"}


def _numbered(names: Mapping[int, str], number: Any) -> Any:
    return Global("torch", names[number]) if type(number) is int and number in names else number


def _scale(attributes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield ``torch.tensor(scale)`` and ``torch.tensor(zero_point)`` from the numbers of a module."""
    scale, zero_point = attributes.get("scale"), attributes.get("zero_point")
    if isinstance(scale, (int, float)) and not isinstance(scale, bool):
        yield "scale", _scalar("float32", "<f", scale)
    if type(zero_point) is int and -(1 << 63) <= zero_point < 1 << 63:
        yield "zero_point", _scalar("int64", "<q", zero_point)


def _scalar(dtype: str, form: str, value: float) -> TensorSpec:
    try:
        data = struct.pack(form, value)
    except OverflowError:  # too large for float32, which torch makes infinite
        data = struct.pack(form, math.copysign(math.inf, value))
    return TensorSpec(dtype, (), (), Storage("scalar", MemoryBytes(data)))
