"""The public API, from the file that comes in to the file that goes out."""

import argparse
import io
import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckptfix
from ckptfix.core.finding import Level
from ckptfix.core.plan import Plan
from ckptfix.errors import WriteError
from tests.checks import assert_same

FACTORIES = """
from torch import nn

def net(classes=4):
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, classes))

def broken():
    return helper()

def helper():
    raise ValueError("no weights for you")
"""


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def net(classes: int = 4, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, classes))


def prefixed(state: dict[str, Any], prefix: str = "module.") -> dict[str, Any]:
    return {prefix + key: value for key, value in state.items()}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A training checkpoint of a DataParallel model."""
    content = {
        "state_dict": nn.DataParallel(net()).state_dict(),
        "optimizer": {"state": {0: {"m": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]},
        "args": argparse.Namespace(lr=0.1),
        "epoch": 3,
    }
    torch.save(content, tmp_path / "net.pth")
    return tmp_path / "net.pth"


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of a module with factories in the working directory."""
    name = f"repairing_{abs(hash(request.node.nodeid))}"
    (tmp_path / f"{name}.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    return name


# Sources and targets


def test_the_source_is_a_path_a_path_object_or_a_state_dict(file):
    for source in (str(file), file, torch.load(file, weights_only=False)["state_dict"]):
        assert_same(ckptfix.repair(source).state_dict(), net().state_dict())


def test_the_target_is_a_module_a_factory_or_a_file(file, factories, tmp_path):
    torch.save(net(seed=7).state_dict(), tmp_path / "like.pth")
    for target in (
        {"model": net(seed=7)},
        {"model": f"{factories}:net"},
        {"model": f"{factories}:net", "model_args": {"classes": 4}},
        {"like": tmp_path / "like.pth"},
        {"like": str(tmp_path / "like.pth")},
    ):
        repair = ckptfix.repair(file, **target)
        assert_same(repair.state_dict(), net().state_dict())
        assert repair.report.exit_code == 0
        assert repair.report.coverage is not None
        assert repair.report.coverage.share == 1
    report = ckptfix.check(file, f"{factories}:net", model_args=[10])
    assert [finding.code for finding in report.remaining if finding.level == Level.ERROR] == ["KEY102", "FIT103"]


API: Any = ckptfix
"""The same without its types, to be called with the wrong ones."""


@pytest.mark.parametrize(
    ("call", "says"),
    [
        pytest.param(lambda file: API.check(net(), file), "the source is of type Sequential", id="arguments swapped"),
        pytest.param(lambda file: API.load(str(file), net()), "pass the torch.nn.Module first", id="load swapped"),
        pytest.param(
            lambda file: API.check(file, 5), "model is of type int; pass a torch.nn.Module", id="a number as model"
        ),
        pytest.param(
            lambda file: API.check(file, net().state_dict()),
            "model is of type OrderedDict; pass",
            id="a state_dict as model",
        ),
        pytest.param(
            lambda file: API.check(file, smoke=False), "no setting 'smoke'; it is one of repair", id="of repair"
        ),
        pytest.param(lambda file: API.check(file, nn.Linear), "pass a torch.nn.Module", id="a class as model"),
        pytest.param(lambda file: API.check(file, net(), like=file), "exclude each other", id="two targets"),
        pytest.param(lambda file: API.check(file, colour="red"), "check() has no setting 'colour'", id="setting"),
        pytest.param(lambda file: API.check(file, format="onnx"), "give pth, safetensors or universal", id="format"),
        pytest.param(lambda file: API.check(file, for_torch="new"), "not a version", id="version"),
        pytest.param(lambda file: API.check(file, select=("XYZ",)), "no rule code begins", id="code"),
        pytest.param(lambda file: API.check(file, select="EY"), "no rule code begins", id="code as text"),
        pytest.param(lambda file: API.check(file, select=5), "select=5: give a string", id="a number as codes"),
        pytest.param(lambda file: API.check(file, ignore=[5]), "ignore=[5]: give", id="a number as code"),
        pytest.param(lambda file: API.check(file, weights="ema"), "found: state_dict", id="weights"),
        pytest.param(lambda file: API.check(file, fill=file), "add model= or like=", id="a donor and no target"),
        pytest.param(lambda file: API.repair(file, net(), smoke=True), "needs a factory", id="smoke"),
        pytest.param(lambda file: API.repair(file, output=file), "is the source itself", id="output is the source"),
        pytest.param(lambda file: API.repair(file, output=file.parent), "is a folder", id="output is a folder"),
        pytest.param(lambda file: API.repair(file, output=f"{file}.d/"), "is the name of a folder", id="with a slash"),
        pytest.param(
            lambda file: API.repair(file, output="x", beside=True), "output= and beside= exclude", id="two outputs"
        ),
        pytest.param(
            lambda file: API.repair(file, beside=True, in_place=True), "beside= and in_place= exclude", id="two places"
        ),
        pytest.param(lambda file: API.repair(file, backup=True), "needs in_place=", id="backup of what"),
        pytest.param(lambda file: API.repair({}, in_place=True), "has no path", id="memory in place"),
        pytest.param(
            lambda file: API.repair(file, in_place=True, format="safetensors"),
            "keeps the name",
            id="another format",
        ),
        pytest.param(lambda file: API.load(net(), file, map_location="meta"), "no values to load", id="onto meta"),
        pytest.param(lambda file: API.check({1: torch.ones(1), "1": torch.ones(1)}), "twice", id="1 and '1'"),
    ],
)
def test_usage_errors_are_one_line_that_says_what_to_do(file, call, says):
    with pytest.raises(ckptfix.CkptfixError) as caught:
        call(file)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in file.parent.iterdir()) == ["net.pth"]


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ckptfix.UnreadableError, match=r"nowhere\.pth"):
        ckptfix.check(tmp_path / "nowhere.pth")


def test_errors_in_a_factory_have_the_users_traceback(file, factories):
    with pytest.raises(ckptfix.TargetError, match="raised ValueError: no weights for you") as caught:
        ckptfix.check(file, f"{factories}:broken")
    text = caught.value.traceback_text
    assert "in broken" in text
    assert "in helper" in text
    assert str(Path(ckptfix.__file__).parent) not in text


def test_codes_may_be_one_text_or_a_list(file):
    assert [finding.code for finding in ckptfix.check(file, select="KEY").findings] == ["KEY102"]
    assert [finding.code for finding in ckptfix.check(file, select=["FIL"], ignore="FIL103").findings] == ["FIL102"]


# What is repaired


def test_check_reports_fixes_and_writes_nothing(file):
    report = ckptfix.check(file, net())
    assert (report.exit_code, report.edits, report.fixed, report.output) == (1, (), (), None)
    (finding,) = [finding for finding in report.findings if finding.code == "KEY102"]
    assert (finding.name, finding.level, len(finding.keys)) == ("wrapper-prefix", Level.ERROR, 9)
    assert finding.fix is not None
    assert [path.name for path in file.parent.iterdir()] == ["net.pth"]


def test_weights_picks_the_state_dict(tmp_path):
    torch.save({"model": net(seed=1).state_dict(), "ema": net(seed=2).state_dict()}, tmp_path / "two.pth")
    for name, seed in (("model", 1), ("ema", 2)):
        assert_same(ckptfix.repair(tmp_path / "two.pth", weights=name).state_dict(), net(seed=seed).state_dict())


PART = {key: value for key, value in net().state_dict().items() if not key.startswith("2.")}


@pytest.mark.parametrize(
    ("source", "settings", "code"),
    [
        pytest.param(net().state_dict(), {}, 0, id="clean"),
        pytest.param(prefixed(net().state_dict()), {}, 0, id="fixed"),
        pytest.param({**net().state_dict(), "x": torch.ones(1)}, {}, 1, id="an unsafe fix is not enabled"),
        pytest.param({**net().state_dict(), "x": torch.ones(1)}, {"unsafe_fixes": True}, 0, id="and now it is"),
        pytest.param({"0.weight": torch.ones(4, 3)}, {}, 1, id="coverage below 100 %"),
        pytest.param(PART, {"fill": "target"}, 1, id="though the fill was asked for"),
        pytest.param({"0.weight": torch.ones(4, 3)}, {"select": ("VAL",)}, 1, id="whatever was selected"),
        pytest.param({"0.weight": torch.ones(4, 3)}, {"ignore": ("FIT",)}, 1, id="or ignored"),
        pytest.param(prefixed(net().state_dict()), {"ignore": ("KEY", "FIT")}, 1, id="a load that would fail"),
        pytest.param({**net().state_dict(), "2.bias": torch.full((4,), float("nan"))}, {}, 1, id="a value is broken"),
    ],
)
def test_exit_code(source, settings, code, tmp_path):
    report = ckptfix.repair(source, net(), output=tmp_path / "out.pth", **settings).report
    assert report.exit_code == code
    assert report.obstacles or (report.coverage and report.coverage.share >= 0.5)
    assert (report.output is not None) == (not report.obstacles)
    assert (tmp_path / "out.pth").exists() == (not report.obstacles)


def test_a_note_never_changes_the_exit_code(samples):
    report = ckptfix.check(samples / "imagenet_dataparallel_cuda3.pth", select=("FIL103",))
    assert [finding.level for finding in report.findings] == [Level.NOTE]
    assert report.exit_code == 0


@pytest.mark.parametrize("allow_untrained", [False, True])
def test_a_mostly_untrained_model_is_written_only_on_request(tmp_path, allow_untrained):
    part = {key: value for key, value in PART.items() if not key.startswith("0.")}
    settings = {"fill": "target", "allow_untrained": allow_untrained}
    report = ckptfix.repair(part, net(), output=tmp_path / "out.pth", **settings).report
    assert report.exit_code == 1
    assert (tmp_path / "out.pth").exists() is allow_untrained


def test_a_model_that_would_be_mostly_untrained_is_loaded_only_when_that_is_asked_for():
    part = {key: value for key, value in PART.items() if not key.startswith("0.")}
    model = net()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    refused = pytest.raises(
        ckptfix.TargetError, match=r"parameters of Sequential come from the file; .*allow_untrained"
    )
    with refused:
        ckptfix.load(model, part, fill="target")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert ckptfix.load(model, part, fill="target", allow_untrained=True).exit_code == 1


@pytest.mark.parametrize("prefix", ["", "module.", "model.encoder."])
def test_a_donor_under_any_prefix(tmp_path, prefix):
    torch.save({"state_dict": prefixed(net(seed=3).state_dict(), prefix)}, tmp_path / "donor.pth")
    part = {key: value for key, value in net().state_dict().items() if not key.startswith("2.")}
    repair = ckptfix.repair(part, net(), fill=tmp_path / "donor.pth")
    assert torch.equal(repair.state_dict()["2.weight"], net(seed=3).state_dict()["2.weight"])
    assert repair.report.coverage is not None
    assert repair.report.coverage.share < 1
    assert dict(repair.report.coverage.filled) == {"donor": 20}
    assert (repair.report.is_open, repair.report.exit_code) == (False, 0)  # the donor's values are trained


def test_accepted_findings_do_not_remain(tmp_path):
    state = prefixed(net().state_dict(), "module.")
    state["module.2.weight"][0] = float("nan")
    torch.save(state, tmp_path / "f.pth")
    for accept, code in (((), 1), (("KEY",), 1), (("VAL101",), 0), (("VAL",), 0)):
        report = ckptfix.repair(tmp_path / "f.pth", accept=accept).report
        assert report.exit_code == code
        assert "VAL101" in [finding.code for finding in report.remaining]
        assert ("[accepted]" in str(report)) is (code == 0)


def test_fill_is_seeded(factories):
    part = {key: value for key, value in net().state_dict().items() if not key.startswith("2.")}
    first, again, other = (
        ckptfix.repair(part, f"{factories}:net", fill="target", seed=seed, smoke=False).state_dict()["2.weight"]
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_drop_mismatched_and_fill():
    state = net(classes=1000).state_dict()
    kept = ckptfix.repair(state, net(seed=4))
    assert kept.report.obstacles == ("2.weight", "2.bias")
    done = ckptfix.repair(state, net(seed=4), drop_mismatched=True, fill="target")
    assert (done.report.is_open, done.report.exit_code) == (False, 1)
    assert torch.equal(done.state_dict()["2.bias"], net(seed=4).state_dict()["2.bias"])
    assert torch.equal(done.state_dict()["0.bias"], state["0.bias"])


# In memory


def test_numpy_arrays_are_taken_as_the_tensors_that_share_their_memory():
    arrays = {key: value.numpy() for key, value in prefixed(net().state_dict()).items()}
    back, report = ckptfix.repair_state_dict(arrays, net())
    assert report.exit_code == 0
    assert_same(dict(back), dict(net().state_dict()))
    assert back["0.weight"].data_ptr() == arrays["module.0.weight"].ctypes.data


def test_a_numpy_array_among_tensors_keeps_its_values():
    state = {"w": torch.ones(2), "extra": {"table": np.arange(3.0)}, "steps": np.arange(2)}
    back, _ = ckptfix.repair_state_dict(state)
    assert torch.equal(back["extra"]["table"], torch.arange(3.0).double())
    assert torch.equal(back["steps"], torch.arange(2))


def test_numpy_arrays_that_torch_cannot_share_are_copied():
    read_only = np.ones(3, dtype=np.float32)
    read_only.flags.writeable = False
    big = np.arange(3, dtype=">i4")
    arrays = {"r": read_only, "b": big, "n": big[::-1], "s": np.array(["a"])}
    back, _ = ckptfix.repair_state_dict(arrays)
    assert back.pop("s") == ["a"]
    numbers = torch.arange(3).int()
    assert_same(dict(back), {"r": torch.ones(3), "b": numbers, "n": numbers.flip(0)})


def test_repair_state_dict_copies_nothing_and_leaves_its_argument():
    before = nn.DataParallel(net()).state_dict()
    keys, metadata = list(before), dict(vars(before)["_metadata"])
    after, report = ckptfix.repair_state_dict(before, net())
    assert report.exit_code == 0
    assert [value.data_ptr() for value in after.values()] == [value.data_ptr() for value in before.values()]
    assert (list(before), dict(vars(before)["_metadata"])) == (keys, metadata)


def test_ties_and_views_are_kept():
    model = Tied()
    after, _ = ckptfix.repair_state_dict(prefixed(model.state_dict()), Tied())
    assert after["embed.weight"].data_ptr() == after["head.weight"].data_ptr()
    after, report = ckptfix.repair_state_dict({"embed.weight": torch.ones(5, 3)}, Tied())
    assert after["embed.weight"].data_ptr() == after["head.weight"].data_ptr()
    assert [finding.code for finding in report.fixed] == ["FIT105"]


def test_parameters_are_accepted():
    before = dict(nn.DataParallel(net()).named_parameters())
    after, _ = ckptfix.repair_state_dict(before)
    assert all(value.requires_grad for value in after.values())
    assert after["0.weight"].data_ptr() == before["module.0.weight"].data_ptr()


def test_objects_of_an_extra_state_are_unchanged(tmp_path):
    native = {"dtype": torch.float16, "device": torch.device("cpu"), "scheme": torch.per_tensor_affine}
    before = {"module.w": torch.ones(2), "module._extra_state": {**native, "buffer": io.BytesIO(b"fp8"), "call": len}}
    after, report = ckptfix.repair_state_dict(before)
    assert after["_extra_state"] == before["module._extra_state"]
    assert [finding.code for finding in report.findings] == ["KEY102"]
    with pytest.raises(WriteError, match="BytesIO"):
        ckptfix.repair(before, output=tmp_path / "out.pth")
    ckptfix.repair({**before, "module._extra_state": native}, output=tmp_path / "out.pth")
    assert torch.load(tmp_path / "out.pth", weights_only=True)["_extra_state"] == native


def test_entries_that_are_not_tensors_are_kept():
    before = {"module.a": torch.ones(1), "module.scale": 2.0, "module.packed": (torch.ones(2), [1, None], "x")}
    after, _ = ckptfix.repair_state_dict(before)
    assert list(after) == ["a", "scale", "packed"]
    assert after["scale"] == 2.0
    assert after["packed"][1:] == ([1, None], "x")
    assert torch.equal(after["packed"][0], torch.ones(2))


# load


def test_load(file):
    model = net(seed=9)
    report = ckptfix.load(model, file)
    assert report.exit_code == 0
    assert report.output is None
    assert_same(model.state_dict(), net().state_dict())


@pytest.mark.parametrize("map_location", ["cpu", torch.device("cpu"), None])
def test_load_with_a_map_location(map_location):
    model = net(seed=9)
    ckptfix.load(model, prefixed(net().state_dict()), map_location=map_location)
    assert_same(model.state_dict(), net().state_dict())


def test_a_refused_load_leaves_the_model_unchanged():
    model, before = net(seed=9), net(seed=9).state_dict()
    with pytest.raises(
        ckptfix.TargetError, match=r"does not fit Sequential \(2 keys, 2\.weight.*FIT103.*; drop_mismatched=True"
    ):
        ckptfix.load(model, net(classes=9).state_dict())
    assert_same(model.state_dict(), before)


def test_load_into_lazy_layers():
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 4))
    ckptfix.load(model, prefixed(net().state_dict()))
    assert_same(dict(model.state_dict()), dict(net().state_dict()))


def test_load_into_a_model_on_the_meta_device_is_refused():
    with torch.device("meta"):
        model = net()
    with pytest.raises(ckptfix.TargetError, match="assign=True"):
        ckptfix.load(model, net().state_dict())
    model.load_state_dict(ckptfix.repair(prefixed(net().state_dict()), model).state_dict(), assign=True)
    assert_same(model.state_dict(), net().state_dict())


# Files


def test_the_container_and_the_permissions_are_kept(file, tmp_path):
    file.chmod(0o640)
    report = ckptfix.repair(file, net(), output=tmp_path / "out.pth").report
    assert report.output == str(tmp_path / "out.pth")
    assert stat.S_IMODE((tmp_path / "out.pth").stat().st_mode) == 0o640
    loaded = torch.load(tmp_path / "out.pth", weights_only=True)
    assert_same(loaded["state_dict"], net().state_dict())
    assert (loaded["epoch"], loaded["args"]) == (3, {"lr": 0.1})
    assert loaded["optimizer"]["param_groups"] == [{"lr": 0.1}]
    assert torch.equal(loaded["optimizer"]["state"][0]["m"], torch.ones(2))
    assert ckptfix.check(tmp_path / "out.pth", net(), ignore="VAL").findings == ()


def test_dry_run_writes_nothing(file):
    before = file.read_bytes()
    for place in ({"output": file.with_name("out.pth")}, {"beside": True}, {"in_place": True}):
        repair = ckptfix.repair(file, net(), dry_run=True, **place)
        assert repair.plan
        assert repair.report.output is None
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == ["net.pth"]


def test_beside_and_only_if_there_is_something_to_repair(file):
    report = ckptfix.repair(file, net(), beside=True).report
    assert report.output == str(file.with_name("net.fixed.pth"))
    again = ckptfix.repair(report.output, net(), beside=True).report
    assert (again.output, again.exit_code) == (None, 0)


def test_in_place_with_a_backup(file):
    before = file.read_bytes()
    link = file.with_name("link.pth")
    link.symlink_to(file)
    ckptfix.repair(link, net(), in_place=True, backup=True)
    assert link.is_symlink()
    assert file.with_name("net.pth.bak").read_bytes() == before
    assert_same(torch.load(file, weights_only=True)["state_dict"], net().state_dict())
    again = ckptfix.repair(file, net(), in_place=True, backup=True).report
    assert (again.output, again.exit_code) == (None, 0)
    torch.save({f"module.{key}": value for key, value in net().state_dict().items()}, file)
    with pytest.raises(ckptfix.WriteError, match="a backup already exists"):
        ckptfix.repair(file, net(), in_place=True, backup=True)


def test_a_missing_file_raises_file_not_found(tmp_path):
    for call in (ckptfix.open_checkpoint, ckptfix.check, lambda path: ckptfix.load(net(), path)):
        with pytest.raises(FileNotFoundError, match=r"^[^']*gone\.pth: cannot be opened: No such file") as caught:
            call(tmp_path / "gone.pth")
        assert isinstance(caught.value, ckptfix.UnreadableError)


def test_a_plan_is_saved_and_applied(file, tmp_path):
    plan = ckptfix.repair(file, net(), dry_run=True).plan
    saved = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    repair = ckptfix.repair(file, net(), plan=saved, output=tmp_path / "out.pth")
    assert repair.report.edits == plan.edits
    assert repair.report.exit_code == 0
    assert_same(torch.load(tmp_path / "out.pth", weights_only=True)["state_dict"], net().state_dict())
    with pytest.raises(ckptfix.PlanError, match="belongs to another"):
        ckptfix.repair(tmp_path / "out.pth", net(), plan=saved)


def test_a_saved_plan_does_only_what_it_says(file):
    half = Plan(ckptfix.repair(file, net()).plan.steps[:1])
    report = ckptfix.repair(file, net(), plan=half).report
    assert report.edits == half.edits
    assert report.exit_code == 1
    assert [finding.code for finding in report.findings if finding.code.startswith("KEY")] == ["KEY102"]


def test_safetensors_and_back(tmp_path):
    model = Tied()
    content = {"state_dict": nn.DataParallel(model).state_dict(), "epoch": 3, "shape": (1, 2)}
    torch.save(content, tmp_path / "tied.pth")
    report = ckptfix.repair(tmp_path / "tied.pth", Tied(), output=tmp_path / "tied.safetensors").report
    assert report.exit_code == 0
    assert load_file(tmp_path / "tied.safetensors").keys() == {"embed.weight"}
    back = ckptfix.repair(tmp_path / "tied.safetensors", output=tmp_path / "back.pth")
    assert back.report.exit_code == 0
    loaded = torch.load(tmp_path / "back.pth", weights_only=True)
    assert (loaded["epoch"], loaded["shape"]) == (3, (1, 2))
    assert_same(loaded["state_dict"], model.state_dict())
    assert loaded["state_dict"]["embed.weight"].data_ptr() == loaded["state_dict"]["head.weight"].data_ptr()
    other = Tied()
    ckptfix.load(other, tmp_path / "tied.safetensors")
    assert torch.equal(other.head.weight, model.head.weight)


def test_for_an_old_torch(tmp_path):
    state = prefixed(net().state_dict())
    report = ckptfix.repair(state, net(), for_torch="0.4.0", output=tmp_path / "old.pth").report
    assert report.exit_code == 0
    assert (tmp_path / "old.pth").read_bytes()[:2] != b"PK"
    loaded = torch.load(tmp_path / "old.pth", weights_only=True)
    assert list(loaded) == [key for key in net().state_dict() if not key.endswith("num_batches_tracked")]
    back, report = ckptfix.repair_state_dict(loaded, net(), for_torch="2.0")
    assert report.exit_code == 0
    assert list(back) == list(net().state_dict())


def test_a_failed_forward_test_leaves_no_file(file, factories, tmp_path):
    report = ckptfix.repair(file, f"{factories}:net", output=tmp_path / "out.pth", input="2x99").report
    assert report.smoke is not None
    assert report.smoke.passed is not True
    assert (report.exit_code == 1) == (report.output is None)


@pytest.mark.slow
def test_a_passed_forward_test(file, factories, tmp_path):
    report = ckptfix.repair(file, f"{factories}:net", output=tmp_path / "out.pth").report
    assert report.smoke is not None
    assert report.smoke.passed
    assert report.exit_code == 0


def test_an_argument_of_another_type_is_named(tmp_path: Path) -> None:
    state: Any = {"a": torch.ones(2)}
    torch.save(state, tmp_path / "a.pth")
    with pytest.raises(ckptfix.UsageError, match=r"^like is of type dict; give the path"):
        ckptfix.check(state, like=state)
    with pytest.raises(ckptfix.UsageError, match=r"^plan is of type str; give a Plan"):
        ckptfix.repair(state, plan="plan.json")  # type: ignore[arg-type]  # that is the point
    with pytest.raises(ckptfix.UsageError, match=r"^weights is of type int; give the name"):
        ckptfix.open_checkpoint(tmp_path / "a.pth", weights=0)  # type: ignore[arg-type]  # that is the point


def test_a_type_checker_knows_the_settings(file):
    """Mypy reports a comment that ignores nothing, so each of these is an error for it."""
    with pytest.raises(ckptfix.UsageError, match="did you mean 'fill'"):
        ckptfix.check(file, filll="target")  # type: ignore[call-arg]
    with pytest.raises(ckptfix.UsageError, match="give a string"):
        ckptfix.repair(file, select=5)  # type: ignore[arg-type]


def test_the_package_names_its_api():
    assert all(hasattr(ckptfix, name) for name in ckptfix.__all__)
    with pytest.raises(AttributeError, match="no attribute 'repare'"):
        _ = ckptfix.repare  # type: ignore[attr-defined]
    assert set(dir(ckptfix)) == {*ckptfix.__all__, "__version__"}
