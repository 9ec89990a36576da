"""The metrics ``environment/…`` of a step's trajectories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from rl_megatron.types import Trajectory

SECONDS, BAD_CALLS, SPARE, OWN, ENDPOINT = "seconds", "bad_calls", "spare", "own/", "endpoint/"
"""In a trajectory's metrics: its seconds, its calls that cannot be read, whether it is in place of one that failed, and
the beginnings of the names of its environment's own and of what its clients asked for."""


def environment_row(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means, extremes and shares; empty where no environment led them."""
    led = [one for one in trajectories if SECONDS in one.metrics]
    if not led:
        return {}
    turns = np.array([len(one.turns) for one in led])
    rows = np.array([len(one.chains) for one in led])
    seconds = np.array([one.metrics[SECONDS] for one in led])
    read = np.array([_read(one) for one in led])
    sampled = np.array([one.num_sampled for one in led])
    own = sorted({name for one in led for name in one.metrics if name.startswith(OWN)})
    served = [one.metrics for one in led if f"{ENDPOINT}answered" in one.metrics]
    asked = sorted({name for one in served for name in one if name.startswith(ENDPOINT)})
    return {
        "environment/turns_mean": float(turns.mean()),
        "environment/turns_max": int(turns.max()),
        "environment/rows_mean": float(rows.mean()),
        "environment/observation_tokens": float(read.mean()),
        "environment/untrained_fraction": float(read.sum() / (read.sum() + sampled.sum())),
        "environment/seconds_mean": float(seconds.mean()),
        "environment/seconds_p99": float(np.quantile(seconds, 0.99, method="higher")),
        "environment/bad_calls": sum(one.metrics[BAD_CALLS] for one in led) / len(led),
        "environment/spare": sum(one.metrics.get(SPARE, 0.0) for one in led) / len(led),
        **{f"environment/stop/{stop}": count / len(led) for stop, count in Counter(one.stop for one in led).items()},
        **{f"environment/{name}": sum(one.metrics.get(name, 0.0) for one in led) / len(led) for name in own},
        **{name: sum(one[name] for one in served) / len(served) for name in asked},
    }


def _read(one: Trajectory) -> int:
    """Tokens of its rows after their first turn's start that are not sampled."""
    after = sum(len(row.token_ids) - row.turns[0].start for row in one.chains)
    return after - one.num_sampled
