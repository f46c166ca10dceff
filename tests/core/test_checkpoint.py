from collections.abc import Mapping

import pytest

from ckptfix.bytes.sources import MemoryBytes
from ckptfix.core.checkpoint import Checkpoint, path_name
from ckptfix.core.spec import Quantizer, Storage, TensorSpec, contiguous_strides
from ckptfix.errors import CkptfixError

STORAGE = Storage("0", MemoryBytes(bytes(96)))


@pytest.mark.parametrize(
    ("shape", "strides"), [((), ()), ((5,), (1,)), ((2, 3, 4), (12, 4, 1)), ((0, 3), (3, 1)), ((2, 0, 3), (3, 3, 1))]
)
def test_the_strides_of_a_row_major_tensor(shape, strides):
    assert contiguous_strides(shape) == strides


@pytest.mark.parametrize(
    ("shape", "strides", "contiguous"),
    [
        ((), (), True),
        ((2, 3), (3, 1), True),
        ((1, 3), (99, 1), True),
        ((0, 3), (1, 7), True),
        ((3, 2), (1, 3), False),
        ((4,), (0,), False),
    ],
)
def test_a_tensor_is_contiguous_whatever_the_strides_that_lead_nowhere(shape, strides, contiguous):
    assert TensorSpec("float32", shape, strides, STORAGE).is_contiguous is contiguous


@pytest.mark.parametrize(
    ("spec", "extent"),
    [
        (TensorSpec("float32", (), (), STORAGE, 2), (8, 12)),
        (TensorSpec("float32", (2, 3), (3, 1), STORAGE, 1), (4, 28)),
        (TensorSpec("uint8", (3, 2), (1, 10), STORAGE), (0, 13)),
        (TensorSpec("float32", (5,), (0,), STORAGE, 3), (12, 16)),
        (TensorSpec("float32", (0, 5), (5, 1), STORAGE, 3), (12, 12)),
    ],
)
def test_the_extent_covers_the_bytes_of_a_tensor(spec, extent):
    assert spec.extent == extent


def test_a_scalar_has_one_element_and_a_zero_stride_tensor_many():
    assert TensorSpec("int64", ()).numel == 1
    assert TensorSpec("float32", (1000, 1000), (0, 0), STORAGE).nbytes == 4_000_000


def test_two_views_are_equal_only_with_equal_values():
    plain = TensorSpec("complex64", (2,), (1,), STORAGE)
    same = TensorSpec("complex64", (2,), (1,), STORAGE, is_parameter=True)
    others = [
        TensorSpec("complex64", (2,), (1,), STORAGE, 1),
        TensorSpec("complex64", (2,), (1,), STORAGE, math_bits={"conj": True}),
        TensorSpec("complex64", (2,), (1,), Storage("0", MemoryBytes(bytes(96)))),
        TensorSpec("float64", (2,), (1,), STORAGE),
        TensorSpec("complex64", (2,), (1,), STORAGE, quantizer=Quantizer("per_tensor_affine", 0.5, 0)),
    ]
    assert plain.view == same.view
    assert all(plain.view != other.view for other in others)
    assert TensorSpec("complex64", (2,), (1,), STORAGE, math_bits={"conj": False}).view == plain.view


def test_a_spec_can_be_a_key():
    """Optimizers and averages use tensors as keys of dicts."""
    parts: Mapping[str, TensorSpec] = {"indices": TensorSpec("int64", (1,)), "values": TensorSpec("float32", (1,))}
    spec = TensorSpec("float32", (3,), layout="sparse_coo", parts=parts)
    assert {spec: 1}[spec] == 1


def test_the_parts_of_a_tensor_are_the_strided_ones():
    scale, zero = TensorSpec("float64", (2,), (1,), STORAGE), TensorSpec("int64", (2,), (1,), STORAGE)
    spec = TensorSpec("qint8", (2,), (1,), STORAGE, quantizer=Quantizer("per_channel_affine", scale, zero, 0))
    assert list(spec.strided_parts()) == [spec, scale, zero]
    assert list(TensorSpec("float32", (2,)).strided_parts()) == []


@pytest.mark.parametrize(
    ("path", "shown"), [((), "."), (("model",), "model"), ((0,), "[0]"), (("a", 0, "b"), "a[0].b"), ((0, "a"), "[0].a")]
)
def test_container_paths_as_text(path, shown):
    assert path_name(path) == shown


def test_a_checkpoint_has_its_tensors_apart_from_its_other_entries():
    spec = TensorSpec("float32", (2,), (1,), STORAGE)
    checkpoint = Checkpoint("f", "test", {"a": 1, "w": spec, "b": None})
    assert (checkpoint.keys(), dict(checkpoint.specs)) == (["w"], {"w": spec})


@pytest.mark.parametrize(
    ("key", "said"),
    [
        pytest.param("fc.wieght", "f.pth: has no key 'fc.wieght'; did you mean 'fc.weight'?", id="a slip of the pen"),
        pytest.param("zzz", "f.pth: has no key 'zzz'; see keys()", id="nothing like it"),
        pytest.param("a", "f.pth: the entry 'a' is not a tensor; take it from state_dict()", id="no tensor"),
        pytest.param("gone", "f.pth: the bytes of 'gone' are lost from the damaged file; see", id="lost"),
    ],
)
def test_an_unknown_key_is_reported_with_its_file(key, said):
    spec = TensorSpec("float32", (2,), (1,), STORAGE)
    checkpoint = Checkpoint("f.pth", "test", {"a": 1, "fc.weight": spec}, lost={"gone": None})
    with pytest.raises(KeyError) as caught:
        checkpoint.read(key)
    assert isinstance(caught.value, CkptfixError)
    assert str(caught.value).startswith(said)
