import time
from threading import get_ident, main_thread

import pytest

from ckptfix.bytes import threads as module
from ckptfix.bytes.threads import background, batched, side_by_side, without_threads


@pytest.mark.parametrize(
    ("sizes", "batches"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param([10], [[10]], id="exactly the limit"),
        pytest.param([30], [[30]], id="more than the limit"),
        pytest.param([4, 4, 4, 4], [[4, 4], [4, 4]], id="as many as fit"),
        pytest.param([30, 1, 30, 0, 10, 1], [[30], [1], [30], [0, 10], [1]], id="large ones are alone"),
        pytest.param([0, 0, 0], [[0, 0, 0]], id="empty ones go with others"),
    ],
)
def test_neighbours_are_grouped_in_order(sizes, batches):
    assert list(batched(sizes, lambda size: size, 10)) == batches


def slow_when_small(number: int) -> tuple[int, bool]:
    time.sleep(0.02 if number < 2 else 0)
    return number, get_ident() == main_thread().ident


@pytest.mark.parametrize(("count", "processors"), [(0, 2), (1, 2), (9, 1)])
def test_no_thread_for_one_item_or_one_processor(monkeypatch, count, processors):
    monkeypatch.setattr(module, "processors", lambda: processors)
    assert list(side_by_side(slow_when_small, range(count))) == [(number, True) for number in range(count)]


def test_results_are_in_order(monkeypatch):
    monkeypatch.setattr(module, "processors", lambda: 2)
    assert list(side_by_side(slow_when_small, range(9))) == [(number, False) for number in range(9)]


def test_threads_do_not_start_threads(monkeypatch):
    monkeypatch.setattr(module, "processors", lambda: 2)
    for inner in side_by_side(lambda _: [get_ident(), *side_by_side(lambda _: get_ident(), range(3))], range(4)):
        assert len(set(inner)) == 1


def test_few_results_are_held_at_once(monkeypatch):
    monkeypatch.setattr(module, "processors", lambda: 2)
    begun: list[int] = []
    results = side_by_side(begun.append, range(99))
    next(results)
    assert len(begun) <= module.AHEAD + 1
    assert len(list(results)) == 98


def test_errors_of_the_work_are_raised(monkeypatch):
    monkeypatch.setattr(module, "processors", lambda: 2)
    with pytest.raises(ZeroDivisionError):
        list(side_by_side(lambda number: 1 // number, [1, 0, 2]))


def test_without_threads_work_is_done_at_once():
    def who(fails: bool) -> int:
        if fails:
            raise OSError("full")
        return get_ident()

    with background() as pool:
        assert pool.submit(who, False).result() != get_ident()
    with without_threads(), background() as pool:
        assert pool.submit(who, False).result() == get_ident()
        assert list(side_by_side(lambda _: get_ident(), [1, 2])) == [get_ident()] * 2
        failed = pool.submit(who, True)  # as with a thread, the error is raised with the result
        with pytest.raises(OSError, match="full"):
            failed.result()
    with background() as pool:
        assert pool.submit(who, False).result() != get_ident()
