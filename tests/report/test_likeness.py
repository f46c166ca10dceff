"""The model that a file resembles, in one line and with the command for the next step."""

from functools import partial

import pytest

from ckptfix.core.likeness import Fit, Likeness
from ckptfix.report.advice import Presentation
from ckptfix.report.likeness import likeness_lines, likeness_text

NAMES = ("timm/vit_small_patch16_224",)


def like(**facts):
    return Likeness(**{"names": NAMES, "fit": Fit.EXACT, "versions": {"timm": "1"}, **facts})


@pytest.mark.parametrize(
    ("likeness", "text"),
    [
        (like(), "timm vit_small_patch16_224"),
        (
            like(sizes={"num_classes": 10}, prefix="module."),
            "timm vit_small_patch16_224, 10 classes, under `module.`",
        ),
        (like(sizes={"num_classes": 1, "in_chans": 1}), "timm vit_small_patch16_224, 1 class, 1 input channel"),
        (
            like(sizes={"img_size": 384, "vocab_size": 9}),
            "timm vit_small_patch16_224, images of 384 x 384, a vocabulary of 9",
        ),
        (
            like(names=("timm/resnet50", "torchvision/resnet50")),
            "timm resnet50 (also torchvision resnet50)",
        ),
        (
            like(names=("timm/a", "timm/b", "timm/c", "timm/d")),
            "timm a (one of 4 with this structure: timm b, timm c …)",
        ),
        (like(fit=Fit.HEADLESS, missing=("head.weight",)), "timm vit_small_patch16_224 without its head"),
        (
            like(fit=Fit.OTHER_HEAD, missing=("head.weight",), added=("head.0.weight", "head.0.bias", "head.2.weight")),
            "timm vit_small_patch16_224 with `head.0`, `head.2` instead of `head`",
        ),
        (
            like(fit=Fit.OTHER_HEAD, added=("head2.weight", "head2.bias"), sizes={"num_classes": 7}),
            "timm vit_small_patch16_224 with `head2` added, 7 classes",
        ),
        (like(fit=Fit.OTHER_HEAD, differing=("head.weight",)), "timm vit_small_patch16_224 with another `head`"),
        (
            like(fit=Fit.HEADLESS, missing=("fc.weight",), renamed={"0": "conv1", "1": "bn1", "4": "a", "5": "b"}),
            "timm vit_small_patch16_224 without its head, with other names (`0` for `conv1`, `1` for `bn1`, "
            "`4` for `a`, …)",
        ),
        (
            like(fit=Fit.PIECE, renamed={"": "features"}, missing=("fc.weight",)),
            "timm vit_small_patch16_224, only its `features`",
        ),
        (
            like(fit=Fit.PART, prefix="a.", outside=1, others=(like(fit=Fit.PART, prefix="b.", outside=1),)),
            "timm vit_small_patch16_224, under `a.`; and timm vit_small_patch16_224, under `b.`; "
            "1 key of the file is outside them",
        ),
        (
            like(fit=Fit.PART, prefix="encoder.", outside=2, missing=("head.weight",)),
            "timm vit_small_patch16_224 without its head, under `encoder.`; 2 keys of the file are outside it",
        ),
        (
            like(fit=Fit.NEAR, missing=("layer4.0.a", "layer4.1.b", "fc.w"), tensors=9, differing=("x.w",)),
            "no known model; the nearest is timm vit_small_patch16_224: 3 of its 9 keys missing (`layer4`, `fc`), "
            "1 key with a different shape (`x`)",
        ),
        (
            like(fit=Fit.NEAR, added=("blocks.0.se.w", "blocks.1.se.w"), prefix="net."),
            "no known model; the nearest is timm vit_small_patch16_224: under `net.`, 2 keys that it lacks "
            "(`blocks.0`, `blocks.1`)",
        ),
    ],
)
def test_the_words(likeness, text):
    assert likeness_text(likeness) == text


def lines(likeness, **choices):
    return [
        "".join(str(getattr(piece, "text", piece)) for piece in line)
        for line in likeness_lines(likeness, partial(Presentation().command, "check", "my file.pth"), choices)
    ]


@pytest.mark.parametrize("is_there", [True, False], ids=["with timm", "without it"])
def test_the_commands_keep_the_options_and_name_the_target(is_there, monkeypatch):
    monkeypatch.setattr("ckptfix.report.likeness._is_installed", lambda library: is_there)
    found = lines(like(sizes={"num_classes": 10}), values=False)
    known, model = "'known:timm/vit_small_patch16_224[num_classes=10]'", "'timm:vit_small_patch16_224[num_classes=10]'"
    assert (
        found[1:]
        == [
            f"  compare: ckptfix check 'my file.pth' --like {known} --no-values",
            f"       or: ckptfix check 'my file.pth' --model {model} --no-values",
        ][: 1 + is_there]
    )


@pytest.mark.parametrize(
    ("facts", "model"),
    [
        ({"names": ("torchvision/resnet50",)}, "torchvision:resnet50"),
        ({"names": ("torchvision/vit_b_16",), "sizes": {"img_size": 384}}, "torchvision:vit_b_16[image_size=384]"),
        ({"names": ("torchvision/resnet50",), "sizes": {"in_chans": 1}}, None),
        ({"names": ("torchvision/resnet50",), "fit": Fit.HEADLESS}, None),
        ({"names": ("timm/resnet50",), "fit": Fit.HEADLESS}, "timm:resnet50[num_classes=0]"),
        ({"names": ("transformers/ViTModel",), "sizes": {"in_chans": 1}}, "transformers:ViTModel[num_channels=1]"),
        (
            {"names": ("smp/Unet-resnet34",), "sizes": {"num_classes": 4}},
            "smp:Unet[encoder_name=resnet34,classes=4]",
        ),
    ],
)
def test_the_model_in_the_words_of_its_library(facts, model):
    assert like(**facts).model == model


def test_the_target_of_a_trunk_has_no_head():
    assert like(fit=Fit.HEADLESS).target == "known:timm/vit_small_patch16_224[num_classes=0]"
    assert like(fit=Fit.OTHER_HEAD).target == "known:timm/vit_small_patch16_224"


def test_each_of_several_models_has_its_commands(monkeypatch):
    monkeypatch.setattr("ckptfix.report.likeness._is_installed", lambda library: False)
    both = like(fit=Fit.PART, prefix="a.", others=(like(fit=Fit.PART, prefix="e.b.", missing=("fc.weight",)),))
    assert lines(both)[1:] == [
        "  compare: ckptfix check 'my file.pth' --like known:timm/vit_small_patch16_224 --weights a",
        "       or: ckptfix check 'my file.pth' --like 'known:timm/vit_small_patch16_224[num_classes=0]' --weights e.b",
    ]


def test_what_is_only_near_has_no_command():
    assert len(lines(like(fit=Fit.NEAR, missing=("a.b",)))) == 1
