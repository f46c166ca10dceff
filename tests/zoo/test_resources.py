"""Peaks of memory."""

from pathlib import Path

import pytest

from ckptfix.zoo.resources import Budget, Cost, Peak, _left_by_limits, cost_of, memory_at_hand, room_at


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


GROUPS = {
    "none": ("", {}, []),
    "a system without control groups": (None, {}, []),
    "no limit": ("0::/a", {"a/memory.max": "max", "a/memory.current": "5"}, []),
    "of the container": ("0::/", {"memory.max": "100", "memory.current": "30"}, [70]),
    "of the job of a cluster": (
        "5:cpu:/b\n4:memory,rdma:/slurm/job1\n",
        {
            "memory/slurm/job1/memory.limit_in_bytes": "100",
            "memory/slurm/job1/memory.usage_in_bytes": "90",
            "memory/slurm/job1/memory.stat": "inactive_file 1\ntotal_inactive_file 50\ntotal_active_file 3\nrss 4\n",
            "memory/slurm/memory.limit_in_bytes": "1000",
            "memory/slurm/memory.usage_in_bytes": "400",
        },
        [63, 600],
    ),
    "the cache is as good as free": (
        "0::/a/b",
        {
            "a/memory.max": "100",
            "a/memory.current": "90",
            "a/memory.stat": "file 60\nactive_file 10\ninactive_file 40\n",
        },
        [60],
    ),
    "seen from inside of a container": (
        "4:memory:/docker/1f2e",
        {"memory/memory.limit_in_bytes": "100", "memory/memory.usage_in_bytes": "120"},
        [0],
    ),
}


@pytest.mark.parametrize(("own", "files", "left"), GROUPS.values(), ids=GROUPS)
def test_the_limits_of_control_groups(own: str | None, files: dict[str, str], left: list[int], tmp_path: Path):
    if own is not None:
        files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()} | {"proc/self/cgroup": own}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert list(_left_by_limits(tmp_path)) == left


def test_what_is_larger_than_all_of_it_runs_alone():
    budget, huge = Budget(100), Cost(1000)
    assert budget.fits(huge)
    budget.take(huge)
    assert not budget.fits(Cost(1))
    budget.give_back(huge)
    budget.take(Cost(60))
    assert budget.fits(Cost(40))
    assert not budget.fits(Cost(41))


def test_temporary_space_counts_too():
    budget = Budget(100, temporary=10)
    budget.take(Cost(1, 6))
    assert budget.fits(Cost(1, 4))
    assert not budget.fits(Cost(1, 5))


def test_a_copy_costs_little_and_a_model_what_it_is():
    size = 10 << 30
    assert cost_of(size, runs_model=False, fetches=False).memory < 200 << 20
    assert cost_of(size, runs_model=True, fetches=False).memory > 3 * size
    assert cost_of(size, runs_model=False, fetches=True).temporary == 2 * size
