"""Preflight looks for packages of the user's own; those of layers are in tests/unit/learner/test_own_family.py."""

from __future__ import annotations

from launcher.preflight.checks import preflight
from rl_megatron.config.io import load_config


def test_advantages_and_pair_losses_of_packages_that_are_not_there_are_found_too() -> None:
    for recipe, key in (("tiny_cpu", "algorithm.advantage_mean"), ("dpo_tiny", "dpo.loss")):
        said = preflight(load_config(recipe, [f"{key}=nowhere:mine"])).texts("problem")
        assert f"{key}=nowhere:mine: no module 'nowhere'; install it or put its folder on PYTHONPATH" in said


def test_an_objective_of_a_package_that_is_not_there_is_found_before_ranks_start() -> None:
    keys = ("algorithm=gmpo", "algorithm.objective=nowhere.of:mine")
    (found,) = preflight(load_config("tiny_cpu", [*keys])).texts("problem")
    assert (
        found == "algorithm.objective=nowhere.of:mine: no module 'nowhere'; install it or put its folder on PYTHONPATH"
    )
    there = preflight(load_config("tiny_cpu", ["algorithm=gmpo", "algorithm.objective=tests.of:mine"]))
    assert there.texts("problem") == []
    assert "algorithm.objective=tests.of:mine, which ranks import" in there.texts("unchecked")
