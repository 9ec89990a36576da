"""Draws by pass rates, and values of prompts: against references of ten lines, and what resumes."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from rl_megatron.columns import ColumnReader, ColumnWriter
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.config.sections.data import CurriculumSection
from rl_megatron.data.problems import pool
from rl_megatron.data.problems.pool import ListPool, NextDraw, PromptStream, PromptTable
from rl_megatron.data.samples import to_samples
from rl_megatron.errors import CheckpointError, ConfigError, DataError
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.rollout.stream import GroupResult
from rl_megatron.training.checkpoints import TrainerState
from rl_megatron.training.credit import AlgorithmState, assign_credit, shape_rewards
from rl_megatron.types import Prompt, RolloutGroup
from tests.completions import trajectory
from tests.unit.training.test_bad_steps import EQUAL, TEACHES, WANTED, Steps, job

STATE = TypeAdapter(TrainerState)


def prompts(count: int, source: str = "", **meta: Any) -> list[Prompt]:
    return [
        Prompt(id=f"{source}{i}", text="", token_ids=(i,), answer="", source=source, meta=meta) for i in range(count)
    ]


def stream(count: int = 12, **keys: Any) -> PromptStream:
    return PromptStream(prompts(count), seed=3, curriculum=CurriculumSection(**keys))


def update(one: PromptStream, seen: Sequence[tuple[str, float]], step: int = 1) -> None:
    assert one.table is not None
    one.table.update(seen, step, one.left_out)


def test_rates_and_what_retires_are_those_of_a_reference_of_ten_lines() -> None:
    draw, ours = random.Random(0), stream(40, retire_above=0.75, min_seen=3)
    steps = [[(str(draw.randrange(40)), draw.randrange(5) / 4) for _ in range(16)] for _ in range(12)]
    seen: dict[str, list[float]] = {}
    rates: dict[str, float] = {}
    retired: dict[str, int] = {}
    for number, step in enumerate(steps, 1):
        update(ours, step, number)
        for name, share in step:
            rates[name] = 0.5 * rates.get(name, share) + 0.5 * share
            seen.setdefault(name, []).append(share)
            if len(seen[name]) >= 3 and rates[name] >= 0.75:
                retired[name] = number
    table = ours.table
    assert table is not None
    assert table.visits.tolist() == [len(seen.get(str(i), ())) for i in range(40)]
    np.testing.assert_allclose(table.rates, [rates.get(str(i), np.nan) for i in range(40)], rtol=1e-15)
    assert table.retired.tolist() == [retired.get(str(i), -1) for i in range(40)]
    assert 3 < len(retired) < 40
    assert {prompt.id for prompt in ours.next_prompts(200)} == {str(i) for i in range(40)} - retired.keys()
    assert table.row()["curriculum/retired"] == len(retired)
    assert table.row()["curriculum/mean_pass_rate"] == pytest.approx(np.mean(list(rates.values())))


def test_a_retired_prompt_is_drawn_no_more() -> None:
    table = stream(3, retire_above=0.9).table
    assert table is not None
    assert table.row() == {"curriculum/retired": 0}
    table.update([("1", 1.0)], 1, set())
    assert [table.draws(row, epoch=0) for row in (0, 1, 2, 1)] == [True, False, True, False]
    assert table.row() == {"curriculum/retired": 1, "curriculum/mean_pass_rate": 1.0}


def test_first_retired_return_first(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(pool, "_MIN_LEFT", 0.3)
    ours = stream(10, retire_above=0.9)
    for step, names in enumerate(("48", "1", "0235"), 1):
        update(ours, [(name, 1.0) for name in names], step)
    assert {prompt.id for prompt in ours.next_prompts(30)} == {"6", "7", "9"}
    with caplog.at_level(logging.WARNING):
        ours.exclude(prompts(10)[6])
    assert "2 of 10 prompts are left: 1 that had retired are drawn again" in caplog.text
    assert {prompt.id for prompt in ours.next_prompts(30)} == {"4", "7", "9"}
    update(ours, [("7", 1.0), ("9", 1.0)], 4)
    assert {prompt.id for prompt in ours.next_prompts(30)} == {"4", "8", "1"}


def test_a_policy_that_solves_all_but_few_is_not_warned_of_at_each_step(caplog: pytest.LogCaptureFixture) -> None:
    """Each step solves four prompts that had retired, and as many return in their place."""
    ours, sizes = stream(100, retire_above=0.9), []
    with caplog.at_level(logging.WARNING):
        for step in range(1, 400):
            update(ours, [(prompt.id, 1.0) for prompt in ours.next_prompts(4)], step)
            sizes.append(len(caplog.records))
    assert sizes[-1] < 12  # of some 1,500 that returned, log2
    assert sizes[-1] > sizes[100]
    assert re.search(r"that had retired are drawn again, 10\d\d so far", caplog.text)


class SomeTooLong(ListPool):
    """As rows of parquet with ``on_long_prompt=drop``: every row that ``step`` divides is too long."""

    def __init__(self, count: int, step: int) -> None:
        super().__init__(prompts(count))
        self.step, self.found = step, 0

    def prompt_of_draw(self, row: int, upcoming: NextDraw) -> Prompt | None:
        if row % self.step:
            return super().prompt_of_draw(row, upcoming)
        self.found += 1
        return None


@pytest.mark.parametrize("cut", [1, 9, 40])
def test_prompts_that_are_too_long_are_none_of_those_that_are_left(cut: int) -> None:
    """All short ones retire at once, and come back as if the long ones were not there; a resume goes on so."""

    def begun() -> tuple[SomeTooLong, PromptStream]:
        pool = SomeTooLong(50, 5)
        return pool, PromptStream(pool, seed=0, curriculum=CurriculumSection(retire_above=0.9))

    def played(one: PromptStream, steps: Sequence[int]) -> list[str]:
        drawn = []
        for step in steps:
            drawn += [prompt.id for prompt in one.next_prompts(4)]
            update(one, [(name, 1.0) for name in drawn[-4:]], step)
        return drawn

    pool, whole = begun()
    order = played(whole, range(1, 101))
    assert pool.found == 10
    assert whole.left_out == set(range(0, 50, 5))
    assert set(order) == {str(row) for row in range(50) if row % 5}
    _, first = begun()
    _, second = begun()
    played(first, range(1, cut))
    assert first.table is not None
    assert second.table is not None
    second.restore(first.state(), sorted(first.left_out))
    second.table.restore(first.table.state())
    assert played(second, range(cut, 101)) == order[4 * (cut - 1) :]


@pytest.mark.parametrize("curriculum", [None, CurriculumSection(retire_above=0.9)], ids=["no table", "table"])
def test_where_every_prompt_is_too_long_the_run_ends(curriculum: CurriculumSection | None) -> None:
    with pytest.raises(DataError, match="every prompt has too many tokens"):
        PromptStream(SomeTooLong(7, 1), seed=0, curriculum=curriculum).next_prompts(1)


def test_a_resume_draws_the_same(tmp_path: Path) -> None:
    def played(one: PromptStream, steps: Sequence[int]) -> list[str]:
        drawn = []
        for step in steps:
            names = [prompt.id for prompt in one.next_prompts(5)]
            update(one, [(name, (int(name) * step) % 5 / 4) for name in names], step)
            drawn += names
        return drawn

    keys = {"retire_above": 0.75, "explore": 0.3, "min_seen": 2}
    whole, first, second = (stream(**keys) for _ in range(3))
    order = played(whole, range(1, 21))
    assert played(first, range(1, 9)) == order[:40]
    columns = ColumnWriter()
    assert first.table is not None
    assert second.table is not None
    assert whole.table is not None
    text = STATE.dump_json(
        TrainerState(step=8, prompts=first.state(), stream=None, table=first.table.state()), context=columns
    )
    played(first, [9])  # what was saved does not change
    names = columns.write(tmp_path)
    state = STATE.validate_json(text, context=ColumnReader(tmp_path, names))
    second.restore(state.prompts)
    second.table.restore(state.table)
    assert played(second, range(9, 21)) == order[40:]
    assert second.table.row() == whole.table.row()
    with pytest.raises(CheckpointError, match=r"pass rates of 12 prompts, but data\.curriculum needs 3"):
        PromptStream(prompts(3), seed=0, curriculum=CurriculumSection(**keys)).table.restore(state.table)  # type: ignore[union-attr]


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_step_adds_what_it_trained_on_and_what_it_dropped_for_equal_rewards(tmp_path: Path, staleness: int) -> None:
    """Rewards of a group are 1, 0, 0, ... or all 1; a failed reward says nothing of the prompt."""
    assert len(set(TEACHES.rewards)) > 1
    teaches = GroupResult(group=TEACHES, rewards=TEACHES.rewards)
    equal = GroupResult(group=EQUAL, rewards=(1.0, 1.0))
    answers = [teaches, equal, GroupResult(group=None, reason="reward_error"), teaches, *[teaches] * 40]
    keys = {"train": {"minibatches": 1, "max_staleness": staleness, "steps": 2}}
    ours = job(tmp_path, answers, Steps(), rollout={"dynamic_sampling": "drop"}, **keys)  # type: ignore[arg-type]
    held = [Prompt(id=str(i), text="", token_ids=(1,), answer="") for i in range(30)]
    drawn = PromptStream(held, seed=0)
    names = [prompt.id for prompt in drawn.next_prompts(WANTED)]
    ours.prompts = PromptStream(held, seed=0, curriculum=CurriculumSection(retire_above=0.9))
    ours.stream._prompts = ours.prompts
    row, table = asyncio.run(step(ours)), ours.prompts.table
    assert table is not None
    right = float(np.mean(np.array(TEACHES.rewards) >= 1.0))
    wanted = {names[0]: right, names[1]: 1.0, names[3]: right}
    assert {str(i): rate for i, rate in enumerate(table.rates) if not np.isnan(rate)} == wanted
    assert row["curriculum/retired"] == 1
    assert table.retired[int(names[1])] == 1
    assert ours.state().table is not None


async def step(ours: Any) -> dict[str, Any]:
    row: dict[str, Any] = await ours.step(1, Stopwatch())
    await ours.close()
    return row


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["min_seen=3"], "data.curriculum.min_seen=3 does nothing: with data.curriculum.retire_above=null and "),
        (["retire_above=0"], "data.curriculum.retire_above=0: must be greater than 0"),
    ],
)
def test_what_a_curriculum_refuses(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config("tiny_cpu", [f"data.curriculum.{one}" for one in overrides])
    assert said in str(error.value)


# Values of prompts, SPO's baseline: the posterior of a Beta distribution, its draws, and its checkpoints.
def tracked(count: int, decay: float | None = 0.875, **curriculum: float) -> tuple[PromptStream, PromptTable]:
    prompts = [Prompt(id=str(i), text="", token_ids=(i,), answer="") for i in range(count)]
    stream = PromptStream(prompts, seed=3, curriculum=CurriculumSection.model_validate(curriculum), track_decay=decay)
    assert stream.table is not None
    return stream, stream.table


def test_values_are_means_of_the_papers_posterior() -> None:
    _, table = tracked(5)
    draw = random.Random(0)
    alphas, betas = [0.5] * 5, [0.5] * 5
    for _ in range(60):
        row, rewards = draw.randrange(4), [float(draw.random() < 0.3) for _ in range(draw.choice((1, 1, 3)))]
        table.track([(str(row), rewards)])
        alphas[row] = 0.875 * alphas[row] + sum(rewards)
        betas[row] = 0.875 * betas[row] + sum(1 - r for r in rewards)
    wanted = [a / (a + b) for a, b in zip(alphas, betas, strict=True)]
    np.testing.assert_allclose([table.prompt_value(str(i)) for i in range(5)], wanted, rtol=1e-12)
    assert table.prompt_value("4") == 0.5


def test_an_epoch_draws_prompts_by_the_spread_of_their_outcome() -> None:
    count, rates = 4000, (0.0, 0.5, 0.9, 1.0)
    _, table = tracked(count, decay=None, explore=0.05)
    table.rates[:] = np.tile(rates, count // 4)
    table.visits[:] = 1
    drawn = np.array([[table.draws(row, epoch) for row in range(count)] for epoch in range(3)])
    for at, rate in enumerate(rates):
        assert abs(drawn[:, at::4].mean() - (((rate * (1 - rate)) ** 0.5 + 0.05) / 0.55)) < 0.02
    assert (drawn[0] != drawn[1]).any()
    table.rates[:], table.visits[:] = np.nan, 0
    assert all(table.draws(row, 0) for row in range(100))


def test_a_checkpoint_has_the_values(tmp_path: Path) -> None:
    stream, table = tracked(6)
    table.track([("2", (1.0,)), ("4", (0.0, 0.0))])
    columns = ColumnWriter()
    state = TrainerState(step=1, prompts=stream.state(), stream=None, table=table.state())
    text = STATE.dump_json(state, context=columns)
    read = STATE.validate_json(text, context=ColumnReader(tmp_path, columns.write(tmp_path)))
    _, fresh = tracked(6)
    fresh.restore(read.table)
    assert [fresh.prompt_value(str(i)) for i in range(6)] == [table.prompt_value(str(i)) for i in range(6)]
    for one in (table, fresh):
        one.track([("2", (0.0,))])
    assert fresh.prompt_value("2") == table.prompt_value("2")


@pytest.mark.parametrize("size", [1, 2])
def test_advantages_are_less_the_value_and_standardised_over_the_batch(size: int) -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0][: 3 * size]
    groups = [
        RolloutGroup(
            prompt=Prompt(id=str(i), text="", token_ids=(1, 2), answer=""),
            trajectories=tuple(trajectory([3], total=rewards[i * size + k], seed=k) for k in range(size)),
        )
        for i in range(3)
    ]
    section = AlgorithmSection(advantage_mean="tracked", advantage_std="batch", baseline_decay=0.875)
    values = torch.tensor([0.25, 0.5, 0.875])
    shaped = shape_rewards(groups, section, AlgorithmState(), max_new_tokens=8)
    samples, _ = assign_credit(to_samples(groups), groups, replace(shaped, tracked=values), section, success_reward=1.0)
    above = np.array(rewards) - values.numpy().repeat(size)
    wanted = (above - above.mean()) / (above.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(samples.advantages[samples.cu_seqlens[1:] - 1], wanted, rtol=1e-5)
