"""What is not trained on is counted: tokens of what failed and of groups whose rewards are equal, and failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rl_megatron.environments.protocol import EnvironmentStep, Observed, Reply
from rl_megatron.environments.registry import EnvironmentMaker
from rl_megatron.errors import PoisonPrompt
from rl_megatron.rollout.batch import Answered, RolloutBatch
from rl_megatron.types import Completion, GenerationRequest, Prompt
from tests.scripted_engine import Scripted, sampler
from tests.streams import Source, stream_over
from tests.unit.rollout.test_environment_source import PROMPTS, Talks
from tests.unit.rollout.test_environments_that_fail import LIMIT, played
from tests.virtual_time import run_at_once


@pytest.mark.parametrize("fail", [set[int](), {1}, {0, 1, 2}])
def test_what_those_that_fail_or_are_poison_sampled_is_counted(fail: set[int]) -> None:
    class TwoTurns(Talks):
        async def start(self, task: Prompt, seed: int) -> Any:
            self.number, self.turns = numbers[seed], 0
            return await super().start(task, seed)

        async def step(self, reply: Reply) -> EnvironmentStep:
            self.turns += 1
            if self.turns == 2 and self.number in fail:
                raise KeyError(self.number)
            return EnvironmentStep(reward=1.0, observation=None if self.turns == 2 else Observed(said="."))

    class PoisonBehind(Scripted):
        async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
            if "trajectory 2, turn 1" in request.id and not fail:
                raise PoisonPrompt("servers ended under it")
            return await super().generate(request)

    engine = PoisonBehind(lambda text: "ab")
    ours = sampler(engine, on_error="drop")
    numbers = {ours._place(PROMPTS[0], "step 1", number).seed: number for number in range(12)}
    (one,) = played(replace(ours, made=EnvironmentMaker(TwoTurns)))
    assert one.group is None
    assert RolloutBatch.of([one]).num_tokens == sum(map(len, engine.sampled.values()))


@pytest.mark.parametrize("equal", [False, True])
def test_those_of_a_kept_group_stay_counted_where_its_rewards_are_equal(equal: bool) -> None:
    class Spared(Source):
        def _answer(self, prompt: Prompt) -> Answered:
            return replace(super()._answer(prompt), left_out_tokens=5)

    async def taken() -> RolloutBatch:
        source = Spared(lambda _: 1.0, dropped=lambda _: equal)
        stream = stream_over(source, size=4, staleness=0, dynamic_sampling="drop")
        stream.start_over()
        try:
            return await stream.take(1)
        finally:
            await stream.close()

    batch = run_at_once(taken())
    assert (len(batch.groups), batch.filtered_groups > 0) == (0 if equal else 4, equal)
    assert batch.num_tokens == 5 * (len(batch.groups) + batch.filtered_groups)


class SaysMuch(Talks):
    async def start(self, task: Prompt, seed: int) -> Observed:
        return Observed(said=task.text * 40)


class Poisonous(Scripted):
    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        raise PoisonPrompt("servers ended under it")


@pytest.mark.parametrize(
    ("made", "engine", "seconds", "reason"),
    [
        (SaysMuch, Scripted, LIMIT, "long_prompt"),
        (Talks, Poisonous, LIMIT, "poison"),
        (Talks, Scripted, 1e-6, "nothing_sampled"),
    ],
)
def test_what_no_environment_failed_at_counts_as_no_error(
    made: type[Talks], engine: type[Scripted], seconds: float, reason: str
) -> None:
    ours = sampler(engine(lambda text: "a"), EnvironmentMaker(made), on_error="drop", seconds=seconds)
    ours = replace(ours, rollout=ours.rollout.model_copy(update={"on_long_prompt": "drop"}))
    (one,) = played(ours)
    batch = RolloutBatch.of([one])
    assert (one.reason, batch.dropped_groups, batch.reward_errors) == (reason, 1, 0)
