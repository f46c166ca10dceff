"""Failures that need a GPU, provoked on it. On a machine without one they are skipped; test_retries and
test_run have stand-ins that raise the genuine messages.

Each test starts a child, since an assert of a kernel ends the GPU's use for its process.
"""

from typing import Any

import pytest
import torch
from torch import nn

from ckptfix.core.finding import Finding, Level
from ckptfix.core.settings import Settings
from ckptfix.core.smoke_result import SmokeResult
from ckptfix.smoke.run import run_smoke
from tests.smoke import gpu_failures, models
from tests.smoke.conftest import Save

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

GPU = "cuda:0"


def run(
    save: Save,
    model: type[nn.Module],
    *inputs: str,
    built: type[nn.Module] | None = None,
    changes: dict[str, Any] | None = None,
    device: str = GPU,
    **options: Any,
) -> tuple[SmokeResult, list[Finding]]:
    """Test a model on a file of its own weights, or of those of ``built``, which has equal ones."""
    settings = Settings(input=inputs, device=device, **options)
    return run_smoke(save((built or model)(), changes), f"{model.__module__}:{model.__name__}", {}, settings)


@pytest.mark.parametrize("device", ["auto", "cuda", GPU])
def test_a_sound_file_passes_and_agrees_with_the_cpu(save: Save, device: str) -> None:
    result, findings = run(save, models.Net, device=device, backward=True)
    assert findings == []
    assert result.passed is True
    assert result.device.startswith("cuda")
    assert result.checks[0].startswith("training mode: finite")
    assert result.checks[1] == "gradients: 6 finite"
    assert f"{result.device} against cpu: " in result.checks[2]
    assert "argmax agrees in 100 %" in result.checks[2] or "bit-equal" in result.checks[2]


def test_half_weights_run_in_half_on_the_gpu(save: Save) -> None:
    factory = "tests.smoke.models:half"
    result, findings = run_smoke(save(models.half()), factory, {}, Settings(device=GPU))
    assert (result.passed, findings) == (True, [])
    assert result.inputs == ("float16[2, 3, 64, 64]",)


def test_auto_respects_a_hidden_gpu(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result, findings = run(save, models.Net, device="auto")
    assert (result.passed, result.device, findings) == (True, "cpu", [])
    assert "CUDA_VISIBLE_DEVICES is empty" in result.note


def test_a_missing_gpu_is_blamed_on_the_environment(save: Save) -> None:
    result, [finding] = run(save, models.Net, device=f"cuda:{torch.cuda.device_count()}")
    assert result.passed is False
    assert finding.evidence["blame"] == "environment"
    assert finding.evidence["stage"] == "device"


def test_an_index_out_of_range_in_a_derived_input_gives_no_verdict(save: Save) -> None:
    result, [finding] = run(save, gpu_failures.TooManyWords)
    assert result.passed is None
    assert finding.level is Level.WARNING
    assert "CUDA_LAUNCH_BLOCKING=1" in result.note


def test_an_index_out_of_range_in_a_given_input_is_named_at_its_line(save: Save) -> None:
    result, [finding] = run(save, gpu_failures.TooManyWords, "2x5:int:0:10")
    assert result.passed is False
    assert finding.evidence["blame"] == "input"
    assert finding.evidence["module"] == "words"
    assert "device-side assert" in finding.evidence["error"]


@pytest.mark.parametrize("model", [gpu_failures.Greedy, gpu_failures.Capped], ids=["all of it", "a share of it"])
def test_the_batch_is_halved_if_memory_runs_out(save: Save, model: type[nn.Module]) -> None:
    result, findings = run(save, model, "8x3x16x16", built=models.Net)  # one of the two sets a limit for its process
    assert result.passed is True
    assert findings == []
    assert "a batch of 8 did not fit into memory, so it was cut to" in result.note


def test_an_overflow_in_half_precision_is_blamed_on_the_dtype(save: Save) -> None:
    weights = {f"{name}.weight": torch.full((16, 16), 200.0).half() for name in ("first", "second")}
    result, [finding] = run(save, gpu_failures.Overflows, "2x16", changes=weights)
    assert result.passed is True
    assert (finding.code, finding.level) == ("RUN102", Level.WARNING)
    assert "a limit of the dtype" in finding.message


def test_a_tensor_on_another_device_is_blamed_on_the_code(save: Save) -> None:
    result, [finding] = run(save, gpu_failures.OnTheCpu, "2x3x16x16")
    assert result.passed is False
    assert finding.evidence["blame"] == "model"


def test_a_model_that_draws_random_numbers_is_not_compared(save: Save) -> None:
    result, findings = run(save, gpu_failures.Draws)
    assert (result.passed, findings) == (True, [])
    assert "draws random numbers" in result.checks[-1]
