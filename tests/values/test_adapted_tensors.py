"""Each formula of ``--adapt`` gives the same bits as the library function that it is named for."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ckptfix
from ckptfix.core.edits import Adapt
from ckptfix.core.plan import Plan, Step
from ckptfix.engine.applying import apply_plan
from ckptfix.errors import PlanError
from ckptfix.reading.opening import open_state_dict
from tests import checks

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
GRIDS = [((14, 14), (24, 24)), ((14, 14), (7, 7)), ((14, 14), (12, 20)), ((8, 10), (16, 9))]


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    checks.assert_same({"t": got}, {"t": want.contiguous()})


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def adapted(tensor: torch.Tensor, recipe: str, shape: tuple[int, ...], grids: Any = (), rows: Any = ()) -> torch.Tensor:
    edit = Adapt("t", "t", recipe, name(tensor.dtype), tuple(tensor.shape), shape, tuple(grids), tuple(rows))
    plan = Plan.from_json(Plan((Step("FIT103", (edit,)),)).to_json())
    result: torch.Tensor = apply_plan(plan, open_state_dict({"t": tensor})).state_dict()["t"]
    return result


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("tokens", [0, 1, 2, 5])
@pytest.mark.parametrize(("old", "new"), GRIDS, ids=str)
def test_positions_as_timm(dtype, tokens, old, new):
    from timm.layers import resample_abs_pos_embed

    table = torch.randn(1, tokens + old[0] * old[1], 12).to(dtype)
    expected = resample_abs_pos_embed(table, list(new), list(old), num_prefix_tokens=tokens)
    assert_same(adapted(table, "pos_embed=timm", tuple(expected.shape), (*old, *new)), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize(("old", "new"), GRIDS, ids=str)
def test_positions_as_yolos(dtype, old, new):
    """The tokens of detections are last, in the tables of all layers."""
    from transformers import YolosConfig
    from transformers.models.yolos import modeling_yolos

    sides, size = [2 * side for side in old], tuple(2 * side for side in new)
    config = YolosConfig(hidden_size=12, num_hidden_layers=4, image_size=sides, patch_size=2, num_detection_tokens=5)
    first, others = torch.randn(1, 6 + math.prod(old), 12), torch.randn(3, 1, 6 + math.prod(old), 12)
    middle = modeling_yolos.InterpolateMidPositionEmbeddings(config).to(dtype)
    middle.load_state_dict({"mid_position_embeddings": others})
    expected = modeling_yolos.InterpolateInitialPositionEmbeddings(config)(first.to(dtype), size)
    for table, want in ((first, expected), (others, middle(size).detach())):
        assert_same(adapted(table.to(dtype), "pos_embed=yolos", tuple(want.shape), (*old, *new)), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_maps_of_positions_as_timm(dtype):
    from timm.layers import resample_abs_pos_embed_nhwc

    table = torch.randn(1, 8, 10, 12).to(dtype)
    expected = resample_abs_pos_embed_nhwc(table, [16, 9])
    assert_same(adapted(table, "pos_embed=timm", tuple(expected.shape), (8, 10, 16, 9)), expected)
    turned = table.permute(0, 3, 1, 2).contiguous()
    assert_same(adapted(turned, "pos_embed=timm", (1, 12, 16, 9), (8, 10, 16, 9)), expected.permute(0, 3, 1, 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize(("blocks", "old", "new"), [(16, 4, 9), (4, 9, 6), (1, 7, 4)])
def test_positions_in_blocks_as_timm(dtype, blocks, old, new):
    from timm.models.nest import resize_pos_embed

    table, shape = torch.randn(1, blocks, old**2, 12).to(dtype), (1, blocks, new**2, 12)
    sides = [math.isqrt(blocks) * points for points in (old, old, new, new)]
    expected = resize_pos_embed(table, torch.empty(shape))
    assert_same(adapted(table, "pos_embed=plain", shape, sides), expected)


@pytest.mark.parametrize("side", [24, 7])
def test_positions_as_open_clip(side):
    """In float32, as torch has no antialiased resampling of halves on the CPU: there open_clip's own function fails."""
    from open_clip.model import resize_pos_embed

    model = nn.Module()
    model.visual = nn.Module()
    model.visual.grid_size = side
    state = {"visual.positional_embedding": torch.randn(197, 12)}
    table = state["visual.positional_embedding"]
    resize_pos_embed(state, model)
    expected = state["visual.positional_embedding"]
    assert_same(adapted(table, "pos_embed=timm", tuple(expected.shape), (14, 14, side, side)), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("number", [120, 32])
def test_positions_of_texts_as_open_clip(dtype, number):
    from open_clip.model import resize_text_pos_embed

    model = nn.Module()
    model.positional_embedding = nn.Parameter(torch.zeros(number, 12))
    table = torch.randn(77, 12).to(dtype)
    state = {"positional_embedding": table}
    resize_text_pos_embed(state, model)
    expected = state["positional_embedding"]
    assert_same(adapted(table, "pos_embed=linear", tuple(expected.shape), (77, number)), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("side", [24, 7])
def test_positions_as_torchvision(dtype, side):
    from torchvision.models.vision_transformer import interpolate_embeddings

    table = torch.randn(1, 197, 12).to(dtype)
    expected = interpolate_embeddings(16 * side, 16, {"encoder.pos_embedding": table})["encoder.pos_embedding"]
    assert_same(adapted(table, "pos_embed=torchvision", tuple(expected.shape), (14, 14, side, side)), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("new", [(24, 24), (7, 7), (12, 20)], ids=str)
@pytest.mark.parametrize("tokens", [1, 2])
def test_positions_as_transformers(tokens, dtype, new):
    """Of ViT, and of DeiT, which has a second token."""
    from transformers import DeiTConfig, ViTConfig
    from transformers.models.deit.modeling_deit import DeiTEmbeddings
    from transformers.models.vit.modeling_vit import ViTEmbeddings

    sizes = {"hidden_size": 12, "num_attention_heads": 1, "image_size": 224, "patch_size": 16}
    made = ViTEmbeddings(ViTConfig(**sizes)) if tokens == 1 else DeiTEmbeddings(DeiTConfig(**sizes))
    embeddings: Any = made.to(dtype)
    table = torch.randn(1, tokens + 196, 12).to(dtype)
    embeddings.position_embeddings.data = table
    with torch.no_grad():
        patches = torch.zeros(1, tokens + new[0] * new[1], 12)
        expected = embeddings.interpolate_pos_encoding(patches, 16 * new[0], 16 * new[1])
    assert_same(adapted(table, "pos_embed=plain", tuple(expected.shape), (14, 14, *new)), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("new", [(24, 24), (7, 7), (12, 20)], ids=str)
def test_positions_as_dinov2_of_transformers(dtype, new):
    from transformers import Dinov2Config
    from transformers.models.dinov2.modeling_dinov2 import Dinov2Embeddings

    sizes = {"hidden_size": 12, "num_attention_heads": 1, "image_size": 224, "patch_size": 16}
    embeddings: Any = Dinov2Embeddings(Dinov2Config(**sizes)).to(dtype)
    table = torch.randn(1, 197, 12).to(dtype)
    embeddings.position_embeddings.data = table
    with torch.no_grad():
        patches = torch.zeros(1, 1 + new[0] * new[1], 12)
        expected = embeddings.interpolate_pos_encoding(patches, 16 * new[0], 16 * new[1])
    assert_same(adapted(table, "pos_embed=dinov2", tuple(expected.shape), (14, 14, *new)), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("new", [(24, 24), (7, 7), (12, 20)], ids=str)
def test_positions_as_siglip2_of_transformers(dtype, new):
    from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

    table = torch.randn(196, 12).to(dtype)
    made = Siglip2VisionEmbeddings.resize_positional_embeddings(
        table.reshape(14, 14, 12), torch.tensor([new]), new[0] * new[1]
    )
    assert_same(adapted(table, "pos_embed=siglip2", tuple(made.shape[1:]), (14, 14, *new)), made[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("new", [(24, 24), (7, 7), (12, 20)], ids=str)
def test_positions_as_dpt_of_transformers(dtype, new):
    from transformers.models.dpt.modeling_dpt import DPTViTEmbeddings

    table = torch.randn(1, 197, 12).to(dtype)
    expected = DPTViTEmbeddings._resize_pos_embed(None, table, *new)
    assert_same(adapted(table, "pos_embed=dpt", tuple(expected.shape), (14, 14, *new)), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("new", [(24, 24), (7, 7), (12, 20)], ids=str)
@pytest.mark.parametrize("model", ["nearest", "vilt", "radio"])
def test_positions_as_other_models_of_transformers(model, dtype, new, monkeypatch):
    """TimeSformer and ViLT have no function for it: what their forward pass gives ``interpolate`` is recorded."""
    import transformers

    made, resize = [], torch.nn.functional.interpolate

    def recorded(*given, **named):
        made.append(resize(*given, **named))
        return made[-1]

    sizes = {"hidden_size": 12, "num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 12}
    image, grid = torch.zeros(1, 3, 16 * new[0], 16 * new[1], dtype=dtype), (14, 14, *new)
    monkeypatch.setattr(torch.nn.functional, "interpolate", recorded)
    if model == "radio":
        from transformers.models.radio.modeling_radio import RadioPatchEmbeddings

        radio: Any = RadioPatchEmbeddings(transformers.RadioConfig(**sizes, max_img_size=224)).to(dtype)
        table = radio.position_embedding.data = torch.randn(1, 196, 12).to(dtype)
        if new[0] == new[1]:  # of others it cuts out a part
            want = radio._interpolate_position_embedding(new, dtype)
            assert_same(adapted(table, "pos_embed=radio", tuple(want.shape), grid), want)
        return
    if model == "vilt":
        from transformers.models.vilt.modeling_vilt import ViltEmbeddings

        config = transformers.ViltConfig(**sizes, image_size=224, patch_size=16, max_image_length=-1)
        embeddings: Any = ViltEmbeddings(config).to(dtype)
    else:
        from transformers.models.timesformer.modeling_timesformer import TimesformerEmbeddings

        embeddings = TimesformerEmbeddings(transformers.TimesformerConfig(**sizes, image_size=224)).to(dtype)
    table = embeddings.position_embeddings.data = torch.randn(1, 197, 12).to(dtype)
    if model == "vilt":
        embeddings.visual_embed(image, torch.ones(1, *image.shape[2:]), -1)
    else:
        embeddings(image[:, None].expand(1, 8, -1, -1, -1))
    (grown,) = (each for each in made if each.shape[1] == 12)
    want = torch.cat((table[:, :1], grown.flatten(2).mT), 1)
    assert_same(adapted(table, f"pos_embed={model}", tuple(want.shape), grid), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("side", [24, 7])
def test_window_biases_as_beit_of_transformers(dtype, side):
    """Resized, a table gives a model of that size the biases that its own layer computes for larger images."""
    from transformers import BeitConfig
    from transformers.models.beit.modeling_beit import BeitRelativePositionBias

    sizes = {"hidden_size": 12, "num_attention_heads": 3, "patch_size": 16}
    small, large = (BeitRelativePositionBias(BeitConfig(**sizes, image_size=16 * n)).to(dtype) for n in (14, side))
    table = small.relative_position_bias_table.data = torch.randn(732, 3).to(dtype)
    with torch.no_grad():
        want = small((side, side))
        shape = ((2 * side - 1) ** 2 + 3, 3)
        grids = (27, 27, 2 * side - 1, 2 * side - 1)
        large.relative_position_bias_table.data = adapted(table, "window_bias=bilinear", shape, grids)
        assert_same(large((side, side)), want)


def swins_own(table: torch.Tensor, side: int) -> torch.Tensor:
    """What ``load_pretrained`` of Swin's own repository does to a table, which no package ships."""
    rows, heads = table.shape
    old = int(rows**0.5)
    image = table.permute(1, 0).view(1, heads, old, old)
    resized = torch.nn.functional.interpolate(image, size=(side, side), mode="bicubic")
    return resized.view(heads, side * side).permute(1, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("window", [12, 4])
def test_window_biases_as_swin(dtype, window):
    table, side = torch.randn(169, 3).to(dtype), 2 * window - 1
    expected = swins_own(table, side)
    assert_same(adapted(table, "window_bias=swin", tuple(expected.shape), (13, 13, side, side)), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize(
    ("old", "new"), [((7, 7), (12, 12)), ((14, 14), (24, 24)), ((7, 7), (4, 4)), ((7, 5), (8, 12))]
)
def test_window_biases_as_timm(dtype, tokens, old, new):
    from timm.layers.pos_embed_rel import resize_rel_pos_bias_table, resize_rel_pos_bias_table_simple

    sides = tuple(2 * side - 1 for side in (*old, *new))
    table = torch.randn(sides[0] * sides[1] + tokens, 3).to(dtype)
    shape = (sides[2] * sides[3] + tokens, 3)
    expected = resize_rel_pos_bias_table(table, new, shape, old_window_size=old)
    assert_same(adapted(table, "window_bias=beit", shape, sides), expected)
    if old[0] == old[1]:  # timm's simple function takes no others
        expected = resize_rel_pos_bias_table_simple(table, new, shape)
        assert_same(adapted(table, "window_bias=swin", shape, sides), expected)
    if tokens == 0:  # MaxViT has the heads first
        grid, made = table.T.reshape(3, *sides[:2]).contiguous(), (3, *sides[2:])
        assert_same(adapted(grid, "window_bias=beit", made, sides), resize_rel_pos_bias_table(grid, new, made))
        expected = resize_rel_pos_bias_table_simple(grid, new, made)
        assert_same(adapted(grid, "window_bias=swin", made, sides), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("side", [24, 7])
def test_distances_in_one_direction_as_sam(dtype, side):
    from timm.models.vision_transformer_sam import get_rel_pos

    table = torch.randn(27, 8).to(dtype)
    found = adapted(table, "pos_embed=linear", (2 * side - 1, 8), (27, 2 * side - 1))
    assert_same(get_rel_pos(side, side, found), get_rel_pos(side, side, table))


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize(
    ("old", "new"), [((16, 16), (32, 32)), ((16, 16), (8, 8)), ((16, 16), (14, 14)), ((4, 4), (4, 6))]
)
def test_patch_embeddings_as_timm(dtype, old, new):
    """Not to the last bit: the pseudoinverse is LAPACK's, whose threads and builds round in other ways."""
    from timm.layers.patch_embed import resample_patch_embed

    weight = torch.randn(8, 3, *old).to(dtype)
    expected = resample_patch_embed(weight, list(new))
    found = adapted(weight, "patch_embed=timm", tuple(expected.shape))
    torch.testing.assert_close(
        found, expected, rtol=1e-4 if dtype == torch.float32 else torch.finfo(dtype).eps, atol=1e-4
    )


def test_patch_embeddings_over_time_and_as_linear_layers():
    from timm.layers.patch_embed import PatchEmbedInterpolator, resample_patch_embed

    weight = torch.randn(8, 3, 2, 14, 14)
    each = [resample_patch_embed(one, [16, 16]) for one in weight.unbind(2)]
    torch.testing.assert_close(adapted(weight, "patch_embed=timm", (8, 3, 2, 16, 16)), torch.stack(each, 2))
    linear = torch.randn(8, 16 * 16 * 3)
    want = PatchEmbedInterpolator((16, 16), in_chans=3, embed_dim=8).resample_linear_weight(linear, (14, 14))
    torch.testing.assert_close(adapted(linear, "patch_embed=timm", tuple(want.shape)), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("side", [12, 4])
def test_biases_of_distances_as_timm(dtype, side):
    from timm.layers import resize_rel_pos_bias_table_levit

    table = torch.randn(3, 49).to(dtype)
    expected = resize_rel_pos_bias_table_levit(table.T, (side * side, 3)).T
    assert_same(adapted(table, "window_bias=levit", (3, side * side), (7, 7, side, side)), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("side", [13, 9])
def test_window_biases_over_time_as_video_swin(dtype, side):
    """Its ``inflate_weights`` resizes the table of images and repeats it for each distance in time."""
    table = torch.randn(169, 3).to(dtype)
    image = table if side == 13 else swins_own(table, side)
    found = adapted(table, "window_bias=swin", (15 * side * side, 3), (13, 13, 15, side, side))
    assert_same(found, image.repeat(15, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize(("old", "new"), [(3, 1), (3, 2), (3, 4), (3, 5), (3, 13), (12, 4)])
def test_input_channels_as_timm(dtype, old, new):
    from timm.models import adapt_input_conv

    weight = torch.randn(8, old, 5, 7).to(dtype)
    expected = adapt_input_conv(1 if old == 12 else new, weight)
    assert_same(adapted(weight, "in_chans=timm", (8, new, 5, 7)), expected)


@pytest.mark.parametrize(("old", "new"), [(1, 3), (4, 3), (3, 6), (13, 3), (3, 1)])
@pytest.mark.parametrize("recipe", ["timm", "mean"])
def test_input_channels_keep_what_a_grey_image_gives(old, new, recipe):
    weight = torch.randn(8, old, 3, 3)
    found = adapted(weight, f"in_chans={recipe}", (8, new, 3, 3))
    if (recipe, old, new) in {("timm", 1, 3), ("timm", 3, 6), ("timm", 3, 1)} or recipe == "mean":
        torch.testing.assert_close(found.sum(1), weight.sum(1))
    if recipe == "mean":
        assert torch.equal(found, found[:, :1].expand_as(found))


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_kernels_over_time(dtype):
    weight = torch.randn(8, 3, 5, 7).to(dtype)
    assert_same(adapted(weight, "inflate=mean", (8, 3, 4, 5, 7)), (weight / 4).unsqueeze(2).repeat(1, 1, 4, 1, 1))
    centre = adapted(weight, "inflate=centre", (8, 3, 5, 5, 7))
    assert_same(centre[:, :, 2].contiguous(), weight)
    assert centre.count_nonzero() == weight.count_nonzero()


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_rows_of_a_vocabulary_stay_bit_for_bit(dtype):
    table = torch.randn(50, 6).to(dtype)
    assert_same(adapted(table, "vocab=cut", (40, 6)), table[:40])
    assert_same(adapted(table, "vocab=pad:zeros", (60, 6)), torch.cat((table, table.new_zeros(10, 6))))
    mean = table.double().mean(0, keepdim=True).to(dtype)
    assert_same(adapted(table, "vocab=pad:mean", (60, 6)), torch.cat((table, mean.expand(10, 6))))


def test_the_values_are_read_in_any_piece():
    table = torch.randn(1, 197, 12)
    edit = Adapt("t", "t", "pos_embed=timm", "float32", (1, 197, 12), (1, 50, 12), (14, 14, 7, 7))
    spec = apply_plan(Plan((Step("FIT103", (edit,)),)), open_state_dict({"t": table})).specs["t"]
    assert spec.storage is not None
    source = spec.storage.source
    assert source.nbytes == 50 * 12 * 4
    whole = bytes(source.read(0, source.nbytes))
    assert b"".join(bytes(source.read(at, min(at + 7, source.nbytes))) for at in range(0, source.nbytes, 7)) == whole


@pytest.mark.parametrize(
    ("recipe", "before", "shape", "grids", "rows"),
    [
        pytest.param("pos_embed=bicubic", (1, 5, 2), (1, 10, 2), (2, 2, 3, 3), (), id="an unknown recipe"),
        pytest.param("vocab=cut", (5, 2), (6, 2), (), (), id="a cut that is longer"),
        pytest.param("vocab=pad:mean", (5, 2), (6, 3), (), (), id="rows of another width"),
        pytest.param("head", (5, 2), (2, 2), (), (0, 6), id="a class that is not there"),
        pytest.param("head", (5, 2), (2, 2), (), (0,), id="fewer rows than classes"),
        pytest.param("depth", (5, 2), (6, 2), (), (), id="a copy of another shape"),
        pytest.param("vocab=cut", (4, 2), (3, 2), (), (), id="another file"),
    ],
)
def test_a_plan_that_does_not_fit(recipe, before, shape, grids, rows):
    edit = Adapt("t", "t", recipe, "float32", before, shape, grids, rows)
    with pytest.raises(PlanError, match="the plan belongs to another file"):
        apply_plan(Plan((Step("FIT103", (edit,)),)), open_state_dict({"t": torch.zeros(5, 2)}))


def test_a_plan_whose_grids_are_wrong(tmp_path):
    edit = Adapt("t", "t", "pos_embed=timm", "float32", (1, 5, 2), (1, 10, 2), (2, 2, 4, 4))
    plan = Plan((Step("FIT103", (edit,)),))
    with pytest.raises(PlanError, match="cannot be adapted by pos_embed=timm"):
        ckptfix.repair({"t": torch.zeros(1, 5, 2)}, plan=plan, output=tmp_path / "out.pth")


@given(
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.data(),
)
def test_rows_are_those_of_the_file_in_any_order_and_layout(old, width, dtype, is_turned, data):
    """NaN and all: the bytes are moved, not computed."""
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    table = torch.randint(-(2**15), 2**15, (width, old) if is_turned else (old, width), dtype=bits).view(dtype)
    table = table.T if is_turned else table
    rows = data.draw(st.lists(st.integers(0, old - 1), min_size=1, max_size=12))
    assert_same(adapted(table, "head", (len(rows), width), (), rows), table[rows])
