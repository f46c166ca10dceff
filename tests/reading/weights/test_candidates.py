"""Which state_dict of a file is taken, and what lies beside it."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

import ckptfix
from ckptfix.core.checkpoint import Candidate
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


def test_few_tensors_of_many_elements_are_remarked_on():
    large, small, tiny = Candidate(("a",), 40, 4000), Candidate(("b", "c"), 1, 200), Candidate(("d",), 2, 199)
    batch = Candidate(("batch",), 2, 4000)
    found = {one.path: {"x.weight": None} for one in (large, small, tiny)} | {("batch",): {"images": None, 0: None}}
    assert [remark.place for remark in beside([large, batch, small, tiny], found)] == ["b.c"]
    sets = candidates(state_dict=5, ema=5)
    assert list(beside(sets, {one.path: {"weight": None} for one in sets})) == []


@pytest.mark.parametrize("form", [torch.from_numpy, np.asarray], ids=["tensors", "arrays"])
def test_what_is_kept_beside_the_weights_is_no_part_of_them(tmp_path, form):
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
