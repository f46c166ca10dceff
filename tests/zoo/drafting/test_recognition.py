import random

import pytest

from ckptfix.zoo.drafting.recognition import Confidence, find_architecture, name_in, named_models
from tests.zoo.drafting.structures import STRUCTURES

SMALL = {"trunk.0.weight": (32, 16), "trunk.0.bias": (32,), "head.weight": (10, 32), "head.bias": (10,)}


def architecture(shapes, classes=(), names=("x.pth",)):
    return find_architecture(shapes, classes, names)


def with_classes(name, classes, head):
    return {
        key: (classes, *shape[1:]) if key.startswith(f"{head}.") else shape for key, shape in STRUCTURES[name].items()
    }


def test_nothing_is_claimed_of_a_net_that_nobody_knows():
    found = architecture(SMALL)
    assert (found.confidence, found.model, found.title) == (Confidence.UNKNOWN, None, "unknown")
    assert architecture({}).confidence is Confidence.UNKNOWN


VIT = {key: shape for key, shape in STRUCTURES["tv.vit_b_16"].items() if not key.startswith("heads.")}
TRUNK = {key: shape for key, shape in STRUCTURES["timm.vit_small_patch16_224"].items() if not key.startswith("head.")}


@pytest.mark.parametrize(
    ("shapes", "line"),
    [
        (STRUCTURES["tv.resnet50"], "torchvision:resnet50"),
        (with_classes("tv.resnet50", 7, "fc"), "torchvision:resnet50[num_classes=7]"),
        (with_classes("tv.vit_b_16", 5, "heads.head"), "torchvision:vit_b_16[num_classes=5]"),
        (with_classes("timm.seresnet50", 3, "fc"), "timm:seresnet50[num_classes=3]"),
        (TRUNK, "timm:vit_small_patch16_224[num_classes=0]"),
        (VIT, "known:torchvision/vit_b_16[num_classes=0]"),
        ({**STRUCTURES["tv.resnet50"], "conv1.weight": (64, 1, 7, 7)}, "known:torchvision/resnet50[in_chans=1]"),
        (STRUCTURES["hf.gpt2"], "transformers:GPT2LMHeadModel"),
    ],
    ids=[
        "resnet50",
        "another head",
        "torchvision's vit",
        "timm's",
        "without a head",
        "a head that only torchvision would add",
        "channels that torchvision does not choose",
        "transformers",
    ],
)
def test_the_line_of_an_exact_structure(shapes, line):
    """The model where the library builds it, else the structure."""
    found = architecture(shapes, names=["vit_small_patch16_224.pth"])
    assert (found.confidence, found.model or found.like) == (Confidence.EXACT, line)
    assert (found.model is None) == line.startswith("known:")


def test_of_models_that_are_built_alike_the_one_that_the_files_name():
    shapes = STRUCTURES["timm.vit_small_patch16_224"]
    name = "deit_small_patch16_224"
    assert architecture(shapes, names=[f"runs/{name}-best.pth"]).title == name


def test_names_of_files_are_for_or_against():
    found = architecture(STRUCTURES["tv.resnet50"], names=["resnet50_a.pth", "resnet50_b.pth", "resnet18_best.pth"])
    assert found.title == "resnet50"
    assert found.evidence[-2:] == ("the name says resnet50 (2 files)", "BUT the name says resnet18 (1 file)")


def test_only_the_name_of_a_file_is_a_guess():
    found = architecture(SMALL, names=["swin_tiny_patch4_window7_224_ep3.pth"])
    assert (found.confidence, found.model) == (Confidence.GUESS, "timm:swin_tiny_patch4_window7_224")
    assert "names and shapes are not those of timm's" in found.evidence[0]


def test_the_class_of_a_whole_model_is_its_factory():
    found = architecture(SMALL, ["lab.nets.Net"])
    assert (found.confidence, found.model) == (Confidence.GUESS, "lab.nets:Net")
    assert architecture(SMALL, ["__main__.Net"]).model == "your_script:Net"


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("hf.bert-mlm", "BERT, RoBERTa or DistilBERT of transformers"),
        ("hf.bert-large-cls", "BERT, RoBERTa or DistilBERT of transformers"),
        ("hf.roberta-base", "BERT, RoBERTa or DistilBERT of transformers"),
        ("hf.distilbert", "BERT, RoBERTa or DistilBERT of transformers"),
        ("hf.gpt2", "GPT-2 or a relative"),
        ("hf.llama-tiny", "LLaMA, Qwen2, Mistral or a relative, of transformers"),
        ("hf.qwen2", "LLaMA, Qwen2, Mistral or a relative, of transformers"),
        ("hf.t5", "T5 of transformers"),
        ("hf.neox", "GPT-NeoX, such as Pythia"),
        ("hf.clip", "CLIP or SigLIP of transformers"),
        ("tv.fasterrcnn_resnet50_fpn", "detector of torchvision"),
        ("tv.resnext50_32x4d", "ResNet"),
        ("tv.densenet121", "DenseNet"),
        ("tv.vgg16_bn", "VGG, AlexNet or another plain convolutional network"),
        ("timm.swin_tiny_patch4_window7_224", "Swin Transformer"),
        ("timm.convnext_tiny", "ConvNeXt"),
        ("timm.vit_small_patch16_224", "Vision Transformer, as timm names it"),
    ],
)
def test_a_family_is_a_guess_by_a_telling_name(name, title):
    found = architecture({**STRUCTURES[name], "extra": (1,)})
    assert (found.confidence, found.title, found.model) == (Confidence.GUESS, title, None)
    assert found.evidence[0].startswith("by the name ")


@pytest.mark.parametrize("name", STRUCTURES)
def test_shapes_that_no_model_has_break_nothing(name):
    """Names as of a known model, and shapes of any number of dimensions and any size."""
    chance = random.Random(name)
    for _ in range(8):
        shapes = {
            key: tuple(chance.choice((0, 1, 2, 3, 2**40)) for _ in range(chance.randrange(5)))
            for key in STRUCTURES[name]
            if chance.random() < 0.9
        }
        assert architecture(shapes).confidence is not Confidence.EXACT


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("resnet50_19c8e357_pth", "resnet50"),
        ("my_resnet50_pth", "resnet50"),
        ("myresnet50_pth", None),
        ("resnet500_pth", None),
        ("vit_base_patch16_224_in21k_pth", "vit_base_patch16_224"),
    ],
)
def test_a_name_of_a_model_in_a_name_of_a_file(stem, name):
    assert name_in(stem) == name


def test_names_of_both_libraries():
    names = named_models()
    assert (names["resnet50"], names["vit_base_patch16_224"]) == ("torchvision", "timm")
