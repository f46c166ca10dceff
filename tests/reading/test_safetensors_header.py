"""A header with a wrong length is read if its JSON shows where it ends."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save

import ckptfix
from ckptfix.core.facts import Kind
from tests.checks import bytes_of

STATE_DICT = {"a": torch.arange(1.0, 40.0), "b": torch.arange(5.0, 30.0)}


def padded(spaces: int) -> bytes:
    """Write a file whose header is followed by this many spaces."""
    return next(
        data
        for size in range(8)
        if (data := save(STATE_DICT, {"by": "x" * size}))[8 : header(data)].endswith(b"}" + b" " * spaces)
    )


def header(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


@pytest.mark.parametrize("off", [-100, -9, 1, 8, 30, 1 << 20, 1 << 40])
def test_a_header_that_is_not_as_long_as_it_says_is_damage(off: int, tmp_path: Path) -> None:
    data = padded(5)
    path = tmp_path / "model.safetensors"
    path.write_bytes((header(data) - 8 + off).to_bytes(8, "little") + data[8:])
    with pytest.raises(ckptfix.UnreadableError, match=r"the header (declares|is not) "):
        ckptfix.open_checkpoint(path, salvage=True)


@pytest.mark.parametrize("off", [-4, -1])
def test_a_length_without_some_padding_is_accepted(off: int, tmp_path: Path) -> None:
    data = padded(5)
    path = tmp_path / "model.safetensors"
    path.write_bytes((header(data) - 8 + off).to_bytes(8, "little") + data[8:])
    checkpoint = ckptfix.open_checkpoint(path, salvage=True)
    assert {key: bytes_of(checkpoint.read(key)) for key in checkpoint.specs} == {
        key: bytes_of(tensor) for key, tensor in STATE_DICT.items()
    }
    assert ckptfix.repair(path, salvage=True, values=False).report.exit_code == 0


def test_a_correct_length_is_not_doubted(tmp_path: Path) -> None:
    data = padded(0)
    path = tmp_path / "model.safetensors"
    path.write_bytes(data.replace(b'"a"', b'"\xff"'))
    with pytest.raises(ckptfix.UnreadableError, match="the header is not UTF-8"):
        ckptfix.open_checkpoint(path, salvage=True)


def test_an_appended_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "two.safetensors"
    path.write_bytes(padded(2) + save({"other": torch.ones(400)}))
    checkpoint = ckptfix.open_checkpoint(path, salvage=True)
    assert list(checkpoint.specs) == ["a", "b"]
    assert checkpoint.damage[0].kind is Kind.DATA_SURPLUS
