"""The whole update beside plain loops: what policy and critic are after some steps, for rows that use every part."""

from __future__ import annotations

import asyncio
import random
import sys
import weakref
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from rl_megatron.config.run import RunConfig
from rl_megatron.data.trajectories import single_turns
from rl_megatron.interfaces import Roles
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.training.update import Update
from rl_megatron.types import Batch, Completion, Counts, Loss, Metric, Prompt, RolloutGroup, Routes
from tests.completions import completion
from tests.toy_roles import NAMED, VOCABULARY, Toy, table
from tests.unit.training.plain_update import PlainUpdate

CRITIC = {"credit": "gae", "advantage_mean": "none", "advantage_std": "none"}
M2PO = {"choose": "second_moment", "limit": 0.1}
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
    "m2po": ALIKE | {"objective": "importance", "tokens": M2PO, "old_logprobs": "rollout"},
    "m2po by the learner's old policy": {"objective": "importance", "tokens": M2PO},
    "the tokens of most entropy": {"tokens": {"choose": "top_entropy", "share": 0.3}},
    "Clip-Cov, all of its candidates": ALIKE
    | {"objective": "importance", "tokens": {"choose": "clip_cov", "share": 1.0, "low": 0.1, "high": 0.5}},
    "KL-Cov": {
        "objective": "importance",
        "old_logprobs": "rollout",
        "drop_truncated": True,
        "tokens": {"choose": "kl_cov", "share": 0.3, "kl_coefficient": 2.0},
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
    "whitened advantages of scaled rewards": CRITIC | {"whiten": True, "reward_scale": 2.0},
    "NLL of right completions under scaled rewards": CRITIC | {"reward_scale": 0.5, "nll_coefficient": 0.7},
    **{
        f"rewards in the range of their {of}": ALIKE
        | {"advantage_mean": "group", "advantage_std": "none", "normalise_rewards": of}
        for of in ("group", "batch")
    },
    "an entropy bonus": {"entropy_coefficient": 0.2},
    "a moving baseline": {"advantage_mean": "moving", "advantage_std": "none", "baseline_decay": 0.5},
    "the learner's routes are the policy's alone": CRITIC | REWARDED_KL | {"routing_replay": "r2"},
    "the engine's routes are the policy's alone": CRITIC | REWARDED_KL | {"routing_replay": "r3"},
    **{
        name: {"preference": keys, "old_logprobs": "rollout", "unfinished_reward": -1.0}
        for name, keys in {
            "dpo": {"beta": 0.4, "label_smoothing": 0.1},
            "length-normalised dpo": {"beta": 2.0, "per_token": True, "nll": 0.5},
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
            routes=Routes(data=bytes(x % 2 for x in (1, *inputs)), shape=(1 + len(inputs), 1, 1)),
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
    roles: Any = Roles(
        learners={"policy": policy, **({"critic": critic} if needs.needs_critic else {})},
        frozen={"reference": reference} if needs.needs_reference else {},
        engine=unused,
        weights=unused,
    )
    update, plain = Update(config=config, roles=roles, attention_cost=0.0), PlainUpdate(config, *tables)
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
        ("learner", "off", ["score"]),
        ("learner", "r2", ["score with routes"]),
        ("learner", "r3", ["score"]),
        ("rollout", "off", []),
        ("rollout", "r2", ["score with routes"]),
        ("rollout", "r3", []),
        ("interpolated", "off", []),
    ],
)
def test_the_learner_is_asked_before_it_trains_only_for_what_is_used(
    old_logprobs: str, routing_replay: str, asked: list[str]
) -> None:
    """A pass over the batch costs a third of a step."""
    algorithm = {"old_logprobs": old_logprobs, "routing_replay": routing_replay}
    config = RunConfig.model_validate({"algorithm": algorithm, "train": {"minibatches": 1}})
    policy, unused = Toy(table(VOCABULARY, VOCABULARY, seed=1)), Toy(torch.zeros(1))
    roles: Any = Roles(learners={"policy": policy}, frozen={}, engine=unused, weights=unused)
    sampled = groups(3, table(VOCABULARY, VOCABULARY, seed=4))
    asyncio.run(Update(config=config, roles=roles, attention_cost=0.0)(sampled, 3, Stopwatch()))
    heard: list[Any] = policy.heard
    assert [what for what, *_ in heard] == [*asked, "backward", "step"]


def test_the_row_tells_the_means_of_the_optimizer_steps_of_each_model() -> None:
    config = RunConfig.model_validate(
        {"algorithm": CRITIC | {"critic": {"learning_rate": 0.5}}, "train": {"minibatches": 1, "epochs": 2}}
    )
    policy, critic = Toy(table(VOCABULARY, VOCABULARY, seed=1)), Toy(table(VOCABULARY, seed=2))
    models, unused = {"": policy, "critic/": critic}, Toy(torch.zeros(1))
    before = {name: model.weights for name, model in models.items()}
    roles: Any = Roles(learners={"policy": policy, "critic": critic}, frozen={}, engine=unused, weights=unused)
    sampled = groups(3, table(VOCABULARY, VOCABULARY, seed=4))
    row = asyncio.run(Update(config=config, roles=roles, attention_cost=0.0)(sampled, 3, Stopwatch()))
    for name, model in models.items():
        heard: list[Any] = model.heard
        losses = [said[2] for said in heard if said[0] == "backward"]
        steps = [step for step in heard if step[0] == "step"]
        assert len(steps) == len(losses) == 2
        after = [torch.frombuffer(bytearray(step[2]), dtype=torch.float32).view_as(model.weights) for step in steps]
        gradients = [(x - y) / steps[0][1] for x, y in pairwise([before[name], *after])]
        assert row[name + "loss"] == pytest.approx(sum(losses) / 2)
        assert row[name + "learning_rate"] == steps[0][1]
        assert row[name + "grad_norm"] == pytest.approx(sum(float(g.norm()) for g in gradients) / 2, rel=1e-2)
    assert row["critic/learning_rate"] == 0.5
    assert "critic/explained_variance" in row


def test_the_policys_share_of_its_gpus_peak_is_of_every_sequence_of_every_pass() -> None:
    config = RunConfig.model_validate({"algorithm": CRITIC, "train": {"minibatches": 2, "epochs": 3}})
    policy, critic = Toy(table(VOCABULARY, VOCABULARY, seed=1)), Toy(table(VOCABULARY, seed=2))
    unused, heard = Toy(torch.zeros(1)), list[int]()
    roles: Any = Roles(learners={"policy": policy, "critic": critic}, frozen={}, engine=unused, weights=unused)

    def a_second_a_position(lengths: Iterable[int]) -> float:
        heard.extend(added := list(lengths))
        return float(sum(added))

    sampled, watch = groups(3, table(VOCABULARY, VOCABULARY, seed=4)), Stopwatch()
    update = Update(
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
        async def backward(self, batch: Batch, loss: Loss) -> dict[str, Metric[float | Counts]]:
            nonlocal most
            held.append(weakref.ref(batch.samples.advantages))
            most = max(most, sum(column() is not None for column in held))
            return await super().backward(batch, loss)

    tokens = {"choose": "top_entropy", "share": 0.3}
    config = RunConfig.model_validate({"algorithm": {"tokens": tokens}, "train": {"minibatches": 4, "epochs": 2}})
    policy, unused = Counting(table(VOCABULARY, VOCABULARY, seed=1)), Toy(torch.zeros(1))
    roles: Any = Roles(learners={"policy": policy}, frozen={}, engine=unused, weights=unused)
    sampled = groups(3, table(VOCABULARY, VOCABULARY, seed=4))
    row = asyncio.run(Update(config=config, roles=roles, attention_cost=0.0)(sampled, 3, Stopwatch()))
    assert "tokens/chosen_fraction" in row
    assert len(held) == 8
    assert most <= 2


def test_what_visits_every_token_runs_beside_the_event_loop() -> None:
    row = PATHS["KL in the loss beside a correction"] | {"old_logprobs": "learner"}
    config = RunConfig.model_validate(
        {"algorithm": row, "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 6}}
    )
    policy, reference, unused = (Toy(table(VOCABULARY, *more, seed=1)) for more in ([VOCABULARY], [VOCABULARY], []))
    roles: Any = Roles(learners={"policy": policy}, frozen={"reference": reference}, engine=unused, weights=unused)
    update, in_loops_thread = Update(config=config, roles=roles, attention_cost=0.0), set[str]()
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
