from __future__ import annotations

import importlib
import sys
import zlib

import pytest

from ckptfix.bytes import crc32 as module


@pytest.mark.parametrize("count", [0, 1, 15, 4096, 100_003])
def test_the_numbers_are_those_of_zlib_in_one_piece_and_in_two(count):
    data = bytes(index * 37 % 251 for index in range(count))
    assert module.crc32(data) == zlib.crc32(data)
    assert module.crc32(memoryview(data)[count // 3 :], module.crc32(data[: count // 3])) == zlib.crc32(data)


def test_zlib_stands_in_where_no_fast_one_is_installed(monkeypatch):
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "isal.isal_zlib", None)
        assert importlib.reload(module).crc32 is zlib.crc32
    importlib.reload(module)


@pytest.mark.parametrize("first", [0, 1, 63, 5000])
@pytest.mark.parametrize("second", [0, 1, 4096, 100_003])
def test_the_numbers_of_two_runs_give_that_of_both(first, second):
    data = bytes(index * 37 % 251 for index in range(first + second))
    one, two = zlib.crc32(data[:first]), zlib.crc32(data[first:])
    assert module.joined(one, two, second) == zlib.crc32(data)
