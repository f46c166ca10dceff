"""Which tensors of another shape a recipe is for, on models of the libraries that write them."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
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
from tests.rules.resized_models import (
    BY_CLASS,
    KNOWN,
    NARROW,
    gpt2,
    open_clip,
    pair,
    vit,
)


def stem(channels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3))


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


@pytest.mark.parametrize("name", sorted(BY_CLASS - {"AIMv2", "Swin v2 with absolute positions"}))
def test_recipes_of_classes_can_be_given_for_a_file_to_fit(name):
    (file, model), (_, recipe, _) = pair(name), KNOWN[name]
    target = target_from_checkpoint(open_state_dict(model.state_dict()))
    after = repaired(shape_mismatch, file.state_dict(), target, adapt=(recipe,))
    assert {key: value.shape for key, value in after.items()} == {k: v.shape for k, v in model.state_dict().items()}


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


def test_keys_name_what_a_recipe_is_for():
    file, model = open_clip(224), open_clip(384, 100)
    adapted, left = propose(shape_mismatch, file.state_dict(), model, adapt=("pos_embed@visual.*=timm",))[::-1]
    assert (adapted.keys, left.keys) == (("visual.positional_embedding",), ("positional_embedding",))
    assert left.fix is None


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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pos_embd=timm", "did you mean pos_embed"),
        ("pos_embed", "write it as NAME=RECIPE"),
        ("pos_embed@=timm", "write it as NAME=RECIPE"),
        ("pos_embed=tim", "did you mean timm"),
        ("pos_embed=timm:14", "is not a grid|^$"),
        ("pos_embed=timm:0x3", "'0x3' is not a grid"),
        ("pos_embed=timm:1x1:2x2:3x3", "3 grids; write those of the file and the model"),
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
    with pytest.raises(UsageError, match=r"vocab.*adapt=.*vocab.* both apply to tok_embed\.weight; give one"):
        propose(shape_mismatch, file.state_dict(), model, adapt=given)
    for fitting in (given[:1] * 2, ("vocab=cut", given[0]), ("vocab=pad:target", "vocab@tok*=pad:zeros")):
        assert any(finding.fix for finding in propose(shape_mismatch, file.state_dict(), model, adapt=fitting))


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


@pytest.mark.parametrize("kind", ["Model", "ForImageClassification"])
@pytest.mark.parametrize(("name", "recipe"), [("Swin", "swin"), ("Beit", "bilinear")])
def test_tables_under_the_names_of_transformers_4(name, kind, recipe, tmp_path):
    """Its loader renames them, but leaves out those of another shape, of which it keeps the new names only."""
    import transformers

    def make(**size):
        swin = {"embed_dim": 8, "depths": [1, 2], "num_heads": [2, 2], "window_size": 7, "image_size": 56}
        own = swin if name == "Swin" else {**NARROW, "use_relative_position_bias": True, "image_size": 64}
        config = getattr(transformers, f"{name}Config")(**{**own, **size}, num_labels=3)
        return getattr(transformers, f"{name}{kind}")(config)

    file, model = make(), make(image_size=64, window_size=4) if name == "Swin" else make(image_size=96)
    file.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert not stored.keys() & {key for key in model.state_dict() if key.endswith("bias_table")}
    repaired, report = ckptfix.repair_state_dict(stored, model, adapt=f"window_bias={recipe}")
    assert report.exit_code == 0
    model.load_state_dict(repaired)
    assert [finding.code for finding in report.findings if finding.code.startswith(("KEY", "FIT"))] == [
        "KEY106",
        "FIT103",
    ]


def test_load_takes_recipes(tmp_path):
    torch.save(vit().state_dict(), tmp_path / "vit.pth")
    model = vit(384)
    assert ckptfix.load(model, tmp_path / "vit.pth", adapt={"pos_embed": "timm"}).exit_code == 0

    from timm.layers import resample_abs_pos_embed

    before = torch.load(tmp_path / "vit.pth", weights_only=True)["pos_embed"]
    assert torch.equal(model.pos_embed, resample_abs_pos_embed(before, [24, 24]))
