"""What is computed from a tensor's dtype, shape, strides and offset, the first time and again."""

import copy
import pickle

import pytest

from ckptfix.core.spec import TensorSpec, contiguous_strides


def asked(spec: TensorSpec) -> tuple[object, ...]:
    return spec.numel, spec.nbytes, spec.is_contiguous, spec.extent


@pytest.mark.parametrize(
    ("spec", "numel", "nbytes", "is_contiguous", "extent"),
    [
        (TensorSpec("float32", ()), 1, 4, True, (0, 4)),
        (TensorSpec("float32", (2, 3), (3, 1)), 6, 24, True, (0, 24)),
        (TensorSpec("float16", (2, 3), (3, 1), offset=4), 6, 12, True, (8, 20)),
        (TensorSpec("float32", (2, 3), (1, 2)), 6, 24, False, (0, 24)),
        (TensorSpec("float32", (2, 3), (5, 1)), 6, 24, False, (0, 32)),
        (TensorSpec("float32", (1, 3), (99, 1)), 3, 12, True, (0, 12)),
        (TensorSpec("int64", (1000,), (0,), offset=1), 1000, 8000, False, (8, 16)),
        (TensorSpec("float32", (0, 3), (7, 2), offset=2), 0, 0, True, (8, 8)),
        (TensorSpec("quint4x2", (3,), (1,), offset=1), 3, 2, True, (0, 2)),
        (TensorSpec("quint4x2", (0,), (1,), offset=1), 0, 0, True, (0, 0)),
    ],
    ids="0-d row-major offset transposed rows-apart one-row repeated empty half-bytes no-half-bytes".split(),
)
def test_cached_answers_are_the_same(spec, numel, nbytes, is_contiguous, extent):
    assert asked(spec) == asked(spec) == (numel, nbytes, is_contiguous, extent)


def test_what_is_known_is_not_a_part_of_a_spec():
    known, fresh = (TensorSpec("float32", (2, 3), contiguous_strides((2, 3))) for _ in range(2))
    asked(known)
    assert known == fresh
    assert hash(known) == hash(fresh)
    assert repr(known) == repr(fresh)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda spec: pickle.loads(pickle.dumps(spec))])
def test_a_copy_answers_as_its_model(again):
    spec = TensorSpec("float32", (2, 3), (1, 2))
    before = again(spec)
    assert asked(spec) == asked(before) == asked(again(spec))


def test_a_changed_spec_is_computed_again():
    from msgspec.structs import replace

    spec = TensorSpec("float32", (2, 3), (3, 1))
    asked(spec)
    assert asked(replace(spec, dtype="float64", shape=(6,), strides=(2,))) == (6, 48, False, (0, 88))
