"""Models in several sizes, and pairs of them that one recipe makes fit."""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn

from ckptfix.rules.fit103_shape_mismatch import shape_mismatch
from tests.rules.proposals import propose

NARROW = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


def vit(img_size: Any = 224, name: str = "vit_tiny_patch16_224", **given: Any) -> Any:
    import timm

    return timm.create_model(name, **{"depth": 1, "num_classes": 10, "embed_dim": 24, "img_size": img_size, **given})


def swin(**given: Any) -> Any:
    import timm

    small = {"depths": (2, 2), "embed_dim": 24, "num_heads": (2, 2), "num_classes": 10}
    return timm.create_model("swin_tiny_patch4_window7_224", **small, **given)


def torchvision_vit(img_size: int) -> Any:
    from torchvision.models import VisionTransformer

    return VisionTransformer(img_size, 16, 1, 2, 32, 64)


def transformers_vit(img_size: int) -> Any:
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(**NARROW, image_size=img_size))


def open_clip(img_size: int, length: int = 77) -> Any:
    from open_clip import CLIP

    vision = {"image_size": img_size, "layers": 1, "width": 64, "patch_size": 32}
    return CLIP(32, vision, {"context_length": length, "vocab_size": 99, "width": 32, "heads": 2, "layers": 1})


def tiny_vit(size: int) -> Any:
    import timm

    windows = (7 * size // 224,) * 4
    sizes = {"embed_dims": (8, 16, 16, 32), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 2), "num_classes": 5}
    return timm.create_model("tiny_vit_5m_224", window_sizes=windows, **sizes)


def yolos(size: int) -> Any:
    from transformers import YolosConfig, YolosModel

    return YolosModel(
        YolosConfig(**{**NARROW, "num_hidden_layers": 3}, image_size=[size, size], use_mid_position_embeddings=True)
    )


def qwen_vision(patch: int) -> Any:
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    sizes = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2}
    return Qwen2VisionTransformerPretrainedModel(Qwen2VLVisionConfig(**sizes, patch_size=patch))


def nest(size: int) -> Any:
    from timm.models.nest import Nest

    return Nest(num_levels=1, img_size=size, embed_dims=(8,), num_heads=(1,), depths=(1,), num_classes=2)


def dino_with_registers(size: int) -> Any:
    from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

    return Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**NARROW, image_size=size, patch_size=16))


def clip_resnet(size: int) -> Any:
    import timm

    return timm.create_model("resnet50_clip", num_classes=10, img_size=size)


def beit(size: int, name: str = "Beit") -> Any:
    import transformers

    config = getattr(transformers, f"{name}Config")(**NARROW, image_size=size, use_relative_position_bias=True)
    return getattr(transformers, f"{name}Model")(config)


def transformers_model(name: str, **given: Any) -> Any:
    import transformers

    return getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**given))


def siglip2(patch: int) -> Any:
    from transformers import Siglip2VisionConfig, Siglip2VisionModel

    return Siglip2VisionModel(Siglip2VisionConfig(**NARROW, patch_size=patch, num_patches=16))


def gpt2(vocab: int, positions: int = 64) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = {"bos_token_id": 1, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=vocab, n_positions=positions, **ids))


def bert(vocab: int) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**NARROW, vocab_size=vocab))


def whisper(vocab: int) -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in SIZES.items()}
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1)
    return WhisperForConditionalGeneration(WhisperConfig(d_model=32, vocab_size=vocab, **sides, **ids))


SIZES = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}


Pair = Callable[[], tuple[nn.Module, nn.Module]]


KNOWN: dict[str, tuple[Pair, str, str]] = {
    "timm": (lambda: (vit(), vit(384)), "pos_embed=timm", "14x14 in the file (and 1 token), of 24x24 in the model"),
    "timm, two tokens": (
        lambda: (vit(name="deit_tiny_distilled_patch16_224"), vit(384, name="deit_tiny_distilled_patch16_224")),
        "pos_embed=timm",
        "14x14 in the file (and 2 tokens), of 24x24",
    ),
    "timm, registers": (lambda: (vit(reg_tokens=4), vit(384, reg_tokens=4)), "pos_embed=timm", "(and 5 tokens)"),
    "timm, no token": (
        lambda: (vit(class_token=False, global_pool="avg"), vit(384, class_token=False, global_pool="avg")),
        "pos_embed=timm",
        "a grid of 14x14 in the file, of 24x24 in the model",
    ),
    "torchvision": (lambda: (torchvision_vit(224), torchvision_vit(384)), "pos_embed=torchvision", "24x24"),
    "transformers": (lambda: (transformers_vit(224), transformers_vit(384)), "pos_embed=plain", "24x24"),
    "DINOv2 with registers": (
        lambda: (dino_with_registers(64), dino_with_registers(96)),
        "pos_embed=timm",
        "a grid of 4x4 in the file (and 1 token), of 6x6 in the model",
    ),
    "BEiT in transformers": (
        lambda: (beit(64), beit(96)),
        "window_bias=bilinear",
        "windows of 4x4 in the file and of 6x6 in the model",
    ),
    "Data2Vec": (
        lambda: (beit(64, "Data2VecVision"), beit(96, "Data2VecVision")),
        "window_bias=bilinear",
        "windows of 4x4 in the file and of 6x6 in the model",
    ),
    "Swin in transformers": (
        lambda: tuple(
            transformers_model("Swin", embed_dim=8, depths=[1], num_heads=[2], window_size=side) for side in (7, 8)
        ),
        "window_bias=swin",
        "windows of 7x7 in the file and of 8x8 in the model; transformers has no function to resize them",
    ),
    "TimeSformer": (
        lambda: tuple(transformers_model("Timesformer", **NARROW, image_size=size) for size in (64, 96)),
        "pos_embed=nearest",
        "4x4 in the file (and 1 token), of 6x6 in the model",
    ),
    "TimeSformer with more frames": (
        lambda: tuple(transformers_model("Timesformer", **NARROW, image_size=32, num_frames=size) for size in (8, 12)),
        "pos_embed=nearest",
        "8 positions in the file and 12 in the model",
    ),
    "Swin v2 with absolute positions": (
        lambda: tuple(
            transformers_model(
                "Swinv2", embed_dim=8, depths=[1], num_heads=[2], use_absolute_embeddings=True, image_size=size
            )
            for size in (32, 64)
        ),
        "pos_embed=plain",
        "a grid of 8x8 in the file (and 1 row that no token uses), of 16x16 in the model",
    ),
    "ViLT": (
        lambda: tuple(transformers_model("Vilt", **NARROW, image_size=size, vocab_size=9) for size in (64, 96)),
        "pos_embed=vilt",
        "2x2 in the file (and 1 token), of 3x3 in the model",
    ),
    "AIMv2": (
        lambda: tuple(transformers_model("Aimv2Vision", **NARROW, image_size=size) for size in (56, 84)),
        "pos_embed=plain",
        "4x4 in the file, of 6x6 in the model; transformers has no function to resize them",
    ),
    "CLIP's ResNet in timm": (
        lambda: (clip_resnet(64), clip_resnet(96)),
        "pos_embed=timm",
        "2x2 in the file (and 1 token), of 3x3 in the model",
    ),
    "YOLOS": (
        lambda: (yolos(64), yolos(96)),
        "pos_embed=yolos",
        "a grid of 4x4 in the file (and 1 token), of 6x6 in the model",
    ),
    "NesT": (
        lambda: (nest(64), nest(128)),
        "pos_embed=plain",
        "a grid of 16x16 in the file, of 32x32 in the model",
    ),
    "Swin in timm": (
        lambda: (swin(), swin(img_size=384, window_size=12)),
        "window_bias=beit",
        "windows of 7x7 in the file and of 12x12 in the model",
    ),
    "patches": (
        lambda: (vit(), vit(448, patch_size=32)),
        "patch_embed=timm",
        "patches of 16x16 in the file and of 32x32 in the model",
    ),
    "patches of videos": (
        lambda: (qwen_vision(14), qwen_vision(16)),
        "patch_embed=timm",
        "patches of 14x14 in the file and of 16x16 in the model",
    ),
    "patches as a linear layer": (
        lambda: (siglip2(16), siglip2(14)),
        "patch_embed=timm",
        "patches of 16x16 in the file and of 14x14 in the model",
    ),
    "TinyViT": (
        lambda: (tiny_vit(224), tiny_vit(384)),
        "window_bias=levit",
        "distances in a window of 7x7 in the file and of 12x12 in the model",
    ),
    "channels": (lambda: (vit(), vit(in_chans=1)), "in_chans=timm", "3 input channels in the file and 1 in the model"),
    "more words": (lambda: (gpt2(100), gpt2(104)), "vocab=pad:mean", "a vocabulary of 100 in the file and of 104"),
    "fewer words": (lambda: (bert(100), bert(96)), "vocab=cut", "a vocabulary of 100 in the file and of 96"),
    "Whisper": (lambda: (whisper(100), whisper(101)), "vocab=pad:mean", "a vocabulary of 100 in the file and of 101"),
    "shorter texts": (
        lambda: (gpt2(99), gpt2(99, 32)),
        "pos_embed=cut",
        "64 positions in the file and 32 in the model",
    ),
    "longer texts": (lambda: (gpt2(99), gpt2(99, 96)), "pos_embed=linear", "64 positions in the file and 96"),
}


@cache
def pair(name: str) -> tuple[nn.Module, nn.Module]:
    return KNOWN[name][0]()


# Recognised only by the classes of the model.
BY_CLASS = {
    "Swin in timm",
    "Swin in transformers",
    "BEiT in transformers",
    "Data2Vec",
    "TimeSformer",
    "ViLT",
    "AIMv2",
    "Swin v2 with absolute positions",
}


def offered(file: nn.Module, model: nn.Module) -> list[object]:
    found = propose(shape_mismatch, file.state_dict(), model)
    return [value for f in found for r in f.remedies for name, value in r.options if name == "adapt"]
