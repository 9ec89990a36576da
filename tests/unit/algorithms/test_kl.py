"""KL estimators, divergences to a teacher, and metrics of the train-rollout mismatch, in plain loops."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rl_megatron.algorithms.kl import divergence, kl_in_sequence_rewards, kl_in_token_rewards, kl_per_token
from rl_megatron.algorithms.mismatch import mismatch_metrics
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.algorithm import KLSection
from rl_megatron.errors import ConfigError
from rl_megatron.learner.heads import gather_logits, top_tokens
from rl_megatron.types import LossInputs
from tests.property.test_losses_metrics import batch
from tests.rows import policy_loss
from tests.samples import loss_inputs


def inputs(logprobs: torch.Tensor, old: torch.Tensor, mask: torch.Tensor, ref: torch.Tensor) -> LossInputs:
    return loss_inputs([len(old)], mask, logprobs=logprobs, ref_logprobs=ref, old_logprobs=old, rollout_logprobs=old)


def test_placement_in_rewards_of_tokens_and_of_sequences() -> None:
    mask = torch.tensor([True, True, False, True])
    logprobs = torch.tensor([-1.0, -1.0, math.nan, -1.0])
    kl = kl_per_token(logprobs, torch.tensor([-1.5, -2.0, math.inf, -1.0]), mask, estimator="k1")
    assert kl.tolist() == [0.5, 1.0, 0.0, 0.0]
    assert kl_in_token_rewards(torch.eye(4)[3], kl, beta=0.1).tolist() == pytest.approx([-0.05, -0.1, 0, 1])
    summed = kl_in_sequence_rewards(torch.tensor([1.0, 2.0]), kl, torch.tensor([0, 3, 4]), beta=0.1)
    assert summed.tolist() == pytest.approx([0.85, 2.0])


V = 5
LOGITS, *_OTHERS = torch.randn(4, V, generator=torch.Generator().manual_seed(1)).double()
REF, OLD, ROLLOUT = (logits.log_softmax(0) for logits in _OTHERS)


def expected_gradient(section: dict[str, object], sampler: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Of the loss, in the logits of a categorical policy, over all tokens in the proportions of who sampled them."""
    loss = policy_loss(kl_coefficient=1, kl={"coefficient": 1, **section}, correction={"mode": "truncate", "high": 1.1})
    logits, total = LOGITS.clone().requires_grad_(), torch.zeros(V).double()
    for token in range(V):
        here = slice(token, token + 1)
        x = inputs(logits.log_softmax(0)[here], old[here], torch.ones(1, dtype=torch.bool), REF[here])
        (gradient,) = torch.autograd.grad(loss(replace(x, rollout_logprobs=sampler[here])).loss, logits)
        total += sampler[token].exp() * gradient
    return total


def exact_gradient() -> torch.Tensor:
    """Of KL(pi‖ref), by central differences."""

    def kl(logits: torch.Tensor) -> float:
        logp = logits.log_softmax(0)
        return float((logp.exp() * (logp - REF)).sum())

    steps = 1e-5 * torch.eye(V, dtype=torch.float64)
    return torch.tensor([(kl(LOGITS + h) - kl(LOGITS - h)) / 2e-5 for h in steps], dtype=torch.float64)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_weighted_kl_has_the_gradient_of_the_kl_whoever_sampled(estimator: str) -> None:
    """The engine is neither the old policy nor the current one, and a correction bounds the objective's weights."""
    found = expected_gradient({"estimator": estimator}, ROLLOUT, OLD)
    torch.testing.assert_close(found, exact_gradient(), rtol=1e-8, atol=1e-9)


def test_without_weights_only_k2_on_policy_has_the_gradient_of_the_kl() -> None:
    """k1's is zero, so it is refused, as is abs; k3's is that of the other KL, KL(ref‖pi)."""
    logp, exact = LOGITS.log_softmax(0), exact_gradient()
    alike = {"importance_weighted": False}
    torch.testing.assert_close(expected_gradient(alike | {"estimator": "k2"}, logp, logp), exact, rtol=1e-8, atol=1e-9)
    k3 = expected_gradient(alike | {"estimator": "k3"}, logp, logp)
    torch.testing.assert_close(k3, logp.exp() - REF.exp(), rtol=1e-8, atol=1e-9)
    for estimator in ("k1", "abs"):
        keys = ("coefficient=0.1", f"estimator={estimator}", "importance_weighted=false")
        with pytest.raises(ConfigError, match=rf"estimator={estimator} .*: on tokens that the policy samples"):
            load_config("tiny_cpu", [f"algorithm.kl.{key}" for key in keys])


def test_a_second_name_of_an_estimator_is_refused_with_the_first() -> None:
    with pytest.raises(ValueError, match="set k2"):
        KLSection.model_validate({"estimator": "mse"})


# kl.estimator=top_k: the divergence over a teacher's most probable tokens and one bucket, beside plain loops.
NUM_POSITIONS, VOCABULARY = 5, 11
BETAS = (0.0, 0.1, 0.5, 1.0)


def logits(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return 2 * torch.randn(NUM_POSITIONS, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def in_loops(pi: list[float], ref: list[float], beta: float) -> float:
    """Of two lists of probabilities."""

    def kl(p: list[float], q: list[float]) -> float:
        return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)

    if beta in (0, 1):
        return kl(pi, ref) if beta else kl(ref, pi)
    mixed = [beta * b + (1 - beta) * a for a, b in zip(pi, ref, strict=True)]
    return beta * kl(ref, mixed) + (1 - beta) * kl(pi, mixed)


def bucketed(of_student: Tensor, of_teacher: Tensor, k: int, beta: float) -> Tensor:
    """As the learner has it: the teacher names k tokens, of which the student's log-probs are taken."""
    tokens = top_tokens(of_teacher, k, VOCABULARY, 0, None)
    ref = of_teacher.log_softmax(-1).gather(1, tokens)
    x = gather_logits(of_student, tokens, vocab_start=0, group=None)
    return divergence(x - of_student.logsumexp(-1, keepdim=True), ref, beta=beta)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("k", [1, 4, 10])
def test_the_others_are_one_bucket(k: int, beta: float) -> None:
    student, teacher = logits(0), logits(1)
    found = bucketed(student, teacher, k, beta).tolist()
    for t in range(NUM_POSITIONS):
        pi, ref = (x[t].softmax(-1).tolist() for x in (student, teacher))
        order = sorted(range(VOCABULARY), key=lambda v: -ref[v])
        cut = [[*(p[v] for v in order[:k]), sum(p[v] for v in order[k:])] for p in (pi, ref)]
        assert found[t] == pytest.approx(in_loops(*cut, beta), rel=1e-9)


@pytest.mark.parametrize("beta", BETAS)
def test_over_the_whole_vocabulary_it_is_the_divergence_itself(beta: float) -> None:
    student, teacher = logits(2, torch.float32), logits(3, torch.float32)
    found = bucketed(student, teacher, VOCABULARY, beta).tolist()
    wanted = [
        in_loops(student[t].double().softmax(-1).tolist(), teacher[t].double().softmax(-1).tolist(), beta)
        for t in range(NUM_POSITIONS)
    ]
    assert found == pytest.approx(wanted, abs=1e-6, rel=1e-6)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("k", [3, VOCABULARY])
def test_the_gradient_is_that_of_finite_differences(k: int, beta: float) -> None:
    student, teacher = logits(4).requires_grad_(), logits(5)
    (gradient,) = torch.autograd.grad(bucketed(student, teacher, k, beta).sum(), student)
    step = 1e-5
    for t in range(NUM_POSITIONS):
        for v in range(VOCABULARY):
            nudge = torch.zeros_like(student)
            nudge[t, v] = step
            up, down = (bucketed(student.detach() + sign * nudge, teacher, k, beta).sum() for sign in (1, -1))
            assert gradient[t, v].item() == pytest.approx(float(up - down) / (2 * step), abs=1e-7)


def test_sure_policies_stay_finite() -> None:
    """A teacher that is certain of one token, a student of another; the bucket is bounded from below."""
    sure = torch.full((2, VOCABULARY), -200.0)
    sure[0, 0] = sure[1, 1] = 200.0
    for beta in BETAS:
        student = sure.clone().requires_grad_()
        value = bucketed(student, sure.flip(0), 1, beta)
        (gradient,) = torch.autograd.grad(value.sum(), student)
        assert torch.isfinite(value).all()
        assert torch.isfinite(gradient).all()


def test_the_loss_is_its_mean_over_tokens_beside_the_rewards() -> None:
    """Positions outside the mask, where there are zeros or NaN, have no part."""
    inputs = replace(batch([4, 3], 0, kept=0.6), ref_logprobs=None)
    count, generator = len(inputs.mask), torch.Generator().manual_seed(8)
    top, named = (torch.randn(count, VOCABULARY, generator=generator).log_softmax(-1)[:, :4] for _ in range(2))
    top[~inputs.mask] = torch.nan
    inputs = replace(inputs, top_logprobs=top, ref_top=torch.stack([torch.zeros_like(named), named], 1))
    keys: dict[str, object] = {"objective": "reinforce", "aggregation": "token_mean"}
    alone = policy_loss(**keys)(replace(inputs, top_logprobs=None, ref_top=None))
    taught = policy_loss(kl_coefficient=0.3, kl={"coefficient": 0.3, "estimator": "top_k", "beta": 0.2}, **keys)(inputs)
    mean = divergence(top, named, beta=0.2)[inputs.mask].mean()
    assert (taught.loss - alone.loss).item() == pytest.approx(0.3 * mean.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["algorithm=distill", "algorithm.kl.estimator=top_k"], "cannot be a reward of the sampled one"),
        (["algorithm=gkd", "algorithm.kl.importance_weighted=false"], "importance_weighted=false does nothing"),
        (["algorithm=distill", "algorithm.kl.top_k=8"], "kl.top_k=8 does nothing.*estimator=top_k does"),
        (["algorithm=gkd", "learner.head_dtype=float32"], "learner.head_dtype=float32 with algorithm.kl.estimator"),
    ],
)
def test_what_it_cannot_use_is_refused(keys: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config("tiny_cpu", keys)


# Metrics of the train-rollout mismatch, against a loop over tokens.
def test_every_metric_is_that_of_a_loop_over_tokens() -> None:
    chosen = torch.Generator().manual_seed(0)
    lengths = torch.tensor([90, 1, 3, 200, 1, 40])
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    size = int(bounds[-1])
    learner, engine = torch.randn(2, size, generator=chosen)
    mask = torch.rand(size, generator=chosen) < 0.7
    mask[bounds[1] : bounds[2]] = False  # a sequence without a sampled token
    mask[bounds[4] : bounds[5]] = True  # one of a single sampled token
    differences = [float(learner[at]) - float(engine[at]) for at in range(size) if mask[at]]
    before = learner.clone(), engine.clone()
    row = mismatch_metrics(learner, engine, mask, bounds)
    sizes = [abs(d) for d in differences]
    expected = {"mismatch/k1": -sum(differences) / len(differences)}
    expected["kl/rollout"] = sum(math.exp(d) - 1 - d for d in differences) / len(differences)
    expected |= {"mismatch/logprob_abs_mean": sum(sizes) / len(sizes), "mismatch/logprob_abs_max": max(sizes)}
    assert row == pytest.approx(expected, abs=1e-6)
    assert torch.equal(learner, before[0])
    assert torch.equal(engine, before[1])
    assert mismatch_metrics(learner, engine, torch.zeros(size, dtype=torch.bool), bounds) == {}


def test_sums_go_on_from_one_part_of_a_large_batch_to_the_next() -> None:
    """Parts are of half a million positions; every sequence has the same |d| at the same place."""
    length, number = 5000, 250
    of_places = torch.arange(length).float()
    mask = torch.ones(number, length, dtype=torch.bool)
    mask[::2, :100] = False  # prompts
    learner = torch.cat([of_places[: int(row.sum())].new_zeros(length).masked_scatter(row, of_places) for row in mask])
    bounds = torch.arange(0, number * length + 1, length)
    row = mismatch_metrics(-learner, torch.zeros(number * length), mask.view(-1), bounds)
    every = sorted([*range(5000)] * (number // 2) + [*range(4900)] * (number // 2))
    mean = sum(every) / len(every)
    expected = {"mismatch/k1": mean, "mismatch/logprob_abs_mean": mean, "mismatch/logprob_abs_max": every[-1]}
    expected["kl/rollout"] = math.fsum(math.expm1(-min(d, 20)) + min(d, 20) for d in every) / len(every)
    assert row == pytest.approx(expected, rel=1e-12)


def calls(function: Callable[[], object]) -> int:
    """Calls of functions, Python's and C's, that it makes."""
    made: list[str] = []
    sys.setprofile(lambda frame, event, what: made.append(event) if event in ("call", "c_call") else None)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(made)


def test_a_batch_takes_few_operations_however_large_it_is() -> None:
    length = 2**10
    size = 2**5 * length
    learner, engine = torch.randn(2, size)
    mask, bounds = torch.ones(size, dtype=torch.bool), torch.arange(0, size + 1, length)
    assert calls(lambda: mismatch_metrics(learner, engine, mask, bounds)) < 200
