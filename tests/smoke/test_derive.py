import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from ckptfix.smoke.derive import derive_inputs, is_transformers_model, transformers_inputs
from ckptfix.smoke.inputs import make_arguments


class LeNet(nn.Module):
    """Fits only images of 28 x 28."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 5)
        self.fc = nn.Linear(4 * 24 * 24, 10)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc(self.conv(x).flatten(1))
        return output


class Siamese(LeNet):
    """Wants two images."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:  # type: ignore[override]  # another arity is the point
        return super().forward(left) - super().forward(right)


class Recommender(nn.Module):
    """Wants a user and an item, from vocabularies of different size."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(3, 4)
        self.items = nn.Embedding(50, 4)

    def forward(self, user: Tensor, item: Tensor) -> Any:
        return (self.users(user) * self.items(item)).sum(-1)


class Positions(nn.Module):
    """Takes four tokens at most, and says so."""

    max_seq_len = 4

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 4)
        self.positions = nn.Embedding(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return output


class Patches(nn.Module):
    """A vision transformer's way to state its image size."""

    def __init__(self) -> None:
        super().__init__()
        self.img_size = (20, 30)
        self.proj = nn.Conv2d(3, 4, 10, 10)
        self.fc = nn.Linear(4 * 2 * 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc(self.proj(x).flatten(1))
        return output


class Last(nn.Module):
    """Defines its head before its body."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.body = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(x).mean(dim=(2, 3)))
        return output


def loaded(lazy: nn.Module, other: nn.Module) -> nn.Module:
    """A lazy module that has the tensors of another one, and has not run yet."""
    lazy.load_state_dict(other.state_dict())
    return lazy


def first_that_runs(model: nn.Module) -> str:
    model.eval()
    for guess in derive_inputs(model):
        made = make_arguments(guess, torch.float32, torch.device("cpu"))
        try:
            model(*made.args, **made.kwargs)
        except (RuntimeError, IndexError, TypeError, ValueError, AssertionError):
            continue
        return " ".join(map(str, guess))
    return "none"


@pytest.mark.parametrize(
    ("model", "text"),
    [
        pytest.param(nn.Identity(), "none", id="no layer says anything"),
        pytest.param(nn.Sequential(nn.ReLU(), nn.Linear(5, 2)), "2x5", id="linear"),
        pytest.param(nn.Conv1d(2, 3, 3), "2x2x64", id="conv1d"),
        pytest.param(nn.Conv2d(6, 4, 3, groups=2), "2x6x64x64", id="conv2d, grouped"),
        pytest.param(nn.Conv3d(2, 3, 3), "2x2x8x32x32", id="conv3d"),
        pytest.param(nn.ConvTranspose2d(16, 3, 4), "2x16x1x1", id="a generator starts from a latent"),
        pytest.param(LeNet(), "2x1x28x28", id="a size that is not the first guess"),
        pytest.param(
            nn.Sequential(nn.Conv2d(4, 8, 8, 4), nn.Conv2d(8, 8, 4, 2), nn.Flatten(), nn.Linear(8 * 9 * 9, 2)),
            "2x4x84x84",
            id="the frames of an Atari game",
        ),
        pytest.param(Patches(), "2x3x20x30", id="a size that the model states"),
        pytest.param(Siamese(), "2x1x28x28 2x1x28x28", id="two images"),
        pytest.param(loaded(nn.LazyLinear(2), nn.Linear(5, 2)), "2x5", id="a lazy layer that was loaded"),
        pytest.param(loaded(nn.LazyConv2d(2, 3), nn.Conv2d(6, 2, 3)), "2x6x64x64", id="lazy conv2d"),
        pytest.param(loaded(nn.LazyConvTranspose2d(2, 3), nn.ConvTranspose2d(6, 2, 3)), "2x6x1x1", id="lazy, upwards"),
        pytest.param(nn.Embedding(7, 3), "2x8:int:0:7", id="embedding"),
        pytest.param(Positions(), "2x4:int:0:10", id="tokens no longer than the model states"),
        pytest.param(Recommender(), "2x8:int:0:3 2x8:int:0:3", id="the smallest vocabulary suits both"),
        pytest.param(nn.LSTM(6, 4, batch_first=True), "2x8x6", id="lstm, batch first"),
        pytest.param(nn.GRU(6, 4), "8x2x6", id="gru, time first"),
        pytest.param(nn.TransformerEncoderLayer(8, 2, 16), "2x8x8", id="encoder layer"),
        pytest.param(nn.MultiheadAttention(8, 2), "2x8x8 2x8x8 2x8x8", id="query, key and value"),
        pytest.param(nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 2, 1)), "2x3x64x64", id="a norm comes first"),
        pytest.param(nn.LayerNorm((4, 5)), "2x4x5", id="layer norm"),
        pytest.param(Last(), "2x3x64x64", id="the first layer defined is not the first that runs"),
    ],
)
def test_inputs_follow_from_the_layers(model: nn.Module, text: str) -> None:
    assert first_that_runs(model) == text


def test_inputs_of_transformers_come_first() -> None:
    model: Any = nn.Linear(3, 3)
    model.config = SimpleNamespace(vocab_size=9)
    model.main_input_name = "input_ids"
    assert str(derive_inputs(model)[0][0]) == "input_ids=2x8:int:0:9"
    model.main_input_name = "something_else"
    assert str(derive_inputs(model)[0][0]) == "2x3"


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
def test_inputs_of_few_models_are_tried_last(model: nn.Module, guess: str) -> None:
    assert [guess] in texts(model)


def test_two_towers_get_text_and_image() -> None:
    clip = pretrained(
        "input_ids",
        text_config=SimpleNamespace(vocab_size=50, max_position_embeddings=77),
        vision_config=SimpleNamespace(image_size=24, num_channels=3),
    )
    assert ["input_ids=2x8:int:0:50", "pixel_values=2x3x24x24"] in texts(clip)


def test_noop_a_plain_module_with_a_config() -> None:
    model: Any = nn.Module()
    model.config = SimpleNamespace()
    assert not is_transformers_model(model)


class Waveform(nn.Module):
    """Takes sound as (batch, time), and adds the channel itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 10, 5)

    def forward(self, waveforms: Tensor) -> Any:
        if waveforms.ndim != 2:
            raise ValueError("expected (batch, time)")
        return self.conv(waveforms.unsqueeze(1))


class Sequences(nn.Module):
    """Wants the length of each sequence too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(20, 4)

    def forward(self, input: Tensor, lengths: Tensor) -> Any:
        steps = torch.arange(int(lengths.max())).expand(len(lengths), -1)
        return self.linear(input) * (steps < lengths[:, None])[..., None]


def _denoisers() -> Iterator[Any]:
    """Tiny models of diffusers, each with another kind of input."""
    blocks = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "block_out_channels": (8, 16)}
    layers = {"layers_per_block": 1, "norm_num_groups": 4, "attention_head_dim": 4, "cross_attention_dim": 12}
    ups = {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "sample_size": 16}
    yield pytest.param("UNet2DConditionModel", blocks | layers | ups | {"num_class_embeds": 3}, id="Stable Diffusion")
    sizes = {"addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 80}
    xl = {"addition_embed_type": "text_time", **sizes}
    yield pytest.param("UNet2DConditionModel", blocks | layers | ups | xl, id="Stable Diffusion XL, which takes a dict")
    embedding = {"conditioning_embedding_out_channels": (4, 8)}
    yield pytest.param("ControlNetModel", blocks | layers | embedding, id="ControlNet, which takes an image too")
    heads = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "in_channels": 4}
    flux = {"num_single_layers": 1, "patch_size": 1, "joint_attention_dim": 12, "pooled_projection_dim": 6}
    axes = {"axes_dims_rope": (2, 2, 4), "guidance_embeds": True}
    yield pytest.param("FluxTransformer2DModel", heads | flux | axes, id="FLUX, which takes tokens")
    wan = {"patch_size": (1, 2, 2), "out_channels": 4, "text_dim": 6, "freq_dim": 8, "ffn_dim": 8}
    yield pytest.param("WanTransformer3DModel", heads | wan | {"attention_head_dim": 12}, id="Wan, which takes a video")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "config"), list(_denoisers()))
def test_a_denoiser_of_diffusers_runs(name: str, config: dict[str, Any]):
    import diffusers

    assert _runs(getattr(diffusers, name)(**config))


@pytest.mark.parametrize("model", [Waveform(), Sequences()], ids=lambda model: type(model).__name__)
def test_sound_and_sequences(model: nn.Module):
    assert _runs(model)


def test_an_image_and_a_text():
    class Clip(nn.Module):
        context_length, vocab_size = 7, 30

        def __init__(self) -> None:
            super().__init__()
            self.visual = nn.Conv2d(3, 4, 4)
            self.visual.image_size = 16  # type: ignore[assignment]  # open_clip does the same
            self.text = nn.Embedding(30, 4)

        def forward(self, image: Tensor | None = None, text: Tensor | None = None) -> Any:
            assert image is not None
            assert text is not None
            return self.visual(image), self.text(text)

    assert [str(given) for given in derive_inputs(Clip())[0]] == ["image=2x3x16x16", "text=2x7:int:1:30"]


def _runs(model: nn.Module) -> bool:
    """Whether one of the inputs that were derived fits."""
    for guess in derive_inputs(model.eval()):
        arguments = make_arguments(guess, torch.float32, torch.device("cpu"))
        with torch.no_grad(), contextlib.suppress(Exception):
            model(*arguments.args, **arguments.keywords)
            return True
    return False
