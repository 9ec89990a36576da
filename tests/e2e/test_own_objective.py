"""A run whose objective is a file of the user's beside it: every rank imports it, and trains as by the row."""

from __future__ import annotations

from pathlib import Path

from tests.documents import blocks
from tests.e2e.processes import Place

KEYS = ("algorithm=gmpo", "reward.function=my_rewards:even", "warm_start.steps=0", "train.steps=2", "eval.every=0")


def test_the_gmpo_of_the_page_trains_as_the_row(place: Place) -> None:
    """Two ranks, two steps of two minibatches: each number that is repeatable is the same."""
    (documented,) = blocks(Path(__file__).parents[2] / "docs" / "algorithms.md", "python")
    (place.folder / "mine.py").write_text(documented.text)
    given = (*KEYS, "train.minibatches=2")
    runs = [place.fork("row", *given), place.fork("own", *given, "algorithm.objective=mine:gmpo")]
    for run in runs:
        run.finish()
    (known, said), (own, its) = (run.record() for run in runs)
    assert (known, said) == (own, its)
    assert all(row["grad_norm"] > 0 for row in own[-2:])


def test_an_objective_that_cannot_train_ends_the_run_before_its_first_step(place: Place) -> None:
    (place.folder / "broken.py").write_text(
        "def mean(log_ratio, inputs, lengths, row):\n    return -log_ratio.mean()\n"
    )
    run = place.fork("refused", *KEYS, "algorithm.objective=broken:mean")
    assert run.end() == 1, run.text()
    assert "algorithm.objective=broken:mean must return each token's loss and whether a limit changed it" in run.text()
    assert "Traceback" not in run.text()
