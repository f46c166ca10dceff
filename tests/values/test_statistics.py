"""Lazy, cached, and the same figures as an eager computation."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ckptfix.core.spec import Storage, TensorSpec, TensorStatistics
from ckptfix.values.statistics import BINS, Statistics, histogram
from ckptfix.values.walk import CHUNK
from tests.values.exact import HALVES
from tests.values.memory import MemorySource, checkpoint_of, source_of


def statistics_of(tensor: torch.Tensor) -> TensorStatistics:
    return Statistics(checkpoint_of({"key": tensor}))["key"]


def eager(tensor: torch.Tensor) -> TensorStatistics:
    """The same figures by the plain route: the whole tensor as float64."""
    stored = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = stored.to(torch.float64).reshape(-1).numpy()
    bad, finite = np.flatnonzero(~np.isfinite(flat)), flat[np.isfinite(flat)]
    tiny = torch.finfo(stored.dtype).smallest_normal if stored.dtype.is_floating_point else 0.0
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
    scale = max(abs(low), abs(high)) or 1.0
    return TensorStatistics(
        numel=len(flat),
        nan=int(np.isnan(flat).sum()),
        pos_inf=int((flat == math.inf).sum()),
        neg_inf=int((flat == -math.inf).sum()),
        zeros=int((flat == 0).sum()),
        subnormals=int(((flat != 0) & (np.abs(flat) < tiny)).sum()),
        minimum=low,
        maximum=high,
        mean=scale * (math.fsum(finite / scale) / len(finite)) if len(finite) else 0.0,
        rms=scale * math.sqrt(math.fsum((finite / scale) ** 2) / len(finite)) if len(finite) else 0.0,
        first_nonfinite=int(bad[0]) // (2 if tensor.is_complex() else 1) if len(bad) else None,
    )


def assert_same(found: TensorStatistics, expected: TensorStatistics, dtype: torch.dtype) -> None:
    exact = ("numel", "nan", "pos_inf", "neg_inf", "zeros", "subnormals", "minimum", "maximum", "absmax")
    for name in (*exact, "first_nonfinite"):
        assert getattr(found, name) == getattr(expected, name), name
    is_half = dtype in (torch.float16, torch.bfloat16, torch.complex32)
    assert math.isclose(found.rms, expected.rms, rel_tol=HALVES if is_half else 1e-9)
    share = HALVES if is_half else 1e-12
    assert math.isclose(found.mean, expected.mean, rel_tol=1e-9, abs_tol=share * expected.rms)


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.complex32),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32),
]


@st.composite
def tensors(draw):
    """Any bytes as any dtype (so every NaN payload, subnormal and -0.0 comes up), seen through any view."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    seed = draw(st.integers(0, 2**32 - 1))
    share = draw(st.sampled_from([0.0, 0.1, 1.0]))
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 256, math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    if generator.random() < 0.5:
        data[generator.random(len(data)) >= share] = 0
    tensor = torch.from_numpy(data).view(dtype).reshape(shape) if len(data) else torch.empty(shape, dtype=dtype)
    if shape:
        tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
        axis = draw(st.integers(0, len(shape) - 1))
        kind = draw(st.sampled_from(["whole", "strided", "narrow", "expanded"]))
        if kind == "strided":
            index = [slice(None)] * len(shape)
            index[axis] = slice(None, None, 2)
            tensor = tensor[tuple(index)]
        elif kind == "narrow" and tensor.shape[axis]:
            tensor = tensor.narrow(axis, tensor.shape[axis] // 2, tensor.shape[axis] - tensor.shape[axis] // 2)
        elif kind == "expanded":
            tensor = tensor.unsqueeze(axis).expand(*tensor.shape[:axis], 3, *tensor.shape[axis:])
    return tensor


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@settings(deadline=None, max_examples=300)
@given(tensors())
def test_the_figures_are_those_of_an_eager_computation(tensor):
    assert_same(statistics_of(tensor), eager(tensor), tensor.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_figures_of_large_tensors(dtype):
    tensor = (torch.randn(3, 700_001, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    tensor[2, 5], tensor[1, 600_000] = math.nan, -math.inf
    assert_same(statistics_of(tensor), eager(tensor), tensor.dtype)
    assert_same(statistics_of(tensor.t()), eager(tensor.t()), dtype)
    assert_same(statistics_of(tensor[:, ::3]), eager(tensor[:, ::3]), dtype)


def test_bool_counts_as_zero_and_one():
    figures = statistics_of(torch.tensor([True, False, True, True]))
    assert (figures.zeros, figures.mean, figures.maximum) == (1, 0.75, 1.0)


def test_a_quantized_tensor_counts_by_its_integers():
    storage = Storage("0", MemorySource(bytes([0, 255, 3])))
    checkpoint = checkpoint_of({})
    spec = TensorSpec("qint8", (3,), (1,), storage)
    figures = Statistics(replace(checkpoint, entries={"q": spec}))["q"]
    assert (figures.numel, figures.minimum, figures.maximum, figures.zeros) == (3, -1.0, 3.0, 1)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_sparse_tensor_counts_the_zeros_that_it_leaves_out():
    dense = torch.zeros(10, 10)
    dense[3, 4], dense[7, 7] = 2.0, -6.0
    found, expected = statistics_of(dense.to_sparse()), eager(dense)
    assert_same(found, expected, dense.dtype)
    dense[1, 1] = math.nan
    assert statistics_of(dense.to_sparse_csr()).nan == 1


def test_a_zero_stride_tensor_is_read_once():
    checkpoint = checkpoint_of({"z": torch.tensor([math.nan]).expand(10**6, 10**6)})
    figures = Statistics(checkpoint)["z"]
    assert (figures.numel, figures.nan, figures.first_nonfinite) == (10**12, 10**12, 0)
    assert source_of(checkpoint, "z").bytes_read == 4


def test_reading_is_lazy_and_ties_are_read_once():
    weight = torch.randn(100)
    checkpoint = checkpoint_of({"a": weight, "b": weight, "c": weight[:50]})
    source = source_of(checkpoint, "a")
    statistics = Statistics(checkpoint)
    assert list(statistics) == ["a", "b", "c"]
    assert "a" in statistics
    assert len(statistics) == 3
    assert source.bytes_read == 0
    assert statistics["a"] is statistics["b"]
    assert source.bytes_read == 400
    assert statistics["c"].numel == 50


def test_an_edited_view_is_not_read_again():
    checkpoint = checkpoint_of({"module.a": torch.randn(100)})
    source = source_of(checkpoint, "module.a")
    before = Statistics(checkpoint)
    figures = before["module.a"]
    edited = replace(checkpoint, entries={"a": checkpoint.entries["module.a"], "b": checkpoint.entries["module.a"]})
    after = before.of(edited)
    assert list(after) == ["a", "b"]
    assert after["a"] is after["b"] is figures
    assert source.bytes_read == 400


def heights(tensor: torch.Tensor) -> list[int]:
    return [int(digit, 36) for digit in histogram(statistics_of(tensor))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int16])
def test_the_histogram_of_a_small_tensor_is_exact(dtype):
    tensor = (torch.arange(240.0).reshape(12, 20) ** 1.3 / 7).to(dtype)
    counts = np.histogram(tensor.double().numpy(), bins=BINS)[0]
    assert heights(tensor) == [math.ceil(35 * count / counts.max()) for count in counts]


def test_a_histogram_is_of_all_columns_and_parts():
    """A sample at a distance of whole rows would be of one column."""
    tensor = torch.randn(1 << 14, 256)
    tensor[:, 0] = 100.0
    assert heights(tensor)[-1] in (1, 2)
    tensor[1 << 13 :] += 50
    assert [height > 25 for height in heights(tensor)].count(True) == 2


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(0), torch.tensor(3), torch.ones(9), torch.full((4,), math.nan), torch.eye(4).to_sparse()],
    ids=["empty", "one number", "constant", "NaN", "sparse"],
)
def test_noop_no_histogram_without_a_range(tensor):
    assert heights(tensor) == []


@pytest.mark.parametrize(
    ("numbers", "full"),
    [
        ([-3.4e38, 0.0, 3.4e38, math.nan], {0, 8, 15}),
        ([-math.inf, 1.0, 1.5, 2.0], {0, 8, 15}),
        ([0.0, 1e-45], {0, 15}),
    ],
)
def test_a_histogram_of_extreme_numbers(numbers, full):
    assert {place for place, height in enumerate(heights(torch.tensor(numbers))) if height} == full


def test_a_histogram_of_numbers_beyond_float32():
    assert heights(torch.tensor([-1.7e308, 1.0, 1.7e308], dtype=torch.float64))[8] == 35


def test_reads_are_bounded():
    tensor = torch.zeros(CHUNK)  # four times as many bytes
    checkpoint = checkpoint_of({"a": tensor, "b": tensor.view(2, -1).t()[:, :1]})
    source = source_of(checkpoint, "a")
    list(Statistics(checkpoint).values())
    assert source.largest <= CHUNK


def test_tensors_without_numbers_are_absent():
    packed = TensorSpec("quint4x2", (4,), (1,), Storage("0", MemorySource(bytes(2))))
    overlapping = torch.zeros(2000).as_strided((1000, 1000), (1, 1))
    checkpoint = checkpoint_of({"meta": torch.zeros(3, device="meta"), "endless": overlapping, "w": torch.zeros(1)})
    statistics = Statistics(replace(checkpoint, entries={**checkpoint.entries, "packed": packed}))
    assert list(statistics) == ["w"]
    assert "meta" not in statistics
    with pytest.raises(KeyError):
        statistics["meta"]
