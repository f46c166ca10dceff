import pickle
import pickletools
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfix.bytes.sources import MemoryBytes
from ckptfix.core.objects import Global, Opaque
from ckptfix.core.spec import Quantizer, Storage, TensorSpec
from ckptfix.errors import WriteError
from ckptfix.writing.pickle_writer import PickleWriter, StorageRef


def no_tensors(spec: TensorSpec) -> Any:
    raise AssertionError("no tensors here")


def dump(value: Any) -> bytes:
    return PickleWriter("some.pth", no_tensors).dump(value)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner)
    ),
    max_leaves=20,
)


@given(plain)
def test_pickle_reads_what_is_written(value):
    assert pickle.loads(dump(value)) == value


@pytest.mark.parametrize(
    "value",
    [
        list(range(2500)),
        dict.fromkeys(range(2500)),
        {1, "a"},
        bytearray(b"x"),
        "\ud800",
        1 << 1000,
        OrderedDict(b=1, a=2),
    ],
    ids=[
        "a long list",
        "a large dict",
        "a set",
        "a bytearray",
        "half a surrogate pair",
        "a long number",
        "an ordered dict",
    ],
)
def test_pickle_reads_values_of_all_sizes(value):
    got = pickle.loads(dump(value))
    assert (got, type(got)) == (value, type(value))
    assert max(int(op.proto) for op, _, _ in pickletools.genops(dump(value))) <= 2


def test_attributes_of_an_ordered_dict_are_written():
    value = OrderedDict(a=1)
    value._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]  # as torch does
    assert pickle.loads(dump(value))._metadata == {"": {"version": 1}}


def test_shared_objects_are_written_once():
    value: Any = []
    for _ in range(200):
        value = (value, value)
    assert len(dump(value)) < 5000
    got = pickle.loads(dump(value))
    assert got[0] is got[1]


def test_a_tuple_in_its_own_list_is_written():
    items: list[Any] = []
    value = (items, 1)
    items.append(value)
    got = pickle.loads(dump(value))
    assert got[0][0][0] is got[0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Opaque(Global("models", "Net")), "weights_only=True"),
        (Global("os", "system"), "weights_only=True"),
        (object(), "builtins.object"),
        (1 << 3000, "a number of 376 bytes"),
    ],
    ids=["an object", "a function", "a live object", "a number too long"],
)
def test_objects_that_torch_would_refuse_are_refused(value, message):
    with pytest.raises(WriteError, match=message):
        dump({"x": value})


def vector(size: int) -> TensorSpec:
    return TensorSpec("float64", (size,), (1,), Storage("1", MemoryBytes(bytes(8 * size))))


@pytest.mark.parametrize(
    ("quantizer", "is_possible"),
    [
        pytest.param(Quantizer("per_tensor_affine", 0.5, 3), True, id="one scale"),
        pytest.param(Quantizer("per_channel_affine", vector(2), vector(2), 0), True, id="a scale for each row"),
        pytest.param(Quantizer("per_channel_affine", [0.5] * 3, [0] * 3, 1), True, id="of torch 1.3"),  # type: ignore[arg-type]
        pytest.param(Quantizer("per_tensor_affine", vector(2), 3), False, id="a tensor as one scale"),
        pytest.param(Quantizer("per_channel_affine", 0.5, 3, 0), False, id="one scale for each row"),
        pytest.param(Quantizer("per_channel_affine", vector(2), vector(3), 0), False, id="too many zero points"),
        pytest.param(Quantizer("per_channel_affine", vector(2), vector(2), 2), False, id="no such axis"),
        pytest.param(Quantizer("per_channel_affine", vector(2), vector(2), -1), False, id="a negative axis"),
    ],
)
def test_a_quantiser_that_torch_would_refuse_is_not_written(quantizer: Quantizer, is_possible: bool):
    spec = TensorSpec("qint8", (2, 3), (3, 1), Storage("0", MemoryBytes(bytes(6))), quantizer=quantizer)
    writer = PickleWriter("some.pth", lambda part: (StorageRef("0", 6, "cpu"), 0))
    if is_possible:
        assert writer.dump(spec)
    else:
        with pytest.raises(WriteError, match="its scales do not fit"):
            writer.dump(spec)
