"""Policy losses of rows written as keys of the ``algorithm`` section."""

from __future__ import annotations

from rl_megatron.algorithms.losses import PolicyLoss
from rl_megatron.config.sections.algorithm import AlgorithmSection


def policy_loss(*, kl_coefficient: float = 0.0, max_new_tokens: int = 1, **row: object) -> PolicyLoss:
    section = AlgorithmSection.model_validate(row)
    return PolicyLoss(row=section, kl_coefficient=kl_coefficient, max_new_tokens=max_new_tokens)


def changed(loss: PolicyLoss, **row: object) -> PolicyLoss:
    """The same loss with other choices."""
    given = loss.row.model_dump(exclude_defaults=True) | row
    return policy_loss(kl_coefficient=loss.kl_coefficient, max_new_tokens=loss.max_new_tokens, **given)
