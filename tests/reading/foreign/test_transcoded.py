"""A checkpoint that went through something made for text comes back where its bytes are still told apart."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

import ckptfix
from ckptfix.bytes.sources import Content
from ckptfix.errors import UnreadableError
from ckptfix.reading.foreign.transcoded import is_beyond_undoing, undo_base64, undo_encoding
from tests.checks import assert_same
from tests.reading.files import in_memory

STATE = {"größe": torch.arange(-40.0, 40.0), "weight": torch.randn(16, 8, generator=torch.Generator().manual_seed(1))}
CHECKPOINTS = {
    "zip": in_memory(STATE),
    "legacy": in_memory(STATE, _use_new_zipfile_serialization=False),
    "safetensors": save(STATE),
}
CHANGES = {
    "base64": base64.b64encode,
    "base64 in lines": base64.encodebytes,
    "data URL": lambda data: b"data:application/octet-stream;base64," + base64.b64encode(data),
    "Latin-1": lambda data: data.decode("latin-1").encode(),
    "Windows-1252": lambda data: "".join(
        bytes([byte]).decode("cp1252", "ignore") or chr(byte) for byte in data
    ).encode(),
}


@pytest.mark.parametrize(
    "data",
    [
        *(pytest.param(data, id=name) for name, data in CHECKPOINTS.items()),
        pytest.param(save({"é€“”" * 9: torch.zeros(40)}), id="UTF-8 by right: names of other alphabets, and zeros"),
        pytest.param(pickle.dumps({"a": 1}, protocol=0), id="letters alone"),
        pytest.param(base64.b64encode(b"no checkpoint at all, but a text of some length" * 3), id="base64 of a text"),
        pytest.param("größe, Straße, Übermaß: “typed” — by somebody…".encode() * 9, id="a text"),
        pytest.param(bytes(range(256)) * 4, id="every byte"),
    ],
)
def test_what_was_not_changed(data: bytes) -> None:
    content = Content("f", data)
    assert (undo_base64(content), undo_encoding(content), is_beyond_undoing(content)) == (None, None, False)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("form", CHECKPOINTS)
def test_what_can_be_undone_is_salvaged(tmp_path: Path, form: str, change: str) -> None:
    path = tmp_path / "model.pth"
    path.write_bytes(CHANGES[change](CHECKPOINTS[form]))
    with pytest.raises(UnreadableError, match=r"which can be undone.*all 2 tensors with --salvage"):
        ckptfix.open_checkpoint(path)
    got = ckptfix.open_checkpoint(path, salvage=True).state_dict()
    assert_same({key: got[key] for key in STATE}, STATE)


@pytest.mark.parametrize("salvage", [False, True])
@pytest.mark.parametrize("codec", ["utf-8", "ascii"])
@pytest.mark.parametrize("form", CHECKPOINTS)
def test_what_is_gone_is_said_and_never_taken_for_weights(tmp_path: Path, form: str, codec: str, salvage: bool) -> None:
    path = tmp_path / "model.pth"
    path.write_bytes(CHECKPOINTS[form].decode(codec, "replace").encode())
    with pytest.raises(UnreadableError, match=r"was saved as text: .* U\+FFFD, which cannot be undone; fetch it again"):
        ckptfix.open_checkpoint(path, salvage=salvage)
