import random

import pytest

from ckptfix.zoo.drafting.hints import CLASS, Hint
from ckptfix.zoo.drafting.likeness import Confidence
from ckptfix.zoo.drafting.recognition import liken, name_in
from tests.zoo.drafting.structures import STRUCTURES

SMALL = {"trunk.0.weight": (32, 16), "trunk.0.bias": (32,), "head.weight": (10, 32), "head.bias": (10,)}


def likeness(shapes, hints=(), names=("x.pth",)):
    return liken(shapes, hints, names)


def with_classes(name, classes, head):
    return {
        key: (classes, *shape[1:]) if key.startswith(f"{head}.") else shape for key, shape in STRUCTURES[name].items()
    }


def test_nothing_is_claimed_of_a_net_that_nobody_knows():
    found = likeness(SMALL)
    assert (found.confidence, found.model, found.title) == (Confidence.UNKNOWN, None, "unknown")
    assert likeness({}).confidence is Confidence.UNKNOWN


@pytest.mark.parametrize(
    ("shapes", "model", "arguments"),
    [
        (STRUCTURES["tv.resnet50"], "torchvision.models:resnet50", {}),
        (with_classes("tv.resnet50", 7, "fc"), "torchvision.models:resnet50", {"num_classes": 7}),
        (with_classes("tv.vit_b_16", 5, "heads.head"), "torchvision.models:vit_b_16", {"num_classes": 5}),
        (
            with_classes("timm.seresnet50", 3, "fc"),
            "timm:create_model",
            {"model_name": "seresnet50", "num_classes": 3},
        ),
        (
            {
                key: shape
                for key, shape in STRUCTURES["timm.vit_small_patch16_224"].items()
                if not key.startswith("head.")
            },
            "timm:create_model",
            {"model_name": "vit_small_patch16_224", "num_classes": 0},
        ),
    ],
    ids=["resnet50", "another head", "torchvision's vit", "timm's", "without a head"],
)
def test_the_factory_of_an_exact_structure(shapes, model, arguments):
    found = likeness(shapes, names=["vit_small_patch16_224.pth"])
    assert (found.confidence, found.model) == (Confidence.EXACT, model)
    assert {**found.arguments, "model_name": found.title} == {"model_name": found.title, **arguments}


def test_a_head_that_only_torchvision_would_add_is_no_exact_match():
    shapes = {key: shape for key, shape in STRUCTURES["tv.vit_b_16"].items() if not key.startswith("heads.")}
    found = likeness(shapes)
    assert found.confidence is Confidence.LIKELY
    assert "heads.head" in found.evidence[-1]


def test_of_models_that_are_built_alike_the_one_that_the_files_name():
    shapes = STRUCTURES["timm.vit_small_patch16_224"]
    name = "deit_small_patch16_224"
    assert likeness(shapes, [Hint("args.model", name)]).title == name
    assert likeness(shapes, names=[f"runs/{name}-best.pth"]).title == name


def test_words_for_and_against():
    found = likeness(
        STRUCTURES["tv.resnet50"],
        [Hint("arch", "resnet50"), Hint("arch", "resnet50"), Hint("args.arch", "resnet101"), Hint("net", "ours")],
        ["resnet18_best.pth"],
    )
    assert found.title == "resnet50"
    assert found.evidence[-4:] == (
        "arch says resnet50 (2 files)",
        "BUT args.arch says resnet101 (1 file)",
        "net says ours (1 file)",
        "BUT 1 file with resnet18 in the name",
    )


def test_words_alone_are_a_guess():
    found = likeness(SMALL, [Hint("arch", "ResNet18")])
    assert (found.confidence, found.model) == (Confidence.GUESS, "torchvision.models:resnet18")
    assert "names and shapes are not those of torchvision's resnet18" in found.evidence[0]
    found = likeness(SMALL, [], ["swin_tiny_patch4_window7_224_ep3.pth"])
    assert found.arguments == {"model_name": "swin_tiny_patch4_window7_224"}
    assert found.confidence is Confidence.GUESS


def test_the_class_of_a_whole_model_is_its_factory():
    found = likeness(SMALL, [Hint(CLASS, "lab.nets.Net")])
    assert (found.confidence, found.model) == (Confidence.GUESS, "lab.nets:Net")
    assert likeness(SMALL, [Hint(CLASS, "__main__.Net")]).model == "your_script:Net"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("tv.fcn_resnet50", "backbone.* is exactly torchvision's resnet50 without its head"),
        ("tv.fasterrcnn_resnet50_fpn", "backbone.body.* is exactly torchvision's resnet50 without its head"),
    ],
)
def test_a_known_model_inside_of_another(name, line):
    found = likeness(STRUCTURES[name])
    assert found.confidence is Confidence.GUESS
    assert any(each.startswith(line) for each in found.evidence)


@pytest.mark.parametrize(
    ("name", "config", "model", "settings"),
    [
        ("hf.bert-mlm", "BertConfig", "BertForMaskedLM", "vocab_size=30522, hidden_size=768, num_hidden_layers=12,"),
        (
            "hf.bert-large-cls",
            "BertConfig",
            "BertForSequenceClassification",
            "vocab_size=30522, hidden_size=1024, num_",
        ),
        ("hf.roberta-base", "RobertaConfig", "RobertaForMaskedLM", "vocab_size=50265, hidden_size=768,"),
        ("hf.distilbert", "DistilBertConfig", "DistilBertForSequenceClassification", "vocab_size=30522, dim=768,"),
        ("hf.gpt2", "GPT2Config", "GPT2LMHeadModel", "vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12,"),
        (
            "hf.llama-tiny",
            "LlamaConfig",
            "LlamaForCausalLM",
            "vocab_size=32000, hidden_size=256, num_hidden_layers=4, "
            "num_attention_heads=4, num_key_value_heads=2, intermediate_size=688 )",
        ),
        ("hf.qwen2", "Qwen2Config", "Qwen2ForCausalLM", "vocab_size=151936, hidden_size=896, num_hidden_layers=24,"),
        (
            "hf.t5",
            "T5Config",
            "T5ForConditionalGeneration",
            "vocab_size=32128, d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8, num_decoder_layers=6 )",
        ),
        ("hf.neox", "GPTNeoXConfig", "GPTNeoXForCausalLM", "vocab_size=50432, hidden_size=512, num_hidden_layers=6,"),
    ],
)
def test_the_configuration_of_a_language_model_by_its_shapes(name, config, model, settings):
    found = likeness(STRUCTURES[name])
    assert found.confidence is Confidence.LIKELY
    code = " ".join(" ".join(found.code).split())
    assert f"def build(): config = {config}( {settings}" in code
    assert code.endswith(f"return {model}(config)")


def changed(name, more):
    return {**STRUCTURES[name], **more}


@pytest.mark.parametrize(
    ("shapes", "title", "model", "line"),
    [
        (changed("tv.resnet50", {"extra": (1,)}), "ResNet 3-4-6-3", "torchvision.models:resnet50", "7x7 on 3 channels"),
        (
            changed("tv.resnet18", {"conv1.weight": (64, 1, 3, 3)}),
            "ResNet 2-2-2-2",
            "torchvision.models:resnet18",
            "a stem of 3x3 on 1 channels",
        ),
        (changed("tv.resnext50_32x4d", {"extra": (1,)}), "ResNet 3-4-6-3", "torchvision.models:resnet50", "a ResNeXt"),
        (
            changed("tv.densenet121", {"extra": (1,)}),
            "DenseNet 6-12-24-16",
            "torchvision.models:densenet121",
            "grow by 32",
        ),
        (changed("tv.vgg16_bn", {"extra": (1,)}), "VGG", "torchvision.models:vgg16_bn", "13 plain convolutions with"),
        (
            changed("timm.swin_tiny_patch4_window7_224", {"extra": (1,)}),
            "Swin 2-2-6-2",
            "timm:create_model",
            "windows of 7x7",
        ),
        (changed("timm.convnext_tiny", {"extra": (1,)}), "ConvNeXt 3-3-9-3", "timm:create_model", "width 96"),
        (
            changed("timm.vit_small_patch16_224", {"pos_embed": (1, 785, 384)}),
            "ViT of 12 blocks",
            "timm:create_model",
            "785 positions: images of 448x448",
        ),
        (STRUCTURES["hf.clip"], "CLIP or SigLIP of transformers", None, "by the name text_model."),
        ({"base.q_proj.lora_A.weight": (8, 64)}, "LoRA adapter", None, "adapter_config.json"),
    ],
)
def test_a_family_is_a_guess_with_its_facts(shapes, title, model, line):
    found = likeness(shapes)
    assert (found.confidence, found.title, found.model) == (Confidence.GUESS, title, model)
    assert any(line in each for each in found.evidence), found.evidence


def test_the_image_size_of_a_vit_goes_into_its_arguments():
    found = likeness(changed("timm.vit_small_patch16_224", {"pos_embed": (1, 785, 384)}))
    assert found.arguments == {"model_name": "vit_small_patch16_224", "num_classes": 1000, "img_size": 448}


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
        assert likeness(shapes).confidence is not Confidence.EXACT


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
