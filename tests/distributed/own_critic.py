"""A policy that is its own critic (``algorithm.critic.backbone=policy``) beside two models of its weights."""

from __future__ import annotations

from typing import Any

import torch

from rl_megatron.algorithms.losses import WithValues, loss_of
from rl_megatron.config.io import load_config
from rl_megatron.types import Batch


def own_critics_loss() -> WithValues:
    """PPO's, with a value loss of half its weight."""
    row = load_config("tiny_cpu", ["algorithm=ppo", "algorithm.critic.backbone=policy"]).algorithm
    loss = loss_of(row, kl_coefficient=0.0, max_new_tokens=1)
    assert isinstance(loss, WithValues)
    return loss


def gap_to_two_models(own: Any, policy: Any, critic: Any, batch: Batch) -> float:
    """How a model's gradient differs from the sum of the other two's, relative, at the tensor where it does most.

    All have the same weights, and value layers that are filled here. One rank calls it.
    """
    from rl_megatron.learner.model.value import ValueParameter
    from rl_megatron.learner.naming import global_parameters

    loss, found = own_critics_loss(), list[dict[str, torch.Tensor]]()
    for learner, its in ((own, loss), (policy, loss.policy), (critic, loss.value)):
        gradients = {}
        for name, parameter in global_parameters(learner._models):
            if isinstance(parameter, ValueParameter):  # in the output layer's place, or beside it
                name = name.rpartition(".")[2]
                parameter.data[:] = torch.linspace(-1, 1, parameter.numel()) if name == "weight" else 0.3
            gradients[name] = parameter
        counts = {"num_tokens": batch.num_tokens, "num_sequences": batch.num_sequences}
        learner.backward(batch.micro_batches[0], its, **counts)
        found.append({name: parameter.main_grad.clone() for name, parameter in gradients.items()})
        learner.drop()
    together, of_policy, of_critic = found
    assert together.keys() == of_policy.keys() | of_critic.keys()
    gaps = []
    for name, gradient in together.items():
        apart = [(1.0, of_policy.get(name)), (loss.coefficient, of_critic.get(name))]
        wanted = sum(weight * one for weight, one in apart if one is not None)
        gaps.append(float((gradient - wanted).norm() / gradient.norm()))
    return max(gaps)
