"""Families of architectures by structural facts: how the keys are called, how many blocks there are, how wide they
are. They tell of models that no library builds exactly so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import isqrt

from ckptfix.zoo.drafting.known import Shapes
from ckptfix.zoo.drafting.language import LANGUAGE
from ckptfix.zoo.drafting.likeness import Confidence, Likeness
from ckptfix.zoo.drafting.shapes import classes_of, dashed, depths, find, kernel, matrix

_RESNETS: Mapping[tuple[str, tuple[int, ...]], str] = {
    ("basic", (2, 2, 2, 2)): "resnet18",
    ("basic", (3, 4, 6, 3)): "resnet34",
    ("bottleneck", (3, 4, 6, 3)): "resnet50",
    ("bottleneck", (3, 4, 23, 3)): "resnet101",
    ("bottleneck", (3, 8, 36, 3)): "resnet152",
}
_DENSENETS: Mapping[tuple[int, ...], str] = {
    (6, 12, 24, 16): "densenet121",
    (6, 12, 36, 24): "densenet161",
    (6, 12, 32, 32): "densenet169",
    (6, 12, 48, 32): "densenet201",
}
_VGGS = {8: "vgg11", 10: "vgg13", 13: "vgg16", 16: "vgg19"}
_EFFICIENTNETS = {
    (32, 1280, 16): "b0",
    (32, 1280, 23): "b1",
    (32, 1408, 23): "b2",
    (40, 1536, 26): "b3",
    (48, 1792, 32): "b4",
    (48, 2048, 39): "b5",
    (56, 2304, 45): "b6",
    (64, 2560, 55): "b7",
}
_VITS = {(192, 12): "tiny", (384, 12): "small", (768, 12): "base", (1024, 24): "large", (1280, 32): "huge"}
_SWINS: Mapping[tuple[int, tuple[int, ...]], str] = {
    (96, (2, 2, 6, 2)): "tiny",
    (96, (2, 2, 18, 2)): "small",
    (128, (2, 2, 18, 2)): "base",
    (192, (2, 2, 18, 2)): "large",
}
_CONVNEXTS: Mapping[tuple[int, tuple[int, ...]], str] = {
    (96, (3, 3, 9, 3)): "tiny",
    (96, (3, 3, 27, 3)): "small",
    (128, (3, 3, 27, 3)): "base",
    (192, (3, 3, 27, 3)): "large",
    (256, (3, 3, 27, 3)): "xlarge",
}


def describe_family(shapes: Shapes) -> Likeness | None:
    """The family of a layout; None where no family is known by such names."""
    found = (describe(shapes) for describe in (*VISION, *LANGUAGE))
    return next((each for each in found if each is not None), None) or _by_mark(shapes)


def _guess(
    title: str, evidence: Sequence[str], name: str | None, classes: int | None, library: str = "torchvision"
) -> Likeness:
    """A family of vision models. A name is only a guess: the library's own model would have been told exactly."""
    arguments = {} if classes is None else {"num_classes": classes}
    lines = (*evidence, *((f"{classes} classes",) if classes is not None else ("no head that is known",)))
    if name is None:
        return Likeness(title, Confidence.GUESS, lines)
    lines = (*lines, f"nearest by its blocks: {library}'s {name}, from which names or shapes differ somewhere")
    if library == "timm":
        return Likeness(
            title, Confidence.GUESS, lines, "timm:create_model", {"model_name": name, **arguments}, needs=library
        )
    return Likeness(title, Confidence.GUESS, lines, f"torchvision.models:{name}", arguments, needs=library)


def _resnet(shapes: Shapes) -> Likeness | None:
    blocks = depths(shapes, r"layer(\d)\.(\d+)\.conv1\.weight")
    stem = kernel(shapes, "conv1.weight") or kernel(shapes, "conv1.0.weight")
    if not blocks or stem is None:
        return None
    kind = "bottleneck" if "layer1.0.conv3.weight" in shapes else "basic"
    inner = kernel(shapes, "layer1.0.conv2.weight") or stem
    groups = inner[0] // max(inner[1], 1)
    evidence = [f"a stem of {stem[2]}x{stem[3]} on {stem[1]} channels, {dashed(blocks)} {kind} blocks"]
    if kind == "bottleneck" and groups > 1:
        evidence.append(f"convolutions in {groups} groups of {inner[1]}: a ResNeXt")
    return _guess(f"ResNet {dashed(blocks)}", evidence, _RESNETS.get((kind, blocks)), classes_of(shapes, "fc"))


def _vgg(shapes: Shapes) -> Likeness | None:
    layers = [shape for key, shape in shapes.items() if re.fullmatch(r"features\.\d+\.weight", key)]
    convolutions = [shape for shape in layers if len(shape) == 4]
    if len(convolutions) < 5 or any(key.startswith("features.") and key.count(".") > 2 for key in shapes):
        return None
    has_norm = any(key.startswith("features.") and key.endswith("running_mean") for key in shapes)
    name = _VGGS.get(len(convolutions))
    name = f"{name}_bn" if name and has_norm else name
    evidence = [f"{len(convolutions)} plain convolutions{' with batch norm' if has_norm else ''}"]
    return _guess("VGG", evidence, name, classes_of(shapes, "classifier.6", "classifier.4", "classifier"))


def _densenet(shapes: Shapes) -> Likeness | None:
    blocks = depths(shapes, r"features\.denseblock(\d)\.denselayer(\d+)\.conv1\.weight")
    layer = kernel(shapes, "features.denseblock1.denselayer1.conv2.weight")
    if not blocks or layer is None:
        return None
    evidence = [f"dense blocks of {dashed(blocks)} layers that grow by {layer[0]}"]
    return _guess(f"DenseNet {dashed(blocks)}", evidence, _DENSENETS.get(blocks), classes_of(shapes, "classifier"))


def _efficientnet_pytorch(shapes: Shapes) -> Likeness | None:
    stem, head = kernel(shapes, "_conv_stem.weight"), kernel(shapes, "_conv_head.weight")
    if stem is None or head is None:
        return None
    blocks = len(find(shapes, r"_blocks\.(\d+)\._depthwise_conv\.weight"))
    name = _EFFICIENTNETS.get((stem[0], head[0], blocks))
    classes = classes_of(shapes, "_fc")
    evidence = (f"names of the package efficientnet_pytorch; {blocks} blocks, stem {stem[0]}, head {head[0]}",)
    if name is None:
        return Likeness("EfficientNet", Confidence.GUESS, evidence)
    arguments = {"model_name": f"efficientnet-{name}", **({} if classes is None else {"num_classes": classes})}
    factory = "efficientnet_pytorch:EfficientNet.from_name"
    return Likeness(
        f"efficientnet-{name}", Confidence.LIKELY, evidence, factory, arguments, needs="efficientnet_pytorch"
    )


def _vit(shapes: Shapes) -> Likeness | None:
    patch, tokens = kernel(shapes, "patch_embed.proj.weight"), shapes.get("pos_embed")
    blocks = len(find(shapes, r"blocks\.(\d+)\.attn\.qkv\.weight"))
    if patch is None or not blocks:
        return None
    width, size = patch[0], patch[2]
    evidence = [f"{blocks} blocks of width {width}, patches of {size}x{size} on {patch[1]} channels"]
    name, arguments = _VITS.get((width, blocks)), {}
    if tokens is not None and len(tokens) == 3:
        extra = sum(key in shapes for key in ("cls_token", "dist_token"))
        side = isqrt(max(tokens[1] - extra, 0))
        if side * side == tokens[1] - extra:
            evidence.append(f"{tokens[1]} positions: images of {side * size}x{side * size}")
            arguments = {} if side * size == 224 else {"img_size": side * size}
    if any(key.startswith("decoder_blocks.") for key in shapes):
        evidence.append("decoder_blocks: a masked autoencoder as it is pretrained")
    classes = classes_of(shapes, "head")
    model = f"vit_{name}_patch{size}_224" if name else None
    found = _guess(f"ViT of {blocks} blocks", evidence, model, classes if classes is not None else 0, "timm")
    return Likeness(**{**vars(found), "arguments": {**found.arguments, **arguments}})


def _swin(shapes: Shapes) -> Likeness | None:
    patch = kernel(shapes, "patch_embed.proj.weight")
    blocks = depths(shapes, r"layers\.(\d)\.blocks\.(\d+)\.attn\.qkv\.weight")
    table = matrix(shapes, "layers.0.blocks.0.attn.relative_position_bias_table")
    if patch is None or not blocks or table is None:
        return None
    window = (isqrt(table[0]) + 1) // 2
    name = _SWINS.get((patch[0], blocks))
    evidence = [f"{dashed(blocks)} blocks, width {patch[0]}, windows of {window}x{window}"]
    if "layers.0.downsample.norm.weight" in shapes:
        evidence.append(
            "downsampling at the end of each stage, as in Microsoft's code; timm's names begin a stage with it"
        )
    size = {7: 224, 12: 384}.get(window)
    model = f"swin_{name}_patch4_window{window}_{size}" if name and size else None
    return _guess(f"Swin {dashed(blocks)}", evidence, model, classes_of(shapes, "head", "head.fc"), "timm")


def _convnext(shapes: Shapes) -> Likeness | None:
    for form, stem, pattern, head in (
        ("timm", "stem.0.weight", r"stages\.(\d)\.blocks\.(\d+)\.conv_dw\.weight", "head.fc"),
        ("the authors", "downsample_layers.0.0.weight", r"stages\.(\d)\.(\d+)\.dwconv\.weight", "head"),
        ("torchvision", "features.0.0.weight", r"features\.([1357])\.(\d+)\.block\.0\.weight", "classifier.2"),
    ):
        blocks = depths(shapes, pattern)
        first = kernel(shapes, stem)
        if blocks and first is not None:
            name = _CONVNEXTS.get((first[0], blocks))
            evidence = [f"names as in the code of {form}; {dashed(blocks)} blocks, width {first[0]}"]
            is_second = any(".grn." in key for key in shapes)
            model = f"convnext{'v2' if is_second else ''}_{name}" if name else None
            return _guess(f"ConvNeXt {dashed(blocks)}", evidence, model, classes_of(shapes, head), "timm")
    return None


VISION: tuple[Callable[[Shapes], Likeness | None], ...] = (
    _resnet,
    _vgg,
    _densenet,
    _efficientnet_pytorch,
    _swin,
    _vit,
    _convnext,
)

_MARKS = (
    (
        r"(?:.*\.)?lora_[AB]\.",
        "LoRA adapter",
        "low-rank matrices alone: they belong to a base model, named in adapter_config.json",
    ),
    (
        r"model\.diffusion_model\.input_blocks\.",
        "Stable Diffusion, as a whole",
        "UNet, VAE and text encoder in one file",
    ),
    (r"down_blocks\.\d+\.(?:resnets|attentions)\.", "UNet or VAE of diffusers", "the class stands in config.json"),
    (r"visual\.transformer\.resblocks\.", "CLIP, as OpenAI and open_clip name it", "open_clip builds it"),
    (r"text_model\.encoder\.layers\.", "CLIP or SigLIP of transformers", ""),
    (r"(?:.*\.)?encoder\.layers\.\d+\.self_attn\.k_proj\.", "encoder and decoder as in fairseq, BART or Whisper", ""),
    (r"(?:.*\.)?feature_extractor\.conv_layers\.", "wav2vec 2.0 or HuBERT", ""),
    (
        r"(?:backbone\.)?bottom_up\.(?:res|stem)|backbone\.bottom_up\.",
        "detector of detectron2",
        "built from its configuration",
    ),
    (
        r"(?:bbox|mask|rpn|roi|decode|cls|keypoint)_head\.",
        "model of the OpenMMLab family",
        "built from its configuration, which is often under meta.config",
    ),
    (
        r"rpn\.head\.|backbone\.body\.",
        "detector of torchvision",
        "such as torchvision.models.detection:fasterrcnn_resnet50_fpn, with weights_backbone = None",
    ),
    (r"segmentation_head\.0\.", "segmentation_models_pytorch", "its encoder and decoder are named when it is built"),
    (r"(?:.*\.)?(?:RRDB_trunk|body)\.\d+\.(?:RDB|rdb)1\.", "ESRGAN (RRDBNet)", ""),
    (r"(?:model\.)?\d+\.(?:cv1|conv)\.(?:conv\.)?weight", "YOLO of ultralytics", "built from its .yaml"),
    (r"(?:.*\.)?mixer\.(?:A_log|in_proj)", "Mamba", ""),
    (
        r"(?:.*\.)?embeddings\.patch_embeddings\.projection\.weight|(?:.*\.)?embedder\.embedder\.convolution",
        "vision model of transformers",
        "ViT, DeiT, Swin, ResNet and others; config.json says which",
    ),
    (r"(?:.*\.)?embeddings_project\.", "ELECTRA of transformers", ""),
    (r"(?:.*\.)?albert_layer_groups\.", "ALBERT of transformers", ""),
    (r"Conv2d_1a_3x3\.conv\.weight", "Inception v3", ""),
    (r"(?:features\.)?conv0\.weight", "DenseNet-like", ""),
)


def _by_mark(shapes: Shapes) -> Likeness | None:
    """What one telling name gives away."""
    for pattern, title, remark in _MARKS:
        key = next((key for key in shapes if re.match(pattern, key)), None)
        if key is not None:
            return Likeness(title, Confidence.GUESS, (f"by the name {key}{f'; {remark}' if remark else ''}",))
    return None
