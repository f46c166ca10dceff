"""Derives inputs for a model from its configuration or its first layers in module order, to be tried one by one.

A derived input that does not run says nothing about the checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from msgspec.structs import replace

from ckptfix.core.lazy import nn
from ckptfix.smoke.inputs import Input, RandomInput

BATCH = 2  # a batch of 1 would hide a wrong reshape
_TOKENS, _SAMPLES = 8, 16000

Guess = tuple[Input, ...]


def is_transformers_model(model: nn.Module) -> bool:
    """Return whether the model has the interface of ``PreTrainedModel``: a config and the name of its main input."""
    return hasattr(model, "config") and isinstance(getattr(model, "main_input_name", None), str)


def transformers_inputs(model: nn.Module) -> list[Guess]:
    """Return the inputs of a transformers model to try, likeliest first: the main input, with decoder tokens, with the
    second input of a two-tower model, then those of few models."""
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
    guesses: list[Guess] = [(first,)]
    if decoder is not None:
        pair = (first, decoder)
        guesses = [pair, *guesses] if getattr(config, "is_encoder_decoder", False) else [*guesses, pair]
    others = ("pixel_values", "input_features") if main == "input_ids" else ("input_ids",)
    guesses += [(first, other) for name in others if (other := known[name]) is not None]
    return [*guesses, *_rare(first, config)]


def _part(config: Any, *names: str) -> Any:
    """Return the first of these parts that a composed config has, otherwise the config itself."""
    return next((part for name in names if (part := getattr(config, name, None)) is not None), config)


def _rare(first: RandomInput, config: Any) -> Iterator[Guess]:
    """Yield several choices of text, a video, and a batch of 1, which a model without a padding token requires."""
    batch, *rest = first.shape
    if first.bounds is not None:
        yield (replace(first, shape=(batch, 2, *rest)),)
    frames = _number(config, "num_frames")
    if first.name == "pixel_values" and frames:
        yield (replace(first, shape=(batch, frames, *rest)),)
    yield (replace(first, shape=(1, *rest)),)


def tokens(name: str, config: Any) -> RandomInput | None:
    """Return a batch of tokens within the model's vocabulary and maximum length; None without a vocabulary."""
    vocabulary = _number(config, "vocab_size", "n_vocab")
    longest = _number(config, "max_position_embeddings", "n_positions", "n_ctx", "max_target_positions")
    if vocabulary is None:
        return None
    return RandomInput((BATCH, min(_TOKENS, longest or _TOKENS)), (0, vocabulary), name)


def _pixels(config: Any) -> RandomInput | None:
    channels = _number(config, "num_channels", "in_channels") or 3
    size = getattr(config, "image_size", None)
    edges = (size, size) if isinstance(size, int) else size
    if not isinstance(edges, list | tuple) or len(edges) != 2:
        edges = (224, 224) if hasattr(config, "num_channels") else None
    return RandomInput((BATCH, channels, *edges), None, "pixel_values") if edges else None


def _waveform(config: Any) -> RandomInput:
    """Return a second of audio, with channels for a codec, or the spectrogram of an audio transformer."""
    bins, frames, channels = (_number(config, name) for name in ("num_mel_bins", "max_length", "audio_channels"))
    shape = (frames, bins) if bins and frames else (channels, _SAMPLES) if channels else (_SAMPLES,)
    return RandomInput((BATCH, *shape), None, "input_values")


def _features(config: Any) -> RandomInput | None:
    """Return log-mel features as for Whisper, as for Speech2Text, or as an image of one channel; None without any."""
    bins, frames = _number(config, "num_mel_bins"), _number(config, "max_source_positions")
    width, image = _number(config, "input_feat_per_channel"), _number(config, "spec_size")
    if bins and frames:
        return RandomInput((BATCH, bins, 2 * frames), None, "input_features")
    if width:
        return RandomInput((BATCH, min(frames or 64, 64), width), None, "input_features")
    return RandomInput((BATCH, 1, 1001, bins), None, "input_features") if bins and image else None


def _number(config: Any, *names: str) -> int | None:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int) and value > 0), None)


def diffusers_inputs(model: nn.Module) -> list[Guess]:
    """Return the inputs of a diffusers denoiser to try, by the names of forward's arguments; empty for other models."""
    config: Any = getattr(model, "config", None)
    channels = _number(config, "in_channels", "in_chans")
    parameters = inspect.signature(model.forward).parameters
    if not (isinstance(config, Mapping) and "timestep" in parameters and channels):
        return []
    main = next(iter(parameters))
    beside = [given for given in _beside(config) if str(given.name).partition(".")[0] in parameters]
    size = getattr(config, "sample_size", None) or _LATENT
    stated = (size, size) if isinstance(size, int) else tuple(size)
    small = tuple(min(edge, _LATENT) for edge in stated)  # large ones take minutes on a CPU
    images = [(BATCH, channels, *edges) for edges in (small, stated, (2, *small))]  # the last is a video
    shapes = dict.fromkeys((*images, (BATCH, _TOKENS, channels)))
    guesses: list[Guess] = []
    for shape in shapes:
        given: list[Input] = [RandomInput(shape, None, main), *beside]
        if "controlnet_cond" in parameters:
            scale = 2 ** (len(config["conditioning_embedding_out_channels"]) - 1)
            image = (BATCH, _number(config, "conditioning_channels") or 3, *(scale * edge for edge in shape[2:]))
            given.append(RandomInput(image, None, "controlnet_cond"))
        guesses.append(tuple(given))
    return guesses


_LATENT = 32


def _beside(config: Any) -> Iterator[RandomInput]:
    """Yield the inputs besides the latents that the configuration of a denoiser describes."""
    yield RandomInput((BATCH,), (0, 1000), "timestep")
    names = ("encoder_hid_dim", "caption_channels", "joint_attention_dim", "text_embed_dim", "text_dim")
    widths = [width for name in (*names, "cross_attention_dim") if (width := getattr(config, name, None))]
    if width := (max(widths[0]) if widths and isinstance(widths[0], list | tuple) else next(iter(widths), None)):
        yield RandomInput((BATCH, _TOKENS, width), None, "encoder_hidden_states")
    if classes := _number(config, "num_class_embeds", "num_embeds_ada_norm"):
        yield RandomInput((BATCH,), (0, classes), "class_labels")
    if pooled := _number(config, "pooled_projection_dim"):
        yield RandomInput((BATCH, pooled), None, "pooled_projections")
    if axes := getattr(config, "axes_dims_rope", None):
        yield RandomInput((_TOKENS, len(axes)), None, "img_ids")
        yield RandomInput((_TOKENS, len(axes)), None, "txt_ids")
    if getattr(config, "guidance_embeds", False):
        yield RandomInput((BATCH,), None, "guidance")
    if getattr(config, "addition_embed_type", None) == "text_time":  # Stable Diffusion XL: a text and six sizes
        text = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        yield RandomInput((BATCH, text), None, "added_cond_kwargs.text_embeds")
        yield RandomInput((BATCH, 6), None, "added_cond_kwargs.time_ids")


def clip_inputs(model: nn.Module) -> list[Guess]:
    """Return an image and a text for a model of both that states its sizes, as open_clip's do; otherwise empty."""
    size: Any = getattr(getattr(model, "visual", None), "image_size", None)
    length, vocabulary = _number(model, "context_length"), _number(model, "vocab_size")
    if size is None or length is None or vocabulary is None or _arity(model) > 2:
        return []
    edges = (size, size) if isinstance(size, int) else tuple(size)
    return [(RandomInput((BATCH, 3, *edges), None, "image"), RandomInput((BATCH, length), (1, vocabulary), "text"))]


_FIRST_LAYERS = 3  # the first in module order may not run first
_MOST_GUESSES = 24
_SIZES: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((64,), (1024,), (16000,), (28,)),
    2: ((64, 64), (224, 224), (32, 32), (28, 28), (84, 84), (256, 256), (299, 299)),
    3: ((8, 32, 32), (16, 112, 112), (32, 32, 32), (64, 64, 64), (16, 224, 224)),
}
_LATENT_SIZES = (1, 4, 8, 16)
_LENGTHS = (8, 4, 1)
_SIZE_NAMES = ("img_size", "image_size", "input_size")
_LENGTH_NAMES = ("max_position_embeddings", "max_seq_len", "max_len", "block_size", "n_positions", "context_length")


def derive_inputs(model: nn.Module) -> list[Guess]:
    """Return the inputs to try, likeliest first; empty if the layers of the model say nothing about its input."""
    stated = transformers_inputs(model) if is_transformers_model(model) else diffusers_inputs(model)
    if stated:
        return stated
    arity = _arity(model)
    guesses: dict[Guess, None] = dict.fromkeys(clip_inputs(model))  # an ordered set
    if type(model).__module__.startswith("detectron2."):
        guesses.setdefault((RandomInput((3, 64, 64), None, "batched_inputs.0.image"),))
    counts_steps = arity == 2 and "length" in list(inspect.signature(model.forward).parameters)[1]
    for shapes in islice(_known_layers(model), _FIRST_LAYERS):
        for shape in shapes:
            if counts_steps and len(shape.shape) == 3:  # the second argument is the length of each sequence
                steps = shape.shape[1]
                guesses.setdefault((shape, RandomInput((BATCH,), (steps, steps + 1))))
            guesses.setdefault((shape,) * arity)
    per_argument = [next(iter(shapes)) for shapes in islice(_known_layers(model), arity)]
    if arity > 1 and len(per_argument) == arity:
        guesses.setdefault(tuple(per_argument))  # one layer for each argument, such as a user and an item embedding
    if stated_by_timm := _timm_input(model):
        guesses.setdefault(stated_by_timm)
    return list(islice(guesses, _MOST_GUESSES))


def _arity(model: nn.Module) -> int:
    """Return the number of positional arguments that ``forward`` requires, at least 1."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # compiled code has no signature
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in signature.parameters.values() if p.kind in kinds and p.default is inspect.Parameter.empty]
    return max(1, len(required))


def _known_layers(model: nn.Module) -> Iterator[list[RandomInput]]:
    for layer in model.modules():
        shapes = [RandomInput(shape, bounds) for shape, bounds in _shapes(layer, model)]
        if shapes:
            yield shapes


def _shapes(layer: nn.Module, model: nn.Module) -> Iterator[tuple[tuple[int, ...], tuple[int, int] | None]]:
    """Yield input shapes for a model that starts with this layer, with the range of integers.

    A lazy layer states a width of 0 until it runs; its loaded weight has the right one."""
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

    match layer:
        case _ConvTransposeNd():
            dims, channels = len(layer.kernel_size), layer.in_channels or layer.weight.shape[0]
            yield from (((BATCH, channels, *(size,) * dims), None) for size in _LATENT_SIZES)
        case _ConvNd():
            dims, channels = len(layer.kernel_size), layer.in_channels or layer.weight.shape[1] * layer.groups
            sizes = (*_declared_sizes(model, dims), *_SIZES[dims])
            yield from (((BATCH, channels, *size), None) for size in sizes)
            if (dims, channels) == (1, 1):
                yield (BATCH, _SAMPLES), None  # a waveform without the channel axis, which the model adds
        case nn.Linear() | nn.Bilinear():
            width = layer.in_features if isinstance(layer, nn.Linear) else layer.in1_features
            yield (BATCH, width or layer.weight.shape[1]), None
            yield (BATCH, 8, width or layer.weight.shape[1]), None
        case nn.Embedding() | nn.EmbeddingBag():
            yield from (((BATCH, length), (0, layer.num_embeddings)) for length in _lengths(model))
            yield (BATCH,), (0, layer.num_embeddings)
        case nn.RNNBase():
            steps = (BATCH, 8) if layer.batch_first else (8, BATCH)
            yield (*steps, layer.input_size), None
            yield (*reversed(steps), layer.input_size), None
        case nn.TransformerEncoderLayer() | nn.TransformerDecoderLayer():
            yield (BATCH, 8, layer.self_attn.embed_dim), None
        case nn.MultiheadAttention():
            yield (BATCH, 8, layer.embed_dim), None
        case _BatchNorm():
            yield (BATCH, layer.num_features), None
            yield from (((BATCH, layer.num_features, *size), None) for dims in (2, 1, 3) for size in _SIZES[dims][:1])
        case nn.LayerNorm():
            yield (BATCH, *layer.normalized_shape), None
            yield (BATCH, 8, *layer.normalized_shape), None


def _declared_sizes(model: nn.Module, dims: int) -> Iterator[tuple[int, ...]]:
    """Yield the image sizes that the model itself states, as vision transformers do."""
    for module in model.modules():
        for name in _SIZE_NAMES:
            size: Any = getattr(module, name, None)
            if isinstance(size, int) and not isinstance(size, bool) and size > 0:
                yield (size,) * dims
            elif (
                isinstance(size, list | tuple) and len(size) >= dims and all(isinstance(n, int) and n > 0 for n in size)
            ):
                yield tuple(size[-dims:])  # timm states (3, 224, 224), channels first


def _timm_input(model: nn.Module) -> Guess:
    """Return an image of the size in timm's configuration; empty for other models. The last resort, as it is large."""
    stated = getattr(model, "pretrained_cfg", None)
    size = stated.get("input_size") if isinstance(stated, Mapping) else None
    if not isinstance(size, list | tuple) or not all(isinstance(n, int) and n > 0 for n in size):
        return ()
    return (RandomInput((BATCH, *size)),)


def _lengths(model: nn.Module) -> Iterator[int]:
    """Yield the numbers of tokens to try, none above the maximum that the model states."""
    owners = (*model.modules(), getattr(model, "config", None))
    stated = [getattr(owner, name, None) for owner in owners for name in _LENGTH_NAMES]
    longest = min((length for length in stated if isinstance(length, int) and length > 0), default=None)
    yield from (length if longest is None else min(length, longest) for length in _LENGTHS)
    if longest is not None and longest <= 4096:
        yield longest
