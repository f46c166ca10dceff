"""Which tensors of another shape a recipe of ``--adapt`` is for, by models of the libraries and of our own."""

from typing import Any

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.target import target_from_checkpoint
from ckptfix.reading.opening import open_state_dict
from ckptfix.rules.fit103_shape_mismatch import shape_mismatch
from tests.rules.proposals import propose, repaired
from tests.rules.resized_models import (
    BY_CLASS,
    KNOWN,
    NARROW,
    SIZES,
    offered,
    pair,
)


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_recognised(name):
    (file, model), (_, recipe, words) = pair(name), KNOWN[name]
    (finding,) = propose(shape_mismatch, file.state_dict(), model)
    assert words in finding.message
    assert finding.fix is None
    assert finding.remedies[0].options == (("adapt", (recipe,)),)


@pytest.mark.parametrize("name", [name for name in KNOWN if name not in {*BY_CLASS, "CLIP's ResNet in timm"}])
def test_the_same_with_a_file_to_fit(name):
    """Then the grids follow from the tokens whose parameters are in the files, or are not known."""
    (file, model), (_, recipe, words) = pair(name), KNOWN[name]
    (finding,) = propose(shape_mismatch, file.state_dict(), target_from_checkpoint(open_state_dict(model.state_dict())))
    assert words in finding.message
    assert finding.remedies[0].options == (("adapt", (recipe,)),)


def test_a_projection_of_embeddings_is_not_one_of_patches():
    """192 and 300 are three colours of 8x8 and 10x10 pixels, too."""
    file, like = ({"embeddings.projection.weight": torch.ones(16, size)} for size in (192, 300))
    (finding,) = propose(shape_mismatch, file, target_from_checkpoint(open_state_dict(like)))
    assert "patches" not in finding.message
    file, like = ({"embeddings.projection.weight": torch.ones(16, 3, side, side)} for side in (8, 10))
    (finding,) = propose(shape_mismatch, file, target_from_checkpoint(open_state_dict(like)))
    assert "patches of 8x8 in the file and of 10x10 in the model" in finding.message


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
def test_a_map_of_another_width_is_not_a_map_of_other_images(old, new, is_offered):
    file = {"pos_embed": torch.randn(old), "a.weight": torch.ones(3, 3, 1, 1)}
    target = target_from_checkpoint(open_state_dict({**file, "pos_embed": torch.zeros(new)}))
    findings = propose(shape_mismatch, file, target)
    assert any("adapt" in dict(one.options) for f in findings for one in f.remedies) is is_offered


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
    """Moshi and MusicGen have one for the start of the sequence."""
    file, model = moshi(old).state_dict(), moshi(new)
    target = model if is_known else target_from_checkpoint(open_state_dict(model.state_dict()))
    findings = propose(shape_mismatch, file, target, adapt=(f"vocab={recipe}",))
    assert [found.message.partition(": ")[2] for found in findings] == [
        f"a vocabulary of {old} in the file and of {new} in the model{last}"
        for last in (", and an extra row that stays last", "")
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


def test_videos_to_images_have_no_recipe():
    file, model = nn.Sequential(nn.Conv3d(3, 8, (5, 3, 3))), nn.Sequential(nn.Conv2d(3, 8, 3))
    found = propose(shape_mismatch, file.state_dict(), model, adapt=("inflate=mean",))
    assert any(
        "1 of them over time too, an axis that inflate adds and no recipe removes" in one.message for one in found
    )
    assert not any("adapt" in dict(remedy.options) for one in found for remedy in one.remedies)


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
