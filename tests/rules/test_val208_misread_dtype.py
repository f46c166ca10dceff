"""VAL208: bytes that were read as another dtype than they were written in."""

import pytest
import torch

from ckptfix.core.finding import Level
from ckptfix.rules.val208_misread_dtype import misread_dtype
from tests.rules.healthy import HEALTHY
from tests.rules.proposals import propose

KEY = "fc.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_noop_models_as_they_are_born(dtype):
    for name, make in HEALTHY.items():
        assert propose(misread_dtype, make().to(dtype).state_dict()) == [], name


@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(torch.randn(64, 64).sign(), id="binary"),
        pytest.param(torch.randint(-1, 2, (64, 64)).float(), id="ternary"),
        pytest.param(torch.randn(64, 64), id="a normal of one"),
        pytest.param(torch.rand(64, 64) * 2 - 1, id="a uniform of one"),
        pytest.param(torch.ones(64, 64), id="constant"),
        pytest.param(1 + 0.05 * torch.randn(1, 264), id="the gain of a norm over two dimensions"),
        pytest.param((torch.randn(64, 64) ** 5).bfloat16() * 1e-6, id="heavy tails that are tiny"),
        pytest.param(torch.randn(64, 64) * (torch.rand(64, 64) < 0.1), id="pruned"),
        pytest.param((0.02 * torch.randn(64, 64) * (torch.rand(64, 64) < 0.1)).bfloat16(), id="pruned in bfloat16"),
    ],
)
def test_noop(weight):
    assert propose(misread_dtype, {KEY: weight}) == []


@pytest.mark.parametrize("scale", [0.02, 0.1, 0.5])
@pytest.mark.parametrize(
    ("written", "read"),
    [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)],
    ids=["bfloat16 as float16", "float16 as bfloat16"],
)
def test_bits_of_another_dtype(written, read, scale):
    weight = (scale * torch.randn(128, 128)).to(written).view(read)
    (finding,) = propose(misread_dtype, {KEY: weight})
    assert (finding.level, finding.keys, finding.fix) == (Level.WARNING, (KEY,), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8], ids=str)
def test_codes_without_their_scale(dtype):
    codes = (40 * torch.randn(64, 64)).round().clamp(-127, 127).to(dtype)
    (finding,) = propose(misread_dtype, {KEY: codes})
    assert "only integers" in finding.message


@pytest.mark.parametrize("beside", ["fc.scale", "fc.SCB", "fc.weight_scale_inv", "act_scaling_factor", "fc.a"])
def test_noop_codes_next_to_their_scale(beside):
    codes = (40 * torch.randn(64, 64)).round().clamp(-127, 127).to(torch.int8)
    assert propose(misread_dtype, {KEY: codes, beside: torch.rand(64)}) == []


def test_noop_an_index_table():
    assert propose(misread_dtype, {"relative_coords_table": torch.arange(4096.0).view(64, 64) % 200}) == []


@pytest.mark.parametrize("scale", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_other_byte_order(dtype, scale):
    raw = (scale * torch.randn(128, 128, dtype=torch.float64)).to(dtype).view(torch.uint8).numpy()
    weight = torch.from_numpy(raw.reshape(-1, dtype.itemsize)[:, ::-1].copy()).view(dtype).view(128, 128)
    (finding,) = propose(misread_dtype, {KEY: weight})
    assert "bytes in the wrong order" in finding.message


def test_noop_a_matrix_with_one_nan():
    weight = 0.1 * torch.randn(64, 64)
    weight[3, 4] = float("nan")
    assert propose(misread_dtype, {KEY: weight}) == []
