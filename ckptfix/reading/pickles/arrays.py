"""numpy arrays in a pickle. They are not built as arrays; their bytes become those of a tensor."""

import math
from collections.abc import Iterator
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.bytes.sources import MemoryBytes
from ckptfix.core.dtypes import BY_NUMPY
from ckptfix.core.objects import Opaque
from ckptfix.core.spec import Storage, TensorSpec, contiguous_strides
from ckptfix.errors import UnreadableError
from ckptfix.reading.pickles.claims import checked, sizes
from ckptfix.reading.pickles.stream import MalformedError, raw_bytes


class NumpyArray(Struct, eq=False):
    """The pickled state of a numpy array.

    ``is_plain`` says that the class is ``numpy.ndarray`` itself, whose state has only one form."""

    shape: tuple[int, ...] = ()
    dtype: Any = None
    fortran: bool = False
    data: Any = b""
    is_plain: bool = False
    _spec: TensorSpec | None = None

    def build(self, state: Any) -> None:
        """Set the state of ``ndarray.__reduce__``: ``(version, shape, dtype, is_fortran, data)``, in the oldest numpy
        without the version.

        Raises ``ValueError`` if the state is invalid, or if the bytes do not match the elements."""
        if isinstance(state, tuple) and len(state) in (4, 5):
            shape, dtype, fortran, data = state[-4:]
            shape = sizes(shape)
            _expect_bytes(shape, dtype, data)
            self.shape, self.dtype, self.fortran, self.data, self._spec = shape, dtype, fortran, data, None
        elif self.is_plain:
            raise MalformedError("a numpy array with an invalid state")

    def spec(self, path: str) -> TensorSpec | None:
        """Return the array as a tensor (cached); None for element types that torch does not have."""
        if self._spec is not None:
            return self._spec
        code, order = numpy_type(self.dtype)
        dtype = BY_NUMPY.get(code)
        # Python 2 pickles keep the bytes of an array in a str.
        data = raw_bytes(self.data) if isinstance(self.data, str) else self.data
        if dtype is None or not isinstance(data, (bytes, bytearray, memoryview)):
            return None
        strides = contiguous_strides(self.shape)
        if self.fortran:
            strides = tuple(reversed(contiguous_strides(tuple(reversed(self.shape)))))
        if order == ">":
            import numpy as np

            data = np.frombuffer(data, dtype=f">{code}").astype(f"<{code}").tobytes()
        self._spec = checked(TensorSpec(dtype.name, self.shape, strides, Storage("numpy", MemoryBytes(data))), path)
        return self._spec


def _expect_bytes(shape: tuple[int, ...], dtype: Any, data: Any) -> None:
    """Raise ``ValueError`` if the bytes of an array do not match its elements."""
    if not isinstance(dtype, Opaque):
        raise MalformedError("a numpy array with an invalid dtype")
    known = BY_NUMPY.get(numpy_type(dtype)[0])
    data = raw_bytes(data) if isinstance(data, str) else data
    if known is not None and isinstance(data, (bytes, bytearray, memoryview)):
        needed = math.prod(shape) * known.itemsize
        if len(data) != needed:
            raise MalformedError(f"a numpy array of {len(data)} bytes, and its elements take {needed}")


def arrays_in(root: Any) -> Iterator[NumpyArray]:
    """Yield every array in a tree of dicts, lists and tuples, each container once."""
    pending, seen = [root], {id(root)}
    while pending:
        value = pending.pop()
        if isinstance(value, NumpyArray):
            yield value
        members = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        inner = [part for part in members if isinstance(part, (NumpyArray, dict, list, tuple)) and id(part) not in seen]
        seen.update(map(id, inner))
        pending += inner


def bfloat16_again(spec: TensorSpec, dtype: str, path: str) -> TensorSpec:
    """Return the bfloat16 tensor that torch saved as a float32 array, because numpy has no bfloat16. It is exact.

    Raises ``UnreadableError`` if the array is not one of bfloat16 values."""
    data = bytes(spec.storage.source.read(0, spec.storage.nbytes)) if spec.storage is not None else b""
    if (spec.dtype, dtype) != ("float32", "bfloat16") or any(data[0::4]) or any(data[1::4]):
        raise UnreadableError(
            f"{path}: a {dtype} tensor was saved as an array of {spec.dtype} that holds other values than its own; "
            "save it from the CPU"
        )
    upper = bytearray(len(data) // 2)
    upper[0::2], upper[1::2] = data[2::4], data[3::4]
    return replace(spec, dtype=dtype, storage=Storage("numpy", MemoryBytes(bytes(upper))))


def numpy_type(dtype: Any) -> tuple[str, str]:
    """Return the type string of a pickled ``numpy.dtype`` and its byte order: ``("f4", "<")``."""
    if not isinstance(dtype, Opaque) or not dtype.args or not isinstance(dtype.args[0], str):
        return ("", "")
    order = dtype.state[1] if isinstance(dtype.state, tuple) and len(dtype.state) > 1 else "<"
    return (dtype.args[0].lstrip("<>=|"), order if isinstance(order, str) else "<")


def dtype_label(dtype: Any) -> Any:
    """Return a pickled ``numpy.dtype`` as text, with the unit of dates (``M8[D]``); a record type as its fields, each
    with its name, type and offset in bytes."""
    code, order = numpy_type(dtype)
    state = dtype.state if isinstance(dtype, Opaque) and isinstance(dtype.state, tuple) else ()
    fields = state[4] if len(state) > 4 else None
    if isinstance(fields, dict):
        return [
            [name, numpy_type(field[0])[0], field[1]]
            for name, field in fields.items()
            if isinstance(field, tuple) and len(field) > 1
        ]
    unit = state[8][1] if len(state) > 8 and isinstance(state[8], tuple) and len(state[8]) > 1 else None
    if code[:1] in ("M", "m") and isinstance(unit, tuple) and len(unit) > 1:
        name = unit[0].decode("latin-1") if isinstance(unit[0], bytes) else unit[0]
        code += f"[{unit[1] if unit[1] != 1 else ''}{name}]"
    return f">{code}" if order == ">" else code


def array_fields(array: NumpyArray) -> dict[str, Any]:
    """Return an array whose dtype torch does not have as plain data: dtype, shape, and values as text or bytes."""
    code, order = numpy_type(array.dtype)
    data, width = array.data, int(code[1:]) if code[1:].isdecimal() else 0
    if isinstance(data, str):
        data = raw_bytes(data, "replace")
    if code[:1] in ("U", "S") and width and isinstance(data, bytes):
        size = width * (4 if code[0] == "U" else 1)
        parts = [data[start : start + size] for start in range(0, len(data), size)]
        encoding = "utf-32-be" if order == ">" else "utf-32-le"
        data = [
            part.decode(encoding, "replace").rstrip("\0") if code[0] == "U" else part.rstrip(b"\0") for part in parts
        ]
    layout = {"order": "F"} if array.fortran is True else {}
    return {"dtype": dtype_label(array.dtype), "shape": array.shape, **layout, "data": data}
