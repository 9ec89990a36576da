"""What a delta net holds while it computes, counted, and by the plan's formula."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.learner.model.delta.chunks import cut_into_chunks
from rl_megatron.learner.model.delta.rule import convolve, gated_delta_rule
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import DeltaNet
from rl_megatron.options.kept import delta_bytes
from tests.recipes.meter import Meter

TOKENS = 1024


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "ratio", "dk", "dv"), [(4, 2, 32, 48), (2, 2, 128, 128), (2, 1, 16, 16)])
def test_it_holds_what_the_plan_says(dtype: str, heads: int, ratio: int, dk: int, dv: int) -> None:
    m = DeltaNet(key_heads=heads, value_heads=heads * ratio, key_dim=dk, value_dim=dv, kernel=4)
    shape = replace(NAMED["qwen3-30b-a3b"], delta=m, delta_layers=(0,))
    chunks, kind = cut_into_chunks(torch.tensor([0, TOKENS]), gap=3), getattr(torch, dtype)
    x = torch.randn(TOKENS, m.mixed, dtype=kind, requires_grad=True)
    taps = torch.randn(m.mixed, 1, 4, dtype=kind, requires_grad=True)
    g, b = (torch.rand(TOKENS, heads, ratio, requires_grad=True) for _ in range(2))
    with Meter() as meter:
        before = meter.live
        meter.restart()
        q, k, v = convolve(x, taps, chunks).view(TOKENS, heads, -1).split([dk, dk, ratio * dv], -1)
        out = gated_delta_rule(q, k, v.unflatten(-1, (ratio, dv)), -g, b, chunks)
        del q, k, v
        out.backward(torch.ones_like(out))
        held = meter.peak - before
    planned = delta_bytes(LearnerSection.model_validate({"dtype": dtype}), shape, 0)
    assert held / TOKENS == pytest.approx(planned, rel=0.12)
    assert delta_bytes(LearnerSection(), shape, 1) == 0
