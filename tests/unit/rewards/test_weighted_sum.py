"""Weighted sums of rewards: their values, their faults, and their way into a step's metrics."""

from __future__ import annotations

import asyncio
import math
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rl_megatron.config.sections.reward import RewardSection
from rl_megatron.config.sections.rollout import RolloutSection
from rl_megatron.errors import ConfigError, RewardError
from rl_megatron.rewards.registry import resolve_reward, resolve_rewards
from rl_megatron.rollout.batch import Answered, RolloutBatch
from rl_megatron.rollout.sampler import RolloutSampler
from rl_megatron.types import Completion, GenerationRequest, Prompt, Scored
from tests.completions import completion, drawn

DONE = completion((1, 2))
PROMPTS = [Prompt(id=f"p{i}", text="", token_ids=(i,), answer=str(i)) for i in range(3)]


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("parts_for_test")

    async def never(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[float]:
        await asyncio.Event().wait()
        return []

    module.never = never
    module.order = lambda prompt, completions, texts: [float(i) for i, _ in enumerate(texts)]
    module.short = lambda prompt, completions, texts: [1.0]
    module.broken = lambda prompt, completions, texts: 1 / 0
    module.gaps = lambda prompt, completions, texts: [math.inf if prompt.id == "p1" and i == 0 else 2.0 for i in (0, 1)]
    monkeypatch.setitem(__import__("sys").modules, "parts_for_test", module)
    return module


def parts(**given: tuple[str, float]) -> RewardSection:
    return RewardSection(parts={name: {"function": f, "weight": w} for name, (f, w) in given.items()})


def score(section: RewardSection, *texts: str) -> Sequence[Scored]:
    return asyncio.run(resolve_reward(section)(PROMPTS[1], [DONE] * len(texts), texts))


def test_the_sum_is_weighted_and_each_part_is_kept_unweighted(mine: types.ModuleType) -> None:
    section = parts(right=("exact_match", 2.0), late=("parts_for_test:order", -0.5), seen=("exact_match", 0.0))
    assert score(section, "1", "x", "1") == [
        Scored(total=2.0, parts={"right": 1, "late": 0, "seen": 1}),
        Scored(total=-0.5, parts={"right": 0, "late": 1, "seen": 0}),
        Scored(total=1.0, parts={"right": 1, "late": 2, "seen": 1}),
    ]


@pytest.mark.parametrize(
    ("function", "message"),
    [("broken", "part 'bad' raised ZeroDivisionError"), ("short", "part 'bad' returned 1 rewards for 2 completions")],
)
def test_a_part_that_fails_is_named_and_the_others_are_not_waited_for(
    mine: types.ModuleType, function: str, message: str
) -> None:
    section = parts(stuck=("parts_for_test:never", 1.0), bad=(f"parts_for_test:{function}", 1.0))
    with pytest.raises(RewardError, match=message):
        score(section, "1", "2")


def test_a_part_counts_only_where_those_it_names_are_enough(mine: types.ModuleType) -> None:
    """By what their functions gave: also where these count for nothing themselves."""
    gated = {"function": "parts_for_test:order", "when": {"right": 1.0}}
    chained = {"function": "exact_match", "when": {"right": 0.5, "late": 1.5}}
    weighed = {"right": {"function": "exact_match", "weight": 2.0}, "late": gated, "chained": chained}
    found = score(RewardSection.model_validate({"parts": weighed}), "1", "x", "1", "1")
    assert [one.parts for one in found] == [
        {"right": 1, "late": 0, "chained": 0},
        {"right": 0, "late": 0, "chained": 0},
        {"right": 1, "late": 2, "chained": 1},
        {"right": 1, "late": 3, "chained": 1},
    ]
    assert [one.total for one in found] == [2.0, 0.0, 5.0, 6.0]
    gaps = {"function": "parts_for_test:gaps", "when": {"right": 1.0}}
    unfinished, wrong = score(
        RewardSection.model_validate({"parts": {"right": {"function": "exact_match"}, "gaps": gaps}}), "x", "x"
    )
    assert math.isnan(unfinished.total)  # infinite, and 0 for no bound
    assert wrong.total == 0.0


@pytest.mark.parametrize("other", ["late", "length"])
def test_a_bound_on_no_other_part_is_refused(other: str) -> None:
    with pytest.raises(
        ValueError, match=rf"parts\.late\.when\.{other}: '{other}' is not another part; the others are right"
    ):
        RewardSection.model_validate({"parts": {"right": 1.0, "late": {"when": {other: 1.0}}}})


def test_infinities_do_not_cancel_to_a_number(mine: types.ModuleType) -> None:
    for first, second in ((math.inf, -math.inf), (math.nan, 1.0), (1.7e308, 1.7e308)):
        mine.first, mine.second = (lambda *_, x=first: [x]), (lambda *_, x=second: [x])
        (one,) = score(parts(a=("parts_for_test:first", 1.0), b=("parts_for_test:second", 1.0)), "")
        assert not math.isfinite(one.total)


def test_an_unknown_part_is_named_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"reward\.parts\.exact\.function='exact' is unknown; did you mean"):
        resolve_reward(RewardSection(parts={"exact": 1.0}))
    with pytest.raises(ConfigError, match=r"reward\.parts\.mine\.function='nowhere_at_all:f': no module"):
        resolve_reward(parts(mine=("nowhere_at_all:f", 1.0)))


class Engine:
    """Answers each request with its prompt's number, then with x."""

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        return [completion((token,)) for token in (request.token_ids[0], 99)[: request.num_completions]]


def sampler(section: RewardSection, decode: Callable[[Sequence[int]], str] = lambda t: str(t[0])) -> RolloutSampler:
    return RolloutSampler(
        engine=Engine(),
        reward_function=resolve_reward(section),
        decode=decode,
        rollout=RolloutSection(group_size=2),
        reward=section,
        stop_token_ids=(),
        seed=0,
    )


def test_part_means_are_over_the_scored_completions(mine: types.ModuleType) -> None:
    section = parts(right=("exact_match", 2.0), order=("parts_for_test:order", 1.0))
    batch = RolloutBatch.of(asyncio.run(sampler(section).groups(drawn(PROMPTS))))
    assert [group.rewards for group in batch.groups] == [(2.0, 1.0)] * 3
    assert batch.part_means() == {"reward/part/right": 0.5, "reward/part/order": 0.5}
    assert batch.reward_sum / batch.num_completions == 2 * 0.5 + 0.5


@pytest.mark.parametrize(("on_error", "count", "right"), [(-1.0, 5, 2.0), ("drop", 4, 2.0)])
def test_completions_without_a_finite_part_count_for_no_part(
    mine: types.ModuleType, on_error: str | float, count: int, right: float
) -> None:
    section = parts(right=("exact_match", 1.0), gaps=("parts_for_test:gaps", 1.0))
    with pytest.raises(
        RewardError, match=r"'exact_match, parts_for_test:gaps' of prompt 'p1'.*0 got nan.*\(gaps: inf\)"
    ):
        asyncio.run(sampler(section).groups(drawn(PROMPTS)))
    ours = sampler(section.model_copy(update={"on_error": on_error}))
    batch = RolloutBatch.of(asyncio.run(ours.groups(drawn(PROMPTS))))
    assert batch.reward_errors == 1
    assert set(batch.part_counts.values()) == {count}
    assert batch.part_means() == {"reward/part/right": right / count, "reward/part/gaps": 2.0}


def test_a_batch_counts_what_was_scored_of_groups_that_are_left_out() -> None:
    group = cast(Any, SimpleNamespace(trajectories=[SimpleNamespace(num_sampled=n) for n in (3, 4)], greedy=None))
    kept = Answered(group=group, rewards=(0.1, 0.2), scored=(Scored(total=0.1, parts={"a": -1.0}),) * 2)
    equal = replace(kept, group=None, reason="equal_rewards", left_out_tokens=5)
    failed = Answered(group=None, reason="reward_error", scored=(Scored(total=math.nan, error="why"),) * 2)
    batch = RolloutBatch.of([kept, equal, failed, kept])
    assert (batch.groups, batch.filtered_groups, batch.dropped_groups) == ((group, group), 1, 1)
    assert (batch.num_completions, batch.reward_sum, batch.reward_errors) == (6, 0.9, 2)
    assert batch.num_tokens == 2 * (3 + 4) + 5
    assert batch.part_means() == {"reward/part/a": -1.0}
    assert RolloutBatch().part_means() == {}


def test_a_sampled_completion_has_the_parts_of_its_sources_reward_and_none_where_that_failed(
    mine: types.ModuleType,
) -> None:
    run = parts(right=("exact_match", 2.0), gaps=("parts_for_test:gaps", -0.5))
    run, own = run.model_copy(update={"on_error": 0.0}), parts(order=("parts_for_test:order", 1.0))
    rewards = resolve_rewards(run, {"other": own})
    ours = replace(sampler(run), reward_function=rewards, own_rewards={"other": own})
    groups = RolloutBatch.of(
        asyncio.run(ours.groups(drawn([*PROMPTS[:2], replace(PROMPTS[2], source="other")])))
    ).groups
    assert [[one.parts for one in group.trajectories] for group in groups] == [
        [{"right": (1.0, 2.0), "gaps": (2.0, -0.5)}, {"right": (0.0, 2.0), "gaps": (2.0, -0.5)}],
        [{}, {"right": (0.0, 2.0), "gaps": (2.0, -0.5)}],
        [{"order": (0.0, 1.0)}, {"order": (1.0, 1.0)}],
    ]


def test_a_reward_without_parts_has_none() -> None:
    section = RewardSection()
    batch = RolloutBatch.of(asyncio.run(sampler(section).groups(drawn(PROMPTS))))
    assert (batch.part_sums, batch.part_counts) == ({}, {})


def test_a_part_may_come_from_a_module_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_part_for_test.py").write_text(
        "def half(prompt, completions, texts):\n    return [0.5] * len(texts)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [one.total for one in score(parts(half=("own_part_for_test:half", 4.0)), "a", "b")] == [2.0, 2.0]
