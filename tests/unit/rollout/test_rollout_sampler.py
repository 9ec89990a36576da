"""Sampling and scoring over a real engine: order, seeds, rewards that fail, and thinking that is too long."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from rl_megatron.config.io import load_config
from rl_megatron.config.sections.eval import EvalSection, EvalSetSection
from rl_megatron.config.sections.reward import RewardSection
from rl_megatron.config.sections.rollout import RolloutSection
from rl_megatron.data.samples import to_samples
from rl_megatron.engines.answers import join_continuation
from rl_megatron.engines.local.engine import LocalEngine
from rl_megatron.errors import ConfigError, EngineError, PoisonPrompt, RewardError
from rl_megatron.evaluation.sets import EvalSet, measure
from rl_megatron.features.interrupt.feature import InterruptSection
from rl_megatron.features.interrupt.interruption import ThinkingBudget, make_step_hooks
from rl_megatron.interfaces import RunComponents
from rl_megatron.rewards.threads import Plain
from rl_megatron.rollout.policy_sampler import EvalRequest, PolicySampler
from rl_megatron.rollout.sampler import RolloutSampler, SourceSampler, traced_generate
from rl_megatron.rollout.stream import RolloutBatch
from rl_megatron.types import Completion, GenerationRequest, Prompt, RewardResult, RolloutGroup, SamplingParams
from tests.completions import completion, drawn

MakeEngine = Callable[[int], LocalEngine]
Reward = Callable[[Prompt, Sequence[Completion], Sequence[str]], Sequence[float]]
PROMPTS = [Prompt(id=f"p{i}", text="", token_ids=(3 + i, 5), answer="") for i in range(5)]


class AsyncEngine:
    """The in-process engine behind the RolloutEngine Protocol, which goes on from what has ended alone."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self.asked: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        self.asked.append(request)
        await asyncio.sleep(0)
        if request.partial is not None and len(request.partial.token_ids) >= request.params.max_new_tokens:
            return [request.partial]
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


def sampled(ours: PolicySampler, prompts: Sequence[Prompt], step: int) -> RolloutBatch:
    return RolloutBatch.from_results(asyncio.run(ours.groups(drawn(prompts, step))))


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
    (held, *_) = asyncio.run(ours.sample_eval(EvalRequest(prompts=PROMPTS[:1], params=ours.params(temperature=0.0))))
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


def test_what_an_engine_samples_beyond_a_stop_text_is_cut(make_engine: MakeEngine) -> None:
    """An engine that continues a completion from its tokens does not see a text that began in them."""

    class Blind(AsyncEngine):
        async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
            found = await super().generate(replace(request, params=replace(request.params, stop=())))
            return [replace(one, continued=True) for one in found]

    engine: Any = Blind(make_engine(8))
    params = sampler(make_engine, length_reward).params(temperature=1.0, max_new_tokens=12)
    asked = GenerationRequest(id="x", token_ids=(3, 4), num_completions=4, params=params, columns=("routes",))
    whole = asyncio.run(traced_generate(engine, asked, text))
    ids = whole[0].token_ids.tolist()
    assert len(ids) > 3
    stop = text(ids[1:3])
    found = asyncio.run(traced_generate(engine, replace(asked, params=replace(params, stop=(stop,))), text))
    for cut, full in zip(found, whole, strict=True):
        tokens = full.token_ids.tolist()
        length = next((i for i in range(len(tokens)) if stop in text(tokens[:i])), len(tokens))
        assert cut.token_ids.tolist() == tokens[:length]
        assert len(cut.logprobs) == length
        assert cut.columns["routes"].tolist() == full.columns["routes"][: 2 + length - 1].tolist()
    assert (found[0].token_ids.tolist(), found[0].finish_reason) == (ids[:3], "stop")


def test_only_what_later_requests_continued_is_decoded_for_a_stop_text(make_engine: MakeEngine) -> None:
    class Says(AsyncEngine):
        async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
            return says

    says, decoded = list[Completion](), list[Sequence[int]]()

    def spied(tokens: Sequence[int]) -> str:
        decoded.append(tokens)
        return text(tokens)

    engine: Any = Says(make_engine(8))
    params = replace(sampler(make_engine, length_reward).params(temperature=1.0, max_new_tokens=9), stop=("4 5",))
    asked = GenerationRequest(id="x", token_ids=(3,), num_completions=1, params=params)
    first, more = completion((3, 4)), completion((5, 6))
    whole = completion((3, 4, 5, 6))
    ways = [
        (whole, first),
        (join_continuation(first, more), None),
        (completion((3, 4, 5, 6), spans=((0, 1), (2, 2))), None),
    ]
    for one, begun in ways:
        says[:] = [one]
        (found,) = asyncio.run(traced_generate(engine, replace(asked, partial=begun), spied))
        assert (found.token_ids.tolist(), found.finish_reason, bool(decoded)) == ([3, 4, 5], "stop", True)
        decoded.clear()
    says[:] = [completion((3, 4, 5))]  # as an engine cuts what one request has sampled
    (found,) = asyncio.run(traced_generate(engine, asked, spied))
    assert (found.token_ids.tolist(), found.finish_reason, decoded) == ([3, 4, 5], "stop", [])


def test_texts_are_decoded_off_the_event_loop(make_engine: MakeEngine) -> None:
    threads = set()

    def decode(tokens: Sequence[int]) -> str:
        threads.add(threading.current_thread())
        return text(tokens)

    assert len(sampled(replace(sampler(make_engine, length_reward), decode=decode), PROMPTS, 3).groups) == 5
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
    begun = [replace(one, partials=(completion([1, 2]),) * 4) for one in places]
    new, again = (asyncio.run(sampler(make_engine, length_reward).groups(one)) for one in (places, begun))
    for one, other in zip(new, again, strict=True):
        assert one.group is not None
        assert other.group is not None
        assert texts_of(one.group) == texts_of(other.group)


def test_a_prompt_that_comes_twice_in_a_step_gets_other_completions_the_second_time(make_engine: MakeEngine) -> None:
    batch = sampled(sampler(make_engine, length_reward), [*PROMPTS[:2], PROMPTS[0]], 3)
    first, _, second = (texts_of(group) for group in batch.groups)
    assert not set(first) & set(second)
    assert texts_of(sampled(sampler(make_engine, length_reward), PROMPTS[:1], 3).groups[0]) == first


@pytest.mark.parametrize(
    ("outcome", "errors", "said"),
    [
        ([1.0, math.nan, 2.0, math.inf], 2, "completion 1 got nan"),
        ([1.0], 4, "returned 1 rewards for 4 completions"),
        (KeyError("answer"), 4, "raised KeyError"),
    ],
)
def test_a_failing_reward_has_an_outcome(make_engine: MakeEngine, outcome: object, errors: int, said: str) -> None:
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

    batch = sampled(replace(sampler(make_engine, reward, on_error=-1.0), greedy_baseline=True), PROMPTS, 0)
    assert (batch.reward_errors, batch.dropped_groups, batch.num_completions) == (10, 0, 20)
    assert [(group.rewards[0], group.greedy.rewards) for group in batch.groups] == [(-1.0, (-1.0,))] * 5


def test_tokens_of_a_group_that_its_greedy_completion_drops_are_counted(make_engine: MakeEngine) -> None:
    def reward(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[float]:
        return [math.nan] * len(texts) if len(texts) == 1 else length_reward(prompt, completions, texts)

    whole = sampled(replace(sampler(make_engine, length_reward), greedy_baseline=True), PROMPTS, 0)
    batch = sampled(replace(sampler(make_engine, reward, on_error="drop"), greedy_baseline=True), PROMPTS, 0)
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
        ((row,),) = [one.chains for one in group.demonstration.trajectories]
        (turn,) = row.turns
        assert row.token_ids.tolist() == [*group.prompt.token_ids, 30, *group.prompt.token_ids, 7]
        assert (turn.text, turn.spans, turn.logprobs.tolist()) == (text(row.token_ids[2:].tolist()), (), [0.0] * 4)
        assert group.demonstration.rewards == (4.0,)
    assert replace(batch, groups=()) == replace(plain, groups=())
    (held, *_) = asyncio.run(ours.sample_eval(EvalRequest(prompts=PROMPTS[:1], params=ours.params(temperature=0.0))))
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
    async def never(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> Sequence[RewardResult]:
        await asyncio.Event().wait()
        return []

    slow = sampler(make_engine, length_reward, timeout_seconds=0.01)
    others: Any = {"rollout": slow.rollout, "reward": slow.reward, "stop_token_ids": (), "seed": 0}
    slow = RolloutSampler(engine=slow.engine, reward_function=never, decode=text, **others)
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
    held_out = EvalSet(name=None, prompts=prompts, section=EvalSetSection(), temperature=0.0)
    return sum(asyncio.run(measure(ours, held_out, EvalSection(success_reward=success_reward))).right) / len(prompts)


def test_an_evaluation_with_more_than_one_poison_prompt_in_a_hundred_has_no_accuracy(make_engine: MakeEngine) -> None:
    ours = replace(sampler(make_engine, length_reward), engine=Poisoned(make_engine(8)))

    def accuracy(poison: int) -> float:
        return accuracy_of(ours, [replace(PROMPTS[i >= poison], id=f"e{i}") for i in range(4)], success_reward=0.0)

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


def test_each_group_of_an_evaluation_is_told_once_and_a_prompt_by_its_number(make_engine: MakeEngine) -> None:
    told: list[int] = []
    ours = sampler(make_engine, length_reward)
    params = ours.params(temperature=1.0)
    asked = EvalRequest(prompts=[*PROMPTS[:2], PROMPTS[0]], params=params, samples=2, on_progress=told.append)
    asyncio.run(ours.sample_eval(asked))
    assert told == [2] * 3
    assert [one.id for one in ours.engine.asked] == ["evaluation: p0", "evaluation: p1", "evaluation, time 2: p0"]


def test_prompts_of_several_sources_come_back_in_their_order_from_their_own_samplers(make_engine: MakeEngine) -> None:
    usual, own = (sampler(make_engine, length_reward, seed) for seed in (0, 1))
    both = SourceSampler(
        engine=usual.engine, rollout=usual.rollout, stop_token_ids=(), seed=0, default=usual, source_samplers={"b": own}
    )
    prompts = [PROMPTS[0], replace(PROMPTS[1], source="b"), PROMPTS[2]]
    found = sampled(both, prompts, 1)
    alone = [sampled(one, [prompt], 1) for one, prompt in zip((usual, own, usual), prompts, strict=True)]
    assert [texts_of(group) for group in found.groups] == [texts_of(one.groups[0]) for one in alone]


def _greedy_requests(ours: RolloutSampler) -> list[GenerationRequest]:
    asyncio.run(ours.sample_eval(EvalRequest(prompts=PROMPTS, params=ours.params(temperature=0.0))))
    return list(ours.engine.asked)


# Thinking that is too long is ended by a text, over a real engine; log-probs against transformers.
TEXT, ENDS = (39, 40, 38), (37, 36)


def interrupting(engine: LocalEngine, interrupt: dict[str, Any] | None, **options: Any) -> RolloutSampler:
    section = InterruptSection.model_validate(interrupt or {"earliest": 1})
    of = ThinkingBudget(section=section, token_ids=np.array(TEXT, np.int32), ends=np.array(ENDS, np.int32), decode=text)
    return RolloutSampler(
        engine=AsyncEngine(engine),
        reward_function=Plain(length_reward),
        decode=text,
        rollout=RolloutSection(group_size=4, max_new_tokens=14),
        reward=RewardSection(),
        stop_token_ids=(7, 8, 9),
        seed=0,
        hooks=() if interrupt is None else (of,),
        **options,
    )


def groups(ours: RolloutSampler) -> list[RolloutGroup]:
    return [one.group for one in asyncio.run(ours.groups(drawn(PROMPTS, 3))) if one.group is not None]


@pytest.mark.parametrize("apart", [False, True])
def test_a_text_follows_where_thinking_goes_on_and_only_what_was_sampled_is_trained_on(
    theirs: Qwen3MoeForCausalLM, make_engine: MakeEngine, apart: bool
) -> None:
    """Up to its place a completion is the one that nobody interrupts. Its routes are those of one pass over its row."""
    engine, routes = make_engine(8), ("routes",)
    found, free = (
        groups(interrupting(engine, each, one_request_each=apart, columns=routes)) for each in ({"earliest": 5}, None)
    )
    interrupted = 0
    for group, other in zip(found, free, strict=True):
        samples = to_samples([group])
        for number, (one, alone) in enumerate(zip(group.trajectories, other.trajectories, strict=True)):
            (chain,), (sampled,) = one.chains, (alone.chains[0].token_ids[2:].tolist(),)
            tokens = chain.token_ids[2:].tolist()
            assert tokens[:5] == sampled[:5]
            assert one.reward == len(tokens) <= 14
            if len(sampled) <= 5 and alone.stop == "done":
                assert tokens == sampled
                continue
            interrupted += 1
            assert tuple(tokens[5:8]) == TEXT
            assert [(turn.start, turn.stop) for turn in one.turns] == [(2, 7), (10, 2 + len(tokens))]
            assert [turn.text for turn in one.turns] == [text(tokens[:5]), text(tokens[8:])]
            assert all([span[0] for span in turn.spans] == [0] for turn in one.turns)
            with torch.no_grad():
                said = theirs(torch.tensor([chain.token_ids.tolist()]), output_router_logits=True)
            logits = said.logits[0].double().log_softmax(-1)
            chosen = [layer[:-1].topk(2).indices.sort(-1).values for layer in said.router_logits]
            np.testing.assert_array_equal(np.sort(chain.columns["routes"], -1), torch.stack(chosen, 1).numpy())
            for turn in one.turns:
                places = range(turn.start, turn.stop)
                wanted = [float(logits[at - 1, chain.token_ids[at]]) for at in places]
                assert turn.logprobs.tolist() == pytest.approx(wanted, abs=1e-4)
            row = slice(*samples.cu_seqlens[number : number + 2].tolist())
            trained = [at + 1 for at, on in enumerate(samples.mask[row].tolist()) if on]
            assert trained == [*range(2, 7), *range(10, 2 + len(tokens))]
    assert 5 < interrupted < 20
    config = load_config("tiny_cpu", ["rollout.interrupt.earliest=5"])
    row = make_step_hooks(config, cast(RunComponents, None)).group_row(found)
    assert row == {"response/interrupted_fraction": pytest.approx(interrupted / 20)}
    assert make_step_hooks(load_config("tiny_cpu", []), cast(RunComponents, None)) is None


def test_a_completion_whose_thinking_has_ended_goes_on_without_the_text(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the end is in the text, or is a token that is not decoded."""
    engine = make_engine(8)
    first = groups(interrupting(engine, {"earliest": 5}))[0].trajectories
    said = next(one for one in first if len(one.turns) == 2).chains[0].token_ids[2:7]
    for thinking, ends in ((text(said[1:4]), np.array(ENDS, np.int32)), ("none", said[3:5])):
        monkeypatch.setattr("rl_megatron.features.interrupt.interruption.THINKING_ENDS", thinking)
        ours = interrupting(engine, {"earliest": 5})
        ours = replace(ours, hooks=(replace(ours.hooks[0], ends=ends),))
        found = [one for one in groups(ours)[0].trajectories if one.chains[0].token_ids[2:7].tolist() == said.tolist()]
        assert found
        for one in found:
            assert len(one.turns) == 1
            assert len(one.chains[0].token_ids) > 7


def test_long_texts_are_decoded_beside_the_event_loop_which_other_requests_need(make_engine: MakeEngine) -> None:
    seen = set[threading.Thread]()

    def decode(tokens: Sequence[int]) -> str:
        seen.add(threading.current_thread())
        return text(tokens)

    ours = interrupting(make_engine(8), {"earliest": 5})
    found = groups(replace(ours, hooks=(replace(ours.hooks[0], decode=decode),)))
    assert any(len(one.turns) == 2 for one in found[0].trajectories)
    assert seen
    assert threading.current_thread() not in seen


def test_an_end_of_thinking_without_tokens_of_its_own_is_looked_for_in_the_text_alone(make_engine: MakeEngine) -> None:
    ours = interrupting(make_engine(8), {"earliest": 5})
    nothing = replace(ours.hooks[0], ends=np.zeros(0, np.int32))
    assert any(len(one.turns) == 2 for one in groups(replace(ours, hooks=(nothing,)))[0].trajectories)


def test_places_are_drawn_for_each_group_and_do_not_depend_on_how_it_is_asked_for(make_engine: MakeEngine) -> None:
    engine, seen = make_engine(8), []
    for apart in (False, True):
        found = groups(interrupting(engine, {"earliest": 0.3, "latest": 9}, one_request_each=apart))
        seen.append([{len(one.turns[0].logprobs) for one in g.trajectories if len(one.turns) == 2} for g in found])
    assert all(one == other for one, other in zip(*seen, strict=True) if one and other)
    assert all(sum(map(bool, places)) >= 4 for places in seen)
    drawn_places = [place for places in seen[0] for place in places]
    assert all(len(places) <= 1 for places in seen[0])
    assert len(set(drawn_places)) > 1
    assert all(4 <= place <= 9 for place in drawn_places)


def test_a_resume_goes_on_behind_the_text_from_what_a_checkpoint_has(make_engine: MakeEngine) -> None:
    """Of a completion that was at the text, or that had ended behind it."""
    engine = make_engine(8)
    whole = groups(interrupting(engine, {"earliest": 5}, one_request_each=True))
    ours = interrupting(engine, {"earliest": 5}, one_request_each=True)
    for kept in ("first part", "all"):
        known = []
        for one in whole[0].trajectories:
            (chain,) = one.chains
            logprobs = np.zeros(len(chain.token_ids) - 2, np.float32)
            for turn in one.turns:
                logprobs[turn.start - 2 : turn.stop - 2] = turn.logprobs
            count = 5 if kept == "first part" and len(one.turns) == 2 else len(logprobs)
            reason = "stop" if one.stop == "done" and count == len(logprobs) else "length"
            known.append(
                Completion(
                    token_ids=chain.token_ids[2 : 2 + count].copy(),
                    logprobs=logprobs[:count].copy(),
                    finish_reason=reason,
                    spans=one.turns[0].spans,
                )
            )
        known = [one if len(one.token_ids) in (5, 14) else None for one in known]  # that this engine can go on from
        assert any(known)
        (place,) = drawn(PROMPTS[:1], 3)
        (answered,) = asyncio.run(ours.groups([replace(place, partials=tuple(known))]))
        for one, other in zip(answered.group.trajectories, whole[0].trajectories, strict=True):
            assert one.chains[0].token_ids.tolist() == other.chains[0].token_ids.tolist()
            assert [turn.start for turn in one.turns] == [turn.start for turn in other.turns]


@pytest.mark.parametrize("begun", [0, 5, 9])
async def test_a_checkpoint_keeps_what_is_before_the_text_and_what_goes_on_behind_it_is_asked_for_whole(
    make_engine: MakeEngine, begun: int
) -> None:
    """``begun``: the tokens that a checkpoint has of a completion whose text is behind the fifth, of 14 at most."""
    (hooks,) = interrupting(make_engine(8), {"earliest": 5}).hooks
    known = completion(range(20, 20 + begun), finish="length") if begun else None
    params = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=14, stop_token_ids=(), seed=0)
    request = GenerationRequest(id="p", token_ids=(3, 5), num_completions=1, params=params, partial=known)
    seen = list[object]()

    async def generate(asked: GenerationRequest) -> tuple[Completion, ...]:
        seen.append(asked.params.max_new_tokens)
        return (completion(range(20, 20 + asked.params.max_new_tokens), finish="length"),)

    (found,) = await hooks.generated(request, generate, lambda kept: seen.append(kept.token_ids.tolist()))
    whole = [*range(20, 25), *TEXT, *range(20, 26)]
    assert seen == ([14] if begun == 9 else [5, whole[:5], 6])
    assert found.token_ids.tolist() == ([*range(20, 34)] if begun == 9 else whole)


def test_nothing_is_interrupted_where_no_token_would_follow_and_in_evaluations(make_engine: MakeEngine) -> None:
    engine = make_engine(8)
    late = groups(interrupting(engine, {"earliest": 11}))
    assert all(len(one.turns) == 1 for group in late for one in group.trajectories)
    ours = interrupting(engine, {"earliest": 5})
    held = asyncio.run(ours.sample_eval(EvalRequest(prompts=PROMPTS, params=ours.params(temperature=1.0))))
    assert all(len(one.turns) == 1 for each in held if each.group for one in each.group.trajectories)


def test_a_demonstration_is_shown_whole_beside_completions_that_are_interrupted(make_engine: MakeEngine) -> None:
    def shown(prompt: Prompt) -> Completion:
        return completion([*range(20, 31), 7], [0.0] * 12, spans=())

    ours = interrupting(make_engine(8), {"earliest": 5})
    plain, beside = groups(ours), groups(replace(ours, demonstrate=shown))
    assert any(len(one.turns) == 2 for group in plain for one in group.trajectories)
    for alone, group in zip(plain, beside, strict=True):
        assert [one.turns[-1].text for one in group.trajectories] == [one.turns[-1].text for one in alone.trajectories]
        ((row,),) = (one.chains for one in group.demonstration.trajectories)
        assert [(turn.start, turn.stop) for turn in row.turns] == [(2, 14)]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["rollout.interrupt.latest=9"], "^rollout.interrupt.latest=9 does nothing: with rollout.interrupt.earliest=0"),
        (["algorithm=scalerl", "rollout.interrupt.earliest=0"], "^rollout.interrupt.latest=.* does nothing: with roll"),
        (["rollout.interrupt.earliest=6"], "after 6 to 6 sampled tokens; make the first at most the second"),
        (["rollout.interrupt.earliest=4", "rollout.interrupt.latest=0.5"], "after 4 to 3 sampled tokens"),
        (["rollout.interrupt.earliest=0.5", "algorithm=dpo"], "with algorithm.preference.beta=0.1: only single compl"),
    ],
)
def test_what_cannot_be_is_refused(keys: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config("tiny_cpu", keys)
