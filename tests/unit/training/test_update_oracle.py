"""The whole update beside plain loops: what policy and critic are after some steps, for rows that use every part."""

from __future__ import annotations

import asyncio
import functools
import math
import random
import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from rl_megatron.algorithms.corrections import proximal_share
from rl_megatron.algorithms.losses import token_weight
from rl_megatron.config.run import RunConfig
from rl_megatron.data.packing import Packer
from rl_megatron.data.samples import single_turns, to_samples
from rl_megatron.errors import DataError
from rl_megatron.interfaces import RunComponents
from rl_megatron.observability.recorder import Row, Stopwatch
from rl_megatron.training.credit import trainable_groups
from rl_megatron.training.update import PolicyUpdate, token_versions
from rl_megatron.types import (
    Batch,
    Completion,
    Loss,
    LossInputs,
    Metric,
    ParallelDims,
    Prompt,
    RolloutGroup,
    Samples,
    Span,
    TokenSequence,
    Trajectory,
    Turn,
)
from tests.completions import branched, completion, group, trajectory
from tests.completions import groups as groups_of_turns
from tests.rows import config_of
from tests.toy_roles import NAMED, VOCABULARY, Toy, table
from tests.unit.training.plain_update import PlainUpdate

CRITIC = {"credit": "gae", "advantage_mean": "none", "advantage_std": "none"}
M2PO = {"tokens": {"choose": "second_moment"}, "parameters": {"second_moment": 0.1}}
ALIKE = {"advantage_mean": "none", "advantage_std": "none"}
REWARDED_KL = {"kl": {"coefficient": 0.3, "placement": "token_reward", "estimator": "k1"}}
PATHS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo by a biased std": {"std_unbiased": False},
    "ppo, a cut goes on, its critic clipped": CRITIC
    | {"gamma": 0.9, "lam": 0.8, "critic": {"clip": 0.05, "lam": 0.95}},
    "ppo, KL in the reward of a token": CRITIC | REWARDED_KL | {"whiten": True},
    "discounted returns, whitened": ALIKE | {"credit": "discounted", "gamma": 0.9, "whiten": True},
    "a teacher's log-probs beside a reward": ALIKE
    | REWARDED_KL
    | {"credit": "discounted", "gamma": 0.0, "objective": "importance"},
    "a teacher's distribution beside a reward": {
        "kl": {"coefficient": 0.3, "estimator": "top_k", "top_k": NAMED, "beta": 0.2}
    },
    "the critic alone at first": CRITIC | {"unfinished_reward": 0.0, "critic": {"only_steps": 3}},
    "m2po": ALIKE | M2PO | {"objective": "importance", "old_logprobs": "rollout"},
    "m2po by the learner's old policy": M2PO | {"objective": "importance"},
    "the tokens of most entropy": {"tokens": {"choose": "top_entropy", "share": 0.3}},
    "Clip-Cov, all of its candidates": ALIKE
    | {"objective": "importance", "tokens": {"choose": "clip_cov", "share": 1.0}}
    | {"parameters": {"covariance_low": 0.1, "covariance_high": 0.5}},
    "KL-Cov": {
        "objective": "importance",
        "old_logprobs": "rollout",
        "drop_truncated": True,
        "tokens": {"choose": "kl_cov", "share": 0.3},
        "parameters": {"kl_cov": 2.0},
    },
    "the optimal token baseline": ALIKE | {"credit": "optimal", "drop_truncated": True},
    "the optimal token baseline of discounted returns with a KL": ALIKE
    | REWARDED_KL
    | {"credit": "optimal", "gamma": 0.8, "old_logprobs": "rollout", "whiten": True},
    **{
        f"luffy, old log-probs by the {of}": {
            "advantage_std": "none",
            "demonstration_gamma": 0.1,
            "old_logprobs": of,
            "drop_truncated": True,
        }
        for of in ("learner", "rollout")
    },
    "decoupled ppo": {"correction": {"mode": "truncate", "high": 1.5}},
    "decoupled ppo, interpolated": {"correction": {"mode": "truncate", "high": 1.5}, "old_logprobs": "interpolated"},
    **{
        f"a correction, {mode} of {level}": {
            "correction": {"mode": mode, "level": level, "low": low, "high": 1.2},
            "drop_truncated": True,
            "dual_clip": 1.1,
            "kl": {"coefficient": 0.5, "estimator": "k1"},
        }
        for mode, low in (("truncate", 0.0), ("band", 0.7))
        for level in ("token", "product")
    },
    "KL in the loss beside a correction": {
        "correction": {"mode": "truncate", "high": 1.1},
        "kl": {"coefficient": 0.5, "estimator": "k1"},
    },
    "whitened over the cut ones, which are left out": ALIKE | {"whiten": True, "drop_truncated": True},
    "whitened advantages": CRITIC | {"whiten": True},
    "NLL of right completions": CRITIC | {"nll_coefficient": 0.7},
    "rewards less their group's mean": ALIKE | {"advantage_mean": "group", "advantage_std": "none"},
    "an entropy bonus": {"entropy_coefficient": 0.2},
    "a moving baseline": {"advantage_mean": "moving", "advantage_std": "none", "baseline_decay": 0.5},
    "the learner's routes are the policy's alone": CRITIC | REWARDED_KL | {"routing_replay": "r2"},
    "the engine's routes are the policy's alone": CRITIC | REWARDED_KL | {"routing_replay": "r3"},
    **{
        name: {"preference": keys, "old_logprobs": "rollout", "unfinished_reward": -1.0}
        for name, keys in {
            "dpo": {"beta": 0.4, "label_smoothing": 0.1},
            "length-normalized dpo": {"beta": 2.0, "per_token": True, "nll": 0.5},
            "ipo": {"loss": "ipo", "beta": 0.4, "per_token": True},
            "simpo": {"beta": 2.0, "per_token": True, "reference_free": True, "target_margin": 1.0},
            "orpo": {"loss": "orpo", "beta": 0.3, "per_token": True, "reference_free": True, "nll": 1.0},
        }.items()
    },
}
STEPS = (3, 4, 5)


def groups(step: int, engine: torch.Tensor) -> list[RolloutGroup]:
    """Four prompts, four completions each, of several versions; the engine's log-probs are of another table."""
    rng = random.Random(step)

    def sampled(before: int) -> Completion:
        tokens = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 6))]
        inputs, oldest = [before, *tokens[:-1]], rng.choice([0, 1, 2])
        return completion(
            tokens,
            [float(engine[x].log_softmax(-1)[y]) for x, y in zip(inputs, tokens, strict=True)],
            finish=rng.choice(["stop", "stop", "length"]),
            spans=((0, oldest), (1, rng.choice([oldest, 2])))[: len(tokens)],
            columns={"routes": np.array([x % 2 for x in (1, *inputs)], np.uint8)[:, None, None]},
        )

    return [
        single_turns(
            Prompt(id=f"p{p}", text="", token_ids=(1, p), answer=""),
            [sampled(p) for _ in range(4)],
            rewards=[rng.choice([0.0, 0.5, 1.0]) for _ in range(4)],
        )
        for p in range(4)
    ]


def with_demonstrations(sampled: list[RolloutGroup]) -> list[RolloutGroup]:
    """The groups with a demonstration each but the first, which has the greatest reward or a lesser one."""
    shown = [
        single_turns(
            group.prompt, [completion([7, p, 2][: 1 + p % 3], [0.0] * (1 + p % 3), spans=())], rewards=[reward]
        )
        for p, (group, reward) in enumerate(zip(sampled, (1.0, 1.0, 0.5, 1.0), strict=False))
    ]
    return [sampled[0], *(replace(g, demonstration=one) for g, one in zip(sampled[1:], shown[1:], strict=True))]


@pytest.mark.parametrize("name", PATHS)
def test_models_after_three_steps_are_those_of_plain_loops(name: str) -> None:
    assert_as_plain_loops(
        RunConfig.model_validate(
            {
                "algorithm": PATHS[name],
                "train": {"minibatches": 1, "epochs": 2, "learning_rate": 2.0},
                "rollout": {"max_prompt_tokens": 2, "max_new_tokens": 6},
                "learner": {"max_tokens_per_micro_batch": 16},
            }
        )
    )


def assert_as_plain_loops(config: RunConfig) -> None:
    """After each of three steps the tables are those of the loops; of a configuration with one minibatch an epoch."""
    tables = [table(VOCABULARY, VOCABULARY, seed=1), table(VOCABULARY, VOCABULARY, seed=3), table(VOCABULARY, seed=2)]
    policy, reference, critic = (Toy(weights) for weights in tables)
    needs, unused = config.algorithm, Toy(torch.zeros(1))
    roles: Any = RunComponents(
        learners={"policy": policy, **({"critic": critic} if needs.needs_critic else {})},
        frozen_models={"reference": reference} if needs.needs_reference else {},
        engine=unused,
        weight_sync=unused,
    )
    update, plain = PolicyUpdate(config=config, roles=roles, attention_cost=0.0), PlainUpdate(config, *tables)
    engine = tables[0] + 0.5 * table(VOCABULARY, VOCABULARY, seed=4)
    for step in STEPS:
        sampled = groups(step, engine)
        if needs.demonstration_gamma is not None:
            sampled = with_demonstrations(sampled)
        asyncio.run(update(sampled, step, Stopwatch()))
        plain.step(sampled, step)
        torch.testing.assert_close(policy.weights.double(), plain.policy, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(critic.weights.double(), plain.critic, rtol=1e-4, atol=1e-5)
    assert not torch.equal(policy.weights, tables[0])


@pytest.mark.parametrize(
    ("old_logprobs", "routing_replay", "asked"),
    [
        *(("learner", "off", ["score"]), ("learner", "r2", ["score with routes"]), ("learner", "r3", ["score"])),
        *(("rollout", "off", []), ("rollout", "r2", ["score with routes"])),
        *(("rollout", "r3", []), ("interpolated", "off", [])),
    ],
)
def test_the_learner_is_asked_only_for_what_is_used(old_logprobs: str, routing_replay: str, asked: list[str]) -> None:
    """A pass over the batch costs a third of a step."""
    algorithm = {"old_logprobs": old_logprobs, "routing_replay": routing_replay}
    config = RunConfig.model_validate({"algorithm": algorithm, "train": {"minibatches": 1}})
    policy, unused = Toy(table(VOCABULARY, VOCABULARY, seed=1)), Toy(torch.zeros(1))
    roles: Any = RunComponents(learners={"policy": policy}, frozen_models={}, engine=unused, weight_sync=unused)
    sampled = groups(3, table(VOCABULARY, VOCABULARY, seed=4))
    asyncio.run(PolicyUpdate(config=config, roles=roles, attention_cost=0.0)(sampled, 3, Stopwatch()))
    heard: list[Any] = policy.heard
    assert [what for what, *_ in heard] == [*asked, "backward", "step"]


def test_the_row_tells_the_means_of_the_optimizer_steps_of_each_model() -> None:
    config = RunConfig.model_validate(
        {"algorithm": CRITIC | {"critic": {"learning_rate": 0.5}}, "train": {"minibatches": 1, "epochs": 2}}
    )
    policy, critic = Toy(table(VOCABULARY, VOCABULARY, seed=1)), Toy(table(VOCABULARY, seed=2))
    models, unused = {"": policy, "critic/": critic}, Toy(torch.zeros(1))
    before = {name: model.weights for name, model in models.items()}
    roles: Any = RunComponents(
        learners={"policy": policy, "critic": critic}, frozen_models={}, engine=unused, weight_sync=unused
    )
    sampled = groups(3, table(VOCABULARY, VOCABULARY, seed=4))
    row = asyncio.run(PolicyUpdate(config=config, roles=roles, attention_cost=0.0)(sampled, 3, Stopwatch()))
    for name, model in models.items():
        heard: list[Any] = model.heard
        losses = [said[2] for said in heard if said[0] == "backward"]
        steps = [step for step in heard if step[0] == "step"]
        assert len(steps) == len(losses) == 2
        after = [torch.frombuffer(bytearray(step[2]), dtype=torch.float32).view_as(model.weights) for step in steps]
        gradients = [(x - y) / steps[0][1] for x, y in pairwise([before[name], *after])]
        assert row[name + "loss"] == pytest.approx(sum(losses) / 2)
        assert row.get(name + "learning_rate", steps[0][1]) == steps[0][1]
        assert row[name + "grad_norm"] == pytest.approx(sum(float(g.norm()) for g in gradients) / 2, rel=1e-2)
    assert "critic/explained_variance" in row


def test_the_policys_share_of_its_gpus_peak_is_of_every_sequence_of_every_pass() -> None:
    config = RunConfig.model_validate({"algorithm": CRITIC, "train": {"minibatches": 2, "epochs": 3}})
    policy, critic = Toy(table(VOCABULARY, VOCABULARY, seed=1)), Toy(table(VOCABULARY, seed=2))
    unused, heard = Toy(torch.zeros(1)), list[int]()
    roles: Any = RunComponents(
        learners={"policy": policy, "critic": critic}, frozen_models={}, engine=unused, weight_sync=unused
    )

    def a_second_a_position(lengths: Iterable[int]) -> float:
        heard.extend(added := list(lengths))
        return float(sum(added))

    sampled, watch = groups(3, table(VOCABULARY, VOCABULARY, seed=4)), Stopwatch()
    update = PolicyUpdate(
        config=config,
        roles=roles,
        attention_cost=0.0,
        seconds_at_peak=a_second_a_position,
        training_flops=lambda lengths: 5.0 * sum(lengths),
    )
    row = asyncio.run(update(sampled, 3, watch))
    whole = [len(c.token_ids) - 1 for group in sampled for t in group.trajectories for c in t.chains]
    assert sorted(heard) == sorted(3 * whole)
    assert row["flops/train"] == 5.0 * sum(3 * whole)
    found = watch.row()
    assert found["mfu/train"] == pytest.approx(float(row["tokens/train"] or 0) / found["seconds/train"])


def test_the_columns_of_one_minibatch_are_held_at_a_time() -> None:
    """Each is as long as the whole batch, and there are eight minibatches."""
    held, most = list[weakref.ref[torch.Tensor]](), 0

    class Counting(Toy):
        async def backward(self, batch: Batch, loss: Loss) -> dict[str, Metric[float]]:
            nonlocal most
            held.append(weakref.ref(batch.samples.advantages))
            most = max(most, sum(column() is not None for column in held))
            return await super().backward(batch, loss)

    tokens = {"choose": "top_entropy", "share": 0.3}
    config = RunConfig.model_validate({"algorithm": {"tokens": tokens}, "train": {"minibatches": 4, "epochs": 2}})
    policy, unused = Counting(table(VOCABULARY, VOCABULARY, seed=1)), Toy(torch.zeros(1))
    roles: Any = RunComponents(learners={"policy": policy}, frozen_models={}, engine=unused, weight_sync=unused)
    sampled = groups(3, table(VOCABULARY, VOCABULARY, seed=4))
    row = asyncio.run(PolicyUpdate(config=config, roles=roles, attention_cost=0.0)(sampled, 3, Stopwatch()))
    assert "tokens/chosen_fraction" in row
    assert len(held) == 8
    assert most <= 2


def test_what_visits_every_token_runs_beside_the_event_loop() -> None:
    row = PATHS["KL in the loss beside a correction"] | {"old_logprobs": "learner"}
    config = RunConfig.model_validate(
        {"algorithm": row, "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 6}}
    )
    policy, reference, unused = (Toy(table(VOCABULARY, *more, seed=1)) for more in ([VOCABULARY], [VOCABULARY], []))
    roles: Any = RunComponents(
        learners={"policy": policy}, frozen_models={"reference": reference}, engine=unused, weight_sync=unused
    )
    update, in_loops_thread = PolicyUpdate(config=config, roles=roles, attention_cost=0.0), set[str]()
    sampled = groups(3, policy.weights)
    sys.setprofile(lambda frame, event, _: in_loops_thread.add(frame.f_code.co_name) if event == "call" else None)
    try:
        found = asyncio.run(update(sampled, 3, Stopwatch()))
    finally:
        sys.setprofile(None)
    assert {"mismatch/k1", "advantage/std", "kl/reference"} <= found.keys()
    of_tokens = {"to_samples", "assign_credit", "mismatch_row", "advantage_row", "metrics", "tokens_of"}
    assert not in_loops_thread & (of_tokens | {"unpack", "plan_packing", "reference_kl"})
    assert "shape_rewards" in in_loops_thread  # of completions, not of tokens


# A trajectory as one row or as a row a turn: the same losses and the same models after two epochs.
AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "prompt_mean"]
ROWS: dict[str, dict[str, Any]] = {
    **{name: {"aggregation": name} for name in AGGREGATIONS},
    "turns": {
        "credit": "turn", "gamma_turn": 0.5, "ratio_level": "turn", "aggregation": "seq_mean_token_mean",
        "clip_low": 0.02, "clip_high": 0.02,
    },
    "states": {
        "credit": "turn", "gamma_turn": 0.5, "turn_baseline": "state", "turn_compared": "returns", "turn_weight": 1.0,
    },
    "cut ones are left out": {"aggregation": "seq_mean_token_mean", "drop_truncated": True},
    "right ones again": {"aggregation": "prompt_mean", "nll_coefficient": 0.3},
    "KL in rewards": {
        "aggregation": "seq_mean_token_mean", "advantage_std": "none",
        "kl": {"coefficient": 0.3, "placement": "completion_reward"},
    },
}  # fmt: skip
TWO_STEPS = (1, 2)
ENVIRONMENT = {"function": "calculator", "template": "plain", "max_tokens": 40}


def config(algorithm: dict[str, Any], **train: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "algorithm": algorithm,
            **({"environment": ENVIRONMENT} if "turn" in algorithm.values() else {}),
            "train": {"minibatches": 2, "epochs": 2, "learning_rate": 1.0, **train},
            "rollout": {
                "engine": "vllm",
                "prompts_per_step": 4,
                "group_size": 4,
                "max_prompt_tokens": 2,
                "max_new_tokens": 40,
            },
            "learner": {"max_tokens_per_micro_batch": 90},
        }
    )


def apart(sampled: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Every second trajectory as a row for each of its turns."""
    return [
        replace(g, trajectories=tuple(branched(t) if n % 2 else t for n, t in enumerate(g.trajectories)))
        for g in sampled
    ]


def policy() -> Toy:
    return Toy(table(VOCABULARY, VOCABULARY, seed=1))


def made(c: RunConfig, toy: Toy) -> PolicyUpdate:
    unused = Toy(torch.zeros(1))
    reference = {"reference": Toy(table(VOCABULARY, VOCABULARY, seed=3))} if c.algorithm.needs_reference else {}
    roles: Any = RunComponents(learners={"policy": toy}, frozen_models=reference, engine=unused, weight_sync=unused)
    return PolicyUpdate(config=c, roles=roles, attention_cost=0.0)


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_a_trajectory_change_neither_loss_nor_model(name: str) -> None:
    one, other = policy(), policy()
    whole, rows = (made(config(ROWS[name]), each) for each in (one, other))
    for step in TWO_STEPS:
        sampled = groups_of_turns(step)
        expected, found = (
            asyncio.run(update(some, step, Stopwatch())) for update, some in ((whole, sampled), (rows, apart(sampled)))
        )
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6, abs=1e-6)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        torch.testing.assert_close(other.weights, one.weights, rtol=1e-5, atol=1e-6)
    assert not torch.equal(one.weights, policy().weights)


@functools.cache
def ragged() -> list[RolloutGroup]:
    """Two prompts: 2 and 3 trained tokens, of two turns; 1 trained token, and 4 in two rows."""
    return [
        group("a", [trajectory([2]), trajectory([1, 2])]),
        group("b", [trajectory([1]), branched(trajectory([3, 1]))]),
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("seq_mean_token_mean", [1 / 8] * 2 + [1 / 12] * 3 + [1 / 4] + [1 / 16] * 4),
        ("seq_mean_token_sum", [1 / 4] * 10),
        ("seq_mean_token_sum_norm", [1 / 40] * 10),
        ("prompt_mean", [1 / 10] * 5 + [1 / 10] * 5),
    ],
)
def test_weights_count_trajectories_and_prompts(name: str, expected: list[float]) -> None:
    samples = to_samples(ragged(), groups_of=True)
    weights = token_weight(samples, name, max_length=10)
    assert weights[samples.mask].tolist() == pytest.approx(expected)
    assert not weights[~samples.mask].any()


def test_weights_of_a_part_count_what_is_in_it() -> None:
    """Sequences 0, 3 and 4: a part of each prompt."""
    samples, part = to_samples(ragged(), groups_of=True), torch.tensor([0, 3, 4])
    of_prompts = token_weight(samples, "prompt_mean", max_length=1, part=part)
    assert of_prompts[samples.mask].tolist() == pytest.approx([1 / 4] * 2 + [0] * 4 + [1 / 8] * 4)
    of_trajectories = token_weight(samples, "seq_mean_token_mean", max_length=1, part=part)
    assert of_trajectories[samples.mask].tolist() == pytest.approx([1 / 4] * 2 + [0] * 4 + [1 / 8] * 4)


def test_no_weights_are_sent_where_the_counts_give_them() -> None:
    branches, single = to_samples(ragged()), to_samples([group("a", [trajectory([2])])])
    assert token_weight(branches, "token_mean", max_length=1) is None
    assert all(token_weight(single, name, max_length=1) is None for name in AGGREGATIONS[:-1])


def test_rows_of_a_trajectory_stay_in_one_minibatch_and_on_the_ranks_foreseen() -> None:
    samples = to_samples(apart(groups_of_turns(2)))
    packer = Packer(dims=ParallelDims(dp=2), max_tokens=64, attention_cost=0.0)
    ranks, seen = packer.ranks(samples, limit=3, seed=7), []
    for batch in packer.minibatches(samples, limit=3, seeds=[7]):
        for d, row in enumerate(batch.sequences):
            assert ranks[torch.cat(row).numpy()].tolist() == [d] * sum(map(len, row))
        seen.append(torch.cat([torch.cat(row) for row in batch.sequences]))
    owners = [set(samples.trajectory_of[rows].tolist()) for rows in seen]
    assert sum(map(len, owners)) == len(set.union(*owners)) == 9
    assert sorted(torch.cat(seen).tolist()) == list(range(samples.num_sequences))
    assert len(list(packer.minibatches(samples, limit=99, seeds=[7]))) == 9


def test_pairs_of_several_rows_are_refused() -> None:
    toy, unused = policy(), Toy(torch.zeros(1))
    roles: Any = RunComponents(
        learners={"policy": toy}, frozen_models={"reference": policy()}, engine=unused, weight_sync=unused
    )
    c = config({"preference": {"beta": 0.1}, "old_logprobs": "rollout"})
    pair = [trajectory([2], total=1.0), branched(trajectory([1, 2], total=0.0))]
    with pytest.raises(DataError, match="pairs completions of one row"):
        asyncio.run(PolicyUpdate(config=c, roles=roles, attention_cost=0.0)([group("a", pair)], 1, Stopwatch()))


class Poisoned(Toy):
    """Its losses are given inf and NaN at every position outside the mask."""

    def _inputs(self, samples: Samples, batch: Batch, weights: torch.Tensor) -> LossInputs:
        inputs = super()._inputs(samples, batch, weights)
        junk = torch.from_numpy(np.resize([math.nan, math.inf, -math.inf], len(inputs.mask))).float()
        names = ("logprobs", "entropy", "advantages", "rollout_logprobs", "old_logprobs", "token_weight")
        columns: dict[str, Any] = {name: torch.where(inputs.mask, getattr(inputs, name), junk) for name in names}
        return replace(inputs, **columns)


def test_what_stands_in_context_changes_nothing() -> None:
    one, other = policy(), Poisoned(policy().weights)
    for toy in (one, other):
        asyncio.run(made(config(ROWS["turns"]), toy)(apart(groups_of_turns(2)), 1, Stopwatch()))
    assert torch.equal(one.weights, other.weights)
    assert one.weights.isfinite().all()


# Groups with a demonstration: which teach, and what of a step's figures is of the sampled ones alone.
ENGINE = table(VOCABULARY, VOCABULARY, seed=4)


def row_of(sampled: list[RolloutGroup], **algorithm: Any) -> Row:
    given = {"algorithm": {"demonstration_gamma": 0.1, **algorithm}, "train": {"minibatches": 1, "max_staleness": 2}}
    policy, unused = Toy(table(VOCABULARY, VOCABULARY, seed=1)), Toy(torch.zeros(1))
    roles: Any = RunComponents(learners={"policy": policy}, frozen_models={}, engine=unused, weight_sync=unused)
    update = PolicyUpdate(config=RunConfig.model_validate(given), roles=roles, attention_cost=0.0)
    return asyncio.run(update(sampled, 3, Stopwatch()))


def test_figures_of_engine_ratio_and_entropy_are_those_without_demonstrations() -> None:
    sampled = groups(3, ENGINE)
    found, wanted = row_of(with_demonstrations(sampled)), row_of(sampled)
    alike = [key for key in wanted if key.startswith(("mismatch/", "kl/", "ratio/", "clip_fraction", "entropy"))]
    assert {"mismatch/k1", "mismatch/logprob_abs_max", "kl/rollout", "kl/old_policy", "ratio/mean", "entropy"} <= {
        *alike
    }
    for key in alike:
        assert abs(found[key] - wanted[key]) < 1e-6, key  # type: ignore[operator]
    assert wanted["demonstration/share"] == 0
    assert "demonstration/probability" not in wanted
    tokens = sum(one.num_sampled for group in sampled for one in group.trajectories)
    assert abs(found["demonstration/share"] - 6 / (tokens + 6)) < 1e-6  # type: ignore[operator]


def test_a_step_of_demonstrations_alone_has_no_figures_of_the_others() -> None:
    cut = [
        single_turns(group.prompt, [completion([3], finish="length")] * 2, rewards=[0.0, 0.5])
        for group in groups(3, ENGINE)
    ]
    row = row_of(with_demonstrations(cut), drop_truncated=True)
    assert row["demonstration/share"] == 1
    assert row["grad_norm"] > 0  # type: ignore[operator]
    assert not [key for key in row if key.startswith(("ratio/", "clip_fraction", "entropy", "kl/old_policy"))]


def test_a_group_teaches_where_the_demonstration_differs_from_equal_completions() -> None:
    equal = [
        replace(group, trajectories=(replace(group.trajectories[0], reward=float(place % 2)),) * 2)
        for place, group in enumerate(groups(3, ENGINE))
    ]
    rewards = [
        [
            one.reward
            for one in (*group.trajectories, *(group.demonstration.trajectories if group.demonstration else ()))
        ]
        for group in with_demonstrations(equal)
    ]
    assert [len(each) for each in rewards] == [2, 3, 3, 3]
    section = config_of("luffy").algorithm
    found = trainable_groups(with_demonstrations(equal), section, max_new_tokens=6)
    assert found == [len(set(each)) > 1 for each in rewards]
    assert any(found)
    assert not any(trainable_groups(equal, section, max_new_tokens=6))


# Each token's own weight version, from engines' spans to the share of the proximal policy.
def turn(start: int, count: int, *spans: tuple[int, int]) -> Turn:
    logprobs = np.full(count, -0.5, np.float32)
    return Turn(start=start, logprobs=logprobs, finish_reason="stop", spans=tuple(Span(*s) for s in spans), text="")


def test_tokens_of_rows_with_several_turns_and_versions() -> None:
    """Positions 0 ... L - 2 of a row have tokens 1 ... L - 1 as targets."""
    turns = (turn(2, 4, (0, 1), (3, 2)), turn(7, 3, (0, 2), (1, 4)))
    long = TokenSequence(token_ids=np.arange(10, dtype=np.int32), turns=turns)
    short = TokenSequence(token_ids=np.arange(3, dtype=np.int32), turns=(turn(1, 2, (0, 3)),))
    prompt = Prompt(id="p", text="", token_ids=(0,), answer="")
    group = RolloutGroup(prompt=prompt, trajectories=(Trajectory(chains=(long, short), reward=1.0),))
    samples = to_samples([group])
    versions = token_versions([group], samples)
    assert versions.tolist() == [1, 1, 1, 1, 2, 1, 2, 4, 4, 3, 3]
    assert samples.mask.tolist() == [False, True, True, True, True, False, True, True, True, True, True]
    share = proximal_share(versions, proximal_version=4, version=5)
    closed = [Fraction(4 - v, 5 - v) for v in (1, 1, 1, 2, 2, 4, 4, 3, 3)]
    assert torch.equal(share[samples.mask], torch.tensor([float(one) for one in closed]))
