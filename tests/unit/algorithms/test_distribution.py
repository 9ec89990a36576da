"""kl.estimator=top_k: the divergence to a teacher over its most probable tokens and one bucket of all others, beside
plain loops in float64 and finite differences."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rl_megatron.algorithms.kl import divergence
from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError
from rl_megatron.learner.heads import logits_of, top_tokens
from tests.property.test_losses_metrics import batch
from tests.rows import policy_loss

POSITIONS, VOCABULARY = 5, 11
BETAS = (0.0, 0.1, 0.5, 1.0)


def logits(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return 2 * torch.randn(POSITIONS, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=dtype)


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
    x = logits_of(of_student, tokens, vocab_start=0, group=None)
    return divergence(x - of_student.logsumexp(-1, keepdim=True), ref, beta=beta)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("k", [1, 4, 10])
def test_the_others_are_one_bucket(k: int, beta: float) -> None:
    student, teacher = logits(0), logits(1)
    found = bucketed(student, teacher, k, beta).tolist()
    for t in range(POSITIONS):
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
        for t in range(POSITIONS)
    ]
    assert found == pytest.approx(wanted, abs=1e-6, rel=1e-6)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("k", [3, VOCABULARY])
def test_the_gradient_is_that_of_finite_differences(k: int, beta: float) -> None:
    student, teacher = logits(4).requires_grad_(), logits(5)
    (gradient,) = torch.autograd.grad(bucketed(student, teacher, k, beta).sum(), student)
    step = 1e-5
    for t in range(POSITIONS):
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
        (["algorithm=distill", "algorithm.kl.estimator=top_k"], "is no reward of the one that was; set kl.placement"),
        (["algorithm=gkd", "algorithm.kl.importance_weighted=false"], "importance_weighted=false does nothing"),
        (["algorithm=distill", "algorithm.kl.top_k=8"], "kl.top_k=8 does nothing.*estimator=top_k does"),
        (["algorithm=gkd", "learner.head_dtype=float32"], "learner.head_dtype=float32 with algorithm.kl.estimator"),
    ],
)
def test_what_it_cannot_use_is_refused(keys: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config("tiny_cpu", keys)
