import tracemalloc

import pytest
import torch

from ckptfix.core.spec import TensorSpec
from ckptfix.errors import UnreadableError
from ckptfix.reading.boxes import have_same_bytes, row_major, row_major_blocks, row_major_bytes
from ckptfix.reading.tensors import spec_of_tensor
from tests.checks import bytes_of
from tests.reading.state_dicts import STRIDED, pattern


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize("how", ["plain", "transposed", "strided", "zero stride", "one column"])
def test_row_major_bytes_are_those_of_the_values(how, name):
    base = pattern(STRIDED[name], 6, 4)
    tensor = {
        "plain": base,
        "transposed": base.t(),
        "strided": base[::2, 1::2],
        "zero stride": base[:1].expand(3, 4),
        "one column": base[:, 1:2],
    }[how]
    assert bytes(row_major_bytes(spec_of_tensor(tensor), "f")) == bytes_of(tensor)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("bits", ["conj", "neg", "conj, transposed", "neg, transposed", "conj of a number"])
def test_row_major_bytes_are_conjugated_and_negated(bits, dtype):
    values = torch.view_as_complex(torch.arange(16.0).reshape(4, 2, 2)).to(dtype)
    tensor = {
        "conj": values.conj(),
        "neg": values.conj().imag,
        "conj, transposed": values.conj().t(),
        "neg, transposed": values.conj().imag.t(),
        "conj of a number": values[1, 1].conj(),
    }[bits]
    assert bytes(row_major_bytes(spec_of_tensor(tensor), "f")) == bytes_of(tensor)


def test_a_transposed_tensor_is_read_in_pieces():
    spec = spec_of_tensor(torch.arange(4096 * 4096, dtype=torch.int32).reshape(4096, 4096).t())
    tracemalloc.start()
    try:
        firsts = [int.from_bytes(block[:4], "little") for block in row_major_blocks(spec, "f")]
        assert tracemalloc.get_traced_memory()[1] < spec.nbytes // 2 + (8 << 20)
    finally:
        tracemalloc.stop()
    assert firsts == [at * 4096 % (1 << 24) + at // 4096 for at in range(0, 4096 * 4096, 4096 * 4096 // len(firsts))]


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda base: base, id="contiguous"),
        pytest.param(lambda base: base.t(), id="transposed"),
        pytest.param(lambda base: base[::2, 1:], id="with other elements between"),
        pytest.param(lambda base: base[:1].expand(3, 4), id="expanded"),
    ],
)
def test_equal_elements_are_compared_in_any_layout(view):
    base = torch.arange(24.0).reshape(6, 4)
    one = view(base)
    other = view(torch.full_like(base, 7.0))
    if other.stride()[0]:
        other.copy_(one)
    else:
        other[:1].copy_(one[:1])
    for copy in (other, one.contiguous()):
        assert have_same_bytes(spec_of_tensor(one), spec_of_tensor(copy), "f")
    other[-1, -1] += 1
    assert not have_same_bytes(spec_of_tensor(one), spec_of_tensor(other), "f")


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.arange(6.0).reshape(2, 3), id="contiguous"),
        pytest.param(torch.arange(9.0).reshape(3, 3)[1:], id="behind-an-offset"),
        pytest.param(torch.arange(6.0).reshape(3, 2).t(), id="transposed"),
    ],
)
def test_row_major_bytes_of_a_chunk(tensor: torch.Tensor) -> None:
    source = row_major(spec_of_tensor(tensor), "memory")
    expected = tensor.contiguous().numpy().tobytes()
    assert source.nbytes == len(expected)
    assert bytes(source.read(3, 17)) == expected[3:17]


def test_a_chunk_of_the_meta_device_has_no_bytes() -> None:
    with pytest.raises(UnreadableError, match="meta device"):
        row_major(TensorSpec("float32", (2,), (1,)), "memory").read(0, 8)
