"""What FIL107 finds is tested in tests/zoo/test_renames.py; here, that it says nothing of a file without its digest."""

from __future__ import annotations

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.settings import Settings
from ckptfix.core.spec import TensorSpec
from ckptfix.rules.rule import Context
from ckptfix.rules.wrong_name_hash import wrong_name_hash


def test_a_name_alone_proposes_nothing() -> None:
    checkpoint = Checkpoint("net-19c8e357.pth", "torch-zip", {"weight": TensorSpec("float32", (2, 2), (2, 1))})
    assert list(wrong_name_hash.propose(Context(checkpoint, None, None, Settings()))) == []
    assert (wrong_name_hash.code, wrong_name_hash.name) == ("FIL107", "wrong-name-hash")
