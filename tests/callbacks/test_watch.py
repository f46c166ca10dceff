import logging
import os
import shutil
import subprocess
import threading

import pytest
import torch

from ckptfix import UsageError
from ckptfix.callbacks.watch import Watch


@pytest.fixture
def weights(tmp_path):
    """Return an intact checkpoint and one with a NaN."""
    sound = {f"layers.{n}.weight": torch.randn(64, 64) for n in range(4)}
    torch.save({"state_dict": sound}, tmp_path / "sound.ckpt")
    torch.save({"state_dict": {**sound, "layers.2.weight": torch.full((64, 64), torch.nan)}}, tmp_path / "nan.ckpt")
    return tmp_path


def test_defects_are_logged_and_sound_files_are_not(weights, caplog):
    watch = Watch()
    for name in ("sound.ckpt", "nan.ckpt", "sound.ckpt"):
        watch.check(weights / name)
    watch.wait()
    assert caplog.messages == [
        f"{weights}/nan.ckpt: VAL101 non-finite: 1 tensor is not finite: 4096 NaN among 4096 values (layers.2.weight)"
    ]
    assert {path: [each["code"] for each in found] for path, found in watch.defects.items()} == {
        str(weights / "nan.ckpt"): ["VAL101"]
    }
    assert caplog.records[0].levelno == logging.WARNING


def test_settings_are_those_of_a_check(weights, caplog):
    torch.save({f"module.{n}": torch.randn(8, 8) for n in range(3)}, weights / "wrapped.ckpt")
    for watch in (Watch(), Watch(select=("KEY",))):
        watch.check(weights / "wrapped.ckpt")
        watch.wait()
    assert [message.split()[1] for message in caplog.messages] == ["KEY102"]


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"selct": ["VAL"]}, "no setting 'selct'; did you mean 'select'"), ({"select": ["VAL9"]}, "no rule code")],
)
def test_a_wrong_setting_is_refused_before_the_training_begins(settings, told):
    with pytest.raises(UsageError, match=told):
        Watch(**settings)


@pytest.fixture
def beside(monkeypatch):
    """Do something to a checkpoint while it is being checked."""
    communicate = subprocess.Popen.communicate

    def checked_beside(change, path):
        def changing(self, *words, **named):
            change()
            return communicate(self, *words, **named)

        monkeypatch.setattr(subprocess.Popen, "communicate", changing)
        watch = Watch()
        watch.check(path)
        watch.wait()
        return watch.defects

    return checked_beside


def test_noop_a_file_removed_or_replaced_meanwhile(weights, caplog, beside):
    defect, sound = weights / "nan.ckpt", (weights / "sound.ckpt").read_bytes()
    assert beside(lambda: defect.write_bytes(sound[:3000]), defect) == {}
    assert beside(defect.unlink, defect) == {}
    assert beside(lambda: None, defect) == {}
    assert caplog.messages == []


def test_a_folder_that_grows_is_reported_and_a_replaced_one_is_not(weights, caplog, beside):
    """As in a training run with several processes: each rank saves its random state."""
    folder = weights / "checkpoint-20"
    folder.mkdir()
    defect = (weights / "nan.ckpt").rename(folder / "pytorch_model.bin")
    assert beside((folder / "rng_state_1.pth").touch, folder).keys() == {str(folder)}
    assert len(caplog.messages) == 1
    assert beside(lambda: (weights / "sound.ckpt").replace(defect), folder) == {}
    assert beside(lambda: shutil.rmtree(folder), folder) == {}
    assert len(caplog.messages) == 1


def test_a_file_that_cannot_be_read_is_reported(weights, caplog):
    (weights / "torn.ckpt").write_bytes((weights / "sound.ckpt").read_bytes()[:3000])
    watch = Watch()
    watch.check(weights / "torn.ckpt")
    watch.wait()
    (message,) = caplog.messages
    assert message.startswith(f"{weights}/torn.ckpt: the checkpoint cannot be checked: ")
    assert "UnreadableError" in message


def test_checks_run_in_the_background_at_the_lowest_priority(weights, monkeypatch):
    priorities = []
    monkeypatch.setattr(os, "setpriority", lambda *words: priorities.append(words[2]))
    watch = Watch()
    begin, check = threading.Event(), Watch._check
    monkeypatch.setattr(Watch, "_check", lambda self, path: begin.wait(60) and check(self, path))
    for _ in range(3):
        watch.check(weights / "sound.ckpt")
    assert priorities == []
    begin.set()
    watch.wait()
    assert priorities == [19, 19, 19]
