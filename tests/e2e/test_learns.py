"""The calculator's recipe learns: one seed of `make test-learns`, with a quarter of its steps, on one rank."""

from __future__ import annotations

from tests.e2e.processes import Place
from tests.learns.run import MOST_BEFORE, learned


def test_a_model_that_answers_at_once_learns_to_use_the_calculator(place: Place) -> None:
    found = learned(place.call_in_fork, place, "learner.ep=1", seed=0, steps=15)
    assert found.before <= MOST_BEFORE
    assert found.after >= 0.9
