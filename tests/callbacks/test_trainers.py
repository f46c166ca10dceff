"""Small training runs with Lightning and transformers in which weights go bad at a known step."""

import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

# Imported later: two processes of a training run import this file, but not lightning.
if not (find_spec("lightning") and find_spec("transformers")):
    pytest.skip("pip install lightning transformers", allow_module_level=True)


ROOT = Path(__file__).resolve().parents[2]


class Pairs(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, number):
        features = torch.randn(32, generator=torch.Generator().manual_seed(number))
        return {"features": features, "labels": features.sum()}


class Net(nn.Module):
    """Breaks at a known step: ``nan``, as after a division by zero, or ``decay`` of a layer without gradients."""

    def __init__(self, spoil: str = "", at: int = 15) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(5)), nn.Linear(32, 1))
        self.dead = nn.Linear(32, 32)
        self.spoil, self.at, self.step = spoil, at, 0

    def forward(self, features, labels=None):
        self.step += self.training
        if self.step == self.at and self.spoil == "nan":
            self.get_parameter("layers.2.0.weight").data[3, 4] = torch.nan
        unused = 0.0 * self.dead(features).sum()
        return {"loss": ((self.layers(features)[:, 0] - labels) ** 2).mean() + unused}

    def optimizer(self) -> torch.optim.Optimizer:
        """Return an optimizer that removes 60 % of the dead layer in each step if the layer should decay."""
        decay = 1.0 if self.spoil == "decay" else 0.0
        dead: dict[str, Any] = {"params": list(self.dead.parameters()), "lr": 0.6, "weight_decay": decay}
        return torch.optim.SGD([{"params": list(self.layers.parameters())}, dead], lr=1e-3)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    """Give the checks the usual priority: with the lowest one they would wait for all other tests."""
    monkeypatch.setattr(os, "setpriority", lambda *_: None)


class Calls:
    """Wraps a method and counts the calls of functions, C's too, that this thread makes each time: what it does does
    not depend on how busy the machine is, as its time would."""

    def __init__(self, target, name: str) -> None:
        self.counts: list[int] = []
        method = getattr(target, name)

        def call(*words, **named):
            events: Counter[str] = Counter()
            sys.setprofile(lambda _, event, __: events.update([event]))
            try:
                return method(*words, **named)
            finally:
                sys.setprofile(None)
                self.counts.append(events["call"] + events["c_call"])

        setattr(target, name, call)


def with_lightning(folder, net, callback, steps=30):
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(pl.LightningModule):  # type: ignore[misc]  # Lightning is not typed here
        def __init__(self):
            super().__init__()
            self.net = net

        def training_step(self, batch, _):
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            return net.optimizer()

    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=steps // 3, save_top_k=-1)
    trainer = pl.Trainer(
        max_steps=steps, accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), logger=False,
        callbacks=[saving, callback], enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(Pairs(), batch_size=4))
    return trainer.global_step


def with_transformers(folder, net, callback, steps=30):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(folder), max_steps=steps, save_steps=steps // 3, per_device_train_batch_size=4, use_cpu=True, report_to=[],
        disable_tqdm=True, lr_scheduler_type="constant", logging_strategy="no",
    )  # fmt: skip
    trainer = Trainer(net, arguments, train_dataset=Pairs(), callbacks=[callback], optimizers=(net.optimizer(), None))
    trainer.train()
    return trainer.state.global_step


def checking(framework, **settings):
    if framework is with_lightning:
        from ckptfix.callbacks.lightning import CheckCheckpoints as OfLightning

        return OfLightning(**settings)
    from ckptfix.callbacks.transformers import CheckCheckpoints as OfTransformers

    return OfTransformers(**settings)


FRAMEWORKS = [pytest.param(with_lightning, id="lightning"), pytest.param(with_transformers, id="transformers")]


@pytest.mark.slow
@pytest.mark.parametrize("train", FRAMEWORKS)
@pytest.mark.parametrize(("spoil", "code", "since"), [("nan", "VAL101", 20), ("decay", "VAL201", 10)])
def test_each_checkpoint_since_a_defect_is_reported(train, spoil, code, since, tmp_path, caplog):
    callback = checking(train)
    assert train(tmp_path, Net(spoil), callback) == 30
    steps = sorted(int("".join(filter(str.isdigit, path.rpartition("/")[2]))) for path in callback.watch.defects)
    assert steps == list(range(since, 40, 10))
    assert all(code in {each["code"] for each in found} for found in callback.watch.defects.values())
    assert sum(f"{code} " in message for message in caplog.messages) == len(steps)


@pytest.mark.slow
@pytest.mark.parametrize("train", FRAMEWORKS)
def test_noop_a_sound_training(train, tmp_path, caplog):
    callback = checking(train, stop=True)
    calls = Calls(callback.watch, "check")
    assert train(tmp_path, Net(), callback, steps=60) == 60
    assert len(calls.counts) == 3
    assert max(calls.counts) < 200  # about 70 to begin a thread; a check makes 40,000
    assert (callback.watch.defects, [message for message in caplog.messages if "VAL" in message]) == ({}, [])


@pytest.mark.slow
@pytest.mark.parametrize("train", FRAMEWORKS)
def test_training_stops_on_request(train, tmp_path):
    callback = checking(train, stop=True)
    net = Net("nan", at=5)
    save = callback.watch.check

    def check_and_wait(path):  # a step here takes a thousandth of the time of a check
        save(path)
        callback.watch.wait()

    callback.watch.check = check_and_wait
    assert train(tmp_path, net, callback) in (10, 11)


@pytest.mark.slow
def test_lightning_checks_once_after_a_fit_that_raised():
    """Lightning then calls ``setup`` again without calling ``teardown`` first."""

    class Trainer:
        is_global_zero = True
        saved: ClassVar[list[str]] = []

        def save_checkpoint(self, path):
            self.saved.append(path)

    callback, trainer, checked = checking(with_lightning), Trainer(), list[str]()
    callback.watch.check = checked.append
    for path in ("a.ckpt", "b.ckpt"):
        callback.setup(trainer, None, "fit")
        trainer.save_checkpoint(path)
    assert trainer.saved == checked == ["a.ckpt", "b.ckpt"]
    callback.teardown(trainer, None, "fit")
    trainer.save_checkpoint("c.ckpt")
    assert (trainer.saved[-1], checked[-1]) == ("c.ckpt", "b.ckpt")


TOGETHER = """
import os, sys
from pathlib import Path

import accelerate, transformers.trainer  # once for both
from torch.distributed import TCPStore

from tests.callbacks.test_trainers import Net, checking, with_transformers


def train(rank):
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    os.setpriority = lambda *_: None
    callback = checking(with_transformers, stop=True)
    check = callback.watch.check

    def check_and_wait(path):
        check(path)
        callback.watch.wait()

    callback.watch.check = check_and_wait
    step = with_transformers(Path(sys.argv[1]), Net("nan", at=5), callback, steps=60)
    Path(sys.argv[1], f"stopped-{rank}").write_text(str(step))


# As torch.distributed.run does, which imports torch once for itself and once for each process.
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"})
os.environ.update({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
if other := os.fork():
    train(0)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
train(1)
os._exit(0)  # the threads of the store are not those of this process
"""


def test_two_callbacks_of_one_trainer_each_check_what_is_saved():
    class Trainer:
        is_global_zero = True

        def save_checkpoint(self, _: str) -> None:
            pass

    callbacks, trainer, checked = [checking(with_lightning) for _ in range(2)], Trainer(), list[str]()
    for callback in callbacks:
        callback.watch.check = checked.append
        callback.setup(trainer, None, "fit")
    trainer.save_checkpoint("step=1.ckpt")
    for callback in callbacks:
        callback.teardown(trainer, None, "fit")
    assert checked == ["step=1.ckpt"] * 2
    assert "save_checkpoint" not in vars(trainer)


@pytest.mark.slow
def test_two_processes_stop_together(tmp_path):
    """Only the first process checks. The other would wait for it forever if it did not stop too."""
    done = subprocess.run(
        [sys.executable, "-c", TOGETHER, tmp_path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True, encoding="utf-8", timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert {int((tmp_path / f"stopped-{rank}").read_text()) for rank in (0, 1)} == {40}  # found at 20, agreed on at 40
