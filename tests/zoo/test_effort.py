"""What a file takes is learned from those that are done."""

from __future__ import annotations

import pytest

from ckptfix.zoo.effort import Effort

MB = 1 << 20


def learned(*files: tuple[int, float]) -> Effort:
    effort = Effort()
    for size, seconds in files:
        effort.learn(size, seconds)
    return effort


def test_noop_before_the_first_file_next_to_nothing_is_known():
    assert Effort().of(10, 10 * MB) == pytest.approx(0.15, rel=0.1)


def test_files_of_one_size_take_what_they_took():
    assert learned(*[(MB, 2.0)] * 50).of(10, 10 * MB) == pytest.approx(20.0, rel=0.02)


def test_large_files_alone_are_large_because_of_their_bytes():
    effort = learned((1000 * MB, 10.0), (990 * MB, 10.1), (980 * MB, 9.9))
    assert effort.of(10_000, 100 * MB) < 200


def test_small_files_alone_tell_nothing_of_bytes():
    """They take their time whatever their size is: a large one that comes last is not to take days."""
    effort = learned(*[(2000, 0.1)] * 20)
    assert 0.1 < effort.of(1, 32 * MB) < 2


def test_small_files_tell_what_a_file_takes_beside_its_bytes():
    effort = learned((1000 * MB, 13.0), *[(MB, 3.0)] * 100)
    assert effort.of(100, 100 * MB) == pytest.approx(300.0, rel=0.05)
    assert effort.of(1, 1000 * MB) == pytest.approx(13.0, rel=0.05)


def test_empty_files_take_their_time_too():
    assert learned(*[(0, 1.0)] * 200).of(10, 0) == pytest.approx(10.0, rel=0.01)


@pytest.mark.parametrize("files", [[(MB, 9.0), (9 * MB, 1.0)], [(MB, 0.1), (9 * MB, 90.0)]], ids=["falls", "is steep"])
def test_no_part_of_it_is_ever_negative(files):
    effort = learned(*files)
    assert effort.of(1, 0) >= 0
    assert effort.of(1, 100 * MB) >= effort.of(1, MB) > 0
