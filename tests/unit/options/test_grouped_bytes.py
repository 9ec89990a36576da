"""What experts that are multiplied by in one call hold, counted, and by the plan's formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.learner.model.experts import FusedExperts
from rl_megatron.learner.model.kernels import grouped
from rl_megatron.models.shape import ModelShape
from rl_megatron.options.implementation import multiplies_at_once
from rl_megatron.options.kept import halves
from rl_megatron.scaling.layers.peaks import _experts
from tests.recipes.meter import Meter
from tests.small_models import TINY_MOE

TOKENS = 1024
GPU = LearnerSection.model_validate({"device": "cuda", "dtype": "bfloat16", "layers": "torch"})
CPU = GPU.model_copy(update={"device": "cpu"})
SHAPES = {
    "apart": TINY_MOE,
    "stacked": replace(TINY_MOE, stacked_experts=True),
    "with biases": replace(TINY_MOE, expert_bias=True, clamped_swiglu=7.0),
}
Compute = Callable[[list[int], Tensor, Tensor], Tensor]


def computing(shape: ModelShape) -> Compute:
    """An expert layer of random weights."""
    n, h, f = shape.num_experts, shape.hidden_size, shape.expert_width
    if shape.expert_bias:
        layer: Any = FusedExperts.__new__(FusedExperts)
        torch.nn.Module.__init__(layer)
        layer.limit = shape.clamped_swiglu
        sizes = {"gate_up_proj": (n, h, 2 * f), "gate_up_proj_bias": (n, 2 * f), "down_proj": (n, f, h)}
        for name, size in {**sizes, "down_proj_bias": (n, h)}.items():
            layer.register_parameter(name, torch.nn.Parameter(torch.randn(size, dtype=torch.bfloat16)))
        return lambda counts, x, probs: layer._together(counts, x, probs)
    fc1, fc2 = (torch.randn(n, *size, dtype=torch.bfloat16) for size in ((2 * f, h), (h, f)))
    if shape.stacked_experts:
        given: Any = fc1.requires_grad_(), fc2.requires_grad_()
    else:
        given = [[one.clone().requires_grad_() for one in some] for some in (fc1, fc2)]
    return lambda counts, x, probs: grouped.grouped_mlp(x, probs, counts, *given, recompute=False)


@pytest.mark.parametrize(("width", "etp"), [(32, 1), (12, 1), (20, 1), (24, 1), (24, 2), (88, 2), (96, 2)])
@pytest.mark.parametrize("generation", [8, 9, 10, 12])
def test_what_is_planned_is_what_the_learner_does(
    width: int, etp: int, generation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Hopper and Blackwell; torch has no kernel for others."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (generation, 0))
    rows: Any = MagicMock(is_cuda=True, dtype=torch.bfloat16, __len__=lambda self: 5)
    fc1 = torch.empty(2 * width // etp, TINY_MOE.hidden_size), torch.empty(TINY_MOE.hidden_size, width // etp)
    planned = multiplies_at_once(GPU.model_copy(update={"etp": etp}), replace(TINY_MOE, expert_width=width))
    assert grouped.takes(rows, *fc1) == (planned and generation in (9, 10))


@pytest.mark.parametrize("width", [32, 128])
@pytest.mark.parametrize("name", SHAPES)
def test_they_hold_what_the_plan_says(name: str, width: int) -> None:
    shape = replace(SHAPES[name], expert_width=width)
    compute, rows = computing(shape), TOKENS * shape.experts_per_token
    x = torch.randn(rows, shape.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    probs = torch.rand(rows, requires_grad=True)
    with Meter() as meter:
        before = meter.live
        out = compute([rows // shape.num_experts] * shape.num_experts, x, probs)
        kept = meter.live - before
        toward = torch.ones_like(out)
        before = meter.live
        meter.restart()
        out.backward(toward)
        held = meter.peak - before
    each = x.nbytes
    planned = _experts(GPU, shape, SimpleNamespace(tokens=TOKENS), 0)  # type: ignore[arg-type]
    assert held == pytest.approx(planned - each, rel=0.15)  # the output's gradient was there
    if shape.expert_bias:  # one after the other keeps other things
        known = 2 * each + 7 * rows * width * x.itemsize
        more = TOKENS * (halves(GPU, shape, 0)["moe"] - halves(CPU, shape, 0)["moe"])
        assert kept == pytest.approx(known + more, rel=0.05)
