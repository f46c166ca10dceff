"""FIL110: weights of PaddlePaddle have the transposes of torch's linear layers."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

import ckptfix

WEIGHTS = {"fc.weight": np.eye(3, dtype="float32")}


def pickled(path: Path, content: Any) -> Path:
    path.write_bytes(pickle.dumps(content))
    return path


def test_noop_arrays_of_others(tmp_path):
    """Pickles of numpy arrays are what detectron2 and JAX users exchange, too."""
    found = ckptfix.check(pickled(tmp_path / "m.pkl", WEIGHTS)).findings
    assert {finding.code for finding in found} == {"FIL102"}


def test_weights_of_paddle_are_not_written(tmp_path):
    """A square matrix would load, and be wrong."""
    names = {"StructuredToParameterName@@": {"fc.weight": "linear_0.w_0"}}
    path = pickled(tmp_path / "m.pdparams", names | WEIGHTS)
    assert "FIL110" in [finding.code for finding in ckptfix.check(path).findings]
    target = nn.ModuleDict({"fc": nn.Linear(3, 3, bias=False)})
    report = ckptfix.repair(path, target, output=tmp_path / "out.pth").report
    assert report.is_refused
    assert report.exit_code == 1
    assert not (tmp_path / "out.pth").exists()
