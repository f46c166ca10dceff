"""What RUN102 finds is tested in tests/smoke; here, that it says nothing of a file that nobody ran."""

from __future__ import annotations

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.settings import Settings
from ckptfix.core.spec import TensorSpec
from ckptfix.rules.forward_non_finite import forward_non_finite
from ckptfix.rules.rule import Context


def test_names_alone_propose_nothing() -> None:
    checkpoint = Checkpoint("w.pth", "torch-zip", {"weight": TensorSpec("float32", (2, 2), (2, 1))})
    assert list(forward_non_finite.propose(Context(checkpoint, None, None, Settings()))) == []
    assert (forward_non_finite.code, forward_non_finite.name) == ("RUN102", "forward-non-finite")
