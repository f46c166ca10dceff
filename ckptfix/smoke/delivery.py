"""The forward test that a delivery asks for: on the very file that is about to be put in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptfix.core.buffers import COUNTED_SINCE, NUM_BATCHES_TRACKED, split_key
from ckptfix.core.checkpoint import Checkpoint, path_name
from ckptfix.core.finding import Finding
from ckptfix.core.settings import Settings
from ckptfix.core.smoke_result import SmokeResult
from ckptfix.engine.delivery import ForwardTest
from ckptfix.smoke.reference import Reference
from ckptfix.smoke.run import run_smoke


def forward_test(settings: Settings, model: str, arguments: Any) -> ForwardTest:
    """Return what runs the model of a factory on a file, as the settings ask."""

    def test(file: Path, result: Checkpoint) -> tuple[SmokeResult | None, list[Finding]]:
        if settings.is_for_torch_before(COUNTED_SINCE) and _lacks_counters(result):
            note = f"the result is for torch {settings.for_torch}, which is not this one"
            return SmokeResult(passed=None, device="", note=note), []
        reference = Reference.of(settings, result.path)
        return run_smoke(str(file), model, arguments, settings.smoke_settings, path_name(result.container), reference)

    return test


def _lacks_counters(result: Checkpoint) -> bool:
    """Whether this torch refuses it: a BatchNorm of ``_metadata`` version 2 has to have its counter."""
    for key in result.specs:
        path, name = split_key(key)
        version = (result.metadata or {}).get(path.removesuffix("."), {}).get("version")
        is_counted = isinstance(version, int) and version >= 2
        if is_counted and name == "running_var" and path + NUM_BATCHES_TRACKED not in result.specs:
            return True
    return False
