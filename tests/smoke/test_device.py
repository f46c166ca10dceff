from __future__ import annotations

import pytest
import torch
from torch import nn

from ckptfix.errors import UsageError
from ckptfix.smoke.device import DeviceError, check_device_name, choose_device, compute_dtype, place

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:1", "mps"])
def test_names_of_devices(name: str) -> None:
    check_device_name(name)


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:x", "cpu0"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="no device"):
        check_device_name(name)


@pytest.fixture
def broken_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for a machine whose driver is listed and does not work, with the message of the genuine case."""
    ones = torch.ones

    def fail_on_cuda(*shape: int, device: torch.device) -> torch.Tensor:
        if device.type == "cuda":
            raise RuntimeError(
                "CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors…"
            )
        return ones(*shape, device=device)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "ones", fail_on_cuda)


def test_the_cpu_needs_no_words() -> None:
    assert choose_device("cpu") == (CPU, ())


def test_auto_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == (CPU, ("there is no CUDA device",))


@pytest.mark.usefixtures("broken_cuda")
def test_auto_falls_back_from_a_broken_cuda_and_names_it() -> None:
    device, notes = choose_device("auto")
    assert device == CPU
    assert notes == (
        "the CUDA environment is broken: CUDA error: no kernel image is available for execution on the device",
    )


@pytest.mark.usefixtures("broken_cuda")
def test_a_broken_device_that_was_asked_for_is_an_error() -> None:
    with pytest.raises(DeviceError, match="does not work here: CUDA error"):
        choose_device("cuda")


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        pytest.param(nn.Identity(), torch.float32, id="no parameters"),
        pytest.param(nn.Linear(1, 1).double(), torch.float64, id="double"),
        pytest.param(
            nn.Sequential(nn.Linear(1, 1).bfloat16(), nn.LayerNorm(1)), torch.bfloat16, id="the first decides"
        ),
    ],
)
def test_the_inputs_dtype_is_the_first_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    assert compute_dtype(model) == dtype
    assert place(model, CPU) == (dtype, ())


def test_half_becomes_float32_on_the_cpu_and_that_is_said() -> None:
    model = nn.BatchNorm1d(2).half()
    dtype, notes = place(model, CPU)
    assert dtype == torch.float32
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32, torch.int64}
    assert "converted to float32" in notes[0]
