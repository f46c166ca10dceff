from typing import Any

import pytest
import torch
from torch import nn

from ckptfix.smoke.forward import DeviceError, choose_device, compute_dtype, place, reduced_dtype

CPU = torch.device("cpu")


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


def test_the_cpu_gives_no_note() -> None:
    assert choose_device("cpu") == (CPU, ())


@pytest.mark.parametrize(
    ("visible", "said"),
    [
        pytest.param(None, "there is no CUDA device", id="no restriction"),
        pytest.param("", "there is no CUDA device as CUDA_VISIBLE_DEVICES is empty", id="all are hidden"),
        pytest.param("7", "there is no CUDA device as CUDA_VISIBLE_DEVICES is 7", id="another than there is"),
    ],
)
def test_auto_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch, visible: str | None, said: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert choose_device("auto") == (CPU, (said,))


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


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="there is such a device")
def test_only_the_first_sentence_of_a_long_message_is_reported() -> None:
    with pytest.raises(DeviceError) as error:
        choose_device("mps")
    assert "MPS" in str(error.value)
    assert len(str(error.value)) < 150


@pytest.mark.usefixtures("broken_cuda")
def test_cuda_visible_devices_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(DeviceError, match=r"the device cuda:1 .* \(CUDA_VISIBLE_DEVICES is 0\)"):
        choose_device("cuda:1")


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


def test_half_becomes_float32_on_the_cpu_and_that_is_reported() -> None:
    model = nn.BatchNorm1d(2).half()
    dtype, notes = place(model, CPU)
    assert dtype == torch.float32
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32, torch.int64}
    assert "converted to float32" in notes[0]


def test_a_model_that_is_half_in_part_stays_so() -> None:
    model = nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(2, 2))
    assert place(model, CPU) == (torch.float16, ())
    assert model[0].weight.dtype == torch.float16


class Crowded(nn.Linear):
    """Stands in for a model that is too large for its device: raises torch's own error until it is halved."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if self.weight.dtype == torch.float32 and args == (CPU,):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().to(*args, **kwargs)


def test_weights_that_do_not_fit_are_moved_in_reduced_precision() -> None:
    dtype, notes = place(Crowded(2, 2), CPU)
    assert dtype == torch.bfloat16
    assert notes == ("the weights did not fit into memory on cpu, so float32 was reduced to bfloat16",)


@pytest.mark.parametrize(
    ("dtype", "reduced"),
    [
        (torch.float64, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, None),
        (torch.bfloat16, None),
    ],
)
def test_the_dtype_with_half_the_memory(dtype: torch.dtype, reduced: torch.dtype | None) -> None:
    assert reduced_dtype(dtype, CPU) == reduced
