from __future__ import annotations

import logging
import os
import threading
import time

import pytest
import torch

from ckptfix.callbacks.watch import Watch


@pytest.fixture
def weights(tmp_path):
    """A sound checkpoint and one with a NaN."""
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


def test_a_file_that_is_gone_or_replaced_meanwhile_says_nothing(weights, caplog, monkeypatch):
    checked, popen = threading.Event(), Watch._check

    def late(self, path):
        checked.wait(60)
        popen(self, path)

    monkeypatch.setattr(Watch, "_check", late)
    watch = Watch()
    watch.check(weights / "nan.ckpt")
    (weights / "nan.ckpt").unlink()
    checked.set()
    watch.wait()
    assert (caplog.messages, watch.defects) == ([], {})


def test_a_file_that_cannot_be_read_is_said(weights, caplog):
    (weights / "torn.ckpt").write_bytes((weights / "sound.ckpt").read_bytes()[:3000])
    watch = Watch()
    watch.check(weights / "torn.ckpt")
    watch.wait()
    (message,) = caplog.messages
    assert message.startswith(f"{weights}/torn.ckpt: the checkpoint cannot be checked: ")
    assert "UnreadableError" in message


def test_a_check_does_not_hold_up_the_training_and_has_the_lowest_priority(weights, monkeypatch):
    priorities = []
    monkeypatch.setattr(os, "setpriority", lambda *words: priorities.append(words[2]))
    watch = Watch()
    begun = time.thread_time()
    for _ in range(3):
        watch.check(weights / "sound.ckpt")
    assert time.thread_time() - begun < 0.01
    watch.wait()
    assert priorities == [19, 19, 19]
