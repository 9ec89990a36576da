"""Attention of long sequences beside torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import rl_megatron.learner.megatron  # noqa: F401  before megatron is imported
from rl_megatron.learner.model.kernels import fused, long
from rl_megatron.learner.model.kernels.long import causal_attention, is_long
from rl_megatron.models import linear

SCALE = 0.3


def of_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)
    return out.transpose(1, 2)


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("width", [8, 12])
@pytest.mark.parametrize("length", [1, 16, 37])
def test_it_is_torchs_in_blocks_of_queries(
    heads: int, width: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "MIN_ONEDNN_FLOPS", 1)  # its products, though they are small
    monkeypatch.setattr(long, "ROWS", 24)  # of 8 or 24 positions: sequences of several blocks, whole and cut
    draw = torch.Generator().manual_seed(0)
    shapes = (2, length, heads, 8), (2, length, 2, 8), (2, length, 2, width)
    given = [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]
    before = [x.detach().clone() for x in given]
    grad = torch.randn(2, length, heads, width, generator=draw)
    found, wanted = causal_attention(*given, SCALE), of_torch(*given)
    torch.testing.assert_close(found, wanted)
    for own, theirs in zip(
        torch.autograd.grad(found, given, grad), torch.autograd.grad(wanted, given, grad), strict=True
    ):
        torch.testing.assert_close(own, theirs)
    assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))


def test_it_is_for_long_sequences_in_float32_where_onednn_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    queries = torch.zeros(1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for leads in (False, True):
            monkeypatch.setattr(linear, "ONEDNN_LEADS", leads)
            assert is_long(queries, long.LEAST) is leads
        assert not is_long(queries, long.LEAST - 1)
        assert not is_long(queries.bfloat16(), long.LEAST)
    finally:
        torch.set_num_threads(threads)
