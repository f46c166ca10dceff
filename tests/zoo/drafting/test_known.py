import pytest

from ckptfix.zoo.drafting.known import Known, find_known, head_widths, named_models, structure_digest
from tests.zoo.drafting.structures import STRUCTURES

EXACT = {
    name: name.partition(".")[2]
    for name in STRUCTURES
    if not name.startswith("hf.") and name not in ("tv.fcn_resnet50", "tv.fasterrcnn_resnet50_fpn")
}


def known(shapes) -> Known:
    found = find_known(shapes)
    assert found is not None
    return found


@pytest.mark.parametrize("name", EXACT)
def test_a_model_as_its_library_builds_it(name):
    found = known(STRUCTURES[name])
    assert EXACT[name] in {each.partition(":")[2] for each in found.names}
    assert found.classes == 1000


@pytest.mark.parametrize("name", EXACT)
def test_another_number_of_classes(name):
    shapes = STRUCTURES[name]
    head = known(shapes).head
    other = {
        key: (7, *shape[1:]) if key.rpartition(".")[0] in head else shape for key, shape in reversed(shapes.items())
    }
    assert known(other).names == known(shapes).names
    assert known(other).classes == 7


@pytest.mark.parametrize("name", EXACT)
def test_no_head_at_all(name):
    shapes = STRUCTURES[name]
    head = known(shapes).head
    found = known({key: shape for key, shape in shapes.items() if key.rpartition(".")[0] not in head})
    assert EXACT[name] in {each.partition(":")[2] for each in found.names}
    assert found.classes is None


@pytest.mark.parametrize("name", EXACT)
def test_one_tensor_more_less_or_otherwise_is_another_model(name):
    shapes = STRUCTURES[name]
    first = next(iter(shapes))
    assert find_known({**shapes, "extra.weight": (1, 1)}) is None
    assert find_known({key: shape for key, shape in shapes.items() if key != first}) is None
    assert find_known({**shapes, first: (*shapes[first][:-1], shapes[first][-1] + 1)}) is None


def test_a_head_of_another_width_is_another_model():
    assert find_known({**STRUCTURES["tv.resnet50"], "fc.weight": (1000, 512)}) is None


def test_heads_that_differ_in_their_classes_are_no_one_model():
    assert find_known({**STRUCTURES["tv.inception_v3"], "fc.weight": (7, 2048), "fc.bias": (7,)}) is None


def test_counters_do_not_count():
    shapes = STRUCTURES["tv.resnet18"]
    more = {"bn1.num_batches_tracked": (), "total_ops": (1,), "layer1.total_params": (1,)}
    assert known({**shapes, **more}) == known(shapes)


def test_nothing_is_no_model():
    assert find_known({}) is None
    assert find_known({"fc.weight": (10, 2), "fc.bias": (10,)}) is None


def test_the_digest_is_of_names_and_shapes_in_any_order():
    one = structure_digest({"a": (1, 2), "b": ()}, ())
    assert one == structure_digest({"b": (), "a": (1, 2)}, ())
    assert len({one, structure_digest({"a": (12,), "b": ()}, ()), structure_digest({"a": (1, 2)}, ["b"])}) == 3


def test_widths_of_a_head():
    shapes = {"fc.weight": (10, 2048), "fc.bias": (10,), "conv.weight": (10, 512, 1, 1)}
    assert head_widths(shapes, ["fc", "conv", "none"]) == "2048,512x1x1,-"


def test_names_of_both_libraries():
    names = named_models()
    assert (names["resnet50"], names["vit_base_patch16_224"]) == ("torchvision", "timm")
