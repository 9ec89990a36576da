"""Searches layouts of a run on given GPUs: of learner and servers, their places, what is recomputed and offloaded.

Seconds of all layouts are computed, which takes microseconds each. In their order memory is planned, with what frees
some if need be, until the next layout takes longer without any than the best of those that fit. The rejected ones have
a reason each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rl_megatron.errors import ConfigError
from rl_megatron.scaling.planner.fitting import PlacedLayouts, PlannedRun, Rejected
from rl_megatron.scaling.planner.layouts import (
    CUTS,
    MOST_EXPERT_RANKS,
    MOST_STAGES,
    Timed,
    Wanted,
    described,
    timed_layouts,
)
from rl_megatron.scaling.planner.places import MOST_SERVER_DP, placements
from rl_megatron.scaling.planner.savings import savings

NEAR = 1.3
"""How many times the fastest step's seconds a layout of ``goal=memory`` may take: the range of what is predicted."""
_SEARCHED: Mapping[str, str] = {
    **dict.fromkeys(("learner.tp", "learner.cp", "rollout.server.tp"), ", ".join(map(str, CUTS))),
    "learner.ep": f"a divisor of the experts, at most {MOST_EXPERT_RANKS}",
    "learner.pp": f"up to {MOST_STAGES}",
    "rollout.server.dp": f"up to {MOST_SERVER_DP}, where tp * dp divides the experts and fills nodes or a part of one",
    "weights.transport": "direct",
}
"""The values that are tried of keys that a user may give, for messages."""


@dataclass(slots=True)
class SearchResult:
    """Plans, the best one first, and rejected layouts: those that lack the host's memory alone first, then the fastest
    first."""

    plans: list[PlannedRun] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    layouts: int = 0  # whose seconds were computed
    planned: int = 0  # plans of memory: of a layout with each of the savings that is tried

    def reasons(self) -> list[str]:
        """The rejected layouts in words, each once, with why they are."""
        return list(dict.fromkeys(f"{described(one.keys)}: {one.reason}" for one in self.rejected))


def search(wanted: Wanted) -> SearchResult:
    """The layouts of a run. Raises ConfigError if the GPUs are no whole nodes, or if no layout fits."""
    if wanted.gpus % wanted.per_node:
        raise ConfigError(
            f"gpus={wanted.gpus} are no whole nodes of {wanted.per_node} GPUs; give a multiple of {wanted.per_node}"
        )
    found, timed, saved, places = SearchResult(), dict[int, list[Timed]](), list(savings(wanted)), list[PlacedLayouts]()
    for engines, placed in sorted(placements(wanted), key=lambda pair: pair[0]):
        if slower := engines >= _best(found.plans):
            reason = f"servers alone take at least {engines:,.1f} s for a step's completions"
            found.rejected.append(Rejected(keys=placed, seconds=engines, reason=reason))
        if slower and wanted.goal != "memory":
            continue
        world = int(str(placed["slurm.nodes"])) * wanted.per_node
        if world not in timed:
            timed[world] = sorted(timed_layouts(wanted, world), key=lambda pair: pair[0])
        places.append(PlacedLayouts(wanted=wanted, engines=engines, keys=placed, timed=timed[world], savings=saved))
        if slower:
            continue
        colocated = [plan for plan in found.plans if plan.config.rollout.server.colocated]
        found.plans += places[-1].fastest(_best(colocated if placed.get("rollout.server.colocated") else []))
    found.layouts = sum(map(len, timed.values()))
    found.rejected += [one for place in places for one in place.rejected]
    found.rejected.sort(key=lambda one: (one.lacks != "host", one.seconds))
    if not found.plans:
        raise ConfigError(_none_fits(wanted, found))
    if wanted.goal == "memory":
        found.plans = _near(places, found.plans)
    else:
        found.plans.sort(key=lambda plan: (plan.step.seconds, plan.learner))  # servers may set the step of several
    found.planned = sum(place.planned for place in places)
    return found


def _best(plans: Sequence[PlannedRun]) -> float:
    return min((plan.step.seconds for plan in plans), default=math.inf)


def _near(places: Sequence[PlacedLayouts], plans: Sequence[PlannedRun]) -> list[PlannedRun]:
    """The plans that take at most `NEAR` times the fastest's seconds, and smaller ones; the smallest first."""
    most = NEAR * _best(plans)
    near = [plan for plan in plans if plan.step.seconds <= most]
    for place in places:
        near += place.smallest(most, min(plan.footprint.total for plan in near))
    return sorted(near, key=lambda plan: plan.footprint.total)


def _none_fits(wanted: Wanted, found: SearchResult) -> str:
    """Why there is no plan."""
    if found.rejected:
        nearest = "; ".join(found.reasons()[:3])
        return f"no layout on {wanted.gpus} GPUs of {wanted.gpu.memory:g} GB fits. Nearest: {nearest}"
    tried = "".join(f"; {key} is tried as {of}" for key, of in _SEARCHED.items() if key in wanted.given)
    keys = f", or these keys leave none: {', '.join(wanted.given)}" if wanted.given else ""
    return (
        f"no layout on {wanted.gpus} GPUs of {wanted.gpu.memory:g} GB was tried: servers' weights fit in none of "
        f"its placements{keys}; give more GPUs{', or leave one out' if keys else ''}{tried}"
    )
