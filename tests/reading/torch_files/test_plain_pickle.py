"""Plain pickles that can be read to their end and are defective."""

import pickle
from pathlib import Path

import numpy as np
import pytest

import ckptfix
from tests.checks import bytes_of

ARRAYS = {f"layer.{index}.weight": np.arange(30, dtype="f4") + index for index in range(4)}


def test_noop_bytes_after_the_pickle(tmp_path: Path) -> None:
    path = tmp_path / "plain.pkl"
    path.write_bytes(pickle.dumps(ARRAYS, 4) + b"\n")
    assert ckptfix.open_checkpoint(path).damage == ()


@pytest.mark.parametrize("protocol", range(6))
def test_a_transfer_in_text_mode_is_undone(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "mangled.pkl"
    path.write_bytes(pickle.dumps({**ARRAYS, "n": np.full(8, 10, "i8")}, protocol).replace(b"\n", b"\r\n"))
    with pytest.raises(ckptfix.UnreadableError, match="CR LF"):
        ckptfix.open_checkpoint(path)
    checkpoint = ckptfix.open_checkpoint(path, salvage=True)
    for key, array in ARRAYS.items():
        assert bytes_of(checkpoint.read(key)) == array.tobytes()


def test_an_array_with_more_bytes_than_elements_is_refused(tmp_path: Path) -> None:
    path, data = tmp_path / "plain.pkl", pickle.dumps(ARRAYS, 3)
    path.write_bytes(data.replace(b"K\x1e\x85", b"K\x1d\x85", 1))
    with pytest.raises(ckptfix.UnreadableError, match="a numpy array of 120 bytes"):
        ckptfix.open_checkpoint(path)


def test_a_frame_that_continues_after_the_end_is_damage(tmp_path: Path) -> None:
    """pickle refuses it too: bytes are missing, and the values may be wrong from some place on."""
    path, data = tmp_path / "plain.pkl", pickle.dumps({"w": [1.0, 2.0], **ARRAYS}, 4)
    lost = data.index(b"\x94", data.index(b"layer.1") + 12)
    path.write_bytes(data[:lost] + data[lost + 1 :])
    with pytest.raises(pickle.UnpicklingError, match="truncated"):
        pickle.loads(path.read_bytes())
    with pytest.raises(ckptfix.UnreadableError):
        ckptfix.open_checkpoint(path)


def test_damage_is_not_an_attack(tmp_path: Path) -> None:
    """A damaged pickle may call a dict, which Python refuses: nothing in it runs code."""
    path = tmp_path / "plain.pkl"
    path.write_bytes(b"\x80\x02}(X\x01\0\0\0a}K\x01\x85RX\x01\0\0\0wK\x01u.")
    with pytest.raises(ckptfix.UnreadableError) as caught:
        ckptfix.open_checkpoint(path)
    assert not isinstance(caught.value, ckptfix.HostileError)
