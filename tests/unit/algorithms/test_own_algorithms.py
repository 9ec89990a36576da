"""Algorithms of the user's own: the files of the pages beside their papers' equations, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_megatron.algorithms import own
from rl_megatron.algorithms.advantages import group_advantages
from rl_megatron.algorithms.own import check_custom_advantages, check_custom_objective, check_custom_pair_loss
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.algorithm import AlgorithmSection, PreferenceSection
from rl_megatron.config.sections.jobs import DpoSection
from rl_megatron.config.sections.rollout import RolloutSection
from rl_megatron.errors import ConfigError
from rl_megatron.interfaces import RunComponents
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.training.credit import groups_with_gradient
from rl_megatron.training.update import PolicyUpdate
from rl_megatron.types import Loss, LossInputs, Trajectory
from tests.documents import blocks
from tests.property.test_losses_metrics import batch
from tests.rows import changed, pair_loss, policy_loss
from tests.samples import part_of
from tests.toy_roles import VOCABULARY, Toy, table
from tests.unit.algorithms.test_pair_losses import check_equation
from tests.unit.training.test_credit import advantages, group
from tests.unit.training.test_update_oracle import groups

PAGE = Path(__file__).parents[3] / "docs" / "algorithms.md"
LENGTHS = [5, 9, 1, 3, 7, 4]
LOW, HIGH, CAP = 0.2, 0.3, 1.5
OBJECTIVES = {
    "cpgd": policy_loss(objective="cpgd:cpgd", clip_low=LOW, clip_high=HIGH),
    "aspo": policy_loss(objective="aspo:aspo", clip_low=LOW, clip_high=HIGH, cap_high=CAP),
}
BETA = 0.3
PAIRS = {"kto": pair_loss(BETA, loss="kto:kto")}
FAULTY = """
import torch

def none(rewards):
    return rewards / rewards.mean()

def one(rewards):
    return rewards.mean()

def lists(rewards):
    return rewards.tolist()

def raising(rewards):
    raise KeyError("a key")

def above_half(rewards):
    return rewards - 0.5

def of_sixteen(rewards):
    return (rewards.view(4, 4) - rewards.mean()).flatten()

def zero(rewards):
    return 0 * rewards

def beyond_one(rewards):
    return (rewards - 1).clamp(min=0)

def variance_of_bits(rewards):
    mean = rewards.mean()
    return (rewards - mean) / (mean * (1 - mean) + 1e-6).sqrt()

def std(rewards):
    above = rewards - rewards.mean()
    return above / ((above.square().sum() / (len(above) - 1)).sqrt() + 1e-6)

def across(better, worse, beta):
    return (better - worse - (better - worse).mean()) ** 2

def total(better, worse, beta):
    return (better - worse).sum()

def more(better, worse, beta):
    return torch.cat([better - worse, better[:1]])

def whole(log_ratio, inputs, lengths, row):
    columns = (inputs.old_logprobs, inputs.rollout_logprobs, inputs.ref_logprobs, inputs.entropy, inputs.advantages)
    return log_ratio + sum(columns), inputs.mask

def gaps(log_ratio, inputs, lengths, row):
    if (lengths.gt(0) & (lengths < inputs.segment_sum(torch.ones_like(log_ratio)))).any():
        raise KeyError("a gap")
    return log_ratio, inputs.mask

def flat(better, worse, beta):
    return better.detach() - worse.detach()

def two(better, worse):
    return better - worse

def logs(better, worse, beta):
    return torch.log(better - worse)

def of_logprobs(better, worse, beta):
    return torch.log(-better) - torch.log(-worse)

def constant(better, worse, beta):
    return 0 * (better - worse)
"""


@pytest.fixture(autouse=True)
def _mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in blocks(PAGE, "python"):
        name = block.text.removeprefix("# ").partition(":")[0]
        (tmp_path / name).write_text(block.text)
    documented, *_ = blocks(PAGE, "python")
    (tmp_path / "gmpo_of_the_page.py").write_text(documented.text)
    (tmp_path / "faulty.py").write_text(FAULTY)
    (tmp_path / "faulty_objectives.py").write_text(FAULTY_OBJECTIVES)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_the_page_has_one_file_for_each() -> None:
    names = [block.text.partition(".py:")[0].removeprefix("# ") for block in blocks(PAGE, "python")]
    assert names == ["mine", "cpgd", "aspo", "maxrl", "opo", "gfpo", "kto"]


def evaluate(loss: Loss, inputs: LossInputs) -> tuple[float, Tensor]:
    given = inputs.logprobs.detach().clone().requires_grad_()
    output = loss(replace(inputs, logprobs=given))
    return output.loss.item(), torch.autograd.grad(output.loss, given)[0]


def cpgd(now: float, old: float, advantage: float, at: float) -> float:
    """Equation 2, of a token; ``at`` is the log-prob that stop-gradients keep."""
    log_ratio = now - old
    clipped = max(min(log_ratio, math.log(1 + HIGH)), math.log(1 - LOW))
    drift = min(math.exp(at - old) - 1, 2.0) * now
    return -(min(log_ratio * advantage, clipped * advantage) - 0.1 * drift)


def aspo(now: float, old: float, advantage: float, at: float) -> float:
    """-A log pi under the weight that PPO's clip and the flip leave."""
    ratio = math.exp(at - old)
    if (advantage > 0 and ratio > 1 + HIGH) or (advantage <= 0 and ratio < 1 - LOW):
        return 0.0
    return -advantage * (min(1 / ratio, CAP) if advantage > 0 else ratio) * now


@pytest.mark.parametrize(("name", "equation"), [("cpgd", cpgd), ("aspo", aspo)])
@pytest.mark.parametrize("seed", range(3))
def test_objectives_are_their_equations(name: str, equation: Callable[..., float], seed: int) -> None:
    """The mean over trained tokens, and central differences of it, stop-gradients held where they are."""
    inputs = batch(LENGTHS, seed, scale=0.6, kept=0.75)
    now, old, advantages = (x.tolist() for x in (inputs.logprobs, inputs.old_logprobs, inputs.advantages))
    found, gradient = evaluate(OBJECTIVES[name], inputs)
    tokens = [t for t in range(len(now)) if inputs.mask[t]]
    wanted = sum(equation(now[t], old[t], advantages[t], now[t]) for t in tokens) / len(tokens)
    assert found == pytest.approx(wanted, rel=1e-12)
    step, slopes = 1e-6, [0.0] * len(now)
    for t in tokens:
        up, down = (equation(now[t] + sign * step, old[t], advantages[t], now[t]) for sign in (1, -1))
        slopes[t] = (up - down) / (2 * step) / len(tokens)
    torch.testing.assert_close(gradient, torch.tensor(slopes, dtype=torch.float64), rtol=1e-6, atol=1e-8)


def test_cpgd_pulls_back_what_has_gone_too_far_by_no_more_than_its_bound() -> None:
    """An upward token beyond the clip has the drift's gradient alone: min(rho - 1, 2) times alpha."""
    inputs, ratios = batch([3], 0), torch.tensor([1.2, 2.0, 9.0], dtype=torch.float64)
    inputs = replace(inputs, logprobs=inputs.old_logprobs + ratios.log(), advantages=torch.ones(3).double())
    _, gradient = evaluate(OBJECTIVES["cpgd"], inputs)
    assert gradient.tolist() == pytest.approx([(0.02 - 1) / 3, 0.1 / 3, 0.2 / 3])


def test_aspo_weighs_good_tokens_by_the_flipped_ratio_and_bad_ones_by_the_ratio() -> None:
    inputs = batch([6], 0)
    ratios = torch.tensor([0.9, 0.5, 1.4, 0.9, 0.7, 1.4], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    inputs = replace(inputs, logprobs=inputs.old_logprobs + ratios.log(), advantages=advantages)
    _, gradient = evaluate(OBJECTIVES["aspo"], inputs)
    assert (gradient * 6).tolist() == pytest.approx([-1 / 0.9, -CAP, 0, 0.9, 0, 1.4])


@pytest.mark.parametrize("right", [0, 1, 2, 5])
def test_maxrl_is_the_mean_over_right_completions_less_that_over_all(right: int) -> None:
    """Of K right ones of G: the gradient of REINFORCE is that of mean log pi(right) - mean log pi(all)."""
    rewards = [1.0] * right + [0.0] * (5 - right)
    found = advantages_of([rewards, [0.0, 1.0, 0.5], [2.0, 1.0]])
    wanted = [(1 / right if reward else 0.0) * 5 - 1 if right else 0.0 for reward in rewards]
    wanted += [(r - 0.5) / 0.5 for r in (0.0, 1.0, 0.5)] + [(r - 1.5) / 1.5 for r in (2.0, 1.0)]
    assert found == pytest.approx(wanted, rel=1e-6, abs=1e-9)


def test_opo_has_the_baseline_of_least_variance_of_sums_over_tokens() -> None:
    """Of gradients whose squared norms are lengths, sum l (r - b)^2 is least where its slope in b, sum l A, is 0."""
    groups = [([1.0, 0.0, 0.0], [3, 2, 4]), ([0.5, 2.0], [1, 7]), ([1.0, 1.0], [4, 2])]
    rewards, lengths = (torch.tensor([x for group in groups for x in group[part]]) for part in (0, 1))
    ids = torch.tensor([g for g, (of, _) in enumerate(groups) for _ in of])
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"mean": "opo:opo", "std": "none", "leave_one_out": False, "lengths": lengths[order]}
    found = group_advantages(rewards[order], ids[order], **options)[order.argsort()]
    baselines = rewards - found
    for g in range(len(groups)):
        mine = ids == g
        assert float((lengths * found)[mine].sum()) == pytest.approx(0, abs=1e-6)
        assert baselines[mine].tolist() == pytest.approx([float(baselines[mine][0])] * int(mine.sum()))


def test_gfpo_compares_the_shorter_half_of_a_group_alone() -> None:
    """Of six: those of 1, 2 and 3 tokens; of four of equal lengths, the first two. Equal rewards teach nothing."""
    cases = [
        ([1.0, 9.0, 0.0, 0.0, 9.0, 9.0], [1, 7, 3, 2, 9, 8], [2**0.5, 0, -(0.5**0.5), -(0.5**0.5), 0, 0]),
        ([1.0, 0.0, 0.0, 0.0], [5, 5, 5, 5], [1, -1, 0, 0]),
        ([1.0, 0.0, 1.0, 0.0], [2, 8, 1, 9], [0, 0, 0, 0]),
    ]
    for rewards, lengths, wanted in cases:
        options: dict[str, Any] = {"std": "none", "leave_one_out": False, "lengths": torch.tensor(lengths)}
        ids = torch.zeros(len(rewards), dtype=torch.int64)
        found = group_advantages(torch.tensor(rewards), ids, mean="gfpo:gfpo", **options)
        assert found.tolist() == pytest.approx(wanted, abs=1e-5)


def advantages_of(groups: Sequence[Sequence[float]]) -> list[float]:
    """Of groups that are interleaved in the batch."""
    ids = [g for g, rewards in enumerate(groups) for _ in rewards]
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))
    rewards = torch.tensor([reward for group in groups for reward in group])
    found = group_advantages(
        rewards[order], torch.tensor(ids)[order] + 7, mean="maxrl:maxrl", std="none", leave_one_out=False
    )
    return found[order.argsort()].tolist()


def test_updates_by_maxrl_are_those_of_rewards_that_were_made_advantages_by_hand() -> None:
    """Weights of a toy after three steps, a group of four at a time."""
    keys, found = ["algorithm=reinforce", "learner.ep=1", "train.lr_decay=none"], []
    for name, made in (("maxrl:maxrl", list[float]), ("none", by_hand)):
        policy, unused = Toy(table(VOCABULARY, VOCABULARY, seed=1)), Toy(torch.zeros(1))
        roles: Any = RunComponents(learners={"policy": policy}, frozen_models={}, engine=unused, weight_sync=unused)
        config = load_config("tiny_cpu", [*keys, f"algorithm.advantage_mean={name}"])
        update, engine = (
            PolicyUpdate(config=config, roles=roles, attention_cost=0.0),
            table(VOCABULARY, VOCABULARY, seed=4),
        )
        for step in (3, 4, 5):
            judged = [
                replace(g, trajectories=tuple(map(rewarded, g.trajectories, made(g.rewards))))
                for g in groups(step, engine)
            ]
            asyncio.run(update(judged, step, Stopwatch()))
        found.append(policy.weights)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    assert not torch.equal(found[0], table(VOCABULARY, VOCABULARY, seed=1))


def rewarded(one: Trajectory, reward: float) -> Trajectory:
    return replace(one, reward=reward)


def by_hand(rewards: Sequence[float]) -> list[float]:
    mean = statistics.fmean(rewards)
    return [(reward - mean) / mean if mean > 0 else 0.0 for reward in rewards]


def kto(better: float, worse: float) -> float:
    def desirability(reward: float) -> float:
        return 1 / (1 + math.exp(-BETA * reward))

    return ((1 - desirability(better)) + (1 - desirability(-worse))) / 2


@pytest.mark.parametrize(("name", "equation"), [("kto", kto)])
@pytest.mark.parametrize("per_token", [False, True], ids=["sums", "means"])
def test_pair_losses_are_their_equations(name: str, equation: Callable[..., float], per_token: bool) -> None:
    check_equation(pair_loss(BETA, loss=f"{name}:{name}", per_token=per_token), equation)


@pytest.mark.parametrize("loss", [*OBJECTIVES.values(), *PAIRS.values()], ids=[*OBJECTIVES, *PAIRS])
def test_micro_batches_add_up(loss: Loss) -> None:
    """Three of two sequences each, under the whole batch's denominators."""
    inputs = batch(LENGTHS, 3, scale=0.6, kept=0.75)
    whole, gradient = evaluate(loss, inputs)
    found = [evaluate(loss, part_of(inputs, first, first + 2)) for first in range(0, 6, 2)]
    assert sum(one for one, _ in found) == pytest.approx(whole, rel=1e-12)
    torch.testing.assert_close(torch.cat([slopes for _, slopes in found]), gradient, rtol=1e-12, atol=0)


def test_the_files_of_the_page_are_not_refused() -> None:
    for given in ({"objective": "cpgd:cpgd"}, {"objective": "aspo:aspo", "cap_high": 3.0}):
        check_custom_objective(AlgorithmSection.model_validate(given))
    for name in ("maxrl", "opo", "gfpo"):
        row = AlgorithmSection(advantage_mean=f"{name}:{name}", advantage_std="none")
        check_custom_advantages(row, RolloutSection())
    for name in PAIRS:
        check_custom_pair_loss(DpoSection(loss=f"{name}:{name}"))


def test_an_objective_is_tried_with_sequences_that_are_masked_in_part() -> None:
    with pytest.raises(ConfigError, match="raised KeyError: 'a gap'"):
        check_custom_objective(AlgorithmSection.model_validate({"objective": "faulty:gaps"}))


def test_every_column_that_an_objective_is_tried_with_is_finite() -> None:
    check_custom_objective(AlgorithmSection.model_validate({"objective": "faulty:whole", "kl": {"coefficient": 0.1}}))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("faulty:nothing", "'nothing' of faulty is not there"),
        ("faulty:across", "so they would change with the packing"),
        ("faulty:total", "must return one finite loss for each of 4 pairs"),
        ("faulty:more", "must return one finite loss for each of 4 pairs"),
        ("faulty:flat", r"does not require grad.*it must take \(better, worse, beta\)"),
        ("faulty:two", r"takes 2 positional arguments but 3 were given; it must take \(better, worse, beta\)"),
        ("faulty:logs", "one finite loss for each of 4 pairs, with finite derivatives"),
        ("faulty:constant", "its losses have no gradient"),
    ],
)
def test_pair_losses_that_cannot_train_are_refused(name: str, reason: str) -> None:
    for section in (DpoSection(loss=name), PreferenceSection(loss=name, beta=0.1, reference_free=True)):
        with pytest.raises(ConfigError, match=rf"(?s){section.key}\.loss=.*{reason}"):
            check_custom_pair_loss(section)


def test_a_pair_loss_of_log_probs_is_tried_below_0() -> None:
    """Of ratios to a reference it would have a logarithm of a negative number."""
    with pytest.raises(ConfigError, match="must return one finite loss"):
        check_custom_pair_loss(DpoSection(loss="faulty:of_logprobs"))
    check_custom_pair_loss(DpoSection(loss="faulty:of_logprobs", reference_free=True))


def test_a_pair_of_padding_does_not_reach_a_loss_that_is_not_finite_at_0() -> None:
    """Two of the three pairs have a trained token on each side; of the third log(0) would be in the sum."""
    inputs = batch([2, 2, 2, 2, 2, 2], 3)
    inputs = replace(inputs, logprobs=inputs.logprobs - 2, mask=inputs.segment_ids < 4, num_sequences=4)
    found, gradient = evaluate(pair_loss(BETA, loss="faulty:of_logprobs", reference_free=True), inputs)
    sums = [float(inputs.logprobs.detach()[2 * s : 2 * s + 2].sum()) for s in range(4)]
    assert found == pytest.approx((math.log(sums[0] / sums[1]) + math.log(sums[2] / sums[3])) / 2)
    assert gradient.isfinite().all()


def test_names_that_are_neither_known_nor_of_ones_own_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"advantage_mean='mode': must be .* or package.module:name of your own code"):
        load_config("tiny_cpu", ["algorithm.advantage_mean=mode"])


# The trial of advantages of the user's own before a run: what is refused and warned of, and which groups teach.
ONE = "rollout.group_size=1"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("faulty:nothing", "'nothing' of faulty is not there"),
        ("faulty:none", r"of a group's rewards \[0.0, (0.0, )*0.0\], must return .* finite advantages; it returned \["),
        ("faulty:one", "must return a tensor of as many finite advantages; it returned 0.25"),
        ("faulty:lists", "it returned list"),
        ("faulty:raising", "raised KeyError: 'a key'"),
    ],
)
def test_advantages_that_cannot_train_are_refused_where_the_update_is_made(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.advantage_mean=.*{reason}"):
        made(name)


def made(name: str, *more: str) -> None:
    """An update of such advantages."""
    config = load_config("tiny_cpu", ["algorithm=reinforce", f"algorithm.advantage_mean={name}", *more])
    PolicyUpdate(
        config=config,
        roles=RunComponents(learners={}, frozen_models={}, engine=None, weight_sync=None),
        attention_cost=0.0,
    )  # type: ignore[arg-type]


GAP = ["algorithm.kl.coefficient=0.1", "algorithm.kl.estimator=k1", "algorithm.kl.placement=completion_reward"]
TURNS = ["environment.function=calculator", "environment.template=plain", "algorithm.credit=turn"]


@pytest.mark.parametrize(
    ("name", "keys", "refused"),
    [
        ("maxrl:maxrl", [ONE], True),
        ("maxrl:maxrl", [ONE, *TURNS], False),
        ("maxrl:maxrl", [ONE, *TURNS, "algorithm.turn_baseline=index"], True),
        ("maxrl:maxrl", [ONE, *GAP], False),
        ("maxrl:maxrl", ["rollout.group_size=2"], False),
        ("faulty:above_half", [ONE], False),
        ("faulty:of_sixteen", ["rollout.group_size=16"], False),
        ("faulty:zero", [], True),
        ("faulty:beyond_one", [], False),
    ],
)
def test_advantages_all_0_in_groups_of_the_runs_size_are_refused(name: str, keys: list[str], refused: bool) -> None:
    said = rf"advantage_mean={name}: all advantages are 0 in groups of rollout.group_size=.* so nothing is trained"
    with pytest.raises(ConfigError, match=said) if refused else contextlib.nullcontext():
        made(name, *keys)


@pytest.mark.parametrize(
    ("name", "keys", "told"),
    [
        ("maxrl:maxrl", [], []),
        ("faulty:variance_of_bits", ["rollout.group_size=4"], ["-0.5, -0.5, -0.5, -0.5"]),
        ("faulty:std", [], []),
        ("faulty:std", TURNS, ["rewards [0.0]"]),
    ],
)
def test_groups_that_a_run_may_not_have_are_warned_of_and_not_refused(
    caplog: pytest.LogCaptureFixture, name: str, keys: list[str], told: list[str]
) -> None:
    made(name, *keys)
    said = [text for text in caplog.messages if "a run with such rewards would end there" in text]
    assert bool(said) == bool(told)
    assert all(one in "".join(said) for one in told)


def test_the_function_says_which_groups_teach() -> None:
    sampled = [group("a", [1.0, 1.0], [2, 2]), group("b", [0.5, 0.5], [2, 2]), group("c", [1.0, 0.5], [2, 2])]

    def teach(**section: object) -> list[bool]:
        row = AlgorithmSection.model_validate(
            {"advantage_mean": "faulty:above_half", "advantage_std": "none", **section}
        )
        return groups_with_gradient(sampled, row, max_new_tokens=4)

    assert teach() == [True, False, True]
    assert teach(advantage_std="group") == [False, False, True]
    assert teach(advantage_mean="faulty:beyond_one") == [False, False, False]


def test_a_function_of_lengths_gets_those_of_completions_and_of_turns() -> None:
    """Dynamic sampling asks it too, of the same lengths."""
    sampled = [group("a", [1.0, 0.0, 0.5], [2, 3, 1]), group("b", [0.5, 0.5], [2, 1])]
    section, of_a = {"advantage_mean": "opo:opo", "advantage_std": "none"}, 2.5 / 6
    for credit in ("completion", "turn"):
        found = advantages(9, sampled, credit=credit, **section)
        assert [one[0] for one in found] == pytest.approx([1 - of_a, -of_a, 0.5 - of_a, 0.0, 0.0], abs=1e-7)
        row = AlgorithmSection.model_validate({"credit": credit, **section})
        assert groups_with_gradient(sampled, row, max_new_tokens=9) == [True, False]
    made("opo:opo")


# An objective of the user's own: the page's GMPO beside the row, and what is refused before a run.
FAULTY_OBJECTIVES = """
import torch

def none(inputs):
    return torch.zeros_like(inputs.mask)

def not_a_function_of(log_ratio, inputs):
    return log_ratio, inputs.mask

def raising(log_ratio, inputs, lengths, row):
    raise KeyError("a key")

def one_number(log_ratio, inputs, lengths, row):
    return -(log_ratio * inputs.advantages).mean(), none(inputs)

def no_limits(log_ratio, inputs, lengths, row):
    return -log_ratio.exp() * inputs.advantages

def wide(log_ratio, inputs, lengths, row):
    return -log_ratio.double(), none(inputs)

def roots(log_ratio, inputs, lengths, row):
    return -log_ratio.square().sqrt() * inputs.advantages, none(inputs)

def logs(log_ratio, inputs, lengths, row):
    return -log_ratio.exp() * inputs.advantages.abs().log(), none(inputs)

def detached(log_ratio, inputs, lengths, row):
    return -log_ratio.detach().exp() * inputs.advantages, none(inputs)

def across(log_ratio, inputs, lengths, row):
    return -(log_ratio - log_ratio.mean()).exp() * inputs.advantages, none(inputs)

def summed(log_ratio, inputs, lengths, row):
    return -inputs.segment_sum(log_ratio)[inputs.segment_ids], none(inputs)

def quadratic(log_ratio, inputs, lengths, row):
    return -inputs.advantages * log_ratio + log_ratio.square() * row.cap_low, none(inputs)

def tempered(log_ratio, inputs, lengths, row):
    return -inputs.advantages * log_ratio * row.parameters["tau_positive"], none(inputs)

def plain(log_ratio, inputs, lengths, row):
    return -inputs.advantages * inputs.logprobs, none(inputs)

def here(log_ratio, inputs, lengths, row):
    sums = torch.zeros_like(lengths).index_add_(0, inputs.segment_ids, log_ratio.detach())
    return -(log_ratio + sums[inputs.segment_ids]) * inputs.advantages, none(inputs)

def so_far(log_ratio, inputs, lengths, row):
    ids = inputs.segment_ids
    before = torch.cat([ids[:1] - 1, ids[:-1]])
    sums = inputs.segment_sum((ids == before) * log_ratio.detach().roll(1))
    return -(log_ratio + sums[ids]) * inputs.advantages, none(inputs)

def more_often(log_ratio, inputs, lengths, row):
    if len(inputs.mask) < 13 and len(lengths) > 1:
        inputs.segment_sum(log_ratio.detach())
    return -log_ratio * inputs.advantages, none(inputs)

def less_often(log_ratio, inputs, lengths, row):
    if len(inputs.mask) == 13:
        inputs.segment_sum(log_ratio.detach())
    return -log_ratio * inputs.advantages, none(inputs)

number = 1.0
"""


@pytest.mark.parametrize("clips", [(0.3297, 0.4918), (0.05, 0.1)])
def test_the_documented_gmpo_is_the_row_to_the_bit(clips: tuple[float, float]) -> None:
    """Loss, gradient and metrics, in the dtypes of tests and of runs."""
    keys = {"aggregation": "seq_mean_token_mean", "clip_low": clips[0], "clip_high": clips[1]}
    known = policy_loss(objective="gmpo", **keys)
    for dtype in (torch.float32, torch.float64):
        found = []
        for loss in (known, changed(known, objective="gmpo_of_the_page:gmpo")):
            inputs = batch([5, 9, 1, 3, 7, 4], 3, scale=0.6, dtype=dtype, kept=0.75)
            given = inputs.logprobs.detach().clone().requires_grad_()
            output = loss(replace(inputs, logprobs=given))
            found.append((output, torch.autograd.grad(output.loss, given)[0]))
        (here, slope), (own, its) = found
        assert torch.equal(here.loss, own.loss)
        assert torch.equal(slope, its)
        assert slope.any()
        assert all(torch.equal(here.metrics[name].value, own.metrics[name].value) for name in here.metrics)


def test_updates_by_the_documented_gmpo_are_the_rows_to_the_bit() -> None:
    """Weights after three steps of two epochs, so that ratios are clipped."""
    keys = ["train.minibatches=1", "train.epochs=2", "train.learning_rate=20.0", "learner.ep=1", "train.lr_decay=none"]
    own = "algorithm.objective=gmpo_of_the_page:gmpo"
    found = [trained(load_config("tiny_cpu", ["algorithm=gmpo", *keys, *more])) for more in ([], [own])]
    assert torch.equal(*(weights for weights, _ in found))
    assert found[0][1] == found[1][1]
    assert max(found[0][1]) > 0


def trained(config: RunConfig) -> tuple[torch.Tensor, list[float]]:
    """A toy's weights, and the share of clipped tokens in each step."""
    policy, unused = Toy(table(VOCABULARY, VOCABULARY, seed=1)), Toy(torch.zeros(1))
    roles: Any = RunComponents(learners={"policy": policy}, frozen_models={}, engine=unused, weight_sync=unused)
    update, engine = PolicyUpdate(config=config, roles=roles, attention_cost=0.0), table(VOCABULARY, VOCABULARY, seed=4)
    rows = [asyncio.run(update(groups(step, engine), step, Stopwatch())) for step in (3, 4, 5)]
    return policy.weights, [float(row["clip_fraction"] or 0) for row in rows]


@pytest.mark.parametrize(
    ("name", "keys", "reason"),
    [
        ("faulty_objectives:nothing", {}, "'nothing' of faulty_objectives is not there"),
        ("faulty_objectives:number", {}, "is not a function"),
        ("not_a_module:gmpo", {}, "no module 'not_a_module'; install it or put its folder on PYTHONPATH"),
        ("faulty_objectives:not_a_function_of", {}, r"must take \(log_ratio, inputs, lengths, row\): too many"),
        ("faulty_objectives:raising", {}, "tried before the run, raised KeyError: 'a key'"),
        ("faulty_objectives:one_number", {}, r"13 positions; it returned \[\(torch.Size\(\[\]\)"),
        ("faulty_objectives:no_limits", {}, r"it returned \[\(torch.Size\(\[13\]\), torch.float32\)\]"),
        ("faulty_objectives:wide", {}, r"it returned \[\(torch.Size\(\[13\]\), torch.float64\)"),
        ("faulty_objectives:roots", {}, "gives a gradient of nan at log-ratio 0 and advantage 0.8"),
        ("faulty_objectives:logs", {}, "gives a loss of inf at log-ratio 0 and advantage 0, outside the mask"),
        ("faulty_objectives:detached", {}, "its losses have no gradient"),
        ("gmpo_of_the_page:gmpo", {"ratio_level": "sequence_sum"}, "unless algorithm.ratio_level is sequence_sum"),
        ("faulty_objectives:across", {}, "alone and .* with others in the micro-batch, so it would change with the"),
        ("faulty_objectives:summed", {}, r"ValueError: a sum over a sequence .* give it values.detach\(\)"),
        ("faulty_objectives:quadratic", {"clip_low": 0.1}, r"clip_low=0.1 does nothing: .*:quadratic does not read it"),
        ("faulty_objectives:tempered", {"parameters": {"rate_positive": 9.0}}, "rate_positive=9 does nothing"),
        ("faulty_objectives:plain", {"ratio_level": "sequence"}, "ratio_level=sequence does nothing"),
        ("gmpo_of_the_page:gmpo", {"dual_clip": 3.0}, "dual_clip=3 does nothing.*set it to its default, null"),
    ],
)
def test_what_cannot_train_is_refused_before_the_run(name: str, keys: dict[str, object], reason: str) -> None:
    row = AlgorithmSection.model_validate({"objective": name, **keys})
    with pytest.raises(ConfigError, match=rf"(?s)algorithm\..*{reason}"):
        check_custom_objective(row)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("gmpo_of_the_page:gmpo", {"clip_low": 0.1, "clip_high": 0.5}),
        ("gmpo_of_the_page:gmpo", {"ratio_level": "turn"}),
        ("faulty_objectives:quadratic", {"cap_low": 0.1, "ratio_level": "sequence"}),
        ("faulty_objectives:tempered", {"parameters": {"tau_positive": 2.0}, "ratio_level": "sequence"}),
        ("faulty_objectives:plain", {}),
    ],
)
def test_what_can_train_is_not_refused(name: str, keys: dict[str, object]) -> None:
    check_custom_objective(AlgorithmSection.model_validate({"objective": name, **keys}))


def test_a_loss_of_the_wrong_sign_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    body = "(log_ratio.exp() * inputs.advantages), inputs.mask & False"
    signs = {"falls": "", "rises": "-"}
    lines = (f"def {name}(log_ratio, inputs, lengths, row):\n    return {sign}{body}\n" for name, sign in signs.items())
    (tmp_path / "signs_for_test.py").write_text("".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    for name in signs:
        check_custom_objective(AlgorithmSection(objective=f"signs_for_test:{name}"))
    (record,) = caplog.records
    assert record.getMessage().startswith("algorithm.objective=signs_for_test:falls lowers the log-probs of all tokens")


@pytest.mark.parametrize("name", ["here", "so_far", "more_often", "less_often"])
def test_what_would_change_with_the_context_parallel_degree_is_refused_above_one(name: str) -> None:
    row = AlgorithmSection(objective=f"faulty_objectives:{name}")
    check_custom_objective(row, cp=1)
    with pytest.raises(ConfigError, match=rf"faulty_objectives:{name}.* with learner\.cp=2.* part of (a|the) sequence"):
        check_custom_objective(row, cp=2)


@pytest.mark.parametrize("level", ["token", "sequence", "turn"])
def test_sums_over_ranks_are_taken_for_those_of_the_whole_sequence(level: str) -> None:
    """Of the lengths, of the ratio's level and of the objective itself."""
    row = AlgorithmSection.model_validate(
        {"objective": "gmpo_of_the_page:gmpo", "ratio_level": level, "aggregation": "seq_mean_token_mean"}
    )
    check_custom_objective(row, cp=2)


def test_it_is_tried_on_what_a_run_may_give() -> None:
    """Log-probs of an engine are near the old ones, a reference's not far; one of four sequences trains no token,
    and one has the advantage of equal rewards, by which an objective may divide."""
    for inputs in own._make_micro_batches(AlgorithmSection.model_validate({"kl": {"coefficient": 0.1}})):
        assert float((inputs.rollout_logprobs - inputs.old_logprobs).abs().max()) < 0.1
        assert float((inputs.ref_logprobs - inputs.old_logprobs).abs().max()) < 1.5
        assert inputs.segment_ids[inputs.mask].unique().tolist() == [0, 1, 3]
        assert inputs.advantages[inputs.mask].sign().unique().tolist() == [-1, 0, 1]


@pytest.mark.parametrize(
    ("name", "keys", "reason"),
    [
        ("across", [], "so it would change with the packing"),
        ("here", ["learner.cp=2", "learner.ep=1"], "with learner.cp=2: a token's loss"),
    ],
)
def test_it_is_tried_where_the_update_is_made(name: str, keys: list[str], reason: str) -> None:
    config = load_config("tiny_cpu", ["algorithm=grpo", f"algorithm.objective=faulty_objectives:{name}", *keys])
    with pytest.raises(ConfigError, match=reason):
        PolicyUpdate(
            config=config,
            roles=RunComponents(learners={}, frozen_models={}, engine=None, weight_sync=None),
            attention_cost=0.0,
        )  # type: ignore[arg-type]


def test_keys_that_are_not_of_an_objective_are_refused_as_before() -> None:
    with pytest.raises(ConfigError, match=r"lam=0.5 does nothing"):
        load_config("tiny_cpu", ["algorithm=grpo", "algorithm.objective=mine:f", "algorithm.lam=0.5"])


def test_what_is_neither_known_nor_of_ones_own_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be 'clip', .* or package.module:name of your own code"):
        load_config("tiny_cpu", ["algorithm.objective=clp"])
