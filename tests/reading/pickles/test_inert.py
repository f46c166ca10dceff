import copyreg
import pickle
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy._core.multiarray import _reconstruct
from torch._utils import _rebuild_device_tensor_from_numpy
from torch.storage import _load_from_bytes

from ckptfix.bytes.sources import MemoryBytes
from ckptfix.core.dtypes import BY_NUMPY, BY_STORAGE, DTYPES
from ckptfix.core.objects import Global, Opaque
from ckptfix.core.spec import Storage, TensorSpec
from ckptfix.errors import HostileError, UnreadableError
from ckptfix.reading.pickles.arrays import NumpyArray
from ckptfix.reading.pickles.claims import TypedStorage, checked, sizes, storage_dtype
from ckptfix.reading.pickles.inert import InertTable
from ckptfix.reading.pickles.machine import PickleMachine
from ckptfix.reading.tensors import build_tensor

FLOATS = TypedStorage(Storage("0", MemoryBytes(bytes(64))), "float32")


def table() -> InertTable:
    return InertTable("some.pth", lambda data: data)


def call(dotted: str, *args: Any) -> Any:
    module, _, name = dotted.rpartition(".")
    return table().call(Global(module, name), args)


def unpickled(value: Any, protocol: int = 2) -> Any:
    return PickleMachine(pickle.dumps(value, protocol=protocol), "some.pkl", table().call, lambda pid: pid).load()


def test_an_unknown_call_becomes_an_opaque_object():
    made = call("os.system", "true")
    assert isinstance(made, Opaque)
    assert (str(made.cls), made.args) == ("os.system", ("true",))


def test_a_tensor_of_every_release_becomes_a_spec():
    expected = TensorSpec("float32", (2, 3), (3, 1), FLOATS.storage, 4)
    assert call("torch._utils._rebuild_tensor", FLOATS, 4, (2, 3), (3, 1)) == expected
    assert call("torch._utils._rebuild_tensor_v2", FLOATS, 4, (2, 3), (3, 1), False, {}) == expected
    raw = TypedStorage(FLOATS.storage, "uint8")
    dtype = Global("torch", "float32")
    assert call("torch._utils._rebuild_tensor_v3", raw, 4, (2, 3), (3, 1), False, {}, dtype) == expected
    parameter = call("torch._utils._rebuild_parameter", expected, True, {})
    assert (parameter.is_parameter, parameter.requires_grad) == (True, True)


class Called:
    """What is pickled as a call."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.made = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self.made


class Kind(np.ndarray):
    """An array of a class of its own."""


RECONSTRUCTOR: Any = copyreg._reconstructor  # type: ignore[attr-defined] # of protocols 0 and 1
ARRAY = partial(Called, _reconstruct, np.ndarray, (0,), b"b")


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (Called(_load_from_bytes, 3), "a torch file that is not bytes"),
        (Called(_rebuild_device_tensor_from_numpy, np.ones(2), "f", "cpu", False), "'f' is not a dtype"),
        (Called(_reconstruct, "no", (0,), b"b"), "a numpy array of no class"),
        (ARRAY(state=(1, 2)), "a numpy array with an invalid state"),
        (ARRAY(state=(1, (2,), "f4", False, bytes(8))), "a numpy array with an invalid dtype"),
        (ARRAY(state=(1, (2,), np.dtype("f4"), False, bytes(7))), "of 7 bytes, and its elements take 8"),
        (ARRAY(state=(1, (1,), np.dtype("f4"), False, "日本語字")), "values are of the wrong type"),
        (
            Called(_reconstruct, Kind, (0,), b"b", state=(1, (2,), np.dtype(">f4"), False, bytes(7))),
            "of 7 bytes, and its elements take 8",
        ),
    ],
)
def test_arguments_that_the_function_would_refuse_are_malformed(made, why):
    with pytest.raises(UnreadableError, match=why):
        unpickled(made)


@pytest.mark.parametrize(
    "made",
    [
        Called(getattr, "x", "y"),
        Called(getattr, int, 3),
        Called(RECONSTRUCTOR, "x", dict, {"a": 1}),
        Called(_rebuild_device_tensor_from_numpy, "text", torch.float32, "cpu", False),
    ],
    ids=["of a text", "no name", "of no class", "of no array"],
)
def test_a_call_without_a_meaning_becomes_an_opaque_object(made):
    found = unpickled(made)
    assert isinstance(found, Opaque)
    assert len(found.args) == len(made.made[1])


def test_an_object_of_old_protocols_keeps_the_state_of_its_base():
    made = unpickled(Called(RECONSTRUCTOR, Called, dict, {"a": 1}))
    assert (str(made.cls), made.pairs) == (f"{__name__}.Called", {"a": 1})


@pytest.mark.parametrize(
    ("called", "given"),
    [
        ("numpy.core._ufunc_reconstruct", ("numpy", 3)),
        ("torch.fx.graph_module.reduce_package_graph_module", ("text", "name")),
        ("torch_utils.persistence._reconstruct_persistent_obj", ({"state": 3},)),
    ],
)
def test_a_call_of_another_package_becomes_an_opaque_object(called, given):
    made = call(called, *given)
    assert (type(made), str(made.cls), made.args) == (Opaque, called, given)


def test_an_array_is_not_a_function():
    data = pickle.dumps(np.ones(2), 2)[:-1] + b"K\x01\x85R."
    with pytest.raises(UnreadableError, match="a numpy array is called as a function"):
        PickleMachine(data, "some.pkl", table().call, lambda pid: pid).load()


def test_a_variable_of_torch_0_3_is_its_tensor():
    spec = call("torch._utils._rebuild_tensor_v2", FLOATS, 0, (2,), (1,), False, {})
    assert call("torch.autograd.variable.Variable", spec) is spec


def test_a_dtype_of_a_later_torch_is_not_damage():
    made = b"\x80\x02ctorch._utils\n_rebuild_meta_tensor_no_storage\n(ctorch\nfloat6_e3m2\nK\x01\x85K\x01\x85\x89tR."
    with pytest.raises(UnreadableError, match=r"some\.pkl: the dtype torch\.float6_e3m2 is newer .*; update it"):
        PickleMachine(made, "some.pkl", table().call, lambda pid: pid).load()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_is_for_the_dtypes_that_torch_gives_one(dtype):
    storage = Storage("0", MemoryBytes(bytes(16)))
    whole, typed = TensorSpec(dtype, (1,), (1,), storage), TypedStorage(storage, dtype)
    makes = (
        lambda: call("torch._utils._rebuild_parameter", whole, True, {}),
        lambda: call("torch._utils._rebuild_tensor_v2", typed, 0, (1,), (1,), True, {}),
    )
    kind = getattr(torch, dtype, None)
    if kind is None:
        pytest.skip(f"torch {torch.__version__} does not have {dtype}")
    if kind.is_floating_point or kind.is_complex:
        assert all(make().requires_grad for make in makes)
        return
    if not dtype.startswith("q"):
        with pytest.raises(RuntimeError, match="can require gradients"):
            torch.empty(1, dtype=kind).requires_grad_()
    for make in makes:
        with pytest.raises(ValueError, match=f"{dtype} that requires a gradient"):
            make()


@pytest.mark.parametrize("name", BY_STORAGE)
def test_every_storage_class_has_its_dtype_on_every_device(name):
    assert storage_dtype(Global("torch", name)) == storage_dtype(Global("torch.cuda", name)) == BY_STORAGE[name].name


def test_a_class_that_is_not_a_storage_is_refused():
    with pytest.raises(ValueError, match=r"os\.system is not a storage class"):
        storage_dtype(Global("os", "system"))


@pytest.mark.parametrize("code", BY_NUMPY)
def test_a_numpy_array_becomes_a_tensor_of_its_values(code):
    for protocol, laid_out, order in product((2, 5), (np.ascontiguousarray, np.asfortranarray), "<>"):
        array = laid_out(np.array([[0, 1, 2], [3, 4, 5]], dtype=f"{order}{code}"))
        got = unpickled(array, protocol)
        assert isinstance(got, NumpyArray)
        spec = got.spec("some.pkl")
        assert spec is not None
        assert got.spec("some.pkl") is spec
        assert np.array_equal(build_tensor(spec).numpy(), array), (protocol, laid_out, order)


@pytest.mark.parametrize(
    "array",
    [np.array(["a", "b"]), np.array([None]), np.zeros(2, "M8[s]"), np.zeros(2, [("a", "f4")])],
    ids=lambda a: str(a.dtype),
)
def test_an_array_that_is_not_a_tensor_has_no_spec(array):
    assert unpickled(array).spec("some.pkl") is None


@pytest.mark.parametrize("value", [5, "12", (1, -1), (1.0,), (True,), (1 << 63,), [None], (1,) * 65, None])
def test_what_is_not_a_shape_is_refused(value):
    with pytest.raises(ValueError, match="is not a shape"):
        sizes(value)


@pytest.mark.parametrize("value", [(), (2, 3), [2, 3], Opaque(Global("torch", "Size"), ([2, 3],))])
def test_a_shape_is_a_tuple_list_or_size(value):
    assert sizes(value) in ((), (2, 3))


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [((17,), (1,), 0), ((16,), (1,), 1), ((2,), (16,), 0), ((4,), (1, 1), 0), ((1,), (1,), -1), ((1 << 40,), (0,), 0)],
    ids=["too long", "too late", "too wide", "a stride too many", "before the storage", "repeated without end"],
)
def test_a_tensor_that_its_storage_cannot_hold_is_refused(shape, strides, offset):
    with pytest.raises(HostileError):
        checked(TensorSpec("float32", shape, strides, FLOATS.storage, offset), "some.pth")


@pytest.mark.parametrize(
    ("shape", "strides"), [((16,), (1,)), ((0,), (1,)), ((), ()), ((1000, 1), (0, 0)), ((2, 2), (1, 3))]
)
def test_a_tensor_that_its_storage_holds_passes(shape, strides):
    spec = TensorSpec("float32", shape, strides, FLOATS.storage)
    assert checked(spec, "some.pth") is spec


def test_a_name_that_getattr_builds_is_judged_as_a_name():
    inert = table()
    made = inert.call(Global("builtins", "getattr"), (Global("torch", "hub"), "load"))
    assert str(made) == "torch.hub.load"
    assert inert.derived == {"torch:hub.load"}
