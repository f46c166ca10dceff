"""Keys that the model's own hooks handle are not defects."""

from typing import Any

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.target import target_from_module


class Renaming(nn.Module):
    """Reads the names of its first release."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in ("weight", "bias"):
            if f"{prefix}old.{name}" in state_dict:
                state_dict[f"{prefix}proj.{name}"] = state_dict.pop(f"{prefix}old.{name}")
        super()._load_from_state_dict(state_dict, prefix, *args)


class Observer(nn.Module):
    """Keeps observations in buffers that take the size of the file's, like torch.ao's observers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor([]))
        self.fc = nn.Linear(4, 4)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.get_buffer("low").resize_(state_dict[f"{prefix}low"].shape)
        super()._load_from_state_dict(state_dict, prefix, *args)


def state(old: str) -> dict[str, torch.Tensor]:
    return {f"{old}.weight": torch.randn(4, 4), f"{old}.bias": torch.randn(4)}


@pytest.mark.parametrize(
    "model",
    [nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LazyLinear(3), nn.MultiheadAttention(4, 2)],
    ids=lambda model: type(model).__name__,
)
def test_noop_torchs_own_layers_are_not_tried(model):
    assert target_from_module(model).loads is None


@pytest.mark.parametrize(
    ("model", "file"),
    [
        pytest.param(Renaming(), state("old"), id="a name of its first release"),
        pytest.param(Observer(), {"low": torch.ones(7), **state("fc")}, id="a buffer of any size"),
        pytest.param(nn.Sequential(Renaming()), {f"0.{k}": v for k, v in state("old").items()}, id="a part"),
    ],
)
@pytest.mark.parametrize("unsafe_fixes", [False, True])
def test_what_hooks_load_is_left_unchanged(model, file, unsafe_fixes):
    repaired, report = ckptfix.repair_state_dict(file, model, unsafe_fixes=unsafe_fixes)
    assert (report.findings, report.obstacles, report.exit_code) == ((), (), 0)
    assert list(repaired) == list(file)
    assert report.coverage is not None
    assert report.coverage.share == 1.0


def test_only_a_wrapper_is_removed_before_hooks():
    file = {f"module.{key}": value for key, value in {"low": torch.ones(7), **state("fc")}.items()}
    repaired, report = ckptfix.repair_state_dict(file, Observer(), unsafe_fixes=True, drop_mismatched=True)
    assert list(repaired) == ["low", "fc.weight", "fc.bias"]
    assert len(repaired["low"]) == 7
    assert report.exit_code == 0


def test_hooks_that_do_not_load_it_change_nothing():
    _, report = ckptfix.repair_state_dict(state("other"), Renaming())
    assert report.obstacles


def test_the_trial_does_not_change_the_model():
    model = Renaming()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    ckptfix.check(state("old"), model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


class Lenient(nn.Module):
    """Loads the keys that it knows and drops the rest, whatever ``strict`` says."""

    def __init__(self) -> None:
        super().__init__()
        self.old, self.new = nn.Linear(4, 4), nn.Linear(4, 4)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict=False, assign=assign)


def whole(prefix: str = "") -> dict[str, torch.Tensor]:
    return {f"{prefix}{key}": value for name in ("old", "new") for key, value in state(name).items()}


def test_a_load_that_drops_everything_is_not_a_load():
    repaired, report = ckptfix.repair_state_dict(whole("module."), Lenient())
    assert list(repaired) == list(whole())
    assert report.exit_code == 0
    _, report = ckptfix.repair_state_dict({f"x{key}": value for key, value in whole().items()}, Lenient())
    assert report.exit_code == 1
    assert report.coverage is not None
    assert report.coverage.share == 0


def test_a_load_of_a_part_is_not_the_whole():
    _, report = ckptfix.repair_state_dict(state("old"), Lenient())
    assert report.obstacles == ("new.weight", "new.bias")
    assert report.coverage is not None
    assert report.coverage.share == 0.5


def test_weights_that_are_not_finite_were_loaded_too():
    file = state("old")
    file["old.weight"][0] = float("nan")
    _, report = ckptfix.repair_state_dict(file, Renaming(), select=("FIT",))
    assert report.obstacles == ()


class Splitting(nn.Module):
    """Splits one fused weight into two, and drops unknown keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.head = nn.Linear(4, 4, False), nn.Linear(4, 4, False), nn.Linear(4, 4, False)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        state_dict = dict(state_dict)
        if "qk" in state_dict:
            state_dict["q.weight"], state_dict["k.weight"] = state_dict.pop("qk").chunk(2)
        return super().load_state_dict(state_dict, strict=False, assign=assign)


def test_a_result_that_loads_less_than_the_source_is_not_written(tmp_path):
    torch.save({"qk": torch.randn(8, 4), "other": torch.ones(3)}, tmp_path / "f.pth")
    model = Splitting()
    settings: dict[str, Any] = {"unsafe_fixes": True, "fill": "target", "allow_untrained": True}
    report = ckptfix.repair(tmp_path / "f.pth", model, output=tmp_path / "out.pth", **settings).report
    assert {"q.weight", "k.weight"} <= set(report.obstacles)
    assert report.exit_code == 1
    assert not (tmp_path / "out.pth").exists()


@pytest.mark.parametrize("on_meta", [False, True])
def test_spectral_norm_of_torch_0_4_is_left_to_its_hook(on_meta):
    def build() -> nn.Module:
        return nn.Sequential(
            nn.utils.spectral_norm(nn.Linear(4, 6)), nn.utils.spectral_norm(nn.ConvTranspose2d(2, 3, 3))
        )

    trained = build()
    file = {key: value for key, value in trained.state_dict().items() if not key.endswith("weight_v")}
    file |= {f"{name}.weight": layer.state_dict()["weight_orig"].clone() for name, layer in trained.named_children()}
    # The hook mistakes the state_dict for one of its own release: _metadata had no row for spectral_norm.
    build().load_state_dict(dict(file), strict=True)
    with torch.device("meta" if on_meta else "cpu"):
        model = build()
    repaired, report = ckptfix.repair_state_dict(file, model)
    assert (report.obstacles, report.exit_code, report.edits) == ((), 0, ())
    assert list(repaired) == list(file)
