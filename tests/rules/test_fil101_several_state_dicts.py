"""FIL101: more than one set of weights in a file."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.core.finding import Level, Placeholder, advise
from ckptfix.report.advice import remedies_text
from ckptfix.rules.fil101_several_state_dicts import MOST, choice, choice_of_copies
from tests.checks import assert_same, check_noop


def weights(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"fc.weight": torch.full((2, 2), value), "fc.bias": torch.full((2,), value)}


def saved(folder: Path, content: Any) -> str:
    torch.save(content, folder / "file.pth")
    return str(folder / "file.pth")


@pytest.mark.parametrize(
    ("content", "settings"),
    [
        pytest.param(weights(), {}, id="a bare state_dict"),
        pytest.param({"state_dict": weights(), "epoch": 3}, {}, id="one, in a container"),
        pytest.param(
            {"state_dict": weights(), "optimizer": {"state": {0: {"m": torch.ones(2)}}, "param_groups": []}},
            {},
            id="an optimizer is no set of weights",
        ),
        pytest.param(
            {"state_dict": weights(), "mean": torch.ones(3), "std": torch.ones(3)}, {}, id="loose tensors beside it"
        ),
        pytest.param({"model": weights(), "ema": weights()}, {"weights": "ema"}, id="one was picked"),
        pytest.param(
            {width: [{f"linear.0.{key[3:]}": value for key, value in weights().items()}] * 2 for width in (320, 768)},
            {},
            id="a hypernetwork",
        ),
        pytest.param({"model": weights(), "ema": weights()}, {"weights": "model"}, id="the first was picked"),
    ],
)
def test_noop(tmp_path, content, settings):
    assert ckptfix.check(saved(tmp_path, content), select=("FIL101",), **settings).findings == ()


def test_two_are_listed_and_one_is_taken(tmp_path):
    file = saved(tmp_path, {"state_dict_ema": weights(2), "state_dict": weights(1)})
    (finding,) = ckptfix.check(file, select=("FIL101",)).findings
    assert (finding.level, finding.fix) == (Level.WARNING, None)
    assert "2 sets of weights (state_dict, state_dict_ema); state_dict was taken" in finding.message
    assert finding.evidence["state_dict_ema"] == {"tensors": 2, "numel": 6}
    assert "--weights" in remedies_text(finding.remedies)
    assert ckptfix.open_checkpoint(file).read("fc.bias")[0] == 1
    assert ckptfix.open_checkpoint(file, weights="state_dict_ema").read("fc.bias")[0] == 2


def net() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))


def wrapped(state: dict[str, Any], prefix: str = "module.") -> dict[str, Any]:
    return {prefix + key: value for key, value in state.items()}


def deep() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(12)))


SETS: dict[str, tuple[dict[str, Any], str]] = {
    "the default does not fit": ({"model": weights(), "D": net().state_dict()}, "D"),
    "wrapped": ({"model": weights(), "D": wrapped(net().state_dict())}, "D"),
    "the default fits": ({"model": net().state_dict(), "D": weights()}, "model"),
    "the default fits once it is renamed": ({"model": wrapped(net().state_dict()), "D": weights()}, "model"),
    "of far fewer tensors": ({"model": deep().state_dict(), "D": net().state_dict()}, "D"),
}


@pytest.mark.parametrize(("content", "fitting"), SETS.values(), ids=SETS)
def test_the_set_that_fits_the_model_is_taken(tmp_path, content, fitting, caplog):
    file, model = saved(tmp_path, content), net()
    repaired = ckptfix.repair(file, model, output=tmp_path / "out.pth")
    (finding,) = (each for each in repaired.report.findings if each.code == "FIL101")
    assert (finding.level, finding.remedies, repaired.report.container) == (Level.NOTE, (), fitting)
    assert f"{fitting} was taken, the only one with weights that fit the target" in finding.message
    written = torch.load(tmp_path / "out.pth", weights_only=True)
    other = next(name for name in content if name != fitting)
    assert_same(dict(written[other]), dict(content[other]))
    inner = {key.removeprefix("module."): value for key, value in content[fitting].items()}
    assert_same(dict(written[fitting]), inner)
    with caplog.at_level("INFO", "ckptfix"):
        ckptfix.load(model, file)
    assert f"{fitting} was taken, the only one" in caplog.text
    assert_same(dict(model.state_dict()), inner)


def test_a_set_that_the_user_names_is_never_replaced(tmp_path):
    file = saved(tmp_path, {"model": weights(), "D": net().state_dict()})
    assert ckptfix.check(file, net(), weights="model").container == "model"


def test_of_sets_that_all_lack_something_the_one_with_weights_of_the_target_is_taken(tmp_path):
    partial = {key: value for key, value in net().state_dict().items() if key != "1.bias"}
    file = saved(tmp_path, {"D": weights(), "g_ema": wrapped(partial)})
    report = ckptfix.check(file, net())
    assert report.container == "g_ema"
    assert {finding.code for finding in report.left} == {"KEY102", "FIT101"}
    assert report.coverage is not None
    assert report.coverage.share > 0.8


def test_no_set_fits(tmp_path):
    report = ckptfix.check(saved(tmp_path, {"model": weights(), "D": weights()}), net())
    assert (report.container, report.findings[0].level) == ("model", Level.WARNING)


def test_loading_one_of_two_sets_that_fit_is_logged(tmp_path, caplog):
    file, model = saved(tmp_path, {"G_A": net().state_dict(), "G_B": net().state_dict(), "D": weights()}), net()
    report = ckptfix.load(model, file)
    assert report.findings[0].message.endswith("G_A was taken, and G_B would fit the target as well")
    assert named(report.findings[0].remedies) == ["G_A", "G_B"]
    assert [(record.levelname, report.findings[0].message in record.message) for record in caplog.records] == [
        ("WARNING", True)
    ]


def test_the_optimizer_follows_the_set_that_fits(tmp_path):
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    other = torch.nn.Linear(2, 2)
    content = {"model": other.state_dict(), "D": model.state_dict(), "D_optimizer": optimizer.state_dict()}
    fresh = net()
    resumed = torch.optim.Adam(fresh.parameters())
    ckptfix.load(fresh, saved(tmp_path, content), optimizer=resumed)
    assert_same(dict(fresh.state_dict()), dict(model.state_dict()))
    assert torch.equal(resumed.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_a_name_that_is_not_there(tmp_path):
    with pytest.raises(ckptfix.UsageError, match=r"no weights under 'teacher'; found: .*ema"):
        ckptfix.check(saved(tmp_path, {"model": weights(), "ema": weights()}), weights="teacher")


def test_loose_tensors_do_not_make_a_state_dict_of_the_container(tmp_path):
    file = saved(tmp_path, {"state_dict": weights(), **{f"t{n}": torch.ones(1) for n in range(6)}})
    assert ckptfix.open_checkpoint(file).keys() == ["fc.weight", "fc.bias"]


class Pair(torch.nn.Module):
    def __init__(self, first: str = "student", second: str = "teacher") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.add_module(first, net())
        self.add_module(second, net())


@pytest.mark.parametrize(
    ("state", "model"),
    [
        pytest.param(Pair().state_dict(), Pair(), id="the model has both"),
        pytest.param(Pair("encoder", "decoder").state_dict(), None, id="an encoder and a decoder of equal layers"),
    ],
)
def test_a_model_of_two_networks_is_left_unchanged(state, model):
    check_noop(state, "FIL101", model)
    assert ckptfix.check(state, model, values=False).findings == ()


def test_without_a_model_two_networks_are_a_note():
    report = ckptfix.check(Pair().state_dict(), values=False)
    (finding,) = report.findings
    assert (finding.level, finding.fix, report.exit_code) == (Level.NOTE, None, 0)
    assert "--weights student or --weights teacher" in finding.message


@pytest.mark.parametrize("name", ["student", "teacher"])
@pytest.mark.parametrize("given", [None, net()], ids=["no model", "against the model"])
def test_the_picked_set_is_taken_alone(name, given):
    state = {**Pair().state_dict(), "queue": torch.ones(2)}
    fitting, report = ckptfix.repair_state_dict(state, given, weights=name, values=False)
    assert_same(fitting, dict(Pair().get_submodule(name).state_dict()))
    assert ([finding.code for finding in report.fixed], report.exit_code) == (["FIL101"], 0)


def test_the_set_is_picked_whatever_is_selected():
    state = wrapped(Pair().state_dict())
    cases: list[Any] = [{"ignore": ("FIL101",)}, {"select": ("KEY",)}]
    for settings in cases:
        fitting, _ = ckptfix.repair_state_dict(state, net(), weights="teacher", **settings)
        assert_same(fitting, dict(Pair().get_submodule("teacher").state_dict()))


def test_a_prefix_that_comes_again_inside_is_taken_once():
    state = {"teacher.teacher.weight": torch.ones(2, 2), "teacher.bias": torch.ones(2), "student.bias": torch.ones(2)}
    fitting, _ = ckptfix.repair_state_dict(state, weights="teacher")
    assert list(fitting) == ["teacher.weight", "bias"]


def test_plain_names_next_to_a_copy():
    average = net().state_dict()
    state = {**net().state_dict(), **wrapped(average, "ema_model.")}
    report = ckptfix.check(state, net(), values=False)
    assert remedies_text(report.findings[0].remedies).startswith(
        "--weights plain uses only this set; or --weights ema_model"
    )
    for name, want in (("plain", dict(list(state.items())[:4])), ("ema_model", average)):
        fitting, report = ckptfix.repair_state_dict(state, net(), weights=name, values=False)
        assert_same(fitting, dict(want))
        assert report.exit_code == 0


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_a_wrapped_set_next_to_a_plain_one(prefix):
    inner = net().state_dict()
    state = {**net().state_dict(), **wrapped(inner, prefix)}
    (finding, *_) = ckptfix.check(state, net(), values=False).findings
    assert f"--weights plain uses only this set; or --weights {prefix[:-1]} uses" in remedies_text(finding.remedies)
    fitting, _ = ckptfix.repair_state_dict(state, net(), weights=prefix[:-1])
    assert_same(fitting, dict(inner))


@pytest.mark.parametrize(("front", "sign"), [("model_ema.", ""), ("ema_", "_")], ids=["LitEma", "mmcv"])
def test_a_model_does_not_hide_an_average_without_dots(front, sign):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    leader = "" if sign else "model."
    state = {leader + key: value for key, value in model.state_dict().items()}
    averaged = {front + key.replace(".", sign): value / 2 for key, value in model.state_dict().items()}
    assert ckptfix.check(state, model, select=("FIL101",)).findings == ()
    (note,) = ckptfix.check(state | averaged, model, select=("FIL101",)).findings
    _, name = note.evidence["sets"]
    fitting, _ = ckptfix.repair_state_dict(state | averaged, model, weights=name)
    assert_same(fitting, {key: value / 2 for key, value in model.state_dict().items()})


def test_the_plan_of_a_pick_needs_no_flag(tmp_path):
    file = saved(tmp_path, {"state_dict": wrapped(Pair().state_dict()), "epoch": 3})
    plan = ckptfix.repair(file, weights="teacher", dry_run=True).plan
    ckptfix.repair(file, plan=plan, output=tmp_path / "out.pth")
    content = torch.load(tmp_path / "out.pth", weights_only=True)
    assert content["epoch"] == 3
    assert_same(content["state_dict"], dict(Pair().get_submodule("teacher").state_dict()))


def test_a_set_that_is_not_there():
    with pytest.raises(ckptfix.UsageError, match="no weights under 'ema'"):
        ckptfix.check(Pair().state_dict(), weights="ema")


def named(remedies):
    return [dict(remedy.options).get("weights") for remedy in remedies]


@pytest.mark.parametrize(
    ("names", "first"),
    [(["encoder_k", "encoder_q"], "encoder_q"), (["b", "a"], "b"), (["ema"], "ema")],
    ids=["a follower comes last", "else their order stays", "a single one"],
)
def test_the_likeliest_first(names, first):
    assert named(choice(names))[0] == first


def test_many_are_cut_short():
    names = named(choice([f"n{at}" for at in range(MOST + 1)]))
    assert names == [*(f"n{at}" for at in range(MOST)), Placeholder("NAME")]


def test_copies_and_none():
    assert named(choice_of_copies(["a.b", "a.c", "ema.a.b", "ema.a.c"])) == ["plain", "ema"]
    assert choice_of_copies(["a.b", "module.a.c"]) == advise("remove one of the two sets of weights")
