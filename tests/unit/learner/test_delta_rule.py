"""The gated delta rule over packed sequences: each is transformers' alone, and gradients are finite differences."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import (
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from rl_megatron.learner.model.delta.chunks import cut_into_chunks
from rl_megatron.learner.model.delta.rule import convolve, gated_delta_rule

HEADS, RATIO, DK, DV = 2, 3, 5, 4


def starts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def inputs(lengths: Sequence[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g, n = torch.Generator().manual_seed(3), sum(lengths)
    q, k = (torch.randn(n, HEADS, DK, generator=g, dtype=dtype) for _ in range(2))
    v = torch.randn(n, HEADS, RATIO, DV, generator=g, dtype=dtype)
    decay = -F.softplus(torch.randn(n, HEADS, RATIO, generator=g, dtype=dtype))
    return [q, k, v, decay, torch.rand(n, HEADS, RATIO, generator=g, dtype=dtype)]


@pytest.mark.parametrize("rule", [torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule])
@pytest.mark.parametrize("size", [4, 64])
@pytest.mark.parametrize("lengths", [(9, 1, 17, 0, 8, 4), (130, 64, 65, 1)])
def test_each_packed_sequence_is_transformers_alone(rule: object, size: int, lengths: Sequence[int]) -> None:
    given = inputs(lengths)
    found = gated_delta_rule(*given, cut_into_chunks(starts(lengths), gap=3, size=size))
    for q, k, v, g, b, out in zip(*(x.split(list(lengths)) for x in (*given, found)), strict=True):
        if len(q):
            heads = [x.repeat_interleave(RATIO, 1)[None] for x in (q, k)]
            flat = [x.flatten(1, 2)[None] for x in (v, g, b)]
            wanted, _ = rule(*heads, flat[0], g=flat[1], beta=flat[2], use_qk_l2norm_in_kernel=True)  # type: ignore[operator]
            torch.testing.assert_close(out.flatten(1, 2), wanted[0], atol=2e-6, rtol=1e-4)


def test_gradients_are_finite_differences() -> None:
    lengths = (5, 3)
    chunks = cut_into_chunks(starts(lengths), gap=3, size=2)
    given = [x.requires_grad_() for x in inputs(lengths, torch.float64)]
    assert torch.autograd.gradcheck(lambda *x: gated_delta_rule(*x, chunks), given)
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    weight = torch.randn(6, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: convolve(a, b, chunks), [x, weight])


def test_the_convolution_sees_its_own_sequence_alone() -> None:
    lengths = [9, 1, 0, 2, 17]
    x = torch.randn(sum(lengths), 6, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(6, 1, 4, generator=torch.Generator().manual_seed(2))
    found = convolve(x, weight, cut_into_chunks(starts(lengths), gap=3))
    for part, out in zip(x.split(lengths), found.split(lengths), strict=True):
        if len(part):
            wanted = causal_conv1d_fn(part.t()[None], weight.squeeze(1), None, activation="silu")
            torch.testing.assert_close(out, wanted[0].t())


def test_a_strong_decay_and_many_chunks_stay_finite() -> None:
    q, k, v, _, b = (x.requires_grad_() for x in inputs((700, 300)))
    decay = torch.full_like(b, -40.0).requires_grad_()
    gated_delta_rule(q, k, v, decay, b, cut_into_chunks(starts((700, 300)), gap=3)).square().sum().backward()
    assert all(bool(x.grad.isfinite().all()) for x in (q, k, v, decay, b) if x.grad is not None)
    assert q.grad is not None
