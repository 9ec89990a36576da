"""Searches layouts of a run on given GPUs: of learner and servers, their places, what is recomputed and offloaded.

Seconds of all layouts are computed, which takes microseconds each; in their order the plan's memory says which fit, so
that few are planned. Each that does not fit tries in turn what frees memory. The rejected ones have a reason each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.options import table as options
from rl_megatron.scaling.hardware import GB
from rl_megatron.scaling.host_memory import copies_bytes, file_bytes, host_bytes
from rl_megatron.scaling.memory import Footprint, advice, fullest
from rl_megatron.scaling.planner.layouts import (
    CHANGES_TOGETHER,
    CUTS,
    MOST_EXPERT_RANKS,
    MOST_STAGES,
    Timed,
    Wanted,
    described,
    timed_layouts,
    with_keys,
)
from rl_megatron.scaling.planner.places import MOST_SERVER_DP, placements
from rl_megatron.scaling.rl_step import RlStep, rl_step

NEAR = 1.3
"""How many times the fastest step's seconds a layout of ``goal=memory`` may take: the range of what is predicted."""
_CHECKED = 24  # layouts of a placement whose memory is planned, at most
_OF_HOST = 0.8  # of a node's memory that the learner may take; processes, files in /dev/shm and caches have the rest
_SEARCHED: Mapping[str, str] = {
    **dict.fromkeys(("learner.tp", "learner.cp", "rollout.server.tp"), ", ".join(map(str, CUTS))),
    "learner.ep": f"a divisor of the experts, at most {MOST_EXPERT_RANKS}",
    "learner.pp": f"up to {MOST_STAGES}",
    "rollout.server.dp": f"up to {MOST_SERVER_DP}, where tp * dp divides the experts and fills nodes or a part of one",
    "weights.transport": "cuda_ipc or carried with servers on the learner's GPUs, process_group with servers apart",
}
"""The values that are tried of keys that a user may give, for messages."""
_TOO_MUCH = " GB of "  # in the reason of a layout that does not fit


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A layout that fits: its configuration, the keys of it that differ, its step, and the fullest GPU."""

    config: RunConfig
    keys: Mapping[str, object]
    step: RlStep
    footprint: Footprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A layout that is not taken, with the reason and the next change."""

    keys: Mapping[str, object]
    seconds: float
    reason: str


@dataclass(slots=True)
class SearchResult:
    """Plans, the best one first, and rejected layouts, the fastest first."""

    plans: list[PlannedRun] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    layouts: int = 0  # whose seconds were computed
    planned: int = 0  # whose memory was

    def reasons(self) -> list[str]:
        """The rejected layouts in words, each once, with why they are."""
        return list(dict.fromkeys(f"{described(one.keys)}: {one.reason}" for one in self.rejected))


def search(wanted: Wanted) -> SearchResult:
    """The layouts of a run. Raises ConfigError if the GPUs are no whole nodes, or if no layout fits."""
    if wanted.gpus % wanted.per_node:
        raise ConfigError(
            f"gpus={wanted.gpus} are no whole nodes of {wanted.per_node} GPUs; give a multiple of {wanted.per_node}"
        )
    found, timed, best = SearchResult(), dict[int, list[Timed]](), math.inf
    for engines, placed in sorted(placements(wanted), key=lambda pair: pair[0]):
        if engines >= best and wanted.goal != "memory":
            reason = f"servers alone take at least {engines:,.1f} s for a step's completions"
            found.rejected.append(Rejected(keys=placed, seconds=engines, reason=reason))
            continue
        colocated = bool(placed.get("rollout.server.colocated"))
        if colocated and any(plan.keys.get("rollout.server.colocated") for plan in found.plans):
            continue  # whose servers have a larger share of the GPUs, and sample no slower
        world = int(str(placed["slurm.nodes"])) * wanted.per_node
        if world not in timed:
            timed[world] = sorted(timed_layouts(wanted, world), key=lambda pair: pair[0])
            found.layouts += len(timed[world])
        _search_placement(wanted, placed, timed[world], found)
        best = min((plan.step.seconds for plan in found.plans), default=math.inf)
    found.rejected.sort(key=lambda one: one.seconds)
    if not found.plans and not found.rejected:
        tried = "".join(f"; {key} is tried as {of}" for key, of in _SEARCHED.items() if key in wanted.given)
        keys = f", or these keys leave none: {', '.join(wanted.given)}" if wanted.given else ""
        raise ConfigError(
            f"no layout on {wanted.gpus} GPUs of {wanted.gpu.memory:g} GB was tried: servers' weights fit in none of "
            f"its placements{keys}; give more GPUs{', or leave one out' if keys else ''}{tried}"
        )
    if not found.plans:
        nearest = "; ".join(found.reasons()[:3])
        raise ConfigError(f"no layout on {wanted.gpus} GPUs of {wanted.gpu.memory:g} GB fits. Nearest: {nearest}")
    if wanted.goal == "memory":
        near = [plan for plan in found.plans if plan.step.seconds <= NEAR * best]
        found.plans = sorted(near, key=lambda plan: plan.footprint.total)
    else:
        found.plans.sort(key=lambda plan: plan.step.seconds)
    return found


def _search_placement(
    wanted: Wanted, placed: Mapping[str, object], timed: Sequence[Timed], found: SearchResult
) -> None:
    """Add the plans of a placement, and the layouts that do not fit on it."""
    base, ladder, all_of = with_keys(wanted.base, placed), list(savings(wanted)), wanted.goal == "memory"
    slack = NEAR if all_of else 1.0
    best, too_large = math.inf, list[tuple[int, ...]]()
    last = found.planned + _CHECKED * (len(ladder) if all_of else 1)
    for seconds, keys in timed:
        degrees = _room(keys)
        if seconds >= best * slack or found.planned >= last:
            break
        if any(all(d <= other for d, other in zip(degrees, failed, strict=True)) for failed in too_large):
            continue
        least = _planned(wanted, base, placed, {**keys, **ladder[-1]}, found)
        if isinstance(least, str):
            if _TOO_MUCH in least:
                too_large.append(degrees)
            found.rejected.append(Rejected(keys={**placed, **keys, **ladder[-1]}, seconds=seconds, reason=least))
            continue
        plans = [least]
        for saved in ladder[:-1]:
            plan = _planned(wanted, base, placed, {**keys, **saved}, found)
            if isinstance(plan, PlannedRun):
                plans.append(plan)
                if not all_of:
                    break
        fast = min(plan.step.parts["training"] for plan in plans)
        if fast < best * slack:
            best = min(best, fast)
            found.plans += plans if all_of else plans[-1:]


def _room(keys: Mapping[str, object]) -> tuple[int, ...]:
    """What a layout's memory falls with: of two, that with the smaller numbers needs more."""
    falling = [int(str(keys[f"learner.{axis}"])) for axis in ("tp", "pp", "ep", "etp", "cp")]
    rising = [int(str(keys[f"learner.{key}"])) for key in ("vpp", "max_tokens_per_micro_batch")]
    return (*falling, *(-number for number in rising))


def _planned(
    wanted: Wanted,
    base: RunConfig,
    placed: Mapping[str, object],
    keys: Mapping[str, object],
    found: SearchResult,
) -> PlannedRun | str:
    """The plan of a layout, or why there is none: an option refuses it, a degree does not divide, it does not fit."""
    config, every = with_keys(base, keys), {**placed, **keys}
    found.planned += 1
    for refused in options.problems(config.learner, wanted.shape):
        return refused
    try:
        footprint = fullest(config, wanted.shape)
    except ConfigError as error:
        return str(error).splitlines()[0]
    if footprint.total > wanted.gpu.memory * GB:
        largest, when = footprint.largest, f" while {footprint.phase}" if footprint.phase else ""
        return (
            f"{footprint.total / GB:.0f}{_TOO_MUCH}{wanted.gpu.memory:g} on stage {footprint.stage}{when}, most of it "
            f"{largest}, {footprint.terms[largest] / GB:.0f} GB; {advice(config, largest, CHANGES_TOGETHER)}"
        )
    copied, written = copies_bytes(config, wanted.shape), file_bytes(config, wanted.shape)
    held = host_bytes(config, wanted.shape) + copied + written
    if held > (room := wanted.gpu.host * GB * _OF_HOST):
        return (
            f"{held / GB:.0f} GB of the host's memory for what the learner keeps off its GPUs, copies of what it saves "
            f"({copied / GB:.0f}, checkpoint.async_save) and the file of weights ({written / GB:.0f}), of "
            f"{room / GB:.0f} that a node's {wanted.gpu.host:g} leave beside all else; give more GPUs, or a file of "
            "the GPU with its host="
        )
    staleness = wanted.given.get("train.max_staleness")
    step = rl_step(
        config,
        wanted.shape,
        wanted.gpu,
        wanted.lengths,
        prompt=wanted.prompt,
        staleness=0 if wanted.goal == "step" else None if staleness is None else int(str(staleness)),
    )
    if step.staleness != wanted.base.train.max_staleness:
        every["train.max_staleness"] = step.staleness
    return PlannedRun(config=with_keys(wanted.base, every), keys=every, step=step, footprint=footprint)


def savings(wanted: Wanted) -> Iterator[dict[str, object]]:
    """What frees memory, from nothing to what costs most time, as far as the user's keys leave it open."""
    parts: dict[str, object] = {"learner.recompute.moe_act": True} if wanted.shape.num_experts else {}
    if wanted.shape.latent is not None:
        parts["learner.recompute.mla_up_proj"] = True
    head: dict[str, object] = {} if "learner.head_dtype" in wanted.given else {"learner.head_dtype": "float32"}
    whole: dict[str, object] = {"learner.recompute.uniform": 1, **head}
    if any(key.startswith("learner.recompute") for key in wanted.given):
        parts, whole = {}, head
    ladder: list[dict[str, object]] = [{}, parts, {**parts, **head}, whole]
    if "learner.offload.optimizer" not in wanted.given and "learner.layers" not in wanted.given:
        ladder.append({**whole, "learner.offload.optimizer": 1.0, "learner.layers": "torch"})
    known = set(options.problems(wanted.base.learner, wanted.shape))
    for i, saved in enumerate(ladder):
        refused = set(options.problems(with_keys(wanted.base, saved).learner, wanted.shape)) - known
        if saved not in ladder[:i] and not refused:
            yield saved
