"""Rates of phases: over their own seconds, or over the step's where a phase goes on beside the others."""

from __future__ import annotations

import pytest

from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.observability.timeline import spans


@pytest.mark.parametrize(("beside", "rate"), [(False, 600.0 / 2), (True, 600.0 / 10)])
def test_what_goes_on_beside_other_phases_has_the_seconds_of_the_step(
    monkeypatch: pytest.MonkeyPatch, beside: bool, rate: float
) -> None:
    times = iter([0, 1, 3, 10])  # the start, the phase, the row
    monkeypatch.setattr(spans, "now", lambda: next(times) * 10**9)
    watch = Stopwatch()
    with watch("rollout"):
        pass
    watch.count("rollout", 600, beside=beside)
    row = watch.row()
    assert row["tokens_per_second/rollout"] == rate
    assert (row["seconds/rollout"], row["seconds/step"]) == (2.0, 10.0)
