"""An inferred map as rules: short, and exactly what was inferred."""

import pytest
from msgspec.structs import replace

from ckptfix.core.parts import Part, full
from ckptfix.core.rename_map import RenameMap
from ckptfix.maps.elements import normal
from ckptfix.maps.folding import fold
from ckptfix.maps.inference import infer
from ckptfix.maps.layout import Steps
from ckptfix.maps.matches import Inference, Match
from ckptfix.maps.resolving import inverse, resolve
from ckptfix.maps.trees import Label
from tests.maps.test_inference import VIT_HF, VIT_TIMM, Specs, hf_block, linear, norm, stack, timm_block

CONV = {"conv.weight": (8, 3, 1, 1), **norm("bn"), "bn.running_mean": (8,), "bn.running_var": (8,)}
GROUPED: Specs = {"q_proj.weight": (8, 8), "k_proj.weight": (2, 8), "v_proj.weight": (2, 8), "ln.weight": (8,)}
EXPERT: Specs = {"w1.weight": (4, 8), "w2.weight": (8, 4), "w3.weight": (4, 8)}
PAIRS = {
    "timm and transformers": (VIT_TIMM, VIT_HF),
    "transformers and timm": (VIT_HF, VIT_TIMM),
    "grouped queries": (
        stack("h", [{"qkv_proj.weight": (12, 8), "norm.weight": (8,)}] * 3),
        stack("layers", [GROUPED] * 3),
    ),
    "experts": (
        stack("layers", [stack("moe.experts", [EXPERT] * 3)] * 2),
        stack("layers", [{"mlp.experts.gate_up_proj": (3, 8, 8), "mlp.experts.down_proj": (3, 8, 4)}] * 2),
    ),
    "one inside": (stack("blocks", [CONV] * 3), stack("layers", [CONV] * 3) | {"fc.weight": (4, 8)}),
    "a layer that stays": (
        {**stack("layer", [timm_block()] * 3), **linear("head", 5, 8)},
        {**stack("blocks", [timm_block()] * 3), **linear("head", 5, 8)},
    ),
    "axes of one element": (
        {**stack("a", [timm_block() | {"gamma": (8,)}] * 2), "token": (1, 1, 8)},
        {**stack("b", [timm_block() | {"gamma": (8, 1, 1)}] * 2), "token": (8,)},
    ),
}  # fmt: skip


def parts_of(pieces: tuple[Part, ...]) -> list[Part]:
    return sorted(map(normal, pieces), key=lambda part: (part.place, part.source))


@pytest.mark.parametrize(("source", "target"), PAIRS.values(), ids=PAIRS)
def test_the_rules_give_the_inferred_map_and_their_inverse_the_source(source: Specs, target: Specs):
    inference = infer(source, target)
    folded = fold(inference)
    whole = RenameMap(tuple(replace(rule, label="") for rule in folded.rules))
    moves = resolve(whole, source, target)
    changed = {key for key, match in inference.matches.items() if [part.source for part in match.parts] != [key]}
    assert changed
    assert changed <= moves.keys()
    for key, move in moves.items():
        assert parts_of(move.parts) == parts_of(inference.matches[key].parts)
        assert move.shape == target[key]
    back = resolve(inverse(whole), {key: move.shape for key, move in moves.items()}, source)
    assert {key: move.shape for key, move in back.items()} == {key: source[key] for key in back}
    assert {part.source for move in moves.values() for part in move.parts} == back.keys()


@pytest.mark.parametrize(("shape", "wanted", "step"), [
    ((8, 3, 1, 1), (8, 3), "a b 1 1 -> a b"),
    ((6,), (2, 1, 3), "(a b) -> a 1 b with b=3"),
    ((12, 4, 1), (3, 16), "(a b) c 1 -> a (b c) with b=4"),
    ((4, 6, 1), (2, 12), "(a b) c 1 -> a (b c) with b=2"),
    ((1, 4, 6), (2, 2, 3, 2), "1 (a b) (c d) -> a b c d with b=2 d=2"),
], ids=str)  # fmt: skip
def test_a_reshape_becomes_a_step(shape, wanted, step):
    match = Match((Part("a", full(shape), full(wanted)),), Label.LIKELY)
    folded = fold(Inference({"b": match}, {"a": shape}, {"b": wanted}))
    assert [rule.steps for rule in folded.rules] == [(step,)]
    assert resolve(folded, {"a": shape}, {"b": wanted})["b"].shape == wanted


def test_a_vision_transformer_takes_ten_lines():
    assert [str(rule) for rule in fold(infer(VIT_TIMM, VIT_HF)).rules] == [
        "cls_token → vit.embeddings.cls_token",
        "patch_embed.proj.{weight,bias} → vit.embeddings.patch_embeddings.projection.{weight,bias}",
        "blocks.{n}.norm1.{weight,bias} → vit.encoder.layer.{n}.layernorm_before.{weight,bias}",
        "blocks.{n}.attn.qkv.{weight,bias} → "
        "vit.encoder.layer.{n}.attention.attention.{query,key,value}.{weight,bias}, split 3",
        "blocks.{n}.attn.proj.{weight,bias} → vit.encoder.layer.{n}.attention.output.dense.{weight,bias}",
        "blocks.{n}.norm2.{weight,bias} → vit.encoder.layer.{n}.layernorm_after.{weight,bias}",
        "blocks.{n}.mlp.fc1.{weight,bias} → vit.encoder.layer.{n}.intermediate.dense.{weight,bias}",
        "blocks.{n}.mlp.fc2.{weight,bias} → vit.encoder.layer.{n}.output.dense.{weight,bias}",
        "norm.{weight,bias} → vit.layernorm.{weight,bias}",
        "head.{weight,bias} → classifier.{weight,bias}",
    ]


def test_a_map_of_a_small_model_applies_to_a_large_one():
    def sides(width: int, depth: int) -> tuple[Specs, Specs]:
        ours = {**stack("blocks", [timm_block(width)] * depth), **norm("norm", width)}
        theirs = {**stack("layer", [hf_block(width)] * depth), **norm("layernorm", width)}
        return ours, theirs

    rules = fold(infer(*sides(8, 2)))
    ours, theirs = sides(32, 24)
    moves = resolve(rules, ours, theirs)
    assert {key: move.shape for key, move in moves.items()} == theirs
    assert parts_of(moves["layer.17.attention.attention.key.weight"].parts) == parts_of(
        infer(ours, theirs).matches["layer.17.attention.attention.key.weight"].parts
    )


def test_numbers_of_layers_follow_from_each_other():
    """torchvision's Swin: alternating stages and downsampling, and a shortcut that counts from the next stage."""
    source: Specs = {}
    target: Specs = {}
    for n, width in enumerate((8, 16, 32, 64)):
        for at in range(2):
            source |= {f"features.{2 * n + 1}.{at}.{key}": shape for key, shape in timm_block(width).items()}
            target |= {f"layers.{n}.blocks.{at}.{key}": shape for key, shape in timm_block(width).items()}
        if n:
            source[f"features.{2 * n}.weight"] = target[f"layers.{n}.downsample.weight"] = (width, 2 * width)
    rules = {str(rule) for rule in fold(infer(source, target)).rules}
    assert "features.{2n+1}.{m}.norm{k}.{weight,bias} → layers.{n}.blocks.{m}.norm{k}.{weight,bias}" in rules
    assert "features.{2n}.weight → layers.{n}.downsample.weight" in rules


def test_a_layer_that_keeps_its_name_is_not_moved_by_the_rule_of_its_siblings():
    source = {**stack("blocks", [norm("a"), linear("b", 8, 8), norm("a")]), **linear("stem", 8, 3)}
    target = {**source}
    for key in list(target):
        if key.startswith("blocks.1"):
            target[key.replace("blocks.1.b", "blocks.1.c")] = target.pop(key)
    moves = resolve(fold(infer(source, target)), source, target)
    assert moves.keys() == {"blocks.1.c.weight", "blocks.1.c.bias"}


def test_labels_and_alternatives_are_those_of_the_template():
    towers = {**stack("a", [norm("x")] * 2), **stack("b", [norm("x")] * 2)}
    others = {**stack("c", [norm("x")] * 2), **stack("d", [norm("x")] * 2)}
    rules = fold(infer(dict(sorted(towers.items(), reverse=True)), others)).rules
    assert {rule.label for rule in rules} <= {"likely", "ambiguous"}


def test_numbers_without_a_formula_are_listed():
    """MobileNetV2: one side numbers its layers consecutively, the other by stage."""
    stages = (1, 2, 3, 4, 2)
    places = [(stage, at) for stage, size in enumerate(stages) for at in range(size)]
    source = {f"layer.{n}.conv.weight": (n + 2, n + 1) for n in range(len(places))}
    target = {f"blocks.{stage}.{at}.pw.weight": (n + 2, n + 1) for n, (stage, at) in enumerate(places)}
    found = fold(infer(source, target))
    assert [(rule.source[:17], rule.target[:15]) for rule in found.rules] == [("layer.{0,1,2,3,4,", "blocks.{0.0,1.0")]
    assert {key: move.parts[0].source for key, move in resolve(found, source, target).items()} == dict(
        zip(target, source, strict=True)
    )
    assert set(resolve(inverse(found), target, source)) == set(source)


PERMUTED = {
    "rotary embeddings": ("(h d t) a -> (h t d) a with d=4 t=2", (24, 16)),
    "interleaved experts": ("e (f t) h -> e (t f) h with t=2", (3, 10, 6)),
    "a bias": ("(h d t) -> (h t d) with d=4 t=2", (24,)),
    "transposed experts": ("a b c -> a c b", (3, 4, 5)),
    "both axes": ("(t f) (g k) -> (f t) (k g) with t=2 g=3", (8, 6)),
}


@pytest.mark.parametrize(("step", "shape"), PERMUTED.values(), ids=PERMUTED)
def test_a_permutation_that_is_known_becomes_a_step(step, shape):
    (((wanted, parts),),) = Steps.parse([step]).apply([[("w", shape)]], [""])
    known = Inference({"v": Match(parts, Label.CERTAIN)}, {"w": shape}, {"v": wanted})
    found = fold(known)
    assert not found.missing
    moved = resolve(found, {"w": shape}, {"v": wanted})["v"].parts
    assert sorted(map(normal, moved), key=repr) == sorted(map(normal, parts), key=repr)
