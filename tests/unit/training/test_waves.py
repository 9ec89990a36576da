"""An update in waves beside the update of the whole batch, and beside plain loops: tables, rows, skipped steps."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rl_megatron.config.run import RunConfig
from rl_megatron.interfaces import Roles
from rl_megatron.observability.recorder import Row, Stopwatch
from rl_megatron.training import update as update_module
from rl_megatron.training import waves as waves_module
from rl_megatron.training.update import Update, positions_of
from rl_megatron.training.waves import WaveUpdate
from rl_megatron.types import Batch, Culprit, RolloutGroup, SkippedStep
from tests.completions import finished as ended
from tests.rows import NAMES, config_of
from tests.toy_roles import VOCABULARY, Toy, table
from tests.unit.training.plain_update import PlainUpdate
from tests.unit.training.test_update_oracle import ALIKE, PATHS, STEPS, groups, with_demonstrations

OF_THE_CUT = {"packing/imbalance", "packing/padding_fraction"}
ENGINE = table(VOCABULARY, VOCABULARY, seed=1) + 0.5 * table(VOCABULARY, VOCABULARY, seed=4)


def config(algorithm: dict[str, Any], wave: int = 1, **train: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "algorithm": algorithm,
            "train": {"minibatches": 1, "learning_rate": 2.0, "stream_micro_batches": wave, **train},
            "rollout": {
                "engine": "vllm",
                "prompts_per_step": 4,
                "group_size": 4,
                "max_prompt_tokens": 2,
                "max_new_tokens": 6,
            },
            "learner": {"max_tokens_per_micro_batch": 16},
        }
    )


def shipped() -> dict[str, dict[str, Any]]:
    """The rows of conf/algorithm/ that can be trained in waves, and choices beside them."""
    rows = {name: config_of(name).algorithm.model_dump() for name in NAMES}
    out = {}
    for name, row in rows.items():
        try:
            config(row)
        except ValueError:
            continue
        out[name] = row
    names = (
        "decoupled ppo, interpolated",
        "KL in the loss beside a correction, adaptive",
        "an entropy bonus, up and down",
    )
    out |= {name: PATHS[name] for name in names}
    out["cut ones are left out"] = {"drop_truncated": True, "aggregation": "seq_mean_token_mean"}
    out["KL in rewards"] = {"kl": {"coefficient": 0.3, "placement": "completion_reward"}, "advantage_std": "none"}
    return out


def with_greedy(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """The groups with another reward as their baseline."""
    return [replace(group, greedy=replace(group, trajectories=group.trajectories[2:3])) for group in groups]


def made(c: RunConfig, kind: type[Update], policy: Toy) -> Any:
    unused = Toy(torch.zeros(1))
    reference = {"reference": Toy(table(VOCABULARY, VOCABULARY, seed=3))} if c.algorithm.needs_reference else {}
    roles: Any = Roles(learners={"policy": policy}, frozen=reference, engine=unused, weights=unused)
    return kind(config=c, roles=roles, attention_cost=0.0, training_flops=lambda lengths: 5.0 * sum(lengths))


async def one_by_one(sampled: Sequence[RolloutGroup]) -> AsyncIterator[RolloutGroup]:
    for group in sampled:
        await asyncio.sleep(0)
        yield group


def in_waves(update: WaveUpdate, sampled: Sequence[RolloutGroup], step: int) -> Row:
    return asyncio.run(update.over(one_by_one(sampled), step, Stopwatch()))


def policy() -> Toy:
    return Toy(table(VOCABULARY, VOCABULARY, seed=1))


SHIPPED = shipped()


@pytest.mark.parametrize("name", SHIPPED)
def test_tables_and_rows_are_those_of_the_whole_batch(name: str) -> None:
    """Groups arrive in the other order; the last step has fewer than planned."""
    one, other = policy(), policy()
    flips = {"route_flips": True, "max_staleness": 2} if name == "grpo" else {}
    rounding = 5e-5 if name == "KL in rewards" else 1e-6  # its loss is 34; by 2e-5 on one processor
    whole, waves = (made(config(SHIPPED[name], **flips), *each) for each in ((Update, one), (WaveUpdate, other)))
    for step in STEPS:
        beside = with_demonstrations if name == "luffy" else with_greedy
        sampled = beside(groups(step, ENGINE))[: 3 if step == STEPS[-1] else 4]
        wanted, found = asyncio.run(whole(sampled, step, Stopwatch())), in_waves(waves, sampled[::-1], step)
        assert found.pop("waves/count") > 1
        assert 0 < found.pop("waves/early_fraction") < 1
        assert set(found) == set(wanted)
        assert ("demonstration/share" in wanted) == (name == "luffy")
        assert any(key.startswith("mismatch/ratio/v") for key in wanted) == (name == "grpo")
        for key in wanted.keys() - OF_THE_CUT:
            assert found[key] == pytest.approx(wanted[key], rel=rounding, abs=rounding, nan_ok=True), key
        torch.testing.assert_close(other.weights, one.weights, rtol=rounding, atol=rounding)
    assert waves.state.kl_coefficient == pytest.approx(whole.state.kl_coefficient)
    assert waves.state.entropy_coefficient == whole.state.entropy_coefficient
    assert not torch.equal(one.weights, table(VOCABULARY, VOCABULARY, seed=1))


PLAIN = {
    "grpo": PATHS["grpo"],
    "interpolated": PATHS["decoupled ppo, interpolated"],
    "KL": PATHS["KL in the loss beside a correction, adaptive"],
    "entropy": PATHS["an entropy bonus, up and down"],
    "cut ones are left out": ALIKE | {"drop_truncated": True},
}


@pytest.mark.parametrize("row", PLAIN.values(), ids=PLAIN)
def test_tables_after_three_steps_are_those_of_plain_loops(row: dict[str, Any]) -> None:
    c, one = config(row), policy()
    tables = [table(VOCABULARY, VOCABULARY, seed=1), table(VOCABULARY, VOCABULARY, seed=3), table(VOCABULARY, seed=2)]
    waves, plain = made(c, WaveUpdate, one), PlainUpdate(c, *tables)
    for step in STEPS:
        sampled = groups(step, ENGINE)
        in_waves(waves, sampled, step)
        plain.step(sampled, step)
        torch.testing.assert_close(one.weights.double(), plain.policy, rtol=1e-4, atol=1e-5)


def test_a_wave_begins_before_the_batch_is_there() -> None:
    one = policy()
    update = made(config({}, wave=2), WaveUpdate, one)

    async def finished() -> AsyncIterator[RolloutGroup]:
        for number, group in enumerate(sampled):
            assert sum(said[0] == "backward" for said in heard()) == [0, 0, 1, 1][number]
            yield group

    def heard() -> list[Any]:
        return list(one.heard)

    sampled = groups(3, ENGINE)
    asyncio.run(update.over(finished(), 3, Stopwatch()))
    assert [said[0] for said in heard()] == ["score", "backward"] * 2 + ["step"]


def test_no_token_is_trained_without_one_and_waves_without_one_only_count_sequences() -> None:
    one, other = policy(), policy()
    cut = {"drop_truncated": True, "aggregation": "seq_mean_token_mean"}
    whole, waves = (made(config(cut), *each) for each in ((Update, one), (WaveUpdate, other)))
    sampled = groups(3, ENGINE)
    sampled[0] = ended(sampled[0], ["length"] * 4)
    sampled[1:] = [ended(group, ["stop"] * 4) for group in sampled[1:]]
    asyncio.run(whole(sampled, 3, Stopwatch()))
    assert in_waves(waves, sampled, 3)["waves/count"] == 3
    torch.testing.assert_close(other.weights, one.weights, rtol=1e-6, atol=1e-6)
    before = other.weights.clone()
    nothing = [ended(group, ["length"] * 4) for group in sampled]
    row = in_waves(waves, nothing, 4)
    assert row["tokens/train"] == 0
    assert not {"waves/count", "learning_rate"} & set(row)
    assert in_waves(waves, [], 5) == {"tokens/train": 0}
    assert torch.equal(other.weights, before)


def test_tokens_and_operations_count_once() -> None:
    sampled = groups(3, ENGINE)
    row = in_waves(made(config({}), WaveUpdate, policy()), sampled, 3)
    positions = sum(len(c.token_ids) - 1 for group in sampled for t in group.trajectories for c in t.chains)
    assert (row["tokens/train"], row["flops/train"]) == (positions, 5.0 * positions)


def test_a_group_that_arrives_does_not_walk_the_waves_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 4 waves is walked once for the share of the first three, and once for operations."""
    walked: list[Batch] = []
    for module in (update_module, waves_module):
        monkeypatch.setattr(module, "positions_of", lambda batch: (walked.append(batch), positions_of(batch))[1])
    sampled = groups(3, ENGINE)
    row = in_waves(made(config({}), WaveUpdate, policy()), sampled, 3)
    of_groups = [sum(len(c.token_ids) - 1 for t in group.trajectories for c in t.chains) for group in sampled]
    assert row["waves/count"] == 4
    assert row["waves/early_fraction"] == sum(of_groups[:-1]) / sum(of_groups)
    assert len(walked) == 2 * 4


@pytest.mark.parametrize("kind", [Update, WaveUpdate])
def test_what_visits_every_token_runs_beside_the_event_loop(kind: type[Update]) -> None:
    c = config(SHIPPED["KL in the loss beside a correction, adaptive"] | {"old_logprobs": "learner"})
    update, in_loops_thread = made(c, kind, policy()), set[str]()
    sampled = groups(3, ENGINE)
    sys.setprofile(lambda frame, event, _: in_loops_thread.add(frame.f_code.co_name) if event == "call" else None)
    try:
        if isinstance(update, WaveUpdate):
            row = in_waves(update, sampled, 3)
        else:
            row = asyncio.run(update(sampled, 3, Stopwatch()))
    finally:
        sys.setprofile(None)
    assert {"mismatch/k1", "advantage/std", "kl/reference"} <= row.keys()
    whole = {"to_samples", "assign_credit", "_cat_samples", "mismatch_row", "advantage_row", "metrics", "tokens_of"}
    assert not in_loops_thread & (whole | {"unpack", "plan_packing", "reference_kl"})
    assert "shape_rewards" in in_loops_thread  # of completions, not of tokens


def test_a_skipped_step_names_prompts_of_every_wave(caplog: pytest.LogCaptureFixture) -> None:
    class Skips(Toy):
        async def step(self, learning_rate: float, scale: float = 1.0) -> Any:
            sizes = [len(said[1][0][0]) for said in self.heard if said[0] == "backward"]  # type: ignore[index]
            assert len(sizes) == 4
            last = sum(sizes) - 1, sum(sizes[:1])
            return SkippedStep(
                grad_norm=math.nan,
                culprits=tuple(Culprit(data_rank=0, micro_batch=m, rank=0, node="n1") for m in last),
            )

    sampled = groups(3, ENGINE)
    with caplog.at_level(logging.WARNING):
        row = in_waves(made(config({}), WaveUpdate, Skips(policy().weights)), sampled, 3)
    assert row["steps/skipped"] == 1
    assert "grad_norm" not in row
    first, second = (part.split("prompt ")[1].split(")")[0] for part in caplog.text.split("micro-batch")[1:])
    assert (first, second) == ("'p3'", "'p1'")
    assert replace(sampled[0].prompt, id="p0") == sampled[0].prompt
