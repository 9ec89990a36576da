"""The ``eval`` section: sets of held-out problems, how they are sampled, and when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rl_megatron.config.sections.data import ArithmeticData, FieldName, FileData, FileKeys, HubData, OneSource
from rl_megatron.config.sections.reward import EnvironmentSection, RewardSection
from rl_megatron.section import (
    LISTED,
    EntryName,
    Finite,
    Fraction,
    GreedyOrTemperature,
    NonNegative,
    Positive,
    PositiveFraction,
    Section,
)
from rl_megatron.types import token_limits

_OF_TRAINING: tuple[FieldName, ...] = ("messages", "tools", "context", "rejected", "margin", "demonstration")


class RunData(Section):
    """The run's own held-out problems (``data``)."""

    type: Literal["run"] = "run"


class EvalSetSection(Section):
    """One set of problems, under a name of yours; its metrics are ``eval/<name>/...`` (docs/evaluation.md)."""

    data: Annotated[RunData | ArithmeticData | FileData | HubData, Field(discriminator="type")] = RunData()
    reward: RewardSection | None = None
    """Reward of its completions, with the keys of reward; null: the reward of training."""
    environment: EnvironmentSection | None = None
    """Environment or agent that its completions are part of, with the keys of environment, whatever training has; null:
    that of training."""
    limit: Positive | None = None
    """Number of problems to use, the first ones; null uses all."""
    samples: Positive = 1
    """Completions of each problem, k in mean@k and maj@k."""
    temperature: GreedyOrTemperature | None = None
    """Temperature; 0 is greedy. null: eval.temperature."""
    top_p: PositiveFraction = 1.0
    """Sample from the fewest most likely tokens whose probabilities add up to at least this."""
    top_k: NonNegative = 0
    """Sample from this many most likely tokens; 0: from all."""
    min_p: Fraction = 0.0
    """Sample from tokens with at least this share of the most likely one's probability; 0: from all."""
    max_new_tokens: Positive | None = None
    """Longest completion, in tokens, stop token included; null: rollout.max_new_tokens."""
    every: NonNegative | None = None
    """Steps between evaluations of this set; 0: only before the first step and after the last. null: eval.every."""
    pass_at: Annotated[tuple[Positive, ...], LISTED] = ()
    """The k of pass@k and all@k to report, each at most ``samples``: a list, or text as 1,8."""

    def due(self, step: int, *, every: int, last: bool) -> bool:
        """True if the set is evaluated after ``step``; 0 is before the first. ``every``: eval.every."""
        every = every if self.every is None else self.every
        return last or step == 0 or (every > 0 and step % every == 0)

    @model_validator(mode="before")
    @classmethod
    def _nothing_to_train_on(cls, given: object) -> object:
        """A set's files need no ``train``: it is never read."""
        data = given.get("data") if isinstance(given, dict) else None
        if isinstance(given, dict) and isinstance(data, dict) and "eval" in data and "train" not in data:
            return given | {"data": data | {"train": data["eval"]}}
        return given


class EvalSection(Section):
    """Held-out accuracy: the share of prompts with a reward of at least ``success_reward``."""

    every: NonNegative = 10
    """Steps between evaluations; 0: only before the first step and after the last."""
    mode: Literal["blocking", "background"] = "blocking"
    """``blocking``: training waits for an evaluation. ``background``: training continues, and pushes change the weights
    under the evaluation's requests, so that later tokens are of later weights; needs servers (docs/evaluation.md)."""
    at_once: Positive | None = None
    """``mode=background``: most concurrent requests of an evaluation to servers, each for all samples of a problem, so
    that they leave slots to training; null: all."""
    temperature: GreedyOrTemperature = 0.0
    """Temperature of evaluation; 0 is greedy."""
    success_reward: Finite = 1.0
    """Lowest reward that counts as a right answer."""
    sets: Mapping[EntryName, EvalSetSection] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _sets_are_whole(self) -> Self:
        if problems := list(self._problems()):
            raise ValueError("\n".join(problems))
        return self

    def set_temperature(self, name: str) -> float:
        """Returns the temperature of a set."""
        own = self.sets[name].temperature
        return self.temperature if own is None else own

    @property
    def temperatures(self) -> dict[str, float]:
        """The temperatures at which evaluations sample, by their keys."""
        if not self.sets:
            return {"eval.temperature": self.temperature}
        own = {name: f"eval.sets.{name}.temperature" for name, one in self.sets.items() if one.temperature is not None}
        return {own.get(name, "eval.temperature"): self.set_temperature(name) for name in self.sets}

    @property
    def data_of_sets(self) -> Mapping[str, OneSource]:
        """The data of each set that has its own, by the key of its section."""
        return {f"eval.sets.{n}.data": one.data for n, one in self.sets.items() if not isinstance(one.data, RunData)}

    def _problems(self) -> Iterator[str]:
        for number, (name, one) in enumerate(self.sets.items()):
            key = f"eval.sets.{name}"
            if not number and one.every is not None:
                yield (
                    f"{key}.every={one.every}: the first set gives eval/accuracy, which eval.every={self.every} times "
                    "for stop_at_accuracy and keep_best; set eval.every, or put another set first"
                )
            if most := [k for k in one.pass_at if k > one.samples]:
                yield f"{key}.pass_at={most[0]} needs as many samples, but samples={one.samples}; raise the second"
            fields: Mapping[FieldName, str | None] = one.data.fields if isinstance(one.data, FileKeys) else {}
            for field in _OF_TRAINING:
                if (given := fields.get(field)) is not None:
                    named = f"{key}.data.fields.{field}={given}"
                    yield f"{named}: a set's rows are problems with an answer each; leave it out"
            if one.reward is not None and one.reward.only_records:
                parts = ", ".join(one.reward.parts)
                yield f"{key}.reward.parts: the weights of {parts} are all 0, so nothing is right; give one a weight"
            yield from _environment_problems(key, one)
            yield from self._greedy_problems(key, name, one)

    def _greedy_problems(self, key: str, name: str, one: EvalSetSection) -> Iterator[str]:
        if self.set_temperature(name):
            return
        set_ones = [f"{limit}={value:g}" for limit, value in token_limits(one).items()]
        if one.samples > 1:
            set_ones.insert(0, f"samples={one.samples}")
        if set_ones:
            yield (
                f"{key}: {', '.join(set_ones)} with temperature 0, where every sample is the most likely completion; "
                f"set {key}.temperature above 0, or leave these out"
            )


def _environment_problems(key: str, one: EvalSetSection) -> Iterator[str]:
    if one.environment is None:
        return
    if one.environment.function is None:
        yield (f"{key}.environment without a function: name one, or leave the section out, for what training has")
    elif one.reward is not None:
        yield f"{key}.reward with {key}.environment: the environment gives the reward; leave one of them out"
