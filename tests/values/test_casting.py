import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptfix.core.edits import BLOCKS, MXFP4, MXFP4_TURNED, NON_FINITE, SUBNORMAL, Adapt, Dequantise
from ckptfix.core.spec import TensorSpec
from ckptfix.errors import WriteError
from ckptfix.reading.tensors import build_tensor, spec_of_tensor
from ckptfix.values.adapted_tensors import adapted_spec
from ckptfix.values.casting import can_be_zeroed, cast_spec, is_cast_of, zeroed_spec
from ckptfix.values.dequantising import dequantised_spec
from tests.checks import bytes_of


@pytest.mark.parametrize("tensor", [torch.arange(10.0), torch.arange(12.0).reshape(3, 4).t(), torch.ones(1).expand(5)])
@pytest.mark.parametrize("goal", ["float16", "float64", "int32", "bfloat16"])
def test_a_cast_gives_what_torch_gives_read_in_any_pieces(goal, tensor):
    spec = cast_spec(spec_of_tensor(tensor), goal, "f")
    assert spec.storage is not None
    expected = bytes_of(tensor.to(getattr(torch, goal)))
    assert bytes(spec.storage.source.read(0, spec.nbytes)) == expected
    assert b"".join(bytes(spec.storage.source.read(i, i + 1)) for i in range(spec.nbytes)) == expected


_COMPLEX = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)


@pytest.mark.parametrize(
    ("tensor", "goal"),
    [
        (_COMPLEX.conj(), "complex128"),
        (torch._neg_view(_COMPLEX), "complex128"),
        (torch._neg_view(torch.ones(3)), "float64"),
    ],
    ids=["conjugated", "negated", "negated floats"],
)
def test_a_cast_sees_the_numbers_that_a_lazy_view_stands_for(tensor, goal):
    spec = spec_of_tensor(tensor)
    assert any(spec.math_bits.values())
    assert torch.equal(build_tensor(cast_spec(spec, goal, "f")), tensor.to(getattr(torch, goal)))


@pytest.mark.parametrize(
    ("value", "goal"),
    [(float("nan"), "int32"), (float("nan"), "bool"), (float("-inf"), "int64"), (2.0**63, "int64"), (-1.0, "uint8")],
)
def test_a_cast_of_what_no_whole_number_stands_for_is_refused(value, goal):
    spec = cast_spec(spec_of_tensor(torch.tensor([value])), goal, "f")
    with pytest.raises(WriteError, match=f"cannot become {goal}"):
        build_tensor(spec)


DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def zeroed(tensor: torch.Tensor, which: str) -> torch.Tensor:
    return build_tensor(zeroed_spec(spec_of_tensor(tensor), which, "file"))


@given(st.binary(min_size=8, max_size=160), st.sampled_from(DTYPES))
def test_only_the_non_finite_change(raw, dtype):
    tensor = torch.frombuffer(bytearray(raw[: len(raw) // 8 * 8]), dtype=torch.uint8).view(dtype)
    bad = ~tensor.double().isfinite()
    expected = tensor.clone()
    expected.view(torch.uint8).view(len(tensor), -1)[bad] = 0
    assert bytes_of(zeroed(tensor, NON_FINITE)) == bytes_of(expected)


@given(st.lists(st.floats(width=32), min_size=1))
def test_only_the_subnormal_change(numbers):
    tensor = torch.tensor(numbers, dtype=torch.float32)
    small = (tensor.double().abs() < 2.0**-126) & (tensor != 0)
    assert bytes_of(zeroed(tensor, SUBNORMAL)) == bytes_of(torch.where(small, 0.0, tensor))


@pytest.mark.parametrize(
    "view",
    [lambda x: x, lambda x: x.T, lambda x: x[1:, ::2], lambda x: x[:1].expand(4, 6)],
    ids=["plain", "transposed", "slice", "expanded"],
)
def test_views_keep_their_values_and_shape(view):
    tensor = torch.arange(24.0).reshape(4, 6)
    tensor[1, 2], tensor[0, 0], tensor[3, 3] = torch.nan, torch.inf, -0.0
    before = view(tensor)
    after = zeroed(before, NON_FINITE)
    assert bytes_of(after) == bytes_of(torch.where(before.isfinite(), before, 0.0))


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.tensor([1.0, torch.nan, 2.0, torch.inf]), id="floats"),
        pytest.param(torch.tensor([complex(1, torch.nan), complex(torch.inf, 2)]), id="complex numbers"),
    ],
)
def test_a_piece_can_be_read(tensor):
    source = zeroed_spec(spec_of_tensor(tensor), NON_FINITE, "file").storages[0].source
    whole = torch.tensor([1.0, 0.0, 2.0, 0.0] if tensor.dtype == torch.float32 else [1.0, 0.0, 0.0, 2.0])
    assert bytes(source.read(0, 16)) == bytes_of(whole)
    assert all(bytes(source.read(a, b)) == bytes_of(whole)[a:b] for a in range(17) for b in range(a, 17))


def _of_codes(scheme: str, shape: tuple[int, ...], scales: tuple[int, ...]) -> TensorSpec:
    codes = torch.randint(0, 127, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    steps = torch.full(scales, 127, dtype=torch.uint8) if scheme != BLOCKS else torch.arange(scales[0]).float()
    edit = Dequantise("w", "uint8" if scheme != BLOCKS else "int8", "bfloat16", "scales", scheme)
    codes = codes if scheme != BLOCKS else codes.char()
    made = dequantised_spec(spec_of_tensor(codes), {"scales": spec_of_tensor(steps)}, edit, "f")
    assert made is not None
    return made


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(_of_codes(MXFP4, (3, 5, 2, 16), (3, 5, 2)), id="experts of four bits"),
        pytest.param(_of_codes(MXFP4_TURNED, (3, 5, 2, 16), (3, 5, 2)), id="turned experts"),
        pytest.param(_of_codes(BLOCKS, (7, 6), (7,)), id="codes times scales"),
        pytest.param(
            adapted_spec(
                spec_of_tensor(torch.randn(4, 3, 2, 2)),
                Adapt("w", "w", "in_chans=timm", "float32", (4, 3, 2, 2), (4, 5, 2, 2)),
                "f",
            ),
            id="a formula",
        ),
    ],
)
def test_a_computed_tensor_is_the_same_in_any_pieces(spec: TensorSpec) -> None:
    source, whole = spec.storages[0].source, bytes_of(build_tensor(spec))
    assert len(whole) == spec.nbytes
    for step in (1, 7, 64, 100, spec.nbytes - 1):
        ends = [(at, min(at + step, spec.nbytes)) for at in range(0, spec.nbytes, step)]
        assert [bytes(source.read(*each)) for each in ends] == [whole[start:stop] for start, stop in ends]
    assert not len(source.read(5, 5))


@pytest.mark.parametrize(
    ("tensor", "can"),
    [
        pytest.param(torch.ones(2), True, id="float"),
        pytest.param(torch.ones(2, dtype=torch.complex64), True, id="complex"),
        pytest.param(torch.ones(2, dtype=torch.int64), False, id="integers"),
        pytest.param(torch.ones(2).to_sparse(), False, id="sparse"),
        pytest.param(torch.ones(2, dtype=torch.complex64).conj(), False, id="conjugated"),
        pytest.param(torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), False, id="quantised"),
        pytest.param(torch.ones(2).to(torch.float8_e8m0fnu), False, id="no-zero"),
        pytest.param(torch.ones(2, device="meta"), False, id="no-data"),
    ],
)
def test_what_can_be_zeroed(tensor, can):
    assert can_be_zeroed(spec_of_tensor(tensor)) is can


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_copy_is_the_cast_of_torch_and_of_nothing_else(dtype: torch.dtype) -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (100_000,), dtype=torch.int64, generator=torch.Generator().manual_seed(0))
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0x33000000, 0x33000001, 0x477FF000])
    master = torch.cat([bits, ties]).to(torch.int32).view(torch.float32)
    copy = master.to(dtype)
    assert is_cast_of(spec_of_tensor(master), spec_of_tensor(copy), "")
    assert is_cast_of(spec_of_tensor(master.view(-1, 1)[::2]), spec_of_tensor(copy[::2].view(-1, 1)), "")
    for place in (0, len(copy) - 1):
        changed = copy.clone()
        changed[place] = 7.0
        assert not is_cast_of(spec_of_tensor(master), spec_of_tensor(changed), "")
