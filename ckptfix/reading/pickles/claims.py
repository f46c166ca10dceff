"""Checks of what a pickle claims about shapes, dtypes and storages (law 7 of the architecture)."""

from functools import lru_cache
from typing import Any

from msgspec import Struct

from ckptfix.bytes.limits import shown
from ckptfix.core.dtypes import BY_STORAGE, DTYPES
from ckptfix.core.objects import Global, Opaque
from ckptfix.core.spec import Storage, TensorSpec
from ckptfix.errors import HostileError, hostile
from ckptfix.reading.pickles.stream import MalformedError, UnknownError

# A tensor of more bytes than this that repeats its storage (zero strides) more than a thousandfold is an attack.
# Smaller ones are genuine: `torch.save` keeps expanded tensors as they are.
EXPANDED_LIMIT = 1 << 30


class TypedStorage(Struct, eq=False):
    """A storage with its dtype in the file; ``uint8`` for an untyped one."""

    storage: Storage
    dtype: str


def sizes(value: Any) -> tuple[int, ...]:
    """Return a shape or strides from a pickle: a tuple, a list or a ``torch.Size`` of integers.

    Raises ``MalformedError`` for anything else."""
    if isinstance(value, Opaque) and value.cls.name == "Size" and value.args:
        value = value.args[0]
    if not isinstance(value, (tuple, list)) or len(value) > 64:
        raise MalformedError(f"{shown(value)} is not a shape")
    for size in value:
        if type(size) is not int or not 0 <= size < 1 << 63:
            raise MalformedError(f"{shown(value)} is not a shape")
    return _shared(tuple(value))


@lru_cache(maxsize=1 << 12)  # without it, a repair of 100,000 tensors of one shape takes an eighth more memory
def _shared(numbers: tuple[int, ...]) -> tuple[int, ...]:
    return numbers


def checked(spec: TensorSpec, path: str) -> TensorSpec:
    """Return the spec after checking its claims against its storage."""
    if len(spec.shape) != len(spec.strides) or len(spec.shape) > 64 or spec.offset < 0:
        raise HostileError(
            f"{path}: a tensor of shape {spec.shape} has strides {spec.strides}: its record is damaged or hostile; "
            "fetch it again"
        )
    if spec.storage is not None:
        stored, nbytes = spec.storage.nbytes, spec.nbytes
        # Nearly all tensors begin their storage and are row-major: they touch as many bytes as they take.
        claimed = nbytes if not spec.offset and spec.is_contiguous else spec.extent[1]
        if claimed > stored:
            raise HostileError(
                f"{path}: a tensor of shape {spec.shape} claims {claimed} bytes of a storage of {stored}:"
                " the file is damaged or hostile; fetch it again"
            )
        if nbytes > EXPANDED_LIMIT and nbytes > 1024 * stored:
            raise hostile(
                path,
                f"a tensor of shape {spec.shape} would take {nbytes >> 20} MiB in memory out of {stored} stored bytes",
            )
    return spec


def dtype_name(value: Any) -> str:
    """Return the name of a dtype that a pickle refers to as a global such as ``torch.float32``."""
    if isinstance(value, Global) and value.module == "torch" and value.name in DTYPES:
        return value.name
    if isinstance(value, Global) and value.module == "torch" and value.name.islower():
        raise UnknownError(f"the dtype {value}")
    raise MalformedError(f"{shown(value)} is not a dtype")


def storage_dtype(cls: Any) -> str:
    """Return the dtype of a storage class such as ``torch.cuda.HalfStorage``."""
    if isinstance(cls, Global):
        if (dtype := BY_STORAGE.get(cls.name)) is not None:
            return dtype.name
        if cls.name in ("UntypedStorage", "_UntypedStorage"):
            return "uint8"
    raise MalformedError(f"{str(cls) if isinstance(cls, Global) else shown(cls)} is not a storage class")
