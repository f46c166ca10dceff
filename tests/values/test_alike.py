"""Values of a reference of the same training decide a map; those of another training do not."""

import random

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.values.alike import by_values
from tests.checks import OnAnotherDevice


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(64), nn.LayerNorm(64)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.qkv, self.small = nn.Linear(64, 192), nn.Linear(64, 4)


def trained(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(*(Block() for _ in range(3)))
    return {key: torch.randn_like(value) for key, value in model.state_dict().items()}


def tuned(state):
    return {key: value + 0.1 * torch.randn_like(value) for key, value in state.items()}


OTHERS = {"first": "lin2", "second": "lin1", "norm1": "ln2", "norm2": "ln1", "qkv": "attn", "small": "head"}
"""Names that lead astray."""


def misnamed(key, step=1):
    number, layer, end = key.split(".")
    return f"m.{number if step > 0 else 2 - int(number)}.{OTHERS[layer]}.{end}"


def repaired(state, like, tmp_path, **settings):
    torch.save(like, tmp_path / "like.pth")
    torch.save(state, tmp_path / "file.pth")
    return ckptfix.repair(tmp_path / "file.pth", like=tmp_path / "like.pth", **settings)


def shuffled(state):
    keys = sorted(state, key=lambda _: random.Random(0).random())
    random.Random(0).shuffle(keys)
    return {f"p{at}.{'weight' if state[key].ndim > 1 else 'bias'}": state[key] for at, key in enumerate(keys)}


NAMES = {
    "siblings under each other's names": lambda state: {misnamed(key): value for key, value in state.items()},
    "counted from the end": lambda state: {misnamed(key, -1): value for key, value in state.items()},
    "transposed": lambda state: {misnamed(key): value.t() if value.ndim > 1 else value for key, value in state.items()},
    "one vector": lambda state: {key.replace("2.norm1.bias", "2.norm1.beta"): state[key] for key in state},
}


@pytest.mark.parametrize("renamed", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("change", [dict, tuned], ids=["same", "fine-tuned"])
def test_values_decide(renamed, change, tmp_path):
    like = trained(0)
    values = change(like)
    found = repaired(renamed(values), like, tmp_path)
    assert {key: torch.equal(found.checkpoint.read(key), value) for key, value in values.items()} == dict.fromkeys(
        values, True
    )


def test_values_decide_if_names_do_not(tmp_path):
    like = {key: value for key, value in trained(0).items() if "small" not in key}
    found = repaired(shuffled(tuned(like)), like, tmp_path)
    report = found.report
    assert report.exit_code == 0, report
    assert all(torch.allclose(found.checkpoint.read(key), value, atol=1) for key, value in like.items())


def test_a_fused_layer_is_certain_if_its_values_agree(tmp_path):
    like = trained(0)
    apart: dict[str, torch.Tensor] = {}
    for key, value in like.items():
        names = [misnamed(key).replace("attn", name) for name in ("q", "k", "v")[: 3 if "qkv" in key else 1]]
        apart |= dict(zip(names, value.chunk(len(names)), strict=True))
    found = repaired(apart, like, tmp_path)
    assert all(torch.equal(found.checkpoint.read(key), value) for key, value in like.items())


@pytest.mark.parametrize("side", [0, 1], ids=["the file", "the reference"])
def test_values_on_another_device_are_compared(side):
    theirs = trained(0)
    ours = NAMES["siblings under each other's names"](tuned(theirs))
    sides = [ours, theirs]
    sides[side] = {key: value.as_subclass(OnAnotherDevice) for key, value in sides[side].items()}
    shapes = [{key: tuple(value.shape) for key, value in each.items()} for each in (ours, theirs)]
    found = by_values(None, shapes[0], shapes[1], sides[0], sides[1])
    assert found is not None
    assert {key: match.parts[0].source for key, match in found.matches.items()} == {
        key: misnamed(key) for key in theirs
    }


def test_noop_values_of_another_training(tmp_path):
    state = NAMES["siblings under each other's names"](trained(1))
    reports = [repaired(state, trained(0), tmp_path, values=values).report for values in (True, False)]
    found = [next(f for f in report.findings if f.code == "KEY106") for report in reports]
    assert found[0].evidence == found[1].evidence
    assert "origin" not in found[0].evidence


def test_a_tie_of_two_equal_tensors_is_left_to_the_names(tmp_path):
    like = trained(0)
    like["1.first.weight"] = like["0.first.weight"].clone()
    found = repaired(NAMES["counted from the end"](like), like, tmp_path)
    assert all(torch.equal(found.checkpoint.read(key), value) for key, value in like.items())


def test_values_that_cannot_be_read_are_left_out(tmp_path):
    like = trained(0)
    state = NAMES["siblings under each other's names"](like)
    torch.save(like, tmp_path / "like.pth")
    torch.save(state, tmp_path / "file.pth")
    whole = (tmp_path / "file.pth").read_bytes()
    for damaged in (
        whole[: len(whole) // 2],
        whole.replace(state["m.0.lin2.weight"].numpy().tobytes(), bytes(16384)),
    ):
        (tmp_path / "damaged.pth").write_bytes(damaged)
        report = ckptfix.repair(tmp_path / "damaged.pth", like=tmp_path / "like.pth", salvage=True).report
        assert report.exit_code == 1
    sparse = {**state, "m.0.lin2.weight": state["m.0.lin2.weight"].to_sparse()}
    torch.save(sparse, tmp_path / "sparse.pth")
    assert ckptfix.repair(tmp_path / "sparse.pth", like=tmp_path / "like.pth").report.exit_code in (0, 1)


@pytest.mark.parametrize("turn", [False, True])
def test_a_square_kernel_of_1x1_against_a_matrix(tmp_path, turn):
    kernel = torch.randn(32, 32, 1, 1)
    torch.save({"proj.weight": kernel, "fc.weight": torch.randn(9, 32)}, tmp_path / "conv.pth")
    matrix = kernel[:, :, 0, 0].T.contiguous() if turn else kernel[:, :, 0, 0]
    torch.save({"proj.weight": matrix, "fc.weight": torch.randn(9, 32)}, tmp_path / "linear.pth")
    repaired = ckptfix.repair(tmp_path / "conv.pth", like=tmp_path / "linear.pth", output=tmp_path / "out.pth")
    assert torch.equal(torch.load(tmp_path / "out.pth")["proj.weight"], matrix), repaired.report.findings
