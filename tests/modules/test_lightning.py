"""Lightning modules with the arguments in the file: what reaches the class, and what does not."""

import argparse
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import ckptfix
from ckptfix.errors import TargetError, UsageError
from ckptfix.modules.factory import build_module
from ckptfix.modules.lightning import with_saved_arguments
from ckptfix.smoke.exam import Exam, examine

SOURCE = """
import lightning
from torch import nn

class Net(lightning.LightningModule):
    def __init__(self, width, depth=2, loss=None, rate=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])

    def forward(self, x):
        return self.net(x)

class WithLoss(Net):
    def __init__(self, width, loss, act=nn.ReLU):
        super().__init__(width)
        self.save_hyperparameters()

class OfOne(lightning.LightningModule):
    def __init__(self, hparams):
        super().__init__()
        self.save_hyperparameters(hparams)
        self.net = nn.Linear(hparams["width"], 1)

    def forward(self, x):
        return self.net(x)

class Late(Net):
    def __init__(self, width):
        super().__init__(width, 0)

    def configure_model(self):
        self.late = nn.Linear(self.hparams.width, 2)

    def forward(self, x):
        return self.late(x)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module with Lightning classes in the working directory."""
    (tmp_path / "nets_of_a_user.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import nets_of_a_user  # type: ignore[import-not-found]  # written above

    yield nets_of_a_user
    sys.modules.pop("nets_of_a_user")


def saved(model, path: Path, prefix: str = "module.") -> Path:
    """What Lightning writes: its own function makes the dict."""
    import lightning

    trainer = lightning.Trainer(logger=False, accelerator="cpu", enable_progress_bar=False, enable_checkpointing=False)
    trainer.strategy.connect(model)
    content = trainer._checkpoint_connector.dump_checkpoint(weights_only=True)
    content["state_dict"] = {prefix + key: value for key, value in model.state_dict().items()}
    torch.save(content, path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param("Net", {"width": 6, "depth": 3, "loss": torch.nn.L1Loss()}, id="arguments by name"),
        pytest.param("OfOne", {"hparams": {"width": 5}}, id="all in one argument"),
    ],
)
def test_a_file_of_lightning_is_repaired_with_its_own_arguments(module, tmp_path, name, arguments):
    model = getattr(module, name)(**arguments)
    source = saved(model, tmp_path / "a.ckpt")
    spec = f"lightning:nets_of_a_user:{name}"
    repaired = ckptfix.repair(source, spec, output=tmp_path / "b.ckpt", smoke=False)
    assert repaired.report.exit_code == 0
    ours = torch.load(tmp_path / "b.ckpt", weights_only=True)
    theirs = getattr(module, name)(**arguments)
    theirs.load_state_dict(ours["state_dict"])
    assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), model.parameters(), strict=True))
    job = Exam(str(tmp_path / "b.ckpt"), spec, with_saved_arguments({}, ckptfix.open_checkpoint(source)), device="cpu")
    outcome = examine(job)
    assert outcome.is_good, outcome
    assert outcome.outputs, outcome


def of(hyper_parameters, **more):
    """Return the arguments that a builder gets for a file with these hyperparameters."""
    return {"state_dict": {"a": torch.zeros(1)}, "hyper_parameters": hyper_parameters, **more}


def values(content, tmp_path, given=()):
    torch.save(content, tmp_path / "x.ckpt")
    (kept,) = (
        each
        for key, each in with_saved_arguments(given, ckptfix.open_checkpoint(tmp_path / "x.ckpt")).items()
        if key == "of the checkpoint"
    )
    return kept["values"]


def test_plain_arguments_are_passed_and_objects_are_not(tmp_path):
    content = {
        "width": 4,
        "rate": np.float64(0.5),
        "dims": (1, 2),
        "options": argparse.Namespace(a=1, b=[None, True]),
        "folder": Path("data"),
        "loss": torch.nn.L1Loss(),
        "maker": torch.nn.Linear,
        "weights": torch.ones(3),
        "nested": {"fn": torch.nn.ReLU()},
    }
    assert values(of(content), tmp_path) == {
        "width": 4,
        "rate": 0.5,
        "dims": [1, 2],
        "options": {"a": 1, "b": [None, True]},
        "folder": "data",
    }


@pytest.mark.parametrize("content", [{"a": torch.zeros(1)}, of(None), of([1]), {"state_dict": {"a": torch.zeros(1)}}])
def test_a_file_without_arguments_gives_none(content, tmp_path):
    assert values(content, tmp_path) == {}


def test_old_releases_have_other_keys(tmp_path):
    content = {"state_dict": {"a": torch.zeros(1)}, "hparams": argparse.Namespace(width=3)}
    assert values(content, tmp_path) == {"width": 3}


def test_given_arguments_override_saved_ones(module, tmp_path):
    source = saved(module.Net(6), tmp_path / "a.ckpt")
    arguments = with_saved_arguments({"width": 2}, ckptfix.open_checkpoint(source))
    assert build_module("lightning:nets_of_a_user:Net(depth=1)", arguments).state_dict()["net.0.bias"].shape == (2,)


def test_layers_that_a_class_makes_late(module, tmp_path):
    model = module.Late(3)
    model.configure_model()
    arguments = with_saved_arguments((), ckptfix.open_checkpoint(saved(model, tmp_path / "a.ckpt")))
    assert "late.weight" in build_module("lightning:nets_of_a_user:Late", arguments).state_dict()


def test_objects_of_the_file_are_named_and_never_made(module, tmp_path):
    source = saved(module.WithLoss(4, torch.nn.L1Loss(), torch.nn.GELU), tmp_path / "a.ckpt")
    report = ckptfix.check(source, "lightning:nets_of_a_user:WithLoss", model_args={"loss": 1}, values=False)
    assert report.remarks[-1].endswith("class's defaults: act (torch.nn.modules.activation.GELU)")
    assert report.call is not None
    assert report.call.given["model_args"] == {"loss": 1}  # a printed call repeats only what was given
    said = r"needs loss, .* an object \(torch.nn.modules.loss.L1Loss\).*: model=.nets_of_a_user:FUNCTION"
    with pytest.raises(TargetError, match=said):
        ckptfix.check(source, "lightning:nets_of_a_user:WithLoss")


def test_missing_arguments_of_the_class_are_reported(module, tmp_path):
    with pytest.raises(TargetError, match="missing 1 required positional argument: 'width'"):
        build_module("lightning:nets_of_a_user:Net")
    with pytest.raises(UsageError, match="takes its arguments by name"):
        values(of({}), tmp_path, [3])
