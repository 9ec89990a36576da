"""The state that a fresh optimizer is given so that a checkpoint can be loaded into it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rl_megatron.learner.megatron  # noqa: F401  before megatron is imported
from rl_megatron.learner.optimizer import create_state


class FusedAdam(torch.optim.Optimizer):
    """As TransformerEngine's 2.11: its state is known by name, and ``step`` is the group's."""

    def state_dict(self) -> dict[str, Any]:
        out = super().state_dict()
        known = ("exp_avg", "exp_avg_sq", "master_param")
        for state in out["state"].values():
            for name in state:
                if name not in known:
                    raise KeyError(name)
        return out


@pytest.mark.parametrize(("kind", "step"), [(FusedAdam, False), (torch.optim.AdamW, True)])
def test_it_is_what_the_optimizer_can_say_again(kind: Any, step: bool) -> None:
    optimizer = kind([torch.nn.Parameter(torch.ones(3))], {"lr": 0.0}) if kind is FusedAdam else kind([torch.ones(3)])
    create_state(SimpleNamespace(optimizer=optimizer))  # type: ignore[arg-type]
    (state,) = optimizer.state_dict()["state"].values()
    assert {name: tensor.tolist() for name, tensor in state.items() if name != "step"} == {
        "exp_avg": [0.0] * 3,
        "exp_avg_sq": [0.0] * 3,
    }
    assert ("step" in state) is step
