"""FIL102: what ``torch.load`` refuses, and the same as plain data."""

from __future__ import annotations

import argparse
import functools
import pickle
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version
from torch import nn

import ckptfix
from ckptfix.core.edits import Plain
from ckptfix.core.finding import Applicability, Level
from ckptfix.report.advice import Presentation, next_command, remedies_text
from tests.checks import assert_same
from tests.reading.folders.ranks.genuine import unpacked


def saved(folder: Path, content: Any, **how: Any) -> Path:
    torch.save(content, folder / "file.pth", **how)
    return folder / "file.pth"


def weights() -> OrderedDict[str, torch.Tensor]:
    return OrderedDict(weight=torch.arange(4.0).view(2, 2))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(weights(), id="bare"),
        pytest.param(
            {"state_dict": weights(), "epoch": 3, "best": (0.5, None), "names": ["a"], "x": {1, 2}}, id="plain data"
        ),
        pytest.param({"state_dict": weights(), "dtype": torch.float16, "size": torch.Size([2])}, id="words of torch"),
        pytest.param(nn.Linear(2, 2).state_dict(), id="_metadata"),
        pytest.param({"state_dict": weights(), "other": nn.Parameter(torch.ones(2))}, id="a parameter"),
    ],
)
def test_noop(tmp_path, content):
    file = saved(tmp_path, content)
    torch.load(file, weights_only=True)
    assert ckptfix.check(file, select=("FIL102",)).findings == ()


class Space:
    """An object that the library needs which saved it, as a policy of stable-baselines3 its spaces."""

    def __init__(self) -> None:
        self.low, self.high = 0, 1


class Quantiles(nn.Module):
    """A loss, which has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.quantiles, self.inner = [0.1, 0.9], nn.ModuleList([nn.L1Loss()])


class Whole(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)


@pytest.mark.parametrize(
    ("extra", "places"),
    [
        pytest.param(argparse.Namespace(lr=0.1), [], id="a Namespace"),
        pytest.param([Path("a"), np.float32(1), np.ones(2), np.dtype("f4"), frozenset({1})], [], id="plain values"),
        pytest.param(nn.Linear(1, 1), [], id="another model"),
        pytest.param({"ema": Whole()}, ["x.ema"], id="a model of the library's own class"),
        pytest.param({"spaces": [Space(), Space()]}, ["x.spaces[…] (2)"], id="objects"),
        pytest.param({"activation": nn.Tanh}, ["x.activation"], id="a class"),
        pytest.param({"schedule": weights}, ["x.schedule"], id="a function"),
        pytest.param({"norm": functools.partial(nn.LayerNorm, eps=1e-6)}, ["x.norm"], id="a function with arguments"),
        pytest.param({"loss": Quantiles()}, ["x.loss"], id="a loss"),
    ],
)  # fmt: skip
def test_objects_that_the_output_has_only_the_data_of_are_noted(extra, places, tmp_path):
    file = saved(tmp_path, {"state_dict": weights(), "x": extra})
    report = ckptfix.repair(file, output=tmp_path / "out.pth").report
    assert report.exit_code == 0
    assert [each.evidence["objects"] for each in report.findings if "objects" in each.evidence] == [places][
        : len(places)
    ]


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("1",)


def test_noop_nothing_needs_the_objects_of_an_attack(tmp_path):
    report = ckptfix.check(saved(tmp_path, {"state_dict": weights(), "x": Attack()}))
    assert {finding.code for finding in report.findings} == {"FIL102", "FIL901"}
    assert not any("objects" in finding.evidence for finding in report.findings)


class Estimator:
    def __init__(self) -> None:
        self.module_, self.criterion_ = nn.Linear(1, 1), Quantiles()


def test_a_pickled_estimator_is_one_object(tmp_path):
    with (tmp_path / "file.pkl").open("wb") as file:
        pickle.dump(Estimator(), file)
    report = ckptfix.repair(tmp_path / "file.pkl", output=tmp_path / "out.pth").report
    assert report.exit_code == 0
    notes = [finding.evidence for finding in report.findings if finding.level is Level.NOTE]
    assert notes == [{"pickles": ["."]}, {"objects": ["."]}]


def test_a_module_without_parameters_keeps_its_settings(tmp_path):
    file = saved(tmp_path, {"state_dict": weights(), "loss": Quantiles()})
    ckptfix.repair(file, output=tmp_path / "out.pth")
    inner = {"0": {"reduction": "mean"}}
    assert torch.load(tmp_path / "out.pth")["loss"] == {
        "_modules": {"inner": {"_modules": inner}},
        "quantiles": [0.1, 0.9],
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_program_of_a_torchscript_archive_is_noted(tmp_path):
    torch.jit.script(nn.Linear(2, 2)).save(tmp_path / "file.pt")
    report = ckptfix.repair(tmp_path / "file.pt", output=tmp_path / "out.pth").report
    assert report.exit_code == 0
    (note,) = (finding for finding in report.findings if finding.level is Level.NOTE)
    assert "torch.jit.load" in note.message


def as_python2_wrote(folder: Path, raw: bytes, **how: Any) -> Path:
    """A file whose ``note`` is a string of Python 2."""
    file = saved(folder, {"state_dict": weights(), "note": "NOTE"}, **how)
    text = b"X\x04\0\0\0NOTE"
    content = file.read_bytes()
    assert content.count(text) == 1
    file.write_bytes(content.replace(text, b"U" + bytes([len(raw)]) + raw))
    return file


@pytest.mark.parametrize("raw", [b"plain", "größe".encode()], ids=["ASCII", "UTF-8"])
def test_noop_a_string_of_python_2_that_is_utf_8(tmp_path, raw):
    file = as_python2_wrote(tmp_path, raw, _use_new_zipfile_serialization=False)
    assert torch.load(file)["note"] == raw.decode()
    assert ckptfix.check(file, select=("FIL102",)).findings == ()


def test_a_string_of_python_2_that_is_not(tmp_path):
    file = as_python2_wrote(tmp_path, "größe".encode("latin-1"), _use_new_zipfile_serialization=False)
    for weights_only in (True, False):
        with pytest.raises(UnicodeDecodeError):
            torch.load(file, weights_only=weights_only)
    report = ckptfix.repair(file, output=tmp_path / "out.pth").report
    assert [finding.code for finding in report.findings] == ["FIL102"]
    assert report.exit_code == 0
    assert torch.load(tmp_path / "out.pth")["note"] == "größe"


@pytest.mark.parametrize(
    ("value", "becomes"),
    [
        pytest.param(argparse.Namespace(lr=0.1), {"lr": 0.1}, id="Namespace"),
        pytest.param(Path("/data/train"), "/data/train", id="Path"),
        pytest.param(np.float64(0.5), 0.5, id="a number of numpy"),
        pytest.param({"deep": [argparse.Namespace(out=Path("x"))]}, {"deep": [{"out": "x"}]}, id="nested"),
        pytest.param(frozenset({1}), {1}, id="frozenset"),
        pytest.param(len, "builtins.len", id="a function"),
    ],
)
def test_plain_data_instead_of_objects(tmp_path, value, becomes):
    file = saved(tmp_path, {"state_dict": weights(), "args": value})
    with pytest.raises(pickle.UnpicklingError):
        torch.load(file, weights_only=True)
    report = ckptfix.repair(file, output=tmp_path / "out.pth").report
    assert [finding.code for finding in report.fixed] == ["FIL102"]
    assert report.fixed[0].level == Level.WARNING
    assert report.exit_code == 0
    loaded = torch.load(tmp_path / "out.pth", weights_only=True)
    assert loaded["args"] == becomes
    assert torch.equal(loaded["state_dict"]["weight"], weights()["weight"])
    assert ckptfix.check(tmp_path / "out.pth", select=("FIL",)).findings == ()


def test_each_conversion_is_listed(tmp_path):
    file = saved(tmp_path, {"state_dict": weights(), "args": argparse.Namespace(root=Path("x")), "n": np.int64(3)})
    (finding,) = ckptfix.check(file, select=("FIL102",)).findings
    assert finding.fix is not None
    assert finding.fix.applicability == Applicability.SAFE
    assert {edit.where for edit in finding.fix.edits if isinstance(edit, Plain)} == {"args", "args.root", "n"}
    assert "argparse.Namespace" in finding.message


def test_the_objects_in_a_folder_of_ranks_are_a_note(tmp_path: Path) -> None:
    saved, _ = unpacked("megatron_tp2pp2", tmp_path)
    (finding,) = ckptfix.check(saved, select=("FIL102",)).findings
    assert finding.level == Level.NOTE
    ckptfix.repair(saved, output=tmp_path / "out.pth")
    assert torch.load(tmp_path / "out.pth", weights_only=True)["args"]["tensor_model_parallel_size"] == 1


class Custom:
    """A class that torch does not know."""


EVERYTHING = {
    "numbers": [1, -5, 1 << 100, 0.5, True, None, 1j],
    "text": ["a", "\ud800", b"ab\xff", bytearray(b"ab")],
    "containers": [(), (1,), (1, 2, 3, 4), [], {}, {1: 2, (3, 4): 5, None: 6}, {1, 2}, OrderedDict(a=1)],
    "a frozen set": frozenset({1}),
    "words of torch": [torch.float16, torch.Size([2]), torch.device("cpu"), torch.strided, torch.per_tensor_affine],
    "tensors": [nn.Parameter(torch.ones(2)), torch.ones(2).to_sparse(), torch.ones(2).half()],
    "a counter": Counter("aab"),
    "a path": Path("x"),
    "a number of numpy": np.float64(0.5),
    "a key of numpy": {np.int64(3): 1},
    "an array": np.arange(3),
    "a class": nn.ReLU,
    "an object": Custom(),
    "a module": nn.Linear(2, 2),
}


@pytest.mark.parametrize(("zipped", "protocol"), [*((True, protocol) for protocol in range(6)), (False, 2), (False, 5)])
@pytest.mark.parametrize("value", EVERYTHING.values(), ids=EVERYTHING)
@pytest.mark.filterwarnings("ignore")
def test_the_finding_is_there_exactly_where_torch_refuses(tmp_path, value, protocol, zipped):
    content = {"state_dict": weights(), "x": value}
    try:
        file = saved(tmp_path, content, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    except TypeError:
        pytest.skip("Python does not pickle these by the old protocol")
    try:
        torch.load(file, weights_only=True)
        refused = False
    except (pickle.UnpicklingError, RuntimeError):
        refused = True
    assert bool(ckptfix.check(file, select=("FIL102",)).findings) == refused
    ckptfix.repair(file, output=tmp_path / "out.pth", ignore=("FIL101",))
    assert (tmp_path / "out.pth").exists() or not refused
    if (tmp_path / "out.pth").exists():
        torch.load(tmp_path / "out.pth", weights_only=True)


@pytest.mark.parametrize("protocol", [0, 1, 4, 5])
def test_another_protocol(tmp_path, protocol):
    file = saved(tmp_path, weights(), pickle_protocol=protocol)
    ckptfix.repair(file, output=tmp_path / "out.pth")
    assert torch.equal(torch.load(tmp_path / "out.pth", weights_only=True)["weight"], weights()["weight"])


@pytest.mark.parametrize("key", [7, (1, 2), 2.5], ids=["a number", "a tuple", "a float"])
def test_a_key_that_is_not_text_is_left_unchanged(tmp_path, key):
    file = saved(tmp_path, {**weights(), key: torch.ones(1)})
    assert key in torch.load(file, weights_only=True)
    report = ckptfix.repair(file, beside=True).report
    (note,) = report.findings
    assert (note.level, note.fix, report.output) == (Level.NOTE, None, None)


def packed_again(file: Path, rename: Callable[[str], list[str]]) -> Path:
    """The archive with each member under the names that are given for its own."""
    goal = file.with_name("again.pth")
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(goal, "w") as new:
        for info in old.infolist():
            for name in rename(info.filename):
                new.writestr(name, old.read(info))
    return goal


@pytest.mark.parametrize(
    "rename",
    [
        pytest.param(lambda name: [name], id="as torch does"),
        pytest.param(lambda name: [f"other/{name.partition('/')[2]}"], id="another folder"),
    ],
)
def test_a_layout_that_torch_reads_is_not_a_defect(tmp_path, rename):
    file = packed_again(saved(tmp_path, weights()), rename)
    torch.load(file)
    assert ckptfix.check(file, select=("FIL102",)).findings == ()


@pytest.mark.parametrize(
    ("rename", "said"),
    [
        pytest.param(lambda name: [name.partition("/")[2]], "members in no folder", id="no folder"),
        pytest.param(lambda name: [f"outer/{name}"], "members in outer/", id="two folders"),
        pytest.param(lambda name: [name, f"__MACOSX/._{name}"], "outside the folder", id="packed by the Finder"),
        pytest.param(lambda name: [name.replace("/data/", "/tensors/")], "under tensors/", id="the preview of 1.4"),
        pytest.param(lambda name: [name] * (not name.endswith("/version")), "with the version", id="no version"),
    ],
)
def test_a_zip_in_another_layout_is_written_anew(tmp_path, rename, said):
    file = packed_again(saved(tmp_path, weights()), rename)
    with pytest.raises(RuntimeError, match=r"PytorchStreamReader|subdirectory|version"):
        torch.load(file)
    report = ckptfix.repair(file, output=tmp_path / "fixed.pth").report
    assert report.exit_code == 0
    assert [finding.code for finding in report.fixed] == ["FIL102"]
    assert said in report.fixed[0].message
    loaded = torch.load(tmp_path / "fixed.pth")
    assert torch.equal(loaded["weight"], weights()["weight"])


def test_a_tensor_that_its_class_makes_of_others_is_said_not_to_load(tmp_path):
    from torch.testing._internal.two_tensor import TwoTensor

    file = saved(tmp_path, {"w": TwoTensor(torch.ones(3), torch.zeros(3)), "b": torch.ones(2)})
    stays = [finding for finding in ckptfix.check(file).findings if finding.fix is None]
    assert [(finding.code, finding.level, finding.keys) for finding in stays] == [("FIL102", Level.WARNING, ("w",))]
    assert "1 weight of torch.testing._internal.two_tensor.TwoTensor" in stays[0].message
    report = ckptfix.repair(file, output=tmp_path / "out.pth").report
    assert report.exit_code == 1
    assert not (tmp_path / "out.pth").exists()
    assert ckptfix.repair(file, output=tmp_path / "out.pth", ignore=("FIL102",)).report.exit_code == 0
    assert torch.load(tmp_path / "out.pth")["b"].tolist() == [1, 1]


class Composed(torch.Tensor):
    """A tensor that is made of others, as the quantised weights of torchao are."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Composed:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: torch.Tensor) -> None:
        self.int_data, self.scale = data, torch.ones(1)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch has no names for them
        return args[0]


class QuantState:
    def __init__(self) -> None:
        self.absmax = torch.ones(2)


@pytest.mark.parametrize(
    ("dtype", "scale", "level"),
    [
        (torch.float32, torch.ones(2), Level.NOTE),
        (torch.int8, 0.5, Level.NOTE),
        (torch.bool, torch.ones(2), Level.NOTE),
        (torch.int8, torch.ones(2), Level.ERROR),
        (torch.uint8, QuantState(), Level.ERROR),
        (torch.float8_e4m3fn, [torch.ones(2)], Level.ERROR),
    ],
)
def test_codes_are_not_written_without_scales_that_are_their_attributes(dtype, scale, level, tmp_path):
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.ones(2, 2).to(dtype), requires_grad=False)
    model.weight.scale = scale  # type: ignore[attr-defined]  # as bitsandbytes sets it
    report = ckptfix.repair(saved(tmp_path, model), output=tmp_path / "out.pth", values=False).report
    assert (report.output is None) is (level is Level.ERROR)
    assert max(finding.level for finding in report.findings if "scale" in str(finding.evidence)) is level


def test_a_tensor_made_of_parts_is_named_before_and_after_it_is_taken_apart(tmp_path):
    file = saved(tmp_path, {"weight": Composed(torch.ones(2, 2, dtype=torch.int8)), "bias": torch.ones(2)})
    report = ckptfix.repair(file, output=tmp_path / "kept.pth").report
    left = next(finding for finding in report.findings if finding.keys == ("weight",))
    assert "(int_data, scale)" in left.message
    assert "keep this file" in remedies_text(left.remedies)
    assert report.exit_code == 1
    assert not (tmp_path / "kept.pth").exists()
    ckptfix.repair(file, output=tmp_path / "out.pth", ignore=("FIL102",))
    again = ckptfix.check(tmp_path / "out.pth", select=("FIL102",))
    assert [finding.keys for finding in again.findings] == [("weight",)]
    assert "taken apart" in remedies_text(again.findings[0].remedies)
    assert ckptfix.repair(tmp_path / "out.pth", output=tmp_path / "again.pth").report.exit_code == 1
    assert (tmp_path / "again.pth").exists()


def rebuild_oddly(*args: Any) -> None:
    """A function of the user's own, which makes tensors from storages."""


class Odd:
    def __reduce__(self) -> Any:
        return rebuild_oddly, (torch.ones(2).untyped_storage(), 0, (2,), (1,))


def test_a_function_that_no_one_knows_makes_no_tensor(tmp_path):
    file = saved(tmp_path, {"weight": Odd(), "bias": torch.ones(2)})
    with pytest.raises(pickle.UnpicklingError):
        torch.load(file, weights_only=True)
    finding, *_ = ckptfix.check(file, select=("FIL102",)).findings
    assert (finding.level, finding.keys) == (Level.ERROR, ("weight",))
    assert "rebuild_oddly" in finding.message


RAGGED = [torch.ones(2, 3), torch.ones(1, 3)]
NESTED: dict[str, dict[str, Any]] = {
    "strided": {"w": torch.nested.nested_tensor(RAGGED), "v": torch.ones(2)},
    "jagged": {"w": torch.nested.nested_tensor(RAGGED, layout=torch.jagged), "v": torch.ones(2)},
    "beside the weights": {"state_dict": {"w": torch.ones(2)}, "lengths": torch.nested.nested_tensor(RAGGED)},
}


@pytest.mark.parametrize("value", NESTED.values(), ids=NESTED)
def test_a_nested_tensor_is_left_unchanged(value, tmp_path):
    path = tmp_path / "file.pth"
    torch.save(value, path)
    if Version(torch.__version__) >= Version("2.15"):
        with pytest.raises(pickle.UnpicklingError, match="nested"):
            torch.load(path, weights_only=True)
    else:
        torch.load(path, weights_only=True)
    report = ckptfix.check(path)
    assert [(finding.code, finding.level) for finding in report.findings] == [("FIL102", Level.WARNING)]
    assert "since 2.15" in report.findings[0].message
    report = ckptfix.check(path, for_torch="2.14")
    assert [(finding.code, finding.level) for finding in report.findings] == [("FIL102", Level.NOTE)]
    assert ckptfix.repair(path, beside=True, for_torch="2.14").report.exit_code == 0
    for dry_run in (True, False):  # a file that was asked for and is not needed is reported
        report = ckptfix.repair(path, output=tmp_path / "out.pth", dry_run=dry_run, for_torch="2.14").report
        assert [finding.level for finding in report.left] == [Level.WARNING]
    assert not (tmp_path / "out.pth").exists()


def test_a_defect_is_left_as_it_is_because_of_a_nested_tensor(tmp_path):
    torch.save({f"module.{key}": value for key, value in NESTED["strided"].items()}, tmp_path / "file.pth")
    report = ckptfix.repair(tmp_path / "file.pth", output=tmp_path / "out.pth").report
    assert [finding.code for finding in report.left] == ["FIL102"]
    assert report.exit_code == 1
    assert not (tmp_path / "out.pth").exists()
    assert not any("run: " in line for line in str(ckptfix.check(tmp_path / "file.pth")).splitlines())


@pytest.mark.parametrize("prefix", ["", "module."])
def test_keys_that_are_bytes_become_those_of_the_model(prefix, tmp_path):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    state = {f"{prefix}{key}".encode(): value for key, value in model.state_dict().items()}
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "file.pth")
    assert ckptfix.check(tmp_path / "file.pth").exit_code == 1
    for target in (model, None):
        ckptfix.repair(tmp_path / "file.pth", target, output=tmp_path / "out.pth", force=True)
        written = torch.load(tmp_path / "out.pth")
        assert written["epoch"] == 3
        assert_same(written["state_dict"], dict(model.state_dict()))


def test_noop_a_table_whose_keys_are_bytes(tmp_path):
    """The data of Python 2 that code reads by its own keys: none of them is the name of a parameter."""
    torch.save({b"data": torch.ones(3, 2), b"labels": torch.ones(3)}, tmp_path / "file.pth")
    assert ckptfix.check(tmp_path / "file.pth").exit_code == 0


@pytest.mark.parametrize("storage", [torch.arange(3.0).untyped_storage(), torch.arange(3.0).storage()])
def test_storages_without_a_tensor_are_not_refused(storage, tmp_path):
    """torch.load reads them, so that nothing is to be repaired; a file that has another defect gets a tensor."""
    for prefix, code in (("", 0), ("module.", 1)):
        path = tmp_path / f"{prefix}file.pth"
        torch.save({"state_dict": {f"{prefix}0.weight": torch.ones(2, 2)}, "extra": [storage]}, path)
        assert torch.load(path)["extra"][0].nbytes() == 12
        (finding,) = (each for each in ckptfix.check(path).findings if each.code == "FIL102")
        assert (finding.level, finding.evidence) == (Level.NOTE, {"storages": ["extra[0]"]})
        assert ckptfix.check(path).exit_code == code
        assert (ckptfix.repair(path, beside=True).report.output is None) == (code == 0)
    assert torch.is_tensor(torch.load(tmp_path / "module.file.fixed.pth")["extra"][0])


def test_attributes_of_tensors_are_not_lost_without_a_word(tmp_path):
    weight, bias = nn.Parameter(torch.ones(2, 2)), torch.ones(2)
    weight.lr_scale, bias.origin = 0.1, "a"  # type: ignore[attr-defined]  # what the test is about
    torch.save({"weight": weight, "bias": bias, "other": torch.ones(2)}, tmp_path / "file.pth")
    (finding,) = ckptfix.check(tmp_path / "file.pth").findings
    assert (finding.code, finding.level) == ("FIL102", Level.NOTE)
    assert finding.evidence == {"left_out": ["lr_scale", "origin"]}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_gradient_that_torch_cannot_read_again_is_left_out(dtype, tmp_path):
    weight = torch.nn.Parameter(torch.randn(4, 4))
    value = {"w": weight.to(dtype), "b": weight * 2, "p": torch.nn.Parameter(weight.detach().to(dtype))}
    path = tmp_path / "file.pth"
    torch.save({"p": value["p"], "b": value["b"]}, path)
    assert torch.load(path)["p"].requires_grad
    assert ckptfix.check(path).findings == ()
    torch.save(value, path)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        torch.load(path)
    ckptfix.repair(path, output=tmp_path / "out.pth")
    written = torch.load(tmp_path / "out.pth")
    assert torch.equal(written["w"].view(torch.uint8), value["w"].detach().view(torch.uint8))
    assert [written[key].requires_grad for key in ("w", "b", "p")] == [False, True, True]


@pytest.mark.parametrize(
    "keys", [(0, 1), (("a", 1), "x"), (1.5, "x"), (None, True)], ids=["ints", "a tuple", "a float", "others"]
)
@pytest.mark.parametrize("beside", [{}, {"args": argparse.Namespace(lr=0.1)}], ids=["alone", "beside a Namespace"])
def test_keys_that_are_not_text_stay_what_they_are(keys, beside, tmp_path):
    values = {key: torch.full((2,), float(at)) for at, key in enumerate(keys)}
    path = saved(tmp_path, {"state_dict": values, **beside})
    ckptfix.repair(path, output=tmp_path / "out.pth")
    written = torch.load(tmp_path / "out.pth", weights_only=True)["state_dict"]
    assert list(written) == list(values)
    assert all(torch.equal(written[key], value) for key, value in values.items())


class Detector(torch.nn.Module):
    """A class of the user's own, which keeps more than a state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)
        self.names, self.stride, self._cache = {0: "cat"}, [8, 16], 5


@pytest.mark.parametrize("whole", [False, True], ids=["its state", "itself"])
def test_an_optimizer_among_the_weights_stays_next_to_them(whole, tmp_path):
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    given = {
        "w": torch.ones(2),
        "optimizer": optimizer if whole else optimizer.state_dict(),
        "args": argparse.Namespace(a=1),
    }
    torch.save(given, tmp_path / "a.pth")
    ckptfix.repair(tmp_path / "a.pth", output=tmp_path / "b.pth")
    written = torch.load(tmp_path / "b.pth", weights_only=True)
    assert {*written} == {"w", "optimizer", "args"}
    assert written["optimizer"]["param_groups"][0]["lr"] == 1e-3
    assert written["args"] == {"a": 1}


def test_what_a_module_keeps_next_to_its_state_dict_is_listed(tmp_path):
    path = saved(tmp_path, {"model": Detector(), "args": argparse.Namespace(lr=0.1)})
    left_out, objects, _ = ckptfix.check(path, select=("FIL102",)).findings
    assert (left_out.level, left_out.evidence) == (Level.NOTE, {"left_out": ["names", "stride"]})
    assert (objects.level, objects.evidence) == (Level.NOTE, {"objects": ["model"]})
    repaired = ckptfix.repair(path, output=tmp_path / "out.pth")
    assert str(repaired.report).splitlines()[-2:] == [
        '  dicts now, so use ["name"] instead of .name: args',
        "  left out: names, stride (attributes of the module)",
    ]


def test_a_module_of_torch_keeps_nothing_that_is_missed(tmp_path):
    path = saved(tmp_path, torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert [finding.level for finding in ckptfix.check(path, select=("FIL102",)).findings] == [Level.WARNING]


def test_a_log_of_a_thousand_epochs_is_one_line_of_evidence(tmp_path):
    log = {"ema": list(np.arange(1000.0)), "dice": [list(np.ones(2)), list(np.zeros(2))], "best": np.float64(1)}
    (finding,) = ckptfix.check(saved(tmp_path, {"state_dict": weights(), "log": log})).findings
    assert list(finding.evidence) == ["log.ema[…] (1000)", "log.dice[…][…] (4)", "log.best"]


@pytest.mark.filterwarnings("ignore")
def test_packed_weights_are_not_taken_apart(tmp_path):
    lstm = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.LSTM(3, 4)), {nn.LSTM}, dtype=torch.qint8)
    file = saved(tmp_path, lstm.state_dict())
    report = ckptfix.repair(file, output=tmp_path / "out.pth").report
    assert report.exit_code == 1
    assert not (tmp_path / "out.pth").exists()
    assert next_command(report, Presentation()) == ""
    lstm.load_state_dict(torch.load(file, weights_only=False))
