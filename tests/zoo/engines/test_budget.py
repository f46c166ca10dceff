"""How many jobs run beside each other."""

from __future__ import annotations

from ckptfix.zoo.engines.budget import Budget, Cost, cost_of


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
