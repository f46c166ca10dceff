"""KEY106: the layers have the names and the layout of another implementation."""

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.edits import Rename
from ckptfix.core.finding import Applicability, Blocks
from ckptfix.maps.inference import cached
from ckptfix.report.advice import Presentation, next_command, recommended
from ckptfix.report.display import report_lines
from ckptfix.rules.key106_renamed_layers import renamed_layers
from tests.checks import check_noop
from tests.rules.proposals import propose


def net(classes: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3))
    return nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), inner, nn.Linear(3, classes))


def prefixed(state: Any, prefix: str) -> dict[str, Any]:
    return {prefix + key: value for key, value in state.items()}


def within(**modules: nn.Module) -> Any:
    return nn.ModuleDict(modules)


def classifier(head: str, *others: str) -> Any:
    torch.manual_seed(0)
    heads = {name: nn.Linear(3, 4) for name in (head, *others)}
    return within(stem=nn.Conv2d(3, 3, 3), bn=nn.BatchNorm2d(3), **heads)


class Attention(nn.Module):
    """Attention of one library or another: fused or split, as a module tree only."""

    def __init__(self, names: tuple[str, ...], out: str, width: int = 8) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(width, 3 * width // len(names)))
        self.add_module(out, nn.Linear(width, width))


def transformer(blocks: str, attention: str, names: tuple[str, ...], out: str, norms: tuple[str, str]) -> Any:
    def block() -> Any:
        return within(
            **{norms[0]: nn.LayerNorm(8), attention: Attention(names, out), norms[1]: nn.LayerNorm(8)},
            mlp=within(fc1=nn.Linear(8, 32), fc2=nn.Linear(32, 8)),
        )

    torch.manual_seed(0)
    return within(**{blocks: nn.ModuleList(block() for _ in range(3))}, head=nn.Linear(8, 5))


FUSED = ("blocks", "attn", ("qkv",), "proj", ("norm1", "norm2"))
SPLIT = ("layer", "attention", ("query", "key", "value"), "output", ("layernorm_before", "layernorm_after"))


@pytest.mark.parametrize(
    ("state", "model"),
    [
        pytest.param(net().state_dict(), None, id="no target"),
        pytest.param(net().state_dict(), net(), id="all in place"),
        pytest.param(net(7).state_dict(), net(), id="another head"),
        pytest.param(classifier("aux1", "aux2").state_dict(), classifier("fc"), id="two that could be the head"),
        pytest.param(classifier("fc").state_dict(), classifier("a", "b"), id="two that the head could be"),
        pytest.param({**classifier("head").state_dict(), "head.scale": torch.ones(4)}, classifier("fc"), id="a part"),
        pytest.param(within(norm=nn.LayerNorm(3), a=nn.Linear(2, 2)).state_dict(),
                     within(last=nn.LayerNorm(3), a=nn.Linear(2, 2)), id="vectors only"),
        pytest.param(transformer(*FUSED).state_dict(), net(), id="another network"),
    ],
)  # fmt: skip
def test_noop(state, model):
    check_noop(state, "KEY106", model)


def test_the_only_module_of_its_shapes_may_have_another_name():
    state, model = classifier("head").state_dict(), classifier("fc")
    (finding,) = propose(renamed_layers, state, model)
    assert finding.fix is not None
    assert finding.fix.applicability == Applicability.UNSAFE
    done, report = ckptfix.repair_state_dict(state, model, rename_layers=True)
    model.load_state_dict(done)
    assert report.exit_code == 0
    assert torch.equal(model["fc"].weight, state["head.weight"])


def test_layers_numbered_from_one_are_not_moved():
    """``h.1`` to ``h.3`` may be ``h.0`` to ``h.2``, or ``h.0`` may be missing."""
    model = within(h=nn.ModuleList(nn.ModuleDict({name: nn.Linear(3, 3) for name in "abc"}) for _ in range(3)))
    state = {key.replace("h.0.", "h.3."): value for key, value in model.state_dict().items()}
    for finding in propose(renamed_layers, state, model):
        assert finding.fix is None


class Stages(nn.Module):
    """A stem, two stages of two blocks each, and a head, as in a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 7, bias=False), nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(*(self.block(4, 4) for _ in range(2)))
        first = self.block(4, 8)
        first["downsample"] = nn.Sequential(nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8))
        self.layer2 = nn.Sequential(first, self.block(8, 8))
        self.fc = nn.Linear(8, 3)

    @staticmethod
    def block(inputs: int, outputs: int) -> nn.ModuleDict:
        convs = {"conv1": nn.Conv2d(inputs, outputs, 3), "conv2": nn.Conv2d(outputs, outputs, 3)}
        return nn.ModuleDict({**convs, "bn1": nn.BatchNorm2d(outputs), "bn2": nn.BatchNorm2d(outputs)})


@pytest.mark.parametrize("is_file", [True, False], ids=["the file is a sequence", "the target is a sequence"])
def test_the_children_of_a_model_in_a_sequence(is_file):
    """All of it is certain: the shapes of the stages, and the names in the blocks."""
    named, numbered = Stages(), nn.Sequential(*Stages().children())
    source, target = (numbered, named) if is_file else (named, numbered)
    done, report = ckptfix.repair_state_dict(source.state_dict(), target)
    assert report.exit_code == 0
    wanted = dict(zip(target.state_dict(), source.state_dict().values(), strict=True))
    assert all(torch.equal(done[key], value) for key, value in wanted.items())


def _fused(model: Any, number: int, kind: str) -> torch.Tensor:
    return torch.cat([getattr(model["layer"][number]["attention"].get_submodule(name), kind) for name in SPLIT[2]])


@pytest.mark.parametrize("is_fused", [True, False], ids=["the file fuses", "the target fuses"])
def test_query_key_and_value_are_split_and_fused(is_fused):
    fused, split = transformer(*FUSED), transformer(*SPLIT)
    source, target = (fused, split) if is_fused else (split, fused)
    _, report = ckptfix.repair_state_dict(source.state_dict(), target)
    assert report.exit_code == 1, "the rows may be interleaved, which shows in no shape"
    done, report = ckptfix.repair_state_dict(source.state_dict(), target, rename_layers=True)
    assert report.exit_code == 0
    target.load_state_dict(done)
    for number in range(3):
        for kind in ("weight", "bias"):
            assert torch.equal(getattr(fused["blocks"][number]["attn"].qkv, kind), _fused(split, number, kind))
        assert torch.equal(fused["blocks"][number]["norm2"].weight, split["layer"][number]["layernorm_after"].weight)


def test_files_of_equal_structure_share_one_map():
    """In a zoo, the map is inferred for the first of them."""
    target = transformer(*SPLIT)
    reports = [ckptfix.check(transformer(*FUSED).state_dict(), target, rename_layers=True) for _ in range(2)]
    rules = [
        finding.evidence["rules"] for report in reports for finding in report.findings if "rules" in finding.evidence
    ]
    assert len(rules) == 2
    assert rules[0] == rules[1]
    assert (
        "blocks.{n}.attn.qkv.{weight,bias} → layer.{n}.attention.{query,key,value}.{weight,bias}, split 3" in rules[0]
    )
    before = cached.cache_info().misses
    ckptfix.check(transformer(*FUSED).state_dict(), target, rename_layers=True)
    assert cached.cache_info().misses == before


class Conv1D(nn.Module):
    """GPT-2's linear layer, which stores its weight transposed."""

    def __init__(self, width: int, inputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, width)), nn.Parameter(torch.zeros(width))


def gpt(linear: Any) -> Any:
    def block() -> Any:
        return within(
            ln_1=nn.LayerNorm(8),
            attn=within(c_attn=linear(24, 8), c_proj=linear(8, 8)),
            ln_2=nn.LayerNorm(8),
            mlp=within(c_fc=linear(32, 8), c_proj=linear(8, 32)),
        )

    torch.manual_seed(0)
    return within(h=nn.ModuleList(block() for _ in range(2)), lm_head=nn.Linear(8, 9, bias=False))


def test_a_square_matrix_among_transposed_ones_is_transposed_too():
    source, target = gpt(lambda width, inputs: nn.Linear(inputs, width)), gpt(Conv1D)
    done, report = ckptfix.repair_state_dict(source.state_dict(), target)
    assert report.exit_code == 0
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        assert torch.equal(done[f"h.1.{name}.weight"], source.state_dict()[f"h.1.{name}.weight"].t()), name


def test_a_square_parameter_that_becomes_a_linear_layer_is_left_to_the_user():
    """``x @ projection`` and ``nn.Linear`` hold it transposed, which the shape of a square matrix does not show."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.visual, self.projection = nn.Conv2d(3, 8, 4), nn.Parameter(torch.randn(8, 8))

    model = within(vision=nn.Conv2d(3, 8, 4), projection=nn.Linear(8, 8, bias=False))
    _, report = ckptfix.repair_state_dict(Bare().state_dict(), model, rename_layers=True)
    assert "projection.weight" in {key for finding in report.findings for key in finding.keys if finding.fix is None}
    assert report.exit_code == 1


def test_no_other_advice_for_keys_of_a_map():
    """Missing and unexpected keys point to the map: nothing is to be dropped, and no other model to be named."""
    report = ckptfix.check(transformer(*FUSED).state_dict(), transformer(*SPLIT), values=False)
    assert [remedy.options for remedy in recommended(report)] == [(("rename_layers", True),)]
    shown = "\n".join(map(str, report_lines(report)))
    assert shown.count("missing-key: the fix of KEY106 covers these keys") == 1
    assert "proves it with the model that the file was saved from" in shown
    assert "name the model" not in shown


def test_a_fused_bias_with_rows_that_the_model_lacks_is_neither_dropped_nor_filled():
    """DINOv3 has the bias of the keys as zeros in its `qkv.bias`, and transformers has no such bias."""
    target = transformer(*SPLIT)
    for layer in target.layer:
        layer.attention.key.bias = None
    file = transformer(*FUSED).state_dict()
    for is_renamed in (False, True):
        report = ckptfix.check(file, target, values=False, rename_layers=is_renamed)
        assert all(name != "fill" for remedy in recommended(report) for name, _ in remedy.options)
    offered = {name for finding in report.left for remedy in finding.remedies for name, _ in remedy.options}
    assert not offered & {"fill", "unsafe_fixes"}
    assert any("qkv.bias has no place" in remedy.text for finding in report.left for remedy in finding.remedies)


def test_keys_that_a_complete_map_leaves_are_dropped():
    target = transformer(*SPLIT)
    file = within(backbone=transformer(*FUSED), pretraining=nn.Linear(8, 7))
    report = ckptfix.check(file.state_dict(), target, values=False)
    assert [remedy.options for remedy in recommended(report)] == [(("rename_layers", True), ("unsafe_fixes", True))]
    call = next_command(report, Presentation(call=report.call))
    assert "rename_layers=True, unsafe_fixes=True" in call
    _, report = ckptfix.repair_state_dict(file.state_dict(), target, rename_layers=True, unsafe_fixes=True)
    assert report.exit_code == 0


def test_layers_like_those_of_the_map_are_not_dropped():
    deep, target = transformer(*FUSED), transformer(*SPLIT)
    deep.blocks.append(copy.deepcopy(deep.blocks[0]))
    report = ckptfix.check(deep.state_dict(), target, values=False)
    assert all(("unsafe_fixes", True) not in remedy.options for remedy in recommended(report))


def test_a_tensor_of_two_names_in_the_target():
    """SAM has its random positions once, and transformers ties two layers to them, neither of which has their name."""
    positions = nn.Embedding(5, 4)
    target = within(image=within(embedding=positions), prompt=within(embedding=positions), body=transformer(*SPLIT))
    file = within(matrix=nn.Embedding(5, 4), body=transformer(*FUSED))
    done, report = ckptfix.repair_state_dict(file.state_dict(), target, rename_layers=True)
    assert report.exit_code == 0
    for name in ("image", "prompt"):
        assert torch.equal(done[f"{name}.embedding.weight"], file.state_dict()["matrix.weight"])
    found = ckptfix.infer_map(file.state_dict(), target)
    (rule,) = (each for each in found.rules if each.source == "matrix.weight")
    assert (rule.target, rule.label, found.missing) == ("image.embedding.weight", "certain", ())


def test_rows_that_may_be_in_another_order_are_named(tmp_path):
    body = {f"h.{at}.mlp.fc{n}.weight": torch.randn(8, 8) for at in range(4) for n in (1, 2)}
    file = body | {f"h.{at}.attn.query_key_value.weight": torch.randn(24, 8) for at in range(4)}
    target = body | {f"h.{at}.attn.{name}_proj.weight": torch.randn(8, 8) for at in range(4) for name in "qkv"}
    torch.save(target, tmp_path / "reference.pth")
    report = ckptfix.check(file, like=tmp_path / "reference.pth", values=False, rename_layers=True)
    (doubt,) = (finding for finding in report.findings if finding.code == "KEY106")
    assert doubt.fix is None
    assert doubt.message.startswith("12 keys of the target split or fused with an unknown order of rows")
    assert doubt.blocks is Blocks.FILLING, "the file has them"


@pytest.mark.parametrize("at", range(4))
def test_a_layer_of_a_sorted_file_does_not_move_others(at):
    model = within(body=transformer(*FUSED), net=nn.ModuleList(nn.Linear(8, 8) for _ in range(4)))
    state = {key.replace(f"net.{at}.", "zzz."): value for key, value in model.state_dict().items()}
    for finding in propose(renamed_layers, dict(sorted(state.items())), model):
        assert finding.fix is None or set(finding.keys) == {f"net.{at}.weight", f"net.{at}.bias"}


def _spelled(state: Any, front: str, between: str) -> dict[str, torch.Tensor]:
    return {front + key.replace(".", between): state[key] for key in sorted(state)}


@pytest.mark.parametrize("classes", [3, 5], ids=["the same head", "another head"])
@pytest.mark.parametrize(("front", "between"), [("", "_"), ("ema_", "_"), ("params/", "/")])
def test_names_with_another_separator(front, between, classes):
    """The file is sorted, and the blocks of a stage are equal: only the names show which is which."""
    source, target = Stages(), Stages()
    target.fc = nn.Linear(8, classes)
    with torch.no_grad():
        for tensor in source.state_dict().values():
            tensor.copy_(1 + torch.rand(tensor.shape))
    state = _spelled(source.state_dict(), front, between)
    drop: dict[str, Any] = {"drop_mismatched": True, "fill": "target"} if classes != 3 else {}
    done, report = ckptfix.repair_state_dict(state, target, values=False, **drop)
    assert report.exit_code == (classes != 3)
    assert done.keys() == target.state_dict().keys()
    assert all(torch.equal(done[key], value) for key, value in source.state_dict().items() if "fc." not in key)


def test_layers_with_other_names_beside_names_with_underscores():
    """One fix has both: after the first, a second pass would propose the rest."""
    model = Stages()
    names = {key: key.replace("fc.", "head.") for key in model.state_dict()}
    first = next(key for key in names if key.endswith("weight"))
    names[first] = first.replace(".", "_")
    state = {names[key]: tensor.clone() for key, tensor in model.state_dict().items()}
    assert not ckptfix.repair_state_dict(state, model, values=False)[1].fixed
    done, report = ckptfix.repair_state_dict(state, model, values=False, rename_layers=True)
    assert report.exit_code == 0
    assert all(torch.equal(done[key], state[name]) for key, name in names.items())


def test_the_transposed_layers_that_a_loader_leaves_over_are_in_the_same_map():
    """The loader of GPT-2 finds `lm_head` below `transformer`, but does not transpose nanoGPT's matrices."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=99, n_positions=32))
    turned = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    state = {
        "transformer." + key.removeprefix("transformer."): (each.T if key.endswith(turned) else each).clone()
        for key, each in model.state_dict().items()
    }
    assert ckptfix.repair_state_dict(state, model, values=False)[1].exit_code == 1
    done, report = ckptfix.repair_state_dict(state, model, values=False, rename_layers=True)
    assert report.exit_code == 0
    assert all(torch.equal(done[key], each) for key, each in model.state_dict().items())


def test_a_renamed_tensor_keeps_its_shape():
    source, target = Stages(), Stages()
    target.fc = nn.Linear(8, 5)
    lines = list(report_lines(ckptfix.check(_spelled(source.state_dict(), "", "_"), target, values=False)))
    (line,) = [line for line in map(str, lines) if "FIT103 shape-mismatch: " in line]
    assert "drop_mismatched=True" in line


@pytest.mark.parametrize(
    ("fronts", "model"),
    [
        pytest.param(("", "ema_"), Stages(), id="two sets under two words"),
        pytest.param(("x",), Stages(), id="letters before all names that are no word"),
        pytest.param(("",), within(a_b=nn.Linear(3, 3), a=within(b=nn.Linear(3, 3))), id="two names that become one"),
    ],
)
def test_names_without_dots_that_could_be_two(fronts, model):
    state = {key: value for front in fronts for key, value in _spelled(model.state_dict(), front, "_").items()}
    fixes = [finding.fix for finding in propose(renamed_layers, state, model) if finding.fix]
    assert all(fix.applicability < Applicability.SAFE for fix in fixes)


def test_one_of_two_sets_is_to_be_chosen_first():
    """A map would ask which layer of which set is meant, for each of them."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3))
    names = {"0": "stem", "1": "norm", "2": "last"}
    state = {
        f"{name}.net.{names[key[0]]}{key[1:]}": value
        for name in ("student", "teacher")
        for key, value in model.state_dict().items()
    }
    offers = [finding.remedies for finding in propose(renamed_layers, state, model) if not finding.fix]
    assert [[remedy.options for remedy in each] for each in offers] == [
        [(("weights", "student"),), (("weights", "teacher"),)]
    ]


def square() -> nn.Module:
    return nn.Linear(4, 4, bias=False)


def layers(names: str, *made: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(zip(names.split(), made, strict=True)))


@pytest.mark.parametrize(
    ("file", "model", "moved"),
    [
        pytest.param(
            layers("q ln fc2 proj", nn.Linear(4, 6), square(), nn.LayerNorm(4), square()),
            layers("norm embed mlp v", nn.Linear(4, 6), square(), nn.LayerNorm(4), square()),
            {"q.weight": "norm.weight", "q.bias": "norm.bias", "ln.weight": "embed.weight", "fc2.weight": "mlp.weight",
             "fc2.bias": "mlp.bias", "proj.weight": "v.weight"},
            id="what two layers could be is settled by what the others leave",
        ),
        pytest.param(
            layers("embed fc1 ln attn", nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(4, 4), nn.BatchNorm1d(4)),
            layers("attn ln embed fc1", nn.Linear(4, 6), nn.Linear(4, 6), nn.BatchNorm1d(4), nn.Linear(4, 4)),
            {},
            id="another look would move more, so that nothing moves",
        ),
    ],
)  # fmt: skip
def test_a_second_pass_moves_nothing_more(file, model, moved):
    done = ckptfix.repair(file.state_dict(), model, unsafe_fixes=True, values=False, smoke=False)
    assert {edit.key: edit.to for edit in done.plan.edits if isinstance(edit, Rename)} == moved


def _blocks(first: str = "conv", second: str = "norm", number: int = 4) -> nn.Module:
    return nn.Sequential(*(within(**{first: nn.Conv2d(4, 4, 3), second: nn.GroupNorm(2, 4)}) for _ in range(number)))


@pytest.mark.parametrize(
    "networks",
    [("actor", "actor_target"), ("module.policy", "module.old_policy"), ("a.b.c.d", "e.f"), ("models.0", "models.1")],
    ids=str,
)
@pytest.mark.parametrize(
    "model",
    [within(net=_blocks()), within(net=_blocks("first", "second")), _blocks("first", "second"), _blocks()],
    ids=["another prefix", "another prefix and other names", "other names", "without a prefix"],
)
def test_nothing_is_taken_from_one_of_two_equal_networks(networks, model):
    state = {
        f"{front}.{key}": torch.rand(value.shape) for front in networks for key, value in _blocks().state_dict().items()
    }
    for layers in (True, False):
        done, report = ckptfix.repair_state_dict(
            state, model, values=False, select=("KEY",), rename_layers=layers, unsafe_fixes=not layers
        )
        assert done.keys() == state.keys()
        choices = [dict(remedy.options).get("weights") for each in report.findings for remedy in each.remedies]
        assert set(choices) == set(networks)
    done, report = ckptfix.repair_state_dict(state, model, values=False, rename_layers=True, weights=networks[1])
    assert report.exit_code == 0
    chosen = (value for key, value in state.items() if key.startswith(networks[1] + "."))
    assert all(torch.equal(value, given) for value, given in zip(done.values(), chosen, strict=True))


@pytest.mark.parametrize(
    ("state", "model"),
    [
        pytest.param(
            within(left=_blocks(), right=_blocks()),
            within(one=_blocks("a", "b"), two=_blocks("a", "b")),
            id="both are wanted",
        ),
        pytest.param(
            within(left=_blocks(), right=_blocks(), last=_blocks()),
            within(left=_blocks(), right=_blocks(), out=_blocks()),
            id="the others keep their names",
        ),
        pytest.param(
            within(left=_blocks(), right=_blocks(number=5)), within(net=_blocks("a", "b")), id="another network"
        ),
    ],
)
def test_layers_of_one_network_are_mapped(state, model):
    report = ckptfix.check(state.state_dict(), model, values=False, rename_layers=True)
    assert any(finding.code == "KEY106" and finding.fix is not None for finding in report.findings)


def test_a_layer_does_not_take_the_name_of_one_that_stays(tmp_path):
    """The values show where three layers are now, but not what became of one whose name they would take."""
    torch.manual_seed(0)
    shapes = {"up": (24, 12), "down": (12, 24), "gate": (24, 12)}
    state = {f"stem.{at}.weight": torch.randn(16, 12) for at in range(2)}
    state |= {f"layers.{at}.{name}.weight": torch.randn(shape) for at in range(2) for name, shape in shapes.items()}
    like = {key.replace("0", "2").replace("1", "3"): torch.randn(16, 12) for key in list(state)[:2]}
    for at in range(2):
        for name in shapes:
            new = f"layers.{at + 1}.{name.replace('down', 'key')}.weight"
            is_kept = (at, name) in {(0, "down"), (0, "gate"), (1, "up")}
            like[new] = state[f"layers.{at}.{name}.weight"] + 0.01 if is_kept else torch.randn(shapes[name])
    torch.save(like, tmp_path / "like.pth")
    for layers in (True, False):
        done, report = ckptfix.repair_state_dict(
            state, like=tmp_path / "like.pth", rename_layers=layers, unsafe_fixes=not layers, select=("KEY",)
        )
        assert all(any(torch.equal(value, given) for given in done.values()) for value in state.values())
        assert report.exit_code == 1
