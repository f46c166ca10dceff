"""Which state_dict of a file is taken, and what is next to it."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch

import ckptfix
from ckptfix.core.checkpoint import Candidate
from ckptfix.core.finding import Level
from ckptfix.errors import UsageError
from ckptfix.reading.weights.containers import beside, plausible, rank


def candidates(**tensors: int) -> list[Candidate]:
    """Candidates of so many tensors of ten elements, under names with underscores for dots, as they are ranked."""
    found = [Candidate(tuple(name.split("__")), number, 10 * number) for name, number in tensors.items()]
    return sorted(found, key=rank)


@pytest.mark.parametrize(
    ("tensors", "names"),
    [
        ({"a": 4, "b": 5}, ["b", "a"]),
        ({"ema": 9, "model": 5}, ["model", "ema"]),
        ({"discriminator": 30, "generator": 20}, ["generator", "discriminator"]),
        ({"x__state_dict": 5, "state_dict": 5}, ["state_dict", "x.state_dict"]),
        ({"model": 40, "stats": 1}, ["model"]),
    ],
    ids=["the larger", "the raw one", "the better known", "the less deep", "no table of means"],
)
def test_which_are_meant(tensors, names):
    assert [candidate.name for candidate in plausible(candidates(**tensors))] == names


@pytest.mark.parametrize(
    ("sets", "taken", "listed"),
    [
        ({"model_ema": 9, "loss": 1}, "model_ema", ["model_ema"]),
        ({"runs.teacher": 9, "history": 1}, "runs.teacher", ["runs.teacher"]),
        ({"model": 2, "teacher": 9}, "model", ["model", "teacher"]),
        ({"student": 3, "teacher": 9}, "student", ["student", "teacher"]),
        ({"momentum_encoder": 4, "encoder": 4}, "encoder", ["encoder", "momentum_encoder"]),
    ],
    ids=["only an average, and a loss", "the same, nested", "a small model", "a small student", "MoCo's average"],
)
def test_an_average_is_taken_only_without_another_network(tmp_path, sets, taken, listed):
    content: dict[str, Any] = {}
    for name, layers in sets.items():
        first, _, last = name.rpartition(".")
        content[first or last] = {f"layers.{at}.weight": torch.rand(4, 4 if layers > 1 else 1) for at in range(layers)}
        if first:
            content[first] = {last: content[first]}
    torch.save(content, tmp_path / "f.pth")
    checkpoint = ckptfix.open_checkpoint(tmp_path / "f.pth")
    assert ".".join(map(str, checkpoint.container)) == taken
    assert [candidate.name for candidate in checkpoint.candidates] == listed
    findings = ckptfix.check(tmp_path / "f.pth").findings
    assert [finding.code for finding in findings] == (["FIL101"] if len(listed) > 1 else [])


def test_losses_next_to_a_small_network_are_not_a_set(tmp_path):
    losses = {name: torch.tensor(0.5) for name in ("policy", "value", "entropy")}
    torch.save({"agent": torch.nn.Linear(4, 4).state_dict(), "losses": {"train": losses}}, tmp_path / "f.pth")
    report = ckptfix.check(tmp_path / "f.pth")
    assert (report.findings, report.exit_code) == ((), 0)


def test_few_tensors_of_many_elements_are_remarked_on():
    large, small, tiny = Candidate(("a",), 40, 4000), Candidate(("b", "c"), 1, 200), Candidate(("d",), 2, 199)
    batch = Candidate(("batch",), 2, 4000)
    found = {one.path: {"x.weight": None} for one in (large, small, tiny)} | {("batch",): {"images": None, 0: None}}
    assert [remark.place for remark in beside([large, batch, small, tiny], found, ("a",))] == ["b.c"]
    sets = candidates(state_dict=5, ema=5)
    assert list(beside(sets, {one.path: {"weight": None} for one in sets}, ("state_dict",))) == []


@pytest.mark.parametrize("form", [torch.from_numpy, np.asarray], ids=["tensors", "arrays"])
def test_what_is_kept_next_to_the_weights_is_not_a_part_of_them(tmp_path, form):
    layers = {f"layers.{at}.weight": form(np.ones((4, 4), "f4")) for at in range(5)}
    others = {"last_batch": {"x": form(np.ones((9, 9), "f4"))}, "queue": form(np.ones((9, 9), "f4"))}
    pca = {"pca": {"weight": form(np.ones(3, "f4"))}}
    (tmp_path / "f.pkl").write_bytes(pickle.dumps({"model": layers, **others, **pca}, 2))
    assert ckptfix.check(tmp_path / "f.pkl", select=("FIL101",)).findings == ()


def test_parts_of_a_nested_state_dict_are_a_note(tmp_path):
    layers = {f"layers.{at}.weight": torch.rand(4, 4) for at in range(5)}
    torch.save({"model": {"embedding": {"weight": torch.rand(9, 4)}, "encoder": layers}}, tmp_path / "f.pth")
    report = ckptfix.check(tmp_path / "f.pth")
    (finding,) = report.findings
    assert (finding.code, report.exit_code) == ("FIL101", 0)
    assert finding.evidence == {"beside": {"model.embedding": "1 tensor, 36 elements"}}
    assert ckptfix.check(tmp_path / "f.pth", weights="model.embedding").findings == ()


def _nested(levels, value):
    for at in range(levels):
        value = {f"level{at}": value}
    return value


_LAYERS = {f"layers.{at}.weight": torch.rand(4, 4) for at in range(5)}


@pytest.mark.parametrize(
    "beside",
    [
        {("model", "raw"): _LAYERS},
        {"models": [dict(_LAYERS)] * 65},
        {"state_dict": {"bias": torch.zeros(1)}, "rest": _nested(12, _LAYERS)},
        {"state_dict": {"bias": torch.zeros(2)}, "cache": [torch.rand(9) for _ in range(70)]},
    ],
    ids=["under a tuple", "in a long list", "deep, beside a small state_dict", "in a list of tensors"],
)
def test_a_file_is_not_clean_while_most_of_it_is_unread(tmp_path, beside):
    torch.save({"step": torch.tensor(3), **beside}, tmp_path / "f.pth")
    (finding,) = ckptfix.check(tmp_path / "f.pth", select=("FIL101",)).findings
    assert finding.level is Level.WARNING
    assert "most of the file was not read" in finding.message


@pytest.mark.parametrize(
    "beside",
    [
        {},
        {"optimizer": {"state": {n: {"exp_avg": torch.rand(4, 4)} for n in range(90)}, "param_groups": []}},
        {"muon": {n: {"momentum_buffer": torch.rand(4, 4)} for n in range(90)}},
        {"replay": {"obs": torch.rand(1000, 4)}},
        {"ema": {"shadow_params": [torch.rand(4, 4) for _ in range(5)]}},
        {"ema": {name: [torch.rand(4, 4) for _ in range(5)] for name in ("shadow_params", "collected_params")}},
    ],
    ids=["weights alone", "an optimizer", "moments in a dict", "few large tensors", "an average", "torch_ema at work"],
)
@pytest.mark.parametrize("levels", [0, 1, 6, 7, 30])
def test_weights_are_read_at_any_depth(tmp_path, beside, levels):
    torch.save({"step": torch.tensor(3), **_nested(levels, {"model": dict(_LAYERS)}), **beside}, tmp_path / "f.pth")
    report = ckptfix.check(tmp_path / "f.pth", select=("FIL101",))
    assert (report.tensors, report.exit_code) == (5, 0)


@pytest.mark.parametrize("name", ["ema", "ema.shadow_params"])
@pytest.mark.parametrize(
    "beside", [{"model": {"bias": torch.zeros(9)}}, {}], ids=["beside another model", "on its own"]
)
def test_a_set_without_names_is_described(tmp_path, beside, name):
    """torch_ema keeps a list of parameters: the error names it, and says how they get names."""
    torch.save({**beside, "ema": {"decay": 0.9, "shadow_params": [*_LAYERS.values()]}}, tmp_path / "f.pth")
    with pytest.raises(UsageError, match=rf"under '{name}' are 5 tensors in lists.*copy them over model.parameters"):
        ckptfix.open_checkpoint(tmp_path / "f.pth", weights=name)
    for other in ("emma", "model.emma") if beside else ("emma",):
        with pytest.raises(UsageError, match=f"no weights under '{other}'"):
            ckptfix.open_checkpoint(tmp_path / "f.pth", weights=other)
