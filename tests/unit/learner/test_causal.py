"""The faster attention of one thread beside torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import rl_megatron.learner.megatron  # noqa: F401  before megatron is imported
from rl_megatron.learner.model.kernels import causal, fused
from rl_megatron.learner.model.kernels.causal import (
    AttentionKernel,
    batched_attention,
    faster_attention,
    long_attention,
)
from rl_megatron.models import linear

SCALE = 0.3


def of_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)
    return out.transpose(1, 2)


@pytest.mark.parametrize("attention", [batched_attention, long_attention])
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("width", [8, 12])
@pytest.mark.parametrize("length", [1, 16, 37])
def test_it_is_torchs_in_blocks_of_queries(
    attention: AttentionKernel, heads: int, width: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "MIN_ONEDNN_FLOPS", 1)  # its products, though they are small
    monkeypatch.setattr(causal, "BATCHED_ROWS", 8)
    monkeypatch.setattr(causal, "ROWS", 24)  # of 8 or 24 positions: sequences of several blocks, whole and cut
    monkeypatch.setattr(causal, "SCORES", 600)  # of 37 positions a block has one or two of the four groups
    draw = torch.Generator().manual_seed(0)
    shapes = (2, length, heads, 8), (2, length, 2, 8), (2, length, 2, width)
    given = [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]
    before = [x.detach().clone() for x in given]
    grad = torch.randn(2, length, heads, width, generator=draw)
    found, wanted = attention(*given, SCALE), of_torch(*given)
    torch.testing.assert_close(found, wanted)
    for own, theirs in zip(
        torch.autograd.grad(found, given, grad), torch.autograd.grad(wanted, given, grad), strict=True
    ):
        torch.testing.assert_close(own, theirs)
    assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))


def test_it_is_for_sequences_in_float32_where_a_library_has_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    queries = torch.zeros(1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        monkeypatch.setattr(linear, "ONEDNN_LEADS", False)
        monkeypatch.setattr(linear, "MKL_IS_WIDE", False)
        assert faster_attention(queries, causal.LONG) is None
        monkeypatch.setattr(linear, "MKL_IS_WIDE", True)
        assert {faster_attention(queries, length) for length in causal.BY_MKL} == {batched_attention}
        assert faster_attention(queries, causal.BY_MKL.start - 1) is None
        assert faster_attention(queries, causal.BY_MKL.stop) is None
        assert faster_attention(queries.bfloat16(), causal.LONG) is None
        monkeypatch.setattr(linear, "MKL_IS_WIDE", False)
        monkeypatch.setattr(linear, "ONEDNN_LEADS", True)
        assert faster_attention(queries, causal.LEAST - 1) is None
        assert (
            faster_attention(queries, causal.LEAST) is faster_attention(queries, causal.LONG - 1) is batched_attention
        )
        assert faster_attention(queries, causal.LONG) is long_attention
        assert faster_attention(queries.bfloat16(), causal.LONG) is None
        torch.set_num_threads(2)
        assert faster_attention(queries, causal.LONG) is None
    finally:
        torch.set_num_threads(threads)
