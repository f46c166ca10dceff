"""Packages that are imported on first use."""

import sys

import pytest

import ckptfix
from ckptfix.core import lazy
from ckptfix.errors import CkptfixError


def test_a_package_that_is_there_is_imported_once():
    assert type(lazy.nn)("torch.nn").Module is lazy.nn.Module


@pytest.mark.parametrize("use", [lambda checkpoint: checkpoint.read("a"), lambda checkpoint: checkpoint.state_dict()])
def test_a_tensor_without_torch_is_a_ckptfix_error(monkeypatch, tmp_path, use):
    lazy.torch.save({"a": lazy.torch.ones(2)}, tmp_path / "a.pth")
    for module in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(lazy.torch, "_module", None)
    checkpoint = ckptfix.open_checkpoint(tmp_path / "a.pth")
    assert checkpoint.keys() == ["a"]
    with pytest.raises(CkptfixError, match=r"^this needs torch, .*pip install torch$") as caught:
        use(checkpoint)
    assert isinstance(caught.value, ImportError)
