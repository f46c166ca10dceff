"""Peaks of memory."""

from __future__ import annotations

from ckptfix.zoo.memory import Peak, memory_at_hand, room_at


def test_a_peak_begins_anew():
    large = bytearray(64 << 20)
    first = Peak()
    before = first.nbytes()
    del large
    second = Peak()
    assert second.nbytes() < before - (32 << 20)
    larger = bytearray(96 << 20)
    assert second.nbytes() > before
    assert larger


def test_there_is_memory_and_room(tmp_path):
    assert memory_at_hand() >= 1 << 28
    assert room_at(tmp_path) > 0
