"""Inputs for models of the transformers library, built from their config; the library itself is never imported.

``main_input_name`` says what ``forward`` wants first
(https://huggingface.co/docs/transformers/main_classes/model#transformers.PreTrainedModel).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptfix.smoke.inputs import Input, RandomInput

if TYPE_CHECKING:
    from torch import nn

_BATCH, _TOKENS, _SAMPLES = 2, 8, 16000


def is_transformers_model(model: nn.Module) -> bool:
    """Whether the model speaks the protocol of ``PreTrainedModel``: a config and the name of its main input."""
    return hasattr(model, "config") and isinstance(getattr(model, "main_input_name", None), str)


def transformers_inputs(model: nn.Module) -> list[tuple[Input, ...]]:
    """The inputs worth trying, likeliest first: the main input alone, with decoder tokens, with all that a two-tower
    model takes; then those that few models want.
    """
    config: Any = model.config
    text = _part(config, "text_config", "decoder")
    known = {
        "input_ids": tokens("input_ids", text),
        "pixel_values": _pixels(_part(config, "vision_config", "encoder")),
        "input_values": _waveform(config),
        "input_features": _features(_part(config, "audio_config", "encoder")),
    }
    main = str(model.main_input_name)
    first = known.get(main)
    if first is None:
        return []
    decoder = tokens("decoder_input_ids", getattr(config, "decoder", None) or text)
    guesses: list[tuple[Input, ...]] = [(first,)]
    if decoder is not None:
        pair = (first, decoder)
        guesses = [pair, *guesses] if getattr(config, "is_encoder_decoder", False) else [*guesses, pair]
    others = ("pixel_values", "input_features") if main == "input_ids" else ("input_ids",)
    guesses += [(first, other) for name in others if (other := known[name]) is not None]
    return [*guesses, *_rare(first, config)]


def _part(config: Any, *names: str) -> Any:
    """The first part of a composed config that is there, else the config itself."""
    return next((part for name in names if (part := getattr(config, name, None)) is not None), config)


def _rare(first: RandomInput, config: Any) -> Iterator[tuple[Input, ...]]:
    """Several choices of text, a video of frames, and a batch of one, which a model without a padding token insists
    on.
    """
    batch, *rest = first.shape
    if first.bounds is not None:
        yield (replace(first, shape=(batch, 2, *rest)),)
    frames = _number(config, "num_frames")
    if first.name == "pixel_values" and frames:
        yield (replace(first, shape=(batch, frames, *rest)),)
    yield (replace(first, shape=(1, *rest)),)


def tokens(name: str, config: Any) -> RandomInput | None:
    """A batch of tokens below the vocabulary's size and no longer than the model's positions."""
    vocabulary = _number(config, "vocab_size", "n_vocab")
    longest = _number(config, "max_position_embeddings", "n_positions", "n_ctx", "max_target_positions")
    if vocabulary is None:
        return None
    return RandomInput((_BATCH, min(_TOKENS, longest or _TOKENS)), (0, vocabulary), name)


def _pixels(config: Any) -> RandomInput | None:
    channels = _number(config, "num_channels", "in_channels") or 3
    size = getattr(config, "image_size", None)
    if isinstance(size, int):
        return RandomInput((_BATCH, channels, size, size), None, "pixel_values")
    if isinstance(size, list | tuple) and len(size) == 2:
        return RandomInput((_BATCH, channels, *size), None, "pixel_values")
    return RandomInput((_BATCH, channels, 224, 224), None, "pixel_values") if hasattr(config, "num_channels") else None


def _waveform(config: Any) -> RandomInput:
    """A second of sound; with its channels for a codec, or as the spectrogram of an audio transformer."""
    bins, frames, channels = (_number(config, name) for name in ("num_mel_bins", "max_length", "audio_channels"))
    shape = (frames, bins) if bins and frames else (channels, _SAMPLES) if channels else (_SAMPLES,)
    return RandomInput((_BATCH, *shape), None, "input_values")


def _features(config: Any) -> RandomInput | None:
    """Log-mel features: as Whisper wants them, whose first convolution halves the frames, as Speech2Text does, or as an
    image of one channel.
    """
    bins, frames = _number(config, "num_mel_bins"), _number(config, "max_source_positions")
    width, image = _number(config, "input_feat_per_channel"), _number(config, "spec_size")
    if bins and frames:
        return RandomInput((_BATCH, bins, 2 * frames), None, "input_features")
    if width:
        return RandomInput((_BATCH, min(frames or 64, 64), width), None, "input_features")
    return RandomInput((_BATCH, 1, 1001, bins), None, "input_features") if bins and image else None


def _number(config: Any, *names: str) -> int | None:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int) and value > 0), None)
