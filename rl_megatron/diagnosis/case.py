"""What explains a gap: at most one cause, tried from the exact ones to what is left.

Sampling parameters, a shift and changed prompts are exact: they leave no gap but rounding. Weights are read back where
the engine lets them. What none of these explains is told apart by experiments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rl_megatron.diagnosis.experiments import Outcomes
from rl_megatron.diagnosis.observation import shifted, shown, size
from rl_megatron.diagnosis.routing import RoutingGap, routing_gap
from rl_megatron.diagnosis.sampling import Evidence, Explanation, Parameters, collect, find_parameters

NOISE: Mapping[str, float] = {"float32": 2e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Mean |gap| in nats that rounding in a data type makes at most, in models of up to a hundred layers."""
_SMALL_SHARE = 0.05  # of the gap that an explanation may leave


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCheck:
    """Tensors of the engine held against what the learner sent."""

    compared: int
    total: int
    differing: tuple[str, ...]
    how: str  # by what they were compared, or why none could be

    @property
    def whole(self) -> bool:
        """Whether every tensor was compared."""
        return self.compared == self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerCheck:
    """Prompts whose token ids the engine's own tokenizer was asked for."""

    compared: int
    differing: tuple[str, ...]  # one line for each prompt that it tokenizes otherwise
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the verdicts depend on beside the outcomes."""

    learner_dtype: str
    engine_dtype: str
    configured: Parameters  # what the run asks the engine for
    served: bool
    replays: bool = False  # whether the learner trains on the engine's routes
    head_dtype: str | None = None  # of the learner's output layer, if it has one of its own

    @property
    def noise(self) -> float:
        """Mean |gap| that rounding may make, nats."""
        return max(NOISE[self.learner_dtype], NOISE[self.engine_dtype])


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The gap, and what was found to explain it."""

    outcomes: Outcomes
    setting: Setting
    weights: WeightCheck
    evidence: Evidence
    gap: float  # size of the gap
    good: float  # size of the gap that an explanation may leave
    sampling: Explanation | None  # sampling parameters that explain it
    shift: int  # that explains it; 0 is none
    prompt: str  # change of the prompts that explains it
    routing: RoutingGap | None

    @property
    def differs(self) -> bool:
        """Whether there is anything to explain."""
        return self.gap > self.setting.noise

    @property
    def explained(self) -> str:
        """By which cause, exactly; empty where by none."""
        found = {"sampling parameters": self.sampling, "token shift": self.shift, "template or tokenizer": self.prompt}
        return next((cause for cause, by in found.items() if by), "")

    @property
    def disagrees_with_itself(self) -> str:
        """Which of the two, asked for the same tokens in other company, says something else; empty where none does."""
        limit = self.good + self.setting.noise
        o = self.outcomes
        found = {
            "the engine's greedy tokens in a batch of unlike lengths and alone": o.together,
            "the engine's greedy tokens as decoded and as continued from a longer prompt": o.prefilled,
            "the learner's log-probs packed and alone": o.packed,
        }
        lines = [f"{what}: {shown(gaps)}" for what, gaps in found.items() if size(gaps) > limit]
        return "; ".join(lines)

    @property
    def only_behind_context(self) -> bool:
        """Whether tokens after one token agree while the others do not."""
        return self.differs and size(self.outcomes.single) <= max(self.setting.noise, 0.02 * self.gap)

    @property
    def culprit(self) -> str:
        """The cause of the gap; empty where there is none, or where two would look the same."""
        if not self.differs:
            return ""
        if self.explained or self.weights.differing:
            return self.explained or "weights"
        if self.disagrees_with_itself:
            return "padding or position"
        if self.routing is not None and self.routing.share and size(self.routing.replayed) <= self.good:
            return "routing"
        if self.only_behind_context:
            return "padding or position"
        if self.weights.whole:
            return "dtype or kernels"
        few = float(self.outcomes.observation.gaps.abs().median()) <= self.setting.noise
        return "" if few and self.routing is None else "weights"


def case_of(outcomes: Outcomes, setting: Setting, weights: WeightCheck) -> Case:
    """Try every explanation."""
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
