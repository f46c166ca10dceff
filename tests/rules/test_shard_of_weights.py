from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from tests.checks import check_noop

CODE = "FIL105"


@pytest.mark.parametrize(
    "state_dict",
    [
        pytest.param({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, id="healthy"),
        pytest.param({"weight": torch.ones(2, 3), "bias": torch.empty(0)}, id="one-empty-tensor"),
        pytest.param({"a.min_val": torch.empty(0), "a.max_val": torch.empty(0), "w": torch.ones(1)}, id="observers"),
        pytest.param({"emb.weight": torch.empty(0, 4), "out.weight": torch.empty(3, 0)}, id="empty-with-a-rank"),
    ],
)
def test_noop(state_dict: dict[str, Any]) -> None:
    check_noop(state_dict, CODE)


def test_model_states_of_zero_3(tmp_path: Path) -> None:
    module = {"a.weight": torch.empty(0), "norm.weight": torch.ones(4), "head.weight": torch.empty(0)}
    path = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"module": module, "ds_version": "0.14.0", "param_shapes": []}, path)
    report = ckptfix.check(path, select=(CODE,))
    (finding,) = report.findings
    assert finding.keys == ("a.weight", "head.weight")
    assert "zero_to_fp32.py" in finding.remedy
    assert report.exit_code == 1


def test_flattened_parameters(tmp_path: Path) -> None:
    path = tmp_path / "rank0.pt"
    torch.save({"_fsdp_wrapped_module._flat_param": torch.ones(9), "bn.running_mean": torch.ones(3)}, path)
    (finding,) = ckptfix.check(path, select=(CODE,)).findings
    assert finding.keys == ("_fsdp_wrapped_module._flat_param",)
    assert finding.fix is None


def test_model_states_that_are_whole(corpus: Path) -> None:
    path = corpus / "2.6.0" / "deepspeed_module_key.pt"
    assert ckptfix.check(path, weights="module", select=(CODE,)).findings == ()
