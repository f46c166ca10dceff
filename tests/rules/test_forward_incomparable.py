"""What RUN106 finds is tested in tests/smoke; here, that it says nothing of a file that nobody ran."""

from __future__ import annotations

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.settings import Settings
from ckptfix.core.spec import TensorSpec
from ckptfix.rules.forward_incomparable import forward_incomparable
from ckptfix.rules.rule import Context


def test_names_alone_propose_nothing() -> None:
    checkpoint = Checkpoint("w.pth", "torch-zip", {"weight": TensorSpec("float32", (2, 2), (2, 1))})
    assert list(forward_incomparable.propose(Context(checkpoint, None, None, Settings()))) == []
    assert (forward_incomparable.code, forward_incomparable.name) == ("RUN106", "forward-incomparable")
