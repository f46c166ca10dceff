"""What the shapes in a message show."""

import pytest

from ckptfix.explain import explain
from ckptfix.explain.fit import read_fit
from ckptfix.explain.text import messages
from tests.explain.test_fit import causes, text


def size(key: str, stored: list[int], wanted: list[int]) -> str:
    return (
        f"size mismatch for {key}: copying a param with shape torch.Size({stored}) from checkpoint, the shape in"
        f" current model is torch.Size({wanted})."
    )


ADAPTER = [
    size("base_model.model.layers.0.q_proj.lora_A.default.weight", [16, 64], [8, 64]),
    size("base_model.model.layers.0.q_proj.lora_B.default.weight", [64, 16], [64, 8]),
]
RANK = [
    size("word_embeddings.weight", [16, 8], [64, 8]),
    size("layers.0.attention.dense.weight", [8, 2], [8, 8]),
    size("layers.0.mlp.dense_h_to_4h.weight", [8, 8], [32, 8]),
]
"""One of four ranks of Megatron; without the embedding it may be a model with a wider hidden layer."""


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (text(None, None, size("fc.weight", [10, 5], [2, 5]), size("fc.bias", [10], [2])), "10 classes"),
        (
            text(None, None, size("wte.embedding.weight", [10, 5], [2, 5])),
            "a vocabulary of 10 in the file and of 2 in the model",
        ),
        (
            text(
                None,
                None,
                size("lm_head.modules_to_save.default.weight", [12, 5], [10, 5]),
                size("model.embed_tokens.modules_to_save.default.weight", [12, 5], [10, 5]),
            ),
            "a vocabulary of 12 in the file and of 10 in the model",
        ),
        (text(None, None, size("conv1.weight", [8, 3, 7, 7], [8, 1, 7, 7])), "3 input channels in the file and 1"),
        (
            text(None, None, size("pos_embed", [1, 197, 8], [1, 577, 8])),
            "a grid of 14x14 in the file (and 1 token), of 24x24",
        ),
        (text(None, None, size("a.weight", [0], [4, 4])), "ZeRO or FSDP"),
        (text(None, None, size("a.weight", [0, 17], [1, 17])), "ZeRO or FSDP"),
        (text(None, None, size("a.weight", [4, 4], [0]), size("pos_embed", [9, 4], [0])), "GatheredParameters"),
        (text(None, None, size("pos_embed", [1, 9, 9, 8], [1, 9, 9, 4])), "a model of another size"),
        (text(None, None, size("embeddings.position_ids", [1, 512], [1, 514])), "position embeddings"),
        (text(None, None, size("blocks.0.attn.rel_pos_h", [27, 80], [27, 64])), "a model of another size"),
        (text(None, None, size("patch_embed.proj.weight", [8, 3, 4, 4], [4, 3, 4, 4])), "a model of another size"),
        (text(None, None, size("a.weight", [4, 4], [8, 8])), "a model of another size"),
        (text(None, None, size("q_proj.weight", [64, 1], [16, 8])), "two codes of 4 bits in each byte"),
        (text(None, None, size("q_proj.weight", [16, 8], [64, 1])), "two codes of 4 bits in each byte"),
        (text(None, None, size("q_proj.weight", [64, 1], [16, 9])), "a model of another size"),
        (text(None, None, size("norm.weight", [64], [40, 64])), "a model of another size"),
        (text(None, None, size("critic.bias", [], [1]), size("a.weight", [8, 8, 1], [8, 8])), "axis of one element"),
        (text(None, None, size("q_proj.weight", [16435456], [5120, 5120])), "one row of numbers"),
        (text(None, None, size("q_proj.scales", [4096, 1], [32, 4096])), "different bits or group size"),
        (text(None, None, *RANK), "1/4 of the model along one axis"),
        (text(None, None, *ADAPTER), "an adapter of another rank than the model's"),
        (text(None, None, *RANK[1:]), "a model of another size"),
    ],
)
def test_what_the_shapes_say(message: str, words: str):
    assert words in causes(message)


RECIPES = [
    (size("pos_embed", [1, 197, 8], [1, 577, 8]), "--adapt pos_embed=timm"),
    (size("encoder.pos_embedding", [1, 197, 8], [1, 577, 8]), "--adapt pos_embed=torchvision"),
    (size("vit.embeddings.position_embeddings", [1, 197, 8], [1, 577, 8]), "--adapt pos_embed=plain"),
    (size("layers.0.blocks.0.attn.relative_position_bias_table", [169, 3], [529, 3]), "--adapt window_bias=swin"),
    (size("patch_embed.proj.weight", [8, 3, 16, 16], [8, 3, 32, 32]), "--adapt patch_embed=timm"),
    (size("conv1.weight", [8, 3, 7, 7], [8, 1, 7, 7]), "--adapt in_chans=timm"),
    (size("conv1.weight", [8, 3, 7, 7], [8, 3, 5, 7, 7]), "--adapt inflate=mean"),
    (size("model.embed_tokens.weight", [100, 8], [104, 8]), "--adapt vocab=pad:mean"),
]


@pytest.mark.parametrize(("message", "option"), RECIPES)
def test_a_recipe_for_a_shape(message: str, option: str):
    (read,) = messages(text(None, None, message))
    commands = [advice.command for advice in read_fit(read)[1] if advice.command]
    assert commands[1:] == [f"ckptfix repair {{FILE}} --model {{MODEL}} {option}"]


def test_recipes_next_to_a_head():
    (read,) = messages(text(None, None, RECIPES[0][0], RECIPES[5][0], size("head.weight", [10, 8], [2, 8])))
    commands = [advice.command for advice in read_fit(read)[1] if advice.command]
    assert commands[1].endswith("--model {MODEL} --adapt pos_embed=timm --adapt in_chans=timm")
    assert commands[2].endswith("--drop-mismatched --fill target")


def size_mismatches(*pairs: tuple[list[int], list[int]]) -> str:
    lines = (
        f"\tsize mismatch for {number}.weight: copying a param with shape torch.Size({stored}) from checkpoint, the"
        f" shape in current model is torch.Size({wanted})."
        for number, (stored, wanted) in enumerate(pairs)
    )
    return "\n".join(["RuntimeError: Error(s) in loading state_dict for Net:", *lines])


@pytest.mark.parametrize(
    ("said", "is_advised"),
    [
        pytest.param(size_mismatches(([1000, 64], [10, 64])), True, id="head"),
        pytest.param(size_mismatches(([8, 3, 7, 7], [8, 4, 7, 7])), True, id="input channels"),
        pytest.param(size_mismatches(([288, 96], [384, 128]), ([96, 96], [128, 128])), False, id="another variant"),
        pytest.param(size_mismatches(([0], [4, 4]), ([0], [4])), False, id="divided by ZeRO"),
        pytest.param(size_mismatches(([4, 4], [0]), ([4], [0])), False, id="a model that ZeRO divided"),
        pytest.param(text(None, None, size("pos_embed", [1, 9, 9, 8], [1, 9, 9, 4])), False, id="a wider pos_embed"),
        pytest.param(size_mismatches(([96, 32], [32, 96]), ([32, 128], [128, 32])), False, id="transposed"),
        pytest.param(size_mismatches(([96, 32], [96, 32, 1, 1]), ([32, 48], [32, 96])), False, id="SDXL for SD 1"),
    ],
)
def test_random_weights_are_advised_only_for_what_is_new(said, is_advised):
    explanation = explain(said)
    assert explanation is not None
    assert (
        any("--fill target" in each.command or "--adapt" in each.command for each in explanation.advice) is is_advised
    )


def test_axes_of_one_element_are_repaired_and_ranks_are_put_together():
    (ones,) = messages(text(None, None, size("critic.bias", [], [1])))
    commands = [advice.command for advice in read_fit(ones)[1]]
    assert "ckptfix repair {FILE} --model {MODEL}" in commands
    (rank,) = messages(text(None, None, *RANK))
    commands = [advice.command for advice in read_fit(rank)[1]]
    assert "ckptfix repair {FOLDER} -o model.pth" in commands
    assert not any("--adapt" in command or "--fill" in command for command in commands)
    (adapter,) = messages(text(None, None, *ADAPTER))
    assert [advice.command for advice in read_fit(adapter)[1] if "--fill" in advice.command] == []


def test_a_vocabulary_is_cut_only_on_a_condition():
    (read,) = messages(text(None, None, size("model.embed_tokens.weight", [104, 8], [100, 8])))
    assert any("if the smaller vocabulary begins the larger" in advice.text for advice in read_fit(read)[1])
