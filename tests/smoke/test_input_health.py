from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptfix.errors import UsageError
from ckptfix.smoke.exam import Job, examine
from ckptfix.smoke.input_health import ScaleCheck, odd_channels, refuse_non_finite
from tests.smoke import models
from tests.smoke.conftest import Save

NAN, INF = torch.nan, torch.inf


def image(channel: float | None = None) -> Tensor:
    """Two images of three channels from 0 to 1; ``channel`` fills the second."""
    made = torch.linspace(0, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)
    if channel is not None:
        made[:, 1] = channel
    return made


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(image(), id="finite"),
        pytest.param(torch.tensor([0.0, -INF, 0.0]), id="a mask"),
        pytest.param(torch.arange(3), id="integers"),
        pytest.param(torch.empty(0), id="nothing"),
    ],
)
def test_an_input_in_order_is_taken(given: Tensor) -> None:
    refuse_non_finite("x.pt", given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param(torch.tensor([1.0, NAN]), "holds NaN; give", id="NaN"),
        pytest.param(image(NAN), "holds NaN in all of channel 1, as scaling by 0/0 makes it; give", id="0/0"),
        pytest.param(image() * NAN, "holds NaN; give", id="every channel"),
        pytest.param(torch.tensor([1.0, INF]), "infinite values", id="Inf"),
        pytest.param(torch.tensor([1.0, -INF]), "infinite values", id="-Inf among other values is no mask"),
    ],
)
def test_an_input_that_is_not_finite_is_refused(given: Tensor, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        refuse_non_finite("x.pt", given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param(image(), [], id="all vary"),
        pytest.param(image() * 0, [], id="all are constant: a blank image"),
        pytest.param(torch.ones(2, 3, 1), [], id="one value for each channel"),
        pytest.param(torch.ones(2, 3), [], id="no channels"),
        pytest.param(torch.zeros(2, 3, 4, dtype=torch.int64), [], id="integers"),
        pytest.param(
            image(0.0), ["x: channel 1 holds one and the same value throughout, while others vary"], id="constant"
        ),
    ],
)
def test_a_channel_that_never_varies_is_told(given: Tensor, said: list[str]) -> None:
    assert odd_channels("x", given) == said


def trained_on(batch: Tensor) -> nn.Module:
    """A model whose statistics saw this batch."""
    torch.manual_seed(0)
    model = models.Net().train()
    model.bn.momentum = 1.0
    with torch.no_grad():
        model(batch)
    return model.eval()


def said_of(model: nn.Module, given: Tensor) -> str:
    with ScaleCheck(model, given) as check, torch.no_grad():
        model(given)
    assert not any(module._forward_pre_hooks for module in model.modules())
    return check.warning


@pytest.mark.parametrize(
    ("model", "given"),
    [
        pytest.param(trained_on(image()), image(), id="as in training"),
        pytest.param(trained_on(image()), image() * 2 - 1, id="another normalisation"),
        pytest.param(trained_on(image() * 255), image() * 255, id="trained on 0 … 255"),
        pytest.param(models.Net().eval(), image() * 255, id="statistics that never moved say nothing"),
        pytest.param(nn.Conv2d(3, 2, 1), image() * 255, id="no statistics"),
    ],
)
def test_a_scale_as_in_training_needs_no_words(model: nn.Module, given: Tensor) -> None:
    assert said_of(model, given) == ""


@pytest.mark.parametrize(
    ("seen", "given", "said"),
    [
        pytest.param(image(), image() * 255, "has to be divided by 255", id="0 … 255 where 0 … 1 was seen"),
        pytest.param(image() * 255, image(), "has to be multiplied by 255", id="0 … 1 where 0 … 255 was seen"),
        pytest.param(image(), image() * -1e4, "times as large as", id="another scale altogether"),
    ],
)
def test_another_scale_is_told(seen: Tensor, given: Tensor, said: str) -> None:
    warning = said_of(trained_on(seen), given)
    assert said in warning
    assert "bn (BatchNorm2d)" in warning


def test_a_given_image_of_bytes_is_told_and_passes(save: Save, tmp_path: Any) -> None:
    import numpy as np

    np.save(tmp_path / "x.npy", (image() * 255).to(torch.uint8).numpy())
    outcome = examine(
        Job(save(trained_on(image())), "tests.smoke.models:Net", inputs=(str(tmp_path / "x.npy"),), device="cpu")
    )
    assert outcome.is_good
    [warning] = outcome.warnings
    assert "0 … 255" in warning
