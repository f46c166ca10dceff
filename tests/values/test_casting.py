from __future__ import annotations

import pytest
import torch

from ckptfix.errors import WriteError
from ckptfix.reading.live import spec_of_tensor
from ckptfix.reading.tensors import build_tensor
from ckptfix.values.casting import cast_spec
from tests.checks import bytes_of


@pytest.mark.parametrize("tensor", [torch.arange(10.0), torch.arange(12.0).reshape(3, 4).t(), torch.ones(1).expand(5)])
@pytest.mark.parametrize("goal", ["float16", "float64", "int32", "bfloat16"])
def test_a_cast_gives_what_torch_gives_read_in_any_pieces(goal, tensor):
    spec = cast_spec(spec_of_tensor(tensor), goal, "f")
    assert spec.storage is not None
    expected = bytes_of(tensor.to(getattr(torch, goal)))
    assert bytes(spec.storage.source.read(0, spec.nbytes)) == expected
    assert b"".join(bytes(spec.storage.source.read(i, i + 1)) for i in range(spec.nbytes)) == expected


@pytest.mark.parametrize(
    ("value", "goal"), [(float("nan"), "int32"), (float("-inf"), "int64"), (2.0**63, "int64"), (-1.0, "uint8")]
)
def test_a_cast_of_what_no_whole_number_stands_for_is_refused(value, goal):
    spec = cast_spec(spec_of_tensor(torch.tensor([value])), goal, "f")
    with pytest.raises(WriteError, match=f"cannot become {goal}"):
        build_tensor(spec)
