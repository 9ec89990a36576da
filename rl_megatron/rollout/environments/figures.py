"""The metrics ``environment/…`` of a step's trajectories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import cmp_to_key
from itertools import pairwise

import numpy as np

from rl_megatron.columns import TokenIds
from rl_megatron.rollout.endpoint.keys import RequestCounts
from rl_megatron.types import Trajectory

SECONDS, CALLS, BAD_CALLS, SPARE, GONE_ON = "seconds", "tool_calls", "bad_calls", "spare", "gone_on"
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
    known = [_known(one) for one in led]
    read = np.array([_read(*pair) for pair in zip(led, known, strict=True)])
    sampled = np.array([one.num_sampled for one in led])
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
        "environment/spare": sum(one.metrics.get(SPARE, 0.0) for one in led) / len(led),
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


def _known(one: Trajectory) -> list[int]:
    """How many tokens each row begins with in common with one before it. Of rows in the order of their tokens,
    neighbours have most in common: the last row is compared with its two, and taken out, and so on."""
    rows = [row.token_ids for row in one.chains]
    keys = [*map(cmp_to_key(_compared), rows)]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    between = [0, *(_common(rows[a], rows[b]) for a, b in pairwise(order)), 0]  # each row and the one before it
    found = []
    for place in reversed(range(len(rows))):
        at = order.index(place)
        found.append(max(between[at : at + 2]))
        between[at : at + 2] = [min(between[at : at + 2])]
        del order[at]
    return found[::-1]


def _common(one: TokenIds, other: TokenIds) -> int:
    """How many tokens both begin with."""
    length = min(len(one), len(other))
    differ = np.append(one[:length] != other[:length], True)
    return int(differ.argmax())


def _compared(one: TokenIds, other: TokenIds) -> int:
    """Below 0 where ``one`` is before ``other`` in the order of tokens, above 0 where it is after; copies neither."""
    at = _common(one, other)
    return int(one[at]) - int(other[at]) if at < min(len(one), len(other)) else len(one) - len(other)


def _read(one: Trajectory, known: Sequence[int]) -> int:
    """Tokens of its rows that are not sampled, after the first row's prompt, or what is ``known`` of a later one's."""
    prompts = [row.turns[0].start for row in one.chains]
    before = [prompts[0], *map(min, known[1:], prompts[1:])]  # a row may sample again what one before it did
    return sum(len(row.token_ids) for row in one.chains) - sum(before) - one.num_sampled
