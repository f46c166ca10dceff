"""Configs as the transformers library writes them; the library itself is not needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn

from ckptfix.smoke.transformers_inputs import is_transformers_model, transformers_inputs


def pretrained(main: str, **config: Any) -> nn.Module:
    model: Any = nn.Module()
    model.config = SimpleNamespace(**config)
    model.main_input_name = main
    return cast(nn.Module, model)


def texts(model: nn.Module) -> list[list[str]]:
    return [[str(given) for given in guess] for guess in transformers_inputs(model)]


@pytest.mark.parametrize(
    ("model", "first"),
    [
        pytest.param(pretrained("waveform_ids"), None, id="an unknown main input is not guessed"),
        pytest.param(pretrained("input_ids"), None, id="no vocabulary"),
        pytest.param(
            pretrained("input_ids", vocab_size=99, max_position_embeddings=4), ["input_ids=2x4:int:0:99"], id="bert"
        ),
        pytest.param(
            pretrained("input_ids", vocab_size=99, is_encoder_decoder=True),
            ["input_ids=2x8:int:0:99", "decoder_input_ids=2x8:int:0:99"],
            id="t5",
        ),
        pytest.param(pretrained("pixel_values", num_channels=1, image_size=30), ["pixel_values=2x1x30x30"], id="vit"),
        pytest.param(
            pretrained("pixel_values", image_size=[20, 30]), ["pixel_values=2x3x20x30"], id="image of two sides"
        ),
        pytest.param(pretrained("input_values"), ["input_values=2x16000"], id="wav2vec2"),
        pytest.param(
            pretrained(
                "input_features", num_mel_bins=80, max_source_positions=15, vocab_size=9, is_encoder_decoder=True
            ),
            ["input_features=2x80x30", "decoder_input_ids=2x8:int:0:9"],
            id="whisper",
        ),
    ],
)
def test_the_config_says_what_forward_takes(model: nn.Module, first: list[str] | None) -> None:
    assert next(iter(texts(model)), None) == first


@pytest.mark.parametrize(
    ("model", "guess"),
    [
        pytest.param(pretrained("input_ids", vocab_size=9), "input_ids=2x2x8:int:0:9", id="several choices"),
        pytest.param(pretrained("input_ids", vocab_size=9), "input_ids=1x8:int:0:9", id="no padding token"),
        pytest.param(
            pretrained("pixel_values", image_size=8, num_frames=4), "pixel_values=2x4x3x8x8", id="a video of frames"
        ),
        pytest.param(
            pretrained("input_values", num_mel_bins=16, max_length=64), "input_values=2x64x16", id="a spectrogram"
        ),
        pytest.param(pretrained("input_values", audio_channels=1), "input_values=2x1x16000", id="a codec"),
        pytest.param(
            pretrained("input_features", input_feat_per_channel=24, max_source_positions=60),
            "input_features=2x60x24",
            id="speech2text",
        ),
    ],
)
def test_what_few_models_want_is_tried_too(model: nn.Module, guess: str) -> None:
    assert [guess] in texts(model)


def test_two_towers_get_text_and_image() -> None:
    clip = pretrained(
        "input_ids",
        text_config=SimpleNamespace(vocab_size=50, max_position_embeddings=77),
        vision_config=SimpleNamespace(image_size=24, num_channels=3),
    )
    assert ["input_ids=2x8:int:0:50", "pixel_values=2x3x24x24"] in texts(clip)


def test_a_plain_module_with_a_config_is_none_of_theirs() -> None:
    model: Any = nn.Module()
    model.config = SimpleNamespace()
    assert not is_transformers_model(model)
