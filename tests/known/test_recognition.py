"""A model is named if its whole trunk is there, whatever is around it, and otherwise not."""

import subprocess
import sys

import pytest

from ckptfix.core.likeness import Fit
from ckptfix.known.recognition import recognise
from ckptfix.known.table import known_target


def shapes(spec):
    return {key: slot.shape for key, slot in known_target(spec).slots.items()}


R50, VIT = shapes("torchvision/resnet50"), shapes("torchvision/vit_b_16")
TRUNK = {key: shape for key, shape in R50.items() if not key.startswith("fc.")}


def under(prefix, own):
    return {prefix + key: shape for key, shape in own.items()}


def facts(own):
    found = recognise(own)
    assert found is not None
    assert "torchvision/resnet50" in found.names or "torchvision/vit_b_16" in found.names
    return found.fit, found.prefix, found.outside, dict(found.sizes)


# ---- not recognised


CUSTOM = {f"layers.{i}.{name}": (64, 64) for i in range(30) for name in ("q", "k", "v")}


@pytest.mark.parametrize(
    "own",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"fc.weight": (10, 2), "fc.bias": (10,)}, id="a layer"),
        pytest.param(CUSTOM, id="a net of its own"),
        pytest.param({key: (*shape[:-1], 2 * shape[-1]) if shape else shape for key, shape in R50.items()}, id="wider"),
        pytest.param({key: (4096, *shape[1:]) for key, shape in R50.items() if shape}, id="its names in other shapes"),
        pytest.param(
            {f"w{number}": shape for number, shape in enumerate(R50.values())}, id="its shapes by other names"
        ),
        pytest.param({key: R50[key] for key in list(R50)[:80]}, id="a quarter of it"),
        pytest.param({f"k{number}": (3,) for number in range(30_000)}, id="more than any model has"),
    ],
)
def test_noop_like_no_known_model(own):
    assert recognise(own) is None


@pytest.mark.parametrize(
    ("own", "missing", "added", "differing"),
    [
        ({key: shape for key, shape in TRUNK.items() if not key.startswith("layer4.2.")}, 17, 0, 0),
        (R50 | {"layer1.0.se.fc.weight": (4, 4)}, 0, 1, 0),
        (R50 | {"layer4.2.conv3.weight": (2048, 512, 3, 3)}, 0, 0, 1),
        (R50 | {"gamma": (1,)}, 0, 1, 0),
        (TRUNK | {f"neck.{number}.weight": (1, 1) for number in range(100)}, 2, 100, 0),
    ],
    ids=["a block is missing", "a layer in a block", "another kernel", "a loose parameter", "more than a head"],
)
def test_differences_in_the_trunk_are_listed(own, missing, added, differing):
    found = recognise(own)
    assert found is not None
    assert (found.fit, found.is_named) == (Fit.NEAR, False)
    assert "torchvision/resnet50" in found.names
    assert (len(found.missing), len(found.added), len(found.differing)) == (missing, added, differing)


@pytest.mark.parametrize("before", ["", "module."])
def test_models_next_to_each_other_are_named_one_by_one(before):
    loss = {f"{before}loss.{number}.weight": (number,) for number in range(3)}
    found = recognise(under(f"{before}student.", R50) | under(f"{before}teacher.", VIT) | loss)
    assert found is not None
    assert [(each.names[0], each.fit, each.prefix, each.outside) for each in (found, *found.others)] == [
        ("torchvision/resnet50", Fit.PART, f"{before}student.", 3),
        ("torchvision/vit_b_16", Fit.PART, f"{before}teacher.", 3),
    ]


def test_a_known_model_in_a_larger_unknown_one():
    found = recognise(under("perceptual.", TRUNK) | {f"own.{number}.weight": (3, number) for number in range(900)})
    assert found is not None
    assert (found.fit, found.prefix, found.outside, found.others) == (Fit.PART, "perceptual.", 900, ())
    assert found.target.endswith("resnet50[num_classes=0]")


LAYERS = {"conv1": "0", "bn1": "1", "layer1": "4", "layer2": "5", "layer3": "6", "layer4": "7"}


def renamed(own, names):
    return {f"{names[first]}.{rest}": own[key] for key in own for first, _, rest in [key.partition(".")]}


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (renamed(TRUNK, LAYERS), (Fit.HEADLESS, "", LAYERS)),
        (under("0.", renamed(TRUNK, LAYERS)), (Fit.HEADLESS, "0.", LAYERS)),
        (renamed(R50, LAYERS | {"fc": "10"}), (Fit.EXACT, "", LAYERS | {"fc": "10"})),
        (renamed(R50, LAYERS | {"fc": "fc"}), (Fit.EXACT, "", LAYERS)),
    ],
    ids=["a Sequential", "one in another", "with its head", "with the name of its head"],
)
def test_a_sequential_of_the_layers_of_a_model(own, expected):
    found = recognise(own)
    assert found is not None
    known = {first: old for old, first in found.renamed.items()}
    assert ("torchvision/resnet50" in found.names, found.fit, found.prefix, known) == (True, *expected)


def test_a_module_that_is_most_of_a_model():
    vgg = shapes("torchvision/vgg16_bn")
    found = recognise({key.removeprefix("features."): vgg[key] for key in vgg if key.startswith("features.")})
    assert found is not None
    assert (found.names[0], found.fit, found.renamed) == ("torchvision/vgg16_bn", Fit.PIECE, {"": "features"})


def test_layers_of_a_model_in_another_order_are_not_named():
    own = renamed(TRUNK, LAYERS | {"layer3": "7", "layer4": "6"})
    found = recognise(own)
    assert found is None or not found.is_named


def test_a_head_beside_a_model_without_one():
    bert = shapes("transformers/BertModel")
    found = recognise(bert | {"classifier.weight": (3, 768), "classifier.bias": (3,)})
    assert found is not None
    assert (found.names[0], found.fit) == ("transformers/BertModel", Fit.OTHER_HEAD)
    assert found.added == ("classifier.weight", "classifier.bias")


def test_one_more_token_is_not_a_larger_image():
    found = recognise(VIT | {"encoder.pos_embedding": (1, 198, 768)})
    assert found is not None
    assert (found.fit, found.differing) == (Fit.NEAR, ("encoder.pos_embedding",))


def test_two_heads_of_different_sizes():
    inception = shapes("torchvision/inception_v3")
    found = recognise(inception | {"fc.weight": (7, 2048), "fc.bias": (7,)})
    assert found is not None
    assert "num_classes" not in found.sizes or found.fit is not Fit.EXACT


# ---- recognised


def test_files_of_the_original_authors():
    dino = under("teacher.backbone.", shapes("dinov2/dinov2_vits14_reg"))
    found = recognise(dino)
    assert found is not None
    assert (found.names[0], found.fit, found.prefix) == ("dinov2/dinov2_vits14_reg", Fit.EXACT, "teacher.backbone.")
    scalars = {"input_resolution": (), "context_length": (), "vocab_size": ()}  # as in OpenAI's files
    clip = recognise(shapes("open_clip/ViT-B-32-quickgelu") | scalars)
    assert clip is not None
    assert ("open_clip/ViT-B-32-quickgelu" in clip.names, clip.fit) == (True, Fit.EXACT)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (R50, (Fit.EXACT, "", 0, {})),
        (dict(reversed(R50.items())), (Fit.EXACT, "", 0, {})),
        ({key: shape for key, shape in R50.items() if "num_batches" not in key}, (Fit.EXACT, "", 0, {})),
        (R50 | {"total_ops": (1,), "layer1.total_params": (1,)}, (Fit.EXACT, "", 0, {})),
        (R50 | {"fc.weight": (7, 2048), "fc.bias": (7,)}, (Fit.EXACT, "", 0, {"num_classes": 7})),
        (R50 | {"conv1.weight": (64, 1, 7, 7)}, (Fit.EXACT, "", 0, {"in_chans": 1})),
        (VIT | {"encoder.pos_embedding": (1, 577, 768)}, (Fit.EXACT, "", 0, {"img_size": 384})),
        (under("module.", R50), (Fit.EXACT, "module.", 0, {})),
        (under("module.module.", R50) | {"n_averaged": ()}, (Fit.EXACT, "module.module.", 0, {})),
        (under("_orig_mod.", R50), (Fit.EXACT, "_orig_mod.", 0, {})),
        (under("model.backbone.", R50), (Fit.EXACT, "model.backbone.", 0, {})),
        (under("module._orig_mod.net.", VIT), (Fit.EXACT, "module._orig_mod.net.", 0, {})),
        (TRUNK, (Fit.HEADLESS, "", 0, {})),
        (under("encoder.", TRUNK), (Fit.HEADLESS, "encoder.", 0, {})),
        (TRUNK | {"fc.0.weight": (5, 2048), "fc.2.weight": (3, 5)}, (Fit.OTHER_HEAD, "", 0, {})),
        (TRUNK | {"classifier.weight": (5, 2048), "classifier.bias": (5,)}, (Fit.OTHER_HEAD, "", 0, {})),
        (under("model.", R50) | {"loss.weight": (1000,)}, (Fit.PART, "model.", 1, {})),
    ],
    ids=str,
)
def test_known_models_in_common_variations(own, expected):
    assert facts(own) == expected


def test_a_segment_in_the_middle_of_the_keys():
    own = {key.replace("layer1.", "layer1._checkpoint_wrapped_module."): shape for key, shape in R50.items()}
    assert facts(own) == (Fit.EXACT, "_checkpoint_wrapped_module.", 0, {})


def test_names_of_old_releases():
    dense = shapes("torchvision/densenet121")
    old = {key.replace("norm1.", "norm.1.").replace("conv1.", "conv.1."): shape for key, shape in dense.items()}
    assert old.keys() != dense.keys()
    found = recognise(old)
    assert found is not None
    assert (found.fit, found.names[0]) == (Fit.EXACT, "torchvision/densenet121")


def test_the_target_has_exactly_the_structure():
    own = R50 | {"fc.weight": (7, 2048), "fc.bias": (7,), "conv1.weight": (64, 1, 7, 7)}
    found = recognise(own)
    assert found is not None
    assert shapes(found.target.removeprefix("known:")) == own
    found = recognise(TRUNK)
    assert found is not None
    assert shapes(found.target.removeprefix("known:")) == TRUNK


SCRIPT = """
import sys
from ckptfix.known.recognition import recognise
from ckptfix.known.table import known_target
known_target("torchvision/resnet50")
assert recognise({"a.weight": (1,), **{f"b.{n}": (n,) for n in range(20)}}) is None
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy"}))
"""


def test_no_torch_is_needed():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert (done.stderr, done.stdout.split()) == ("", [])


def test_a_new_head_decides_between_models_with_one_trunk():
    """A causal model has no keys besides the trunk's, because its head is tied: a new `score` is not its own."""
    own = shapes("transformers/Gemma2ForSequenceClassification")
    del own["score.weight"]
    found = recognise({**own, "score.1.weight": (7, 33), "score.1.bias": (7,)})
    assert found is not None
    assert found.fit is Fit.OTHER_HEAD
    assert all(name.endswith("Classification") for name in found.names)
