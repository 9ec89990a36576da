"""The calculator's recipe learns: one seed of tests/learns/run.py, with a quarter of its steps, on one rank."""

from __future__ import annotations

from tests.e2e.processes import Place
from tests.learns.run import MOST_BEFORE, learned

SELDOM = ("warm_start.check_every=100", "eval.every=15")  # they measure, and change no weight


def test_a_model_that_answers_at_once_learns_to_use_the_calculator(place: Place) -> None:
    found = learned(place.call_in_fork, place, "learner.ep=1", *SELDOM, seed=0, steps=15)
    assert found.before <= MOST_BEFORE
    assert found.after >= 0.9
