"""Searches layouts of a run on given GPUs: learner and servers, their placement, recomputation and offloading.

Seconds of all layouts are computed, which takes microseconds each. In their order memory is planned, with savings if
needed, until the next layout without savings takes longer than the best one that fits. Savings of GPU memory take
time, and only those that a run's keys leave open are tried. Each rejected layout has a reason, and the terms of time
and memory are explained in words.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import inf
from typing import Literal

from rl_megatron.config.learner_checks import problems, sparse_problem
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.teachers import TEACHER
from rl_megatron.errors import GB, ConfigError
from rl_megatron.models.shape import length_problem
from rl_megatron.types import BYTES
from rl_megatron.weights.layouts.learner import rank_parameters
from tools.planner.layouts import (
    COUPLED_KEYS,
    CUTS,
    MOST_EXPERT_RANKS,
    MOST_SERVER_DP,
    MOST_STAGES,
    SearchRequest,
    Timed,
    described,
    learner_seconds,
    placements,
    timed_layouts,
    with_keys,
)
from tools.planner.memory import RESERVED, Footprint, advice, copies_bytes, file_bytes, fullest, host_bytes
from tools.planner.rl_step import RlStep, rl_step
from tools.planner.terms import changes as term_changes


def savings(wanted: SearchRequest) -> Iterator[dict[str, object]]:
    """Yields keys that save memory, from none to the most, if the user's keys leave them open and they are valid."""
    shape, given = wanted.shape, wanted.given
    parts = (*(["mla_up_proj"] if shape.latent is not None else []), *(["moe_act"] if shape.num_experts else []))
    of_parts: list[dict[str, object]] = [{"learner.recompute.parts": parts}] if parts else []
    again: list[dict[str, object]] = [{}, *of_parts, {"learner.recompute.uniform": 1}]
    moments: list[dict[str, object]] = [{}, {"learner.offload.optimizer": 1.0, "learner.layers": "torch"}]
    head: list[dict[str, object]] = [{}, {"learner.head_dtype": "float32"}]
    if any(key.startswith("learner.recompute") for key in given):
        again = [{}]
    if "learner.offload.optimizer" in given or "learner.layers" in given:
        moments = [{}]
    if "learner.head_dtype" in given:
        head = [{}]
    known = set(problems(wanted.base.learner, shape))
    for one in product(head, moments, again):
        saved = {key: value for keys in one for key, value in keys.items()}
        if not set(problems(with_keys(wanted.base, saved).learner, shape)) - known:
            yield saved


LayoutKeys = Mapping[str, object]
_OF_HOST = 0.8  # share of a node's memory for the learner; processes, files in /dev/shm and caches have the rest
_PASSING = ("activations", "logits", "step", "weight push")  # terms that a GPU does not hold all the time


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A layout that fits: its configuration, the keys that differ, its step, and the fullest GPU."""

    config: RunConfig
    keys: LayoutKeys
    step: RlStep
    footprint: Footprint

    @property
    def learner(self) -> float:
        """The seconds of training and log-probs in a step."""
        return sum(self.step.parts.get(part, 0.0) for part in ("training", "log-probs"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedLayout:
    """A layout that is not taken, with the reason and the next change.

    ``lacks`` is the memory that is too small: "GPUs", "state" if even the permanent state does not fit GPUs, or "host";
    empty if the reason is another. ``needs`` are the bytes that a GPU would need.
    """

    keys: LayoutKeys
    seconds: float
    reason: str
    lacks: Literal["", "state", "GPUs", "host"] = ""
    needs: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """A layout with some of the savings; ``seconds`` as `PlannedRun.learner`."""

    seconds: float
    saved: LayoutKeys
    config: RunConfig
    keys: LayoutKeys

    @property
    def on_host(self) -> object:
        """The values that the host's memory depends on."""
        return self.saved.get("learner.offload.optimizer"), self.config.checkpoint.async_save

    def more_than(self, other: _Trial) -> bool:
        """True if it has all savings of the other and more, with the same kind of layers."""
        same = self.saved.get("learner.layers") == other.saved.get("learner.layers")
        return same and self.saved.items() > other.saved.items()


@dataclass(slots=True, kw_only=True)
class PlacedLayouts:
    """A placement with servers that take ``engines`` seconds for a step, and its layouts, ordered by their seconds
    without ``savings``. The last of ``savings`` has all of them.

    ``planned`` counts plans of memory; ``too_large`` are layouts that GPUs do not hold with any of the savings.
    """

    wanted: SearchRequest
    engines: float
    keys: LayoutKeys
    timed: Sequence[Timed]
    savings: Sequence[LayoutKeys]
    planned: int = 0
    rejected: list[RejectedLayout] = field(default_factory=list)
    too_large: list[tuple[int, ...]] = field(default_factory=list)

    def fastest(self, max_seconds: float) -> Iterator[PlannedRun]:
        """Yields plans that may take less than ``max_seconds`` seconds a step, each with less training and log-probs
        than the one before; the last is the best."""
        limit = self._learner_within(max_seconds)
        for seconds, keys in self.timed:
            if seconds >= limit:
                return
            if self._is_too_large(keys):
                continue
            found = self._fastest_of(keys, limit)
            if isinstance(found, PlannedRun):
                limit = found.learner
                yield found
            elif found is not None:
                self.rejected.append(found)
                if found.lacks in ("state", "GPUs"):
                    self.too_large.append(_room(keys))

    def smallest(self, max_seconds: float, min_bytes: float) -> Iterator[PlannedRun]:
        """Yields plans of less than ``min_bytes`` bytes that take at most ``max_seconds`` seconds a step, each with
        fewer bytes than the one before."""
        limit = self._learner_within(max_seconds)
        for seconds, keys in self.timed:
            if seconds > limit:
                return
            if self._is_too_large(keys) or self._fixed_bytes(keys) >= min_bytes:
                continue
            near = [trial for trial in self._trials(keys) if trial.seconds <= limit]
            for trial in near:
                if any(other.more_than(trial) for other in near):
                    continue
                found = self._planned(trial, min_bytes)
                if isinstance(found, RejectedLayout) and found.lacks == "host" and (waits := self._drop_copies(trial)):
                    found = self._planned(waits, min_bytes)
                if (
                    isinstance(found, PlannedRun)
                    and found.step.seconds <= max_seconds
                    and found.footprint.total < min_bytes
                ):
                    min_bytes = found.footprint.total
                    yield found

    def _learner_within(self, max_seconds: float) -> float:
        """Returns the most seconds of training and log-probs in a step of ``max_seconds`` seconds."""
        overlaps = "slurm.engines.nodes" in self.keys and self.wanted.goal != "step"
        return max_seconds if overlaps else max_seconds - self.engines

    def _is_too_large(self, keys: LayoutKeys) -> bool:
        room = _room(keys)
        return any(all(d <= other for d, other in zip(room, failed, strict=True)) for failed in self.too_large)

    def _fixed_bytes(self, keys: LayoutKeys) -> float:
        """Returns bytes of a GPU that no savings free: a stage's mean parameters and gradients, and the reserve."""
        wanted, learner = self.wanted, with_keys(self.wanted.base, keys).learner
        each = BYTES[learner.dtype] + BYTES[learner.gradient_dtype]
        return each * sum(rank_parameters(wanted.shape, learner.dims)) + RESERVED * wanted.gpu.memory * GB

    def _trials(self, keys: LayoutKeys) -> list[_Trial]:
        """Returns the layout with each of the savings, in their order."""
        out, base = list[_Trial](), with_keys(self.wanted.base, self.keys)
        for saved in self.savings:
            config = with_keys(base, {**keys, **saved})
            seconds = learner_seconds(self.wanted, config)
            out.append(_Trial(seconds=seconds, saved=saved, config=config, keys={**self.keys, **keys, **saved}))
        return out

    def _fastest_of(self, keys: LayoutKeys, limit: float) -> PlannedRun | RejectedLayout | None:
        """Returns the layout with the fastest savings that fit; None if they take ``limit`` seconds. If none fit, it
        returns the rejected one that a host lacks memory for, or that needs the least memory of a GPU."""
        *_, last = trials = self._trials(keys)
        nearest = of_last = self._planned(last)
        if isinstance(of_last, RejectedLayout) and of_last.lacks == "state":
            return of_last
        full = set[object]()  # values of `on_host` that a host's memory does not hold
        queue = sorted(trials, key=lambda trial: trial.seconds)
        while queue:
            if (trial := queue.pop(0)).seconds >= limit:
                return None
            if trial.on_host not in full:
                found = of_last if trial is last else self._planned(trial)
                if isinstance(found, PlannedRun):
                    return found
                if found.lacks != "host":
                    if isinstance(nearest, RejectedLayout) and nearest.lacks != "host" and found.needs < nearest.needs:
                        nearest = found
                    continue
                nearest = found
                full.add(trial.on_host)
            if waits := self._drop_copies(trial):
                insort(queue, waits, key=lambda trial: trial.seconds)
        return nearest

    def _drop_copies(self, trial: _Trial) -> _Trial | None:
        """Returns the trial with checkpoints that training waits for; None if it waits already, or the key is given."""
        name = "checkpoint.async_save"
        if not trial.config.checkpoint.async_save or name in self.wanted.given:
            return None
        config = with_keys(trial.config, {name: False})
        return replace(trial, config=config, keys={**trial.keys, name: False})

    def _planned(self, trial: _Trial, min_bytes: float | None = None) -> PlannedRun | RejectedLayout:
        """Returns the plan of a layout with savings, or its rejection. The reason is an invalid option, a degree that
        does not divide, or its memory (at least ``min_bytes`` bytes of a GPU, if given)."""
        wanted, config = self.wanted, trial.config
        self.planned += 1
        refused = partial(RejectedLayout, keys=trial.keys, seconds=trial.seconds)
        for reason in problems(config.learner, wanted.shape):
            return refused(reason=reason)
        dense = sparse_problem(config.learner, wanted.shape)
        if too_long := length_problem(wanted.shape, config.named_longest, config.longest_sequence, dense):
            return refused(reason=too_long)
        try:
            footprint = fullest(config, wanted.shape)
        except ConfigError as error:
            return refused(reason=str(error).splitlines()[0])
        if footprint.total > (room := wanted.gpu.memory * GB):
            state = replace(footprint, terms={t: n for t, n in footprint.terms.items() if t not in _PASSING})
            if state.total > room:
                return refused(reason=self._too_much(config, state), lacks="state")
            return refused(reason=self._too_much(config, footprint), lacks="GPUs", needs=footprint.total)
        if min_bytes is not None and footprint.total >= min_bytes:
            return refused(reason=f"{footprint.total / GB:.0f} GB are not less than {min_bytes / GB:.0f}", lacks="GPUs")
        if reason := self._too_much_of_host(config):
            return refused(reason=reason, lacks="host")
        staleness = wanted.given.get("train.max_staleness")
        step = rl_step(
            config,
            wanted.shape,
            wanted.gpu,
            wanted.lengths,
            prompt=wanted.prompt,
            staleness=0 if wanted.goal == "step" else None if staleness is None else int(str(staleness)),
        )
        keys = dict(trial.keys)
        if step.staleness != wanted.base.train.max_staleness:
            keys["train.max_staleness"] = step.staleness
        return PlannedRun(config=with_keys(wanted.base, keys), keys=keys, step=step, footprint=footprint)

    def _too_much(self, config: RunConfig, footprint: Footprint) -> str:
        """Returns the reason that ``footprint``, with the terms of passes or without, does not fit a GPU."""
        largest, when = footprint.largest, f" while {footprint.phase}" if footprint.phase else ""
        when += "" if _PASSING[0] in footprint.terms else ", even without what passes hold"
        most = f"most of it {largest}, {footprint.terms[largest] / GB:.0f} GB"
        room = f"{footprint.total / GB:.0f} GB of {self.wanted.gpu.memory:g} on stage {footprint.stage}{when}"
        return f"{room}, {most}; {advice(config, largest, COUPLED_KEYS)}"

    def _too_much_of_host(self, config: RunConfig) -> str:
        """Returns the reason that a node's memory does not hold the learner's data there; empty if it does."""
        shape, gpu = self.wanted.shape, self.wanted.gpu
        copied, written = copies_bytes(config, shape), file_bytes(config, shape)
        held = host_bytes(config, shape) + copied + written
        if held <= (room := gpu.host * GB * _OF_HOST):
            return ""
        return (
            f"{held / GB:.0f} GB of the host's memory for what the learner keeps off its GPUs, copies of what it saves "
            f"({copied / GB:.0f}, checkpoint.async_save) and the file of weights ({written / GB:.0f}), of "
            f"{room / GB:.0f} that a node's {gpu.host:g} leave beside all else; give more GPUs, or a file of "
            "the GPU with its host="
        )


def _room(keys: LayoutKeys) -> tuple[int, ...]:
    """Returns numbers that lower a layout's memory: if all are smaller, the layout needs more."""
    falling = [int(str(keys[f"learner.{axis}"])) for axis in ("tp", "pp", "ep", "etp", "cp")]
    rising = [int(str(keys[f"learner.{key}"])) for key in ("vpp", "max_tokens_per_micro_batch")]
    return (*falling, *(-number for number in rising))


SECONDS: Mapping[str, str] = {
    "linears": "products of attention's projections, dense and shared MLPs and routers, forward and twice backward; "
    "fewer with a larger tp, which makes each narrower and slower for its size",
    "experts": "grouped products of the experts, whose rows are a micro-batch's tokens times the experts of a token "
    "over those of a rank; faster with a larger ep or max_tokens_per_micro_batch, which give an expert more rows",
    "attention": "scores and values of causal attention, 2.5 times the forward pass in the backward pass; grows with "
    "the length of sequences",
    "between products": "norms, residuals, rotary embeddings, activations and permuted rows, which pass over the GPU's "
    "memory",
    "all-to-all": "tokens to the ranks of their experts and back, forward and backward, over the slower of NVLink and "
    "the network; less with ep inside NVLink's domain, or with learner.dispatcher=deepep between nodes",
    "tensor parallel": "all-gathers and reduce-scatters of hidden states over NVLink; none with tp=1",
    "context parallel": "keys and values that ranks hand on to one another; none with cp=1",
    "computed again": "forward passes of what learner.recompute does not keep",
    "output layer": "logits, log-probs and their gradients, on the last stage; shown where that is the slowest",
    "draft layers": "the draft layer that is trained on the last stage (learner.draft.train), forward and backward",
    "host": "launches of kernels where they take longer than the kernels; less with longer micro-batches",
    "activations on the host": "what copies of activations to the host's memory and back take longer than their layer "
    "(learner.offload.activations); less with longer micro-batches",
    "between stages": "hidden states from stage to stage, and their gradients back",
    "bubble": "stages that wait while the pipeline fills and drains; less with fewer stages, a larger vpp, or more "
    "micro-batches: a smaller dp or fewer minibatches",
    "gradients, parameters": "reduce-scatter of gradients and all-gather of parameters after the last micro-batch; "
    "less with learner.overlap, or learner.gradient_dtype=bfloat16",
    "optimizer": "AdamW's passes over its share of the state",
    "orthogonalization": "products of Muon's iteration, over its share of the matrices (learner.optimizer.name=muon); "
    "less with a larger dp",
    "optimizer on the host": "copies over PCIe and AdamW on the host's cores (learner.offload.optimizer)",
    "fixed": "what a step costs whatever it does: clipping, counting, logging",
    "training": "forward and backward passes of all minibatches and epochs, with the optimizer's steps",
    "log-probs": "one forward pass of the policy over the batch before it is trained on (algorithm.old_logprobs)",
    "reference": "one forward pass of the reference, for the KL term",
    "critic": "training of the critic, counted as the policy's, and one forward pass for its values",
    "push": "weights over the slowest link of the busiest rank, and a pause of the servers",
    "turns": "the optimizer's state to the host's memory and back, while servers sample on the same GPUs",
    "rollout": "prompts, then a token after the other for all rows that are left: each reads the weights that some row "
    "uses and the rows' cache; the longest completions end nearly alone",
    "reward models": "what the slowest reward model on ranks takes for the batch beyond the rollout's seconds; less "
    "with more ranks for it (roles.layouts.reward_NAME)",
    "waiting for the longest": "what the longest completion takes over train.max_staleness steps; less with more "
    "staleness, or a smaller rollout.max_new_tokens",
}
TEACHER_SECONDS = "one forward pass of the teacher over the batch, as if it judged all that is sampled"
"""The text for the seconds of each teacher's role on ranks, which the user names."""


def explain_term(term: str, plan: PlannedRun) -> Iterator[str]:
    """Yields lines about a term: its value in a plan, its meaning, how to lower it. Raises ConfigError for others."""
    changes = {**COUPLED_KEYS, **term_changes()}
    in_memory = plan.footprint.terms
    known = {**SECONDS, **{role: TEACHER_SECONDS for role in plan.step.parts if role.startswith(TEACHER)}}
    if term not in known and term not in in_memory:
        raise ConfigError(f"--explain {term}: no such term; terms: {', '.join([*known, *in_memory])}")
    for of, terms in (("a step", plan.step.parts), ("training in a step", plan.step.training)):
        if term in terms:
            yield f"{term}: {terms[term]:,.2f} s of {of}"
    if term in known:
        yield f"{term}: {known[term]}"
    if term in in_memory:
        held, rank = plan.footprint, f"rank {plan.footprint.rank}, stage {plan.footprint.stage}"
        change = changes.get(term, "choose other degrees")
        yield f"{term}: {in_memory[term] / GB:,.2f} GB of {held.total / GB:,.1f} on {rank}; to lower it, {change}"


NEAR = 1.3
"""The most seconds of a layout of ``goal=memory`` over the fastest step's: the range of the predictions."""
_SEARCHED: Mapping[str, str] = {
    **dict.fromkeys(("learner.tp", "learner.cp", "rollout.server.tp"), ", ".join(map(str, CUTS))),
    "learner.ep": f"a divisor of the experts, at most {MOST_EXPERT_RANKS}",
    "learner.pp": f"up to {MOST_STAGES}",
    "rollout.server.dp": f"up to {MOST_SERVER_DP}, where tp * dp divides the experts and fills nodes or a part of one",
    "weights.transport": "direct",
}
"""The values that the search tries for keys that a user may give, for messages."""


@dataclass(slots=True)
class SearchResult:
    """Plans, the best one first, and rejected layouts: first those that lack only the host's memory, then the others,
    the fastest first."""

    plans: list[PlannedRun] = field(default_factory=list)
    rejected: list[RejectedLayout] = field(default_factory=list)
    layouts: int = 0  # the number of layouts with computed seconds
    planned: int = 0  # plans of memory: one for each layout and each of the savings that was tried

    def reasons(self) -> list[str]:
        """Returns the rejected layouts in words, each once, with the reason."""
        return list(dict.fromkeys(f"{described(one.keys)}: {one.reason}" for one in self.rejected))


def search(wanted: SearchRequest) -> SearchResult:
    """Returns the layouts of a run. Raises ConfigError if the GPUs are not whole nodes, or if no layout fits."""
    if wanted.gpus % wanted.per_node:
        raise ConfigError(
            f"gpus={wanted.gpus} are no whole nodes of {wanted.per_node} GPUs; give a multiple of {wanted.per_node}"
        )
    found, timed, saved, places = SearchResult(), dict[int, list[Timed]](), list(savings(wanted)), list[PlacedLayouts]()
    for engines, placed in sorted(placements(wanted), key=lambda pair: pair[0]):
        if slower := engines >= _best(found.plans):
            reason = f"servers alone take at least {engines:,.1f} s for a step's completions"
            found.rejected.append(RejectedLayout(keys=placed, seconds=engines, reason=reason))
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
    """Returns the plans within `NEAR` times the fastest's seconds, and smaller ones; the smallest first."""
    most = NEAR * _best(plans)
    near = [plan for plan in plans if plan.step.seconds <= most]
    for place in places:
        near += place.smallest(most, min(plan.footprint.total for plan in near))
    return sorted(near, key=lambda plan: plan.footprint.total)


def _none_fits(wanted: SearchRequest, found: SearchResult) -> str:
    """Returns the reason that there is no plan."""
    if found.rejected:
        nearest = "; ".join(found.reasons()[:3])
        return f"no layout on {wanted.gpus} GPUs of {wanted.gpu.memory:g} GB fits. Nearest: {nearest}"
    tried = "".join(f"; {key} is tried as {of}" for key, of in _SEARCHED.items() if key in wanted.given)
    keys = f", or these keys leave none: {', '.join(wanted.given)}" if wanted.given else ""
    return (
        f"no layout on {wanted.gpus} GPUs of {wanted.gpu.memory:g} GB was tried: servers' weights fit in none of "
        f"its placements{keys}; give more GPUs{', or leave one out' if keys else ''}{tried}"
    )
