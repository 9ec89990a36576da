"""Chunked log-probs against torch's own log_softmax: values, entropy, gradient, and bytes that are held."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.learner import logprobs as module
from rl_megatron.learner.logprobs import head_logprobs, logit_norms, token_logprobs
from rl_megatron.options import head
from rl_megatron.options.head import OutputHead
from rl_megatron.options.option import Elements, Rank
from tests.small_models import TINY_MOE


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


@pytest.mark.parametrize(("vocab", "rows"), [(37, 37), (37, 48)])
@pytest.mark.parametrize("chunk", [3, 64])
def test_norms_are_those_of_the_gradient_in_the_logits(vocab: int, rows: int, chunk: int) -> None:
    """Of float64's autograd, and of the paper's closed form; also of a target that is nearly certain, or nearly
    impossible, where float32's closed form is rounding alone."""
    g = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(10, rows, generator=g) * 4, torch.randint(0, vocab, (10,), generator=g)
    logits[0, targets[0]], logits[1, targets[1]] = 18.0, -200.0
    before = logits.clone()
    cut = {"rows": rows, "temperature": 0.7, "vocab_size": vocab, "chunk": chunk}
    found = logit_norms(logits, targets, lambda x: x, **cut)
    scaled = (logits.double()[:, :vocab] / 0.7).requires_grad_()
    said = scaled.log_softmax(-1).gather(1, targets[:, None])
    (gradient,) = torch.autograd.grad(said.sum(), scaled)
    wanted = gradient.square().sum(1)
    p = scaled.detach().softmax(-1)
    torch.testing.assert_close(wanted, 1 - 2 * said.detach().exp().squeeze(1) + p.square().sum(1), rtol=0, atol=1e-14)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0)
    assert 0 < found[0] < 1e-8  # where 1 - 2 p + the sum of all p² is 0 in float32
    assert torch.equal(logits, before)


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]], requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([1, 2]), temperature=1.0, vocab_size=3)
    logprobs.sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert logprobs.tolist() == pytest.approx([-2e4, -1.0986123])
    assert entropy.tolist() == pytest.approx([0.0, 1.0986123])


def head_case(tokens: int, hidden: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, an output layer's weight, and targets below ``rows``."""
    g = torch.Generator().manual_seed(0)
    states, weight = torch.randn(tokens, hidden, generator=g), torch.randn(rows, hidden, generator=g) / hidden**0.5
    return states.to(dtype), weight.to(dtype), torch.randint(0, rows, (tokens,), generator=g)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("main_grad", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("chunk", "block"), [(3, 16), (64, 8192)])
def test_a_float32_head_is_float64s_within_its_own_rounding(
    dtype: torch.dtype, main_grad: torch.dtype | None, chunk: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WEIGHT_ROWS", block)
    vocab, temperature = 37, 0.7
    states, weight, targets = head_case(10, 64, 48, dtype)
    targets = targets % vocab
    hidden, weight = states.requires_grad_(), torch.nn.Parameter(weight)
    if main_grad is not None:
        weight.main_grad = torch.ones_like(weight, dtype=main_grad)  # type: ignore[attr-defined]
    g = torch.Generator().manual_seed(1)
    of_logprobs, of_entropy = torch.randn(2, 10, generator=g)
    found = head_logprobs(hidden, weight, targets, temperature=temperature, vocab_size=vocab, chunk=chunk)
    (found[0] * of_logprobs + found[1] * of_entropy).sum().backward()

    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    log_p = (exact_hidden @ exact_weight[:vocab].T / temperature).log_softmax(-1)
    wanted = log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)
    (wanted[0] * of_logprobs + wanted[1] * of_entropy).sum().backward()
    plain = token_logprobs(hidden @ weight.T, targets, temperature=temperature, vocab_size=vocab)
    for ours, others, true in zip(found, plain, wanted, strict=True):
        assert (ours - true).abs().max() < 2e-6
        assert dtype == torch.float32 or (others - true).abs().max() > 1e-3
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad.double(), exact_hidden.grad, rtol=rounding[dtype], atol=rounding[dtype])
    of_weight = weight.grad if main_grad is None else weight.main_grad.float() - 1  # type: ignore[attr-defined]
    assert of_weight is not None
    assert weight.grad is None or main_grad is None
    bound = rounding[main_grad or dtype]
    torch.testing.assert_close(of_weight.double(), exact_weight.grad, rtol=bound, atol=bound)


class Held(TorchDispatchMode):
    """Counts the bytes that operations within have made and that are still there, and their most."""

    now = most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage()._cdata for x in args if isinstance(x, Tensor)}
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            if isinstance(one, Tensor) and one.untyped_storage()._cdata not in before:
                storage = one.untyped_storage()
                before.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.gone, storage.nbytes())
        return made

    def gone(self, count: int) -> None:
        self.now -= count


@pytest.mark.parametrize(("dtype", "gradient"), [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16",) * 2])
def test_a_float32_head_holds_the_bytes_of_its_term(dtype: str, gradient: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, hidden, rows, chunk, block = 512, 256, 4096, 32, 128
    for at in (module, head):
        monkeypatch.setattr(at, "WEIGHT_ROWS", block)
    monkeypatch.setattr(head, "LOGITS_TOKENS", chunk)
    states, weight, targets = head_case(tokens, hidden, rows, getattr(torch, dtype))
    states.requires_grad_()
    weight = torch.nn.Parameter(weight)
    weight.main_grad = torch.zeros_like(weight, dtype=getattr(torch, gradient))  # type: ignore[attr-defined]
    with Held() as held:
        found = head_logprobs(states, weight, targets, temperature=1.0, vocab_size=rows, chunk=chunk)
        (found[0] + found[1]).sum().backward()
    none = Elements(dense=0, experts=0)
    rank = Rank(
        stage=0, parameters=none, trained=none, matrices=none, tokens=tokens, layers=(), inputs=(), longest=1, largest=1
    )
    keys = {"head_dtype": "float32", "dtype": dtype, "gradient_dtype": gradient}
    learner = LearnerSection.model_validate(keys)
    shape = replace(TINY_MOE, hidden_size=hidden, vocab_size=rows)
    term = OutputHead().memory(learner, shape, rank, {})["logits"]
    assert held.most + states.nbytes == pytest.approx(term, rel=0.03)
