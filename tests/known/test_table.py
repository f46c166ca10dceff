"""A known structure equals the model that its library builds, and given sizes are solved exactly."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptfix.core.target import target_from_module
from ckptfix.errors import TargetError
from ckptfix.known.table import known_target, shape_of, solve, table


def built(library, name, **arguments):
    with torch.device("meta"):
        if library == "torchvision":
            from torchvision import models

            return models.get_model(name, weights=None, **arguments)
        if library == "diffusers":
            import diffusers

            return getattr(diffusers, name)(**arguments)
        if library == "transformers":
            import transformers

            cls = getattr(transformers, name)
            return cls(cls.config_class(**arguments))
        import timm

        return timm.create_model(name, **arguments)


@pytest.mark.parametrize(
    ("spec", "library", "name", "arguments"),
    [
        ("torchvision/resnet18", "torchvision", "resnet18", {}),
        ("torchvision/resnet18[num_classes=7]", "torchvision", "resnet18", {"num_classes": 7}),
        ("torchvision/vit_b_16[img_size=384]", "torchvision", "vit_b_16", {"image_size": 384}),
        ("torchvision/ssd300_vgg16", "torchvision", "ssd300_vgg16", {"weights_backbone": None}),
        ("torchvision/swin_v2_t", "torchvision", "swin_v2_t", {}),
        pytest.param("diffusers/AutoencoderKL", "diffusers", "AutoencoderKL", {}, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) and "/" in value else "",
)
def test_a_known_target_equals_the_model_of_the_library(spec, library, name, arguments):
    """Return the keys in order, shapes, dtypes, parameters and buffers, ties, and what is not saved."""
    expected = target_from_module(built(library, name, **arguments))
    found = known_target(spec)
    assert list(found.slots.items()) == list(expected.slots.items())
    assert found.transient == expected.transient
    assert found.ties == expected.ties
    assert found.entries == expected.entries
    assert found.label == f"known:{spec}"


def test_without_classes_there_is_no_head():
    whole, trunk = known_target("torchvision/resnet18"), known_target("torchvision/resnet18[num_classes=0]")
    assert whole.slots.keys() - trunk.slots.keys() == {"fc.weight", "fc.bias"}


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("torchvision/resnet5", "did you mean torchvision/resnet50"),
        ("nothing of the kind", "the names are like timm/resnet50"),
        ("torchvision/resnet18[depth=3]", "it takes num_classes=1000, in_chans=3"),
        ("torchvision/resnet18[num_classes]", "num_classes has to be an integer of at least 0, not nothing"),
        ("torchvision/resnet18[in_chans=0]", "in_chans has to be an integer of at least 1, not 0"),
        ("torchvision/resnet18[num_classes=-1]", "num_classes has to be an integer of at least 0, not -1"),
        ("torchvision/resnet18[num_classes=10", "the bracket is not closed"),
        ("torchvision/vit_b_16[img_size=225]", "do not divide into patches"),
    ],
)
def test_invalid_names_and_sizes(spec, said):
    with pytest.raises(TargetError, match=said) as caught:
        known_target(spec)
    assert f"known:{spec}" in str(caught.value)


SHAPES = [
    "c",
    "c.2048",
    "9c.256.3.3",
    "c+1.256",
    "64.i.7.7",
    "i.i",
    "1.197s785.768",
    "v.768",
    "27s55.64",
    "732s3028.12",
    "729s3025.3",
    "",
    "5.c.i",
]


@pytest.mark.parametrize("shape", SHAPES)
@given(sizes=st.fixed_dictionaries({letter: st.integers(1, 9999) for letter in "civ"}), patches=st.integers(1, 64))
def test_sizes_are_recovered_from_shapes(shape, sizes, patches):
    sizes, usual = {**sizes, "s": 16 * patches}, {"c": 1000, "i": 3, "v": 30522, "s": 224}
    own = shape_of(shape, sizes, usual)
    found = solve(shape, ".".join(map(str, own)), usual)
    assert found == {letter: size for letter, size in sizes.items() if letter in shape}


@pytest.mark.parametrize(
    ("shape", "own"),
    [
        ("64.i.7.7", "64.3.3.3"),
        ("64.i.7.7", "65.3.7.7"),
        ("64.i.7.7", "64.3"),
        ("i.i", "3.4"),
        ("4c.5", "7.5"),
        ("c", "0"),
        ("c", ""),
        ("c+1", "1"),
        ("1.197s785.768", "1.198.768"),
        ("1.197s785.768", "1.0.768"),
        ("732s3028.12", "733.12"),
        ("732s3028.12", "0.12"),
    ],
)
def test_a_shape_without_a_solution(shape, own):
    assert solve(shape, own, {"s": 224}) is None


def test_every_model_is_found_by_its_name_and_says_its_version():
    names = list(table().names())
    assert len(names) == len(set(names))
    assert {name.partition("/")[0] for name in names} == table().versions.keys()
    assert all(re.fullmatch(r"[\w.]+", version) for version in table().versions.values())
    for name in names[::97]:
        found = table().find(name)
        assert found is not None
        structure, model = found
        assert model.name == name
        assert structure.target(name, model.sizes, model.sizes).slots


def test_the_documentation_says_how_many_models_there_are():
    page = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text(encoding="utf-8")
    assert f"{len(list(table().names())):,} models with {len(table()):,} structures" in page


def test_the_table_is_small():
    from ckptfix.known.table import PATH

    assert PATH.stat().st_size < 3_000_000
