"""Of which grids the rows of tables of positions are, and which recipes resample them."""

import json
import re
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ckptfix
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.finding import Applicability
from ckptfix.core.target import target_from_checkpoint
from ckptfix.errors import UsageError
from ckptfix.reading.opening import open_state_dict
from ckptfix.rules.fit103_shape_mismatch import shape_mismatch
from tests.checks import OnAnotherDevice
from tests.rules.proposals import propose, repaired
from tests.rules.resized_models import (
    NARROW,
    SIZES,
    offered,
    open_clip,
    transformers_model,
    transformers_vit,
    vit,
)


def clip(img_size: int, length: int = 77) -> Any:
    from transformers import CLIPConfig, CLIPModel

    vision, text = {"image_size": img_size, "patch_size": 32}, {"max_position_embeddings": length, "vocab_size": 99}
    return CLIPModel(CLIPConfig(vision_config={**NARROW, **vision}, text_config={**NARROW, **text}))


def dino(size: int) -> Any:
    from transformers import Dinov2Config, Dinov2Model

    return Dinov2Model(Dinov2Config(**NARROW, image_size=size, patch_size=16))


def whisper_of(positions: int) -> Any:
    from transformers import WhisperConfig, WhisperModel

    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in SIZES.items()}
    return WhisperModel(
        WhisperConfig(d_model=32, vocab_size=99, **sides, max_source_positions=positions, pad_token_id=1)
    )


def test_positions_over_time_are_not_those_of_an_image():
    """16 moments of 14x14 patches are 56x56, too, and transformers' own function takes them for that."""
    file, model = (transformers_model("Vivit", **NARROW, image_size=size) for size in (224, 448))
    state = file.state_dict()
    (finding,) = propose(shape_mismatch, state, model)
    assert "one per patch and frame; no library has a function to resize them" in finding.message
    assert not any(name == "adapt" for remedy in finding.remedies for name, _ in remedy.options)
    with pytest.raises(UsageError, match=r"is not for embeddings\.position_embeddings: 3137 positions"):
        propose(shape_mismatch, state, model, adapt=("pos_embed=plain",))
    like = open_state_dict(model.state_dict())
    (finding,) = propose(shape_mismatch, state, target_from_checkpoint(like))
    assert "may include frames" in finding.message
    config = json.loads(model.config.to_json_string())
    (finding,) = propose(shape_mismatch, state, target_from_checkpoint(like, config))
    assert "one per patch and frame" in finding.message


def mllama(tiles: int) -> Any:
    from transformers.models.mllama.configuration_mllama import MllamaVisionConfig
    from transformers.models.mllama.modeling_mllama import MllamaVisionModel

    ratios = [[1, number] for number in range(1, tiles + 1)]
    sizes = {"hidden_size": 32, "attention_heads": 4, "num_hidden_layers": 2, "num_global_layers": 1}
    return MllamaVisionModel(
        MllamaVisionConfig(
            **sizes, image_size=28, max_num_tiles=tiles, supported_aspect_ratios=ratios, intermediate_layers_indices=[0]
        )
    )


def wav2vec2_bert(left: int) -> Any:
    own = {"feature_projection_input_dim": 16, "left_max_position_embeddings": left}
    return transformers_model("Wav2Vec2Bert", **NARROW, **own)


@pytest.mark.parametrize(
    ("make", "number", "words"), [(mllama, 3, "positions of the tiles"), (wav2vec2_bert, 1, "distances between")]
)
def test_tables_that_no_library_resizes(make, number, words):
    (finding,) = propose(shape_mismatch, make(4).state_dict(), make(2))
    assert len(finding.keys) == number
    assert words in finding.message
    assert "no library has a function to resize them" in finding.message
    with pytest.raises(UsageError, match=words):
        propose(shape_mismatch, make(4).state_dict(), make(2), adapt=("pos_embed=linear",))
    if make is wav2vec2_bert:
        (finding,) = propose(shape_mismatch, make(4).state_dict(), make(2), adapt=("pos_embed@*distance*=cut",))
        assert "adapted to the target's shape by pos_embed=cut" in finding.message


@pytest.mark.parametrize("key", ["temporal_embed.pos_embed", "image_pos_embed.row_embeddings.weight", "time.pos_embed"])
def test_positions_of_one_axis_are_not_those_of_a_grid(key):
    file, like = ({key: torch.randn(1, number, 8)} for number in (16, 36))
    (finding,) = propose(shape_mismatch, file, target_from_checkpoint(open_state_dict(like)))
    assert finding.message.endswith("16 positions in the file and 36 in the model")
    assert finding.remedies[0].options == (("adapt", ("pos_embed=linear",)),)


def test_positions_of_the_text_of_a_model_named_for_images():
    from transformers import GroupViTTextConfig, GroupViTTextModel

    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    file, model = (GroupViTTextModel(GroupViTTextConfig(**small, max_position_embeddings=n)) for n in (64, 100))
    (finding,) = propose(shape_mismatch, file.state_dict(), model)
    assert finding.remedies[0].options == (("adapt", ("pos_embed=linear",)),)


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


def test_a_short_text_is_not_taken_for_the_patches_next_to_it():
    """64 positions could be the 49 patches and 15 tokens."""
    file, model = open_clip(224), open_clip(224, 64)
    (finding,) = propose(shape_mismatch, file.state_dict(), model, adapt=("pos_embed=cut",))
    assert (finding.keys, finding.fix is not None) == (("positional_embedding",), True)


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


def test_a_spectrogram_has_frequencies_and_times(tmp_path):
    """The grid of AST's model is known, and that of a file by the configuration next to it."""
    from transformers import ASTConfig, ASTModel

    old, new = (ASTModel(ASTConfig(**NARROW, max_length=size)) for size in (512, 1024))
    (finding,) = propose(shape_mismatch, old.state_dict(), new)
    assert "602 positions are not those of a square grid and 2 tokens" in finding.message
    old.save_pretrained(tmp_path)
    (finding,) = ckptfix.check(tmp_path, new, select="FIT103").findings
    assert "a grid of 12x50 in the file (and 2 tokens), of 12x101 in the model" in finding.message


def test_the_grid_of_a_backbone_is_in_its_part_of_the_configuration(tmp_path):
    from transformers import VitPoseBackboneConfig, VitPoseConfig, VitPoseForPoseEstimation

    def model(*size):
        backbone = VitPoseBackboneConfig(**NARROW, image_size=list(size), out_indices=[1])
        return VitPoseForPoseEstimation(VitPoseConfig(backbone_config=backbone, num_labels=3))

    model(256, 192).save_pretrained(tmp_path)
    (finding,) = ckptfix.check(tmp_path, model(256, 256), select="FIT103").findings
    assert "a grid of 16x12 in the file (and 1 token), of 16x16 in the model" in finding.message
    assert finding.remedies[0].is_complete


def test_seggpt_has_a_class_token_in_its_table_only():
    from transformers import SegGptConfig, SegGptModel

    sizes = {"merge_index": 0, "intermediate_hidden_state_indices": [0], "mlp_dim": 8, "image_size": [256, 128]}
    old, new = (SegGptModel(SegGptConfig(**NARROW, **sizes, pretrain_image_size=size)) for size in (64, 96))
    (finding,) = propose(shape_mismatch, old.state_dict(), new)
    assert "a grid of 4x4 in the file (and 1 token), of 6x6 in the model" in finding.message
    assert finding.remedies[0].options == (("adapt", ("pos_embed=plain",)),)


def test_the_decoder_of_vitmae_has_no_formula_for_a_grid():
    """That of the decoder in transformers stretches all positions along one axis."""
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    sizes = {f"decoder_{name}": size for name, size in NARROW.items()}
    old, new = (ViTMAEForPreTraining(ViTMAEConfig(**NARROW, **sizes, image_size=size)) for size in (64, 96))
    encoder, decoder = propose(shape_mismatch, old.state_dict(), new)
    assert (decoder.keys, encoder.keys) == (("decoder.decoder_pos_embed",), ("vit.embeddings.position_embeddings",))
    assert ["the model is one of transformers" in each.remedies[0].text for each in (encoder, decoder)] == [True, False]


@pytest.mark.parametrize(("old", "new"), [((6, 6), (8, 8)), ((6, 4), (8, 10))], ids=["square", "not square"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1)], ids=["channels before the grid", "channels last"])
def test_a_table_that_is_a_grid_shows_its_sides(order, old, new):
    """Tables as in SAM, and as Swin's absolute positions."""
    before, after = (torch.randn(1, 24, *grid) for grid in (old, new))
    weights = {"patch_embed.proj.weight": torch.randn(24, 3, 4, 4), "blocks.0.attn.qkv.weight": torch.randn(72, 24)}
    target = target_from_checkpoint(open_state_dict({**weights, "pos_embed": after.permute(order).contiguous()}))
    file = {**weights, "pos_embed": before.permute(order).contiguous()}
    made = repaired(shape_mismatch, file, target, adapt=("pos_embed=timm",))["pos_embed"]
    expected = nn.functional.interpolate(before, new, mode="bicubic", antialias=True)
    assert torch.equal(made, expected.permute(order))


NOT_SQUARE = "give the file's grid: adapt=.pos_embed=timm:ROWSxCOLUMNS.$"


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


def test_another_number_of_tokens_is_said_where_the_grids_are_given():
    state = vit(reg_tokens=4).state_dict()
    with pytest.raises(UsageError) as caught:
        propose(shape_mismatch, state, vit(384), adapt=("pos_embed=timm:14x14:24x24",))
    said = (
        "not those of a grid of 14x14 and 1 token, but of one and 5 tokens, and no recipe changes the number of tokens"
    )
    assert str(caught.value).endswith(said)


def test_sinusoids_are_cut_and_never_stretched():
    short, long = (whisper_of(positions) for positions in (32, 64))
    key = "encoder.embed_positions.weight"
    assert offered(long, short) == [("pos_embed=cut",)]
    assert offered(short, long) == []
    after = repaired(shape_mismatch, long.state_dict(), short, adapt=("pos_embed=cut",))
    assert torch.equal(after[key], short.state_dict()[key])
    reference = target_from_checkpoint(open_state_dict(long.state_dict()))
    for target in (long, reference):
        after = repaired(shape_mismatch, short.state_dict(), target)
        assert torch.equal(after[key], long.state_dict()[key])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_longer_table_of_sinusoids_counts_as_trained(dtype: torch.dtype):
    short, long = whisper_of(32).state_dict(), whisper_of(64)
    done, report = ckptfix.repair_state_dict({key: value.to(dtype) for key, value in short.items()}, long)
    key = "encoder.embed_positions.weight"
    assert torch.equal(done[key].float(), long.state_dict()[key].to(done[key].dtype).float())
    assert report.coverage is not None
    assert report.coverage.untrained == 0


def test_a_table_on_another_device_is_compared(monkeypatch: pytest.MonkeyPatch):
    read = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda self, key: read(self, key).as_subclass(OnAnotherDevice))
    (finding,) = propose(shape_mismatch, whisper_of(32).state_dict(), whisper_of(64))
    assert finding.fix is not None
    assert finding.fix.applicability == Applicability.SAFE


def test_sinusoids_of_another_formula_are_not_replaced():
    """With the same frequencies and another first position, or other frequencies."""
    long = whisper_of(64)
    table = long.state_dict()["encoder.embed_positions.weight"]
    for other in (table[1:33], torch.sin(1.5 * torch.arange(32)[:, None] / torch.arange(1, 1 + table.shape[1]))):
        state = {**whisper_of(32).state_dict(), "encoder.embed_positions.weight": other.clone()}
        assert not any(finding.fix and finding.fix.edits for finding in propose(shape_mismatch, state, long))


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
    """The middle of a table is the distance 0. MaxViT has both directions in one table, as in timm. A name of images
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
def test_grids_of_the_configurations_next_to_the_files(is_known, tokens, tmp_path):
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
