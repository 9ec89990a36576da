"""Chunked log-probs against torch's own log_softmax: values, entropy and gradient."""

from __future__ import annotations

import pytest
import torch

from rl_megatron.learner.logprobs import token_logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "rows"), [(37, 37), (37, 48)])
@pytest.mark.parametrize("chunk", [3, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_value_entropy_and_gradient_are_those_of_log_softmax(
    dtype: torch.dtype, vocab: int, rows: int, chunk: int, temperature: float
) -> None:
    g = torch.Generator().manual_seed(0)
    logits = (torch.randn(10, rows, generator=g) * 4).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (10,), generator=g)
    weight, entropy_weight = torch.randn(2, 10, generator=g)
    before = logits.detach().clone()

    logprobs, entropy = token_logprobs(logits, targets, temperature=temperature, vocab_size=vocab, chunk=chunk)
    (logprobs * weight).sum().backward(retain_graph=True)
    assert logits.grad is not None
    of_logprobs, logits.grad = logits.grad, None
    (logprobs * weight + entropy * entropy_weight).sum().backward()

    exact = logits.detach().double()[:, :vocab].requires_grad_()
    log_p = (exact / temperature).log_softmax(-1)
    wanted = log_p.gather(1, targets[:, None]).squeeze(1)
    wanted_entropy = -(log_p.exp() * log_p).sum(-1)
    (alone,) = torch.autograd.grad((wanted * weight.double()).sum(), exact, retain_graph=True)
    (wanted * weight.double() + wanted_entropy * entropy_weight.double()).sum().backward()
    assert exact.grad is not None
    rounding = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(logprobs.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), wanted_entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_logprobs[:, :vocab].double(), alone, rtol=rounding, atol=rounding)
    torch.testing.assert_close(logits.grad[:, :vocab].double(), exact.grad, rtol=rounding, atol=rounding)
    assert not logits.grad[:, vocab:].any()
    assert torch.equal(logits.detach(), before)


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]], requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([1, 2]), temperature=1.0, vocab_size=3)
    logprobs.sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert logprobs.tolist() == pytest.approx([-2e4, -1.0986123])
    assert entropy.tolist() == pytest.approx([0.0, 1.0986123])
