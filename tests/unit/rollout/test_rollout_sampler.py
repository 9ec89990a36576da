"""Sampling and scoring over a real engine: order, seeds, and rewards that fail."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from rl_megatron.config.sections.eval import EvalSection, EvalSetSection
from rl_megatron.config.sections.reward import RewardSection
from rl_megatron.config.sections.rollout import RolloutSection
from rl_megatron.errors import EngineError, PoisonPrompt, RewardError
from rl_megatron.evaluation.sets import ProblemSet, measure
from rl_megatron.rewards.threads import Plain
from rl_megatron.rollout.batch import RolloutBatch
from rl_megatron.rollout.local.engine import LocalEngine
from rl_megatron.rollout.policy_sampler import HeldOut
from rl_megatron.rollout.sampler import RolloutSampler
from rl_megatron.types import Completion, GenerationRequest, Prompt, RolloutGroup, Scored
from tests.completions import completion, drawn

MakeEngine = Callable[[int], LocalEngine]
Reward = Callable[[Prompt, Sequence[Completion], Sequence[str]], Sequence[float]]
PROMPTS = [Prompt(id=f"p{i}", text="", token_ids=(3 + i, 5), answer="") for i in range(5)]


class AsyncEngine:
    """The in-process engine behind the RolloutEngine Protocol."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self.asked: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        self.asked.append(request)
        await asyncio.sleep(0)
        return self._engine.generate([request])[0]


def text(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def texts_of(group: RolloutGroup) -> list[str]:
    return [turn.text for one in group.trajectories for turn in one.turns]


def length_reward(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[float]:
    return [float(len(t.split())) for t in texts]


def sampler(make_engine: MakeEngine, reward: Reward, seed: int = 0, **section: object) -> RolloutSampler:
    return RolloutSampler(
        engine=AsyncEngine(make_engine(8)),
        reward_function=Plain(reward),
        decode=text,
        rollout=RolloutSection(group_size=4, max_new_tokens=9),
        reward=RewardSection(**section),
        stop_token_ids=(7, 8, 9),
        seed=seed,
    )


def sampled(ours: RolloutSampler, prompts: Sequence[Prompt], step: int) -> RolloutBatch:
    return RolloutBatch.of(asyncio.run(ours.groups(drawn(prompts, step))))


def test_steps_of_a_reward_are_turns_of_what_is_trained_on_and_not_of_evaluations(make_engine: MakeEngine) -> None:
    def by_word(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[object]:
        return [[(end, 0.5) for end in range(1, len(text) + 1) if text[end:][:1] in ("", " ")] for text in texts]

    ours = replace(sampler(make_engine, length_reward), reward_function=Plain(by_word, steps=True))
    whole = sampled(sampler(make_engine, length_reward), PROMPTS, 3)
    for group, plain in zip(sampled(ours, PROMPTS, 3).groups, whole.groups, strict=True):
        for one, before in zip(group.trajectories, plain.trajectories, strict=True):
            ((row,), (old,)) = one.chains, before.chains
            assert row.token_ids.tolist() == old.token_ids.tolist()
            assert [len(turn.logprobs) for turn in row.turns] == [1] * (len(old.token_ids) - 2)
            assert one.reward == 0.5 * len(row.turns)
    params = ours.params(temperature=0.0)
    (held, *_) = asyncio.run(ours.held_out(HeldOut(prompts=PROMPTS[:1], params=params)))
    assert held.group is not None
    assert [len(one.turns) for one in held.group.trajectories] == [1]


def failing_for(bad: str, outcome: object) -> Reward:
    def reward(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> Sequence[float]:
        if prompt.id != bad:
            return length_reward(prompt, completions, texts)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return reward


def test_groups_come_in_order_with_texts_and_rewards(make_engine: MakeEngine) -> None:
    batch = sampled(sampler(make_engine, length_reward), PROMPTS, 3)
    assert [group.prompt.id for group in batch.groups] == ["p0", "p1", "p2", "p3", "p4"]
    assert (batch.reward_errors, batch.dropped_groups) == (0, 0)
    for group in batch.groups:
        rows = [row for one in group.trajectories for row in one.chains]
        assert len(rows) == 4
        assert {tuple(row.token_ids[:2].tolist()) for row in rows} == {group.prompt.token_ids}
        assert texts_of(group) == [text(row.token_ids[2:].tolist()) for row in rows]
        assert group.rewards == tuple(len(row.token_ids) - 2 for row in rows)


def test_texts_are_decoded_off_the_event_loop(make_engine: MakeEngine) -> None:
    threads = set()

    def decode(tokens: Sequence[int]) -> str:
        threads.add(threading.current_thread())
        return text(tokens)

    batch = sampled(replace(sampler(make_engine, length_reward), decode=decode), PROMPTS, 3)
    assert len(batch.groups) == 5
    assert threading.main_thread() not in threads


def test_a_step_repeats_exactly_and_no_two_steps_seeds_or_prompts_share_numbers(make_engine: MakeEngine) -> None:
    seeds = []
    for run_seed, step in ((0, 1), (0, 2), (1, 1)):
        ours = sampler(make_engine, length_reward, seed=run_seed)
        batch = sampled(ours, PROMPTS, step)
        again = sampled(sampler(make_engine, length_reward, seed=run_seed), PROMPTS[::-1], step)
        assert {g.prompt.id: texts_of(g) for g in batch.groups} == {g.prompt.id: texts_of(g) for g in again.groups}
        seeds += [request.params.seed for request in ours.engine.asked]
    assert len(set(seeds)) == 15


def test_the_engine_in_the_learners_processes_samples_anew_what_servers_had_begun(make_engine: MakeEngine) -> None:
    places = drawn(PROMPTS, 3)
    begun = [replace(one, begun=(completion([1, 2]),) * 4) for one in places]
    new, again = (asyncio.run(sampler(make_engine, length_reward).groups(one)) for one in (places, begun))
    for one, other in zip(new, again, strict=True):
        assert one.group is not None
        assert other.group is not None
        assert texts_of(one.group) == texts_of(other.group)


def test_a_prompt_that_comes_twice_in_a_step_gets_other_completions_the_second_time(make_engine: MakeEngine) -> None:
    ours = sampler(make_engine, length_reward)
    batch = sampled(ours, [*PROMPTS[:2], PROMPTS[0]], 3)
    first, _, second = (texts_of(group) for group in batch.groups)
    assert not set(first) & set(second)
    alone = sampled(sampler(make_engine, length_reward), PROMPTS[:1], 3)
    assert texts_of(alone.groups[0]) == first


@pytest.mark.parametrize(
    ("outcome", "errors", "said"),
    [
        ([1.0, math.nan, 2.0, math.inf], 2, "completion 1 got nan"),
        ([1.0], 4, "returned 1 rewards for 4 completions"),
        (KeyError("answer"), 4, "raised KeyError"),
    ],
)
def test_a_failing_reward_fails_drops_or_gets_the_number(
    make_engine: MakeEngine, outcome: object, errors: int, said: str
) -> None:
    reward = failing_for("p2", outcome)
    with pytest.raises(RewardError, match=f"prompt 'p2'.*{said}") as caught:
        sampled(sampler(make_engine, reward), PROMPTS, 0)
    assert str(caught.value).count(said) == 1

    dropped = sampled(sampler(make_engine, reward, on_error="drop"), PROMPTS, 0)
    assert [group.prompt.id for group in dropped.groups] == ["p0", "p1", "p3", "p4"]
    assert (dropped.reward_errors, dropped.dropped_groups) == (errors, 1)
    assert dropped.num_tokens == sampled(sampler(make_engine, length_reward), PROMPTS, 0).num_tokens

    numbered = sampled(sampler(make_engine, reward, on_error=-1.0), PROMPTS, 0)
    expected = (1.0, -1.0, 2.0, -1.0) if errors == 2 else (-1.0,) * 4
    assert numbered.groups[2].rewards == expected
    assert (numbered.reward_errors, numbered.dropped_groups) == (errors, 0)


def test_greedy_completions_without_a_reward_are_counted_and_get_the_number(make_engine: MakeEngine) -> None:
    def reward(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[float]:
        return [math.nan, *length_reward(prompt, completions, texts)[1:]]

    ours = replace(sampler(make_engine, reward, on_error=-1.0), greedy_baseline=True)
    batch = sampled(ours, PROMPTS, 0)
    assert (batch.reward_errors, batch.dropped_groups, batch.num_completions) == (10, 0, 20)
    assert [(group.rewards[0], group.greedy.rewards) for group in batch.groups] == [(-1.0, (-1.0,))] * 5


def test_tokens_of_a_group_that_its_greedy_completion_drops_are_counted(make_engine: MakeEngine) -> None:
    def reward(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[float]:
        return [math.nan] * len(texts) if len(texts) == 1 else length_reward(prompt, completions, texts)

    whole = sampled(replace(sampler(make_engine, length_reward), greedy_baseline=True), PROMPTS, 0)
    ours = replace(sampler(make_engine, reward, on_error="drop"), greedy_baseline=True)
    batch = sampled(ours, PROMPTS, 0)
    assert (batch.groups, batch.dropped_groups) == ((), 5)
    groups = [one for group in whole.groups for one in (group, group.greedy) if one is not None]
    assert batch.num_tokens == whole.num_tokens == sum(len(said.split()) for one in groups for said in texts_of(one))


def shown(prompt: Prompt) -> Completion:
    return completion([30, *prompt.token_ids, 7], [0.0] * 4, spans=())


def test_a_demonstration_is_judged_as_what_is_sampled_and_counts_as_nothing_that_was(make_engine: MakeEngine) -> None:
    plain = sampled(sampler(make_engine, length_reward), PROMPTS, 0)
    ours = replace(sampler(make_engine, length_reward), demonstrate=shown)
    batch = sampled(ours, PROMPTS, 0)
    assert [texts_of(group) for group in batch.groups] == [texts_of(group) for group in plain.groups]
    for group in batch.groups:
        assert group.demonstration is not None
        ((row,),) = [one.chains for one in group.demonstration.trajectories]
        (turn,) = row.turns
        assert row.token_ids.tolist() == [*group.prompt.token_ids, 30, *group.prompt.token_ids, 7]
        assert (turn.text, turn.spans, turn.logprobs.tolist()) == (text(row.token_ids[2:].tolist()), (), [0.0] * 4)
        assert group.demonstration.rewards == (4.0,)
    assert replace(batch, groups=()) == replace(plain, groups=())
    (held, *_) = asyncio.run(ours.held_out(HeldOut(prompts=PROMPTS[:1], params=ours.params(temperature=0.0))))
    assert held.group is not None
    assert held.group.demonstration is None


def test_a_demonstration_without_a_reward_fails_drops_its_group_or_gets_the_number(make_engine: MakeEngine) -> None:
    def reward(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[float]:
        return [math.nan if one.startswith("30 ") and prompt.id == "p2" else 0.5 for one in texts]

    plain = sampled(sampler(make_engine, length_reward), PROMPTS, 0)
    with pytest.raises(RewardError, match="prompt 'p2': completion 0 got nan"):
        sampled(replace(sampler(make_engine, reward), demonstrate=shown), PROMPTS, 0)
    dropped = sampled(replace(sampler(make_engine, reward, on_error="drop"), demonstrate=shown), PROMPTS, 0)
    assert [group.prompt.id for group in dropped.groups] == ["p0", "p1", "p3", "p4"]
    assert (dropped.reward_errors, dropped.dropped_groups, dropped.num_tokens) == (1, 1, plain.num_tokens)
    numbered = sampled(replace(sampler(make_engine, reward, on_error=-1.0), demonstrate=shown), PROMPTS, 0)
    shown_rewards = [group.demonstration.rewards for group in numbered.groups if group.demonstration is not None]
    assert shown_rewards == [(0.5,), (0.5,), (-1.0,), (0.5,), (0.5,)]
    assert (numbered.reward_errors, numbered.num_completions) == (1, 20)


def test_a_late_reward_is_named(make_engine: MakeEngine) -> None:
    async def never(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> Sequence[Scored]:
        await asyncio.Event().wait()
        return []

    slow = sampler(make_engine, length_reward, timeout_seconds=0.01)
    slow = RolloutSampler(
        engine=slow.engine,
        reward_function=never,
        decode=text,
        rollout=slow.rollout,
        reward=slow.reward,
        stop_token_ids=(),
        seed=0,
    )
    with pytest.raises(RewardError, match=r"prompt 'p0'.*reward.timeout_seconds=0.01"):
        sampled(slow, PROMPTS[:1], 0)


def test_an_engine_error_reaches_the_caller_as_itself(make_engine: MakeEngine) -> None:
    empty = Prompt(id="empty", text="", token_ids=(), answer="")
    with pytest.raises(EngineError, match="empty"):
        sampled(sampler(make_engine, length_reward), [*PROMPTS, empty], 0)


class Poisoned(AsyncEngine):
    """Raises PoisonPrompt for prompts that begin with the token 3."""

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        if request.token_ids[0] == 3:
            self.asked.append(request)
            raise PoisonPrompt(f"request {request.id!r}: token 0 has log-prob nan")
        return await super().generate(request)


def test_poison_is_not_asked_for_its_greedy_completion_too(make_engine: MakeEngine) -> None:
    ours = replace(sampler(make_engine, length_reward), engine=Poisoned(make_engine(8)), greedy_baseline=True)
    bad, good = asyncio.run(ours.groups(drawn(PROMPTS[:2])))
    assert [request.token_ids[0] for request in ours.engine.asked] == [3, 4, 4]
    assert (bad.group, bad.reason) == (None, "poison")
    assert bad.problem.endswith("log-prob nan")
    assert good.group is not None
    assert good.group.greedy is not None


def test_a_group_without_rewards_whose_greedy_completion_is_poison_is(make_engine: MakeEngine) -> None:
    class OfGreedy(AsyncEngine):
        async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
            if "greedy" in request.id:
                raise PoisonPrompt(f"{request.id} ended servers")
            return await super().generate(request)

    def reward(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[float]:
        return [math.nan] * len(texts)

    ours = replace(sampler(make_engine, reward, on_error="drop"), engine=OfGreedy(make_engine(8)), greedy_baseline=True)
    (one,) = asyncio.run(ours.groups(drawn(PROMPTS[:1])))
    assert (one.reason, one.problem) == ("poison", "step 1, greedy: p0 ended servers")


def accuracy_of(ours: RolloutSampler, prompts: Sequence[Prompt], *, success_reward: float) -> float:
    held_out = ProblemSet(name=None, prompts=prompts, section=EvalSetSection(), temperature=0.0)
    measured = asyncio.run(measure(ours, held_out, EvalSection(success_reward=success_reward)))
    return sum(measured.right) / len(prompts)


def test_an_evaluation_with_more_than_one_poison_prompt_in_a_hundred_has_no_accuracy(make_engine: MakeEngine) -> None:
    ours = replace(sampler(make_engine, length_reward), engine=Poisoned(make_engine(8)))

    def accuracy(poison: int) -> float:
        prompts = [replace(PROMPTS[i >= poison], id=f"e{i}") for i in range(4)]
        return accuracy_of(ours, prompts, success_reward=0.0)

    assert [accuracy(1) for _ in range(3)] == [3 / 4] * 3
    assert [request.token_ids[0] for request in ours.engine.asked].count(3) == 1  # it is known from then on
    with pytest.raises(EngineError, match=r"2 of 4 held-out prompts .* the last one's error: .*e1.*log-prob nan"):
        accuracy(2)


def test_accuracy_is_the_share_of_greedy_successes(make_engine: MakeEngine) -> None:
    ours = sampler(make_engine, failing_for("p1", [math.nan]), on_error="drop")
    lengths = {
        prompt.id: len(ours.engine._engine.generate([request])[0][0].token_ids)
        for prompt, request in zip(PROMPTS, _greedy_requests(ours), strict=True)
    }
    accuracy = accuracy_of(ours, PROMPTS, success_reward=9.0)
    assert accuracy == sum(name != "p1" and length >= 9 for name, length in lengths.items()) / 5
    assert {request.num_completions for request in ours.engine.asked} == {1}


def _greedy_requests(ours: RolloutSampler) -> list[GenerationRequest]:
    asyncio.run(ours.held_out(HeldOut(prompts=PROMPTS, params=ours.params(temperature=0.0))))
    return list(ours.engine.asked)
