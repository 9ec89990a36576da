"""Values of prompts, SPO's baseline: the posterior of a Beta distribution, its draws, and its checkpoints."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from rl_megatron.columns import ColumnReader, ColumnWriter
from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.config.sections.data import CurriculumSection
from rl_megatron.data.problems.prompt_stream import PromptStream
from rl_megatron.data.problems.prompt_table import PromptTable
from rl_megatron.data.samples import to_samples
from rl_megatron.training.checkpoints import TrainerState
from rl_megatron.training.credit.assign import assign_credit
from rl_megatron.training.credit.shaping import shape_rewards
from rl_megatron.training.credit.state import AlgorithmState
from rl_megatron.types import Prompt, RolloutGroup
from tests.turns import trajectory

STATE = TypeAdapter(TrainerState)


def tracked(count: int, decay: float | None = 0.875, **curriculum: float) -> tuple[PromptStream, PromptTable]:
    prompts = [Prompt(id=str(i), text="", token_ids=(i,), answer="") for i in range(count)]
    section = CurriculumSection.model_validate(curriculum)
    stream = PromptStream(prompts, seed=3, curriculum=section, track_decay=decay)
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
    np.testing.assert_allclose([table.value_of(str(i)) for i in range(5)], wanted, rtol=1e-12)
    assert table.value_of("4") == 0.5


def test_an_epoch_draws_prompts_by_the_spread_of_their_outcome() -> None:
    count, rates = 4000, (0.0, 0.5, 0.9, 1.0)
    _, table = tracked(count, decay=None, explore=0.05)
    table.rates[:] = np.tile(rates, count // 4)
    table.visits[:] = 1
    drawn = np.array([[table.draws(row, epoch) for row in range(count)] for epoch in range(3)])
    for at, rate in enumerate(rates):
        wanted = ((rate * (1 - rate)) ** 0.5 + 0.05) / 0.55
        assert abs(drawn[:, at::4].mean() - wanted) < 0.02
    assert (drawn[0] != drawn[1]).any()
    table.rates[:], table.visits[:] = np.nan, 0
    assert all(table.draws(row, 0) for row in range(100))


def test_a_checkpoint_has_the_values(tmp_path: Path) -> None:
    stream, table = tracked(6)
    table.track([("2", (1.0,)), ("4", (0.0, 0.0))])
    columns = ColumnWriter()
    state = TrainerState(step=1, prompts=stream.state(), stream=None, table=table.state())
    text = STATE.dump_json(state, context=columns)
    names = columns.write(tmp_path)
    read = STATE.validate_json(text, context=ColumnReader(tmp_path, names))
    _, fresh = tracked(6)
    fresh.restore(read.table)
    assert [fresh.value_of(str(i)) for i in range(6)] == [table.value_of(str(i)) for i in range(6)]
    for one in (table, fresh):
        one.track([("2", (0.0,))])
    assert fresh.value_of("2") == table.value_of("2")


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
    firsts = samples.cu_seqlens[1:] - 1
    np.testing.assert_allclose(samples.advantages[firsts], wanted, rtol=1e-5)


@pytest.mark.parametrize("key", ["normalise_rewards=group", "normalise_rewards=batch", "reward_scale=0.5"])
def test_rewards_of_another_range_than_the_values_are_refused(key: str) -> None:
    name, _, value = key.partition("=")
    said = rf"advantage_mean=tracked with algorithm\.{key}: .* leave it out, or set another advantage_mean"
    with pytest.raises(ValueError, match=said):
        AlgorithmSection.model_validate({"advantage_mean": "tracked", name: value})
    AlgorithmSection.model_validate({"advantage_mean": "tracked", "unfinished_reward": 0.0})
    AlgorithmSection.model_validate({"advantage_mean": "batch", name: value})
