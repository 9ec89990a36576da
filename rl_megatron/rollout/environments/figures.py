"""The metrics ``environment/…`` of a step's trajectories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from rl_megatron.data.trajectories import known_beginnings, tokens_behind_prompt
from rl_megatron.rollout.endpoint.keys import RequestCounts
from rl_megatron.types import Trajectory

SECONDS, CALLS, BAD_CALLS, GONE_ON = "seconds", "tool_calls", "bad_calls", "gone_on"
"""In a trajectory's metrics: its seconds, its calls of tools, its turns with one that cannot be read, whether it is in
place of one that failed, and its turns that go on from an earlier one's row."""
BRANCHES, OWN, ENDPOINT = "branches/", "own/", "endpoint/"
"""There, the beginnings of names: of why rows began, of its environment's own, and of what its clients asked for."""


def of_requests(requests: RequestCounts) -> dict[str, float]:
    """Metrics of a trajectory whose clients asked for this."""
    return {f"{ENDPOINT}{name}": float(value) for name, value in asdict(requests).items() if name != "own_ms"}


def environment_row(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means, extremes and shares; empty where no environment led them."""
    led = [one for one in trajectories if SECONDS in one.metrics]
    if not led:
        return {}
    turns = np.array([len(one.turns) for one in led])
    rows = np.array([len(one.chains) for one in led])
    seconds = np.array([one.metrics[SECONDS] for one in led])
    known = [known_beginnings(one) for one in led]
    sampled = np.array([one.num_sampled for one in led])
    read = np.array([tokens_behind_prompt(*pair) for pair in zip(led, known, strict=True)]) - sampled
    named = sorted({name for one in led for name in one.metrics if name.startswith((BRANCHES, OWN))})
    served = [one.metrics for one in led if f"{ENDPOINT}answered" in one.metrics]
    asked = sorted({name for one in served for name in one if name.startswith(ENDPOINT)})
    return {
        "environment/turns_mean": float(turns.mean()),
        "environment/turns_max": int(turns.max()),
        "environment/rows_mean": float(rows.mean()),
        "environment/row_inflation": _inflation(led, sum(map(sum, known))),
        **_kept_prefix(led),
        "environment/observation_tokens": float(read.mean()),
        "environment/untrained_fraction": float(read.sum() / (read.sum() + sampled.sum())),
        "environment/seconds_mean": float(seconds.mean()),
        "environment/seconds_p99": float(np.quantile(seconds, 0.99, method="higher")),
        "environment/tool_calls": sum(one.metrics[CALLS] for one in led) / len(led),
        "environment/bad_calls": sum(one.metrics[BAD_CALLS] for one in led) / len(led),
        **{f"environment/stop/{stop}": count / len(led) for stop, count in Counter(one.stop for one in led).items()},
        **{f"environment/{name}": sum(one.metrics.get(name, 0.0) for one in led) / len(led) for name in named},
        **{name: sum(one[name] for one in served) / len(served) for name in asked},
        **_overhead([took for one in led for took in one.overhead_ms]),
    }


def _kept_prefix(led: Sequence[Trajectory]) -> dict[str, float]:
    later = sum(len(one.turns) - 1 for one in led)
    return {"environment/kept_prefix_fraction": sum(one.metrics[GONE_ON] for one in led) / later} if later else {}


def _overhead(took: Sequence[float]) -> dict[str, float]:
    at = {"p50": 0.5, "p99": 0.99} if took else {}
    return {f"endpoint/overhead_ms_{name}": float(np.quantile(took, q, method="higher")) for name, q in at.items()}


def _inflation(led: Sequence[Trajectory], shared: int) -> float:
    """Tokens of all rows over those that differ, of which ``shared`` are in an earlier row too."""
    tokens = sum(len(row.token_ids) for one in led for row in one.chains)
    return tokens / (tokens - shared)
