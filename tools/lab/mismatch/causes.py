"""Finds the cause of a gap: at most one, tried from the exact ones to the remaining ones.

Sampling parameters, a shift and changed prompts are exact: they leave no gap but rounding. Weights are read back if
the engine allows it. Experiments tell the other causes apart: each cause is guilty or not, with the figures and the
setting that fixes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from tools.lab.mismatch.experiments import (
    Evidence,
    Explanation,
    Observation,
    Outcomes,
    Parameters,
    RoutingGap,
    collect,
    find_parameters,
    routing_gap,
    sampled_otherwise,
    shifted,
    shown,
    size,
    suspected_expert,
)

NOISE: Mapping[str, float] = {"float32": 2e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""The largest mean |gap| in nats from rounding in a data type, in models of up to a hundred layers."""
_SMALL_SHARE = 0.05  # share of the gap that an explanation may leave


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCheck:
    """Tensors of the engine compared with those that the learner sent."""

    compared: int
    total: int
    differing: tuple[str, ...]
    how: str  # the method of comparison, or the reason that no tensor could be compared

    @property
    def whole(self) -> bool:
        """True if every tensor was compared."""
        return self.compared == self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerCheck:
    """Prompts tokenized again by the engine's own tokenizer."""

    compared: int
    differing: tuple[str, ...]  # one line for each prompt that it tokenizes differently
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The settings that the verdicts depend on in addition to the outcomes."""

    learner_dtype: str
    engine_dtype: str
    configured: Parameters  # parameters that the run requests from the engine
    served: bool
    replays: bool = False  # True if the learner trains on the engine's routes
    head_dtype: str | None = None  # dtype of the learner's output layer, if it has a separate one

    @property
    def noise(self) -> float:
        """The mean |gap| that rounding may cause, in nats."""
        return max(NOISE[self.learner_dtype], NOISE[self.engine_dtype])


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The gap and its possible explanations."""

    outcomes: Outcomes
    setting: Setting
    weights: WeightCheck
    evidence: Evidence
    gap: float  # size of the gap
    good: float  # size of the gap that an explanation may leave
    sampling: Explanation | None  # sampling parameters that explain it
    shift: int  # token shift that explains it; 0: no shift does
    prompt: str  # change of the prompts that explains it
    routing: RoutingGap | None

    @property
    def differs(self) -> bool:
        """True if there is a gap to explain."""
        return self.gap > self.setting.noise

    @property
    def explained(self) -> str:
        """The cause that explains it exactly; empty if none does."""
        found = {"sampling parameters": self.sampling, "token shift": self.shift, "template or tokenizer": self.prompt}
        return next((cause for cause, by in found.items() if by), "")

    @property
    def disagrees_with_itself(self) -> str:
        """The tests in which engine or learner disagrees with itself in another batch or prompt; empty without any."""
        limit = self.good + self.setting.noise
        o = self.outcomes
        found = {
            "the engine's greedy tokens in a batch of unlike lengths and alone": o.batched,
            "the engine's greedy tokens as decoded and as continued from a longer prompt": o.prefilled,
            "the learner's log-probs packed and alone": o.packed,
        }
        lines = [f"{what}: {shown(gaps)}" for what, gaps in found.items() if size(gaps) > limit]
        return "; ".join(lines)

    @property
    def needs_context(self) -> bool:
        """True if tokens after one token agree while the others do not."""
        return self.differs and size(self.outcomes.single) <= max(self.setting.noise, 0.02 * self.gap)

    @property
    def culprit(self) -> str:
        """The cause of the gap; empty if there is no gap, or if two causes would look the same."""
        if not self.differs:
            return ""
        if self.explained or self.weights.differing:
            return self.explained or "weights"
        if self.disagrees_with_itself:
            return "padding or position"
        if self.routing is not None and self.routing.share and size(self.routing.replayed) <= self.good:
            return "routing"
        if self.needs_context:
            return "padding or position"
        if self.weights.whole:
            return "dtype or kernels"
        few = float(self.outcomes.observation.gaps.abs().median()) <= self.setting.noise
        return "" if few and self.routing is None else "weights"


def make_case(outcomes: Outcomes, setting: Setting, weights: WeightCheck) -> Case:
    """Tries every explanation."""
    observation = outcomes.observation
    gap = size(observation.gaps)
    good = max(2 * setting.noise, _SMALL_SHARE * gap)
    evidence, learner = collect(observation), Parameters(temperature=observation.temperature)
    differs = gap > setting.noise
    return Case(
        outcomes=outcomes,
        setting=setting,
        weights=weights,
        evidence=evidence,
        gap=gap,
        good=good,
        sampling=find_parameters(evidence, learner, outcomes.stretch, good=good) if differs else None,
        shift=next((by for by in (1, -1) if differs and shifted(observation, by) <= good), 0),
        prompt=_explaining_prompt(outcomes, good) if differs else "",
        routing=routing_gap(observation),
    )


def _explaining_prompt(outcomes: Outcomes, good: float) -> str:
    best = min(outcomes.prompts, key=lambda name: outcomes.prompts[name], default="")
    return best if best and outcomes.prompts[best] <= good else ""


Verdict = Literal["guilty", "noise", "not guilty", "not checked"]
CAUSES = (
    "weights",
    "routing",
    "sampling parameters",
    "token shift",
    "template or tokenizer",
    "padding or position",
    "dtype or kernels",
)
_NAMED = 8  # the most tensors that a finding names
_PRECISION = (
    "the parts whose precision counts most are the output layer (learner.head_dtype=float32 with the engine's option "
    "for it, docs/engines.md), routers (the learner's are float32) and their selection biases (not to be rounded to "
    "the engine's dtype)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The verdict on one cause, with evidence and fix."""

    cause: str
    verdict: Verdict
    evidence: str
    fix: str = ""


def judge(outcomes: Outcomes, setting: Setting, weights: WeightCheck, tokenizer: TokenizerCheck) -> list[Finding]:
    """Returns a finding for each of `CAUSES`, in their order."""
    case = make_case(outcomes, setting, weights)
    return [
        _weights(case),
        _routing(case),
        _sampling(case),
        _shift(case),
        _tokenizer(case, tokenizer),
        _position(case),
        _noise(case),
    ]


def _otherwise(case: Case) -> str:
    """Returns the reason that a cause without a separate test is not guilty."""
    if not case.differs:
        return f"nothing to explain: {shown(case.outcomes.observation.gaps)}"
    return f"the gap is explained by {case.culprit}" if case.culprit else "nothing explains the gap for certain"


def _weights(case: Case) -> Finding:
    w = case.weights
    compared = f"{w.compared} of {w.total} tensors compared {w.how}"
    if w.differing:
        more = f" and {len(w.differing) - _NAMED} more" if len(w.differing) > _NAMED else ""
        return Finding(
            cause="weights",
            verdict="guilty",
            evidence=f"{compared}; the engine holds others in {', '.join(w.differing[:_NAMED])}{more}",
            fix="the engine's loader or a process that writes into its memory changes them; push again",
        )
    if case.culprit == "weights":
        expert = suspected_expert(case.outcomes.single, case.outcomes.single_routes)
        return Finding(
            cause="weights",
            verdict="guilty",
            evidence=f"{compared}, no difference in these; but tokens behind one token differ too "
            f"({shown(case.outcomes.single)}), and no other cause explains it{'; ' + expert if expert else ''}",
            fix="the engine loads or keeps these weights in a layout of its kernels' own: check its version against "
            "docs/engines.md, and lower rollout.server.probe_tolerance so that such a version is refused",
        )
    if w.whole:
        return Finding(cause="weights", verdict="not guilty", evidence=f"{compared}: all are the learner's")
    if case.differs and not case.culprit:
        return Finding(
            cause="weights",
            verdict="not checked",
            evidence=f"{compared}; few tokens differ, as of an expert's weights or of other routes",
            fix="ask again with algorithm.routing_replay=r3, so that the engine tells its routes",
        )
    same = ": these are the learner's" if w.compared else ""
    return Finding(cause="weights", verdict="not guilty", evidence=f"{compared}{same}; {_otherwise(case)}")


def _routing(case: Case) -> Finding:
    found, cause = case.routing, "routing"
    if found is None:
        why = "routes are not known of both sides"
        exact = not case.differs or case.explained or case.weights.differing
        return Finding(
            cause=cause, verdict="not guilty" if exact else "not checked", evidence=f"{why}; {_otherwise(case)}"
        )
    if case.culprit == cause and case.setting.replays:
        evidence = f"{found.shown}; algorithm.routing_replay=r3 gives the learner the engine's when it trains"
        return Finding(cause=cause, verdict="noise", evidence=evidence)
    if case.culprit == cause:
        return Finding(
            cause=cause,
            verdict="guilty",
            evidence=found.shown,
            fix="set algorithm.routing_replay=r3, or compute routers in float32 on both sides, selection biases too",
        )
    consequence = " (a consequence)" if case.differs and found.share else ""
    return Finding(cause=cause, verdict="not guilty", evidence=f"{found.shown}{consequence}")


def _sampling(case: Case) -> Finding:
    cause = "sampling parameters"
    learner = Parameters(temperature=case.outcomes.observation.temperature)
    if case.sampling is not None and case.explained == cause:
        found = case.sampling.parameters
        pairs = found.differing(learner)
        named = ", ".join(f"{name} {value:.4g} (the learner: {own:.4g})" for name, (value, own) in pairs.items())
        return Finding(
            cause=cause,
            verdict="guilty",
            evidence=f"with {named} the mean |d| falls from {case.gap:.2g} to {case.sampling.residual:.2g} nats",
            fix=_sampling_fix(pairs, case.setting),
        )
    if case.explained:
        return Finding(cause=cause, verdict="not guilty", evidence=_otherwise(case))
    if case.differs:
        return Finding(
            cause=cause,
            verdict="not guilty",
            evidence="no temperature, top-p, top-k or penalty, nor one beside a temperature, makes the log-probs the "
            "learner's",
        )
    hidden = sampled_otherwise(case.evidence, learner)
    if hidden:
        return Finding(
            cause=cause,
            verdict="guilty",
            evidence=hidden,
            fix="ask the engine for log-probs after all sampling parameters (vLLM: --logprobs-mode "
            "processed_logprobs), and set the parameter to what rollout says",
        )
    return Finding(cause=cause, verdict="not guilty", evidence=_otherwise(case) + "; the tokens are draws of it")


def _sampling_fix(pairs: Mapping[str, tuple[float, float]], setting: Setting) -> str:
    asked = {name: getattr(setting.configured, name) for name in pairs}
    if "top_p" in pairs and abs(asked["top_p"] - pairs["top_p"][0]) < 0.02:
        return (
            f"rollout.top_p={asked['top_p']:g} makes the engine's log-probs those of the tokens it leaves, while the "
            "learner's are of the whole vocabulary: set rollout.top_p=1, or rollout.sampling_masks=true"
        )
    where = "rollout.server.options or what the servers were started with" if setting.served else "the engine"
    settings = ", ".join(f"{name}={value:g}" for name, value in asked.items())
    return (
        f"the run asks for {settings}: find what overrules it ({where}), or set the key under rollout to what is meant"
    )


def _shift(case: Case) -> Finding:
    cause, o = "token shift", case.outcomes.observation
    by_one = f"held against the neighbors' the mean |d| is {shifted(o, 1):.2g} and {shifted(o, -1):.2g} nats"
    if case.explained == cause:
        return Finding(
            cause=cause,
            verdict="guilty",
            evidence=f"{by_one}, as they stand {case.gap:.2g}",
            fix="the engine's list of log-probs is one token off: take them in the adapter (rollout/) from the next "
            "place, and check its version",
        )
    return Finding(cause=cause, verdict="not guilty", evidence=f"{by_one}, as they stand {case.gap:.2g}")


def _tokenizer(case: Case, check: TokenizerCheck) -> Finding:
    cause = "template or tokenizer"
    if case.explained == cause:
        return Finding(
            cause=cause,
            verdict="guilty",
            evidence=f"the log-probs are those behind the prompt with {case.prompt}: the mean |d| falls from "
            f"{case.gap:.2g} to {case.outcomes.prompts[case.prompt]:.2g} nats",
            fix="send token ids and have the engine add nothing (no chat template, add_special_tokens=false)",
        )
    if check.differing:
        return Finding(
            cause=cause,
            verdict="guilty",
            evidence=f"{len(check.differing)} of {check.compared} prompts become other token ids by the engine's own "
            f"tokenizer, as {check.differing[0]}",
            fix="start the engine with the tokenizer and template of model.path; prompts are sent as token ids, so "
            "this run's log-probs are not concerned, but those of another client are",
        )
    tried = f"no change of the {len(case.outcomes.prompts)} tried explains it" if case.differs else _otherwise(case)
    return Finding(cause=cause, verdict="not guilty", evidence=f"{tried}; {check.how}")


def _position(case: Case) -> Finding:
    cause, o = "padding or position", case.outcomes
    if case.culprit == cause:
        itself = case.disagrees_with_itself
        only = (
            f"behind one token they agree ({shown(o.single)}), behind longer prompts not ({shown(o.observation.gaps)})"
        )
        return Finding(
            cause=cause,
            verdict="guilty",
            evidence=f"{itself or only}; mean |d| by place: {gap_by_place(o.observation)}",
            fix="look at padding and the attention mask of batches, at positions handed to the decoder, and at "
            "rope_theta and rope_scaling of the config.json that each side reads"
            + ("" if case.weights.whole else "; or the q and k projections, which cannot be read back"),
        )
    same = max(size(o.batched), size(o.prefilled), size(o.packed))
    rest = f"; {_otherwise(case)}" if case.differs else ""
    return Finding(
        cause=cause,
        verdict="not guilty",
        evidence=f"alone or in a batch, decoded or prefilled, packed or not: mean |d| {same:.2g} nats at most{rest}",
    )


def gap_by_place(observation: Observation) -> str:
    """Returns the mean |gap| by the token's place in its sequence, in words."""
    owners = observation.samples.cu_seqlens[observation.owners]
    places = observation.samples.mask.nonzero().squeeze(1) - owners + 1
    absolute = observation.gaps.abs()
    bounds = sorted({int(x) for x in torch.quantile(places.double(), torch.linspace(0, 1, 5).double()).tolist()})
    parts = []
    for low, high in zip([int(places.min()), *(b + 1 for b in bounds[1:-1])], bounds[1:], strict=False):
        inside = (places >= low) & (places <= high)
        if bool(inside.any()):
            parts.append(f"{low} to {high}: {float(absolute[inside].mean()):.2g}")
    return ", ".join(parts)


def _batch_modes(case: Case) -> str:
    """Names the modes that make each side's log-probs independent of their batch; empty if they are already."""
    engine, learner = size(case.outcomes.batched), size(case.outcomes.packed)
    out = ""
    if engine and case.setting.served:
        out += (
            f"; the engine's tokens in a batch and alone differ by {engine:.2g} nats, which "
            "rollout.server.batch_invariant=true removes on GPUs"
        )
    if learner:
        out += (
            f"; the learner's log-probs packed and alone differ by {learner:.2g} nats, against which "
            "learner.batch_invariant=true is, on GPUs and for models without experts"
        )
    return out


def _noise(case: Case) -> Finding:
    cause, s, gaps = "dtype or kernels", case.setting, case.outcomes.observation.gaps
    mean = float(gaps.mean())
    kinds = s.learner_dtype if s.learner_dtype == s.engine_dtype else f"{s.learner_dtype} and {s.engine_dtype}"
    kinds += f", the learner's output layer in {s.head_dtype}" if s.head_dtype else ""
    figures = f"{shown(gaps)}; mean d {mean:+.1g}; up to {s.noise:.2g} on average is rounding in {kinds}"
    if case.culprit == cause:
        return Finding(
            cause=cause,
            verdict="guilty",
            evidence=f"{figures}; every tensor is the learner's, and no other cause explains it",
            fix="compare the engine's kernels with its plain ones (SGLang: --attention-backend torch_native), and "
            f"config.json's rms_norm_eps, hidden_act and norm_topk_prob; {_PRECISION}{_batch_modes(case)}",
        )
    if case.differs:
        return Finding(cause=cause, verdict="not guilty", evidence=f"{figures}; the gap is larger")
    if s.learner_dtype == s.engine_dtype:
        half = s.learner_dtype != "float32"
        return Finding(
            cause=cause, verdict="noise", evidence=figures, fix=_PRECISION + _batch_modes(case) if half else ""
        )
    return Finding(
        cause=cause,
        verdict="noise",
        evidence=figures,
        fix="make learner.dtype and the engine's the same, or add a correction under algorithm.correction",
    )
