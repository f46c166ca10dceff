"""Recipes give the parameters in the same order in which the trainers pass them to the optimizer."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn

from ckptfix.core.spec import TensorSpec
from ckptfix.maps.optimizer_states import fits, optimizers_in
from ckptfix.maps.recipes import RECIPES, Layout, may_list, named_by_itself, namings
from ckptfix.reading.opening import open_file


def groups_of_timm(model: Any) -> Any:
    return pytest.importorskip("timm.optim").param_groups_weight_decay(
        model, 0.05, no_weight_decay_list=model.no_weight_decay()
    )


def layers_of_timm(model: Any) -> Any:
    return pytest.importorskip("timm.optim").param_groups_layer_decay(
        model, 0.05, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.75
    )


def groups_of_trainer(model: nn.Module) -> Any:
    """``Trainer.create_optimizer`` of transformers."""
    pt_utils = pytest.importorskip("transformers.trainer_pt_utils")
    patterns = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    decayed = pt_utils.get_parameter_names(model, [nn.LayerNorm], patterns)
    named = list(model.named_parameters())
    return [{"params": [p for n, p in named if (n in decayed) is is_decayed]} for is_decayed in (True, False)]


def groups_of_ultralytics(model: nn.Module) -> Any:
    """``BaseTrainer.build_optimizer``: biases, then weights, then norms."""
    norms = tuple(cls for name, cls in nn.__dict__.items() if "Norm" in name)
    parts: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            parts[0 if "bias" in name else 2 if isinstance(module, norms) else 1].append(parameter)
    return [{"params": part} for part in parts]


def groups_of_detr(model: nn.Module) -> Any:
    named = list(model.named_parameters())
    return [{"params": [p for n, p in named if ("backbone" in n) is inside]} for inside in (False, True)]


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.head = nn.Linear(4, 5)


def vit() -> nn.Module:
    timm = pytest.importorskip("timm.models")
    model: nn.Module = timm.VisionTransformer(
        img_size=16, patch_size=8, embed_dim=12, depth=3, num_heads=2, num_classes=5
    )
    return model


def gpt() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    model: nn.Module = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16)
    )
    return model


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=40
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


PEERS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "plain": (vit, lambda model: [{"params": list(model.parameters())}]),
    "timm with no_weight_decay": (vit, groups_of_timm),
    "timm, layer-wise": (vit, layers_of_timm),
    "hugging face, gpt2": (gpt, groups_of_trainer),
    "hugging face, llama": (llama, groups_of_trainer),
    "ultralytics": (Detector, groups_of_ultralytics),
    "ultralytics 8.4": (Detector, lambda model: [groups_of_ultralytics(model)[place] for place in (1, 2, 0)]),
    "detectron2": (Detector, lambda model: [{"params": [p]} for p in model.parameters()]),
    "detr": (Detector, groups_of_detr),
}


@pytest.mark.parametrize(
    "peer", [pytest.param(peer, marks=pytest.mark.slow if "hugging" in peer else ()) for peer in PEERS]
)
def test_a_recipe_is_the_order_of_its_trainer(tmp_path, peer):
    build, grouped = PEERS[peer]
    model = build()
    groups = grouped(model)
    for group in groups:
        group.pop("param_names", None)
    optimizer = torch.optim.AdamW(groups)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pth")
    checkpoint = open_file(str(tmp_path / "run.pth"))
    names = dict(model.named_parameters())
    layout = Layout({key: spec.shape for key, spec in checkpoint.specs.items() if key in names})
    (state,) = optimizers_in(checkpoint.root)
    found = list(namings(state, layout))
    assert "ultralytics" not in peer or peer in {naming.source for naming in found}
    of_parameter = {id(parameter): name for name, parameter in names.items()}
    live = [of_parameter[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    assert [list(naming.names.values()) for naming in found] == [live] * len(found)
    assert len(found) >= 1
    assert all(naming.moments == len(live) and not naming.is_certain for naming in found)


@pytest.mark.parametrize(
    ("names", "of_first", "of_second", "is_read"),
    [
        pytest.param("HF", {"weight_decay": 0.0}, {"weight_decay": 0.0}, True, id="no-decay-at-all"),
        pytest.param("HF", {"weight_decay": 0.1, "lr": 1}, {"weight_decay": 0.0, "lr": 2}, False, id="biases-faster"),
        pytest.param("HF", {"weight_decay": 0.0}, {"weight_decay": 0.1}, False, id="more-decay-of-biases"),
        pytest.param("layers", {"lr": 2.0}, {"lr": 1.0}, True, id="the-head-is-faster"),
        pytest.param("layers", {"lr": 1.0}, {"lr": 2.0}, False, id="the-head-is-slower"),
        pytest.param("layers", {"lr": 1, "lr_scale": 1.0}, {"lr": 1, "lr_scale": 0.5}, True, id="by-their-scale"),
    ],
)
def test_groups_that_the_hyperparameters_contradict_are_not_a_recipe(names, of_first, of_second, is_read):
    shapes: dict[str, tuple[int, ...]] = {"a.weight": (2, 2), "layers.1.weight": (2, 2), "fc.weight": (2, 2)}
    if names == "HF":
        shapes = {"a.weight": (2, 2), "b.bias": (2,)}
    rows = {number: {"m": TensorSpec("float32", shape)} for number, shape in enumerate(shapes.values())}
    both = [[0], [1]] if names == "HF" else [[0, 2], [1]]
    groups = [{**options, "params": params} for options, params in zip((of_first, of_second), both, strict=True)]
    (state,) = optimizers_in({"optimizer": {"state": rows, "param_groups": groups}})
    found = [naming.source for naming in namings(state, Layout(shapes))]
    assert any(one.startswith(("Hugging Face", "layer-wise")) for one in found) is is_read


def test_a_model_without_blocks_has_no_layer_wise_groups():
    """All of it would be one layer, in groups by decay: the head after its norm, which a script may have, too."""
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (2,), "norm.bias": (2,), "head.weight": (3, 2)}
    rows = {number: {"m": TensorSpec("float32", shape)} for number, shape in enumerate(shapes.values())}
    groups = [{"params": [0, 1], "weight_decay": 0.0}, {"params": [2], "weight_decay": 0.1}]
    (state,) = optimizers_in({"optimizer": {"state": rows, "param_groups": groups}})
    found = [naming.source for naming in namings(state, Layout(shapes))]
    assert found
    assert not any(source.startswith(("layer-wise", "BEiT")) for source in found)
    signed = [{**group, "lr_scale": 1.0} for group in groups]  # no other trainer writes this
    (state,) = optimizers_in({"optimizer": {"state": rows, "param_groups": signed}})
    assert [naming.source for naming in namings(state, Layout(shapes))] == ["BEiT without layer-wise decay"]


@pytest.mark.parametrize(
    ("groups", "count"),
    [
        pytest.param([["a.b", "c.b"], ["a.w", "c.w"]], 2, id="lists-by-name"),
        pytest.param([["c.w", "c.b"], ["a.w", "a.b"]], 2, id="parts-that-may-be-exchanged"),
        pytest.param([["d.w", "d.b"], ["c.w", "c.b", "a.w", "a.b"]], 1, id="a-part-with-a-shape-of-its-own"),
    ],
)
def test_groups_of_a_script_have_a_name_for_each_order_that_fits(groups, count):
    names = ("c", "a", *("d" for group in groups if "d.w" in group))
    shapes: dict[str, tuple[int, ...]] = {
        f"{n}.{leaf}": (4, 4) if leaf == "w" else (4,) for n in names for leaf in "wb"
    }
    shapes |= {key: (5, *shape[1:]) for key, shape in shapes.items() if key[0] == "d"}
    rows: dict[int, Any] = {}
    params: list[list[int]] = []
    for group in groups:
        params.append([len(rows) + n for n in range(len(group))])
        rows |= {
            number: {"m": TensorSpec("float32", shapes[key])} for number, key in zip(params[-1], group, strict=True)
        }
    (state,) = optimizers_in({"optimizer": {"state": rows, "param_groups": [{"params": one} for one in params]}})
    found = list(namings(state, Layout(shapes)))
    assert len({tuple(naming.names.values()) for naming in found}) == count
    assert list(chain(*groups)) in [list(naming.names.values()) for naming in found]


@pytest.mark.parametrize(
    ("groups", "listed", "expected"),
    [
        pytest.param([[2, 3], [4]], [2, 3, 4], True, id="one-after-another"),
        pytest.param([[2, 3], [4]], [2, 4, 3], True, id="between"),
        pytest.param([[2, 3], [4]], [3, 2, 4], False, id="another-order"),
        pytest.param([[2, 3], [2, 4]], [2, 4, 2, 3], True, id="the-second-first"),
        pytest.param([[2, 3], [2, 4]], [2, 3, 4, 2], False, id="none-of-both"),
        pytest.param([[2, 3]] * 40, [2] * 40 + [3] * 40, True, id="many-that-are-alike"),
        pytest.param([[2, 3]] * 40, [2, 3, 3, 2] * 20, False, id="many-that-fail"),
    ],
)
def test_orders_that_groups_may_list(groups, listed, expected):
    numbers = iter(range(100))
    rows: dict[int, Any] = {}
    params = [[next(numbers) for _ in group] for group in groups]
    for number, size in zip(chain(*params), chain(*groups), strict=True):
        rows[number] = {"m": TensorSpec("float32", (size,))}
    (state,) = optimizers_in({"optimizer": {"state": rows, "param_groups": [{"params": each} for each in params]}})
    assert may_list(state, [(size,) for size in listed]) is expected


def test_every_recipe_has_a_name_of_its_own():
    assert len({recipe.name for recipe in RECIPES}) == len(RECIPES)


STATE = {"exp_avg": torch.ones(2, 3)}


@pytest.mark.parametrize(
    ("groups", "names"),
    [
        ([{"params": [0, 1], "param_names": ["a", "b"]}], {0: "a", 1: "b"}),
        (
            [{"params": [4], "param_names": ["module.b"]}, {"params": [1], "param_names": ["module.a"]}],
            {4: "b", 1: "a"},
        ),
        ([{"params": ["a", "b"]}], {"a": "a", "b": "b"}),
        ([{"params": ["module.a", "b"]}], {"module.a": "a", "b": "b"}),
        ([{"params": [0, 1]}], None),
        ([{"params": [0, 1], "param_names": ["a"]}], None),
        ([{"params": [0, 1], "param_names": ["a", "x"]}], None),
        ([{"params": [0, 1], "param_names": ["a", "module.a"]}], None),
        ([{"params": [0], "param_names": ["a"]}, {"params": [1]}], None),
    ],
)
def test_names_that_the_file_has_itself(groups, names):
    (state,) = optimizers_in({"optimizer": {"state": {}, "param_groups": groups}})
    found = named_by_itself(state, {"a": TensorSpec("float32", (2,)), "b": TensorSpec("float32", (2,))})
    assert [dict(naming.names) for naming in found] == ([] if names is None else [names])


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"a": 2, "b": 3, "enc.a": 2}, [["a", "b"]]),
        ({"a": 2, "b": 3, "enc.a": 2, "enc.b": 3}, [["a", "b"], ["enc.a", "enc.b"]]),
        ({"a": 3, "b": 3, "enc.a": 2, "enc.b": 3}, [["enc.a", "enc.b"]]),
        ({"enc.a": 2, "enc.b": 3}, []),
    ],
)
def test_names_that_are_those_of_a_submodule_too(keys, expected):
    """Only the moments distinguish an optimizer of `model.enc.named_parameters()` from one of the model."""
    specs = {key: TensorSpec("float32", (size,)) for key, size in keys.items()}
    rows = {0: {"exp_avg": TensorSpec("float32", (2,))}, 1: {"exp_avg": TensorSpec("float32", (3,))}}
    groups = [{"params": [0, 1], "param_names": ["a", "b"]}]
    (state,) = optimizers_in({"optimizer": {"state": rows, "param_groups": groups}})
    assert [list(naming.names.values()) for naming in named_by_itself(state, specs)] == expected


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {"state": {}, "param_groups": []},
        {"state": {}, "param_groups": [{"lr": 1}]},
        {"state": {}, "param_groups": [{"params": [0, 0]}]},
        {"state": {}, "param_groups": [{"params": [0.5]}]},
        {"state": {}, "param_groups": [{"params": [0]}, {"params": ["0"]}]},
        {"state": 3, "param_groups": [{"params": [0]}]},
        {"a": {"b": {"c": {"d": {"e": {"state": {}, "param_groups": [{"params": [0]}]}}}}}},
    ],
)
def test_noop_values_other_than_optimizers(value):
    assert list(optimizers_in({"optimizer": value})) == []


@pytest.mark.parametrize(
    ("shape", "row", "column", "expected"),
    [
        pytest.param((8, 4), (8,), (4,), True, id="a-matrix"),
        pytest.param((8, 4, 3, 3), (8, 4, 3), (8, 4, 3), True, id="the-last-axes-of-a-kernel"),
        pytest.param((8, 4, 3, 3), (8, 3, 3), (4, 3, 3), True, id="the-longest-axes-as-in-timm"),
        pytest.param((8, 4, 3, 3), (8, 1, 3, 3), (1, 4, 3, 3), True, id="axes-that-are-kept"),
        pytest.param((8, 4, 3, 3), (8, 3), (4, 3), False, id="two-axes-less"),
        pytest.param((8, 4, 3, 3), (8, 5, 3), (4, 3, 3), False, id="another-length"),
    ],
)
def test_factored_moments_have_an_axis_less(shape, row, column, expected):
    kept = {"exp_avg_sq_row": TensorSpec("float32", row), "exp_avg_sq_col": TensorSpec("float32", column)}
    assert fits(kept, shape) is expected
