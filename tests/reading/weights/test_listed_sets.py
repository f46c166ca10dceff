"""A list of a model's parameters in their order, as torch_ema keeps an average."""

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.finding import Applicability, Level
from ckptfix.errors import UnreadableError, UsageError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


def saved(path, model, place=("ema", "shadow_params"), prefix="", frozen=()):
    """Save a model with its average, in which each parameter has half of its value."""
    listed = [each.detach() / 2 for name, each in model.named_parameters() if name not in frozen]
    state = model.state_dict()
    beside: object = listed
    for step in place[:0:-1]:
        beside = {step: beside, "decay": 0.999}
    torch.save({"model": {prefix + key: value for key, value in state.items()}, place[0]: beside}, path)
    averaged = {name: each.detach() / (1 if name in frozen else 2) for name, each in model.named_parameters()}
    return {
        prefix + key: averaged.get(key, averaged["embed.weight"] if key == "head.weight" else state[key])
        for key in state
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"place": ("ema_params",)},
        {"place": ("callbacks", "EMA", "averaged")},
        {"prefix": "module."},
        {"frozen": ("body.weight",)},
    ],
    ids=["torch_ema", "a bare list", "deeper", "wrapped", "without a frozen layer"],
)
def test_the_tensors_get_the_names_of_the_parameters(tmp_path, options):
    expected = saved(tmp_path / "a.pth", Tied(), **options)
    place = ".".join(options.get("place", ("ema", "shadow_params")))
    (note,) = ckptfix.check(tmp_path / "a.pth", select=("FIL101",)).findings
    assert (note.level, note.evidence) == (Level.NOTE, {"sets": [place]})
    ckptfix.repair(tmp_path / "a.pth", output=tmp_path / "b.pth", weights=place, select=("FIL101",))
    written = torch.load(tmp_path / "b.pth", weights_only=True)["model"]
    assert list(written) == list(expected)
    assert all(torch.equal(value, expected[key]) for key, value in written.items())
    head, embed = (next(key for key in written if key.endswith(name)) for name in ("head.weight", "embed.weight"))
    assert written[head].data_ptr() == written[embed].data_ptr()
    opened = ckptfix.open_checkpoint(tmp_path / "a.pth", weights=place).state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in opened.items())


@pytest.mark.parametrize(
    ("widths", "listed"),
    [
        ((4, 4, 4), [torch.ones(4, 4), torch.ones(4, 4)]),
        ((4, 4, 4), [torch.ones(3, 4), torch.ones(4, 4)]),
        ((1, 2, 3, 4), [torch.ones(4, 1), torch.ones(4, 2)]),
        ((4, 4, 4), [torch.ones(4, 4)] * 4),
        ((4, 4, 4), [torch.ones(4, 4)] * 2 + [None]),
    ],
    ids=["any two of three", "another shape", "too few", "too many", "not only tensors"],
)
def test_no_name_is_guessed(tmp_path, widths, listed):
    state = {f"layers.{at}.weight": torch.rand(4, width) for at, width in enumerate(widths)}
    torch.save({"model": state, "ema": {"shadow_params": listed}}, tmp_path / "a.pth")
    assert ckptfix.check(tmp_path / "a.pth", select=("FIL101",)).findings == ()
    with pytest.raises(UsageError, match=r"have no names|no weights under"):
        ckptfix.open_checkpoint(tmp_path / "a.pth", weights="ema")


def test_other_lists_are_not_called_averages(tmp_path):
    state = {f"layers.{at}.weight": torch.rand(4, at + 1) for at in range(3)}
    torch.save({"model": state, "gradients": [*state.values()]}, tmp_path / "a.pth")
    assert ckptfix.check(tmp_path / "a.pth", select=("FIL101",)).findings == ()


def on_its_own(path, model, frozen=(), place="ema"):
    """Save only the average of a model, in which each parameter has half of its value."""
    listed = [each.detach() / 2 for name, each in model.named_parameters() if name not in frozen]
    torch.save({place: {"decay": 0.999, "shadow_params": listed, "collected_params": None}, "step": 3}, path)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)


@pytest.mark.parametrize("made", [Tied, Body])
@pytest.mark.parametrize("place", ["ema", "ema.shadow_params"])
def test_without_a_state_dict_the_model_names_the_tensors(tmp_path, made, place):
    model = made()
    on_its_own(tmp_path / "a.pth", model)
    report = ckptfix.repair(tmp_path / "a.pth", model, output=tmp_path / "b.pth", weights=place, fill="target").report
    named = next(finding for finding in report.applied if finding.code == "FIL101")
    assert named.fix is not None
    assert (named.level, named.fix.applicability, named.fix.asked) == (Level.WARNING, Applicability.UNSAFE, True)
    written = torch.load(tmp_path / "b.pth", weights_only=True)["ema"]["shadow_params"]
    assert made().load_state_dict(written)
    assert all(torch.equal(written[name], each / 2) for name, each in model.named_parameters())
    assert ckptfix.check(tmp_path / "b.pth", model, select=("FIL101",)).findings == ()


def test_a_frozen_layer_is_not_in_the_list(tmp_path):
    on_its_own(tmp_path / "a.pth", Tied(), frozen=("embed.weight",))
    report = ckptfix.check(tmp_path / "a.pth", Tied(), weights="ema", select=("FIL101", "FIT101"))
    assert [finding.keys for finding in report.findings if finding.code == "FIL101"] == [
        ("norm.weight", "norm.bias", "body.weight", "body.bias")
    ]


@pytest.mark.parametrize(
    ("root", "said"),
    [
        ({"ema": {"shadow_params": [torch.ones(3), torch.ones(2)]}}, "weights='ema.shadow_params' and model="),
        ({"a": [torch.ones(3), torch.ones(2)], "b": [torch.ones(3), torch.ones(2)]}, "copy_to), and save model.state"),
        ([torch.ones(3), torch.ones(2)], "copy_to), and save model.state"),
        ({"cuda": [torch.zeros(16, dtype=torch.uint8)] * 2}, ""),
    ],
    ids=["the only list", "two lists", "no place", "random states"],
)
def test_an_error_says_how_the_only_list_gets_names(tmp_path, root, said):
    torch.save(root, tmp_path / "a.pth")
    with pytest.raises(UnreadableError) as caught:
        ckptfix.check(tmp_path / "a.pth")
    assert said in str(caught.value)
    assert ("weights=" in str(caught.value)) is said.startswith("weights=")


@pytest.mark.parametrize(
    ("model", "frozen", "said"),
    [
        (None, (), "in a list, which has no names"),
        (Body(), ("first.bias",), "fit in no order or in several"),
        (nn.Linear(4, 4), (), "fit in no order or in several"),
    ],
    ids=["no model", "either of two biases", "another model"],
)
def test_nothing_is_written_where_the_model_does_not_name_them(tmp_path, model, frozen, said):
    on_its_own(tmp_path / "a.pth", Body(), frozen)
    report = ckptfix.repair(
        tmp_path / "a.pth",
        model,
        output=tmp_path / "b.pth",
        weights="ema",
        unsafe_fixes=True,
        rename_layers=True,
        fill=None if model is None else "target",
    ).report
    (finding,) = [each for each in report.remaining if each.code == "FIL101"]
    assert (finding.level, said in finding.message) == (Level.ERROR, True)
    assert (report.exit_code, report.output, (tmp_path / "b.pth").exists()) == (1, None, False)
