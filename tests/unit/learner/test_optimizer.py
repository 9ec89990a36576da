"""The state that a fresh optimizer is given so that a checkpoint can be loaded into it."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

import rl_megatron.learner.megatron  # noqa: F401  before megatron is imported
from rl_megatron.learner.optimizer import create_state, reset_moments, step


class FusedAdam(torch.optim.Optimizer):
    """As TransformerEngine's 2.11: its state is known by name, and ``step`` is the group's, if it has parameters."""

    def step(self, closure: Any = None) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        out = super().state_dict()
        known = ("exp_avg", "exp_avg_sq", "master_param")
        for state in out["state"].values():
            for name in state:
                if name not in known:
                    raise KeyError(name)
        return out


@pytest.mark.parametrize(("kind", "counts"), [(FusedAdam, False), (torch.optim.AdamW, True)])
def test_it_is_what_the_optimizer_can_say_again(kind: Any, counts: bool) -> None:
    optimizer = kind([torch.nn.Parameter(torch.ones(3))], {"lr": 0.0}) if kind is FusedAdam else kind([torch.ones(3)])
    create_state(SimpleNamespace(optimizer=optimizer))  # type: ignore[arg-type]
    (state,) = optimizer.state_dict()["state"].values()
    assert {name: tensor.tolist() for name, tensor in state.items() if name != "step"} == {
        "exp_avg": [0.0] * 3,
        "exp_avg_sq": [0.0] * 3,
    }
    assert ("step" in state) is counts


@pytest.mark.parametrize("kind", [FusedAdam, torch.optim.AdamW, HybridDeviceOptimizer])
def test_steps_of_a_stage_without_parameters_are_counted(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint holds the count of rank 0, whose stage may have no adapters. The count goes on after a load."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    named = {"cpu_optimizer_cls": torch.optim.AdamW, "overlap_cpu_optimizer_d2h_h2d": False}
    given = {FusedAdam: {"defaults": {"lr": 0.0}}, HybridDeviceOptimizer: named}
    optimizer = kind([{"params": []}], **given.get(kind, {}))
    part: Any = SimpleNamespace(
        optimizer=optimizer,
        param_groups=optimizer.param_groups,
        config=SimpleNamespace(clip_grad=0.0),
        get_parameters=list,
        step_with_ready_grads=optimizer.step,
    )
    for made in (1, 2, 3):
        step(part, 1e-3, 1.0)
        create_state(part)
        counts = optimizer.param_groups if kind is FusedAdam else optimizer.state.values()
        assert [float(count["step"]) for count in counts] == [made]
        optimizer.load_state_dict(optimizer.state_dict())
        part.param_groups = optimizer.param_groups
    reset_moments(part)
    counts = optimizer.param_groups if kind is FusedAdam else optimizer.state.values()
    assert [float(count["step"]) for count in counts] == [0]


def test_a_reset_of_moments_keeps_the_weights_that_are_in_the_state() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([weight], {"lr": 0.0})
    optimizer.state[weight] = {name: torch.full((3,), 2.0) for name in ("exp_avg", "exp_avg_sq", "master_param")}
    reset_moments(SimpleNamespace(optimizer=optimizer))  # type: ignore[arg-type]
    assert {name: tensor.tolist() for name, tensor in optimizer.state[weight].items()} == {
        "exp_avg": [0.0] * 3,
        "exp_avg_sq": [0.0] * 3,
        "master_param": [2.0] * 3,
    }
