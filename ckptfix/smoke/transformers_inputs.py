"""Inputs for models of the transformers library, built from their config; the library itself is never imported.

``main_input_name`` says what ``forward`` wants first
(https://huggingface.co/docs/transformers/main_classes/model#transformers.PreTrainedModel).
"""

from __future__ import annotations

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
    model takes.
    """
    config: Any = model.config
    text: Any = getattr(config, "text_config", None) or config
    vision: Any = getattr(config, "vision_config", None) or config
    main = str(model.main_input_name)
    known = {
        "input_ids": tokens("input_ids", text),
        "pixel_values": _pixels(vision),
        "input_values": RandomInput((_BATCH, _SAMPLES), None, "input_values"),
        "input_features": _features(config),
    }
    first = known.get(main)
    if first is None:
        return []
    decoder = tokens("decoder_input_ids", getattr(config, "decoder", None) or text)
    guesses: list[tuple[Input, ...]] = [(first,)]
    if decoder is not None:
        pair = (first, decoder)
        guesses = [pair, *guesses] if getattr(config, "is_encoder_decoder", False) else [*guesses, pair]
    other = known["pixel_values"] if main == "input_ids" else known["input_ids"]
    if other is not None:
        guesses.append((first, other))
    return guesses


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


def _features(config: Any) -> RandomInput | None:
    """Log-mel features as Whisper wants them: its first convolution halves the frames."""
    bins, frames = _number(config, "num_mel_bins"), _number(config, "max_source_positions")
    return RandomInput((_BATCH, bins, 2 * frames), None, "input_features") if bins and frames else None


def _number(config: Any, *names: str) -> int | None:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int) and value > 0), None)
