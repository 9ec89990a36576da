"""The card of a report that shows what the plan of a run predicted beside what its steps measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_megatron.observability.charts import number_text
from rl_megatron.observability.files import number
from rl_megatron.observability.history import Run

_WARM, _LEAST = 2, 3
"""Steps after a start that are left out, since they compile kernels and take memory; and steps that must be left."""
_PARTS = {
    "train": ("seconds/train", 1.0, "s"),
    "log-probs": ("seconds/logprobs", 1.0, "s"),
    "rollout": ("seconds/rollout", 1.0, "s"),
    "push": ("seconds/weights", 1.0, "s"),
    "memory": ("memory/peak", 1e9, "GB"),
    "length of a completion": ("response/length_mean", 1.0, "tokens"),
}
"""By name: the metric, which plan.json has too, what it is divided by, and the unit."""


@dataclass(frozen=True, slots=True)
class PlanCard:
    """A row of texts for each part, and notes."""

    rows: Sequence[Sequence[str]]
    notes: Sequence[str]
    columns: Sequence[str] = ("", "Predicted", "Measured", "Predicted / measured")


def make_plan_card(run: Run) -> PlanCard | None:
    """Compares the plan with the run's steps since its last start, which wrote the plan. None if a plan predicts no
    seconds, or if the run has too few steps."""
    if "seconds/train" not in run.plan:
        return None
    start = number(run.starts[-1], "step") if run.starts else None
    steps = run.rl.values("step")
    places = np.flatnonzero(steps > (start or 0))[_WARM:]
    if len(places) < _LEAST:
        return None
    rows = []
    for name, (metric, unit, unit_name) in _PARTS.items():
        values = run.rl.values(metric)[places]
        values = values[~np.isnan(values)] / unit
        if (predicted := run.plan.get(metric)) is None or not values.any():
            continue
        predicted, measured = predicted / unit, float(values.max() if name == "memory" else np.median(values))
        texts = (f"{number_text(each)} {unit_name}" for each in (predicted, measured))
        rows.append((name, *texts, f"{predicted / measured:.2f}"))
    notes = [
        f"Medians of steps {steps[places[0]]:.0f} to {steps[places[-1]]:.0f}; of memory the most. The length of a "
        "completion is assumed by the plan (slurm.speeds.mean_tokens), and seconds follow it."
    ]
    if run.config.get("train.max_staleness", "0") != "0":
        notes.append("Sampling overlaps training (train.max_staleness): a measured phase also waits for others.")
    return PlanCard(rows, notes)
