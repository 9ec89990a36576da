"""The trainer's small rules: learning rate, seeds, minibatches, metrics over steps, and the reference."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from rl_megatron.algorithms.auxiliary import KtoLoss
from rl_megatron.algorithms.losses import MEANS_OF_RATIOS
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.data.packing import Packer, finish_minibatch
from rl_megatron.data.samples import SupervisedRow, set_margins, supervised_samples
from rl_megatron.errors import ConfigError
from rl_megatron.interfaces import RunComponents
from rl_megatron.models.named import NAMED
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.seeds import make_seed
from rl_megatron.training.jobs.written import FrozenReference, LabeledAnswers, PairObjective
from rl_megatron.training.optimizer_steps import (
    CompletedStep,
    OptimizerSteps,
    critic_learning_rate,
    critic_row,
    learning_rate,
    policy_row,
    steps_for_epochs,
)
from rl_megatron.types import Metric, ParallelDims, Samples, StepResult
from tests.rows import pair_loss
from tests.samples import sequences_of
from tests.toy_roles import VOCABULARY, Toy, ToyEngine, ToyWeights, table
from tests.unit.test_every_key_acts import BASE, STARTED, Rig
from tools.planner.memory import footprints


def rates(count: int = 10, **train: object) -> list[float]:
    config = RunConfig.model_validate({"train": {"steps": 10, "learning_rate": 1.0, **train}})
    return [learning_rate(config, step) for step in range(1, count + 1)]


def test_rate_is_constant_without_a_schedule() -> None:
    assert rates() == [1.0] * 10


def test_linear_decay_ends_one_step_before_zero() -> None:
    assert rates(lr_decay="linear") == pytest.approx([1 - i / 10 for i in range(10)])


def test_warm_up_then_decay() -> None:
    assert rates(lr_warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 7)
    for decay in ("linear", "cosine"):
        assert rates(lr_warmup_steps=4, lr_decay=decay)[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates(lr_warmup_steps=4, lr_decay="linear")[4:] == pytest.approx([1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


@pytest.mark.parametrize(
    ("epochs", "rows", "batch_size", "steps"),
    [
        *((1.1, 100, 10, 11), (2.2, 7000, 100, 154), (0.29, 100, 1, 29), (1.0, 100, 30, 4)),
        *((1e-7, 100, 10, 1), (3, 7, 7, 3)),
    ],
)
def test_epochs_take_the_steps_that_hold_their_rows(epochs: float, rows: int, batch_size: int, steps: int) -> None:
    assert steps_for_epochs(epochs, rows, batch_size) == steps


@pytest.mark.parametrize(("warm", "floor"), [(0, 0.1), (4, 0.25), (3, 1.0)])
def test_decay_ends_at_a_floor_as_megatrons_does(warm: int, floor: float) -> None:
    """`OptimizerParamScheduler.get_lr` of megatron-core: min_lr + coefficient (max_lr - min_lr), after the warm-up."""
    share = [step / (12 - warm) for step in range(12 - warm)]
    for decay, coefficients in (
        ("linear", [1 - at for at in share]),
        ("cosine", [0.5 * (math.cos(math.pi * at) + 1) for at in share]),
    ):
        found = rates(12, steps=12, lr_warmup_steps=warm, lr_decay=decay, lr_min=floor)
        assert found[:warm] == pytest.approx([(step + 1) / warm for step in range(warm)])
        assert found[warm:] == pytest.approx([floor + one * (1 - floor) for one in coefficients])


def test_the_critic_has_a_rate_of_its_own_on_the_same_schedule() -> None:
    config = RunConfig.model_validate(
        {
            "train": {"steps": 4, "learning_rate": 1.0, "lr_decay": "linear"},
            "algorithm": {
                "credit": "gae",
                "advantage_mean": "none",
                "advantage_std": "none",
                "critic": {"learning_rate": 8.0},
            },
        }
    )
    assert [critic_learning_rate(config, step) for step in range(1, 5)] == pytest.approx([8, 6, 4, 2])
    assert [learning_rate(config, step) for step in range(1, 5)] == pytest.approx([1, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("decay", ["none", "linear", "cosine"])
@pytest.mark.parametrize("warm", [0, 3])
def test_the_policys_schedule_begins_after_the_steps_of_the_critic_alone(decay: str, warm: int) -> None:
    def config(alone: int) -> RunConfig:
        train = {"steps": 10 + alone, "learning_rate": 1.0, "lr_warmup_steps": warm, "lr_decay": decay}
        algorithm = {"credit": "gae", "advantage_mean": "none", "advantage_std": "none"}
        return RunConfig.model_validate(
            {"train": train, "algorithm": {**algorithm, "critic": {"only_steps": alone, "learning_rate": 8.0}}}
        )

    found = [learning_rate(config(5), step) for step in range(1, 16)]
    assert found == [0.0] * 5 + [learning_rate(config(0), step) for step in range(1, 11)]
    assert found[5] == (1 / 3 if warm else 1.0)
    of_critic = [critic_learning_rate(config(5), step) for step in range(1, 16)]
    assert of_critic == [8.0 * rate for rate in rates(15, steps=15, lr_warmup_steps=warm, lr_decay=decay)]


def test_effective_samples_are_those_of_all_optimizer_steps_together() -> None:
    """Half of the ratios are 1, half are e^0.1."""
    first, second = torch.zeros(30), torch.full((10,), 0.1)
    results = [
        CompletedStep(
            {
                "loss": Metric(value=0.0),
                **{name: Metric(value=0.0) for name in MEANS_OF_RATIOS},
                "ratio/share": Metric(value=1.0),
                "ratio/mean": Metric(value=x.exp().mean().item()),
                "ratio/second_moment": Metric(value=(2 * x).exp().mean().item()),
            },
            StepResult(grad_norm=1.0),
        )
        for x in (first, second)
    ]
    row = policy_row(results)
    mean, square = (1 + math.exp(0.1)) / 2, (1 + math.exp(0.2)) / 2
    assert row["ratio/effective_fraction"] == pytest.approx(mean**2 / square)
    assert "ratio/second_moment" not in row


def test_each_metric_of_several_optimizer_steps_is_reduced_as_it_says_whatever_its_name() -> None:
    first: dict[str, Metric[float]] = {
        "a/max": Metric(value=0.5, reduction="min"),
        "b/min": Metric(value=1.5, reduction="max"),
        "c/sum": Metric(value=1.0),
        "d": Metric(value=2.0, reduction="sum"),
        "e": Metric(value=1.0, weight=3.0),
    }
    second: dict[str, Metric[float]] = {
        "a/max": Metric(value=0.7, reduction="min"),
        "b/min": Metric(value=1.9, reduction="max"),
        "c/sum": Metric(value=2.0),
        "d": Metric(value=3.0, reduction="sum"),
        "e": Metric(value=5.0, weight=1.0),
    }
    results = [
        CompletedStep(
            first | {"loss": Metric(value=1.0)},
            StepResult(grad_norm=2.0, observer_metrics={"moe/load_imbalance": Metric(value=1.0)}),
        ),
        CompletedStep(
            second | {"loss": Metric(value=3.0)},
            StepResult(grad_norm=4.0, observer_metrics={"moe/load_imbalance": Metric(value=2.0)}),
        ),
    ]
    own = {"a/max": 0.5, "b/min": 1.9, "c/sum": 1.5, "d": 5.0, "e": 2.0}
    assert policy_row(results) == {"loss": 2.0, "grad_norm": 3.0, "moe/load_imbalance": 1.5, **own}
    assert critic_row(results) == {"critic/loss": 2.0, "critic/grad_norm": 3.0, **own}


def test_a_metric_is_of_the_optimizer_steps_that_have_it() -> None:
    """An observer may have nothing to say of a step, or a mean over nothing."""
    nothing = Metric(value=math.nan, weight=0.0)
    said: list[dict[str, Metric[float]]] = [
        {"observer/first": Metric(value=1.0), "observer/empty": nothing},
        {"observer/second": Metric(value=2.0), "observer/empty": nothing, "observer/in_part": nothing},
        {"observer/second": Metric(value=4.0), "observer/in_part": Metric(value=5.0, weight=3.0)},
    ]
    row = policy_row(
        [CompletedStep({"loss": Metric(value=0.0)}, StepResult(grad_norm=1.0, observer_metrics=one)) for one in said]
    )
    own = {"observer/first": 1.0, "observer/second": 3.0, "observer/in_part": 5.0}
    assert row == {"loss": 0.0, "grad_norm": 1.0, **own}


# K epochs over a rollout batch: every sequence once an epoch, in an order of each epoch's own.
def numbered(count: int) -> Samples:
    """Sequences of one position that hold their number."""
    numbers = torch.arange(count)
    return sequences_of([1] * count, input_ids=numbers, targets=numbers, nll_weights=0.1 * (numbers % 2))


def parts_of(samples: Samples, seeds: Sequence[int], *, most: int, unit: int = 1) -> list[Samples]:
    """Each minibatch fits one micro-batch; sequences of one length keep their order there."""
    packer = Packer(dims=ParallelDims(), max_tokens=100, attention_cost=0.0, rows_per_unit=unit)
    made = packer.minibatches(samples, limit=most, seeds=seeds)
    return [finish_minibatch(batch).micro_batches[0][0] for batch in made]


def orders(*, step: int, epochs: int) -> list[list[int]]:
    seeds = [make_seed(0, step, epoch) for epoch in range(epochs)]
    parts = parts_of(numbered(12), seeds, most=3)
    assert len(parts) == 3 * epochs
    return [torch.cat([p.input_ids for p in parts[i : i + 3]]).tolist() for i in range(0, len(parts), 3)]


def test_each_epoch_and_step_shuffles_anew_and_repeats_itself() -> None:
    found = orders(step=1, epochs=4) + orders(step=2, epochs=4)
    assert len({tuple(order) for order in found}) == 8
    assert all(sorted(order) == list(range(12)) for order in found)
    assert orders(step=1, epochs=4) == found[:4]


def test_fewer_sequences_than_minibatches_are_one_each() -> None:
    assert [part.num_sequences for part in parts_of(numbered(5), [1], most=8)] == [1] * 5


def test_pairs_stay_together_and_fewer_than_minibatches_are_one_each() -> None:
    parts = parts_of(numbered(6), [1], most=8, unit=2)
    assert sorted(part.input_ids.tolist() for part in parts) == [[0, 1], [2, 3], [4, 5]]


GROUPS = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 3, 3, 4, 5])


def groups_of_parts(seed: int, dp: int) -> list[list[int]]:
    """The groups of each minibatch's sequences, in the order of the batch."""
    samples = replace(numbered(12), group_of=GROUPS)
    packer = Packer(dims=ParallelDims(dp=dp), max_tokens=3, keeps_groups=True, attention_cost=0.0)
    ranks, out = packer.ranks(samples, limit=3, seed=seed), []
    for batch in packer.minibatches(samples, limit=3, seeds=[seed]):
        for d, row in enumerate(batch.sequences):
            assert set(ranks[torch.cat(row).numpy()]) <= {d}
        numbers = sorted(torch.cat([torch.cat(row) for row in batch.sequences]).tolist())
        out.append(GROUPS[numbers].tolist())
    return out


def test_whole_groups_are_in_one_minibatch_each_whatever_the_ranks() -> None:
    for seed in range(20):
        parts = groups_of_parts(seed, dp=1)
        assert [len(set(part)) for part in parts] == [2, 2, 2]
        assert sorted(number for part in parts for number in part) == GROUPS.tolist()  # none in two parts, none twice
        assert all(part.count(number) == GROUPS.tolist().count(number) for part in parts for number in part)
        assert groups_of_parts(seed, dp=2) == groups_of_parts(seed, dp=4) == parts
    assert len({str(groups_of_parts(seed, dp=1)) for seed in range(20)}) > 10


def test_fewer_groups_than_minibatches_are_one_each_and_without_the_key_groups_are_cut() -> None:
    samples = replace(numbered(12), group_of=GROUPS)
    packer = Packer(dims=ParallelDims(), max_tokens=100, keeps_groups=True, attention_cost=0.0)
    assert len(list(packer.minibatches(samples, limit=12, seeds=[0]))) == 6
    assert [part.num_sequences for part in parts_of(samples, [0], most=3)] == [4, 4, 4]


def test_nll_weights_are_over_the_right_tokens_of_their_minibatch() -> None:
    for part in parts_of(numbered(12), [1], most=3):
        right = int((part.input_ids % 2).sum())
        assert abs(part.nll_weights.sum().item() - (0.1 if right else 0.0)) < 1e-6


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["train.minibatches=1"], "with train.minibatches=1 a minibatch is the whole batch"),
        (["algorithm=dpo"], "with algorithm.preference.beta=0.1 each group's pair stays together"),
        (["algorithm=spo"], "a group is one completion"),
        (["rollout.prompts_per_step=3", "train.minibatches=4"], r"more than the 3 whole groups .*prompts_per_step=3\)"),
    ],
)
def test_whole_groups_that_move_nothing_or_are_too_few_are_refused(keys: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config("tiny_cpu", ["train.minibatch_by_group=true", *keys])


# When a reference that follows the policy takes its weights, and where it is from at a start and at a resume.
FOLLOWS = ("algorithm=grpo", "algorithm.kl.coefficient=0.1", "algorithm.kl.reference_update_rate=0.25")


async def heard(folder: Path, *keys: str, fresh: bool) -> tuple[list[Any], list[Any], list[Any]]:
    """What the policy is asked for the reference in two steps, and the reference but for scores; and the ages in the
    rows."""
    config = load_config("tiny_cpu", [*BASE, *FOLLOWS, *keys])
    policy, reference = (Toy(table(VOCABULARY, VOCABULARY, seed=seed)) for seed in (1, 3))
    engine = ToyEngine(policy, STARTED)
    roles: Any = RunComponents(
        learners={"policy": policy},
        frozen_models={"reference": reference},
        engine=engine,
        weight_sync=ToyWeights(engine),
    )
    rig = Rig(folder, asyncio.get_running_loop())
    job = rig._trainer(config, roles)
    await job.start_models(fresh=fresh)
    rows = [await job.step(STARTED + number, Stopwatch()) for number in (1, 2)]
    await job.close()
    rig.recorder.close()
    led = [call[-1] for call in policy.heard if call[0] == "lead"]
    started = [call for call in reference.heard if call[0] == "start from"]
    assert len(rows) == 2
    return led, started


@pytest.mark.parametrize(
    ("keys", "led"),
    [
        ((), [0.25, 0.25]),
        (("algorithm.kl.reference_update_every=31",), [0.25]),  # after step 62
        (("algorithm.kl.reference_update_rate=1.0", "algorithm.kl.reference_update_every=100"), []),
        (("algorithm.kl.reference_update_rate=1.0", "algorithm.kl.reference_update_every=31"), [1.0]),
        (("algorithm.kl.reference_update_rate=null",), []),
    ],
)
def test_weights_are_taken_when_due(keys: tuple[str, ...], led: list[Any], tmp_path: Path) -> None:
    assert asyncio.run(heard(tmp_path, *keys, fresh=True))[0] == led


@pytest.mark.parametrize(("keys", "loads"), [((), 0), (("algorithm.kl.reference_update_rate=null",), 1)])
def test_a_resume_has_it_from_the_checkpoint(keys: tuple[str, ...], loads: int, tmp_path: Path) -> None:
    """A frozen one is read again from where the run began."""
    assert len(asyncio.run(heard(tmp_path, *keys, fresh=True))[1]) == 1
    assert len(asyncio.run(heard(tmp_path, *keys, fresh=False))[1]) == loads


# ``job=dpo`` with ``dpo.reference_free=true``: steps and held-out pairs without a frozen model or its memory.
NONE = cast(Any, None)
RATE = 0.5
PAIRS = (((1, 2, 3), (1, 4, 5, 6)), ((2, 7), (2, 5, 1)))


def rows() -> list[SupervisedRow]:
    """Prompts of one token, each with a better and a worse answer."""
    return [
        SupervisedRow(id=str(p), token_ids=np.array(side, np.int32), turns=((1, len(side)),))
        for p, pair in enumerate(PAIRS)
        for side in pair
    ]


async def test_a_step_and_held_out_pairs_are_those_of_plain_means_and_no_model_starts() -> None:
    weights = table(VOCABULARY, VOCABULARY, seed=1)
    policy, samples = Toy(weights), supervised_samples(rows())
    job = PairObjective(
        loss=pair_loss(2.0, per_token=True, reference_free=True, target_margin=1.0),
        roles=RunComponents(learners={"policy": policy}, frozen_models={}, engine=NONE, weight_sync=NONE),
        packer=Packer(dims=ParallelDims(), max_tokens=30, attention_cost=0.0, rows_per_unit=2),
        optimizer_steps=OptimizerSteps(name="policy"),
        parts=[samples],
        reference=None,
    )
    watch = Stopwatch()
    await job.begin(fresh=True)
    held_out, made = await job.eval_metrics(), await job.step(samples, RATE, [], watch)
    plain = weights.double().requires_grad_()
    logprobs = plain.log_softmax(-1)
    means = [[sum(logprobs[x, y] for x, y in pairwise(s)) / (len(s) - 1) for s in pair] for pair in PAIRS]
    loss = sum(-logsigmoid(2.0 * (better - worse) - 1.0) for better, worse in means) / 2
    loss.backward()
    assert held_out["eval/loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert made.loss == pytest.approx(loss.item(), rel=1e-6)
    assert (policy.weights - (weights - RATE * plain.grad)).abs().max() < 1e-6
    assert "seconds/reference" not in watch.row()


PROMPTS, ANSWERS = ((1, 2), (3,), (4, 5, 6)), ((7, 8, 9, 10), (1,), (2, 11))
LABELED = (1.5, -0.6, 1.5)  # the weight of each answer, negative where its label is false


@pytest.mark.parametrize(("policy_seed", "reference_seed"), [(1, 2), (2, 1)], ids=["positive z0", "z0 of 0"])
@pytest.mark.parametrize("most", [9, 3])
async def test_answers_with_labels_are_learned_by_trls_kto(
    policy_seed: int, reference_seed: int, most: int, tmp_path: Path
) -> None:
    """Loss, step and held-out figures in float64. z0 is the mean log pi/ref of each prompt with the answer of the row
    before it, of ``most`` positions. Each answer is in a micro-batch of its own, or all are in one."""
    tables = [table(VOCABULARY, VOCABULARY, seed=seed) for seed in (policy_seed, reference_seed)]
    policy, reference = map(Toy, tables)
    rows = [
        SupervisedRow(id="p", token_ids=np.array(p + a, np.int32), turns=((len(p), len(p + a)),), margin=margin)
        for p, a, margin in zip(PROMPTS, ANSWERS, LABELED, strict=True)
    ]
    samples = set_margins(rows)
    plain, frozen = tables[0].double().requires_grad_(), tables[1].double()

    def ratio(prompt: Sequence[int], answer: Sequence[int], most: int = 9) -> torch.Tensor:
        read = (*prompt, *answer)[: most + 1][len(prompt) - 1 :]
        gap = plain.log_softmax(-1) - frozen.log_softmax(-1)
        return torch.stack([gap[x, y] for x, y in pairwise(read)]).sum()

    with torch.no_grad():
        apart = [float(ratio(p, a, most)) for p, a in zip(PROMPTS, (*ANSWERS[-1:], *ANSWERS[:-1]), strict=True)]
    point = max(0.0, sum(apart) / 3)
    assert (point > 0) == (policy_seed == 1)
    ratios = torch.stack([ratio(p, a) for p, a in zip(PROMPTS, ANSWERS, strict=True)])
    signed = torch.tensor(LABELED, dtype=torch.float64)
    margins = 0.7 * signed.sign() * (ratios - point)
    loss = (signed.abs() * (1 - margins.sigmoid())).mean()
    loss.backward()
    loss, margins = loss.detach(), margins.detach()
    for max_tokens in (6, 30):
        policy.weights = tables[0]
        packer = Packer(dims=ParallelDims(), max_tokens=max_tokens, attention_cost=0.0, rows_per_unit=1)
        job = LabeledAnswers(
            loss=KtoLoss(beta=0.7),
            roles=RunComponents(
                learners={"policy": policy}, frozen_models={"reference": reference}, engine=NONE, weight_sync=NONE
            ),
            packer=packer,
            optimizer_steps=OptimizerSteps(name="policy"),
            parts=[samples],
            reference=FrozenReference(packer=packer, folder=tmp_path, start_folder=tmp_path),
            max_length=most,
        )
        await job.begin(fresh=True)
        held_out, made = await job.eval_metrics(), await job.step(samples, RATE, [], Stopwatch())
        assert made is not None
        assert made.loss == pytest.approx(loss.item(), abs=1e-6)
        assert made.loss_metrics["kl/reference"].value == pytest.approx(point, abs=1e-6)
        assert plain.grad is not None
        assert (policy.weights - (tables[0] - RATE * plain.grad)).abs().max() < 1e-6
        figures = {
            "loss": loss,
            "preference_accuracy": (margins > 0).double().mean(),
            "preference_margin": margins.mean(),
        }
        assert held_out == pytest.approx({f"eval/{name}": float(value) for name, value in figures.items()}, abs=1e-6)
        after = await job.eval_metrics()  # of the policy that has learned, by another z0
        assert after["eval/loss"] < held_out["eval/loss"]


def test_a_plan_has_no_memory_of_a_reference() -> None:
    for recipe, keys, without in (
        ("dpo_tiny", (), "dpo.reference_free=true"),
        ("tiny_cpu", ("algorithm=dpo",), "algorithm.preference.reference_free=true"),
    ):
        shape = NAMED["qwen3-30b-a3b"]
        beside, alone = (
            footprints(load_config(recipe, ["model.path=/given", *given]), shape) for given in (keys, (*keys, without))
        )
        assert all(one.terms["reference"] > 0 for one in beside)
        assert [one.terms | {"reference": 0.0} for one in beside] == [one.terms for one in alone]
        assert not load_config(recipe, [*keys, without]).needs_reference
