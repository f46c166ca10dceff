"""Which tensors of another shape a recipe is for, on models of the libraries that write them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ckptfix
from ckptfix.core.adaptations import adaptation
from ckptfix.core.finding import Applicability
from ckptfix.core.target import target_from_checkpoint
from ckptfix.errors import UsageError
from ckptfix.reading.opening import open_state_dict
from ckptfix.rules.fit103_shape_mismatch import shape_mismatch
from tests.checks import assert_same
from tests.rules.proposals import propose, repaired

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


def clip(img_size: int, length: int = 77) -> Any:
    from transformers import CLIPConfig, CLIPModel

    vision, text = {"image_size": img_size, "patch_size": 32}, {"max_position_embeddings": length, "vocab_size": 99}
    return CLIPModel(CLIPConfig(vision_config={**NARROW, **vision}, text_config={**NARROW, **text}))


def open_clip(img_size: int, length: int = 77) -> Any:
    from open_clip import CLIP

    vision = {"image_size": img_size, "layers": 1, "width": 64, "patch_size": 32}
    return CLIP(32, vision, {"context_length": length, "vocab_size": 99, "width": 32, "heads": 2, "layers": 1})


def tiny_vit(size: int) -> Any:
    import timm

    windows = (7 * size // 224,) * 4
    sizes = {"embed_dims": (8, 16, 16, 32), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 2), "num_classes": 5}
    return timm.create_model("tiny_vit_5m_224", window_sizes=windows, **sizes)


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


def dino(size: int) -> Any:
    from transformers import Dinov2Config, Dinov2Model

    return Dinov2Model(Dinov2Config(**NARROW, image_size=size, patch_size=16))


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


def whisper_of(positions: int) -> Any:
    from transformers import WhisperConfig, WhisperModel

    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in SIZES.items()}
    return WhisperModel(
        WhisperConfig(d_model=32, vocab_size=99, **sides, max_source_positions=positions, pad_token_id=1)
    )


SIZES = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}


def stem(channels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3))


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
        "windows of 7x7 in the file and of 8x8 in the model; transformers has no function that resizes them",
    ),
    "TimeSformer": (
        lambda: tuple(transformers_model("Timesformer", **NARROW, image_size=size) for size in (64, 96)),
        "pos_embed=nearest",
        "4x4 in the file (and 1 token), of 6x6 in the model",
    ),
    "ViLT": (
        lambda: tuple(transformers_model("Vilt", **NARROW, image_size=size, vocab_size=9) for size in (64, 96)),
        "pos_embed=vilt",
        "2x2 in the file (and 1 token), of 3x3 in the model",
    ),
    "AIMv2": (
        lambda: tuple(transformers_model("Aimv2Vision", **NARROW, image_size=size) for size in (56, 84)),
        "pos_embed=plain",
        "4x4 in the file, of 6x6 in the model; transformers has no function that resizes them",
    ),
    "CLIP's ResNet in timm": (
        lambda: (clip_resnet(64), clip_resnet(96)),
        "pos_embed=timm",
        "2x2 in the file (and 1 token), of 3x3 in the model",
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


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_recognised(name):
    (file, model), (_, recipe, words) = pair(name), KNOWN[name]
    (finding,) = propose(shape_mismatch, file.state_dict(), model)
    assert words in finding.message
    assert finding.fix is None
    assert finding.remedies[0].options == (("adapt", (recipe,)),)


# What only the classes of a model say.
BY_CLASS = {"Swin in timm", "Swin in transformers", "BEiT in transformers", "Data2Vec", "TimeSformer", "ViLT", "AIMv2"}


@pytest.mark.parametrize("name", [name for name in KNOWN if name not in {*BY_CLASS, "CLIP's ResNet in timm"}])
def test_the_same_with_a_file_to_fit(name):
    """Then the grids follow from the tokens whose parameters are in the files, or are not known."""
    (file, model), (_, recipe, words) = pair(name), KNOWN[name]
    (finding,) = propose(shape_mismatch, file.state_dict(), target_from_checkpoint(open_state_dict(model.state_dict())))
    assert words in finding.message
    assert finding.remedies[0].options == (("adapt", (recipe,)),)


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_adapted_fits(name):
    (file, model), (_, recipe, _) = pair(name), KNOWN[name]
    before = file.state_dict()
    (finding,) = propose(shape_mismatch, before, model, adapt=(recipe,))
    assert finding.fix is not None
    assert finding.fix.asked
    assert finding.fix.applicability is Applicability.UNSAFE
    after = repaired(shape_mismatch, before, model, adapt=(recipe,))
    assert {key: value.shape for key, value in after.items()} == {k: v.shape for k, v in model.state_dict().items()}
    assert_same(
        {k: v for k, v in after.items() if k not in finding.keys},
        {k: v for k, v in before.items() if k not in finding.keys},
    )


@pytest.mark.parametrize("name", sorted(BY_CLASS - {"AIMv2"}))
def test_recipes_of_classes_can_be_given_for_a_file_to_fit(name):
    (file, model), (_, recipe, _) = pair(name), KNOWN[name]
    target = target_from_checkpoint(open_state_dict(model.state_dict()))
    after = repaired(shape_mismatch, file.state_dict(), target, adapt=(recipe,))
    assert {key: value.shape for key, value in after.items()} == {k: v.shape for k, v in model.state_dict().items()}


def test_positions_over_time_are_not_those_of_an_image():
    """16 moments of 14x14 patches are 56x56, too, and transformers' own function takes them for that."""
    file, model = (transformers_model("Vivit", **NARROW, image_size=size) for size in (224, 448))
    state = file.state_dict()
    (finding,) = propose(shape_mismatch, state, model)
    assert "for each patch of each moment; no library has a function that resizes them" in finding.message
    assert not any(name == "adapt" for remedy in finding.remedies for name, _ in remedy.options)
    with pytest.raises(UsageError, match=r"is not for embeddings\.position_embeddings: 3137 positions"):
        propose(shape_mismatch, state, model, adapt=("pos_embed=plain",))
    like = open_state_dict(model.state_dict())
    (finding,) = propose(shape_mismatch, state, target_from_checkpoint(like))
    assert "may be those of moments too" in finding.message
    config = json.loads(model.config.to_json_string())
    (finding,) = propose(shape_mismatch, state, target_from_checkpoint(like, config))
    assert "for each patch of each moment" in finding.message


@pytest.mark.parametrize("key", ["temporal_embed.pos_embed", "image_pos_embed.row_embeddings.weight", "time.pos_embed"])
def test_positions_of_one_axis_are_not_those_of_a_grid(key):
    file, like = ({key: torch.randn(1, number, 8)} for number in (16, 36))
    (finding,) = propose(shape_mismatch, file, target_from_checkpoint(open_state_dict(like)))
    assert finding.message.endswith("16 positions in the file and 36 in the model")
    assert finding.remedies[0].options == (("adapt", ("pos_embed=linear",)),)


def test_a_projection_of_embeddings_is_not_one_of_patches():
    """192 and 300 are three colours of 8x8 and 10x10 pixels, too."""
    file, like = ({"embeddings.projection.weight": torch.ones(16, size)} for size in (192, 300))
    (finding,) = propose(shape_mismatch, file, target_from_checkpoint(open_state_dict(like)))
    assert "patches" not in finding.message
    file, like = ({"embeddings.projection.weight": torch.ones(16, 3, side, side)} for side in (8, 10))
    (finding,) = propose(shape_mismatch, file, target_from_checkpoint(open_state_dict(like)))
    assert "patches of 8x8 in the file and of 10x10 in the model" in finding.message


def test_positions_of_the_text_of_a_model_named_for_images():
    from transformers import GroupViTTextConfig, GroupViTTextModel

    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    file, model = (GroupViTTextModel(GroupViTTextConfig(**small, max_position_embeddings=n)) for n in (64, 100))
    (finding,) = propose(shape_mismatch, file.state_dict(), model)
    assert finding.remedies[0].options == (("adapt", ("pos_embed=linear",)),)


def test_initial_values_are_offered_where_there_are_some():
    (file, model), given = pair("more words"), ("vocab=pad:mean", "vocab=pad:zeros", "vocab=pad:target")
    state = model.state_dict()
    for target, recipes in ((model, given), (target_from_checkpoint(open_state_dict(state)), given[:2])):
        (finding,) = propose(shape_mismatch, file.state_dict(), target)
        values = [value for remedy in finding.remedies for name, value in remedy.options if name == "adapt"]
        assert values == [(recipe,) for recipe in recipes]
        priced = {value: dict(r.untrained) for r in finding.remedies for name, value in r.options if name == "adapt"}
        assert all(bool(price) == (value == ("vocab=pad:target",)) for value, price in priced.items())


def test_the_price_of_initial_values_is_what_stays_untrained():
    """Of tied tensors once, and only the entries that are added."""
    file, model = gpt2(100), gpt2(104)
    (finding,) = propose(shape_mismatch, file.state_dict(), model)
    (remedy,) = (each for each in finding.remedies if each.options == (("adapt", ("vocab=pad:target",)),))
    report = ckptfix.repair(file.state_dict(), model, adapt="vocab=pad:target").report
    assert report.coverage is not None
    assert 0 < sum(dict(remedy.untrained).values()) == report.coverage.untrained


def test_tied_twins_stay_one_tensor():
    after = repaired(shape_mismatch, gpt2(100).state_dict(), gpt2(104), adapt=("vocab=pad:zeros",))
    words, head = after["transformer.wte.weight"], after["lm_head.weight"]
    assert words.data_ptr() == head.data_ptr()
    assert not words[100:].any()


def test_two_tables_of_positions_have_a_recipe_each():
    file, model = clip(224), clip(384, 120)
    assert [finding.remedies[0].options for finding in propose(shape_mismatch, file.state_dict(), model)] == [
        (("adapt", ("pos_embed=linear",)),),
        (("adapt", ("pos_embed=plain",)),),
    ]
    given = ("pos_embed=plain", "pos_embed=linear")
    edits = [
        edit.to_json()
        for finding in propose(shape_mismatch, file.state_dict(), model, adapt=given)
        if finding.fix is not None
        for edit in finding.fix.edits
    ]
    assert [(edit["key"], edit["recipe"]) for edit in edits] == [
        ("text_model.embeddings.position_embedding.weight", "pos_embed=linear"),
        ("vision_model.embeddings.position_embedding.weight", "pos_embed=plain"),
    ]
    left, adapted = propose(shape_mismatch, file.state_dict(), model, adapt=given[:1])
    assert (left.keys, left.fix) == (("text_model.embeddings.position_embedding.weight",), None)
    assert left.remedies[0].options == (("adapt", ("pos_embed=linear",)),)
    assert adapted.fix is not None


def test_open_clip_stretches_shorter_texts_too_and_others_cut_them():
    (of_open_clip,), (of_others,) = (
        propose(shape_mismatch, make(224, 77).state_dict(), make(224, 64)) for make in (open_clip, clip)
    )
    assert of_open_clip.remedies[0].options == (("adapt", ("pos_embed=linear",)),)
    assert "the model is one of open_clip; pos_embed=cut fits too" in of_open_clip.remedies[0].text
    assert of_others.remedies[0].options == (("adapt", ("pos_embed=cut",)),)


def test_keys_name_what_a_recipe_is_for():
    file, model = open_clip(224), open_clip(384, 100)
    adapted, left = propose(shape_mismatch, file.state_dict(), model, adapt=("pos_embed@visual.*=timm",))[::-1]
    assert (adapted.keys, left.keys) == (("visual.positional_embedding",), ("positional_embedding",))
    assert left.fix is None


def test_a_short_text_is_not_taken_for_the_patches_beside_it():
    """64 positions could be the 49 patches and 15 tokens."""
    file, model = open_clip(224), open_clip(224, 64)
    (finding,) = propose(shape_mismatch, file.state_dict(), model, adapt=("pos_embed=cut",))
    assert (finding.keys, finding.fix is not None) == (("positional_embedding",), True)


@pytest.mark.parametrize(
    ("recipe", "old", "new"),
    [
        ("pos_embed@*.places=plain", (1, 17, 8), (1, 26, 8)),
        ("window_bias@*.places=swin", (9, 2), (25, 2)),
        ("patch_embed@*.places=timm", (8, 3, 4, 4), (8, 3, 8, 8)),
        ("in_chans@*.places=timm", (8, 3, 4, 4), (8, 1, 4, 4)),
        ("vocab@*.places=cut", (9, 8), (5, 8)),
    ],
)
def test_keys_of_other_names_are_named_by_hand(recipe, old, new):
    file = {"net.places": torch.randn(old), "cls_token": torch.zeros(1, 1, 8), "a.weight": torch.ones(3, 3, 1, 1)}
    model = {**file, "net.places": torch.zeros(new)}
    target = target_from_checkpoint(open_state_dict(dict(sorted(model.items()))))
    assert not any("adapt" in dict(one.options) for f in propose(shape_mismatch, file, target) for one in f.remedies)
    (finding,) = propose(shape_mismatch, file, target, adapt=(recipe,))
    assert finding.fix is not None
    assert repaired(shape_mismatch, file, target, adapt=(recipe,))["net.places"].shape == new


def test_dinov2_of_transformers_computes_in_float32():
    (finding,) = propose(shape_mismatch, dino(64).state_dict(), dino(96))
    assert finding.remedies[0].options == (("adapt", ("pos_embed=dinov2",)),)
    assert "the model is one of transformers; pos_embed=timm and pos_embed=plain" in finding.remedies[0].text
    with pytest.raises(UsageError, match=r"pos_embed=dinov2' is not for .*give adapt='pos_embed=plain'"):
        propose(shape_mismatch, transformers_vit(64).state_dict(), transformers_vit(96), adapt=("pos_embed=dinov2",))


@pytest.mark.parametrize(
    ("model", "size", "recipe"),
    [("Siglip2VisionModel", "num_patches", "siglip2"), ("DPTModel", "image_size", "dpt")],
    ids=["SigLIP2, of which the module around the embedding says so", "DPT"],
)
def test_models_of_transformers_with_a_formula_of_their_own(model, size, recipe):
    import transformers

    kind = getattr(transformers, model)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    own = {"is_hybrid": False, "backbone_out_indices": [0] * 4} if recipe == "dpt" else {}
    old, new = (kind(kind.config_class(**sizes, **own, **{"patch_size": 8, size: number})) for number in (16, 64))
    (finding,) = propose(shape_mismatch, old.state_dict(), new)
    assert finding.remedies[0].options == (("adapt", (f"pos_embed={recipe}",)),)
    assert "the model is one of transformers; pos_embed=timm and pos_embed=plain" in finding.remedies[0].text


@pytest.mark.parametrize(("old", "new"), [((6, 6), (8, 8)), ((6, 4), (8, 10))], ids=["square", "not square"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1)], ids=["channels before the grid", "channels last"])
def test_a_table_that_is_a_grid_shows_its_sides(order, old, new):
    """As those of SAM and of Swin's absolute positions."""
    before, after = (torch.randn(1, 24, *grid) for grid in (old, new))
    weights = {"patch_embed.proj.weight": torch.randn(24, 3, 4, 4), "blocks.0.attn.qkv.weight": torch.randn(72, 24)}
    target = target_from_checkpoint(open_state_dict({**weights, "pos_embed": after.permute(order).contiguous()}))
    file = {**weights, "pos_embed": before.permute(order).contiguous()}
    made = repaired(shape_mismatch, file, target, adapt=("pos_embed=timm",))["pos_embed"]
    expected = nn.functional.interpolate(before, new, mode="bicubic", antialias=True)
    assert torch.equal(made, expected.permute(order))


NOT_SQUARE = "pos_embed=timm:ROWSxCOLUMNS:ROWSxCOLUMNS"


def test_a_grid_that_is_not_square_is_given_by_hand():
    file, model = vit((192, 384)), vit(384)
    (finding,) = propose(shape_mismatch, file.state_dict(), model)
    assert "the file's 289 positions are not those of a square grid and 1 token" in finding.message
    assert not finding.remedies[0].is_complete
    with pytest.raises(UsageError, match=f"cannot be adapted: the file's 289.*{NOT_SQUARE}"):
        propose(shape_mismatch, file.state_dict(), model, adapt=("pos_embed=timm",))
    after = repaired(shape_mismatch, file.state_dict(), model, adapt=("pos_embed=timm:12x24",))

    from timm.layers import resample_abs_pos_embed

    expected = resample_abs_pos_embed(file.state_dict()["pos_embed"], [24, 24], [12, 24])
    assert torch.equal(after["pos_embed"], expected)


@pytest.mark.parametrize(
    ("old", "new", "is_offered"),
    [
        pytest.param((1, 9, 9, 8), (1, 9, 9, 4), False, id="a wider model, channels last"),
        pytest.param((1, 8, 9, 9), (1, 4, 9, 9), False, id="a wider model, channels first"),
        pytest.param((1, 9, 9, 8), (1, 12, 12, 8), True, id="larger images, channels last"),
        pytest.param((1, 8, 9, 9), (1, 8, 12, 12), True, id="larger images, channels first"),
        pytest.param((1, 8, 9, 9), (1, 8, 9, 12), True, id="broader images"),
    ],
)
def test_a_map_of_another_width_is_no_map_of_other_images(old, new, is_offered):
    file = {"pos_embed": torch.randn(old), "a.weight": torch.ones(3, 3, 1, 1)}
    target = target_from_checkpoint(open_state_dict({**file, "pos_embed": torch.zeros(new)}))
    findings = propose(shape_mismatch, file, target)
    assert any("adapt" in dict(one.options) for f in findings for one in f.remedies) is is_offered


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (8 * 32, "the file's 257 positions may be those of a grid of 16x16 or of 8x32 and 1 token"),
        (4 * 16, "the file's 65 positions may be those of a grid of 8x8 or of 4x16 and 1 token"),
        (16 * 16 * 3, "the file's 769 positions are not those of a square grid and 1 token$"),
    ],
)
def test_a_square_that_may_be_a_strip_is_not_assumed(rows, said):
    model = vit((64, 256))  # a grid of 4x16
    state = {**model.state_dict(), "pos_embed": torch.randn(1, 1 + rows, 24)}
    if rows == 4 * 16:
        assert propose(shape_mismatch, state, model) == []
        model = vit((32, 128))
    (finding,) = propose(shape_mismatch, state, model)
    assert not finding.remedies[0].is_complete
    assert re.search(said, finding.message)
    if rows == 4 * 16:
        (finding,) = propose(shape_mismatch, state, model, adapt=("pos_embed=timm:4x16",))
        assert "a grid of 4x16 in the file (and 1 token), of 2x8 in the model" in finding.message


@pytest.mark.parametrize(
    ("file", "model", "recipe", "said"),
    [
        (
            "timm",
            None,
            "pos_embed=linear",
            "pos_embed=linear.* is not for pos_embed: a grid .*give adapt=.*pos_embed=timm",
        ),
        ("timm", None, "pos_embed=timm:12x12", "not those of a grid of 12x12 and 1 token, but of one of 14x14"),
        ("timm", None, "pos_embed=timm:14x14:12x12", "the model's grid is 24x24 and not 12x12"),
        ("more words", None, "vocab=cut", "a vocabulary of 100 in the file and of 104.*give adapt=.*vocab=pad:mean"),
        ("fewer words", None, "vocab=pad:zeros", "a vocabulary of 100 in the file and of 96.*give adapt=.*vocab=cut"),
        ("longer texts", None, "pos_embed=cut", "64 positions in the file and 96.*give adapt=.*pos_embed=linear"),
        ("longer texts", None, "pos_embed=timm", "is not for transformer.wpe.weight.*give adapt=.*pos_embed=linear"),
        ("longer texts", None, "pos_embed=linear:8x8:8x12", "have no rows and columns.*give .*pos_embed=linear:64:96"),
    ],
)
def test_what_is_refused(file, model, recipe, said):
    before, fits = pair(file)
    with pytest.raises(UsageError, match=said):
        propose(shape_mismatch, before.state_dict(), fits, adapt=(recipe,))


def test_another_number_of_tokens_is_said_where_the_grids_are_given():
    state = vit(reg_tokens=4).state_dict()
    with pytest.raises(UsageError) as caught:
        propose(shape_mismatch, state, vit(384), adapt=("pos_embed=timm:14x14:24x24",))
    said = (
        "not those of a grid of 14x14 and 1 token, but of one and 5 tokens, and no recipe changes the number of tokens"
    )
    assert str(caught.value).endswith(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pos_embd=timm", "did you mean pos_embed"),
        ("pos_embed", "write it as NAME=RECIPE"),
        ("pos_embed@=timm", "write it as NAME=RECIPE"),
        ("pos_embed=tim", "did you mean timm"),
        ("pos_embed=timm:14", "is not a grid|^$"),
        ("pos_embed=timm:0x3", "'0x3' is not a grid"),
        ("pos_embed=timm:1x1:2x2:3x3", "has no recipe"),
        ("vocab=pad", "give cut or pad:mean"),
        ("depth=3-1", "is not a layer"),
        ("depth=a", "is not a layer"),
    ],
)
def test_what_means_nothing(text, said):
    if text == "pos_embed=timm:14":
        assert adaptation(text).old == (14,)  # one axis: positions of a text
        return
    with pytest.raises(UsageError, match=said):
        adaptation(text)


@pytest.mark.parametrize(
    ("file", "model"),
    [
        pytest.param({"pos_embed": torch.zeros(1, 197, 8)}, {"pos_embed": torch.zeros(1, 577, 12)}, id="wider"),
        pytest.param({"0.weight": torch.zeros(8, 3, 3, 3)}, {"0.weight": torch.zeros(6, 4, 3, 3)}, id="more filters"),
        pytest.param(
            {"a.weight": torch.zeros(8, 3, 3, 3), "b.weight": torch.zeros(8, 8, 3, 3)},
            {"a.weight": torch.zeros(8, 3, 3, 3), "b.weight": torch.zeros(8, 16, 3, 3)},
            id="a convolution inside of the model",
        ),
        pytest.param({"fc.weight": torch.zeros(10, 8)}, {"fc.weight": torch.zeros(5, 8)}, id="a head"),
        pytest.param({"wte.weight": torch.zeros(0, 8)}, {"wte.weight": torch.zeros(5, 8)}, id="no words, nor a mean"),
        pytest.param(
            {"conv1.weight": torch.zeros(8, 0, 3, 3)}, {"conv1.weight": torch.zeros(8, 3, 3, 3)}, id="no channels"
        ),
        pytest.param(
            {"label_embed.weight": torch.zeros(9, 8)},
            {"label_embed.weight": torch.zeros(5, 8)},
            id="classes, not words",
        ),
        pytest.param({"e.emb.weight": torch.zeros(9, 8)}, {"e.emb.weight": torch.zeros(8, 9)}, id="another width"),
        pytest.param({"c.weight": torch.zeros(8, 3, 3, 3)}, {"c.weight": torch.zeros(8, 3, 5, 5)}, id="a plain kernel"),
        pytest.param(
            {"layer.relative_attention_bias.weight": torch.zeros(32, 2), "query_embed.weight": torch.zeros(9, 8)},
            {"layer.relative_attention_bias.weight": torch.zeros(64, 2), "query_embed.weight": torch.zeros(5, 8)},
            id="embeddings of other things than words",
        ),
        pytest.param(
            {"query_position_embeddings.weight": torch.zeros(9, 8)},
            {"query_position_embeddings.weight": torch.zeros(5, 8)},
            id="queries of DETR",
        ),
        pytest.param(
            {"conv1.weight": torch.zeros(8, 80, 3)}, {"conv1.weight": torch.zeros(8, 128, 3)}, id="bands of a spectrum"
        ),
        pytest.param(
            {"conv1.weight": torch.zeros(8, 48, 3, 3)},
            {"conv1.weight": torch.zeros(8, 64, 3, 3)},
            id="the colours of 4x4 pixels, as in TResNet, one more each",
        ),
        pytest.param(
            {"pos_embed": torch.zeros(1, 30, 8), "det_token": torch.zeros(1, 5, 8)},
            {"pos_embed": torch.zeros(1, 42, 8), "det_token": torch.zeros(1, 5, 8)},
            id="tokens after the patches, as in YOLOS",
        ),
        *(
            pytest.param({key: torch.zeros(9, 8)}, {key: torch.zeros(12, 8)}, id=key)
            for key in (
                "quantize.embedding.weight",
                "codebooks.0.embed.weight",
                "item_embedding.weight",
                "encoder.rel_embeddings.weight",
                "layers.0.self_attn.rel_pos_emb.weight",
                "embeddings.x_position_embeddings.weight",
                "layers.0.mlp.shared_experts.gate_proj.weight",
                "layers.0.mlp.gate.weight",
                "text_projection.weight",
                "resampler.latents",
            )
        ),
        pytest.param(
            {"wte.weight": torch.zeros(9, 8, dtype=torch.int8)},
            {"wte.weight": torch.zeros(8, 8, dtype=torch.int8)},
            id="whole numbers",
        ),
    ],
)
def test_what_no_recipe_is_for(file, model):
    findings = propose(shape_mismatch, file, target_from_checkpoint(open_state_dict(model)))
    assert findings
    assert not any(name == "adapt" for f in findings for r in f.remedies for name, _ in r.options)


def deberta(buckets: int) -> Any:
    from transformers import DebertaV2Config, DebertaV2Model

    sizes = {"position_buckets": buckets, "relative_attention": True, "pos_att_type": ["p2c"]}
    return DebertaV2Model(DebertaV2Config(**NARROW, vocab_size=99, **sizes))


def llava(vocab: int) -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    text, vision = LlamaConfig(**NARROW, vocab_size=vocab), CLIPVisionConfig(**NARROW, image_size=32, patch_size=16)
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_index=3))


def bart(vocab: int) -> Any:
    from transformers import BartConfig, BartForConditionalGeneration

    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in SIZES.items()}
    return BartForConditionalGeneration(BartConfig(d_model=32, vocab_size=vocab, **sides))


@pytest.mark.parametrize(("old", "new", "recipe"), [(99, 104, "pad:zeros"), (99, 104, "pad:target"), (104, 99, "cut")])
def test_the_bias_of_bart_has_its_words_last(old, new, recipe):
    """As in transformers, whose own function resizes it with the embeddings."""
    file, model = bart(old), bart(new)
    file.final_logits_bias.normal_()
    after, _ = ckptfix.repair_state_dict(file.state_dict(), model, adapt=f"vocab={recipe}", select="FIT103")
    file.resize_token_embeddings(new)
    assert torch.equal(after["final_logits_bias"], file.final_logits_bias)
    assert after["lm_head.weight"].shape == (new, 32)


class Quantizer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size, 8)


def offered(file: nn.Module, model: nn.Module) -> list[object]:
    found = propose(shape_mismatch, file.state_dict(), model)
    return [value for f in found for r in f.remedies for name, value in r.options if name == "adapt"]


def moshi(vocab: int) -> Any:
    from transformers import MoshiConfig, MoshiForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 32, "num_codebooks": 1}
    return MoshiForCausalLM(MoshiConfig(vocab_size=vocab, **sizes))


@pytest.mark.parametrize(
    ("old", "new", "recipe", "is_known"),
    [
        (40, 48, "pad:zeros", True),
        (40, 48, "pad:zeros", False),
        (40, 48, "pad:target", True),
        (48, 40, "cut", True),
        (48, 40, "cut", False),
    ],
)
def test_a_row_after_the_vocabulary_stays_the_last(old, new, recipe, is_known):
    """Moshi and MusicGen have one for what is before the first word."""
    file, model = moshi(old).state_dict(), moshi(new)
    target = model if is_known else target_from_checkpoint(open_state_dict(model.state_dict()))
    findings = propose(shape_mismatch, file, target, adapt=(f"vocab={recipe}",))
    assert [found.message.partition(": ")[2] for found in findings] == [
        f"a vocabulary of {old} in the file and of {new} in the model{last}"
        for last in (", and a row after it that stays the last", "")
    ]
    after = repaired(shape_mismatch, file, target, adapt=(f"vocab={recipe}",))
    words, kept = after["model.embed_tokens.weight"], min(old, new)
    assert torch.equal(words[:kept], file["model.embed_tokens.weight"][:kept])
    assert torch.equal(words[-1], file["model.embed_tokens.weight"][-1])
    fresh = {"pad:zeros": torch.zeros(8, 32), "pad:target": model.model.embed_tokens.weight[40:48], "cut": words[:0]}
    assert torch.equal(words[kept:-1], fresh[recipe])
    assert torch.equal(after["lm_head.weight"][:kept], file["lm_head.weight"][:kept])


def test_two_vocabularies_of_which_one_has_a_word_more():
    def make(add: int) -> dict[str, torch.Tensor]:
        sizes = {"source": 41 + add, "target": 40 + add}
        return {f"{name}_embedding.weight": torch.randn(size, 8) for name, size in sizes.items()}

    file = make(0)
    target = target_from_checkpoint(open_state_dict(make(8)))
    after = repaired(shape_mismatch, file, target, adapt=("vocab=pad:zeros",))
    assert after["source_embedding.weight"].shape == (49, 8)
    assert torch.equal(after["source_embedding.weight"][:41], file["source_embedding.weight"])


def test_what_an_embedding_is_comes_from_its_model():
    """The configuration says the vocabulary, and classes around an embedding that it is of something else."""
    assert offered(deberta(8), deberta(16)) == []
    assert offered(llava(99), llava(104)) == [(f"vocab=pad:{new}",) for new in ("mean", "zeros", "target")]
    assert offered(nn.ModuleDict({"e": Quantizer(9)}), nn.ModuleDict({"e": Quantizer(12)})) == []


def test_sinusoids_are_cut_and_never_stretched():
    short, long = (whisper_of(positions) for positions in (32, 64))
    key = "encoder.embed_positions.weight"
    assert offered(long, short) == [("pos_embed=cut",)]
    assert offered(short, long) == []
    after = repaired(shape_mismatch, long.state_dict(), short, adapt=("pos_embed=cut",))
    assert torch.equal(after[key], short.state_dict()[key])
    found = propose(shape_mismatch, short.state_dict(), target_from_checkpoint(open_state_dict(long.state_dict())))
    assert found
    assert not any("adapt" in dict(r.options) for f in found for r in f.remedies)


@pytest.mark.parametrize("recipe", ["in_chans=timm", "in_chans=mean"])
@pytest.mark.parametrize(("old", "new"), [(3, 1), (1, 3), (3, 4), (4, 3)])
def test_the_first_convolution(recipe, old, new):
    after = repaired(shape_mismatch, stem(old).state_dict(), stem(new), adapt=(recipe,))
    stem(new).load_state_dict(after, strict=True)


def test_images_to_videos():
    file, model = nn.Sequential(nn.Conv2d(3, 8, 3)), nn.Sequential(nn.Conv3d(3, 8, (5, 3, 3)))
    (finding,) = propose(shape_mismatch, file.state_dict(), model)
    assert finding.remedies[0].options == (("adapt", ("inflate=mean",)),)
    after = repaired(shape_mismatch, file.state_dict(), model, adapt=("inflate=centre",))
    model.load_state_dict(after, strict=True)
    still = torch.randn(1, 3, 1, 9, 9).expand(1, 3, 5, 9, 9)
    torch.testing.assert_close(model(still)[:, :, 0], file(still[:, :, 0]))


def test_videos_to_images_have_no_recipe():
    file, model = nn.Sequential(nn.Conv3d(3, 8, (5, 3, 3))), nn.Sequential(nn.Conv2d(3, 8, 3))
    found = propose(shape_mismatch, file.state_dict(), model, adapt=("inflate=mean",))
    assert any("1 of them over time too, which inflate adds and no recipe takes out" in one.message for one in found)
    assert not any("adapt" in dict(remedy.options) for one in found for remedy in one.remedies)


@pytest.mark.parametrize(
    "given",
    [
        ("vocab=pad:mean", "vocab=pad:zeros"),
        ("vocab@*embed*=pad:mean", "vocab@tok*=pad:mean"),
        ("vocab=pad:zeros", "vocab=cut", "vocab=pad:mean"),
    ],
)
def test_two_recipes_for_one_key_are_refused(given):
    file, model = (nn.ModuleDict({"tok_embed": nn.Embedding(rows, 8)}) for rows in (9, 12))
    with pytest.raises(UsageError, match=r"vocab.*adapt=.*vocab.* are both for tok_embed\.weight; give one"):
        propose(shape_mismatch, file.state_dict(), model, adapt=given)
    for fitting in (given[:1] * 2, ("vocab=cut", given[0]), ("vocab=pad:target", "vocab@tok*=pad:zeros")):
        assert any(finding.fix for finding in propose(shape_mismatch, file.state_dict(), model, adapt=fitting))


def test_no_recipe_is_offered_for_another_model():
    """The embedding has the width of the model, and the rest has not."""
    layers = (nn.Linear(8, 8), nn.Linear(64, 64))
    file, model = (nn.Sequential(nn.Embedding(n, 8), layer) for n, layer in zip((9, 10), layers, strict=True))
    (finding,) = propose(shape_mismatch, file.state_dict(), model)
    assert not any(remedy.options for remedy in finding.remedies)


def test_a_head_is_offered_a_map_and_a_wider_model_is_not():
    file, model = (nn.Sequential(nn.Linear(3, 8), nn.Linear(8, classes)) for classes in (5, 3))
    (finding,) = propose(shape_mismatch, file.state_dict(), model)
    assert [str(value) for remedy in finding.remedies for name, value in remedy.options if name == "adapt"] == [
        "head=MAP.txt"
    ]
    file, model = (nn.Sequential(nn.Linear(4, n), nn.Linear(n, 4), nn.Linear(64, 64)) for n in (3, 5))
    (finding,) = propose(shape_mismatch, file.state_dict(), model)
    assert not [remedy for remedy in finding.remedies if ("adapt" in dict(remedy.options))]


def torchvision_swin(window: int) -> Any:
    from torchvision.models import SwinTransformer

    return SwinTransformer([4, 4], 24, [2], [2], [window, window], num_classes=5)


def test_index_tables_are_those_of_the_model():
    """The rule on buffers takes them, whichever recipe the biases get."""
    file, model = torchvision_swin(4), torchvision_swin(6)
    state, report = ckptfix.repair_state_dict(file.state_dict(), model, adapt="window_bias=swin")
    assert report.exit_code == 0
    assert {finding.code for finding in report.fixed} == {"BUF104", "FIT103"}
    index = "features.1.0.attn.relative_position_index"
    assert torch.equal(state[index], model.state_dict()[index])
    model.load_state_dict(state, strict=True)
    assert model(torch.randn(1, 3, 48, 48)).isfinite().all()


def test_index_tables_are_those_of_a_file_to_fit(tmp_path):
    file, like = torchvision_swin(4).state_dict(), torchvision_swin(6).state_dict()
    for name, state in (("file", file), ("like", like)):
        torch.save(state, tmp_path / f"{name}.pth")
    given = {"like": tmp_path / "like.pth", "adapt": "window_bias=swin"}
    done = ckptfix.repair(tmp_path / "file.pth", **given, output=tmp_path / "out.pth")
    assert done.report.exit_code == 0
    state = torch.load(tmp_path / "out.pth", weights_only=True)
    for key, value in like.items():
        assert state[key].shape == value.shape
        assert "index" not in key or torch.equal(state[key], value)


def test_a_swin_over_images_becomes_one_over_time():
    """As the authors of Video Swin begin theirs: the first convolution and the tables are repeated."""
    from torchvision.models.video import SwinTransformer3d

    file = torchvision_swin(4)
    model = SwinTransformer3d([2, 4, 4], 24, [2], [2], [8, 4, 4], num_classes=5)
    tables = [f"features.{place}.attn.relative_position_bias_table" for place in ("1.0", "1.1", "0.0", "0.1")]
    images = file.state_dict()
    state = {**model.state_dict(), "patch_embed.proj.weight": images["features.0.0.weight"]}
    state |= {new: images[old] for old, new in zip(tables[:2], tables[2:], strict=True)}
    given = ("window_bias=swin", "inflate=mean")
    words = [finding.message for finding in propose(shape_mismatch, state, model)]
    assert any("windows of 4x4 in the file and of 8x4x4 in the model" in said for said in words)
    after = repaired(shape_mismatch, state, model, adapt=given)
    assert all(torch.equal(after[table], state[table].repeat(15, 1)) for table in tables[2:])
    assert torch.equal(after["patch_embed.proj.weight"].sum(2), state["patch_embed.proj.weight"])


def test_load_takes_recipes(tmp_path):
    torch.save(vit().state_dict(), tmp_path / "vit.pth")
    model = vit(384)
    assert ckptfix.load(model, tmp_path / "vit.pth", adapt={"pos_embed": "timm"}).exit_code == 0

    from timm.layers import resample_abs_pos_embed

    before = torch.load(tmp_path / "vit.pth", weights_only=True)["pos_embed"]
    assert torch.equal(model.pos_embed, resample_abs_pos_embed(before, [24, 24]))


def test_the_rows_before_the_positions_of_a_text_stay():
    """RoBERTa, BART and OPT count their positions from the third row on."""
    old = torch.randn(514, 8)
    file, model = {"embed_positions.weight": old}, {"embed_positions.weight": torch.zeros(1026, 8)}
    target = target_from_checkpoint(open_state_dict(model))
    after = repaired(shape_mismatch, file, target, adapt=("pos_embed=linear",))["embed_positions.weight"]
    assert torch.equal(after[:2], old[:2])
    stretched = nn.functional.interpolate(old[2:].T[None], 1024, mode="linear", align_corners=False)
    assert torch.equal(after[2:], stretched[0].T)


def test_as_many_positions_of_a_grid_with_other_sides():
    """Nothing but the user says so: both have the same shape."""
    from timm.layers import resample_abs_pos_embed

    file, model = vit((160, 96)), vit((96, 160))
    old = file.state_dict()["pos_embed"]
    for text in ("pos_embed=timm:10x6", "pos_embed=timm:10x6:6x10"):
        repaired_state, report = ckptfix.repair_state_dict(file.state_dict(), model, adapt=text, values=False)
        assert torch.equal(repaired_state["pos_embed"], resample_abs_pos_embed(old, [6, 10], [10, 6]))
        assert report.exit_code == 0
    for text in ("pos_embed=timm:6x10", "pos_embed=timm"):
        repaired_state, _ = ckptfix.repair_state_dict(file.state_dict(), model, adapt=text, values=False)
        assert torch.equal(repaired_state["pos_embed"], old)


def test_tables_of_distances_are_never_cut():
    """The middle of a table is the distance 0. MaxViT has those of both directions in one, as in timm. A name of images
    around them does not make them a grid."""
    file = {
        "vision_encoder.pos_embed.height_rel": torch.ones(27, 8),
        "rel_pos.relative_position_bias_table": torch.ones(2, 13, 13),
    }
    model = {
        "vision_encoder.pos_embed.height_rel": torch.ones(13, 8),
        "rel_pos.relative_position_bias_table": torch.ones(2, 7, 9),
    }
    found = propose(shape_mismatch, file, target_from_checkpoint(open_state_dict(model)))
    options = [[each.options for each in one.remedies if "adapt" in dict(each.options)] for one in found]
    assert options[0] == [(("adapt", ("pos_embed=linear",)),)]
    assert options[1] == [(("adapt", (f"window_bias={name}",)),) for name in ("swin", "beit", "bilinear")]
    assert "windows of 7x7 in the file and of 4x5 in the model" in found[1].message


@pytest.mark.parametrize("tokens", [0, 1, 2, 5])
@pytest.mark.parametrize("is_known", [True, False], ids=["both", "the file only"])
def test_grids_of_the_configurations_beside_the_files(is_known, tokens, tmp_path):
    """The tokens have no parameters of their own here; a configuration that is for another grid is not taken."""
    from timm.layers import resample_abs_pos_embed

    sizes = {"old": (6, 12), "new": (8, 16) if is_known else (9, 9)}
    for name, grid in sizes.items():
        (tmp_path / name).mkdir()
        table = torch.randn(1, tokens + grid[0] * grid[1], 8)
        save_file({"embeddings.position_embeddings": table}, tmp_path / name / "model.safetensors")
    config = tmp_path / "old" / "config.json"
    config.write_text(json.dumps({"vision_config": {"image_size": [48, 96], "patch_size": 8}}))
    if is_known:
        new = {"transformers_version": "5.0.0", "image_size": [64, 128], "patch_size": 8}
        (tmp_path / "new" / "config.json").write_text(json.dumps(new))
    file, settings = tmp_path / "old" / "model.safetensors", {"like": tmp_path / "new" / "model.safetensors"}
    (found,) = ckptfix.check(file, **settings).findings
    assert found.remedies[0].options == (("adapt", ("pos_embed=plain",)),)
    assert f"a grid of 6x12 in the file{f' (and {tokens} ' if tokens else ','}" in found.message
    ckptfix.repair(file, **settings, adapt=["pos_embed=timm"], output=tmp_path / "out.safetensors")
    (table,), (made,) = (list(load_file(path).values()) for path in (file, tmp_path / "out.safetensors"))
    want = resample_abs_pos_embed(table, list(sizes["new"]), [6, 12], num_prefix_tokens=tokens)
    assert torch.equal(made, want)
    for wrong in ('{"image_size": 48, "patch_size": 8}', "not JSON"):
        config.write_text(wrong)
        (found,) = ckptfix.check(file, **settings).findings
        assert "6x12 in the file" not in found.message


@pytest.mark.parametrize("own", [{}, {"img_size": [48, 96]}], ids=["its own size", "another size"])
def test_the_configuration_of_timm_says_no_patches(own, tmp_path):
    """It has the size of the images of the model as it was published, and in ``model_args`` what was changed."""
    published = [3, 32, 32] if own else [3, 48, 96]
    for name, grid in (("old", (6, 12)), ("new", (9, 9))):
        (tmp_path / name).mkdir()
        table = torch.randn(1, grid[0] * grid[1], 8)
        kernel = {"patch_embed.proj.weight": torch.ones(8, 3, 8, 8)}
        save_file({"pos_embed": table, **kernel}, tmp_path / name / "model.safetensors")
    config = {"architecture": "vit", "pretrained_cfg": {"input_size": published}, "model_args": own}
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    (found,) = ckptfix.check(tmp_path / "old", like=tmp_path / "new" / "model.safetensors").findings
    assert "a grid of 6x12 in the file, of 9x9 in the model" in found.message
