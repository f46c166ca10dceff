"""FIL103: tensors that ask for the device that they were saved from."""

import pytest
import torch
from msgspec.structs import replace

import ckptfix
from ckptfix.core.edits import Retag
from ckptfix.core.finding import Applicability, Level
from ckptfix.core.plan import Plan, Step
from ckptfix.core.settings import Settings
from ckptfix.engine.applying import apply_plan
from ckptfix.reading.opening import open_state_dict
from ckptfix.rules.fil103_device_tag import device_tag
from ckptfix.rules.rule import Context
from tests.rules.proposals import rule_of

SAMPLE = "imagenet_dataparallel_cuda3.pth"


def context(*devices: str) -> Context:
    checkpoint = replace(open_state_dict({"weight": torch.ones(2)}), devices=devices)
    return Context(checkpoint, None, {}, Settings())


def test_noop():
    assert list(rule_of(device_tag).propose(context())) == []


def test_every_device_is_named_and_taken_off():
    seen = context("cuda:3", "xla:0")
    (finding,) = rule_of(device_tag).propose(seen)
    assert finding.level == Level.NOTE
    assert "cuda:3, xla:0" in finding.message
    assert finding.fix is not None
    assert (finding.fix.edits, finding.fix.applicability) == ((Retag("cuda:3"), Retag("xla:0")), Applicability.SAFE)
    after = apply_plan(Plan((Step("FIL103", finding.fix.edits),)), seen.checkpoint)
    assert after.devices == ()
    assert list(rule_of(device_tag).propose(replace(seen, checkpoint=after))) == []


def test_the_repaired_file_loads_without_the_device(samples, tmp_path):
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(samples / SAMPLE, weights_only=True)
    report = ckptfix.repair(samples / SAMPLE, output=tmp_path / "out.pth", select=("FIL",)).report
    assert [finding.code for finding in report.fixed] == ["FIL103"]
    assert report.exit_code == 0
    torch.load(tmp_path / "out.pth", weights_only=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tag can be obeyed here")
def test_a_rule_that_is_ignored_leaves_the_tag(samples, tmp_path):
    ckptfix.repair(samples / SAMPLE, output=tmp_path / "out.pth", ignore=("FIL103",))
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(tmp_path / "out.pth", weights_only=True)
