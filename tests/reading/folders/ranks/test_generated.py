"""Ranks that the torch at hand writes, beside its own full state_dict: every kind of FSDP, on two and on four ranks."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckptfix
from tests.checks import bytes_of

GENERATOR = Path(__file__).parent / "generators" / "fsdp.py"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.parametrize("world", [2, 4])
def test_every_kind_of_fsdp(tmp_path: Path, world: int) -> None:
    command = [sys.executable, str(GENERATOR), str(tmp_path), str(world), str(free_port())]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    kinds = sorted(path.stem for path in tmp_path.glob("*.pt"))
    assert len(kinds) == (4 if world == 2 else 6)
    for kind in kinds:
        truth = torch.load(tmp_path / f"{kind}.pt", weights_only=True)
        got = ckptfix.open_checkpoint(tmp_path / kind).state_dict()
        if kind == "local":  # which has no names: FIT106 takes them from the model
            assert sum(value.numel() for value in got.values()) == sum(value.numel() for value in truth.values())
            continue
        assert got.keys() == truth.keys(), kind
        for key, value in truth.items():
            assert bytes_of(got[key]) == bytes_of(value), (kind, key)
            assert kind == "names" or got[key].shape == value.shape, (kind, key)
